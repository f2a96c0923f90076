"""Trains the steps of a run again from its journal: the same learner and batches, without generators.

    journal ──Batch──▶ [Learner.step] ──▶ metrics.jsonl of the replay, compared with that of the run

A crash undoes the steps after the newest checkpoint, and the next start replaces them. The timeline has the steps on the path
to the last step of the last start. Each start on the path is a leg. It has its own processes and configuration, and every leg
after the first begins with the checkpoint of the previous one, like the starts of the run.
"""

import multiprocessing
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from asyncgrpo.cluster.folder import values_of
from asyncgrpo.config.explain import algorithm_in_words
from asyncgrpo.config.load import recorded, to_yaml, with_overrides
from asyncgrpo.config.schema import Config
from asyncgrpo.data.images import Images
from asyncgrpo.errors import AsyncGRPOError, CheckpointError, ConfigError, JournalError, TrainingError
from asyncgrpo.host import refused_as
from asyncgrpo.journal.history import BatchIssued, Delivered, Found, History, is_on, read_run, surviving_path
from asyncgrpo.learner.checkpoints import read_state
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.ranks import RankCommand, Team
from asyncgrpo.learner.report import PhaseClock, step_fields
from asyncgrpo.learner.service import follow
from asyncgrpo.learner.snapshot import POLL_EVERY_S
from asyncgrpo.recording.events import Event, EventLog, as_written, read_events
from asyncgrpo.recording.loggers import flatten
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.arena import Arenas, Layout, Stream
from asyncgrpo.weights.group import serve_store, visit_store
from asyncgrpo.weights.publication import digest_of
from asyncgrpo.wire.codec import unpack_batch
from asyncgrpo.wire.rollouts import Batch, Deliver

# -- the timeline ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedStep:
    """One step, and the places of its groups in the journal."""

    number: int
    """Optimizer steps, this one included."""
    version: PolicyVersion
    """Policy version that it started from."""
    groups: tuple[Found, ...]
    """Groups in the order of the batch."""


@dataclass(frozen=True)
class Leg:
    """The steps of one start on the path."""

    lineage: int
    config: Config
    steps: tuple[PlannedStep, ...]
    """At least one."""
    is_from_start: bool
    """True if its first step was the first one of that start's processes."""


@dataclass(frozen=True)
class Timeline:
    """All inputs of a replay except the initial weights."""

    run: Path
    history: History
    legs: tuple[Leg, ...]
    """At least one."""
    checkpoint: Path | None
    """Checkpoint at the start of the first leg; None: the model's folder."""

    @property
    def steps(self) -> Iterator[PlannedStep]:
        for leg in self.legs:
            yield from leg.steps

    def batch(self, step: PlannedStep) -> tuple[Batch, memoryview]:
        """Return the batch of a step as the learner received it, without counters. Raises JournalError."""
        found = [self._group(step, group) for group in step.groups]
        groups, sizes = tuple(deliver for deliver, _ in found), tuple(len(payload) for _, payload in found)
        message = Batch(version=step.version, groups=groups, payload_sizes=sizes, counters={}, evals=())
        return message, memoryview(bytearray().join(payload for _, payload in found))

    def _group(self, step: PlannedStep, found: Found) -> tuple[Deliver, bytes]:
        group = self.history.group(found)
        if group is None:
            place = f"segment {found.segment} of the journal of {self.run}"
            raise JournalError(f"step {step.number} cannot be trained again: a group of it in {place} cannot be read")
        return group


