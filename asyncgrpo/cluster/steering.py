"""Commands to a running run: checked and carried out by the driver, which sends them to buffer and learner.

    admin API ──command──▶ Steering ──scale──▶ Fleet
       (own threads)          │  └────Steer───▶ buffer, learner-0      sent until their heartbeats name its revision
                              └──event──▶ metrics.jsonl

`Steer` holds the complete requested state and is idempotent, so a lost or late one does no harm, and a restarted buffer and
learner get it too. The requested state lasts as long as the run's driver. The next start begins with its configuration again
and prints the differences.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from asyncgrpo.cluster.folder import RunFolder, keep_changed
from asyncgrpo.cluster.heartbeat import Watch
from asyncgrpo.cluster.processes import Core, Fleet
from asyncgrpo.config.explain import counted
from asyncgrpo.config.load import with_overrides
from asyncgrpo.config.schema import Config
from asyncgrpo.control.client import (
    CHANGEABLE,
    ChangeSettings,
    Command,
    DrainRun,
    Evaluate,
    Pause,
    ProcessStatus,
    Resume,
    RunState,
    Scale,
    Status,
    WriteCheckpoint,
)
from asyncgrpo.errors import CommandRefused, ConfigError
from asyncgrpo.recording.advice import LOOK_S, Advice, Adviser, Autopilot
from asyncgrpo.recording.events import EventLog
from asyncgrpo.wire.supervision import Steer

log = logging.getLogger(__name__)

CARRIED_OUT_WITHIN_S = 30.0
"""Deadline for the driver to accept a command. The driver is busy for seconds only while it starts or ends processes."""


class _Asked(NamedTuple):
    """A command that waits for the driver."""

    command: Command
    by: str
    reply: Future[str]


class Steering:
    """Applies commands to one run. `status` and `carry_out` are thread-safe; the rest runs in the driver's thread."""

    def __init__(
        self,
        config: Config,
        given: Config,
        folder: RunFolder,
        events: EventLog,
        fleet: Fleet,
        watch: Watch,
        *,
        drain: Callable[[], None],
        gpus: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            config: resolved configuration of the run's processes.
            given: the same as the user gave it, with relative paths for example; written to the run's folder.
            drain: starts to drain the run.
        """
        self.config = config
        """Includes the changes since the start, so that a restarted buffer and learner get them."""
        self._given = given
        self.steps: int | None = None
        """The last step of the run; None: unlimited, or not known yet."""
        self._folder, self._events, self._fleet, self._watch = folder, events, fleet, watch
        self._drain, self._clock = drain, clock
        self._queue: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._steer = Steer()
        self._leaving_since = 0  # the revision that listed the leaving generators
        self._core: Core | None = None
        self._lineage = folder.lineage  # read from a file, so not at each update
        self._started = time.time()
        self._is_draining = False
        self._step = 0
        self._adviser = Adviser(events, config, gpus)
        self._autopilot = (
            Autopilot(config.generators.min, config.generators.most) if config.generators.autopilot else None
        )
        self._advice: tuple[Advice, ...] = ()
        self._advised_s = clock()
        self._status = self._snapshot(())

    # -- from any thread -----------------------------------------------------------------------------------------------

    def status(self) -> Status:
        return self._status

    def carry_out(self, command: Command) -> str:
        """Carry out a command in the driver. Raises CommandRefused."""
        asked = _Asked(command, "person", Future())
        self._queue.put(asked)
        try:
            return asked.reply.result(CARRIED_OUT_WITHIN_S)
        except FutureTimeout:
            raise CommandRefused(f"timed out: the driver was busy for {CARRIED_OUT_WITHIN_S:.0f} s") from None

    # -- from the driver's thread --------------------------------------------------------------------------------------

    def reconcile(self, core: Core | None, others: Iterable[ProcessStatus] = ()) -> None:
        """Carry out the commands, send buffer and learner what is requested, and update the status, a few times a second.

        Args:
            core: the buffer and learner that train; None: they are starting.
            others: statuses of the processes that are neither in the core nor in the fleet.
        """
        if core is not self._core:  # one-time requests to a lost learner are not repeated to the next one
            self._core, self._lineage, self._advice = core, self._folder.lineage, ()
            self._change(checkpoints=0, evaluations=0)
        replies = []
        while not self._queue.empty():
            replies.append(self._carry_out_and_record(self._queue.get()))
        self._release_leaving()
        if core is not None:
            self._step = core.steps_done or core.first_step
            for name in ("buffer", "learner-0"):
                if self._watch.heartbeat(name, core.incarnation).steered < self._steer.revision:
                    self._watch.send(name, self._steer)
            self._advise()
        self._status = self._snapshot(others)
        for reply in replies:
            reply()  # now the status has what the command changed

    def draining(self) -> None:
        self._is_draining, self._advice = True, ()

    def has_trained(self) -> None:
        """Write the final advice, computed over the newest steps, for the run's summary."""
        self._adviser.config = self.config
        self._adviser.look(time.time(), is_last=True)

    def end(self) -> None:
        """Refuse the commands that still wait: the run is over."""
        self._status = msgspec.structs.replace(self._status, state="ended")
        while not self._queue.empty():
            self._queue.get().reply.set_exception(CommandRefused("the run is over"))

    def _release_leaving(self) -> None:
        """Release leaving generators: the learner stops publishing to them first, so that no broadcast breaks, then they exit."""
        if self._fleet.leaving != self._steer.leaving:
            self._change(leaving=self._fleet.leaving, ending=())
            self._leaving_since = self._steer.revision
        if self._core is None or self._steer.ending == self._steer.leaving:
            return
        if self._watch.heartbeat("learner-0", self._core.incarnation).steered >= self._leaving_since:
            self._change(ending=self._steer.leaving)

    # -- advice --------------------------------------------------------------------------------------------------------

    def _advise(self) -> None:
        """Compute the advice every `LOOK_S` from the first heartbeat of the learner on, and let the autopilot act on it."""
        now, has_begun = self._clock(), self._core is not None and self._core.steps_done is not None
        if now - self._advised_s < LOOK_S or self._steer.is_paused or self._is_draining or not has_begun:
            return
        self._advised_s, self._adviser.config = now, self.config
        self._advice = self._adviser.look(time.time())
        wanted = self._autopilot.decide(self._advice, self._fleet.wanted, now) if self._autopilot is not None else None
        if wanted is not None:
            self._queue.put(_Asked(Scale(generators=wanted), "autopilot", Future()))

    # -- one command ---------------------------------------------------------------------------------------------------

    def _carry_out_and_record(self, asked: _Asked) -> Callable[[], None]:
        """Carry out a command and record it. Returns a function that sends the reply."""
        try:
            reply = self._carry_out(asked.command)
        except CommandRefused as refusal:
            self._record(asked, str(refusal), refused=True)
            return partial(asked.reply.set_exception, refusal)
        self._record(asked, reply, refused=False)
        self._advice, self._advised_s = (), self._clock()  # the advice held for the earlier conditions
        return partial(asked.reply.set_result, reply)

    def _carry_out(self, command: Command) -> str:
        """Carry out a command and return the reply. Raises CommandRefused."""
        if self._is_draining:
            raise CommandRefused("the run is ending: it finishes its step and writes a checkpoint")
        match command:
            case Pause():
                return self._pause(is_paused=True)
            case Resume():
                return self._pause(is_paused=False)
            case DrainRun():
                self._drain()
                return "draining: the run finishes its step, writes a checkpoint and ends"
            case WriteCheckpoint():
                self._ask_learner("a checkpoint")
                self._change(checkpoints=self._steer.checkpoints + 1)
                return "a checkpoint is written after the current step"
            case Evaluate():
                self._ask_learner("an evaluation")
                if self.config.data.eval is None:
                    raise CommandRefused("the run has no held-out prompts: data.eval is not set")
                self._change(evaluations=self._steer.evaluations + 1)
                when = "pause" if self._steer.is_paused else "current step"
                return f"an evaluation begins after the {when}, unless its step had one"
            case Scale(generators=count):
                return self._scale(count)
            case ChangeSettings(settings=settings):
                return self._set(settings)

    def _pause(self, *, is_paused: bool) -> str:
        if self._steer.is_paused == is_paused:
            raise CommandRefused("the run is paused already" if is_paused else "the run is not paused")
        self._change(is_paused=is_paused)
        return "paused: groups in flight are finished and kept" if is_paused else "resumed"

    def _ask_learner(self, what: str) -> None:
        if self._core is None or self._core.steps_done is None:
            raise CommandRefused(f"the learner is starting; retry {what} once it trains")

    def _scale(self, count: int) -> str:
        generators, now = self.config.generators, self._fleet.wanted
        if not generators.min <= count <= generators.most:
            allowed = f"generators.min ({generators.min}) and generators.max ({generators.most})"
            raise CommandRefused(f"{count} generators are outside {allowed}")
        if self.config.cluster.share_gpu:
            raise CommandRefused("learner and generator share one GPU (cluster.share_gpu), so there is one generator")
        self._configure([f"generators.count={count}"])  # may raise, before anything has changed
        self._fleet.scale(count)
        self._change(generators=count)
        if count == now:
            return f"{counted(count, 'generator')} already"
        if count > now:
            return f"{count} generators: {count - now} more, from the next publication on"
        return f"{counted(count, 'generator')}: {now - count} fewer, once their groups are delivered"

    def _set(self, settings: dict[str, float | int]) -> str:
        buffer = self.config.buffer
        if "buffer.max_lag" in settings and buffer.max_lag == "auto":
            raise CommandRefused("buffer.max_lag is auto, so the run chooses the bound; auto_lag.max limits it")
        if "buffer.max_lag" in settings and buffer.policy == "train":
            raise CommandRefused("buffer.policy=train has one bound for the whole run")
        before = {key: attrgetter(key)(self.config) for key in settings}
        self._configure([f"{key}={value}" for key, value in settings.items()])
        # A field of `Steer` is named as its setting, without the section.
        self._change(**{key.rpartition(".")[2]: attrgetter(key)(self.config) for key in settings})
        return ", ".join(f"{key} {before[key]} -> {attrgetter(key)(self.config)}" for key in settings)

    # -- the requested state -------------------------------------------------------------------------------------------

    def _configure(self, overrides: list[str]) -> None:
        """Change the configuration and write it to the run's folder. Raises CommandRefused."""
        try:
            self.config = with_overrides(self.config, overrides)
            self._given = with_overrides(self._given, overrides)
        except ConfigError as error:
            raise CommandRefused(str(error).removeprefix("command line: ")) from None
        keep_changed(self._given, self._folder)

    def _change(self, **fields: Any) -> None:
        self._steer = msgspec.structs.replace(self._steer, revision=self._steer.revision + 1, **fields)

    def _record(self, asked: _Asked, reply: str, *, refused: bool) -> None:
        text = in_words(asked.command)
        log.info("%s (%s): %s", text, asked.by, reply)
        self._events.write("command", by=asked.by, command=text, reply=reply, refused=refused)

    # -- status --------------------------------------------------------------------------------------------------------

    def _snapshot(self, others: Iterable[ProcessStatus]) -> Status:
        core, fleet = self._core, self._fleet
        state: RunState = "starting"
        if self._is_draining:
            state = "draining"
        elif self._steer.is_paused:
            state = "paused"
        elif core is not None and (fleet.is_up or (core.steps_done or 0) > core.first_step):
            state = "training"
        processes = (*self._of_core(), *fleet.processes(), *others)
        starting = [process.name for process in processes if process.state == "starting"]
        return Status(
            run=self._folder.path.name,
            folder=str(self._folder.path),
            state=state,
            started=self._started,
            lineage=self._lineage,
            step=self._step,
            steps=self.steps,
            generators_wanted=fleet.wanted,
            generators_min=self.config.generators.min,
            generators_max=self.config.generators.most,
            settings={key: attrgetter(key)(self.config) for key in CHANGEABLE},
            processes=processes,
            waits_for=", ".join(starting) if state == "starting" else "",
            advice=self._advice if state == "training" else (),
        )

    def _of_core(self) -> Iterator[ProcessStatus]:
        lineage = self._core.incarnation if self._core is not None else ""
        for name in ("buffer", *(f"learner-{rank}" for rank in range(self.config.learner.ranks))):
            yield self._watch.status(name, lineage)


def in_words(command: Command) -> str:
    """Return a command as typed on the command line, without the run."""
    match command:
        case Scale(generators=count):
            return f"scale generators {count}"
        case ChangeSettings(settings=settings):
            return "set " + " ".join(f"{key}={value}" for key, value in settings.items())
    return str(command.__struct_config__.tag)
