"""Publications under injected faults, a few; `python -m tests.weights.faults` makes as many as you want."""

from collections import Counter

import pytest

from asyncgrpo.weights.arena import Place
from asyncgrpo.weights.publisher import Publisher
from tests.weights import faults
from tests.weights.faults import FAULTS, WRONG, run


def test_no_version_is_torn_or_under_another_name():
    total: Counter[str] = Counter()
    for seed in range(6):  # which faults there are depends on timing: go on until each was there
        found = run(publications=60, seed=seed, often=8.0)
        assert {name: found[name] for name in WRONG} == dict.fromkeys(WRONG, 0)
        assert found["publications"] == 61 and found["loads"] > 100
        total += found
        if total["offered again"] and all(total[fault] for fault in FAULTS):
            return
    raise AssertionError(f"a fault was never there: {total}")


def test_what_is_given_to_an_engine_unproved_is_seen(monkeypatch):
    """The check itself: a publisher that believes whatever receivers get."""
    monkeypatch.setattr(faults, "AFTER_A_PUBLICATION", {})
    monkeypatch.setattr(faults, "BROADCAST_ALTERED", 0.0)
    monkeypatch.setattr(faults, "LAST_WITHIN_S", 1.0)  # a wrong base may never be repaired

    def believe(publisher: Publisher, place: Place) -> None:
        if place.receiving is not None and not place.awaited:
            place.newest, place.receiving = place.receiving, None

    monkeypatch.setattr(Publisher, "_compare_received", believe)
    # Which deltas are hit depends on timing: a run may have cut some and altered none.
    assert any(run(publications=20, seed=seed, often=20.0)["not what was published"] for seed in range(6))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(faults, "LONGEST_PAUSE_S", 1.0)