def read_timeline(run: Path, *, from_step: int = 0, to_step: int | None = None) -> Timeline:
    """Read the timeline of a finished, killed or active run.

    Args:
        from_step: begin with the checkpoint of this step; 0: with the model's folder.
        to_step: last step; None: the last step of the run.
    Raises:
        JournalError: the journal is missing, or lacks one of these steps or groups.
        ConfigError: the journal is of another release.
    """
    history = read_run(run)
    starts, last = history.starts, max(history.starts)
    manifests = [found.record for found in history.found if isinstance(found.record, BatchIssued)]
    newest = max((m.step for m in manifests if m.version.lineage == last), default=0)
    path = surviving_path(starts, PolicyVersion(last, newest) if newest else starts[last].parent)
    standing = [m for m in manifests if is_on(path, PolicyVersion(m.version.lineage, m.step))]
    standing.sort(key=attrgetter("step"))
    if not standing:
        raise JournalError(f"the journal of {run} holds no step to train again")
    wanted = [m for m in standing if m.step > from_step and (to_step is None or m.step <= to_step)]
    if not wanted:
        last = standing[-1].step
        raise JournalError(f"the journal of {run} holds steps up to {last}; --from-step and --to-step leave none")
    groups = {found.record.lease_id: found for found in history.found if isinstance(found.record, Delivered)}
    checkpoints = _checkpoints(run, path)
    if from_step and from_step not in checkpoints:
        there = ", ".join(map(str, sorted(checkpoints))) or "none"
        what = f"checkpoint of step {from_step} on the path to its last step"
        raise JournalError(f"{run} has no {what}; there are: {there}")
    _check(run, wanted, groups, from_step)
    return Timeline(run, history, tuple(_legs(run, history, wanted, groups)), checkpoints.get(from_step))


def _check(run: Path, wanted: list[BatchIssued], groups: dict[str, Found], from_step: int) -> None:
    """Raise JournalError if a step or a group is missing."""
    later = "--from-step begins with a later checkpoint"
    for expected, manifest in enumerate(wanted, start=from_step + 1):
        if manifest.step != expected:
            why = f"the journal of {run} has no manifest of step {expected}, or two of step {manifest.step}"
            raise JournalError(f"{why}; `asyncgrpo audit {run}` lists what is missing; {later}")
        for lease_id in manifest.lease_ids:
            if lease_id not in groups or not groups[lease_id].body_bytes:
                why = f"step {expected} cannot be trained again: its group {lease_id} is not in the journal of {run}"
                kept = "a group is deleted once a checkpoint holds its step, unless buffer.keep_journal is true"
                raise JournalError(f"{why}; {kept}; {later}")


def _checkpoints(run: Path, path: dict[int, int]) -> dict[int, Path]:
    """Return the checkpoints on the path, by step."""
    found = {}
    for file in run.glob("checkpoints/step_*/state.json"):
        state = read_state(file.parent)
        if is_on(path, PolicyVersion(state.lineage, state.step)):
            found[state.step] = file.parent
    return found


def _legs(run: Path, history: History, wanted: list[BatchIssued], groups: dict[str, Found]) -> Iterator[Leg]:
    for lineage, manifests in groupby(wanted, lambda manifest: manifest.version.lineage):
        start = history.starts[lineage]
        steps = tuple(PlannedStep(m.step, m.version, tuple(map(groups.__getitem__, m.lease_ids))) for m in manifests)
        began_with = 0 if start.parent is None else start.parent.number
        config = recorded(start.config, f"the journal of {run}")
        yield Leg(lineage, config, steps, steps[0].number == began_with + 1)


# -- the comparison of a step ------------------------------------------------------------------------------------------

COUNTED = (
    *("tokens", "tokens_generated", "tokens_dropped", "tokens_filtered", "prompts_done"),
    *("dropped", "filtered", "discarded"),
)
"""Fields counted by the buffer. A replay copies them, because it has no buffer."""
_NOT_OF_THE_STEP = {"event", "time", "seconds", *COUNTED}


@dataclass(frozen=True)
class Pair:
    """One step as recorded and as replayed."""

    step: int
    recorded: Event | None
    """None if the run ended during this step."""
    replayed: Event

    @cached_property
    def differences(self) -> list[str]:
        """Names of differing fields, in the order of the event. Fields on one side only are ignored."""
        if self.recorded is None:
            return []
        ours, theirs = _fields(self.replayed), _fields(self.recorded)
        encode = msgspec.json.encode  # equal text means bitwise equal numbers
        return [name for name in ours if name in theirs and encode(ours[name]) != encode(theirs[name])]

    def values(self, field: str) -> tuple[Any, Any]:
        """Return a field as recorded and as replayed; None if missing."""
        recorded = _fields(self.recorded).get(field) if self.recorded is not None else None
        return recorded, _fields(self.replayed).get(field)


