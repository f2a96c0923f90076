"""What Ray's references hold, with the cause of a failure as itself."""

from collections.abc import Callable
from typing import Any

import ray

from asyncgrpo.errors import AsyncGRPOError, ProcessLost, WeightsError, WireError

POLL_S = 0.2


def result(reference: Any, name: str) -> Any:
    """Of an actor's method that has ended.

    Args:
        name: of the process, with which the message of a loss begins.
    Raises:
        ProcessLost: the process died, or lost touch with one that did; another may take its place.
        AsyncGRPOError: what it found wrong itself; another would find the same.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        while isinstance(cause, BaseExceptionGroup):  # of the tasks of a generator the first says why
            cause = cause.exceptions[0]
        if isinstance(cause, AsyncGRPOError) and not isinstance(cause, (WireError, WeightsError)):
            raise cause from None
        reason = str(cause).strip() or repr(cause)
        loss = ProcessLost(f"{name}: {reason.splitlines()[-1][:300]}")
        loss.is_error = True
        raise loss from error
    except ray.exceptions.RayActorError as error:
        raise ProcessLost(f"{name}: its process died") from error


def results(references: dict[str, Any], while_waiting: Callable[[], None]) -> list[Any]:
    """Of all of them, in order; raises as soon as one has failed.

    Args:
        references: by the name of the process.
        while_waiting: called a few times a second.
    """
    waiting = dict(references)
    while waiting:
        ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=POLL_S)
        for name in [name for name, reference in waiting.items() if has_ended(reference)]:
            result(waiting.pop(name), name)
        while_waiting()
    return [result(reference, name) for name, reference in references.items()]


def has_ended(reference: Any) -> bool:
    """Whether the method has returned or failed."""
    return bool(ray.wait([reference], timeout=0)[0])
