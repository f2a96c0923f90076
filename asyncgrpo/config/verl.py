"""verl's configuration in our keys: the rules that `verl_keys.yaml` names, and the map made of both.

A key of verl's is renamed, translated (by a table, under a condition, or by a rule that reads several of its keys), left
to do by hand, or has no counterpart, with the reason. Hydra's `+key` and `++key` are the same key.
"""

import math
from typing import Any

from asyncgrpo.config.keymap import Given, KeyMap, Rule, Translated, files, is_count, loggers, lora_targets
from asyncgrpo.errors import ConfigError

# -- GPUs for generators and learner, where only their sum is known ----------------------------------------------------


def split_gpus(
    n_gpus: int, gpus_each: int = 1, *, count: int | None = None, ranks: int | None = None
) -> tuple[int, int]:
    """Shares GPUs between generators and learner, without knowing the model: half and half.

    Half, because full training keeps 16 bytes a parameter on the learner's GPUs alone, and the learner passes over each
    token two to three times. FSDP takes any number of ranks. Of an odd number the generators get one more; what is too
    little for one more generator of `gpus_each` GPUs is the learner's: 8 is 4 + 4, 5 is 3 + 2.

    Args:
        n_gpus: at least 2; `cluster.share_gpu` is for one.
        count: generators, where that is decided already; the learner then gets the rest.
        ranks: learner ranks, where that is decided already; the generators then get the rest.
    Returns:
        Generators and learner ranks. Together they use at most `n_gpus`, unless both were given.
    Raises:
        ConfigError: one side would get nothing.
    """
    if n_gpus < 2:
        raise ConfigError(f"--n-gpus {n_gpus} is too few to split; give 2 or more, 1 for a shared GPU, or 0 for CPU")
    if count is None:
        left = n_gpus - (n_gpus // 2 if ranks is None else ranks)
        count = left // gpus_each if ranks is not None else max(1, left // gpus_each)
    if ranks is None:
        ranks = n_gpus - count * gpus_each
    if count < 1 or ranks < 1:
        raise ConfigError(
            f"--n-gpus {n_gpus} cannot hold {max(count, 1)} x {gpus_each} GPUs of generators and {max(ranks, 1)} "
            "learner ranks; give more GPUs, or lower generators.gpus_each, generators.count or learner.ranks"
        )
    return count, ranks


# -- translations that a table cannot say ------------------------------------------------------------------------------

_ACTOR, _ROLLOUT, _CORRECTION, _ASYNC = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "algorithm.rollout_correction.",
    "async_training.",
)

# verl's defaults, where a rule needs a key that was not given.
_MINI_BATCH, _KL_COEF, _THRESHOLD, _LENGTH, _EPOCHS = 256, 0.001, 2.0, 512, 30
_STALENESS, _SYNC_EVERY = 0.1, 4

_V1_MODE = "trainer.v1.trainer_mode"

_CLIPPED = {"geo_mean": "clip_{}_nats", "dppo_tv": "{}_prob", "dppo_kl": "{}_nats"} | dict.fromkeys(
    ("vanilla", "ppo_clip", "gspo", "cispo"), "clip_{}"
)
"""Losses with a lower and an upper bound: verl's name to that of our argument, where {} is the side."""

_ADVANTAGES = {
    name: name for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "remax", "gae", "reinforce_plus_plus_baseline")
} | {"grpo_passk": "pass_at_k", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}


def _is_fully_async(given: Given) -> bool:
    """True for the fully asynchronous recipe, which fetches prompts one by one and has no `data.train_batch_size`."""
    return any(key.startswith(_ASYNC) for key in given)


def _fetch(given: Given) -> tuple[int, int] | None:
    """Prompts and updates of one fetch of the fully asynchronous recipe, which is a step here; None if they are odd."""
    mini, asked = given.get(f"{_ACTOR}ppo_mini_batch_size", _MINI_BATCH), given.get(f"{_ASYNC}require_batches", 1)
    return (mini * asked, asked) if is_count(mini) and is_count(asked) else None


