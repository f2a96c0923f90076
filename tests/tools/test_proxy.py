"""The proxy of chaos: held data arrives later, data of a reset connection never, and new connections are accepted."""

import pytest

from asyncgrpo.tools.chaos import Proxy
from asyncgrpo.wire.codec import decode
from asyncgrpo.wire.sockets import Client, Server
from asyncgrpo.wire.supervision import Drain


@pytest.fixture
def ends():
    server = Server("127.0.0.1")
    proxy = Proxy(server.endpoint)
    client = Client(proxy.endpoint, "c")
    yield server, proxy, client
    client.close()
    proxy.close()
    server.close()


def heard(server: Server, timeout_s: float) -> str | None:
    received = server.receive(timeout_s)
    return decode(received[1])[0].reason if received is not None else None  # type: ignore[attr-defined]


def test_what_is_held_arrives_once_it_is_released_and_after_a_cut_the_client_connects_again(ends):
    server, proxy, client = ends
    client.send(Drain(reason="1"))
    assert heard(server, 5.0) == "1"
    proxy.hold()
    client.send(Drain(reason="2"))
    assert heard(server, 0.2) is None
    proxy.release()
    assert heard(server, 5.0) == "2"
    proxy.cut()
    for _ in range(100):
        client.send(Drain(reason="again"))
        if heard(server, 0.1) == "again":
            return
    pytest.fail("nothing arrived over a new connection")
