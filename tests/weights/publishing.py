"""A publication from the offer to the proof, for tests and benchmarks that have nothing else to do meanwhile."""

import time
from collections.abc import Iterable

from torch import Tensor

from asyncgrpo.learner.publishing import fill_arena
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.publication import Publication
from asyncgrpo.weights.publisher import Publisher

WITHIN_S = 120.0


def publish(publisher: Publisher, version: PolicyVersion, weights: Iterable[tuple[TensorInfo, Tensor]]) -> Publication:
    """Offer a version, and wait until every generator in touch has it or was left out. Returns the last report."""
    assert publisher.offer(version, lambda layout, flat: fill_arena(iter(weights), layout, flat))
    deadline = time.monotonic() + WITHIN_S
    ended: list[Publication] = []
    while not (ended and publisher.is_idle):
        assert time.monotonic() < deadline, f"{version} has not landed"
        time.sleep(0.0005)
        ended += publisher.reports()
    return ended[-1]
