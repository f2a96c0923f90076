"""Stand-ins for the sockets of buffer, generators and learner on the virtual clock: frames arrive when they are told to."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from asyncgrpo.planner.clock import VirtualLoop
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Buffer, decode

Frames = list[bytes]


class GeneratorLine:
    """Stands for `wire.sockets.AsyncClient`."""

    def __init__(self, send: Callable[[Message, Buffer], None]) -> None:
        self._send = send
        self._arrived: asyncio.Queue[Frames] = asyncio.Queue()
        self.is_closed = False

    def arrive(self, frames: Frames) -> None:
        self._arrived.put_nowait(frames)

    async def send(self, message: Message, payload: Buffer = b"") -> None:
        if not self.is_closed:
            self._send(message, payload)

    async def receive(self) -> tuple[Message, memoryview]:
        return decode(await self._arrived.get())

    def close(self) -> None:
        self.is_closed = True


class LearnerLine:
    """Stands for `wire.sockets.Client`: whoever waits on it lets the world go on."""

    def __init__(self, loop: VirtualLoop, send: Callable[[Message, Buffer], None]) -> None:
        self._loop = loop
        self._send = send
        self._arrived: deque[Frames] = deque()
        self.endpoint = "the simulated buffer"

    def arrive(self, frames: Frames) -> None:
        self._arrived.append(frames)

    def send(self, message: Message, payload: Buffer = b"") -> None:
        self._send(message, payload)

    def receive(self, timeout_s: float) -> tuple[Message, memoryview] | None:
        self._loop.run_until(self._loop.time() + timeout_s, lambda: self._arrived)
        return decode(self._arrived.popleft()) if self._arrived else None

    def close(self) -> None:
        """Nothing to close."""


class BufferSocket:
    """Stands for `wire.sockets.Server`: sends to peers that are there, and says so when one is not."""

    def __init__(self, send: Callable[[str, Message, Buffer], bool]) -> None:
        self._send = send

    def send(self, peer: str, message: Message, payload: Buffer = b"") -> bool:
        return self._send(peer, message, payload)

    def receive(self, timeout_s: float) -> tuple[str, Sequence[Buffer]] | None:
        raise NotImplementedError("the simulation calls `turn` with what arrives")
