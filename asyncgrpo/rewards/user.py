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
import functools
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

import msgspec

from asyncgrpo.errors import RewardError
from asyncgrpo.guests import START_TIMEOUT_S, Guest, GuestEnded, run_apart
from asyncgrpo.rewards.base import Sampled, describe, failed
from asyncgrpo.rewards.pool import Pool, PoolReward, call_of, start_worker
from asyncgrpo.rewards.rules import reference_of
from asyncgrpo.rewards.worker import Call, WorkerReady
from asyncgrpo.types import Prompt, Score

log = logging.getLogger(__name__)

DEFAULT_NAME = "compute_score"
_TARGET = f"{__name__}:load_in_worker"
SLOW_IMPORT_S = 3.0
"""Import time of a user's file after which a warning is logged."""
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


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


class UserReward(PoolReward):
    """Scores with the user's function `spec`, in `workers` processes; a call may take `timeout_s`."""

    def __init__(
        self,
        spec: str,
        *,
        timeout_s: float,
        workers: int,
        kwargs: Mapping[str, Any] = NO_KWARGS,
        takes_groups: bool = False,
        about: str = "",
    ) -> None:
        """
        Args:
            kwargs: further arguments of the function, as far as it takes them.
            takes_groups, about: as `check_user_function` found them.
        """
        pool = Pool(_TARGET, _argument(spec, kwargs), what=spec, workers=workers, timeout_s=timeout_s)
        super().__init__(pool, about, takes_groups=takes_groups)


def check_user_function(
    spec: str,
    *,
    kwargs: Mapping[str, Any] = NO_KWARGS,
    timeout_s: float = START_TIMEOUT_S,
    trial: Prompt | None = None,
    trial_timeout_s: float = START_TIMEOUT_S,
) -> WorkerReady:
    """Check a user's function: load it in a worker, which then ends. Blocks as long as the file's imports take.

    Args:
        trial: prompt whose ground truth is scored as a completion. A failure is a warning, because the function may work for
            other completions.
    Raises:
        RewardError: the file or function does not exist or cannot be imported, or its parameters are unknown.
    """

    async def load() -> WorkerReady:
        hint = " If it only takes that long, raise reward.timeout_s"
        slow = asyncio.get_running_loop().call_later(
            SLOW_IMPORT_S, log.warning, "%s is still being imported after %g s", spec, SLOW_IMPORT_S
        )
        try:
            guest = await start_worker(_TARGET, _argument(spec, kwargs), spec, timeout_s, hint)
        finally:
            slow.cancel()
        score = None if trial is None else await _try(guest, trial, trial_timeout_s)
        await guest.kill()
        if score is not None and score.failure is not None:
            why = f"{score.failure}: {score.detail}"
            log.warning("%s: the ground truth of row 0, as a completion, could not be scored (%s)", spec, why)
        return guest.ready

    return run_apart(load())


async def _try(guest: Guest, prompt: Prompt, timeout_s: float) -> Score:
    """Score the ground truth of a prompt as its completion."""
    reply = guest.send(call_of(prompt, [Sampled(reference_of(prompt)[0])], is_group=guest.ready.takes_groups))
    try:
        return msgspec.msgpack.decode(await asyncio.wait_for(reply, timeout_s), type=list[Score])[0]
    except TimeoutError:
        return failed("timeout", f"no score after {timeout_s:g} s")
    except GuestEnded as ended:
        return failed("crash", f"the reward worker {ended}")


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
    function = find_in(run_file(path), path, name, "function")
    return recognise(function, path, name, kwargs)


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
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}" if error.filename else path
        line = f": {error.text.strip()}" if error.text else ""
        raise RewardError(f"{where}: {error.msg}{line}") from error
    except BaseException as error:
        is_relative = isinstance(error, ImportError) and "relative import" in str(error)
        hint = (
            f"; {path.name} is not part of a package: write `import name` for a module beside it" if is_relative else ""
        )
        raise RewardError(f"{path} cannot be imported: {describe(error)}{hint}") from error
    return module


_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], bool]]] = {
    "function": (callable, inspect.isfunction),
    "class": (inspect.isclass, inspect.isclass),
}


