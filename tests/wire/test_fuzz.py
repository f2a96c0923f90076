"""A share of the malformed frames of `fuzz.py`, and proof that it would notice."""

import logging
import time

import pytest

from asyncgrpo.buffer import service
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire import PROTOCOL, codec
from asyncgrpo.wire.rollouts import Ack, Grant, Nack, Register, Serving, Trained
from asyncgrpo.wire.sockets import Client
from tests.buffer.test_service import Plane, plane  # noqa: F401
from tests.wire.fuzz import delivery_of, fuzz
from tests.wire.mutations import Mutator


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def test_malformed_frames_change_nothing():
    """It raises what a reader raises, and where what the learner is given cannot be believed."""
    found = fuzz(20_000, seed=1)
    assert found["growth_mb"] <= 64
    assert found["trained"] > 100
    reasons = {"size", "decode", "schema", "not_finite", "vocabulary", "version", "lease", "checksum", "sender"}
    assert set(found["refused_by_buffer"]) == reasons
    assert {"size", "decode", "checksum"} <= set(found["refused_by_others"])


@pytest.mark.parametrize(
    ("place", "name", "fault", "noticed"),
    [
        (service, "check_group", lambda *_: None, Exception),
        (service, "check_lease", lambda *_: None, AssertionError),
        (codec, "_digest", lambda header, payload: b"12345678", Exception),
        (service.BufferService, "_check_sender", lambda *_: None, Exception),
    ],
)
def test_a_check_that_is_left_out_is_noticed(monkeypatch, place, name, fault, noticed):
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(noticed):
        fuzz(20_000, seed=3)


def test_the_canary_sings(tmp_path):
    """What is sent as a pickle does make the file, where somebody unpickles it."""
    import pickle

    mutator = Mutator(0, str(tmp_path / "canary"))
    pickle.loads(mutator._pickle)
    assert (tmp_path / "canary").exists()


def test_malformed_frames_over_a_real_socket(plane: Plane):  # noqa: F811
    """The connection of whoever sends them is kept, and a good group on it is taken in."""
    version = PolicyVersion(1, 0)
    plane.start()
    (lease, _) = plane.leases(2)
    mutator = Mutator(3, "nowhere")
    bad = Client(plane.generator.endpoint, "generator-1-a")
    bad.send(Register(protocol=PROTOCOL, generator_id="generator-1", incarnation="a", window=1))
    for number in range(400):
        message, payload = delivery_of(lease, version)
        malformed = (
            mutator.of_bytes(message, payload) if number % 2 else mutator.of_bytes(Trained(version=version), b"")
        )
        if malformed:
            bad._socket.send_multipart(malformed)
    bad.send(Serving(generator_id="generator-1", version=version))
    refused, deadline = 0, time.monotonic() + 20.0
    while refused < 300 and time.monotonic() < deadline:
        received = bad.receive(0.5)
        refused += received is not None and isinstance(received[0], Nack)
    assert refused >= 300
    plane.generator.send(*delivery_of(lease, version))
    said = plane.hear(plane.generator)
    assert isinstance(said, Ack | Grant)
    bad.close()
