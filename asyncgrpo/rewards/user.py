"""Reward functions of users: `my_reward.py` or `my_reward.py:name`.

The file only runs inside worker processes. It is checked at the start of a run, and an error is one sentence, before any
GPU time is spent. `signatures.py` says which parameters a function may take, and what it returns. It may be `async`; one
worker awaits one call at a time.
"""

import asyncio
import importlib.util
import inspect
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled, describe
from asyncgrpo.rewards.pool import START_TIMEOUT_S, Pool
from asyncgrpo.rewards.signatures import Function, recognise
from asyncgrpo.rewards.worker import Call, WorkerReady
from asyncgrpo.types import Prompt, Score

DEFAULT_NAME = "compute_score"
_TARGET = f"{__name__}:load_in_worker"
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


class UserReward:
    """Scores with the user's function `spec`, in `workers` processes; a call may take `timeout_s`."""

    def __init__(
        self,
        spec: str,
        *,
        timeout_s: float,
        workers: int | Literal["auto"],
        kwargs: Mapping[str, Any] = NO_KWARGS,
        takes_groups: bool = False,
        about: str = "",
    ) -> None:
        """
        Args:
            kwargs: further arguments of the function, as far as it takes them.
            takes_groups, about: as `check_user_function` found them.
        """
        self._pool = Pool(_TARGET, _argument(spec, kwargs), what=spec, workers=workers, timeout_s=timeout_s)
        self.takes_groups, self.about = takes_groups, about

    def check_sources(self, sources: set[str]) -> None:
        """Any `data_source` will do."""

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        """Score completions. See `rewards.base.Reward`."""
        if self.takes_groups:
            return await self._pool.call(call_of(prompt, completions, is_group=True))
        return await score_each(self._pool, prompt, completions)

    def withdraw(self) -> None:
        """See `rewards.base.ConfiguredReward`."""
        self._pool.withdraw()

    async def close(self) -> None:
        """End every worker process."""
        await self._pool.close()


def call_of(prompt: Prompt, completions: Sequence[Sampled], *, is_group: bool = False) -> Call:
    """The call to a worker that scores these completions of this prompt."""
    return Call(
        data_source=prompt.source,
        completions=tuple(one.text for one in completions),
        ground_truth=prompt.answer,
        info=prompt.info,
        prompt_text=prompt.turns[-1]["content"] if prompt.turns else prompt.text,
        turns=prompt.turns,
        completion_ids=tuple(tuple(one.token_ids) for one in completions) if is_group else (),
        is_group=is_group,
    )


async def score_each(pool: Pool, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
    """Score completions with a call for each."""
    replies = await asyncio.gather(*(pool.call(call_of(prompt, [one])) for one in completions))
    return [score for (score,) in replies]


def check_user_function(
    spec: str, *, kwargs: Mapping[str, Any] = NO_KWARGS, timeout_s: float = START_TIMEOUT_S
) -> WorkerReady:
    """Check a user's function: load it in a worker, which then ends. Blocks as long as the file's imports take.

    Returns:
        What the function is, and how it is called.
    Raises:
        RewardError: there is no such file or function, it cannot be imported, or its parameters are unknown.
    """
    found: list[WorkerReady] = []
    problems: list[BaseException] = []

    async def load() -> None:
        pool = Pool(_TARGET, _argument(spec, kwargs), what=spec, workers=1, timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                found.append(await pool.start())
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
    return found[0]


def _argument(spec: str, kwargs: Mapping[str, Any]) -> str:
    return json.dumps([spec, dict(kwargs)])


def load_in_worker(argument: str) -> Function:
    """`load_user_function` for a spec and further arguments, as JSON."""
    spec, kwargs = json.loads(argument)
    return load_user_function(spec, kwargs)


def load_user_function(spec: str, kwargs: Mapping[str, Any] = NO_KWARGS) -> Function:
    """Run the user's file and return its function, called by the names it takes. For worker processes only.

    Args:
        kwargs: further arguments of it, as far as it takes them.
    Raises:
        RewardError: one sentence that names the file and what to fix.
    """
    path, name = split_spec(spec)
    return recognise(_function(run_file(path), path, name), path, name, kwargs)


def split_spec(spec: str, default: str = DEFAULT_NAME) -> tuple[Path, str]:
    """Split `my_reward.py:name` into an absolute path and a name, which is `default` if there is none."""
    head, colon, tail = spec.rpartition(":")
    path, name = (head, tail) if colon and tail.isidentifier() else (spec, default)
    return Path(path).expanduser().absolute(), name


def run_file(path: Path, what: str = "reward") -> ModuleType:
    """Import a user's file as running it would: its folder comes first on the path, so that it finds its own modules.

    Raises:
        RewardError: there is none, or its import fails; one sentence.
    """
    if not path.is_file():
        raise RewardError(f"there is no {what} file {path}")
    # Under its own name if that is free, so that a module that imports it back gets the same module.
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    found = importlib.util.spec_from_file_location(f"_{what}_{path.stem}" if taken else path.stem, path)
    if found is None or found.loader is None:
        raise RewardError(f"{path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}" if error.filename else path
        line = f": {error.text.strip()}" if error.text else ""
        raise RewardError(f"{where}: {error.msg}{line}") from error
    except BaseException as error:
        is_relative = isinstance(error, ImportError) and "relative import" in str(error)
        hint = (
            f"; {path.name} is no part of a package: write `import name` for a module beside it" if is_relative else ""
        )
        raise RewardError(f"{path} cannot be imported: {describe(error)}{hint}") from error
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
