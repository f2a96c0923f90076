"""The learner's process: take a batch, step, publish, and now and then checkpoint and evaluate.

    buffer ──groups──▶ [step] ──weights──▶ generators, while the next step is trained
                          └──▶ metrics.jsonl, samples, checkpoints

`LearnerService._train` is the loop of the whole system on one screen. With several ranks, rank 0 runs it and the others
`follow`: they join every step, gather and save that rank 0 commands.
"""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from asyncgrpo import metrics
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import AsyncGRPOError, CheckpointError, TrainingError, WeightsError, WireError
from asyncgrpo.learner.checkpoints import Checkpoints, RunState, check_owner, read_state
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.ranks import Inbox, RankCommand, Taken, Team
from asyncgrpo.learner.record import Recorder
from asyncgrpo.metrics import LoopProgress
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.arena import IsWritten, Layout
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.wire.codec import decode, encode
from asyncgrpo.wire.groups import unpack_batch
from asyncgrpo.wire.rollouts import Batch
from asyncgrpo.wire.supervision import Steer

log = logging.getLogger(__name__)

GENERATORS_START_S = 1800.0
"""Large models take minutes to load on both sides."""


LAST_PUBLICATION_S = 10.0
"""How long the end of a run waits for the last publication to land."""
SNAPSHOT_WITHIN_S = 60.0
"""Deadline of the buffer's part in the last checkpoint of a run that is given up."""


class _AskedToEnd(Exception):
    """The run is to end while there is no generator, and none will come."""

    def __init__(self, status: str) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True)
class _Saving:
    """A checkpoint that is being written."""

    step: int
    started: float
    path: Future[Path]


