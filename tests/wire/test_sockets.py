"""Sockets bound their waits, know their peers, and open to other machines only with keys."""

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from asyncgrpo.errors import ConfigError, WireError
from asyncgrpo.wire import sockets
from asyncgrpo.wire.codec import decode, encode, pack_group
from asyncgrpo.wire.rollouts import Cancel, Register, Reregister, Shutdown
from asyncgrpo.wire.sockets import AsyncClient, Client, Keys, Server, is_loopback
from tests.wire.test_codec import make_group

REGISTER = Register(generator_id="g", incarnation="a", window=1)


@pytest.fixture
def opened():
    """Closes what it is given at the end of the test."""
    with contextlib.ExitStack() as ends:
        yield lambda end: ends.enter_context(contextlib.closing(end))


@pytest.fixture
def server(opened):
    return opened(Server("127.0.0.1"))


def test_peers_are_told_the_address_that_was_bound(opened):
    """Another than the host is known by: what is bound to one address does not hear what is sent to another."""
    server = opened(Server("127.0.0.2", advertise="127.0.0.1"))
    opened(Client(server.endpoint, "g")).send(REGISTER)
    assert server.receive(5.0) is not None


def test_an_address_of_another_machine_is_refused_and_one_that_others_can_reach_needs_keys():
    for bind in ("203.0.113.7", "no-such-host", "", "::1"):
        for refuse in (sockets.check_bind, lambda bind: Server(bind, Keys.make())):
            with pytest.raises(ConfigError, match=rf"^cluster\.bind is '{bind}', which is no IPv4 address[^()]*$"):
                refuse(bind)
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        Server("0.0.0.0")
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("::1")
    assert not is_loopback("10.0.0.1") and not is_loopback("some.host")


async def test_what_is_sent_together_arrives_one_by_one(server, opened):
    waiting, client = opened(AsyncClient(server.endpoint, "a")), opened(Client(server.endpoint, "b"))
    message, payload = pack_group(make_group())
    await waiting.send(message, payload)
    client.send(REGISTER)
    arrived = dict(server.receive(5.0) for _ in range(2))
    assert arrived.keys() == {"a", "b"} and decode(arrived["a"]) == (message, payload)
    with server.together():
        for number in range(5):
            for peer in ("a", "b", "nobody"):
                assert server.send(peer, Cancel(lease_ids=(), reason=str(number)))
        assert client.receive(0.05) is None
    assert [client.receive(5.0)[0].reason for _ in range(5)] == list("01234")
    assert [(await waiting.receive())[0].reason for _ in range(5)] == list("01234")
    assert not server.send("nobody", Shutdown()), "and alone it goes at once"


def test_a_client_takes_longer_messages_than_a_server(monkeypatch, opened):
    monkeypatch.setattr(sockets, "MOST_TO_A_SERVER", 2**20)
    server = opened(Server("127.0.0.1"))
    client, (message, _) = opened(Client(server.endpoint, "a")), pack_group(make_group())
    client.send(REGISTER)
    assert server.receive(5.0) is not None
    assert server.send("a", message, bytes(2**21)) and len(client.receive(5.0)[1]) == 2**21
    client.send(message, bytes(2**21))
    assert server.receive(0.5) is None


@pytest.mark.parametrize("size", [10, 11, 20, 95])
def test_the_parts_of_a_long_payload_are_one_again(monkeypatch, opened, size):
    monkeypatch.setattr(sockets, "PART_BYTES", 10)
    keys = Keys.make()
    server, (message, _) = opened(Server("127.0.0.1", keys)), pack_group(make_group())
    client = opened(Client(server.endpoint, "a", keys))
    client.send(REGISTER)
    assert server.receive(5.0) is not None
    payload = bytes(range(size))
    with server.together():
        for sent in ((Shutdown(),), (message, payload), (Reregister(),)):
            assert server.send("a", *sent)
    assert [client.receive(5.0) for _ in range(3)] == [(Shutdown(), b""), (message, payload), (Reregister(), b"")]
    *others, _ = sockets._in_parts(*encode(message, payload))
    server._socket.send_multipart([b"a", *others])
    with pytest.raises(WireError):
        client.receive(5.0)


def test_a_broken_message_does_not_hide_those_beside_it(server, opened):
    client = opened(Client(server.endpoint, "g"))
    client.send(REGISTER)
    server.receive(5.0)
    good, broken = encode(Shutdown()), encode(Reregister())
    client._socket.send_multipart([b"half"])
    with pytest.raises(WireError):
        decode(server.receive(5.0)[1])
    server._socket.send_multipart([b"g", *good, broken[0][:-1], broken[1], *good, b"half"])
    assert client.receive(5.0)[0] == Shutdown()
    for is_good in (False, True, False):
        with contextlib.nullcontext() if is_good else pytest.raises(WireError):
            assert client.receive(5.0)[0] == Shutdown()
    assert client.receive(0.01) is None


async def test_a_client_that_was_refused_says_so(monkeypatch, opened):
    monkeypatch.setattr(sockets, "SEND_TIMEOUT_MS", 200)
    keys = Keys.make()
    server = opened(Server("0.0.0.0", keys, advertise="127.0.0.1"))
    theirs = replace(Keys.make(), server_public=keys.server_public)
    stranger, waiting = (opened(kind(server.endpoint, "a", theirs)) for kind in (Client, AsyncClient))
    with pytest.raises(WireError, match="refused the keys"):
        for _ in range(200):
            stranger.send(REGISTER)
            time.sleep(0.05)
    with pytest.raises(WireError, match="refused the keys"):
        for _ in range(200):
            await waiting.send(REGISTER)
            await asyncio.sleep(0.05)


def test_a_process_that_closes_nothing_still_ends():
    program = """
        import gc
        from asyncgrpo.wire.sockets import Client, Keys, Server
        keys = Keys.make()
        server = Server("0.0.0.0", keys, advertise="127.0.0.1")
        cycle = [server, Client(server.endpoint, "a", keys)]
        cycle.append(cycle)  # as the traceback of an error makes one
        del server, cycle
        gc.collect()
        raise SystemExit(3)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60)
    assert done.returncode == 3


@pytest.mark.parametrize("bind", ["0.0.0.0", "127.0.0.1"])
def test_only_a_client_with_the_run_s_keys_is_heard(monkeypatch, opened, bind):
    """On loopback too, where the keys are all that tells the run from another user of the machine."""
    monkeypatch.setattr(sockets, "LINGER_MS", 10)  # for what strangers sent in vain
    keys = Keys.make()
    server = opened(Server(bind, keys, advertise="127.0.0.1"))
    opened(Client(server.endpoint, "friend", keys)).send(REGISTER)
    for wrong in (None, Keys.make(), replace(Keys.make(), server_public=keys.server_public)):
        stranger = opened(Client(server.endpoint, "stranger", wrong))
        # Before the handshake failed a message is queued, after it there is nobody to queue it for.
        with contextlib.suppress(WireError):
            stranger.send(REGISTER)
    received = server.receive(5.0)
    assert received is not None and received[0] == "friend"
    assert server.receive(0.3) is None
    assert not any(repr(key) in repr(keys) for key in vars(keys).values())
