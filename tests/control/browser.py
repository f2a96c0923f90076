"""A headless Chromium for tests, spoken to over its debugging protocol. It is a browser as people have, not a model of one."""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.runs import wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WITHIN_S = 20.0
"""How long a page may take to show what is waited for."""


class Page:
    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._number = 0
        self.complaints: list[str] = []
        """What the console said: errors of scripts, and what the content policy refused."""
        self._run(self._connect(port))

    def _run(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(WITHIN_S + 10)

    async def _connect(self, port: int) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as reply:
            address = (await reply.json())["webSocketDebuggerUrl"]
        self._socket = await self._session.ws_connect(address, max_msg_size=2**27)
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable")

    async def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            said = await self._socket.receive_json(timeout=WITHIN_S)
            if said.get("id") == self._number:
                assert "error" not in said, said
                return said["result"]
            self._listen(said)

    def _listen(self, said: dict[str, Any]) -> None:
        if said.get("method") == "Log.entryAdded" and said["params"]["entry"]["source"] != "network":
            self.complaints.append(said["params"]["entry"]["text"])
        elif said.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["params"]["exceptionDetails"])[:500])

    def call(self, method: str, **parameters: Any) -> Any:
        return self._run(self._call(method, **parameters))

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def value(self, script: str) -> Any:
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """What an expression is once it is true. While a page loads, what it names may not be there."""
        deadline = time.monotonic() + WITHIN_S
        while not (value := self.value(f"(() => {{ try {{ return {script} }} catch {{ return null }} }})()")):
            assert time.monotonic() < deadline, f"never came: {script}\n{self.value('document.body?.innerText')}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return self.wait(f"document.querySelector({json.dumps(selector)})?.innerText")

    def click(self, selector: str) -> None:
        self.wait(f"(e => e && !e.disabled && (e.click(), true))(document.querySelector({json.dumps(selector)}))")

    def type(self, selector: str, text: str) -> None:
        element = f"document.querySelector({json.dumps(selector)})"
        for name in ("input", "change"):
            self.value(
                f"{element}.value = {json.dumps(text)}; {element}.dispatchEvent(new Event('{name}', {{bubbles: true}}))"
            )

    def close(self) -> None:
        self._run(self._socket.close())
        self._run(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextmanager
def browser() -> Iterator[Page]:
    """A browser of its own, with nothing remembered."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags.append("--remote-debugging-port=0")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        quiet["env"] = os.environ | {"TMPDIR": profile}  # for its socket
        process = subprocess.Popen([CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"], **quiet)  # type: ignore[call-overload]
        page = None
        try:
            port = Path(profile) / "DevToolsActivePort"
            wait_until(lambda: port.exists() and port.read_text() != "", "start of the browser", WITHIN_S)
            page = Page(int(port.read_text().split()[0]))
            yield page
        finally:
            if page is not None:
                page.close()
            process.terminate()
            process.wait(10)