class LearnerService:
    """Rank 0 of the learner, with everything that only it does."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        team: Team,
        inbox: Inbox,
        publisher: Publisher,
        recorder: Recorder,
        *,
        lineage: int,
        run_dir: Path,
        start_with: int,
        last_step: int | None,
    ) -> None:
        """
        Args:
            lineage: of this start of the run; never used before in this run.
            start_with: generators to wait for before the first publication.
            last_step: optimizer steps after which the run is done; None: when the buffer says so.
        """
        self._config = config
        self._learner = learner
        self._team = team
        self._inbox = inbox
        self._publisher = publisher
        self._recorder = recorder
        self._checkpoints = Checkpoints(run_dir, config.run.keep_checkpoints)
        self._run_dir = run_dir
        self._start_with = start_with
        self._last_step = last_step
        self.progress = LoopProgress()
        self._clock = Stopwatch()
        self._stall_told_s = 0.0
        self._evaluated = -1
        self._writer: Executor = ThreadPoolExecutor(1)
        self._saving: _Saving | None = None
        self.version = PolicyVersion(lineage, 0)
        self._shares_within: dict[int, float] = {}  # of the last step
        self._updates = learner.steps  # that are in the weights of `version`
        self._offered: PolicyVersion | None = None  # the newest one that the publisher has
        self._steer_asked = self._steer = Steer()  # what a person asked for: the newest, and what is in effect

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.version.number

    def steer(self, asked: Steer) -> None:
        """Do what a person asks for, between two steps or while waiting. May be called from any thread."""
        self._steer_asked = asked

    @property
    def steered(self) -> int:
        """The revision of the `Steer` in effect. May be read from any thread."""
        return self._steer.revision

    def run(self) -> str:
        """Train until the last step, the last prompt, or until the run is to end.

        Returns:
            `done`, `drained`, or `failed`: somebody else has given the run up, and says why.
        Raises:
            AsyncGRPOError: training cannot go on. What it has done is in a checkpoint, if it could be.
        """
        try:
            self._publisher.wait_for(self._start_with, GENERATORS_START_S, self._while_none_is_there)
            status = self._train()
        except _AskedToEnd as asked:
            status = asked.status
        except AsyncGRPOError as error:
            self._save_before_giving_up(error)
            raise
        return self._end(status)

    def _train(self) -> str:
        self._publish()
        self._evaluate()
        self._clock.lap()  # what was spent on starting belongs to no step
        while self._last_step is None or self.step < self._last_step:
            self.progress.tick()
            self._obey()
            taken = self._take()
            if taken.ended is not None:
                self._recorder.last(taken.counters)
                return {"exhausted": "done", "draining": "drained", "failing": "failed"}[taken.ended]
            with self._clock("forward_backward"):
                self._share(taken)
                report = self._learner.step(taken.groups, self.version)
            started_from, self.version = self.version, PolicyVersion(self.version.lineage, self.version.number + 1)
            self._updates, self._shares_within = self._learner.steps, report.shares_within
            try:
                self._publish()
            finally:  # the step is made, whether or not its weights can be offered
                self._recorder.step(
                    self.step, started_from, taken.groups, report, taken.counters, self._clock.lap(report.seconds)
                )
            self._record_publications()
            if self.step % self._config.run.eval_every == 0:
                self._evaluate()
            self._try_finish_checkpoint()
            if self.step % self._config.run.checkpoint_every == 0:
                self._try_checkpoint()
        return "done"

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def resume(self, checkpoint: Path) -> None:
        """Go on from `checkpoint`: the model and its optimizer are loaded already (`Learner.load`)."""
        state = read_state(checkpoint)
        self.version = PolicyVersion(self.version.lineage, state.step)
        self._recorder.resume(state.step, state.totals, state.record)

    def _take(self) -> Taken:
        with self._clock("wait_data"):
            taken = self._inbox.take(
                self.step,
                self.version,
                self._shares_within,
                on_eval=self._recorder.evaluation,
                while_waiting=self._while_waiting,
            )
        return taken

    def _obey(self) -> None:
        """Bring what a person asked for into effect."""
        asked, before = self._steer_asked, self._steer
        if asked.revision <= before.revision:
            return
        if asked.lr is not None and asked.lr != before.lr:
            self._team.tell(RankCommand(what="set_lr", lr=asked.lr))
            self._learner.set_lr(asked.lr)
            self._recorder.events.write("lr_changed", version=str(self.version), lr=asked.lr)
        self._publisher.dismiss(asked.leaving)
        if asked.evaluations > before.evaluations:
            self._evaluate()
        if asked.checkpoints > before.checkpoints:
            self._try_checkpoint()
        self._steer = asked

    def _share(self, taken: Taken) -> None:
        if self._team.world > 1:
            assert taken.message is not None
            header, payload = encode(taken.message, taken.payload)
            self._team.tell(
                RankCommand(what="step", version=self.version, header=bytes(header), payload=bytes(payload))
            )

    def _publish(self) -> None:
        """Free the slots of the last step, and offer its weights to the generators, which take them while this goes on."""
        self._inbox.trained(self.version)
        self._offer_weights()

    def _offer_weights(self) -> None:
        """Offer the newest weights, unless that is done. If both arenas are being read or filled it is tried again later."""
        if self._offered != self.version and not self._learner.snapshot.is_behind:
            with self._clock("publish"):
                if self._publisher.offer(self.version, self._fill_arena):
                    self._offered = self.version
                    self._check_weights()

    def _check_weights(self) -> None:
        """Score the sequences that every engine scores under these weights too."""
        self._team.tell(RankCommand(what="check"))
        self._publisher.expect(self.version, self._learner.check.score())

    def _fill_arena(self, layout: Layout, flat: Tensor) -> IsWritten | None:
        file = self._publisher.file
        self._team.tell(RankCommand(what="snapshot", file=file, start=int(flat.storage_offset())))
        return self._learner.snapshot.write(flat, file)

    def _record_publications(self) -> None:
        """Write down what has landed. Raises WeightsError if nothing can."""
        for publication in self._publisher.reports():
            self._recorder.sync(publication)

    def _evaluate(self) -> None:
        if self._config.data.eval is not None and self._evaluated != self.step:
            self._evaluated = self.step
            self._inbox.request_eval(self.step)

    def _try_checkpoint(self) -> None:
        """A disk that refuses one does not end training: the last one stays, and the next may fit."""
        check_owner(self._run_dir, self.version.lineage)
        try:
            self._checkpoint()
        except CheckpointError as error:
            log.error("%s; training goes on", error)

    def _save_before_giving_up(self, error: AsyncGRPOError) -> None:
        """What was trained since the last checkpoint is not lost with the run. Whatever goes wrong here is only said."""
        if isinstance(error, WireError):
            log.error("no last checkpoint: which prompts are done is known to the buffer alone, and it is silent")
        elif self._learner.steps != self._updates:
            log.error("no last checkpoint: the weights are between two steps")
        else:
            self._inbox.give_up(str(error))
            try:
                self._last_checkpoint(SNAPSHOT_WITHIN_S)
            except AsyncGRPOError as trouble:
                log.error("no last checkpoint: %s", trouble)

    def _last_checkpoint(self, within_s: float = math.inf) -> None:
        """Write a checkpoint of the step that the weights are of, unless there is one. Nothing may be leased any more.

        The step counts even if its weights reached nobody: no group will ever be of them.
        """
        check_owner(self._run_dir, self.version.lineage)
        self._try_finish_checkpoint(waits=True)
        latest = self._checkpoints.latest()
        if latest is None or read_state(latest).step != self.step:
            self._inbox.trained(self.version)
            self._checkpoint(within_s)
            self._finish_checkpoint(waits=True)

    def _checkpoint(self, within_s: float = math.inf) -> None:
        """Begin to write one, from a copy. One that is being written is waited for.

        Args:
            within_s: for the buffer to say which prompts are done.
        Raises:
            CheckpointError: the disk refused.
        """
        self._try_finish_checkpoint(waits=True)
        snapshot = self._inbox.snapshot(within_s)
        state = RunState(
            step=self.step,
            lineage=self.version.lineage,
            prompts=snapshot.state,
            totals=self._recorder.last(snapshot.counters),
            record=self._recorder.state(),
        )
        with self._clock("checkpoint"), metrics.waiting("checkpoint"):
            started = time.monotonic()
            self._recorder.flush()
            finish = self._checkpoints.begin(state, self._fill)
            self._saving = _Saving(self.step, started, self._writer.submit(finish))
        self._finish_checkpoint()

    def _finish_checkpoint(self, *, waits: bool = False) -> None:
        """Tell the buffer of a checkpoint that was written: it may then forget the groups that it covers.

        Args:
            waits: for one that is still being written.
        Raises:
            CheckpointError: the disk refused.
        """
        saving = self._saving
        if saving is None or not (waits or saving.path.done()):
            return
        self._saving = None
        with self._clock("checkpoint"), metrics.waiting("checkpoint"):
            path = saving.path.result()
            with suppress(WeightsError):  # the loop will meet it
                self._record_publications()  # before the event behind which a resume forgets
        seconds = time.monotonic() - saving.started
        self._inbox.saved(saving.step)
        metrics.checkpoint_seconds.observe(seconds)
        metrics.checkpoint_last_success_timestamp_seconds.set_to_current_time()
        self._recorder.events.write("checkpoint", step=saving.step, path=str(path), seconds=seconds)

    def _try_finish_checkpoint(self, *, waits: bool = False) -> None:
        """A disk that refuses one does not end training: the last one stays, and the next may fit."""
        try:
            self._finish_checkpoint(waits=waits)
        except CheckpointError as error:
            log.error("%s; training goes on", error)

    def _fill(self, folder: Path) -> Callable[[], None]:
        self._team.tell(RankCommand(what="save", folder=str(folder / "resume")))
        saved = self._learner.begin_save(str(folder / "resume"))
        self._team.tell(RankCommand(what="export", folder=str(folder / "hf")))
        write_export = self._learner.begin_export(str(folder / "hf"), self._config.model.path)

        def finish() -> None:
            saved()
            write_export()

        return finish

    def _export(self, folder: Path) -> None:
        self._team.tell(RankCommand(what="export", folder=str(folder)))
        self._learner.export(str(folder), self._config.model.path)

    def _end(self, status: str) -> str:
        """Final evaluation, checkpoint and export."""
        if status == "done" and self._config.data.eval is not None:
            self._evaluate()
            with self._clock("eval"):
                self._inbox.last_evals(self._recorder.evaluation, self._while_waiting)
        self._last_checkpoint()
        if status == "done":
            self._export(self._run_dir / "final")
        self._team.tell(RankCommand(what="end"))
        if status != "failed":
            self._await_publications()
            self._recorder.end(status, self.step)
        self._learner.snapshot.close()
        self._recorder.close()
        self._publisher.close()
        self._inbox.finish()
        return status

    def _await_publications(self) -> None:
        """Wait a little for what is under way, so that the record says of every publication whether it landed."""
        deadline = time.monotonic() + LAST_PUBLICATION_S
        while not self._publisher.is_idle and time.monotonic() < deadline:
            time.sleep(0.01)
        with suppress(WeightsError):  # the run is over
            self._record_publications()

    # -- while it waits ------------------------------------------------------------------------------------------------

    def _while_waiting(self, what: str, seconds: float) -> None:
        """The next step may need groups of the newest weights."""
        self._tell_waiting(what, seconds)
        self._obey()
        self._offer_weights()
        self._record_publications()
        self._try_finish_checkpoint()

    def _while_none_is_there(self, what: str, seconds: float) -> None:
        """Only where no completion of the buffer is awaited: it asks the buffer itself."""
        self._tell_waiting(what, seconds)
        completion = self._inbox.snapshot()
        if completion.draining:
            raise _AskedToEnd("failed" if completion.failing else "drained")

    def _tell_waiting(self, what: str, seconds: float) -> None:
        self.progress.tick()
        self._team.tell_to_wait()
        if seconds - self._stall_told_s >= 30.0:
            self._stall_told_s = seconds
            self._recorder.events.write("stall", what=what, seconds=seconds)
        elif seconds < self._stall_told_s:
            self._stall_told_s = 0.0


def follow(learner: Learner, team: Team) -> None:
    """The other ranks: do what rank 0 commands, until it ends."""
    while (command := team.hear()).what != "end":
        match command.what:
            case "step":
                message, payload = decode([command.header, command.payload])
                assert isinstance(message, Batch) and command.version is not None
                with suppress(TrainingError):  # rank 0 meets the same, and says what is left to do
                    learner.step(unpack_batch(message, payload), command.version)
            case "snapshot":
                learner.snapshot.join(command.file, command.start)
            case "check":
                learner.check.score()
            case "save":
                learner.begin_save(command.folder)
            case "export":
                learner.export(command.folder, learner.config.model.path)
            case "set_lr":
                learner.set_lr(command.lr)
            case "wait":
                pass
    learner.saver.wait()
    learner.snapshot.close()


class Stopwatch:
    """Where the time of a step went, by activity, seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._spent: dict[str, float] = {}
        self._lap_started = clock()

    @contextmanager
    def __call__(self, activity: str):
        started = self._now()
        try:
            yield
        finally:
            self._spent[activity] = self._spent.get(activity, 0.0) + self._now() - started

    def lap(self, parts: dict[str, float] | None = None) -> dict[str, float]:
        """Seconds by activity since the last lap; what no activity covers is `other`.

        Args:
            parts: activities inside `forward_backward` that count for themselves, `optimizer` for example.
        """
        now = self._now()
        spent, self._spent = self._spent, {}
        total, self._lap_started = now - self._lap_started, now
        for name in ("optimizer",):
            inside = (parts or {}).get(name, 0.0)
            spent[name] = inside
            spent["forward_backward"] = spent.get("forward_backward", 0.0) - inside
        spent["other"] = max(0.0, total - sum(spent.values()))
        return spent