def _fields(event: Event) -> dict[str, Any]:
    return flatten({name: value for name, value in event.items() if name not in _NOT_OF_THE_STEP}, ".")


def means(pairs: Sequence[Pair], field: str) -> tuple[float | None, float | None]:
    """Return the mean of a field as recorded and as replayed, each over the steps that have it."""
    sides = zip(*(pair.values(field) for pair in pairs), strict=True)
    recorded, replayed = ([value for value in side if value is not None] for side in sides)
    return fmean(recorded) if recorded else None, fmean(replayed) if replayed else None


# -- configuration -----------------------------------------------------------------------------------------------------

_FIXED = {"algorithm.group_size", "algorithm.min_completions", "algorithm.filter_zero_signal"}
"""Keys of the algorithm that decided which groups were trained."""


def replay_config(recorded: Config, overrides: Sequence[str], *, algorithm: str | None = None) -> Config:
    """Return the configuration of a replay.

    Args:
        algorithm: name of a preset that is applied before the overrides.
    Raises:
        ConfigError: invalid, or changes a key that affected generation.
    """
    if algorithm is not None:  # presets set this key, but the run has filtered its groups already
        overrides = [f"algorithm.filter_zero_signal={recorded.algorithm.filter_zero_signal}", *overrides]
    config = with_overrides(recorded, overrides, algorithm=algorithm)
    before, after = values_of(recorded), values_of(config)
    for key in (key for key in after if after[key] != before[key]):
        if key in _FIXED or not key.startswith(("algorithm.", "learner.")):
            raise ConfigError(f"a replay cannot change {key}: the groups in the journal were made with it")
    if config.algorithm.advantage == "remax" != recorded.algorithm.advantage:
        why = "it needs a greedy completion of each prompt, which the journal does not have"
        raise ConfigError(f"a replay cannot change algorithm.advantage to remax: {why}")
    return config


# -- learner ranks without Ray -----------------------------------------------------------------------------------------

RANK_TIMEOUT = timedelta(minutes=10)
"""Timeout for a rank that loads a model, computes a step, or died before it joined."""


@contextmanager
def learner_ranks(
    config: Config, checkpoint: str | None, *, has_stepped: bool = False, run: Path | None = None
) -> Iterator[tuple[Learner, Team]]:
    """Run the ranks of a learner inside the block. Yields the learner of rank 0 and its team.

    Args:
        checkpoint: folder of `Learner.save` to load; None: begin with the model's folder.
        has_stepped: True if the processes of the run had made a step before.
        run: folder of the run, which has the images of its prompts.
    Raises:
        ConfigError: the machine has too few GPUs, or the learner cannot be built.
        CheckpointError: the checkpoint cannot be loaded.
        TrainingError: another rank's process ended.
    """
    world = config.learner.ranks
    _device(config, world - 1)  # raises here if there are too few GPUs
    join = partial(_join, config, checkpoint, has_stepped, run)
    store = serve_store("127.0.0.1", RANK_TIMEOUT.total_seconds())
    spawn = multiprocessing.get_context("spawn")
    others = [
        spawn.Process(target=_follow, args=(join, rank, world, store.port), daemon=True) for rank in range(1, world)
    ]
    for process in others:
        process.start()
    try:
        learner, team = join(0, store), Team(0, world)
        yield learner, team
        team.broadcast(RankCommand(what="end"))
        for process in others:
            process.join()
    except RuntimeError as error:  # a collective fails when another rank is gone
        codes = {rank: process.exitcode for rank, process in enumerate(others, start=1) if process.exitcode}
        if codes:
            raise TrainingError(f"a rank of the learner ended: {codes} (rank: exit code)") from error
        raise
    finally:
        for process in others:
            process.kill()
        if dist.is_initialized():
            dist.destroy_process_group()


