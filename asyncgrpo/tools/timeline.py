"""The timeline of a run: the steps that its journal lets us train again, in order, with their groups.

A crash undoes the steps after the newest checkpoint, and the next start makes others in their place. The timeline has the
steps on the path to the last step of the last start. Each start on the path is a *leg*: it had its own processes and its
own configuration, and every leg after the first began with a checkpoint.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncgrpo.config.load import recorded
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import ConfigError, JournalError
from asyncgrpo.journal.format import BatchIssued, Delivered, RunStarted
from asyncgrpo.journal.history import Found, History, is_on, read_run, surviving_path
from asyncgrpo.learner.checkpoints import read_state
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire.rollouts import Batch, Deliver


@dataclass(frozen=True)
class PlannedStep:
    """One step, and where its groups are in the journal."""

    number: int
    """Optimizer steps done, this one included."""
    version: PolicyVersion
    """The policy version that it started from."""
    groups: tuple[Found, ...]
    """In the order of the batch."""


@dataclass(frozen=True)
class Leg:
    """The steps of one start of the run that are on the path."""

    lineage: int
    config: Config
    steps: tuple[PlannedStep, ...]
    """At least one."""
    is_from_start: bool
    """Whether its first step was the first that the processes of that start made."""


@dataclass(frozen=True)
class Timeline:
    """Everything that a replay needs of a run, except the weights that it starts from."""

    run: Path
    history: History
    legs: tuple[Leg, ...]
    """At least one."""
    checkpoint: Path | None
    """The checkpoint that the first leg begins with. None: the model's folder."""

    @property
    def steps(self) -> Iterator[PlannedStep]:
        """The steps of all legs, in order."""
        for leg in self.legs:
            yield from leg.steps

    def batch(self, step: PlannedStep) -> tuple[Batch, bytes]:
        """The batch of a step as the learner received it, without the counters. Raises JournalError."""
        found = [self._group(step, group) for group in step.groups]
        message = Batch(
            step=step.number - 1,
            groups=tuple(deliver for deliver, _ in found),
            payload_sizes=tuple(len(payload) for _, payload in found),
            counters={},
            evals=(),
            epoch=0,
        )
        return message, b"".join(payload for _, payload in found)

    def _group(self, step: PlannedStep, found: Found) -> tuple[Deliver, bytes]:
        group = self.history.group(found)
        if group is None:
            raise JournalError(
                f"step {step.number} cannot be trained again: a group of it in segment {found.segment} of the journal "
                f"of {self.run} cannot be read"
            )
        return group


def read_timeline(run: Path, *, from_step: int = 0, to_step: int | None = None) -> Timeline:
    """Read the timeline of the run in this folder, which may be over, killed or still going.

    Args:
        from_step: begin with the checkpoint of this step. 0: with the model's folder.
        to_step: the last step. None: the last of the run.
    Raises:
        JournalError: there is no journal, or it lacks one of these steps or one of their groups.
    """
    history = read_run(run)
    starts, last = history.starts, max(history.starts)
    manifests = [found.record for found in history.found if isinstance(found.record, BatchIssued)]
    newest = max((m.step for m in manifests if m.version.lineage == last), default=0)
    path = surviving_path(starts, PolicyVersion(last, newest) if newest else starts[last].parent)
    standing = sorted((m for m in manifests if is_on(path, PolicyVersion(m.version.lineage, m.step))), key=_step)
    if not standing:
        raise JournalError(f"the journal of {run} holds no step that could be trained again")
    wanted = [m for m in standing if m.step > from_step and (to_step is None or m.step <= to_step)]
    if not wanted:
        raise JournalError(
            f"the journal of {run} holds steps up to {standing[-1].step}; --from-step and --to-step leave none of them"
        )
    _check_every_step(run, wanted, from_step)
    groups, checkpoints = _groups(history), _checkpoints(run, path)
    if from_step and from_step not in checkpoints:
        there = ", ".join(map(str, sorted(checkpoints))) or "none"
        raise JournalError(
            f"{run} has no checkpoint of step {from_step} on the path to its last step; there are: {there}"
        )
    _check_every_group(run, wanted, groups, checkpoints)
    return Timeline(run, history, tuple(_legs(run, starts, wanted, groups)), checkpoints.get(from_step))


def _step(manifest: BatchIssued) -> int:
    return manifest.step


def _groups(history: History) -> dict[str, Found]:
    """The delivered groups by lease id."""
    return {found.record.lease_id: found for found in history.found if isinstance(found.record, Delivered)}


def _check_every_step(run: Path, wanted: list[BatchIssued], from_step: int) -> None:
    for expected, manifest in enumerate(wanted, start=from_step + 1):
        if manifest.step > expected:
            raise JournalError(
                f"the journal of {run} does not say what step {expected} was given; `{_audit(run)}` says what is "
                "missing, and --from-step begins with a later checkpoint"
            )
        if manifest.step < expected:
            raise JournalError(f"the journal of {run} has two manifests of step {manifest.step}: see `{_audit(run)}`")


def _audit(run: Path) -> str:
    return shlex.join(["asyncgrpo", "audit", str(run)])


def _check_every_group(
    run: Path, wanted: list[BatchIssued], groups: dict[str, Found], checkpoints: dict[int, Path]
) -> None:
    unknown = [(m.step, lease_id) for m in wanted for lease_id in m.lease_ids if lease_id not in groups]
    if unknown:
        step, lease_id = unknown[0]
        raise JournalError(
            f"step {step} cannot be trained again: its group {lease_id} is not in the journal of {run}; "
            f"`{_audit(run)}` says whether it is damaged"
        )
    gone = [(m.step, lease_id) for m in wanted for lease_id in m.lease_ids if not groups[lease_id].body_bytes]
    if gone:
        (step, lease_id), last = gone[0], gone[-1][0]
        later = min((number for number in checkpoints if last <= number < wanted[-1].step), default=None)
        raise JournalError(
            f"step {step} cannot be trained again: its group {lease_id} was taken out of the journal of {run} once a "
            "checkpoint held the step; a run with buffer.keep_journal=true keeps its groups"
            + (f"; --from-step {later} begins after the last missing group" if later is not None else "")
        )


def _checkpoints(run: Path, path: dict[int, int]) -> dict[int, Path]:
    """The checkpoints on the path, by step."""
    found = {}
    for file in run.glob("checkpoints/step_*/state.json"):
        state = read_state(file.parent)
        if is_on(path, PolicyVersion(state.lineage, state.step)):
            found[state.step] = file.parent
    return found


def _legs(
    run: Path, starts: dict[int, RunStarted], wanted: list[BatchIssued], groups: dict[str, Found]
) -> Iterator[Leg]:
    for lineage in dict.fromkeys(manifest.version.lineage for manifest in wanted):
        steps = tuple(
            PlannedStep(m.step, m.version, tuple(groups[lease_id] for lease_id in m.lease_ids))
            for m in wanted
            if m.version.lineage == lineage
        )
        parent = starts[lineage].parent
        began_with = 0 if parent is None else parent.number
        yield Leg(lineage, _config(run, starts[lineage]), steps, steps[0].number == began_with + 1)


def _config(run: Path, run_started: RunStarted) -> Config:
    if not run_started.config:
        raise JournalError(f"the journal of {run} is of an older release, which did not keep the configuration in it")
    try:
        return recorded(run_started.config, f"the journal of {run}")
    except ConfigError as error:
        raise JournalError(f"the configuration is of another release: {error}") from error
