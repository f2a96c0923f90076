"""ROUTER and DEALER sockets whose waits all have timeouts. No other file imports zmq.

The driver makes CURVE keys for each start and passes them to the processes of its run. Peers without keys are rejected,
from other machines and from other users of this one. Without keys, as in tests, a socket binds to loopback only. ZeroMQ
heartbeats detect a peer that stopped without closing.
"""

import atexit
import ipaddress
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from asyncgrpo import liveness
from asyncgrpo.errors import ConfigError, WireError
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer, decode, encode

MOST_TO_A_SERVER, MOST_TO_A_CLIENT = 2**30, 2**32
"""Largest frame, bytes. A client receives batches."""
PART_BYTES, COUNT_BYTES = 2**24, 4
"""Largest frame of a server's payload, and length of the frame before a message that gives their number, if it is above 1."""
LINGER_MS = 2_000
SEND_TIMEOUT_MS = 5_000
"""Timeout of a send without a connection, as after a refused handshake. With a connection, sends do not block."""

_open: "set[Server | _Dealer]" = set()
"""References to open sockets: collecting a server whose authenticator still runs would hang."""


@atexit.register
def _close_all() -> None:
    """Close the sockets that remain open after an error."""
    for end in list(_open):
        end.close()


@dataclass(frozen=True, repr=False)
class Keys:
    """A CURVE key pair for the servers of a run and one for its clients. Secret: never logged, so it has no `repr`."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @staticmethod
    def make() -> "Keys":
        return Keys(*zmq.curve_keypair(), *zmq.curve_keypair())


def is_loopback(host: str) -> bool:
    """Return True if `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _set_common_options(socket: zmq.Socket, most_bytes: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    # Deliberately unbounded: leases bound what peers may send, and a full ROUTER drops messages silently.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, liveness.SOCKET_HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, liveness.SOCKET_TIMEOUT_MS)


def check_bind(bind: str) -> None:
    """Raise ConfigError if no socket can be bound to `bind` on this machine."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    try:
        _bind(socket, bind)
    finally:
        socket.close()
        context.term()


def _bind(socket: zmq.Socket, bind: str) -> tuple[str, int]:
    """Bind to a free port. Return the port and the address, resolved if `bind` is a name."""
    try:
        socket.bind_to_random_port(f"tcp://{bind}")
    except zmq.ZMQError as error:
        what = "which is no IPv4 address, name or interface of this machine"
        raise ConfigError(f"cluster.bind is {bind!r}, {what}; give one, or 0.0.0.0") from error
    host, _, port = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rpartition(":")
    return host, int(port)


class Server:
    """A bound ROUTER with named peers. One thread uses it."""

    def __init__(self, bind: str, keys: Keys | None = None, advertise: str | None = None) -> None:
        """Bind to a free port of `bind`.

        Args:
            advertise: host by which peers reach this process, used if it binds to every address.
        Raises:
            ConfigError: other machines can reach `bind` and there are no keys, or it is not an address of this machine.
        """
        if not is_loopback(bind) and keys is None:
            raise ConfigError(f"cluster.bind is {bind}, which other machines can reach, and there are no CURVE keys")
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        _set_common_options(self._socket, MOST_TO_A_SERVER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            only = SimpleNamespace(callback=lambda domain, key: key == keys.client_public)
            self._authenticator.configure_curve_callback(credentials_provider=only)
            self._socket.curve_server = True
            self._socket.curve_publickey = keys.server_public
            self._socket.curve_secretkey = keys.server_secret
        self._held: dict[str, list[Buffer]] | None = None
        try:
            host, port = _bind(self._socket, bind)
        except ConfigError:
            self.close()
            raise
        if advertise is not None and host == "0.0.0.0":
            host = advertise
        self.endpoint = f"tcp://{host}:{port}"
        _open.add(self)

    def receive(self, timeout_s: float) -> tuple[str, Sequence[Buffer]] | None:
        """Receive the next message as (peer, frames). Return None after `timeout_s`."""
        try:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)  # a poll costs as much as this
        except zmq.Again:
            if timeout_s <= 0 or not self._socket.poll(int(timeout_s * 1000)):
                return None
            identity, *frames = self._socket.recv_multipart(copy=False)
        return identity.bytes.decode(errors="replace"), [frame.buffer for frame in frames]

    def send(self, peer: str, message: Message, payload: Buffer = b"") -> bool:
        """Queue a message for `peer`. Return False if it is not connected."""
        frames = _in_parts(*encode(message, payload))
        if self._held is not None:
            self._held.setdefault(peer, []).extend(frames)
            return True
        return self._send(peer, frames)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Batch the messages sent inside, one multipart message per peer: a small message costs as much as a large one."""
        self._held = {}
        try:
            yield
        finally:
            held, self._held = self._held, None
            for peer, frames in held.items():
                self._send(peer, frames)

    def _send(self, peer: str, frames: Sequence[Buffer]) -> bool:
        try:
            self._socket.send_multipart([peer.encode(), *frames], copy=False)  # a batch; small frames are copied
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        _open.discard(self)
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
        self._socket.close()
        self._context.term()


def _in_parts(head: Buffer, payload: Buffer) -> list[Buffer]:
    """Return the frames of a message. ZeroMQ encrypts, sends and decrypts the parts of a long payload at the same time."""
    if len(payload) <= PART_BYTES:
        return [head, payload]
    view = memoryview(payload)
    parts = [view[at : at + PART_BYTES] for at in range(0, len(view), PART_BYTES)]
    return [len(parts).to_bytes(COUNT_BYTES, "big"), head, *parts]


class _Dealer:
    """A DEALER: the client end of a connection."""

    def __init__(self, context: zmq.Context, endpoint: str, name: str, keys: Keys | None) -> None:
        self._context = context
        self._socket: Any = context.socket(zmq.DEALER)
        _set_common_options(self._socket, MOST_TO_A_CLIENT)
        self._socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        if keys is not None:
            self._socket.curve_serverkey = keys.server_public
            self._socket.curve_publickey = keys.client_public
            self._socket.curve_secretkey = keys.client_secret
        self._socket.connect(endpoint)
        self._frames: deque[Buffer] = deque()  # received, those of a message as `_in_parts`
        self.endpoint = endpoint
        _open.add(self)

    def _next(self) -> tuple[Message, memoryview]:
        """Decode and remove the first received message. Raises WireError if it is malformed."""
        is_long = len(self._frames[0]) == COUNT_BYTES
        count = int.from_bytes(self._frames.popleft(), "big") if is_long else 1
        head, *parts = [self._frames.popleft() for _ in range(min(1 + count, len(self._frames)))] or [b""]
        return decode([head, memoryview(bytearray().join(parts))] if is_long else [head, *parts])

    def _refused(self) -> WireError:
        return WireError(f"{self.endpoint} is not connected: it refused the keys of this process")

    def close(self) -> None:
        _open.discard(self)
        self._socket.close()
        self._context.term()


class Client(_Dealer):
    """A DEALER for a blocking thread."""

    def __init__(self, endpoint: str, name: str, keys: Keys | None = None) -> None:
        super().__init__(zmq.Context(), endpoint, name, keys)

    def send(self, message: Message, payload: Buffer = b"") -> None:
        """Queue a message. Raises WireError if the server refused the connection, for instance its keys."""
        try:
            self._socket.send_multipart(encode(message, payload))
        except zmq.Again:
            raise self._refused() from None

    def receive(self, timeout_s: float) -> tuple[Message, memoryview] | None:
        """Receive a message and its payload. Return None after `timeout_s`. Raises WireError if it is malformed."""
        if not self._frames:
            if not self._socket.poll(max(0, int(timeout_s * 1000))):
                return None
            self._frames.extend(frame.buffer for frame in self._socket.recv_multipart(copy=False))
        return self._next()


class AsyncClient(_Dealer):
    """A DEALER for an asyncio loop. Cancelling `receive` loses no message."""

    def __init__(self, endpoint: str, name: str, keys: Keys | None = None) -> None:
        super().__init__(zmq.asyncio.Context(), endpoint, name, keys)

    async def send(self, message: Message, payload: Buffer = b"") -> None:
        """Queue a message. Raises WireError if the server refused the connection, for instance its keys."""
        try:
            await self._socket.send_multipart(encode(message, payload))
        except zmq.Again:
            raise self._refused() from None

    async def receive(self) -> tuple[Message, memoryview]:
        """Receive the next message and its payload. Raises WireError if it is malformed."""
        if not self._frames:
            self._frames.extend(frame.buffer for frame in await self._socket.recv_multipart(copy=False))
        return self._next()
