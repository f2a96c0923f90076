"""The learner's loop: take a batch, step, publish weights; checkpoint and evaluate at intervals.

    buffer ──groups──▶ [step] ──weights──▶ generators, beside the next step
                          └──▶ metrics.jsonl, samples, checkpoints

`LearnerService._train` is the loop of the whole system. Rank 0 runs it. The other ranks run `follow`, which joins every
collective that rank 0 commands.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from asyncgrpo import metrics
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import (
    AsyncGRPOError,
    CheckpointError,
    DataError,
    StalledError,
    TrainingError,
    WeightsError,
    WireError,
)
from asyncgrpo.learner.checkpoints import Checkpoints, RunState, check_owner, read_state
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.ranks import Inbox, RankCommand, Team
from asyncgrpo.learner.record import Recorder
from asyncgrpo.learner.report import PhaseClock
from asyncgrpo.metrics import LoopProgress
from asyncgrpo.recording.progress import counts_in_words
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.arena import Arenas, IsWritten
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.wire.codec import decode, unpack_batch
from asyncgrpo.wire.rollouts import Batch, NoMore
from asyncgrpo.wire.supervision import Steer

log = logging.getLogger(__name__)

GENERATORS_START_S = 1800.0
"""Timeout for the first generators. Large models take minutes to load in engine and learner."""
LAST_PUBLICATION_S = 10.0
"""Timeout for the last publication at the end of a run."""
SNAPSHOT_WITHIN_S = 60.0
"""Deadline for the buffer's part of the last checkpoint of a failed run."""
STALL_EVENT_EVERY_S = 30.0
STATUS = {"exhausted": "done", "draining": "drained", "failing": "failed"}
"""How a run ends, by `NoMore.why`."""


class _EndRequested(Exception):
    """The run was drained or failed, as its message says, while the learner waited for its first generators."""


@dataclass(frozen=True)
class _Saving:
    """A checkpoint in progress."""

    step: int
    started: float
    path: Future[Path]


