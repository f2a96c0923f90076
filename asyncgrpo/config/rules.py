"""Rules between two settings, between a setting and the model, and of the algorithm, which the structs cannot express.

Each message names the values and the fix. `check` and `check_algorithm` read the configuration only; `check_model` also
reads the model's folder. `load_config` calls `check`; the start of a run calls all three.
"""

import ast
import difflib
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from asyncgrpo import algorithms
from asyncgrpo.config.explain import near, type_in_words, value_in_words
from asyncgrpo.config.schema import CRITIC, PAIRWISE, AlgorithmConfig, Config, CorrectionConfig, CriticConfig
from asyncgrpo.errors import ConfigError

Rule = Callable[[Config], Iterator[str]]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check(config: Config) -> None:
    """Raise ConfigError for the first two settings that do not fit each other."""
    _raise_first(_RULES, config)


def check_algorithm(config: Config) -> None:
    """Raise ConfigError for the first problem of `algorithm`, or of `learner` with it.

    These settings have no meaning, count something twice, or would be ignored.
    """
    _raise_first(_ALGORITHM_RULES, config)


def problems(config: Config) -> list[str]:
    """Return all messages of `check` and `check_algorithm`, which raise the first."""
    return [problem for rule in (*_RULES, *_ALGORITHM_RULES) for problem in rule(config)]


def _raise_first(rules: tuple[Rule, ...], config: Config) -> None:
    problem = next((problem for rule in rules for problem in rule(config)), None)
    if problem is not None:
        raise ConfigError(problem)


# -- two settings ------------------------------------------------------------------------------------------------------


def _sizes(config: Config) -> Iterator[str]:
    learner, algorithm, factor = config.learner, config.algorithm, config.buffer.straggler_factor
    prompt, completion = config.data.max_prompt_tokens, config.sampling.max_tokens
    if learner.tokens_per_microbatch < prompt + completion:
        yield (
            f"learner.tokens_per_microbatch ({learner.tokens_per_microbatch}) is smaller than the longest sequence, "
            f"data.max_prompt_tokens ({prompt}) + sampling.max_tokens ({completion}) = {prompt + completion}; raise it or "
            "lower one of the two"
        )
    if algorithm.min_completions is not None and algorithm.min_completions > algorithm.group_size:
        yield (
            f"algorithm.min_completions ({algorithm.min_completions}) is more than algorithm.group_size "
            f"({algorithm.group_size}), the completions of a group; lower it"
        )
    if 0 < factor < 1.5:
        yield (
            f"buffer.straggler_factor ({factor:g}) would end about half of the groups or more; set it to at least 1.5, or to "
            "0 for buffer.lease_timeout_s"
        )
    if config.buffer.max_lag == "auto" and config.buffer.policy == "train":
        yield (
            "buffer.max_lag=auto chooses the bound of each group, but buffer.policy=train bounds no lag; use wait or drop, "
            "or a number"
        )


def _data(config: Config) -> Iterator[str]:
    data, sampling = config.data, config.sampling
    if not config.run.out.strip():
        yield "run.out is empty; name a folder"
    if not data.sources:
        yield "data.train is an empty list; name a file or another source of prompts"
    elif data.weights is not None and len(data.weights) != len(data.sources):
        yield (
            f"data.weights has {len(data.weights)} and data.train {len(data.sources)} entries; give a weight for each source"
        )
    if data.curriculum != "none" and config.run.epochs == 1:
        yield (
            "data.curriculum=success changes the epochs after the first, but run.epochs is 1; raise it, or set "
            "run.epochs=null with run.steps"
        )
    if data.eval is None and data.eval_rows is not None:
        yield f"data.eval_rows is {data.eval_rows}, but data.eval names no file, so nothing is evaluated; set data.eval"
    if data.eval is not None and not data.suites:
        yield "data.eval names no file; leave it out for no evaluation"
    if isinstance(data.eval, tuple) and len(data.suites) < len(data.eval):
        yield f"two files of data.eval have the same name ({', '.join(data.eval)}); write data.eval={{name: file, ...}}"
    for name in data.suites:
        if name == "train" or re.fullmatch(r"[\w.-]{1,64}", name) is None:
            yield (
                f"data.eval names a suite {name!r}; a name has up to 64 letters, digits and . _ -, and is not train; write "
                "data.eval={name: file, ...}"
            )
    if sampling.eval_completions > 1 and sampling.eval_temperature == 0:
        yield (
            f"sampling.eval_completions is {sampling.eval_completions}, but sampling.eval_temperature is 0, so all of them "
            "would be equal; set a temperature, such as that of sampling.temperature"
        )
    if sampling.top_k == 0:
        yield "sampling.top_k is 0, which keeps no token; write -1 for no limit"


