"""The HTTP client of judge, served reward model, teacher and Sandbox Fusion: JSON with retries and one deadline.

A request is retried where the service was not reached, was too busy (429) or failed (5xx), with exponential backoff. Every
other reply is final.
"""

import asyncio
import random
from typing import Any, TypeVar

import msgspec

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import failed
from asyncgrpo.types import Score

T = TypeVar("T")

FIRST_WAIT_S, LAST_WAIT_S = 0.2, 5.0
"""First and longest backoff; a jitter of up to half is added."""


class ServiceError(RewardError):
    """A service gave no usable reply, or a sandbox ran no program."""

    def __init__(self, detail: str, *, is_late: bool = False) -> None:
        super().__init__(detail)
        self.is_late = is_late
        """True if it missed the deadline."""

    def score(self, failure: str) -> Score:
        """Return the score of a completion that has none for this reason: `timeout`, or else `failure`."""
        return failed("timeout" if self.is_late else failure, str(self))


class _Unavailable(Exception):
    """The service was not reached, or failed: another try may work."""


class Service:
    """Something that takes JSON at a URL. Use it from one event loop."""

    def __init__(self, url: str, *, deadline_s: float, key: str = "") -> None:
        """
        Args:
            deadline_s: of a reply, all tries together, seconds.
            key: bearer token of the requests; empty: none.
        """
        import aiohttp  # noqa: F401  # so that the first request does not wait for it; reward workers need none

        self.url, self._deadline_s = url, deadline_s
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session: Any = None

    async def ask(self, body: Any = None, *, at: str = "") -> bytes:
        """Return the reply to a POST of `body` as JSON, or a GET without one, at `at` below the URL. Raises ServiceError."""
        tried, problem = 0, ""
        try:
            async with asyncio.timeout(self._deadline_s):
                while True:
                    try:
                        return await self._send(body, self.url + at)
                    except _Unavailable as error:
                        tried, problem = tried + 1, str(error)
                    wait_s = min(FIRST_WAIT_S * 2 ** (tried - 1), LAST_WAIT_S)
                    await asyncio.sleep(wait_s * random.uniform(1.0, 1.5))
        except TimeoutError:
            if not problem:
                raise ServiceError(f"{self.url} did not reply within {self._deadline_s:g} s", is_late=True) from None
        raise ServiceError(f"{self.url}: {problem}, {tried} times")

    async def ask_for(self, kind: type[T], body: Any = None, *, at: str = "", otherwise: str) -> T:
        """Return the reply as this type. Raises ServiceError with `otherwise` for another form."""
        reply = await self.ask(body, at=at)
        try:
            return msgspec.json.decode(reply, type=kind)
        except (ValueError, RecursionError) as error:  # of msgspec, or text that is not UTF-8
            raise ServiceError(f"{self.url}: {otherwise}: {error}") from error

    async def close(self) -> None:
        """Close the connections; requests that run fail."""
        if self._session is not None:
            await self._session.close()

    async def _send(self, body: Any, url: str) -> bytes:
        import aiohttp

        if self._session is None:  # here, because it belongs to the event loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        try:
            method = "GET" if body is None else "POST"
            data = None if body is None else msgspec.json.encode(body)
            async with self._session.request(method, url, data=data, headers=self._headers) as response:
                if response.method != method:
                    raise ServiceError(f"{self.url}: HTTP {response.history[0].status} moves it; name {response.url}")
                if response.status == 429 or response.status >= 500:
                    raise _Unavailable(f"HTTP {response.status}")
                if response.status != 200:
                    start = (await response.content.read(200)).decode(errors="replace")
                    raise ServiceError(f"{self.url}: HTTP {response.status}: {start}")
                return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):  # the deadline's
                raise
            raise _Unavailable(str(error) or type(error).__name__) from error
