"""Rules between two settings, between a setting and the model, and of the algorithm, which the structs cannot express.

A rule is a sentence with keys and a fix; the message adds the values of the keys. `check` reads the configuration only, and
`load_config` calls it; `check_model` also reads the model's folder, and the start of a run calls it.
"""

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from asyncgrpo import algorithms
from asyncgrpo.config.explain import knobs, near, type_in_words, value_in_words
from asyncgrpo.config.schema import CRITIC, PAIRWISE, AlgorithmConfig, Config, CorrectionConfig, TeacherConfig
from asyncgrpo.errors import ConfigError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check(config: Config) -> None:
    """Raise ConfigError for the first settings that do not fit each other.

    They have no meaning together, count something twice, or would be ignored.
    """
    problem = next((problem for rule in _RULES for problem in rule(config)), None)
    if problem is not None:
        raise ConfigError(_with_values(problem, config))


def _with_values(problem: str, config: Config) -> str:
    """Write the value of each key behind its first mention, unless the sentence has one: `run.out=runs/new`."""
    written = set[str]()

    def with_value(found: re.Match[str]) -> str:
        key = found[0]
        if key in written or key not in knobs():
            return key
        written.add(key)
        return f"{key} ({value_in_words(attrgetter(key)(config))})"

    return re.sub(r"[a-z]+(?:\.[a-z_]+)+(?![\w=[.])", with_value, problem)


# -- two settings ------------------------------------------------------------------------------------------------------


def _sizes(config: Config) -> Iterator[str]:
    algorithm, buffer = config.algorithm, config.buffer
    learner, longest = config.learner, config.data.max_prompt_tokens + config.sampling.max_tokens
    if learner.tokens_per_microbatch * learner.parallel.context < longest:
        room = "learner.tokens_per_microbatch times learner.parallel.context"
        named = "data.max_prompt_tokens + sampling.max_tokens"
        yield f"{room} is smaller than the longest sequence, {named}; raise one of the first or lower one of the last"
    for name in ("context", "expert"):
        if learner.ranks % getattr(learner.parallel, name):
            yield f"learner.parallel.{name} does not divide learner.ranks; change one of the two"
    if algorithm.min_completions is not None and algorithm.min_completions > algorithm.group_size:
        yield "algorithm.min_completions is more than algorithm.group_size, the completions of a group; lower it"
    if 0 < buffer.straggler_factor < 1.5:
        yield "buffer.straggler_factor would end about half of the groups or more; set it to at least 1.5, or to 0"
    if buffer.max_lag == "auto" and buffer.policy == "train":
        yield "buffer.max_lag=auto bounds groups, which buffer.policy does not; use wait or drop, or a number"


def _data(config: Config) -> Iterator[str]:
    data, sampling = config.data, config.sampling
    if not config.run.out.strip():
        yield "run.out names no folder; give one"
    if not data.sources:
        yield "data.train has no entry; name a file or another source of prompts"
    elif data.weights is not None and len(data.weights) != len(data.sources):
        yield "data.weights needs a weight for each entry of data.train"
    if data.curriculum != "none" and config.run.epochs == 1:
        yield "data.curriculum changes the epochs after the first; raise run.epochs"
    if data.eval_rows is not None and data.eval is None:
        yield "data.eval_rows needs a file in data.eval; without it nothing is evaluated"
    if data.eval is not None and not data.suites:
        yield "data.eval names no file; leave it out for no evaluation"
    if isinstance(data.eval, tuple) and len(data.suites) < len(data.eval):
        yield "two files of data.eval have the same name; write data.eval={name: file, ...}"
    for name in data.suites:
        if name == "train" or re.fullmatch(r"[\w.-]{1,64}", name) is None:
            yield f"data.eval names a suite {name!r}; a name has up to 64 letters, digits and . _ -, and is not train"
    if sampling.eval_completions > 1 and sampling.eval_temperature == 0:
        yield "sampling.eval_completions would all be equal with sampling.eval_temperature; set one above 0"
    if sampling.top_k == 0:
        yield "sampling.top_k keeps no token; write -1 for no limit"
    if sampling.top_k == 1:  # SGLang would also leave the temperature out of the log-probs
        yield "sampling.top_k keeps one token: the completions of a group would all be equal; raise it, or write -1 for no limit"


