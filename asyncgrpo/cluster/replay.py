"""Train the steps of a run again from its journal: the same learner, the same batches, no generator.

    journal ──Batch──▶ [Learner.step] ──▶ metrics.jsonl of the replay, held against that of the run

Each leg of the timeline has processes of its own and begins with what the one before it saved, as the starts of the run
did, because a checkpoint does not hold all that a process knows (`learner/guard.py`).
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncgrpo.cluster.ranks import learner_ranks
from asyncgrpo.cluster.timeline import Leg, PlannedStep, Timeline
from asyncgrpo.config import Config
from asyncgrpo.config_help import algorithm_in_words
from asyncgrpo.config_loading import to_yaml
from asyncgrpo.errors import CheckpointError
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.record import step_fields
from asyncgrpo.learner.service import Stopwatch
from asyncgrpo.learner.team import Order, Team
from asyncgrpo.recording.comparison import COUNTED, Pair
from asyncgrpo.recording.events import EventLog, as_written, read_events
from asyncgrpo.types import WeightVersion
from asyncgrpo.weights.layout import digest_of
from asyncgrpo.wire.codec import encode, unpack_batch


@dataclass
class Replayed:
    """What came of it."""

    pairs: list[Pair] = field(default_factory=list)
    other_weights: list[str] = field(default_factory=list)
    """Versions whose weights do not have the digest that the run published."""
    same_weights: list[str] = field(default_factory=list)
    """Versions whose weights do."""

    @property
    def num_compared(self) -> int:
        """Steps that the run recorded."""
        return sum(pair.recorded is not None for pair in self.pairs)

    @property
    def is_equal(self) -> bool:
        """Whether steps could be compared, and these and all weights that could be are equal to the bit."""
        differ = any(pair.differences for pair in self.pairs)
        return self.num_compared > 0 and not differ and not self.other_weights


class Replay:
    """One replay into one new folder."""

    def __init__(self, timeline: Timeline, configs: Sequence[Config], folder: Path, overrides: Sequence[str]) -> None:
        """
        Args:
            configs: of each leg, with what is to be other than in the run.
            folder: does not exist yet.
            overrides: what is other, in words.
        Raises:
            CheckpointError: the folder cannot be made.
        """
        try:
            folder.mkdir(parents=True)
            (folder / "config.yaml").write_text(to_yaml(configs[-1]), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"the folder {folder} cannot be made: {error.strerror}") from error
        self._timeline, self._configs, self._folder = timeline, configs, folder
        self._overrides = list(overrides)
        self._events = EventLog(folder / "metrics.jsonl")
        path = timeline.run / "metrics.jsonl"
        recorded = list(read_events(path)) if path.exists() else []
        self._steps = {event["version"]: event for event in recorded if event["event"] == "step"}
        self._digests = {event["version"]: event.get("digest") for event in recorded if event["event"] == "sync"}
        self._result = Replayed()

    def run(self, on_step: Callable[[Pair], None] = lambda pair: None) -> Replayed:
        """Train every step of the timeline again.

        Args:
            on_step: called after each step.
        Raises:
            JournalError: a group cannot be read.
            ConfigError, CheckpointError, TrainingError: what the learner says.
        """
        steps = list(self._timeline.steps)
        first = steps[0].version
        self._events.write(
            "start",
            run=f"{self._timeline.run.name}, replayed",
            lineage=first.lineage,
            version=str(first),
            step=first.version,
            steps=steps[-1].number,
            sizes=algorithm_in_words(self._configs[0].algorithm),
            overrides=self._overrides,
        )
        try:
            self._train(on_step)
        except BaseException:
            if not self._result.pairs:  # nothing to look at
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
        with learner_ranks(config, begin) as (learner, team):
            self._compare_weights(leg.steps[0].version, learner, team, config)
            clock = Stopwatch()
            for planned in leg.steps:
                pair = self._step(planned, learner, team, clock)
                self._result.pairs.append(pair)
                on_step(pair)
            self._compare_weights(WeightVersion(leg.lineage, leg.steps[-1].number), learner, team, config)
            if save is not None:
                team.tell(Order(what="save", folder=save))
                learner.save(save)

    def _step(self, planned: PlannedStep, learner: Learner, team: Team, clock: Stopwatch) -> Pair:
        with clock("wait_data"):
            message, payload = self._timeline.batch(planned)
            groups = unpack_batch(message, memoryview(payload))
        with clock("forward_backward"):
            if team.world > 1:
                header, body = encode(message, payload)
                team.tell(Order(what="step", version=planned.version, header=bytes(header), payload=bytes(body)))
            report = learner.step(groups, planned.version)
        version = f"{planned.version.lineage}.{planned.number}"
        recorded = self._steps.get(version)
        fields = {name: recorded[name] for name in COUNTED if name in recorded} if recorded is not None else {}
        fields |= step_fields(groups, planned.version, report)
        fields |= {"step": planned.number, "version": version, "seconds": clock.lap(report.seconds)}
        return Pair(planned.number, recorded, as_written(self._events.write("step", **fields)))

    def _compare_weights(self, version: WeightVersion, learner: Learner, team: Team, config: Config) -> None:
        """Hold the learner's weights against those that the run published under this version, if it did."""
        published = self._digests.get(str(version))
        if published is None:
            return
        team.tell(Order(what="gather_weights"))
        ours = digest_of(learner.sent.layout(), learner.sent.weights(), config.weights.bucket_mb * 2**20)
        if ours == published:
            self._result.same_weights.append(str(version))
        elif not self._result.pairs:
            place = self._timeline.checkpoint or config.model.path
            raise CheckpointError(
                f"{place} does not hold the weights that the run published as {version}, so nothing could be compared "
                f"(their digest is {ours}, that of the run {published})"
            )
        else:
            self._result.other_weights.append(str(version))
