"""One request over HTTP, past any proxy of the environment: what we ask is on this machine, or on one beside it."""

import urllib.request

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str, *, token: str | None = None, body: bytes | None = None, timeout_s: float) -> bytes:
    """The body of the reply.

    Args:
        token: sent as `Authorization: Bearer`.
        body: JSON to be posted; None: the page is read.
    Raises:
        OSError: there was no reply; `urllib.error.HTTPError`, which is one, if the reply is an error.
    """
    request = urllib.request.Request(url, data=body)
    if body is not None:
        request.add_header("Content-Type", "application/json")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    with _direct.open(request, timeout=timeout_s) as reply:
        return reply.read()