def _placement(config: Config) -> Iterator[str]:
    if config.model.lora.targets and not config.model.lora.rank:
        yield "model.lora.targets without model.lora.rank: all weights would be trained; set a rank"
    if config.model.routing_replay == "rollout" and config.generators.engine != "sglang":
        yield "model.routing_replay=rollout needs generators.engine sglang, the only engine that records its experts"
    if config.weights.backend == "nccl" and (config.learner.device == "cpu" or config.generators.gpus_each == 0):
        yield "weights.backend=nccl needs GPUs on both sides: learner.device and generators.gpus_each; use auto"
    if config.cluster.share_gpu:  # by one rank and one engine; NCCL refuses two ranks on one GPU
        possible = {
            "learner.ranks": (1,),
            "generators.count": (1,),
            "generators.gpus_each": (0, 1),
            "weights.backend": ("auto", "gloo", "shared_memory"),
        }
        for key, values in possible.items():
            if attrgetter(key)(config) not in values:
                yield f"cluster.share_gpu is for one rank and one engine, and does not fit {key}; use {key}={values[-1]}"


_ONE_GROUP = "an engine is one group of tensor-parallel processes"
_NOT_FOR_AN_ENGINE = {
    "tp_size": f"{_ONE_GROUP}; raise generators.gpus_each instead",
    "pp_size": f"{_ONE_GROUP}; raise generators.gpus_each instead",
    "dp_size": f"{_ONE_GROUP}; raise generators.count instead",
    "attn_dp_size": f"{_ONE_GROUP}; leave it out",
    "enable_dp_attention": f"{_ONE_GROUP}; leave it out",
    "nnodes": "an engine runs on one machine; leave it out",
    "model_path": "an engine samples from the weights that the learner publishes; set model.path instead",
    "dtype": "an engine holds the weights as the learner publishes them; set model.dtype instead",
    "speculative_algorithm": "speculative tokens would have the wrong policy version; leave it out",
}
"""Arguments of SGLang that an engine cannot have: the reason and the fix."""


def _engine_and_environment(config: Config) -> Iterator[str]:
    generators, environment = config.generators, config.environment
    if generators.engine == "torch" and generators.extra:
        yield "generators.extra has arguments of SGLang, which generators.engine=torch does not take; leave it out"
    for key, why in _NOT_FOR_AN_ENGINE.items():
        value = value_in_words(generators.extra.get(key))
        if generators.engine == "sglang" and value not in ("null", "false", "1"):
            yield f"generators.extra.{key} is {value}, but {why}"
    if environment.agent is not None and (environment.name or environment.tools):
        yield "environment.agent excludes environment.name and environment.tools: a completion has one environment"


def refuse_images(config: Config) -> None:
    """Raise ConfigError for the first setting that does not fit prompts with images."""
    why = ""
    if config.environment.is_on:
        why = "environments and agents give text alone (environment.*); leave them out"
    elif config.learner.parallel.context > 1:
        why = "learner.parallel.context above 1 divides rows of text alone; use 1"
    elif config.teacher.is_on:
        why = f"a served teacher ({_name_of_teacher(config)}) reads text alone; use algorithm.teacher"
    if why:
        raise ConfigError(f"{', '.join(config.data.sources)}: prompts have images, but {why}")


# -- the model ---------------------------------------------------------------------------------------------------------


VISION_MODELS = ("qwen3_vl", "qwen2_5_vl")
"""Values of `model_type` in a `config.json` whose vision tower is supported."""


