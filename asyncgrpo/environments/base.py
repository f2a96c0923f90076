"""What an environment is asked and replies, and how what a class of a user returns becomes a `Reply`.

An environment is asked for an episode for each completion. It may begin with a message, reads each turn of
the model, and answers until it is done. `build.Environment` has the classes of environments.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from asyncgrpo.errors import AsyncGRPOError, RewardError
from asyncgrpo.rewards.base import LARGEST, clip, last_text, number_of
from asyncgrpo.types import Prompt

LONGEST_REPLY = 1 << 20
"""Most characters of one observation."""


class EnvironmentFailed(AsyncGRPOError):
    """An episode cannot go on. No completion is the cause for certain; the one that plays it has no score."""


Task = dict[str, Any]
"""The row of the prompt that an episode plays, by the names that code of a user may take: `task_of`."""


def task_of(prompt: Prompt, seed: int) -> Task:
    """Return the task of a prompt.

    Args:
        seed: the same for all completions of a prompt, so that what they are compared by is the model's doing.
    """
    text = last_text(prompt)
    return {
        "prompt": text,
        "messages": list(prompt.turns) or [{"role": "user", "content": text}],
        "answer": prompt.answer,
        "ground_truth": prompt.answer,
        "data_source": prompt.source,
        "info": prompt.info,
        "extra_info": prompt.info,
        "seed": seed,
    }


TASK_NAMES = tuple(task_of(Prompt(prompt_id="", token_ids=()), 0))


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of an environment to a turn of the model, or its start."""

    messages: tuple[dict[str, str], ...] = ()
    """Chat turns with `role` and `content`, which the model reads next."""
    reward: float | None = None
    """Adds to the reward of the episode."""
    done: bool = False
    """True if the episode is over."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Address of the model for an agent in its episode."""

    base_url: str
    api_key: str
    model: str


# -- what code of a user takes -----------------------------------------------------------------------------------------


def names_of(function: Callable[..., Any], given: Sequence[str], where: str, *, skip: int = 0) -> tuple[str, ...]:
    """Return the names of `given` that a user's function takes. Raises RewardError: it takes something else.

    Args:
        skip: its first parameters that are no names.
    """
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return tuple(given)
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if unknown := [one.name for one in named if one.name not in given and one.default is one.empty]:
        raise RewardError(f"{where} takes {', '.join(unknown)}; there are {', '.join(given)}")
    return tuple(one.name for one in named if one.name in given)


# -- how it is called --------------------------------------------------------------------------------------------------

AT_ONCE = 256
"""Methods, tools and agents that are not coroutines and run at the same time in one process."""
_THREADS = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="environment")


async def call_function(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Call a function of a user, and return or raise what it does. One that is not a coroutine runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)

    def work() -> Any:
        try:
            return function(*arguments, **named)
        except StopIteration as error:  # which a future would never hand over
            raise RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__) from None

    value = await asyncio.get_running_loop().run_in_executor(_THREADS, work)
    return await value if inspect.isawaitable(value) else value


# -- from what a class returned to a reply -----------------------------------------------------------------------------


def reply_of_reset(value: Any) -> Reply:
    """The reply that `reset` returned: nothing, a text, messages, or Gym's `(observation, info)`."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value = value[0]
    return Reply(messages=_messages(value))


def reply_of_step(value: Any) -> Reply:
    """The reply that `step` returned.

    That is `(observation, reward, done)`, the same with a dict of information behind it, Gymnasium's `(observation,
    reward, terminated, truncated, info)`, or None: the episode is over.

    Raises:
        EnvironmentFailed: it is something else, or the reward is not a finite number, or `done` is neither true nor false.
    """
    match value:
        case None:
            return Reply(done=True)
        case (observation, reward, terminated, truncated, Mapping()):
            done = _flag(terminated) or _flag(truncated)
        case (observation, reward, given, Mapping()) | (observation, reward, given):
            done = _flag(given)
        case _:
            raise EnvironmentFailed(f"step returned {clip(value)}; it must return (observation, reward, done)")
    return Reply(messages=_messages(observation), reward=_reward(reward), done=done)


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    is_chat = isinstance(value, Sequence) and all(
        isinstance(one, Mapping) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in value
    )
    if not is_chat:
        raise EnvironmentFailed(f"an observation is a text or messages with role and content, not {clip(value)}")
    if (size := sum(len(one["content"]) for one in value)) > LONGEST_REPLY:
        raise EnvironmentFailed(f"an observation of {size:,} characters; the longest is {LONGEST_REPLY:,}")
    # Half a surrogate pair, as of a file name that is not UTF-8, could be neither sent nor tokenized.
    return tuple(
        {"role": one["role"], "content": one["content"].encode(errors="backslashreplace").decode()} for one in value
    )


def _flag(value: Any) -> bool:
    if value is not None and number_of(value) is None:  # a text is true, even "False"
        raise EnvironmentFailed(f"done must be true or false, not {clip(value)}")
    return bool(value)


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if (number := number_of(value)) is None:
        raise EnvironmentFailed(f"a reward must be a number, not {clip(value)}")
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise EnvironmentFailed(f"the reward {number:g} is not a finite number within {LARGEST:g}")
    return number