@dataclass(eq=False)
class LearnerService:
    """Rank 0 of the learner: the loop, publications, checkpoints and the record."""

    config: Config
    learner: Learner
    team: Team
    inbox: Inbox
    publisher: Publisher
    recorder: Recorder
    _: KW_ONLY
    lineage: int
    """Number of this start; unique within the run."""
    run_dir: Path
    start_with: int
    """Generators to wait for before the first publication."""
    last_step: int | None
    """Number of optimizer steps of the run; None: until the buffer is exhausted."""

    def __post_init__(self) -> None:
        self.inbox.on_eval, self.inbox.while_waiting = self.recorder.evaluation, self._while_waiting
        self._checkpoints = Checkpoints(self.run_dir, self.config.run.keep_checkpoints)
        self.progress = LoopProgress()
        self._clock = PhaseClock()
        self._stall_reported_s = 0.0
        self._writer: Executor = ThreadPoolExecutor(1)
        self._saving: _Saving | None = None
        self._saved_step: int | None = None  # of the checkpoint that this start resumed from or wrote last
        self.version = PolicyVersion(self.lineage, 0)
        self._shares_within: dict[int, float] = {}  # of the last step
        self._updates = self.learner.steps  # updates contained in the weights of `version`
        self._offered: PolicyVersion | None = None  # newest version that the publisher accepted
        self._steer_requested = self._steer = Steer()  # newest operator request, and the one in effect

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.version.number

    def steer(self, requested: Steer) -> None:
        """Set an operator request. It takes effect between two steps or while waiting. Thread-safe."""
        self._steer_requested = requested

    @property
    def steered(self) -> int:
        """Revision of the `Steer` in effect. Thread-safe."""
        return self._steer.revision

    def run(self) -> str:
        """Train until the last step, the last prompt, a drain or a failure.

        Returns:
            `done`, `drained`, or `failed`: another component failed and reports the cause.
        Raises:
            AsyncGRPOError: training cannot continue. A last checkpoint was written if possible.
        """
        try:
            with metrics.waiting("generators"):
                self.publisher.wait_for(self._generators_to_await, GENERATORS_START_S, self._while_no_generator)
            status = self._train()
        except _EndRequested as request:
            status = str(request)
        except AsyncGRPOError as error:
            self._save_before_failing(error)
            raise
        return self._end(status)

    def _train(self) -> str:
        self._publish()
        self._evaluate()
        self._clock.lap()  # start-up time belongs to no step
        while self.last_step is None or self.step < self.last_step:
            self.progress.tick()
            self._apply_steering()
            if (why := self._train_batch()) is not None:
                return STATUS[why]
            self._publish()
            self._record_publications()
            if self.step % self.config.run.eval_every == 0:
                self._evaluate()
            self._try_finish_checkpoint()
            if self.step % self.config.run.checkpoint_every == 0:
                self._try_checkpoint()
        return "done"

    def _train_batch(self) -> str | None:
        """Take a batch, train it and record the step. Its memory is free again when the loop waits for the next one.

        Returns:
            The reason for which no batch is left; None: a step was trained.
        """
        with self._clock("wait_data"):
            message, payload = self.inbox.take(self.version, self._shares_within)
            groups = unpack_batch(message, payload) if isinstance(message, Batch) else []
        if isinstance(message, NoMore):
            self.recorder.last(message.counters)
            if message.why == "exhausted" and not self.step:
                raise DataError(f"no group of data.train could be trained: {_untrained(message.counters)}")
            return message.why
        with self._clock("forward_backward"):
            self.team.train(self.version, message, payload)
            report = self.learner.step(groups, self.version)
        started_from, self.version = self.version, PolicyVersion(self.version.lineage, self.version.number + 1)
        self._updates, self._shares_within = self.learner.steps, report.shares_within
        seconds = self._clock.lap(report.seconds)
        self.recorder.step(self.step, started_from, groups, report, message.counters, seconds)
        return None

    def resume(self, checkpoint: Path) -> None:
        """Restore step, totals and record from `checkpoint`. `Learner.load` restores model and optimizer."""
        state = read_state(checkpoint)
        self.version, self._saved_step = PolicyVersion(self.version.lineage, state.step), state.step
        self.recorder.resume(state.step, state.totals, state.record)

    def _apply_steering(self) -> None:
        """Apply the newest operator request."""
        new, old = self._steer_requested, self._steer
        if new.revision <= old.revision:
            return
        if new.lr is not None and new.lr != old.lr:
            self.team.broadcast(RankCommand(what="set_lr", lr=new.lr))
            self.learner.set_lr(new.lr)
            self.recorder.events.write("lr_changed", version=str(self.version), lr=new.lr)
        self.publisher.dismiss(new.leaving)
        if new.evaluations > old.evaluations:
            self._evaluate()
        if new.checkpoints > old.checkpoints:
            self._try_checkpoint()
        self._steer = new

    def _publish(self) -> None:
        """Free the slots of the last step and offer its weights. Generators receive them beside the next step."""
        self.inbox.trained(self.version)
        self._offer_weights()

    def _offer_weights(self) -> None:
        """Offer the newest weights once. Retried from `_while_waiting` while both arenas are in use."""
        if self._offered != self.version:
            with self._clock("publish"):
                if self.publisher.offer(self.version, self._fill_arena):
                    self._offered = self.version
                    self.team.broadcast(RankCommand(what="check"))  # every engine scores the same sequences
                    self.publisher.expect(self.version, self.learner.check.score())

    def _fill_arena(self, arenas: Arenas, slot: int) -> IsWritten | None:
        self.team.broadcast(RankCommand(what="snapshot", file=arenas.file, slot=slot))
        return self.learner.snapshot.write(arenas, slot)

    def _record_publications(self) -> None:
        """Record the publications that landed. Raises WeightsError if no publication can land."""
        for publication in self.publisher.reports():
            self.recorder.sync(publication)

    def _evaluate(self) -> None:
        if self.config.data.eval is not None:
            self.inbox.request_eval(self.step)

    def _try_checkpoint(self) -> None:
        """Write a checkpoint unless this step has one. If the disk refuses it, training continues and the previous one stays."""
        check_owner(self.run_dir, self.version.lineage)
        try:
            if not self._is_saved():
                self._checkpoint()
        except CheckpointError as error:
            self._report_refusal(error)

    def _save_before_failing(self, error: AsyncGRPOError) -> None:
        """Save the steps since the last checkpoint before the run fails. Failures here are logged, not raised."""
        if not self.step:
            return  # a checkpoint would only say that prompts which were tried are done
        if isinstance(error, WireError):
            log.error("no last checkpoint: the buffer, which knows the finished prompts, does not respond")
        elif self.learner.steps != self._updates:
            log.error("no last checkpoint: the weights are between two steps")
        else:
            self.inbox.give_up(str(error))
            try:
                self._last_checkpoint(SNAPSHOT_WITHIN_S)
            except AsyncGRPOError as failure:
                log.error("no last checkpoint: %s", failure)

    def _last_checkpoint(self, within_s: float = math.inf) -> None:
        """Write a checkpoint of the current step unless one exists. The buffer must not grant leases any more.

        The step counts even if no generator received its weights: no later group can be sampled from them.
        """
        check_owner(self.run_dir, self.version.lineage)
        if not self._is_saved():
            self.inbox.trained(self.version)
            self._checkpoint(within_s)
            self._finish_checkpoint(waits=True)

    def _is_saved(self) -> bool:
        """Return True if this start wrote or resumed from a checkpoint of this step. One in progress is completed first.

        Raises CheckpointError: its state cannot be read.
        """
        self._try_finish_checkpoint(waits=True)
        if self._saved_step != self.step:
            return False
        latest = self._checkpoints.latest()
        return latest is not None and read_state(latest).step == self.step

    def _checkpoint(self, within_s: float = math.inf) -> None:
        """Begin a checkpoint from a copy of the state.

        Args:
            within_s: deadline for the buffer's part, the finished prompts.
        Raises:
            CheckpointError: the disk refused.
        """
        snapshot = self.inbox.snapshot(within_s, self._report_waiting)
        state = RunState(
            step=self.step,
            lineage=self.version.lineage,
            prompts=snapshot.state,
            totals=self.recorder.last(snapshot.counters),
            record=self.recorder.state(),
        )
        with self._clock("checkpoint"), metrics.waiting("checkpoint"):
            started = time.monotonic()
            self.recorder.flush()
            finish = self._checkpoints.begin(state, self._fill)
            self._saving = _Saving(self.step, started, self._writer.submit(finish))
        self._finish_checkpoint()

    def _finish_checkpoint(self, *, waits: bool = False) -> None:
        """Report a complete checkpoint to the buffer, which may then delete the groups that it covers.

        Args:
            waits: True to wait for a checkpoint in progress.
        Raises:
            CheckpointError: the disk refused.
        """
        saving = self._saving
        if saving is None or not (waits or saving.path.done()):
            return
        self._saving = None
        with self._clock("checkpoint"), metrics.waiting("checkpoint"):
            path = saving.path.result()
            with suppress(WeightsError):  # the loop raises it again
                self._record_publications()  # a resume drops events after the checkpoint event
        self._saved_step, seconds = saving.step, time.monotonic() - saving.started
        self.inbox.saved(saving.step)
        metrics.checkpoint_seconds.observe(seconds)
        metrics.checkpoint_last_success_timestamp_seconds.set_to_current_time()
        self.recorder.events.write("checkpoint", step=saving.step, path=str(path), seconds=seconds)

    def _try_finish_checkpoint(self, *, waits: bool = False) -> None:
        """Finish a checkpoint. If the disk refused it, training continues and the previous checkpoint stays."""
        try:
            self._finish_checkpoint(waits=waits)
        except CheckpointError as error:
            self._report_refusal(error)

    def _report_refusal(self, error: CheckpointError) -> None:
        text = f"{error}; training continues"
        log.error("%s", text)
        self.recorder.events.write("warning", about="checkpoint", text=text)

    def _fill(self, folder: Path) -> Callable[[], None]:
        self.team.broadcast(RankCommand(what="save", folder=str(folder / "resume")))
        saved = self.learner.begin_save(str(folder / "resume"))
        self.team.broadcast(RankCommand(what="export", folder=str(folder / "hf")))
        write_export = self.learner.begin_export(str(folder / "hf"), self.config.model.path)

        def finish() -> None:
            saved()
            write_export()

        return finish

    def _end(self, status: str) -> str:
        """Run the last evaluation, write the last checkpoint and export, and close everything."""
        if status == "done" and self.config.data.eval is not None:
            self._evaluate()
            with self._clock("eval"):
                status = STATUS[self.inbox.last_evals()]
        self._last_checkpoint()
        if status == "done":
            final = str(self.run_dir / "final")
            self.team.broadcast(RankCommand(what="export", folder=final))
            self.learner.export(final, self.config.model.path)
        if status != "failed":
            deadline = time.monotonic() + LAST_PUBLICATION_S
            while not self.publisher.is_idle and time.monotonic() < deadline:
                time.sleep(0.01)
            with suppress(WeightsError):  # the run is over
                self._record_publications()
        self.team.broadcast(RankCommand(what="end"))  # not before, because these ranks send weights
        self.learner.snapshot.close()
        self.recorder.close()
        self.publisher.close()
        if status != "failed":
            with suppress(StalledError, WireError):  # groups arrived while the checkpoint was written
                self.recorder.last(self.inbox.snapshot(SNAPSHOT_WITHIN_S).counters)
            self.recorder.end(status, self.step)
        self.inbox.finish()
        return status

    def _while_waiting(self, what: str, seconds: float) -> None:
        """Serve everything else while the next batch is not ready: it may need groups of the newest weights."""
        self._report_waiting(what, seconds)
        self._apply_steering()
        self._offer_weights()
        self._record_publications()
        self._try_finish_checkpoint()

    def _generators_to_await(self) -> int:
        return min(self.start_with, self._steer_requested.generators or self.start_with)

    def _while_no_generator(self, what: str, seconds: float) -> None:
        """Poll the buffer for a drain while no `take` is pending."""
        self._report_waiting(what, seconds)
        snapshot = self.inbox.snapshot()
        if snapshot.draining:
            raise _EndRequested("failed" if snapshot.failing else "drained")

    def _report_waiting(self, what: str, seconds: float) -> None:
        self.progress.tick()
        self.team.send_heartbeat()
        if seconds - self._stall_reported_s >= STALL_EVENT_EVERY_S:
            self._stall_reported_s = seconds
            self.recorder.events.write("stall", what=what, seconds=seconds)
        elif seconds < self._stall_reported_s:
            self._stall_reported_s = 0.0


