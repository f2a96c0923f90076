"""Reward functions of users: `my_reward.py` or `my_reward.py:name`.

The file only runs inside worker processes. It is checked at the start of a run, and an error is one sentence, before any
GPU time is spent. A function may take any of the names of verl's `compute_score(data_source, solution_str,
ground_truth, extra_info=None)` and of `f(prompt, completion, answer, info)`. It returns a number, or a dict with `score`
and named parts. It may be `async`; one worker awaits one call at a time.
"""

import asyncio
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import describe
from asyncgrpo.rewards.pool import START_TIMEOUT_S, Pool
from asyncgrpo.rewards.worker import Call
from asyncgrpo.types import Prompt, Score

DEFAULT_NAME = "compute_score"
_TARGET = f"{__name__}:load_user_function"

_VERL: dict[str, Callable[[Call], Any]] = {
    "data_source": lambda call: call.data_source,
    "solution_str": lambda call: call.completion_text,
    "ground_truth": lambda call: call.ground_truth,
    "extra_info": lambda call: call.info,
}
_KEYWORD: dict[str, Callable[[Call], Any]] = {
    "prompt": lambda call: call.prompt_text,
    "completion": lambda call: call.completion_text,
    "answer": lambda call: call.ground_truth,
    "info": lambda call: call.info,
}
_KNOWN = _VERL | _KEYWORD
_SIGNATURES = f"compute_score({', '.join(_VERL)}) or any of the names {', '.join(_KEYWORD)}"


class UserReward:
    """Scores with the user's function `spec`, in `workers` processes; a call may take `timeout_s`."""

    def __init__(self, spec: str, *, timeout_s: float, workers: int) -> None:
        self._pool = Pool(_TARGET, spec, workers=workers, timeout_s=timeout_s)

    async def score(self, prompt: Prompt, completion_text: str) -> Score:
        """Score one completion. See `rewards.base.Reward`."""
        return await self._pool.call(call_of(prompt, completion_text))

    async def close(self) -> None:
        """End every worker process."""
        await self._pool.close()


def call_of(prompt: Prompt, completion_text: str) -> Call:
    """The call to a worker that scores a completion of this prompt."""
    return Call(
        data_source=prompt.source,
        completion_text=completion_text,
        ground_truth=prompt.answer,
        info=prompt.info,
        prompt_text=prompt.text,
    )


def check_user_function(spec: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
    """Check a user's function: load it in a worker, which then ends. Blocks as long as the file's imports take.

    Raises:
        RewardError: there is no such file or function, it cannot be imported, or its parameters are unknown.
    """
    problems: list[BaseException] = []

    async def load() -> None:
        pool = Pool(_TARGET, spec, workers=1, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                await pool.start()
        except TimeoutError:
            raise RewardError(
                f"{spec} was not imported within {timeout_s:g} s; does its import wait for something? If it only takes "
                "that long, raise reward.timeout_s"
            ) from None
        finally:
            await pool.close()

    def run() -> None:
        try:
            asyncio.run(load())
        except BaseException as problem:
            problems.append(problem)

    # In a thread of its own, because the caller may be inside a running event loop.
    thread = threading.Thread(target=run, name="reward-check")
    thread.start()
    thread.join()
    if problems:
        raise problems[0]


def load_user_function(spec: str) -> Callable[[Call], Any]:
    """Run the user's file and return its function, called by the names it takes. For worker processes only.

    Raises:
        RewardError: one sentence that names the file and what to fix.
    """
    path, name = split_spec(spec)
    function = _function(_run_file(path), path, name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{path}: the parameters of {name} cannot be read: {error}") from error
    return _bind(function, signature, f"{path}: {name}{signature}")


def split_spec(spec: str) -> tuple[Path, str]:
    """Split `my_reward.py:name` into an absolute path and a name, which is `compute_score` by default."""
    head, colon, tail = spec.rpartition(":")
    path, name = (head, tail) if colon and tail.isidentifier() else (spec, DEFAULT_NAME)
    return Path(path).expanduser().absolute(), name


def _run_file(path: Path) -> ModuleType:
    """Import the file as running it would: its folder comes first on the path, so that it finds its own modules."""
    if not path.is_file():
        raise RewardError(f"there is no reward file {path}")
    # Under its own name if that is free, so that a module that imports it back gets the same module.
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    found = importlib.util.spec_from_file_location(f"_reward_{path.stem}" if taken else path.stem, path)
    if found is None or found.loader is None:
        raise RewardError(f"{path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise RewardError(f"{error.filename}, line {error.lineno}: {error.msg}: {line}") from error
    except BaseException as error:
        traceback.print_exc()  # the sentence has the user's line; stderr has the whole traceback
        raise RewardError(f"{path} cannot be imported: {describe(error)}") from error
    return module


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    if function is not None:
        raise RewardError(f"{path}: {name} is a {type(function).__name__}, not a function")
    own = [
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    there = f"it has {', '.join(own)}: name one with {path.name}:{own[0]}" if own else "it has no function at all"
    raise RewardError(f"{path} has no {name}; {there}")


def _bind(function: Callable[..., Any], signature: inspect.Signature, what: str) -> Callable[[Call], Any]:
    """How to call `function`: by the names it takes, or by position in verl's order if its names are unknown."""
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    known = [p.name for p in named if p.name in _KNOWN]
    if inspect.Parameter.POSITIONAL_ONLY in kinds or not set(required) <= _KNOWN.keys():
        return _by_position(function, [p.name for p in named if p.kind != p.KEYWORD_ONLY], required, what)
    if inspect.Parameter.VAR_KEYWORD in kinds:  # it gets the other names of the same naming as well
        speaks_verl = not known or any(name in _VERL for name in known)
        known += [name for name in (_VERL if speaks_verl else _KEYWORD) if name not in known]
    elif inspect.Parameter.VAR_POSITIONAL in kinds and not known:
        return _by_position(function, list(_VERL), list(_VERL), what)
    if not known:
        raise RewardError(f"{what} takes nothing that a reward can give; expected {_SIGNATURES}")
    return lambda call: function(**{name: _KNOWN[name](call) for name in known})


def _by_position(
    function: Callable[..., Any], names: list[str], required: list[str], what: str
) -> Callable[[Call], Any]:
    """Call by position, in verl's order, with three or four required parameters, none of a known name out of place."""
    order = list(_VERL)
    agrees = all(name == expected or name not in _KNOWN for name, expected in zip(names, order, strict=False))
    if not agrees or not 3 <= len(required) <= 4 or not set(required) <= set(names[:4]):
        unknown = ", ".join(name for name in required if name not in _KNOWN) or "positional-only parameters"
        raise RewardError(f"{what} takes {unknown}, which a reward cannot give; expected {_SIGNATURES}")
    getters = [_VERL[name] for name, _ in zip(order, names, strict=False)]
    return lambda call: function(*[get(call) for get in getters])