def _placement(config: Config) -> Iterator[str]:
    learner, generators, lora = config.learner, config.generators, config.model.lora
    if lora.targets and not lora.rank:
        yield (
            f"model.lora.targets names {', '.join(lora.targets)}, but model.lora.rank is 0, so all weights would be trained; "
            "set a rank"
        )
    if config.weights.backend == "nccl" and (learner.device == "cpu" or generators.gpus_each == 0):
        on_cpu = "learner.device is cpu" if learner.device == "cpu" else "generators.gpus_each is 0"
        yield f"weights.backend=nccl needs GPUs on both sides, but {on_cpu}; use weights.backend=auto"
    if config.cluster.share_gpu:  # by one rank and one engine; NCCL refuses two ranks on one GPU
        wanted = {
            "learner.ranks": (learner.ranks, (1,)),
            "generators.count": (generators.count, (1,)),
            "generators.gpus_each": (generators.gpus_each, (0, 1)),
            "weights.backend": (config.weights.backend, ("auto", "gloo", "shared_memory")),
        }
        for key, (value, possible) in wanted.items():
            if value not in possible:
                yield f"cluster.share_gpu is true, but {key} is {value}; one GPU is shared with {key}={possible[-1]}"


_ONE_GROUP = "an engine is one group of tensor-parallel processes"
_NOT_FOR_AN_ENGINE = {
    "tp_size": (_ONE_GROUP, "raise generators.gpus_each instead"),
    "pp_size": (_ONE_GROUP, "raise generators.gpus_each instead"),
    "dp_size": (_ONE_GROUP, "raise generators.count instead"),
    "attn_dp_size": (_ONE_GROUP, "leave it out"),
    "enable_dp_attention": (_ONE_GROUP, "leave it out"),
    "nnodes": ("an engine runs on one machine", "leave it out"),
    "speculative_algorithm": ("speculative tokens would have the wrong policy version", "leave it out"),
}
"""Arguments of SGLang that an engine cannot have: the reason and the fix."""


def _engine_and_environment(config: Config) -> Iterator[str]:
    generators, environment = config.generators, config.environment
    if generators.engine == "torch" and generators.extra:
        yield (
            f"generators.extra gives {', '.join(generators.extra)}, but generators.engine is torch, which takes no extra "
            "arguments; leave generators.extra out"
        )
    for key, (reason, fix) in _NOT_FOR_AN_ENGINE.items():
        value = value_in_words(generators.extra.get(key))
        if generators.engine == "sglang" and value not in ("null", "false", "1"):
            yield f"generators.extra.{key} is {value}, but {reason}; {fix}"
    other = "name" if environment.name is not None else "tools"
    if environment.agent is not None and (environment.name or environment.tools):
        yield (
            f"environment.agent ({environment.agent}) and environment.{other} "
            f"({value_in_words(getattr(environment, other))}) are both given, but a completion has one environment; leave "
            "one out"
        )


_RULES: tuple[Rule, ...] = (_sizes, _data, _placement, _engine_and_environment)

# -- the model ---------------------------------------------------------------------------------------------------------


