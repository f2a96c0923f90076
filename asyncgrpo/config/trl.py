"""TRL's GRPO configuration in our keys: the rules that `trl_keys.yaml` names, and the map made of both."""

from typing import Any

from asyncgrpo.config.keymap import Given, KeyMap, Rule, Translated, files, is_count, loggers, lora_targets
from asyncgrpo.config.verl import split_gpus
from asyncgrpo.errors import ConfigError

# TRL's defaults, where a rule needs a field that was not given.
_NUM_GENERATIONS, _PER_DEVICE, _LORA_RANK, _LORA_ALPHA = 8, 8, 16, 32
_EPSILON, _BETAS, _CAP, _MASK = 0.2, (0.9, 0.999), 3.0, "sequence_mask"

_LOSSES = {
    "grpo": ("ppo_clip", "seq-mean-token-mean"),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm"),
    "dapo": ("ppo_clip", "token-mean"),
    "bnpo": ("ppo_clip", "token-mean"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "vespo": ("vespo", "token-mean"),
    "luspo": ("ppo_clip", "seq-mean-token-sum"),
}
"""loss_type to our loss and aggregation, for importance_sampling_level=token."""

# -- the sizes of a step -----------------------------------------------------------------------------------------------


def _counts(given: Given) -> tuple[int, int, int] | None:
    """Completions of an optimizer update, updates of one pass over a generation batch, and passes; none if they are odd."""
    per_device, accumulated, processes, passes = sizes = (
        given.get("per_device_train_batch_size", _PER_DEVICE),
        given.get("gradient_accumulation_steps", 1),
        given.get("num_processes", 1),
        given.get("num_iterations", 1),
    )
    generations, batch = given.get("steps_per_generation"), given.get("generation_batch_size")
    if not all(map(is_count, (*sizes, generations or 1, batch or 1))):
        return None
    update = per_device * accumulated * processes
    batch = batch or (generations or accumulated) * per_device * processes
    return None if batch % update else (update, batch // update, passes)


def _prompts_per_step(_: Any, given: Given, ours: str) -> Translated:
    counts, size = _counts(given), given.get("num_generations", _NUM_GENERATIONS)
    if counts is None or not is_count(size) or (batch := counts[0] * counts[1]) % size:
        return "the prompts of a step: the completions of a generation batch / num_generations"
    minibatches = {"learner.minibatches": counts[1]} if counts[1] > 1 else {}
    return {ours: batch // size} | minibatches


def _steps(value: Any, given: Given, ours: str) -> Translated:
    """TRL counts updates. A step here has all updates of a generation batch."""
    counts = _counts(given)
    if counts is None or not is_count(value) or value % (counts[1] * counts[2]):
        return f"{ours} counts steps of all updates of a generation batch; TRL counts updates"
    return {ours: value // (counts[1] * counts[2])}


def _end(value: Any, given: Given, ours: str) -> Translated:
    steps = _steps(value, given, ours)
    return steps | {"run.epochs": None} if isinstance(steps, dict) else steps


def _epochs(value: Any, given: Given, ours: str) -> Translated:
    if is_count(given.get("max_steps")):
        return "max_steps ends the run"
    if not isinstance(value, int | float) or value < 1 or value != int(value):
        return f"{ours} takes a whole number"
    return {ours: int(value)}


def _warmup_steps(value: Any, given: Given, ours: str) -> Translated:
    """Updates in both; below 1 it is a share of the run."""
    if not isinstance(value, int | float) or value < 0:
        return f"{ours} counts updates"
    return _warmup_share(value, given, ours) if 0 < value < 1 else {ours: int(value)}


def _warmup_share(value: Any, given: Given, ours: str) -> Translated:
    updates = given.get("max_steps")
    if value and (not is_count(updates) or not isinstance(value, int | float)):
        return f"{ours} counts updates: this share of those of the run"
    return {ours: round(value * updates) if value else 0}


def _gpus(value: Any, given: Given, ours: str) -> Translated:
    each = given.get("vllm_tensor_parallel_size", 1)
    if not is_count(value) or not is_count(each):
        return f"{ours} counts the GPUs of the learner"
    if given.get("use_vllm") is True and given.get("vllm_mode") == "server":
        return {"learner.ranks": value}
    if value == 1:
        return {"cluster.share_gpu": True}
    try:
        count, ranks = split_gpus(value, each)
    except ConfigError:
        return f"{value} GPUs cannot be shared by engines of {each} and a learner"
    return {"generators.count": count, "learner.ranks": ranks}


def _memory_fraction(value: Any, given: Given, ours: str) -> Translated:
    if given.get("num_processes") == 1:
        return {ours: value}
    return f"an engine has its GPUs to itself here, unless cluster.share_gpu is set; {ours} is its share"


# -- the objective -----------------------------------------------------------------------------------------------------


def _chosen(given: Given) -> tuple[str, str] | None:
    """Our loss and aggregation; none where there is no such loss here."""
    found = _LOSSES.get(str(given.get("loss_type", "dapo")))
    if found is None or given.get("importance_sampling_level", "token") == "token":
        return None if given.get("loss_type") == "luspo" else found
    return ("gspo", found[1]) if found[0] == "ppo_clip" else None


def _loss(_: Any, given: Given, ours: str) -> Translated:
    if (chosen := _chosen(given)) is None:
        level = given.get("importance_sampling_level", "token")
        return f"there is no loss_type={given.get('loss_type', 'dapo')} with importance_sampling_level={level}"
    return {ours: chosen[0], "algorithm.aggregation": chosen[1]}


def _clip(_: Any, given: Given, ours: str) -> Translated:
    """The bounds of a ratio as distances from 1. CISPO's epsilon_high is the bound itself, and there is none below."""
    chosen, low = _chosen(given), given.get("epsilon", _EPSILON)
    high = given.get("epsilon_high")
    high = low if high is None else high
    if chosen is None or chosen[0] not in ("ppo_clip", "gspo", "cispo"):
        return "this loss has no such bound"
    if not all(isinstance(bound, int | float) for bound in (low, high)):
        return f"{ours} takes numbers"
    if chosen[0] == "cispo" and high < 1:
        return "TRL's bound of CISPO is the largest ratio, here at least 1: epsilon_high=5.0 is clip_high=4.0"
    if chosen[0] == "cispo":
        low, high = 1.0, round(high - 1, 12)
    return {"algorithm.loss_args.clip_low": low, "algorithm.loss_args.clip_high": high}


def _delta(value: Any, given: Given, ours: str) -> Translated:
    chosen = _chosen(given)
    return {ours: value} if chosen and chosen[0] == "ppo_clip" else "only the clip of single tokens has it"


def _kl(value: Any, given: Given, ours: str) -> Translated:
    if not value:
        return {ours: 0.0}
    return {ours: value, "algorithm.kl_kind": _kl_kind(given)}


def _kl_kind(given: Given) -> str:
    return "k3" if given.get("use_bias_correction_kl", True) is False else "k3_reweighted"


def _kl_correction(_: Any, given: Given, ours: str) -> Translated:
    return {ours: _kl_kind(given)} if given.get("beta") else "beta is 0, so it does nothing"


def _corrections(_: Any, given: Given, ours: str) -> Translated:
    """TRL weights the log-probs of vLLM against the learner's; without vLLM it has no weight."""
    if given.get("use_vllm") is not True or given.get("vllm_importance_sampling_correction", True) is False:
        return {ours: []}
    level, _, action = str(given.get("vllm_importance_sampling_mode", _MASK)).partition("_")
    if level not in ("token", "sequence") or action not in ("truncate", "mask"):
        return "an entry of algorithm.corrections"
    high = given.get("vllm_importance_sampling_cap") or given.get("vllm_importance_sampling_clip_max", _CAP)
    low = given.get("vllm_importance_sampling_clip_min")
    if action == "truncate" and low is not None:
        action = "clip"
    bounds = {name: bound for name, bound in (("low_ratio", low), ("high_ratio", high)) if bound is not None}
    return {ours: [{"level": level, "action": action} | bounds] if bounds else []}


# -- the rest ----------------------------------------------------------------------------------------------------------


def hub_source(path: str, **parameters: str | None) -> str:
    """`hf:PATH?KEY=VALUE&KEY=VALUE`, without the parameters that are None."""
    given = "&".join(f"{key}={value}" for key, value in parameters.items() if value is not None)
    return f"hf:{path}" + (f"?{given}" if given else "")


def _dataset(_: Any, given: Given, ours: str) -> Translated:
    return _split("dataset_train_split", given, ours)


def _eval_split(_: Any, given: Given, ours: str) -> Translated:
    if given.get("eval_strategy") not in ("steps", "epoch"):
        return "eval_strategy is neither steps nor epoch, so it does nothing"
    return _split("dataset_test_split", given, ours)


def _split(field: str, given: Given, ours: str) -> Translated:
    name, config, split = (given.get(key) for key in ("dataset_name", "dataset_config", field))
    if not isinstance(name, str):
        return _source(None, given, ours)
    return {ours: hub_source(name, name=config, split=split)}


def _source(value: Any, _: Given, ours: str) -> Translated:
    if isinstance(value, str) and value.startswith("hf:"):
        return {ours: value}
    return f"{ours} takes a file, Parquet, JSONL or JSON, or hf:ID?name=CONFIG&split=SPLIT"


def _train_file(value: Any, given: Given, ours: str) -> Translated:
    """`data_files` of load_dataset: a file, a list, or files by split."""
    return files(value.get("train", []) if isinstance(value, dict) else value, given, ours)


def _betas(_: Any, given: Given, ours: str) -> Translated:
    return {ours: [given.get(f"adam_beta{n}", default) for n, default in enumerate(_BETAS, 1)]}


def _lora(value: Any, given: Given, ours: str) -> Translated:
    if not value:
        return {ours: 0}
    return {ours: given.get("lora_r", _LORA_RANK), "model.lora.alpha": given.get("lora_alpha", _LORA_ALPHA)}


def _floor(value: Any, _: Given, ours: str) -> Translated:
    """The rate at which a cosine ends, as a share of the first."""
    share = value.get("min_lr_rate") if isinstance(value, dict) and len(value) == 1 else None
    return "learner.lr_min_ratio says where the rate ends, as a share" if share is None else {ours: share}


def _loggers(value: Any, given: Given, ours: str) -> Translated:
    return "name the loggers: `all` depends on what is installed" if value == "all" else loggers(value, given, ours)


def _rewards(value: Any, _: Given, ours: str) -> Translated:
    """Functions in files and rewards that are built in here. Others are named, and all are left out together."""
    named = value if isinstance(value, list) else [value]
    known = [_REWARDS.get(str(name).removeprefix("trl.rewards."), str(name)) for name in named]
    if unclear := [name for name in known if ".py:" not in name and name not in _REWARDS.values()]:
        return f"name them as FILE:NAME, or built-in rewards: {', '.join(unclear)}"
    return {ours: known[0] if len(known) == 1 else known}


_REWARDS = {"accuracy_reward": "math", "think_format_reward": "think_format"}
"""TRL's own rewards that are built in here."""

RULES: dict[str, Rule] = {
    "prompts_per_step": _prompts_per_step,
    "steps": _steps,
    "end": _end,
    "epochs": _epochs,
    "warmup_steps": _warmup_steps,
    "warmup_share": _warmup_share,
    "gpus": _gpus,
    "memory_fraction": _memory_fraction,
    "loss": _loss,
    "clip": _clip,
    "delta": _delta,
    "kl": _kl,
    "kl_correction": _kl_correction,
    "corrections": _corrections,
    "betas": _betas,
    "lora": _lora,
    "lora_targets": lora_targets,
    "floor": _floor,
    "loggers": _loggers,
    "dataset": _dataset,
    "eval_split": _eval_split,
    "source": _source,
    "train_file": _train_file,
    "rewards": _rewards,
}

TRL = KeyMap("TRL", "trl_keys.yaml", RULES)