def check_model(config: Config) -> None:
    """Raise ConfigError if `model.path` is not a usable folder, or its kind, heads or context do not fit the settings.

    It reads `config.json` only. A hub id is looked up in the local cache; one that is not cached passes.
    """
    path = config.model.path
    if (folder := local_model(path)) is None:
        return
    kind, context, heads = read_model(folder)
    if kind in VISION_MODELS and config.generators.engine == "torch":
        why = f"generators.engine is torch, which has no vision towers, and {path} is a {kind}"
        raise ConfigError(f"{why}; use generators.engine=sglang")
    gpus = config.generators.gpus_each
    if config.generators.engine == "sglang" and gpus > 1 and isinstance(heads, int) and heads % gpus:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        there = f"the {heads} attention heads of {path}"
        raise ConfigError(f"generators.gpus_each is {gpus}, which does not divide {there}; use one of {fitting}")
    prompt, completion = config.data.max_prompt_tokens, config.sampling.max_tokens
    if isinstance(context, int) and prompt + completion > context:
        longest = f"data.max_prompt_tokens ({prompt}) + sampling.max_tokens ({completion}) = {prompt + completion}"
        raise ConfigError(f"the context of {path} is {context} tokens, but {longest}; lower one of the two")


def read_model(folder: Path) -> tuple[Any, Any, Any]:
    """Return `model_type`, tokens of context and attention heads of the model in a folder, each None if it is not given.

    Raises:
        ConfigError: `config.json` is missing, or is not a JSON object that describes a model.
    """
    file = folder / "config.json"
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        text: dict[str, Any] = settings.get("text_config") or settings
        context = text.get("max_position_embeddings") or text.get("n_positions")
        return settings.get("model_type"), context, text.get("num_attention_heads")
    except FileNotFoundError as error:
        below = next((f"; did you mean {found.parent}?" for found in sorted(folder.glob("*/config.json"))), "")
        raise ConfigError(f"model.path: the folder {folder} has no config.json{below}") from error
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.path: {file} cannot be read as a JSON object of a model ({error})") from error


def local_model(path: str, key: str = "model.path") -> Path | None:
    """Return the folder of a model; None for a hub id that is not cached. Raises ConfigError, which names `key`."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"{key}: {path} is a file; give the folder that holds the model's config.json")
    if not _looks_like_hub_id(path):
        raise ConfigError(f"{key}: the folder {path} does not exist")
    return _cached(path)


def _looks_like_hub_id(path: str) -> bool:
    """True for `Qwen/Qwen3-8B` or `gpt2`; False for `./runs/model`, and for `runs/model` if a folder `runs` exists."""
    return (
        _HUB_ID.fullmatch(path) is not None
        and not path.startswith(".")
        and not ("/" in path and Path(path).parent.is_dir())
    )


def _cached(hub_id: str) -> Path | None:
    """Return the newest snapshot of a hub id in the local cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = (hub / f"models--{hub_id.replace('/', '--')}" / "snapshots").glob("*/config.json")
    return max((file.parent for file in snapshots), key=lambda folder: folder.stat().st_mtime, default=None)


