"""Keeps a process as it was while a guest that thinks it owns the process is imported and launched in it."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restores the event loop policy, the start method of multiprocessing and the root logger; silences warnings, also
    those of processes that are started meanwhile.
    """
    policy = asyncio.get_event_loop_policy()
    start_method = multiprocessing.get_start_method(allow_none=True)
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []  # a guest that configures logging anew would close those that it finds
    python_warnings = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore"
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        del os.environ["PYTHONWARNINGS"]
        if python_warnings is not None:
            os.environ["PYTHONWARNINGS"] = python_warnings
        root.handlers, root.level = handlers, level
        multiprocessing.set_start_method(start_method, force=True)
        asyncio.set_event_loop_policy(policy)