def check_model(config: Config) -> None:
    """Raise ConfigError if `model.path` is not a usable folder, or its heads or context do not fit the settings.

    It reads `config.json` only. A hub id is looked up in the local cache; one that is not cached passes, unless the hub is
    switched off.
    """
    folder = local_model(config.model.path)
    if folder is None:
        return
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"model.path: the folder {config.model.path} has no config.json, so it is not a Hugging Face model; "
            f"{_what_it_holds(folder)}"
        )
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        text: dict[str, Any] = settings.get("text_config") or settings
        context = text.get("max_position_embeddings") or text.get("n_positions")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {file} cannot be read as JSON ({error})") from error
    except AttributeError as error:
        raise ConfigError(f"model.path: {file} has no JSON object that describes a model") from error
    heads, gpus = text.get("num_attention_heads"), config.generators.gpus_each
    if config.generators.engine == "sglang" and gpus > 1 and isinstance(heads, int) and heads % gpus:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ConfigError(
            f"generators.gpus_each is {gpus}, but the {heads} attention heads of {config.model.path} cannot be shared by "
            f"so many GPUs; use one of {fitting}"
        )
    prompt, completion = config.data.max_prompt_tokens, config.sampling.max_tokens
    if isinstance(context, int) and prompt + completion > context:
        raise ConfigError(
            f"the context of {config.model.path} is {context} tokens, but data.max_prompt_tokens ({prompt}) + "
            f"sampling.max_tokens ({completion}) = {prompt + completion}; "
            + (
                f"lower sampling.max_tokens to {context - prompt}"
                if prompt < context
                else f"lower data.max_prompt_tokens below {context}"
            )
        )


def file_of(spec: str) -> Path:
    """Return the file of `FILE` or `FILE:NAME`."""
    head, colon, _ = spec.rpartition(":")
    return Path(head if colon and not Path(spec).is_file() else spec)


def local_model(path: str, key: str = "model.path") -> Path | None:
    """Return the folder of a model; None for a hub id that is not cached. Raises ConfigError, which names `key`."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{key}: {path} is a file; give the folder that holds the model's config.json")
    if not _looks_like_hub_id(path):
        near = _close_folders(folder)
        raise ConfigError(f"{key}: the folder {path} does not exist" + (f"; did you mean {near}?" if near else ""))
    cached = _cached(path)
    if cached is None and is_offline():
        raise ConfigError(
            f"{key}: {path} is neither a folder nor in the local Hugging Face cache, and HF_HUB_OFFLINE is set; "
            "give a folder, or download the model once without HF_HUB_OFFLINE"
        )
    return cached


def _looks_like_hub_id(path: str) -> bool:
    """True for `Qwen/Qwen3-8B` or `gpt2`; False for `./runs/model`, and for `runs/model` if a folder `runs` exists."""
    return (
        _HUB_ID.fullmatch(path) is not None
        and not path.startswith(".")
        and not ("/" in path and Path(path).parent.is_dir())
    )


def _close_folders(folder: Path) -> str:
    """Return up to three existing folders with a name close to the missing one, at the deepest level that exists."""
    missing = folder
    while not missing.parent.is_dir():
        missing = missing.parent
    beside = {entry.name: entry for entry in sorted(missing.parent.iterdir()) if entry.is_dir()}
    return " or ".join(str(beside[name]) for name in difflib.get_close_matches(missing.name, beside, n=3, cutoff=0.5))


def _what_it_holds(folder: Path) -> str:
    below = sorted(file.parent for file in folder.glob("*/config.json"))
    if below:
        return f"did you mean {below[0]}?"
    return f"it holds {', '.join(sorted(entry.name for entry in folder.iterdir())[:5]) or 'nothing'}"


def _cached(hub_id: str) -> Path | None:
    """Return the newest snapshot of a hub id in the local cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = (hub / f"models--{hub_id.replace('/', '--')}" / "snapshots").glob("*/config.json")
    return max((file.parent for file in snapshots), key=lambda folder: folder.stat().st_mtime, default=None)