def find_in(module: ModuleType, path: Path, name: str, kind: Literal["function", "class"]) -> Any:
    """Return the function or class that `module`, run from `path`, has under `name`. Raises RewardError, one sentence."""
    fits, is_own = _KINDS[kind]
    found = getattr(module, name, None)
    if fits(found):
        return found
    own = [key for key, value in vars(module).items() if is_own(value) and value.__module__ == module.__name__]
    there = f"it has {', '.join(own)}: name one with {path.name}:{own[0]}" if own else f"it has no {kind} at all"
    if found is not None:
        raise RewardError(f"{path}: {name} is a {type(found).__name__}, not a {kind}; {there}")
    raise RewardError(f"{path} has no {kind} {name}; {there}")


# -- the form of a function --------------------------------------------------------------------------------------------

Getters = dict[str, Callable[[Call], Any]]

_VERL: Getters = {
    "data_source": lambda call: call.data_source,
    "solution_str": lambda call: call.completion_text,
    "ground_truth": lambda call: call.ground_truth,
    "extra_info": lambda call: call.info,
}
_KEYWORD: Getters = {
    "prompt": lambda call: call.prompt_text,
    "completion": lambda call: call.completion_text,
    "answer": lambda call: call.ground_truth,
    "info": lambda call: call.info,
}
_KNOWN = _VERL | _KEYWORD
_VERL_BATCH: Getters = {
    "data_sources": lambda call: [call.data_source] * len(call.completions),
    "solution_strs": lambda call: list(call.completions),
    "ground_truths": lambda call: [call.ground_truth] * len(call.completions),
    "extra_infos": lambda call: [call.info] * len(call.completions),
}
_TRL: Getters = {
    "prompts": lambda call: [list(call.turns) if call.turns else call.prompt_text] * len(call.completions),
    "completions": lambda call: [_as_trl(text, is_chat=bool(call.turns)) for text in call.completions],
    "completion_ids": lambda call: [list(ids) for ids in call.completion_ids],
}
_OF_TRL_ITSELF = ("trainer_state", "environments", "log_extra", "log_metric")
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
    taken = {key: value for key, value in kwargs.items() if _takes(signature, key)}
    if taken:
        function = functools.partial(function, **taken)
    parameters = _Parameters(signature, f"{path}: {name}{signature}", taken)
    for names, form, bind in ((_TRL, "TRL's form", _bind_trl), (_VERL_BATCH, "verl's batch form", _bind_verl_batch)):
        if parameters.any_of(names):
            return Function(
                f"{_bare(name, signature)}, {form}, one call for a group", True, bind(function, parameters), (*taken,)
            )
    form, call = _bind_one(function, parameters)
    return Function(f"{_bare(name, signature)}, {form}, one call for a completion", False, call, (*taken,))


def _takes(signature: inspect.Signature, name: str) -> bool:
    """Return True if `name` can be given by keyword."""
    parameter = signature.parameters.get(name)
    if parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        return True
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


class _Parameters:
    """The parameters of a function, as far as they decide how it is called."""

    def __init__(self, signature: inspect.Signature, what: str, taken: Container[str]) -> None:
        """
        Args:
            what: file, name and parameters, with which every complaint begins.
            taken: parameters that have their value already.
        """
        every = [p for p in signature.parameters.values() if p.name not in taken]
        self.taken = taken
        self.kinds = {p.kind for p in every}
        self.named = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.required = [p.name for p in self.named if p.default is p.empty]
        self.what = what

    @property
    def takes_any(self) -> bool:
        """True if it has `**rest`."""
        return inspect.Parameter.VAR_KEYWORD in self.kinds

    @property
    def has_unnamed(self) -> bool:
        """True if some can only be given by position."""
        return inspect.Parameter.POSITIONAL_ONLY in self.kinds

    def any_of(self, names: Iterable[str]) -> bool:
        return any(p.name in names for p in self.named)

    def refuse(self, names: Iterable[str]) -> RewardError:
        unknown = ", ".join(names) or "positional-only parameters"
        return RewardError(f"{self.what} takes {unknown}, which a reward cannot give; expected {_FORMS}")


