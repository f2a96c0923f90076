"""What surrounds a simulated run: no log lines, shorter waits, checkpoints and a journal that are not on a disk."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from asyncgrpo import liveness
from asyncgrpo.buffer import group_health, recovery
from asyncgrpo.buffer import service as buffer_service
from asyncgrpo.buffer.service import BufferService
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
TALK = buffer_service, generator_service, ranks, learner_service, log, history, recovery, group_health, breaker
MEMORY = Path("/dev/shm")
"""A folder of it is as fast as a folder can be. Where there is none, the usual place for temporary files will do."""


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines and no Prometheus numbers, which would cost more than what they are about."""
    with ExitStack() as patches:
        for module in TALK:
            patches.enter_context(mock.patch.object(logging.getLogger(module.__name__), "disabled", True))
        patches.enter_context(mock.patch.object(BufferService, "_show_metrics", lambda self, now_s: None))
        yield


@contextmanager
def scaled() -> Iterator[None]:
    with ExitStack() as patches:
        for module, name, value in SCALED:
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def reading_checkpoints_of(world: "World") -> AbstractContextManager[Any]:
    read = lambda path: msgspec.json.decode(world.checkpoint, type=RunState)  # noqa: E731
    return mock.patch.object(learner_service, "read_state", read)
