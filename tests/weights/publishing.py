"""A publication from the offer to the proof, for tests and benchmarks that have nothing else to do meanwhile."""

import contextlib
import queue
import time
from collections.abc import Callable, Iterable

from torch import Tensor

from asyncgrpo.learner.publishing import fill_arena
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import IsWritten, Layout
from asyncgrpo.weights.publication import Publication
from asyncgrpo.weights.publisher import Publisher

WITHIN_S = 120.0
LOOK_EVERY_S = 0.02
"""While no report comes, which is waited for: looking takes CPU seconds that a benchmark would count."""


def publish(publisher: Publisher, version: PolicyVersion, weights: Iterable[tuple[TensorInfo, Tensor]]) -> Publication:
    """Offer a version, and wait until every generator in touch has it or was left out. Returns the last report."""
    return land(publisher, version, lambda layout, flat: fill_arena(iter(weights), layout, flat))


def land(
    publisher: Publisher, version: PolicyVersion, fill: Callable[[Layout, Tensor], IsWritten | None]
) -> Publication:
    """The same of weights that `fill` writes, as `Publisher.offer` says."""
    assert publisher.offer(version, fill)
    deadline = time.monotonic() + WITHIN_S
    ended: list[Publication] = []
    while not (ended and publisher.is_idle):
        assert time.monotonic() < deadline, f"{version} has not landed"
        with contextlib.suppress(queue.Empty):
            ended.append(publisher._reports.get(timeout=LOOK_EVERY_S))
        ended += publisher.reports()
    return ended[-1]