def _untrained(counters: Mapping[str, float]) -> str:
    """Return a phrase for messages: the groups that were not trained, by outcome."""
    totals = {name.removeprefix("groups_"): int(count) for name, count in counters.items() if count}
    return counts_in_words({name: totals[name] for name in totals if name.startswith(("dropped_", "filtered_zero"))})


def follow(learner: Learner, team: Team) -> None:
    """Run the commands of rank 0 on another rank until `end`."""
    while _follow_one(learner, *team.receive()):  # the memory of a batch is free again when the next one arrives
        pass
    learner.saver.wait()
    learner.snapshot.close()


def _follow_one(learner: Learner, command: RankCommand, payload: memoryview) -> bool:
    """Run one command. Return False if it is `end`."""
    match command.what:
        case "step":
            message, payload = decode([command.header, payload])
            assert isinstance(message, Batch) and command.version is not None
            with suppress(TrainingError):  # rank 0 raises the same error and commands what follows
                learner.step(unpack_batch(message, payload), command.version)
        case "snapshot":
            learner.snapshot.join(command.file, command.slot)
        case "check":
            learner.check.score()
        case "save":
            learner.begin_save(command.folder)
        case "export":
            learner.export(command.folder, learner.config.model.path)
        case "set_lr":
            learner.set_lr(command.lr)
    return command.what != "end"
