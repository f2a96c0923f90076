"""Reward functions of users: `my_reward.py` or `my_reward.py:name`.

The file only runs inside worker processes. It is checked at the start of a run, and an error is one sentence, before any
GPU time is spent. The names of its parameters decide the form of a function:

    verl's            f(data_source, solution_str, ground_truth, extra_info=None)
    verl's batch      f(data_sources, solution_strs, ground_truths, extra_infos=None)
    TRL's             f(completions, **columns), f(prompts, completions, completion_ids, ground_truth, ...)
    by keyword        f(prompt, completion, answer, info), or some of these

A function of verl's batch form or of TRL's is called once for all completions of a group and returns a list. The others
are called for each completion and return a number, or a dict with `score` and named parts. All may be `async`; one worker
awaits one call at a time.
"""

import asyncio
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from asyncgrpo.errors import RewardError
from asyncgrpo.guests import GuestEnded, run_apart, split_spec
from asyncgrpo.rewards.base import Sampled, describe, last_text
from asyncgrpo.rewards.pool import NOTHING, Call, WorkerReady, call_of, start_worker
from asyncgrpo.rewards.rules import reference_of
from asyncgrpo.types import Prompt, Score

if TYPE_CHECKING:
    from asyncgrpo.config.schema import RewardConfig

log = logging.getLogger(__name__)

LOAD = f"{__name__}:load_user_function"
"""Target of a worker with a user's function."""


@dataclass(frozen=True)
class Function:
    """A user's function, called for a `Call`."""

    about: str
    """Its name, its parameters and its form."""
    takes_groups: bool
    """True if it is called once for a group, and returns a list."""
    call: Callable[[Call], Any]
    kwargs: tuple[str, ...] = ()
    """The names of the further arguments that it takes of those given."""

    def __call__(self, call: Call) -> Any:
        return self.call(call)


def check_user_function(
    spec: str, config: "RewardConfig", *, import_timeout_s: float, trial: Prompt | None
) -> WorkerReady:
    """Check a user's function: load it in a worker, which then ends. Blocks as long as the file's imports take.

    Args:
        import_timeout_s: deadline of importing the file; `reward.timeout_s` if that is longer.
        trial: prompt whose ground truth is scored as a completion. A failure is a warning, because the function may work for
            other completions.
    Raises:
        RewardError: the file or function does not exist or cannot be imported, or its parameters are unknown.
    """

    async def load() -> WorkerReady:
        hint = " If it only takes that long, raise reward.timeout_s"
        timeout_s = max(import_timeout_s, config.timeout_s)
        guest = await start_worker(LOAD, {"spec": spec, "kwargs": config.kwargs}, spec, timeout_s, hint)
        why = ""
        if trial is not None:
            call = call_of(trial, [Sampled(reference_of(trial)[0])], is_group=guest.ready.takes_groups)
            try:
                reply = await asyncio.wait_for(guest.send(call), config.timeout_s)
                score = msgspec.msgpack.decode(reply, type=list[Score])[0]
                why = f"{score.failure}: {score.detail}" if score.failure is not None else ""
            except TimeoutError:
                why = f"timeout: no score after {config.timeout_s:g} s"
            except GuestEnded as ended:
                why = f"crash: the reward worker {ended}"
        await guest.kill()
        if why:
            log.warning("%s: the ground truth of row 0, as a completion, could not be scored (%s)", spec, why)
        return guest.ready

    return run_apart(load())


def load_user_function(spec: str, kwargs: Mapping[str, Any] = NOTHING) -> Function:
    """Run the user's file and return its function, called by the names it takes. For worker processes only.

    Args:
        kwargs: further arguments of it, as far as it takes them.
    Raises:
        RewardError: one sentence that names the file and what to fix.
    """
    path, name = split_spec(spec)
    function = find_in(run_file(path), path, name, "function")
    return recognise(function, path, name, kwargs)


def run_file(path: Path, what: str = "reward") -> ModuleType:
    """Import a user's file with its folder first on the path, so that it finds its own modules.

    Raises:
        RewardError: the file does not exist, or its import fails.
    """
    if not path.is_file():
        raise RewardError(f"{what} file {path} does not exist")
    # Under its own name if that is free, so that a module that imports it back gets the same module.
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    found = importlib.util.spec_from_file_location(f"_{what}_{path.stem}" if taken else path.stem, path)
    if found is None or found.loader is None:
        raise RewardError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
    except BaseException as error:
        raise RewardError(f"{path} cannot be imported: {describe(error)}") from error
    return module


