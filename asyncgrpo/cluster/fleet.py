"""The fleet of generators of a run: start, watch, restart and scale them, and send them the endpoints of a new core.

A generator that is scaled away delivers its groups before it leaves.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import ray

from asyncgrpo import liveness, metrics
from asyncgrpo.cluster.core import Budget, Core
from asyncgrpo.cluster.heartbeat import Watch
from asyncgrpo.cluster.nodes import environment_to_share
from asyncgrpo.cluster.ray_session import NO_PLACE_S, Actor, Placement, Reference, has_ended, result
from asyncgrpo.cluster.wiring import GeneratorActor, Setup, incarnation_of
from asyncgrpo.control.client import ProcessState, ProcessStatus
from asyncgrpo.errors import AsyncGRPOError, ProcessLost
from asyncgrpo.recording.events import EventLog
from asyncgrpo.wire.supervision import EndpointsChanged, Heartbeat

log = logging.getLogger(__name__)

NOWHERE = EndpointsChanged(buffer_endpoint="", weights_endpoint="")
"""Sent to generators while no core runs."""


@dataclass
class _Generator:
    """One incarnation of a generator. Ray ends an actor without a handle, so this keeps it."""

    actor: Actor
    incarnation: str
    address: Reference
    """Result of `start`: the address of its metrics. None once `start` has ended."""
    running: Reference
    """Result of `run`, when it ends."""
    requested_s: float
    """Time of the request to Ray."""
    failure: str = ""
    """Reason why `start` failed; empty: it did not."""
    is_late: bool = False
    """True once a late start was logged."""
    is_leaving: bool = False
    """True once it was asked to leave."""
    missed_s: float | None = None
    """Time since which another process has lost it; None: it is not lost."""


class Fleet:
    """All generators of a run."""

    def __init__(
        self,
        setup: Setup,
        placement: Placement,
        watch: Watch,
        events: EventLog,
        *,
        on_address: Callable[[str, tuple[str, int] | None], None],
    ) -> None:
        """
        Args:
            on_address: called with a name and the address of its metrics; None when it has left.
        """
        self._setup = setup
        self._placement = placement
        self._watch = watch
        self._events = events
        self._on_address = on_address
        self._running: dict[int, _Generator] = {}
        self._due: dict[int, float] = {}
        self._ended_by: dict[int, str] = {}
        """Reason why the previous incarnation ended, for generators that are due."""
        self._starts: Counter[int] = Counter()
        self._failed_starts: Counter[int] = Counter()
        self._budgets: dict[int, Budget] = {}
        self._core: Core | None = None
        self._endpoints = NOWHERE
        self._may_start = True
        metrics.restarts_spent_ratio.labels(of="generator").set_function(self._restarts_spent)
        self.scale(setup.config.generators.count)

    def _restarts_spent(self) -> float:
        """Return the largest share of its restarts that a generator has used. Called by a metrics scrape."""
        return max(budget.spent for budget in tuple(self._budgets.values()))

    def scale(self, count: int) -> None:
        """Run `count` generators, those with the lowest numbers."""
        self.wanted = count
        metrics.generators_expected.set(count)
        self._due = {index: due for index, due in self._due.items() if index < count}
        for index in range(count):
            self._budgets.setdefault(index, Budget(f"generator-{index}", self._setup.config.generators.restarts))
            if index not in self._running:
                self._due.setdefault(index, 0.0)
        for index, generator in self._running.items():
            generator.is_leaving |= index >= count

    @property
    def leaving(self) -> tuple[str, ...]:
        """Generators that leave, as `name-incarnation`. One that is wanted again leaves before it restarts."""
        return tuple(f"generator-{i}-{g.incarnation}" for i, g in sorted(self._running.items()) if g.is_leaving)

    def processes(self) -> Iterator[ProcessStatus]:
        """Yield the status of every generator that runs or is wanted."""
        for index in sorted({*self._running, *range(self.wanted)}):
            name, generator = f"generator-{index}", self._running.get(index)
            restarts = self._budgets[index].count
            if generator is None:
                yield ProcessStatus(name=name, state="starting", restarts=restarts)
            else:
                has_begun = self._watch.has_begun(name, generator.incarnation)
                state: ProcessState = "leaving" if generator.is_leaving else "working" if has_begun else "starting"
                yield process_status(name, state, restarts, self._watch.heartbeat(name, generator.incarnation))

    @property
    def is_up(self) -> bool:
        """True if at least one engine serves."""
        return any(self._watch.has_begun(f"generator-{i}", g.incarnation) for i, g in self._running.items())

    @property
    def is_whole(self) -> bool:
        """True if every engine serves the current core."""
        return (
            self._core is not None
            and len(self._running) == self.wanted
            and all(
                self._watch.has_begun(name := f"generator-{index}", generator.incarnation)
                and self._watch.buffer_endpoint(name, generator.incarnation) == self._endpoints.buffer_endpoint
                for index, generator in self._running.items()
            )
        )

    def may_lose(self, name: str) -> bool:
        """True if the run survives the end of this generator: its engine serves, or its start may fail once more."""
        index = int(name.rpartition("-")[2])
        generator = self._running.get(index)
        has_served = generator is not None and self._watch.has_begun(name, generator.incarnation)
        return has_served or self._failed_starts[index] + 1 < liveness.FAILED_STARTS

    def work_for(self, core: Core, endpoints: EndpointsChanged) -> None:
        """Connect all generators to `core`.

        Args:
            endpoints: of the core.
        """
        self._core, self._endpoints, self._may_start = core, endpoints, True

    def leave(self) -> None:
        """Start no generator until the next `work_for`: the core is gone."""
        self._core, self._endpoints, self._may_start = None, NOWHERE, False

    def reconcile(self, *, may_restart: bool = True) -> None:
        """End generators that hang, start those that are due, and send the others the endpoints of the core.

        Before the first core they start beside it, since loading an engine takes longer than starting the core.

        Raises:
            AsyncGRPOError: a generator has ended too often.
        """
        missing = self._watch.missing()
        for index, generator in list(self._running.items()):
            name = f"generator-{index}"
            self._follow_start(name, generator)
            if reason := self._unhealthy_reason(name, generator, missing.get(f"{name}-{generator.incarnation}")):
                self._ended(index, generator, reason, may_restart)
            elif self._core is not None:
                known = self._watch.buffer_endpoint(name, generator.incarnation)
                if known not in (None, self._endpoints.buffer_endpoint):
                    self._watch.send(name, self._endpoints)
        if self._may_start and may_restart:
            for index in [i for i, due in self._due.items() if time.monotonic() >= due]:
                del self._due[index]
                self._start(index)

    def shut_down(self, timeout_s: float) -> None:
        """Wait for the generators that serve to exit. One that still loads its engine holds no group."""
        references = [
            generator.running
            for index, generator in self._running.items()
            if self._watch.has_begun(f"generator-{index}", generator.incarnation)
        ]
        if references:
            ray.wait(references, num_returns=len(references), timeout=timeout_s)

    def _follow_start(self, name: str, generator: _Generator) -> None:
        """Record the address of its metrics, or the reason why it failed. Log once if Ray has no resources for it."""
        if generator.address is None:
            return
        if has_ended(generator.address):
            try:
                self._on_address(name, result(generator.address, name))
            except AsyncGRPOError as error:
                generator.failure = _in_a_line(error, name)
            generator.address = None
        elif not generator.is_late and time.monotonic() - generator.requested_s > NO_PLACE_S:
            generator.is_late = True
            log.warning("%s; the others go on", self._placement.waits(name, NO_PLACE_S))

    def _unhealthy_reason(self, name: str, generator: _Generator, witness: str | None) -> str | None:
        """Return the reason to replace a generator; None if it is healthy.

        Args:
            witness: the process that has lost it; None: none has.
        """
        if generator.is_leaving and not self._watch.has_begun(name, generator.incarnation):
            return "it is no longer wanted"
        if generator.failure:
            return generator.failure
        if generator.address is None and has_ended(generator.running):  # after a failed start `run` has no result
            try:
                result(generator.running, name)
            except AsyncGRPOError as error:
                return _in_a_line(error, name)
            return "it exited"
        limit_s = self._setup.config.cluster.silent_timeout_s
        unhealthy_reason = partial(self._watch.unhealthy_reason, name, generator.incarnation, still_s=limit_s)
        if reason := unhealthy_reason(silent_s=limit_s):
            return reason
        if witness is None:
            generator.missed_s = None
            return None
        if reason := unhealthy_reason(silent_s=liveness.SUSPECT_S):
            return f"{reason}, and {witness} has lost it too"
        now_s = time.monotonic()
        generator.missed_s = now_s if generator.missed_s is None else generator.missed_s
        if now_s - generator.missed_s > limit_s:  # one of its threads hangs while another sends heartbeats
            return f"{witness} has had no contact with it for {now_s - generator.missed_s:.0f} s"
        return None

    def _start(self, index: int) -> None:
        options, start = self._placement.generator(index), self._starts[index]
        self._starts[index] += 1
        environment = environment_to_share(self._setup.config.reward.judge.api_key_env)
        actor = ray.remote(GeneratorActor).options(**options).remote(environment, self._setup, index, start)
        address = actor.start.remote(self._endpoints)
        incarnation, running = incarnation_of(self._setup, start), actor.run.remote()
        self._running[index] = _Generator(actor, incarnation, address, running, time.monotonic())
        if (reason := self._ended_by.pop(index, None)) is not None:
            self._events.write("restart", actor=f"generator-{index}", reason=reason, count=self._budgets[index].count)
            metrics.actor_restarts_total.labels(actor="generator").inc()

    def _left(self, index: int) -> None:
        """Release a generator that has left. It restarts only if it is wanted again."""
        log.info("generator-%d has left", index)
        self._on_address(f"generator-{index}", None)
        self._placement.release_generator(index)
        if index < self.wanted:
            self._due[index] = 0.0

    def _ended(self, index: int, generator: _Generator, reason: str, may_restart: bool) -> None:
        name = f"generator-{index}"
        has_served = self._watch.has_begun(name, generator.incarnation)
        del self._running[index]
        ray.kill(generator.actor)
        self._watch.forget(name)
        if self._core is not None:
            self._core.generator_lost(name, generator.incarnation)
        if generator.is_leaving:
            self._left(index)
            return
        if not may_restart:
            return
        self._failed_starts[index] = 0 if has_served else self._failed_starts[index] + 1
        if self._failed_starts[index] >= liveness.FAILED_STARTS:
            raise AsyncGRPOError(
                f"{name} ended {liveness.FAILED_STARTS} times before its engine served anything; the last time: {reason}"
            )
        count = self._budgets[index].spend(reason)
        log.warning("%s ended (%s); restart %d", name, reason, count)
        self._ended_by[index] = reason
        self._due[index] = time.monotonic() + liveness.BACKOFF_S[self._failed_starts[index]]


def process_status(
    name: str, state: ProcessState, restarts: int, heard: tuple[Heartbeat, float] | None
) -> ProcessStatus:
    """Return the status of a process.

    Args:
        heard: its last heartbeat and its age, seconds.
    """
    if heard is None:
        return ProcessStatus(name=name, state=state, restarts=restarts)
    heartbeat, age_s = heard
    return ProcessStatus(
        name=name, state=state, restarts=restarts, pid=heartbeat.pid, heard_s=round(age_s, 1), waits=heartbeat.waits
    )


def _in_a_line(error: AsyncGRPOError, name: str) -> str:
    """Return the error that ended a generator as one line."""
    if isinstance(error, ProcessLost):
        return str(error).removeprefix(f"{name}: ")
    return str(error).strip().splitlines()[-1][:300]
