"""What surrounds a simulated run: no log lines, shorter waits, checkpoints and a journal that are not on a disk."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from asyncgrpo import liveness
from asyncgrpo.buffer import group_health, recovery
from asyncgrpo.buffer import service as buffer_service
from asyncgrpo.buffer.service import Gauges
from asyncgrpo.generators import service as generator_service
from asyncgrpo.journal import history, log
from asyncgrpo.learner import ranks
from asyncgrpo.learner import service as learner_service
from asyncgrpo.learner.checkpoints import RunState
from asyncgrpo.rewards import breaker

if TYPE_CHECKING:
    from tests.simulation.world import World

SCALED = ((liveness, "HEARTBEAT_S", 2.0), (liveness, "RESEND_AFTER_S", 6.0), (liveness, "QUIET_S", 4.0),
          (liveness, "SESSION_S", 15.0), (liveness, "WAITING_EVERY_S", 5.0),
          (breaker, "HOLD_S", 10.0), (breaker, "LAST_PROBE_S", 10.0),
          (group_health, "SHORTEST_S", 2.0), (group_health, "MIN_GROUPS", 3))  # fmt: skip
"""The product's waits, shorter, so that a short run meets each of them many times. A generator is quiet for as long as two of
its heartbeats take, as it is in the product."""
LOGS = tuple(
    module.__name__
    for module in (
        buffer_service,
        generator_service,
        ranks,
        learner_service,
        log,
        history,
        recovery,
        group_health,
        breaker,
    )
)
MEMORY = Path("/dev/shm")
"""A folder of it is as fast as a folder can be. Where there is none, the usual place for temporary files will do."""


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """An empty folder, for as long as the block."""
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines and no Prometheus numbers, which would cost more than what they are about."""
    show = Gauges.show
    was = [(logging.getLogger(name), logging.getLogger(name).disabled) for name in LOGS]
    for logger, _ in was:
        logger.disabled = True
    Gauges.show = lambda self, buffer, now_s: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        for logger, before in was:
            logger.disabled = before
        Gauges.show = show  # type: ignore[method-assign]


@contextmanager
def scaled() -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in SCALED]
    for module, name, value in SCALED:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@contextmanager
def reading_checkpoints_of(world: "World") -> Iterator[None]:
    before = learner_service.read_state
    learner_service.read_state = lambda path: msgspec.json.decode(world.checkpoint, type=RunState)  # type: ignore
    try:
        yield
    finally:
        learner_service.read_state = before
