"""Probes what a run needs over the network, once and before anything starts: the Hugging Face hub, and services at a URL.

Without the probe, a library retries an unreachable hub for half a minute, and a reward its service until the deadline of
a score.
"""

import http.client
import logging
import os
import socket
import threading
import urllib.request
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from asyncgrpo.config.rules import is_offline, local_model
from asyncgrpo.errors import ConfigError

log = logging.getLogger(__name__)

WITHIN_S = 4.0
"""Deadline of a probe, name resolution included."""


def find_model(path: str, key: str = "model.path") -> Path | None:
    """Return the folder of a model; None for a hub id that is not cached, if the hub replies.

    Without a hub, this process and its children read the cache only.

    Raises:
        ConfigError: the folder does not exist, or neither cache nor hub can give the model.
    """
    folder = local_model(path, key)
    if Path(path).expanduser().is_dir() or (why := why_no_hub()) is None:
        return folder
    if folder is None:
        nowhere = f"{path} is neither a folder nor in the local Hugging Face cache"
        raise ConfigError(f"{key}: {nowhere}, and {why}; give the folder of a downloaded model")
    if not is_offline():
        log.warning("%s: %s, so %s is used as the local cache has it", key, why, path)
        go_offline()
    return folder


def why_no_hub() -> str | None:
    """Return the reason why the hub cannot be reached; None if it replies. The probe runs once."""
    return "HF_HUB_OFFLINE is set" if is_offline() else _ask_hub()


@lru_cache(maxsize=1)
def _ask_hub() -> str | None:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    def ask() -> None:
        status = get_session().head(constants.ENDPOINT, timeout=WITHIN_S).status_code
        if status >= 500:
            raise OSError(f"HTTP {status}")

    why = _why_not(ask)
    return None if why is None else f"{constants.ENDPOINT} cannot be reached ({why})"


def go_offline() -> None:
    """Make the libraries of this process and of its children read their caches only."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"  # for children, and libraries that are imported later
    constants.HF_HUB_OFFLINE = True


def check_service(url: str, key: str) -> None:
    """Raise ConfigError, which names `key`, if nothing accepts a connection at the host and port of `url`."""
    parts = urlsplit(url)

    def connect() -> None:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=WITHIN_S).close()

    if (why := _why_not(connect)) is not None:
        raise ConfigError(f"{key}: {url} cannot be reached ({why}); start the service before the run")


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(
    url: str, *, token: str | None = None, body: bytes | None = None, timeout_s: float, limit: int | None = None
) -> bytes:
    """Return the body of the reply to one request over HTTP.

    It ignores any proxy of the environment: the server is on this machine, or on one beside it.

    Args:
        token: sent as `Authorization: Bearer`.
        body: JSON to be posted; None: the page is read.
        limit: bytes after which the reply is cut off; None: no limit.
    Raises:
        OSError: there was no reply over HTTP; `urllib.error.HTTPError`, which is one, if the reply is an error.
    """
    request = urllib.request.Request(url, data=body)
    if body is not None:
        request.add_header("Content-Type", "application/json")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with _direct.open(request, timeout=timeout_s) as reply:
            return reply.read(limit)
    except http.client.HTTPException as problem:
        raise OSError(f"another server is there, or the reply was cut off ({problem!r})") from problem


def _why_not(ask: Callable[[], object]) -> str | None:
    """Return the error of `ask`; None if it returned within `WITHIN_S`. A thread bounds name resolution too."""
    problems: list[str] = []

    def run() -> None:
        try:
            ask()
        except Exception as error:  # of the library, or of an URL without a meaning
            problems.append((isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__)

    asking = threading.Thread(target=run, name="reach", daemon=True)
    asking.start()
    asking.join(WITHIN_S)
    if asking.is_alive():
        return f"no reply within {WITHIN_S:g} s"
    return problems[0] if problems else None
