"""Threads share the work on bytes, and find what one would have found."""

import threading
from collections.abc import Iterator

import pytest
import torch

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.learner.publishing import fill_arena
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights import publisher as publishing
from asyncgrpo.weights import receiver as receiving
from asyncgrpo.weights import threads
from asyncgrpo.weights.digest import digest
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
from asyncgrpo.weights.threads import spread
from tests.weights.publishing import publish
from tests.weights.test_publication import LAYOUT, Engine, wait_until, weights


@pytest.fixture
def three(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "num_threads", lambda: 3)
    threads._pool.cache_clear()
    yield
    threads._pool().shutdown()
    threads._pool.cache_clear()


def test_pieces_are_taken_not_far_ahead_and_results_keep_their_order(three):
    at_work = threading.Barrier(3)
    taken, done = [], []

    def pieces() -> Iterator[int]:
        for number in range(12):
            taken.append(number)
            assert number <= len(done) + 7, "pieces are taken long before anybody works on them"
            yield number

    def work(number: int) -> int:
        at_work.wait(10.0)  # three at a time, or it breaks
        done.append(number)
        return -number

    assert spread(work, pieces()) == [-number for number in range(12)]
    assert taken == list(range(12)) and sorted(done) == taken


def test_what_the_work_raises_is_raised(three):
    with pytest.raises(ZeroDivisionError):
        spread(lambda number: 1 // number, [2, 1, 0, 3])


@pytest.mark.parametrize("way", ["mapped", "gloo"])
def test_a_publication_by_three_threads_is_proved_as_by_one(three, monkeypatch, way: str):
    for module in (publishing, receiving):
        monkeypatch.setattr(module, "SHARE_BYTES", 2**20)
    host = "127.0.0.1"
    publisher = Publisher(
        WeightsConfig(timeout_s=20.0), maps=way == "mapped", backend="gloo", bind=host, host=host, keys=None
    )
    publisher.start(LAYOUT)
    engine = Engine()
    receiver = Receiver(
        publisher.endpoint, generator_id="one", incarnation="0", host=host, apply=engine.apply, keys=None
    )
    receiver.start()
    wait_until(lambda: publisher.generators == ["one"], "the generator")
    for step in range(3):
        publication = publish(publisher, PolicyVersion(1, step), weights(step))
        flat = torch.zeros(publisher._layout.num_bytes, dtype=torch.uint8)
        fill_arena(iter(weights(step)), publisher._layout, flat)
        assert publication.digest == f"{digest(flat):016x}" and publication.attempts == 1
        assert all(torch.equal(engine.held[info.name], tensor) for info, tensor in weights(step))
    receiver.stop()
    publisher.close()
