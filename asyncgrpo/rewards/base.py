"""The base of all rewards, and how returned values or an exception become a `Score` for each completion.

A reward never raises and never hangs for its caller. A score is a number within bounds or a named failure.
"""

import asyncio
import math
import os
import re
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import msgspec

from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.logs import visible
from asyncgrpo.types import Completion, Prompt, Score

# -- the base -----------------------------------------------------------------------------------------------------------


class Sampled(NamedTuple):
    """A completion as a reward sees it."""

    text: str
    token_ids: Sequence[int] = ()
    completion: Completion | None = None
    """As the engine sampled it, for a teacher."""


def is_training(prompt: Prompt) -> bool:
    """Return True for a prompt of the training data, False for one of an evaluation."""
    return prompt.prompt_id.startswith("train/")


def last_text(prompt: Prompt) -> str:
    """The prompt before tokenisation; of chat turns the last one."""
    return str(prompt.turns[-1]["content"]) if prompt.turns else prompt.text


class Reward:
    """Scores completions. `build.build_reward` makes one. These defaults suit one whose calls wait for no worker."""

    takes_groups: bool = False
    """True if one call scores all completions of a group. Otherwise each is scored as soon as it is sampled."""
    teaches: bool = False
    """True if scores of training prompts have a teacher's log-probs, also of completions that their environment scored."""
    about: str = ""
    """Name and form of what it calls."""
    owns: Sequence[Any] = ()
    """Other rewards and services, which it closes."""

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        """The score of each completion of one prompt. A call that runs has a deadline, which it never passes by more than
        the time to kill a worker."""
        raise NotImplementedError

    def check_sources(self, sources: set[str]) -> None:
        """Raise RewardError or ConfigError if it cannot score rows of one of these sources, or reach what it needs."""

    async def close(self) -> None:
        """End every worker process, and close the connections."""
        for one in self.owns:
            await one.close()


async def each_in_turn(
    turn: asyncio.Semaphore, score: Callable[[Sampled], Awaitable[Score]], completions: Sequence[Sampled]
) -> list[Score]:
    """Score completions, each in its turn. A score has the time that it took, and that it waited before."""

    async def scored(one: Sampled) -> Score:
        asked = time.perf_counter()
        async with turn:
            started = time.perf_counter()
            found = await score(one)
            return msgspec.structs.replace(found, seconds=time.perf_counter() - started, waited=started - asked)

    return await asyncio.gather(*map(scored, completions))


async def score_one(reward: Reward, prompt: Prompt, completion_text: str) -> Score:
    """Score one completion of which only the text is known."""
    (score,) = await reward.score(prompt, [Sampled(completion_text)])
    return score


# -- from what a function returned or raised to a score ----------------------------------------------------------------


IN_ENVIRONMENT = "environment"
"""Failure of a completion whose environment or agent did not reply as specified."""
MAX_DETAIL = 500
"""The most characters of `Score.detail`."""
MAX_PARTS = 32
"""The most parts of a score: parts become metrics, and metrics must stay few."""
LARGEST = 1e6
"""Bound on the size of a reward. Advantages sum squares of rewards: far above the bound they overflow, and the group, or
the whole batch, has no gradient."""

_ORIGIN = re.compile(r"(.+?:\d+: )?\w+(?=:)|[^\d:]{1,40}")
"""Matches place and type in a detail that `describe` made; of one without an exception the first words."""
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {os.path.dirname(os.path.abspath(__file__)) + os.sep, "<"}
)


def failed(failure: str, detail: str = "", *, seconds: float = 0.0) -> Score:
    """Return a score that names a failure."""
    return Score(failure=failure, detail=detail[:MAX_DETAIL], seconds=seconds)


def scores_of_call(function: Callable[[], Any], group_size: int | None = None) -> list[Score]:
    """Call a function, and make scores of what it returns or raises. Nothing escapes, not even `SystemExit`.

    Args:
        group_size: completions that it scores at once, with a list; None: one, with a value.
    """
    try:
        value = function()
        return [score_of_value(value)] if group_size is None else scores_of_values(value, group_size)
    except BaseException as error:
        return [failed("exception", describe(error))] * (group_size or 1)


def scores_of_values(values: Any, count: int) -> list[Score]:
    """The scores of what a function returned for a group: a list with a value, or None, for each of `count` completions.

    None means that the function does not apply to this completion, as in TRL.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        return [failed("bad_type", f"a list of {count} rewards was expected, not {clip(values)}")] * count
    if len(values) != count:
        return [failed("bad_type", f"a list of {len(values)} was returned for {count} completions")] * count
    nothing = failed("not_applicable", "the reward function returned None, and no other one scores this completion")
    return [nothing if value is None else score_of_value(value) for value in values]


def score_of_value(value: Any) -> Score:
    """The score of a returned value: a real number, a mapping with one under `score`, or a rule's own `Score`."""
    if isinstance(value, Score):
        return value
    if not isinstance(value, Mapping):
        return _score_of_number(value, "a reward")
    if "score" not in value:
        return failed("bad_type", f"the reward is a dict without 'score'; it has {sorted(map(str, value))}")
    score = _score_of_number(value["score"], "the reward's 'score'")
    if score.failure is not None:
        return score
    numbers = {visible(str(name)): number_of(part) for name, part in value.items() if name != "score"}
    good = [(name, number) for name, number in numbers.items() if number is not None and abs(number) <= LARGEST]
    parts = dict(good[:MAX_PARTS])
    left_out = ", ".join(name for name in numbers if name not in parts)
    detail = f"parts left out, no number within {LARGEST:g}, or more than {MAX_PARTS}: {left_out}" if left_out else ""
    return Score(value=score.value, parts=parts, detail=detail[:MAX_DETAIL])


def _score_of_number(value: Any, what: str) -> Score:
    number = number_of(value)
    if number is None:
        return failed("bad_type", f"{what} must be a number or a dict with 'score', not {clip(value)}")
    if not math.isfinite(number):
        return failed("not_finite", f"{what} is {number}")
    if abs(number) > LARGEST:
        return failed("too_large", f"{what} is {number:.8g}, and rewards reach from {-LARGEST:g} to {LARGEST:g}")
    return Score(value=number)


def number_of(value: Any) -> float | None:
    """`value` as a float; None if it is not a real number. Takes bool, int, float and scalars of numpy or torch."""
    if not isinstance(value, Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond the largest float
        return math.inf


def describe(error: BaseException, *, has_place: bool = True) -> str:
    """Return the text of an AsyncGRPOError; of any other error type, text and the user's line that it came from.

    Of a group, as a TaskGroup raises it, it is that of the first error: its own names nothing.

    Args:
        has_place: False leaves the line out.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        text = visible(str(error))  # half a surrogate pair, as of an unreadable file name, cannot be sent
    except Exception:
        text = "(its text cannot be printed)"
    if isinstance(error, AsyncGRPOError):
        return text
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_LIBRARIES)]
    # The place stands first, so that a long text does not cut it off.
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames and has_place else ""
    return f"{place}{type(error).__name__}: {text}"


def kind_of(score: Score) -> str:
    """The kind of a failure: its name, and its `_ORIGIN` where code of a user or a row may be the cause."""
    origin = _ORIGIN.match(score.detail) if score.failure in ("exception", IN_ENVIRONMENT) else None
    return f"{score.failure} {origin[0].strip()}" if origin else str(score.failure)


def clip(value: Any) -> str:
    """Return the type and the beginning of a value, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text[:80]}{'…' if len(text) > 80 else ''}"