def is_offline() -> bool:
    """True if the environment switches the Hugging Face hub off."""
    return any(
        os.environ.get(name, "").lower() in {"1", "on", "true", "yes"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


_NOT_NEGATIVE = frozenset({
    "clip_low", "clip_high", "clip_low_nats", "clip_high_nats", "low_prob", "high_prob", "low_nats", "high_nats",
    "k_positive", "lam_positive", "k_negative", "lam_negative",
})  # fmt: skip
"""Arguments of losses that may be 0; the others are above 0."""

# -- arguments of the loss ---------------------------------------------------------------------------------------------


class Argument(NamedTuple):
    """An argument of a loss."""

    type: Any
    """As msgspec checks it."""
    default: Any = msgspec.NODEFAULT


def loss_arguments(loss: str) -> dict[str, Argument]:
    """Return the arguments of a loss that `algorithm.loss_args` may set."""
    arguments, found = _losses()[loss].args, dict[str, Argument]()
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        name, annotation = argument.arg, ast.unparse(argument.annotation) if argument.annotation else ""
        if name == "reference_logprobs":
            continue
        above = Meta(gt=1) if name == "dual_ratio" else Meta(gt=0)
        kind: Any = bool if annotation == "bool" else Annotated[float, Meta(ge=0) if name in _NOT_NEGATIVE else above]
        kind = kind | None if annotation.endswith("| None") else kind
        found[name] = Argument(kind) if default is None else Argument(kind, ast.literal_eval(default))
    if loss == PAIRWISE:
        found["reference"] = Argument(bool, False)
        found["pairs"] = Argument(Literal["best_worst", "random", "all"], "best_worst")
    return found


@cache
def _losses() -> dict[str, ast.FunctionDef]:
    """Return the functions of all losses as source: importing one imports torch, which takes seconds."""
    folder = Path(algorithms.__file__).parent
    trees = [ast.parse((folder / name).read_text(encoding="utf-8")) for name in ("surrogates.py", "pairwise.py")]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}


def _has_ratio(loss: str) -> bool:
    """Return the argument `with_ratio` of `@surrogate`: the gradient of the loss contains policy / anchor."""
    for call in _losses()[loss].decorator_list:
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "surrogate":
            return {k.arg: ast.literal_eval(k.value) for k in call.keywords}.get("with_ratio", True)
    return False


def _arguments(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    allowed = loss_arguments(algorithm.loss)
    for name, value in algorithm.loss_args.items():
        if name not in allowed:
            named_in = [f"did you mean `{known}`?" for known in allowed if name in known.split("_")]
            hint = near(name, allowed) or next(iter(named_in), "")
            yield (
                f"algorithm.loss_args.{name} (value {value_in_words(value)}) is not an argument of {algorithm.loss}: "
                f"{hint}{' ' * bool(hint)}{_list(allowed)}"
            )
            return
        try:
            msgspec.convert(value, allowed[name].type)
        except msgspec.ValidationError:
            needs = type_in_words(msgspec.inspect.type_info(allowed[name].type))
            yield f"algorithm.loss_args.{name} must be {needs}; it is {value_in_words(value)}"
    missing = [n for n, p in allowed.items() if p.default is msgspec.NODEFAULT and n not in algorithm.loss_args]
    for name in missing:
        yield (
            f"algorithm.loss={algorithm.loss} needs algorithm.loss_args.{name}, which has no default, for example "
            f"algorithm.loss_args.{name}=0.1"
        )


def _list(allowed: dict[str, Argument]) -> str:
    """Return the arguments and their defaults, as the end of a sentence."""
    defaults = {name: one.default for name, one in allowed.items()}
    words = {n: "required" if d is msgspec.NODEFAULT else value_in_words(d) for n, d in defaults.items()}
    return f"it takes {', '.join(f'{name} ({word})' for name, word in words.items()) or 'none'}"


# -- corrections -------------------------------------------------------------------------------------------------------

# Fields that each kind reads, in addition to `kind`.
_READS = {
    "importance": {"level", "action", "low_ratio", "high_ratio"},
    "veto": {"low_ratio", "high_ratio"},
    "opsm": {"max_nats"},
    "m2po": {"max_mean_square"},
    "divergence": {"level", "max_nats", "estimator"},
}


def _corrections(config: Config) -> Iterator[str]:
    for number, one in enumerate(config.algorithm.corrections):
        key = f"algorithm.corrections[{number}]"
        for name in one.__struct_fields__:
            value = getattr(one, name)
            if name != "kind" and name not in _READS[one.kind] and value != getattr(CorrectionConfig(), name):
                reads = ", ".join(n for n in one.__struct_fields__ if n in _READS[one.kind])
                yield f"{key}.{name} is {value_in_words(value)}, which kind {one.kind} does not read; it takes {reads}"
        yield from (f"{key} {problem}" for problem in _bounds(one))
        yield from (f"{key} {problem}" for problem in _place(one, config.algorithm))


def _bounds(one: CorrectionConfig) -> Iterator[str]:
    """Yield the problems with the numbers of one correction, to follow its key."""
    low, high = one.low_ratio, one.high_ratio
    if low is not None and high is not None and low > high:
        yield f"has low_ratio: {low:g} above high_ratio: {high:g}, so it would keep nothing"
    if one.kind == "importance" and one.action == "truncate" and low is not None:
        yield f"truncates, which has no lower bound, but has low_ratio: {low:g}; use action: clip"
    unbounded = low is None and high is None
    if one.kind == "importance" and one.action != "truncate" and unbounded:
        yield f"has action: {one.action} and no bound, so there is nothing outside; give low_ratio, high_ratio or both"
    if one.kind == "veto" and unbounded:
        yield "is a veto without low_ratio or high_ratio, which rejects nothing; for example low_ratio: 1e-4"
    if one.kind == "divergence" and one.max_nats is None:
        yield "is a divergence without max_nats, the largest estimate that is kept; for example max_nats: 0.01"
    if one.kind == "divergence" and one.level == "geometric":
        yield "is a divergence at level geometric; it has the levels token and sequence (the mean over a completion)"
    if one.kind == "opsm" and one.max_nats is None:
        yield "is opsm without max_nats, the mean log-ratio that is kept, per token; for example max_nats: 0.5"


def _place(one: CorrectionConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield the problems of one correction with the rest of the algorithm, to follow its key."""
    weighs = one.kind == "importance" and one.action != "reject"
    if algorithm.anchor == "behaviour" and weighs and _has_ratio(algorithm.loss):
        yield (
            f"weights tokens by policy / behaviour, and with algorithm.anchor=behaviour {algorithm.loss} contains that "
            "ratio already: it would count twice; use algorithm.corrections=[], action: reject, or loss: reinforce"
        )
    only_rejects = one.kind in ("veto", "opsm", "divergence") or (one.kind == "importance" and one.action == "reject")
    if algorithm.anchor == "interpolated" and only_rejects:
        what = one.kind if one.kind != "importance" else "rejection"
        yield (
            f"judges anchor / behaviour ({what}), which algorithm.anchor=interpolated makes 1 for tokens of lag 0 and 1: "
            "it would pass what it is for; use anchor: proximal or behaviour"
        )
    if one.kind == "opsm" and algorithm.advantage == CRITIC:
        yield "is opsm, which judges a completion by its advantage, but algorithm.advantage=gae has one for each token"


# -- the rest ----------------------------------------------------------------------------------------------------------


def _kl(config: Config) -> Iterator[str]:
    a = config.algorithm
    if a.kl_coef == 0:
        return
    if a.kl_in == "loss" and a.kl_kind == "k1":
        yield (
            "algorithm.kl_kind=k1 has no gradient in expectation when algorithm.kl_in is loss, only noise; use k1+ (its "
            "value, the gradient of k2), low_var_kl, or kl_in=reward"
        )
    if a.kl_in == "reward" and (a.kl_kind in ("full", "k3_reweighted") or a.kl_kind.endswith("+")):
        why = "is only another gradient" if a.kl_kind.endswith("+") else "has no value for one sampled token"
        why = "is made for its gradient" if a.kl_kind == "k3_reweighted" else why
        yield (
            f"algorithm.kl_kind={a.kl_kind} {why}, and a KL in the reward (algorithm.kl_in=reward) needs the value of "
            "each token; use k1"
        )
    if a.kl_in == "reward" and a.loss == PAIRWISE:
        yield (
            "algorithm.kl_in=reward has no part in algorithm.loss=pairwise, which only asks which reward is higher; use "
            "kl_in=loss, or loss_args.reference=true"
        )


def _rewards(config: Config) -> Iterator[str]:
    a, longest = config.algorithm, config.sampling.max_tokens
    if a.overlong_buffer > longest:
        yield (
            f"algorithm.overlong_buffer ({a.overlong_buffer}) is more than sampling.max_tokens ({longest}); a fifth of "
            "it is usual"
        )
    if a.overlong_buffer and a.truncated == "zero":
        yield (
            f"algorithm.truncated=zero with algorithm.overlong_buffer ({a.overlong_buffer}) rewards a completion that is "
            "cut (0) above one that ends just before (a penalty); use truncated=keep or mask"
        )
    below_zero = None
    if a.overlong_buffer and a.overlong_factor:
        below_zero = f"algorithm.overlong_buffer ({a.overlong_buffer}) subtracts from"
    if a.kl_coef and a.kl_in == "reward":
        below_zero = "algorithm.kl_in=reward subtracts from"
    if any(weight < 0 for weight in config.reward.weights or ()):
        below_zero = "reward.weights subtracts from"
    if a.advantage == "max_rl" and below_zero:
        yield f"algorithm.advantage=max_rl divides by the mean reward, so rewards must not be negative, but {below_zero} them"


def _estimators(config: Config) -> Iterator[str]:
    a = config.algorithm
    if a.advantage != CRITIC and a.critic != CriticConfig():
        changed = [n for n in a.critic.__struct_fields__ if getattr(a.critic, n) != getattr(CriticConfig(), n)]
        yield f"algorithm.critic.{changed[0]} is set, but algorithm.advantage={a.advantage} has no critic; only gae has"
    if a.loss == PAIRWISE and a.advantage == CRITIC:
        yield "algorithm.advantage=gae trains a critic for advantages that algorithm.loss=pairwise does not use"
    if a.filter_zero_signal and a.advantage == CRITIC:
        yield (
            "algorithm.filter_zero_signal replaces groups whose rewards are all equal, but algorithm.advantage=gae learns "
            "from them too, and its critic would never see a prompt that is always or never solved"
        )


def _updates(config: Config) -> Iterator[str]:
    a, learner = config.algorithm, config.learner
    if learner.minibatches > config.buffer.prompts_per_step:
        yield (
            f"learner.minibatches ({learner.minibatches}) is more than buffer.prompts_per_step "
            f"({config.buffer.prompts_per_step}), and each needs at least one group"
        )
    for key in ("minibatches", "ppo_epochs"):
        if getattr(learner, key) > 1 and a.loss == PAIRWISE:
            yield (
                f"learner.{key} is {getattr(learner, key)}, but algorithm.loss=pairwise compares completions under the "
                "weights at the start of the step, which only the first of several updates would have; use 1"
            )


def _schedule(config: Config) -> Iterator[str]:
    learner, steps = config.learner, config.run.steps
    if learner.lr_schedule == "constant":
        if learner.lr_min_ratio:
            yield (
                f"learner.lr_min_ratio is {learner.lr_min_ratio:g}, but learner.lr_schedule=constant never falls; use "
                "linear or cosine"
            )
    elif steps is None:
        yield (
            f"learner.lr_schedule={learner.lr_schedule} falls until the last step of the run, which run.epochs does not "
            "determine, because prompts may be dropped or replaced; set run.steps"
        )
    elif learner.warmup_steps >= steps * learner.updates_per_step:
        yield (
            f"learner.warmup_steps ({learner.warmup_steps}) leaves learner.lr_schedule={learner.lr_schedule} none of the "
            f"{steps * learner.updates_per_step} updates of the run (run.steps={steps}); lower it"
        )


_ALGORITHM_RULES: tuple[Rule, ...] = (_arguments, _corrections, _kl, _rewards, _estimators, _updates, _schedule)