def _bare(name: str, signature: inspect.Signature) -> str:
    """Name and parameters without annotations."""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=plain, return_annotation=signature.empty)}"


# -- one call for a group ----------------------------------------------------------------------------------------------


def _bind_trl(function: Callable[..., Any], parameters: _Parameters) -> Callable[[Call], Any]:
    """By keyword: prompts, completions, their token ids, and the columns of the row, each repeated."""
    of_trl = [name for name in parameters.required if name in _OF_TRL_ITSELF]
    if of_trl or parameters.has_unnamed:
        raise parameters.refuse(of_trl)
    names = [p.name for p in parameters.named]

    def call(call: Call) -> Any:
        count = len(call.completions)
        columns = {name: [value] * count for name, value in _columns(call).items() if name not in parameters.taken}
        given = columns | {name: get(call) for name, get in _TRL.items()}
        if missing := [name for name in parameters.required if name not in given]:
            raise RewardError(
                f"the row has no column {', '.join(missing)}, which the function takes; it has {', '.join(columns)}"
            )
        return function(**(given if parameters.takes_any else {name: given[name] for name in names if name in given}))

    return call


def _columns(call: Call) -> dict[str, Any]:
    """The columns of the row. Answer and source have each name that a file may give them."""
    answer, source = call.ground_truth, call.data_source
    known = {"ground_truth": answer, "answer": answer, "solution": answer, "data_source": source, "task": source}
    return known | {"extra_info": call.info} | call.info


def _as_trl(text: str, *, is_chat: bool) -> str | list[dict[str, str]]:
    """A completion as TRL gives it: after chat turns it is a list of one turn."""
    return [{"role": "assistant", "content": text}] if is_chat else text


def _bind_verl_batch(function: Callable[..., Any], parameters: _Parameters) -> Callable[[Call], Any]:
    unknown = [name for name in parameters.required if name not in _VERL_BATCH]
    if unknown or parameters.has_unnamed:
        raise parameters.refuse(unknown)
    named = {p.name for p in parameters.named}
    names = [name for name in _VERL_BATCH if parameters.takes_any or name in named]
    return lambda call: function(**{name: _VERL_BATCH[name](call) for name in names})


# -- one call for a completion -----------------------------------------------------------------------------------------


def _bind_one(function: Callable[..., Any], parameters: _Parameters) -> tuple[str, Callable[[Call], Any]]:
    """By the names it takes, or by position in verl's order if its names are unknown."""
    named, required = parameters.named, parameters.required
    known = [p.name for p in named if p.name in _KNOWN]
    if parameters.has_unnamed or not set(required) <= _KNOWN.keys():
        return _by_position(function, parameters, [p.name for p in named if p.kind != p.KEYWORD_ONLY], required)
    speaks_verl = not known or any(name in _VERL for name in known)
    if parameters.takes_any:  # it gets the other names of the same naming as well
        known += [name for name in (_VERL if speaks_verl else _KEYWORD) if name not in known]
    elif inspect.Parameter.VAR_POSITIONAL in parameters.kinds and not known:
        return _by_position(function, parameters, list(_VERL), list(_VERL))
    if not known:
        raise RewardError(f"{parameters.what} takes nothing that a reward can give; expected {_FORMS}")
    form = "verl's form" if speaks_verl else "by keyword"
    return form, lambda call: function(**{name: _KNOWN[name](call) for name in known})


def _by_position(
    function: Callable[..., Any], parameters: _Parameters, names: list[str], required: list[str]
) -> tuple[str, Callable[[Call], Any]]:
    """In verl's order, with three or four required parameters, none of a known name out of place."""
    order = list(_VERL)
    agrees = all(name == expected or name not in _KNOWN for name, expected in zip(names, order, strict=False))
    if not agrees or not 3 <= len(required) <= 4 or not set(required) <= set(names[:4]):
        raise parameters.refuse(name for name in required if name not in _KNOWN)
    getters = [_VERL[name] for name, _ in zip(order, names, strict=False)]
    return "verl's form by position", lambda call: function(*[get(call) for get in getters])
