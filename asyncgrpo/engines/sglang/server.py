"""SGLang's own HTTP server for a model that a run needs beside its engines: a teacher."""

import asyncio
import contextlib
import http.client
import os
import threading
import time
import urllib.request
from collections.abc import Callable

from asyncgrpo.engines.sglang import processes
from asyncgrpo.engines.sglang.engine import SGLangOptions
from asyncgrpo.errors import EngineError
from asyncgrpo.host import importing, last_error, stderr_size

with importing():
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree


def serve(
    options: SGLangOptions,
    address: tuple[str, int],
    key: str,
    on_health: Callable[[], None],
    *,
    probe_every_s: float,
) -> None:
    """Serve a model until a process of the server ends. Call it from the main thread; it may kill this process.

    Call `options.prepare` before this module is imported.

    Args:
        address: host and port to listen at.
        key: bearer token that requests must send.
        on_health: called in a thread after each proof that the model replies.
    Raises:
        EngineError: the server cannot start.
    """
    host, port = address

    def probe() -> None:
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):  # an error status is an OSError, too
                urllib.request.urlopen(f"http://{host}:{port}/health_generate", timeout=60).close()
                on_health()
            time.sleep(probe_every_s)

    processes.mark_files()
    before = stderr_size()
    try:
        own = processes.arguments(options) | {"host": host, "port": port, "api_key": key}
        launch_server(
            ServerArgs(**own | options.extra, custom_sigquit_handler=_end),
            run_scheduler_process_func=processes.run_scheduler,
            launch_callback=threading.Thread(target=probe, name="health", daemon=True).start,
        )
    except Exception as error:
        why = last_error(before) or error
        raise EngineError(f"SGLang cannot serve the model {options.model_path}: {why}") from error


def _end(signum: int, frame: object) -> None:
    """Handle SIGQUIT, with which a child reports its failure. An event loop would swallow an exception."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        kill_process_tree(os.getpid())
    processes.raise_launch_failure(signum, frame)