def find_in(module: ModuleType, path: Path, name: str, kind: Literal["function", "class"]) -> Any:
    """Return the function or class that `module`, run from `path`, has under `name`. Raises RewardError, one sentence."""
    fits = inspect.isclass if kind == "class" else callable
    found = getattr(module, name, None)
    if fits(found):
        return found
    own = [
        key
        for key, value in vars(module).items()
        if fits(value) and getattr(value, "__module__", "") == module.__name__
    ]
    there = f"name one with {path.name}:NAME, such as {', '.join(own)}" if own else f"it has no {kind} at all"
    raise RewardError(f"{path} has no {kind} {name}; {there}")


# -- the form of a function --------------------------------------------------------------------------------------------

Getters = dict[str, Callable[[Call], Any]]

_VERL: Getters = {
    "data_source": lambda call: call.prompt.source,
    "solution_str": lambda call: call.completion_text,
    "ground_truth": lambda call: call.prompt.answer,
    "extra_info": lambda call: call.prompt.info,
}
_KEYWORD: Getters = {
    "prompt": lambda call: last_text(call.prompt),
    "completion": lambda call: call.completion_text,
    "answer": lambda call: call.prompt.answer,
    "info": lambda call: call.prompt.info,
}
_VERL_BATCH: Getters = {
    "data_sources": lambda call: [call.prompt.source] * len(call.completions),
    "solution_strs": lambda call: list(call.completions),
    "ground_truths": lambda call: [call.prompt.answer] * len(call.completions),
    "extra_infos": lambda call: [call.prompt.info] * len(call.completions),
}
_TRL: Getters = {
    "prompts": lambda call: (
        [list(call.prompt.turns) if call.prompt.turns else last_text(call.prompt)] * len(call.completions)
    ),
    "completions": lambda call: [
        [{"role": "assistant", "content": text}] if call.prompt.turns else text for text in call.completions
    ],
    "completion_ids": lambda call: [list(ids) for ids in call.completion_ids],
}
_OF_TRL_ITSELF = {"trainer_state", "environments", "log_extra", "log_metric"}
_FORMS = (
    f"compute_score({', '.join(_VERL)}), TRL's f(completions, **columns), or any of the names {', '.join(_KEYWORD)}"
)


def recognise(function: Callable[..., Any], path: Path, name: str, kwargs: Mapping[str, Any]) -> Function:
    """Return a user's function in the form that its parameters show.

    Args:
        kwargs: further arguments of it. It gets those that it takes, and they are no part of its form.
    Raises:
        RewardError: it takes what no reward can give; the message names file, function and the forms there are.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{path}: the parameters of {name} cannot be read: {error}") from error
    parameters = signature.parameters.values()
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = {key: value for key, value in kwargs.items() if takes_any or key in by_name}
    named = by_name.keys() - taken
    required = [p.name for p in by_name.values() if p.name in named and p.default is p.empty]
    required += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if named & _TRL.keys():
        form, getters = "TRL's form, one call for a group", _TRL
        unknown = [key for key in required if key in _OF_TRL_ITSELF or key not in by_name]
    else:
        if named & _VERL_BATCH.keys():
            form, getters, known = "verl's batch form, one call for a group", _VERL_BATCH, _VERL_BATCH
        elif named & _KEYWORD.keys() and not named & _VERL.keys():
            form, getters, known = "by keyword, one call for a completion", _KEYWORD, _KEYWORD
        else:
            form, getters, known = "verl's form, one call for a completion", _VERL, _VERL | _KEYWORD
        unknown = [key for key in required if key not in known]
        if not takes_any:
            getters = {key: get for key, get in known.items() if key in named}
    if unknown or not getters:
        what = ", ".join(unknown) or "nothing"
        raise RewardError(f"{path}: {name}{signature} takes {what}, which a reward cannot give; expected {_FORMS}")

    def call(call: Call) -> Any:
        given = {key: get(call) for key, get in getters.items()}
        if getters is _TRL:
            given = _columns(call) | given
            if missing := [key for key in required if key not in given]:
                raise RewardError(f"the row has no column {', '.join(missing)}, which the function takes")
            given = {key: value for key, value in given.items() if takes_any or key in named}
        return function(**(given | taken))

    plain = [p.replace(annotation=p.empty) for p in parameters]
    about = f"{name}{signature.replace(parameters=plain, return_annotation=signature.empty)}, {form}"
    return Function(about, form.endswith("group"), call, (*taken,))


def _columns(call: Call) -> dict[str, Any]:
    """Return the columns of the row, repeated. Answer and source also have the names for them that the row does not have."""
    answer, source = call.prompt.answer, call.prompt.source
    known = {"ground_truth": answer, "answer": answer, "solution": answer, "data_source": source, "task": source}
    columns = known | {"extra_info": call.prompt.info} | call.prompt.info
    return {name: [value] * len(call.completions) for name, value in columns.items()}