def is_offline() -> bool:
    """True if the environment switches the Hugging Face hub off."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.lower() in {"1", "on", "true", "yes"} for value in values)


# -- arguments of the loss ---------------------------------------------------------------------------------------------

_NOT_NEGATIVE = frozenset({
    "clip_low", "clip_high", "clip_low_nats", "clip_high_nats", "low_prob", "high_prob", "low_nats", "high_nats",
    "k_positive", "lam_positive", "k_negative", "lam_negative",
})  # fmt: skip
"""Arguments of losses that may be 0; the others are above 0."""


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
    decorators = map(ast.unparse, _losses()[loss].decorator_list)
    return any(one.startswith("surrogate(") and "with_ratio=False" not in one for one in decorators)


def _arguments(config: Config) -> Iterator[str]:
    loss, given = config.algorithm.loss, config.algorithm.loss_args
    allowed = loss_arguments(loss)
    for name, value in given.items():
        key = f"algorithm.loss_args.{name}"
        if name not in allowed:
            hint = near(name, allowed) or f"it takes {', '.join(allowed) or 'none'}"
            yield f"{key} (value {value_in_words(value)}) is not an argument of {loss}: {hint}"
            return
        try:
            msgspec.convert(value, allowed[name].type)
        except msgspec.ValidationError:
            needs = type_in_words(msgspec.inspect.type_info(allowed[name].type))
            yield f"{key} must be {needs}; it is {value_in_words(value)}"
    for name, argument in allowed.items():
        if argument.default is msgspec.NODEFAULT and name not in given:
            yield f"algorithm.loss={loss} needs algorithm.loss_args.{name}, which has no default"


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
    if one.kind in ("divergence", "opsm") and one.max_nats is None:
        yield f"is {one.kind} without max_nats, the largest value that is kept; for example max_nats: 0.01"
    if one.kind == "divergence" and one.level == "geometric":
        yield "is divergence at level geometric; it has the levels token and sequence (the mean over a completion)"


def _place(one: CorrectionConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield the problems of one correction with the rest of the algorithm, to follow its key."""
    rejects = one.action == "reject" if one.kind == "importance" else one.kind != "m2po"
    if one.kind == "importance" and not rejects and algorithm.anchor == "behaviour" and _has_ratio(algorithm.loss):
        loss = f"algorithm.anchor=behaviour {algorithm.loss}"
        yield f"weights by policy / behaviour, which with {loss} contains already: it would count twice; use action: reject"
    if algorithm.anchor == "interpolated" and rejects:
        ratio = "anchor / behaviour, which algorithm.anchor=interpolated makes 1 at lags 0 and 1"
        yield f"judges {ratio}: it would pass what it is for; use anchor: proximal or behaviour"
    if one.kind == "opsm" and algorithm.advantage == CRITIC:
        yield "is opsm, which judges a completion by its advantage, but algorithm.advantage=gae has one for each token"


# -- the rest ----------------------------------------------------------------------------------------------------------


def _kl(config: Config) -> Iterator[str]:
    a = config.algorithm
    teacher = "algorithm.teacher" if a.teacher is not None else _name_of_teacher(config)
    if config.has_teacher and a.kl_coef == 0:
        yield f"{teacher} is set, but algorithm.kl_coef is 0, so nothing is learned from it; set kl_coef=1"
    if config.has_teacher and a.filter_zero_signal:
        yield f"algorithm.filter_zero_signal replaces groups whose rewards are all equal, but {teacher} teaches with them, too"
    yield from _served_teacher(config)
    if a.kl_coef == 0:
        return
    if a.kl_in == "loss" and a.kl_kind == "k1":
        yield "algorithm.kl_kind=k1 has no gradient in expectation in the loss; use k1+, low_var_kl, or algorithm.kl_in=reward"
    if a.kl_in == "reward" and (a.kl_kind in ("full", "k3_reweighted") or a.kl_kind.endswith("+")):
        yield f"algorithm.kl_kind={a.kl_kind} is for the loss; a KL in the reward needs the value of each token; use k1"
    if a.kl_in == "reward" and a.loss == PAIRWISE:
        yield "algorithm.kl_in=reward has no part in algorithm.loss=pairwise, which asks only which reward is higher; use loss"


def _rewards(config: Config) -> Iterator[str]:
    a = config.algorithm
    if a.overlong_buffer > config.sampling.max_tokens:
        yield "algorithm.overlong_buffer is more than sampling.max_tokens; a fifth of it is usual"
    if a.overlong_buffer and a.truncated == "zero":
        yield "algorithm.truncated=zero rewards a cut completion above one with the penalty of algorithm.overlong_buffer"
    negative = {
        "algorithm.overlong_buffer": a.overlong_buffer and a.overlong_factor,
        "algorithm.kl_in": a.kl_coef and a.kl_in == "reward",
        "reward.weights": any(weight < 0 for weight in config.reward.weights or ()),
    }
    for key in (key for key, subtracts in negative.items() if subtracts and a.advantage == "max_rl"):
        yield f"algorithm.advantage=max_rl divides by the mean reward, which {key} can make negative; use another"


