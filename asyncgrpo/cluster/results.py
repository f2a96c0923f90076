"""What Ray's references hold, with the cause of a failure as itself."""

from collections.abc import Callable
from typing import Any

import ray

from asyncgrpo.errors import AsyncGRPOError, ProcessLost, WeightsError, WireError

POLL_S = 0.2


def result(reference: Any) -> Any:
    """Of an actor's method that has ended.

    Raises:
        ProcessLost: its process died, or lost touch with one that did; another may take its place.
        AsyncGRPOError: what it found wrong itself; another would find the same.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, AsyncGRPOError) and not isinstance(cause, (WireError, WeightsError)):
            raise cause from None
        raise ProcessLost(str(cause).strip().splitlines()[-1][:300] if str(cause).strip() else repr(cause)) from error
    except ray.exceptions.RayActorError as error:
        raise ProcessLost("its process died") from error


def results(references: list[Any], while_waiting: Callable[[], None]) -> list[Any]:
    """Of all of them; raises as soon as one has failed.

    Args:
        while_waiting: called a few times a second.
    """
    while len(done := ray.wait(references, num_returns=len(references), timeout=POLL_S)[0]) < len(references):
        for reference in done:
            result(reference)
        while_waiting()
    return [result(reference) for reference in references]


def has_ended(reference: Any) -> bool:
    """Whether the method has returned or failed."""
    return bool(ray.wait([reference], timeout=0)[0])
