"""A share of the malformed frames of `fuzz.py`, and proof that it would notice."""

import logging
import pickle

import pytest

from asyncgrpo.buffer import service
from tests.wire.fuzz import fuzz
from tests.wire.mutations import Mutator


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_malformed_frames_change_nothing():
    """It raises what a reader raises, and where what the learner is given cannot be believed."""
    found = fuzz(8_000, seed=1)
    assert found["growth_mb"] <= 64
    assert found["trained"] > 100
    reasons = {"size", "decode", "schema", "not_finite", "vocabulary", "version", "lease", "checksum", "sender"}
    assert set(found["refused_by_buffer"]) == reasons
    assert {"size", "decode", "checksum"} <= set(found["refused_by_others"])


@pytest.mark.parametrize(("name", "noticed"), [("check_group", Exception), ("check_lease", AssertionError)])
def test_a_check_that_is_left_out_is_noticed(monkeypatch, name, noticed):
    monkeypatch.setattr(service, name, lambda *_: None)
    with pytest.raises(noticed):
        fuzz(20_000, seed=3)


def test_the_canary_sings(tmp_path):
    """What is sent as a pickle does make the file, where somebody unpickles it."""
    mutator = Mutator(0, str(tmp_path / "canary"))
    pickle.loads(mutator._pickle)
    assert (tmp_path / "canary").exists()