def _estimators(config: Config) -> Iterator[str]:
    a = config.algorithm
    if a.advantage != CRITIC and a.critic != AlgorithmConfig().critic:
        yield "algorithm.critic.* is set, but algorithm.advantage has no critic; only gae has"
    if a.loss == PAIRWISE and a.advantage == CRITIC:
        yield "algorithm.advantage=gae trains a critic for advantages that algorithm.loss=pairwise does not use"
    if a.loss == PAIRWISE and a.advantage == "remax":
        yield "algorithm.advantage=remax samples a baseline for advantages that algorithm.loss=pairwise does not use; use grpo"
    if a.filter_zero_signal and a.advantage == CRITIC:
        yield "algorithm.filter_zero_signal hides prompts that are always or never solved, and algorithm.advantage=gae needs them"


def _updates(config: Config) -> Iterator[str]:
    learner = config.learner
    if learner.minibatches > config.buffer.prompts_per_step:
        yield "learner.minibatches is more than buffer.prompts_per_step, and each needs at least one group"
    if learner.updates_per_step > 1 and config.algorithm.loss == PAIRWISE:
        why = "algorithm.loss=pairwise compares completions under the weights at the start of the step"
        yield f"{why}, which only the first update has; use 1 for learner.minibatches and learner.ppo_epochs"


def _schedule(config: Config) -> Iterator[str]:
    learner, steps = config.learner, config.run.steps
    if learner.lr_schedule == "constant":
        if learner.lr_min_ratio:
            yield "learner.lr_min_ratio has no effect with learner.lr_schedule=constant; use linear or cosine"
    elif steps is None:
        yield f"learner.lr_schedule={learner.lr_schedule} falls until the last step, which run.epochs does not fix; set run.steps"
    elif learner.warmup_steps >= steps * learner.updates_per_step:
        yield f"learner.warmup_steps leaves none of the {steps * learner.updates_per_step} updates of the run; lower it"


def _name_of_teacher(config: Config) -> str:
    return "teacher.url" if config.teacher.url is not None else "teacher.path"


def _served_teacher(config: Config) -> Iterator[str]:
    teacher, sampling, algorithm, name = config.teacher, config.sampling, config.algorithm, _name_of_teacher(config)
    is_full = algorithm.kl_kind == "full"
    if not teacher.is_on:
        if teacher != TeacherConfig():
            yield "teacher.* is set, but neither teacher.path, a model to serve, nor teacher.url, its server, is; set one"
        return
    if algorithm.teacher is not None:
        yield f"algorithm.teacher and {name} are two teachers for the same tokens; leave one of them out"
    if not (teacher.urls or teacher.own) or not all(map(str.strip, [*teacher.urls.values(), *teacher.own.values()])):
        yield f"{name} has no value for a data_source; give one for each"
    if teacher.url is not None and teacher.gpus_each is not None:
        yield "teacher.gpus_each is for a server that the run starts, but teacher.url names one; leave one of them out"
    if teacher.url is not None and isinstance(teacher.path, dict) and teacher.path.keys() != teacher.urls.keys():
        yield "teacher.path and teacher.url name different data_sources; give both for each, or one teacher.path for all"
    for key, plain in {"temperature": 1.0, "top_p": 1.0, "top_k": -1}.items():
        if getattr(sampling, key) != plain:
            why = f"{name}: a server gives log-probs at temperature 1 over the whole vocabulary"
            yield f"{why}, which does not fit sampling.{key}; set it to {plain:g}, or use algorithm.teacher"
    if is_full and not teacher.top_k:
        yield "algorithm.kl_kind=full compares teacher.top_k tokens of the teacher, which are none; set it to 32, or use k1+"
    if teacher.top_k and not is_full:
        yield "teacher.top_k is for algorithm.kl_kind=full; the other kinds compare the sampled token only"


_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    *(_sizes, _data, _placement, _engine_and_environment),
    *(_arguments, _corrections, _kl, _rewards, _estimators, _updates, _schedule),
)
