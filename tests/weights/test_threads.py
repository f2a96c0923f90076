"""Threads share the work on bytes, and find what one would have found."""

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights import delta
from asyncgrpo.weights import digest as hashing
from asyncgrpo.weights.digest import spread


@pytest.fixture
def three(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(hashing, "num_threads", lambda: 3)
    hashing._pool.cache_clear()
    yield
    hashing._pool().shutdown()
    hashing._pool.cache_clear()


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

    assert list(spread(work, pieces())) == [-number for number in range(12)]
    assert taken == list(range(12)) and sorted(done) == taken


def test_what_the_work_raises_is_raised(three):
    with pytest.raises(ZeroDivisionError):
        list(spread(lambda number: 1 // number, [2, 1, 0, 3]))


def test_who_stops_waits_for_what_is_under_way(three):
    begun, done = [], []

    def work(number: int) -> int:
        begun.append(number)
        time.sleep(0.05 * (number > 0))
        done.append(number)
        return number

    results = spread(work, range(100))
    assert next(results) == 0
    results.close()
    assert sorted(done) == sorted(begun) and len(done) < 10


def test_a_delta_by_three_threads_is_that_of_one(three, monkeypatch):
    monkeypatch.setattr(delta, "AT_ONCE", 4096)
    random = torch.Generator().manual_seed(0)
    base = torch.randint(0, 256, (2**18,), generator=random).byte()
    new = base.clone()
    new[torch.randint(0, 2**18, (3000,), generator=random)] ^= 1
    spans = [delta.Span(0, 2**17, 2), delta.Span(2**17, 2**17, 4)]
    versions = [PolicyVersion(1, number) for number in range(2)]
    by_three = delta.Delta(*versions, delta.follow(base.clone(), new, spans, 2**18))
    target = base.clone()
    by_three.apply(target)
    assert torch.equal(target, new)
    monkeypatch.setattr(hashing, "num_threads", lambda: 1)
    by_one = delta.Delta(*versions, delta.follow(base.clone(), new, spans, 2**18))
    assert delta.to_bytes(by_three) == delta.to_bytes(by_one) and len(by_one.pieces) > 20
