"""A cable that can be unplugged: a TCP forwarder that holds bytes back, or cuts connections, when told to."""

import asyncio
import contextlib
import threading
from urllib.parse import urlsplit

CHUNK = 1 << 16


class Proxy:
    """Forwards to one endpoint, in a thread of its own, until closed."""

    def __init__(self, target: str) -> None:
        """
        Args:
            target: `tcp://host:port`.
        """
        address = urlsplit(target)
        self._target = address.hostname, address.port
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        server = self._loop.run_until_complete(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True).start()

    def hold(self) -> None:
        """Nothing passes any more, in either direction; nothing is lost."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def release(self) -> None:
        """What was held passes."""
        self._loop.call_soon_threadsafe(self._flows.set)

    def cut(self) -> None:
        """Reset every connection: what is on its way is lost. New ones are taken."""
        self._loop.call_soon_threadsafe(self._cut)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._cut()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_later(0.1, self._loop.stop)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._writers |= {writer, far_writer}
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