def _follow(join: Callable[[int, dist.Store], Learner], rank: int, world: int, port: int) -> None:
    """Run another rank, until rank 0 commands its end or disconnects."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = visit_store("127.0.0.1", port, RANK_TIMEOUT.total_seconds())
    with suppress(AsyncGRPOError):  # rank 0 raises and reports the same error
        follow(join(rank, store), Team(rank, world))
        dist.destroy_process_group()


def _join(
    config: Config, checkpoint: str | None, has_stepped: bool, run: Path | None, rank: int, store: dist.Store
) -> Learner:
    transformers_logging.disable_progress_bar()
    device = _device(config, rank)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as in a run, because sums depend on the number of threads
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=config.learner.ranks, timeout=RANK_TIMEOUT)
    images, world = Images.of(config, run), config.learner.ranks
    learner = Learner(config, rank=rank, world=world, device=device, has_stepped=has_stepped, images=images)
    if checkpoint is not None:
        learner.load(checkpoint)
    return learner


def _device(config: Config, rank: int) -> torch.device:
    wish = config.learner.device
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.cuda.device_count() <= rank:
        needs = f"learner.ranks={config.learner.ranks} with learner.device={wish} needs as many GPUs"
        instead = "learner.device=cpu would give nearly the same numbers, not equal ones"
        raise ConfigError(f"{needs}, and this machine has {torch.cuda.device_count()}; {instead}")
    return torch.device("cuda", rank)


# -- the replay --------------------------------------------------------------------------------------------------------


@dataclass
class Replayed:
    """The result of a replay."""

    pairs: list[Pair] = field(default_factory=list)
    other_weights: list[str] = field(default_factory=list)
    """Versions whose weights differ from the published ones."""
    same_weights: list[str] = field(default_factory=list)
    """Versions whose weights are equal to the published ones."""

    @property
    def num_compared(self) -> int:
        """Steps that the run recorded."""
        return sum(pair.recorded is not None for pair in self.pairs)

    @property
    def is_equal(self) -> bool:
        """True if at least one step was compared, and all compared steps and weights are bitwise equal."""
        differ = any(pair.differences for pair in self.pairs)
        return self.num_compared > 0 and not differ and not self.other_weights


class Replay:
    """One replay into one new folder."""

    def __init__(self, timeline: Timeline, configs: Sequence[Config], folder: Path, overrides: Sequence[str]) -> None:
        """
        Args:
            configs: of each leg, with the changes of the replay.
            folder: of the replay; must not exist.
            overrides: the changes, for the `start` event.
        Raises:
            CheckpointError: the folder cannot be created.
        """
        with refused_as(CheckpointError, f"cannot create the folder {folder}"):
            folder.mkdir(0o700, parents=True)
            (folder / "config.yaml").write_text(to_yaml(configs[-1]), encoding="utf-8")
        self._timeline, self._configs, self._folder = timeline, configs, folder
        self._overrides = list(overrides)
        self._events = EventLog(folder / "metrics.jsonl")
        path = timeline.run / "metrics.jsonl"
        recorded = list(read_events(path)) if path.exists() else []
        self._steps = {event["version"]: event for event in recorded if event["event"] == "step"}
        changes = [event for event in recorded if event["event"] == "lr_changed"]
        self._rates = [] if any(o.startswith("learner.lr=") for o in overrides) else changes
        self._digests = {
            event["version"]: event.get("weights_digest") for event in recorded if event["event"] == "sync"
        }
        self._result = Replayed()

    def run(self, on_step: Callable[[Pair], None] = lambda pair: None) -> Replayed:
        """Train every step of the timeline again.

        Raises:
            JournalError: a group cannot be read.
            ConfigError, CheckpointError, TrainingError: of the learner.
        """
        steps = list(self._timeline.steps)
        first = steps[0].version
        begins = {"lineage": first.lineage, "version": str(first), "step": first.number, "steps": steps[-1].number}
        about = {"sizes": algorithm_in_words(self._configs[0].algorithm), "overrides": self._overrides}
        self._events.write("start", run=f"{self._timeline.run.name}, replayed", **begins, **about)
        try:
            self._train(on_step)
        except BaseException:
            if not self._result.pairs:  # no step was trained
                shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._events.write("end", status="done", step=steps[-1].number)
        return self._result

    def _train(self, on_step: Callable[[Pair], None]) -> None:
        checkpoint = self._timeline.checkpoint
        begin = str(checkpoint / "resume") if checkpoint is not None else None
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".legs-") as legs:
            for number, (leg, config) in enumerate(zip(self._timeline.legs, self._configs, strict=True)):
                save = f"{legs}/{number}" if number + 1 < len(self._timeline.legs) else None
                self._leg(leg, config, begin, save, on_step)
                shutil.rmtree(f"{legs}/{number - 1}", ignore_errors=True)
                begin = save

    def _leg(
        self, leg: Leg, config: Config, begin: str | None, save: str | None, on_step: Callable[[Pair], None]
    ) -> None:
        run = self._timeline.run
        with learner_ranks(config, begin, has_stepped=not leg.is_from_start, run=run) as (learner, team):
            self._compare_weights(leg.steps[0].version, learner, team, config)
            clock = PhaseClock()
            for planned in leg.steps:
                lr = lr_at(planned.version, self._rates, config.learner.lr)
                if lr != learner.config.learner.lr:
                    team.broadcast(RankCommand(what="set_lr", lr=lr))
                    learner.set_lr(lr)
                pair = self._step(planned, learner, team, clock)
                self._result.pairs.append(pair)
                on_step(pair)
            self._compare_weights(PolicyVersion(leg.lineage, leg.steps[-1].number), learner, team, config)
            if save is not None:
                team.broadcast(RankCommand(what="save", folder=save))
                learner.save(save)

    def _step(self, planned: PlannedStep, learner: Learner, team: Team, clock: PhaseClock) -> Pair:
        with clock("wait_data"):
            message, payload = self._timeline.batch(planned)
            groups = unpack_batch(message, payload)
        with clock("forward_backward"):
            team.train(planned.version, message, payload)
            report = learner.step(groups, planned.version)
        version = f"{planned.version.lineage}.{planned.number}"
        recorded = self._steps.get(version)
        fields = {name: recorded[name] for name in COUNTED if name in recorded} if recorded is not None else {}
        fields |= step_fields(groups, planned.version, report, learner.config.reward.success)
        fields |= {"step": planned.number, "version": version, "seconds": clock.lap(report.seconds)}
        return Pair(planned.number, recorded, as_written(self._events.write("step", **fields)))

    def _compare_weights(self, version: PolicyVersion, learner: Learner, team: Team, config: Config) -> None:
        """Compare the learner's weights with the published ones of this version, if any."""
        published = self._digests.get(str(version))
        if published is None:
            return
        ours = _digest(learner, team)
        if ours == published:
            self._result.same_weights.append(str(version))
        elif not self._result.pairs:
            place = self._timeline.checkpoint or config.model.path
            why = f"{place} does not hold the weights that the run published as {version}"
            digests = f"their digest is {ours}, that of the run {published}"
            raise CheckpointError(f"{why}, so no step can be compared ({digests})")
        else:
            self._result.other_weights.append(str(version))


def _digest(learner: Learner, team: Team) -> str:
    """Return the digest that a publication of the learner's weights has."""
    layout = Layout(learner.layout())
    arenas = Arenas.create(layout, 1)
    try:
        team.broadcast(RankCommand(what="snapshot", file=arenas.file))
        is_written = learner.snapshot.write(arenas, 0)
        while is_written is not None and not is_written():
            time.sleep(POLL_EVERY_S)
        return digest_of(Stream([(0, layout.num_bytes)]).digests(layout, arenas.arena(layout)))
    finally:
        arenas.close()


def lr_at(version: PolicyVersion, changes: Sequence[Event], configured: float) -> float:
    """Return the peak learning rate of the step from `version`, which an operator may have changed (`lr_changed`)."""
    rates = [(PolicyVersion.parse(event["version"]), event["lr"]) for event in changes]
    of_start = [(at, lr) for at, lr in rates if at.lineage == version.lineage and at.number <= version.number]
    return max(of_start, default=(version, configured))[1]