def _prompts_per_step(value: Any, given: Given, ours: str) -> Translated:
    if value and not _is_fully_async(given):
        return {ours: value}
    fetch = _fetch(given)
    return (
        "the prompts of a step, ppo_mini_batch_size x async_training.require_batches" if not fetch else {ours: fetch[0]}
    )


def _minibatches(_: Any, given: Given, ours: str) -> Translated:
    mini, batch, fetch = given.get(f"{_ACTOR}ppo_mini_batch_size"), given.get("data.train_batch_size"), _fetch(given)
    if _is_fully_async(given) and fetch:
        return {ours: fetch[1], "buffer.prompts_per_step": fetch[0]}
    if not is_count(mini) or not isinstance(batch, int):
        return "the number of updates of a step, data.train_batch_size / ppo_mini_batch_size"
    return {ours: max(1, round(batch / mini)) if batch else 1}


def _max_lag(_: Any, given: Given, ours: str) -> Translated:
    """The steps by which a group is behind at most: so many prompts begin between two synchronizations, and no more."""
    if not _is_fully_async(given):
        return {ours: 1}
    stale, every = given.get(f"{_ASYNC}staleness_threshold", _STALENESS), _sync_every(given)
    fetch = _fetch(given)
    if isinstance(stale, bool) or not isinstance(stale, int | float) or stale < 0 or not is_count(every) or not fetch:
        return "buffer.max_lag bounds it, in optimizer steps"
    prompts = fetch[0]
    return {ours: -(-int(prompts * (1 + stale) * every) // prompts) - 1}


def _batches_ahead(_: Any, given: Given, ours: str) -> Translated:
    """verl's trainer of version 1: asynchronous, it generates so many batches before the first step, and stays ahead."""
    mode = given.get(_V1_MODE, "sync")
    ahead = 0 if mode == "sync" else given.get(f"trainer.v1.{mode}.num_warmup_batches", 1)
    if isinstance(ahead, bool) or not isinstance(ahead, int | float) or ahead < 0:
        return "buffer.max_lag bounds it, in optimizer steps"
    return {ours: math.ceil(ahead)}


def _sync_every(given: Given) -> Any:
    return given.get(f"{_ASYNC}trigger_parameter_sync_step", _SYNC_EVERY)


def _every(value: Any, given: Given, ours: str) -> Translated:
    """Steps; the fully asynchronous recipe counts synchronizations, which are several steps apart."""
    if not _is_fully_async(given):
        return {ours: value}
    if not is_count(value) or not is_count(_sync_every(given)):
        return f"{ours} counts steps"
    return {ours: value * _sync_every(given)}


def _steps(value: Any, given: Given, ours: str) -> Translated:
    """verl ends after its epochs, if they come first."""
    is_told = "trainer.total_epochs" in given or "rollout.total_epochs" in given
    return {ours: value} if is_told else {ours: value, "run.epochs": _EPOCHS}


def _prompts_in_all(value: Any, given: Given, ours: str) -> Translated:
    fetch = _fetch(given)
    if not is_count(value) or not fetch:
        return "run.steps counts steps of ppo_mini_batch_size x async_training.require_batches prompts"
    return _steps(max(1, value // fetch[0]), given, ours)


def _tokens(value: Any, given: Given, ours: str) -> Translated:
    """Sequence parallelism lets a sequence be longer than what one GPU holds; here one GPU holds it whole."""
    named = (
        "ulysses_sequence_parallel_size",
        "fsdp_config.ulysses_sequence_parallel_size",
        "veomni.ulysses_parallel_size",
    )
    parts = [given.get(f"{_ACTOR}{name}", 1) for name in named]
    lengths = [given.get(f"data.max_{which}_length", _LENGTH) for which in ("prompt", "response")]
    if not all(map(is_count, [value, *parts, *lengths])):
        return {ours: value}
    return {ours: max(value, min(value * max(parts), sum(lengths)))}


def _warmup_steps(value: Any, given: Given, ours: str) -> Translated:
    """verl's rate moves once a step, ours at every update."""
    found = _minibatches(None, given, ours)
    epochs, minibatches = given.get(f"{_ACTOR}ppo_epochs", 1), found[ours] if isinstance(found, dict) else 1
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not is_count(epochs)
        or not is_count(minibatches)
    ):
        return "learner.warmup_steps counts updates"
    if value < 0 and f"{_ACTOR}optim.lr_warmup_steps_ratio" in given:
        return "lr_warmup_steps_ratio says it"
    return {ours: round(max(value, 0) * epochs * minibatches)}


def _warmup_share(value: Any, given: Given, ours: str) -> Translated:
    steps, counted = given.get("trainer.total_training_steps"), given.get(f"{_ACTOR}optim.lr_warmup_steps")
    if isinstance(counted, int) and counted >= 0:
        return "lr_warmup_steps says it"
    if value and (not is_count(steps) or not isinstance(value, float)):
        return "learner.warmup_steps counts updates: this share of those of the run"
    return _warmup_steps(value * steps if value else 0, given, ours)


def _lora_targets(value: Any, given: Given, ours: str) -> Translated:
    ranks = [given.get(f"actor_rollout_ref.model.{name}") for name in ("lora_rank", "lora.rank")]
    if value != "all-linear" and not any(ranks):
        return "the rank is 0, so it does nothing"
    return lora_targets(value, given, ours)


def _reward_function(_: Any, given: Given, ours: str) -> Translated:
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        path, name = given.get(f"{section}.path"), given.get(f"{section}.name")
        if path is not None:
            return {ours: path if name in (None, "compute_score") else f"{path}:{name}"}
    return "custom_reward_function.path is not given"


def _reward_model(value: Any, given: Given, ours: str) -> Translated:
    if value is not True:
        return "rules or your function score, as by default"
    if any(given.get(f"{section}.path") for section in ("custom_reward_function", "reward.custom_reward_function")):
        return "your function scores; for both, name both: reward.function=[FILE:NAME, model]"
    return {ours: "model"}


def _gpus(_: Any, given: Given, __: str) -> Translated:
    """verl's GPUs do both jobs in turn, or each its own where the rollout has some of its own (fully asynchronous)."""
    each = given.get(f"{_ROLLOUT}tensor_model_parallel_size", 1)
    gpus, of_rollout = _nodes_times_gpus("trainer", given), _gpus_of_rollout(given)
    if gpus is None or not is_count(each):
        return "generators.count x generators.gpus_each + learner.ranks are the GPUs, nnodes x n_gpus_per_node"
    if of_rollout is not None:
        return {"generators.count": max(1, of_rollout // each), "learner.ranks": gpus}
    if gpus == 1:
        return {"cluster.share_gpu": True}
    count, ranks = split_gpus(gpus, _leaving_a_learner(each, gpus))
    return {"generators.count": count, "learner.ranks": ranks}


def _gpus_each(value: Any, given: Given, ours: str) -> Translated:
    gpus, of_rollout = _nodes_times_gpus("trainer", given), _gpus_of_rollout(given)
    if not is_count(value) or gpus is None or of_rollout is not None or value == _leaving_a_learner(value, gpus):
        return {ours: value}
    why = f"the learner has GPUs of its own, and {gpus} in all leave an engine no {value}"
    return {ours: _leaving_a_learner(value, gpus)}, why


def _leaving_a_learner(each: int, gpus: int) -> int:
    """The GPUs of an engine, halved until they leave one of `gpus`."""
    while each >= gpus and each > 1:
        each //= 2
    return each


def _gpus_of_rollout(given: Given) -> int | None:
    """GPUs that only generate; None where there are none."""
    if given.get(_V1_MODE) == "separate_async" and is_count(given.get(f"{_ROLLOUT}nnodes")):
        each = given.get(f"{_ROLLOUT}n_gpus_per_node", given.get("trainer.n_gpus_per_node"))
        return _nodes_times_gpus("", {".nnodes": given[f"{_ROLLOUT}nnodes"], ".n_gpus_per_node": each})
    return _nodes_times_gpus("rollout", given)


def _nodes_times_gpus(section: str, given: Given) -> int | None:
    nodes, gpus = given.get(f"{section}.nnodes", 1), given.get(f"{section}.n_gpus_per_node")
    return nodes * gpus if is_count(nodes) and is_count(gpus) else None


# -- the objective -----------------------------------------------------------------------------------------------------


def _advantage(_: Any, given: Given, ours: str) -> Translated:
    named = str(given.get("algorithm.adv_estimator", "grpo"))
    if named not in _ADVANTAGES:
        return f"{named} is not here"
    centred = named.startswith("grpo") and given.get("algorithm.norm_adv_by_std_in_grpo", True) is False
    if centred and named == "grpo_passk":
        return "pass_at_k always divides by the std"
    return {ours: "dr_grpo" if centred else _ADVANTAGES[named]}


def _loss(given: Given) -> str:
    if given.get(f"{_CORRECTION}bypass_mode") is True and f"{_CORRECTION}loss_type" in given:
        return str(given[f"{_CORRECTION}loss_type"])
    return str(given.get(f"{_ACTOR}policy_loss.loss_mode", given.get(f"{_ACTOR}loss_mode", "vanilla")))


def _bound(side: str, given: Given) -> str:
    return "algorithm.loss_args." + _CLIPPED[_loss(given)].format(side)


def _clip(value: Any, given: Given, _: str) -> Translated:
    if _loss(given) not in _CLIPPED:
        return f"the loss {_loss(given)} has no such bound"
    low, high = (given.get(f"{_ACTOR}clip_ratio_{side}", value) for side in ("low", "high"))
    return {_bound("low", given): low, _bound("high", given): high}


def _clip_side(value: Any, given: Given, ours: str) -> Translated:
    if _loss(given) not in _CLIPPED:
        return f"the loss {_loss(given)} has no such bound"
    return {_bound(ours.rpartition("_")[2], given): value}


def _clip_dual(value: Any, given: Given, ours: str) -> Translated:
    if _loss(given) in ("dppo_tv", "dppo_kl"):
        return {"algorithm.loss_args.max_ratio": value}
    if _loss(given) not in ("vanilla", "ppo_clip"):
        return f"the loss {_loss(given)} has no such bound"
    return {ours: value}


def _kl_in_loss(value: Any, given: Given, ours: str) -> Translated:
    if value:
        return {ours: given.get(f"{_ACTOR}kl_loss_coef", _KL_COEF)}
    return "the KL is in the reward" if given.get("algorithm.use_kl_in_reward") else {ours: 0.0}


def _kl_in_reward(value: Any, given: Given, ours: str) -> Translated:
    if not value:
        return {ours: "loss"}
    if given.get(f"{_ACTOR}use_kl_loss"):
        return "the KL is in the loss or in the reward, not in both"
    return {ours: "reward", "algorithm.kl_coef": given.get("algorithm.kl_ctrl.kl_coef", _KL_COEF)}


def _truncation_cap(value: Any, _: Given, ours: str) -> Translated:
    if isinstance(value, str | list | dict):
        return "a number, the largest weight"
    return {ours: [{"high_ratio": value}] if value > 0 else []}


def _bypasses(given: Given) -> bool:
    """True if verl's ratio is policy / behaviour: it takes the log-probs of the rollout, and computes none anew."""
    if given.get(f"{_ASYNC}compute_prox_log_prob") is True:
        return False
    for key in (f"{_CORRECTION}bypass_mode", f"{_ASYNC}use_rollout_log_probs", f"{_ACTOR}use_rollout_log_probs"):
        if key in given:
            return given[key] is True
    return _is_fully_async(given) or (given.get("actor_rollout_ref.hybrid_engine") is False and _V1_MODE not in given)


def _anchor(_: Any, given: Given, ours: str) -> Translated:
    return {ours: "behaviour" if _bypasses(given) else "proximal", "algorithm.corrections": _corrections(given)[0]}


def _engines(_: Any, given: Given, ours: str) -> Translated:
    """`hybrid_engine=False`: the recipes with GPUs of their own for generation, fully asynchronous or one step off."""
    if _V1_MODE in given:
        return _batches_ahead(None, given, ours)
    lag, anchor = _max_lag(None, given, ours), _anchor(None, given, "algorithm.anchor")
    assert isinstance(anchor, dict)
    return lag | anchor if isinstance(lag, dict) else lag


def _has_ratio(given: Given) -> bool:
    """True if the loss has the ratio policy / behaviour itself."""
    return _bypasses(given) and given.get(f"{_CORRECTION}loss_type", "ppo_clip") != "reinforce"


def _weight(value: Any, given: Given, ours: str) -> Translated:
    if value is not None and _has_ratio(given):
        return "verl does not apply it: the loss of its bypass mode has that ratio already"
    return {ours: _corrections(given)[0]}


def _rejections(_: Any, given: Given, ours: str) -> Translated:
    found, absent = _corrections(given)
    if not absent:
        return {ours: found}
    return ({ours: found}, absent) if any(one.get("action") != "truncate" for one in found) else absent


def _corrections(given: Given) -> tuple[list[dict[str, Any]], str]:
    """The weight (`rollout_is`) and the rejections (`rollout_rs`), and words on rejections that are not here."""
    level = given.get(f"{_CORRECTION}rollout_is")
    found: list[dict[str, Any]] = []
    absent = list[str]()
    if level is not None and not _has_ratio(given):
        found.append({"level": level} | _weight_bounds(given.get(f"{_CORRECTION}rollout_is_threshold", _THRESHOLD)))
    kinds, thresholds = (_names(given.get(f"{_CORRECTION}{name}")) for name in ("rollout_rs", "rollout_rs_threshold"))
    for number, kind in enumerate(kinds):
        rejection = _rejection(kind, thresholds[min(number, len(thresholds) - 1)] if thresholds else None)
        if isinstance(rejection, str):
            absent.append(rejection)
        else:
            found.append(rejection)
    return found, "; ".join(absent)


def _weight_bounds(threshold: Any) -> dict[str, Any]:
    low, high = _bounds(threshold)
    if low is None:
        return {"action": "truncate", "high_ratio": high}
    return {"action": "mask", "low_ratio": low, "high_ratio": high}


def _rejection(kind: str, threshold: Any) -> dict[str, Any] | str:
    """verl's *_k1 bound behaviour / policy, ours policy / behaviour; its *_k2 and *_k3 a divergence from above."""
    whose, _, estimator = kind.rpartition("_")
    low, high = _bounds(threshold)
    if threshold is None or high is None:
        return "rollout_rs needs rollout_rs_threshold"
    ratios = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}
    divergences = {"token": "token", "seq_mean": "sequence"}
    if estimator == "k1" and whose in ratios:
        bounds = {"low_ratio": 1 / high, "high_ratio": 1 / low if low else high}
        return {"level": ratios[whose], "action": "reject"} | bounds
    if estimator in ("k2", "k3") and whose in divergences:
        return {"kind": "divergence", "level": divergences[whose], "estimator": estimator, "max_nats": high}
    return f"there is no rejection by {kind}"


def _bounds(threshold: Any) -> tuple[float | None, float | None]:
    """verl writes a number for an upper bound, and `0.5_5.0` for both."""
    low, _, high = str(threshold).rpartition("_")
    try:
        return (float(low) if low else None), float(high)
    except ValueError:
        return None, None


def _names(value: Any) -> list[str]:
    return [name.strip() for name in str(value).split(",")] if value is not None else []


RULES: dict[str, Rule] = {
    "files": files,
    "prompts_per_step": _prompts_per_step,
    "minibatches": _minibatches,
    "max_lag": _max_lag,
    "engines": _engines,
    "batches_ahead": _batches_ahead,
    "every": _every,
    "steps": _steps,
    "prompts_in_all": _prompts_in_all,
    "tokens": _tokens,
    "warmup_steps": _warmup_steps,
    "warmup_share": _warmup_share,
    "lora_targets": _lora_targets,
    "loggers": loggers,
    "reward_function": _reward_function,
    "reward_model": _reward_model,
    "gpus": _gpus,
    "gpus_each": _gpus_each,
    "advantage": _advantage,
    "clip": _clip,
    "clip_side": _clip_side,
    "clip_dual": _clip_dual,
    "kl_in_loss": _kl_in_loss,
    "kl_in_reward": _kl_in_reward,
    "truncation_cap": _truncation_cap,
    "anchor": _anchor,
    "weight": _weight,
    "rejections": _rejections,
}

VERL = KeyMap("verl", "verl_keys.yaml", RULES, reads_null={"weight", "rejections"})
