"""A share of the malformed frames of `fuzz.py`, and proof that it would notice."""

import logging
import pickle
import threading
import time

import pytest

from asyncgrpo.buffer import service
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.types import PolicyVersion, Sampling
from asyncgrpo.wire import PROTOCOL, Message
from asyncgrpo.wire.rollouts import Ack, Finished, Grant, Nack, Register, Serving, Trained
from asyncgrpo.wire.sockets import Client, Server
from tests.buffer.test_buffer import make_buffer
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
    ],
)
def test_a_check_that_is_left_out_is_noticed(monkeypatch, place, name, fault, noticed):
    monkeypatch.setattr(place, name, fault)
    with pytest.raises(noticed):
        fuzz(20_000, seed=3)


def test_the_canary_sings(tmp_path):
    """What is sent as a pickle does make the file, where somebody unpickles it."""
    mutator = Mutator(0, str(tmp_path / "canary"))
    pickle.loads(mutator._pickle)
    assert (tmp_path / "canary").exists()


def test_malformed_frames_over_a_real_socket():
    """The connection of whoever sends them is kept, and a good group on it is taken in."""
    server, version = Server("127.0.0.1"), PolicyVersion(1, 0)
    buffer = make_buffer(4, per_step=2, max_lag=0)
    run = service.BufferService(server, buffer, Evaluations((), Sampling(), 0, 100.0)).run
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    good, bad, learner = clients = [Client(server.endpoint, name) for name in ("good-a", "bad-a", "learner")]

    def awaited(client: Client, kind: type) -> Message:
        deadline = time.monotonic() + 20.0
        while (received := client.receive(0.5)) is None or not isinstance(received[0], kind):
            assert time.monotonic() < deadline, kind
        return received[0]

    learner.send(Trained(version=version))
    for name, client in (("good", good), ("bad", bad)):
        client.send(Register(protocol=PROTOCOL, generator_id=name, incarnation="a", window=1))
    good.send(Serving(generator_id="good", version=version))
    lease = awaited(good, Grant).lease
    mutator = Mutator(3, "nowhere")
    for number in range(400):
        message = delivery_of(lease, version) if number % 2 else (Trained(version=version), b"")
        if malformed := mutator.of_bytes(*message):
            bad._socket.send_multipart(malformed)
    for _ in range(300):
        awaited(bad, Nack)
    good.send(*delivery_of(lease, version))
    assert awaited(good, Ack).lease_id == lease.lease_id
    learner.send(Finished())
    thread.join(10.0)
    assert not thread.is_alive()
    for socket in (*clients, server):
        socket.close()
