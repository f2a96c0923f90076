"""Translations of verl's keys that a table cannot say: quotients, pairs of keys, values of another shape.

A rule takes the value, all of verl's keys that were given, and the key of ours that the map names. It returns our keys
with their values, or words saying why there are none.
"""

import os
from collections.abc import Callable
from typing import Any

from asyncgrpo.config_gpus import split_gpus
from asyncgrpo.errors import ConfigError

Given = dict[str, Any]
Translated = dict[str, Any] | str

_ACTOR, _ROLLOUT, _CORRECTION = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "algorithm.rollout_correction.",
)

# verl's defaults, where a rule needs a key that was not given.
_MINI_BATCH, _KL_COEF, _THRESHOLD = 256, 0.001, 2.0

_CLIPPED = {"vanilla", "ppo_clip", "gspo", "cispo", "geo_mean", "dppo_tv", "dppo_kl"}
"""Losses with a lower and an upper bound."""

_ADVANTAGES = {
    name: name for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "remax", "gae", "reinforce_plus_plus_baseline")
} | {"grpo_passk": "pass_at_k", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}


def _one_file(value: Any, _: Given, ours: str) -> Translated:
    files = value if isinstance(value, list) else [value]
    if len(files) != 1:
        return f"{ours} takes one file; these are {len(files)}, to be put together"
    return {ours: os.path.expanduser(str(files[0]))}


def _prompts_per_step(value: Any, given: Given, ours: str) -> Translated:
    """0 in the fully asynchronous recipe: a step is as many mini-batches as are asked for at once."""
    mini = given.get(f"{_ACTOR}ppo_mini_batch_size", _MINI_BATCH)
    return {ours: value or mini * given.get("async_training.require_batches", 1)}


def _minibatches(value: Any, given: Given, ours: str) -> Translated:
    batch = given.get("data.train_batch_size")
    if not _is_count(value) or not isinstance(batch, int):
        return "the number of updates of a step, data.train_batch_size / ppo_mini_batch_size"
    updates = max(1, round(batch / value)) if batch else given.get("async_training.require_batches", 1)
    return {ours: updates}


def _warmup_steps(value: Any, given: Given, ours: str) -> Translated:
    steps = given.get("trainer.total_training_steps")
    if value and not _is_count(steps):
        return "learner.warmup_steps counts steps: this share of run.steps"
    return {ours: round(value * steps) if value else 0}


def _lora_targets(value: Any, _: Given, ours: str) -> Translated:
    if value == "all-linear":
        return {ours: []}
    return {ours: value if isinstance(value, list) else [value]}


def _loggers(value: Any, _: Given, ours: str) -> Translated:
    named = value if isinstance(value, list) else [value]
    return {ours: [name for name in named if name in ("wandb", "tensorboard", "trackio", "mlflow")]}


def _reward_function(_: Any, given: Given, ours: str) -> Translated:
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        path, name = given.get(f"{section}.path"), given.get(f"{section}.name")
        if path is not None:
            return {ours: path if name in (None, "compute_score") else f"{path}:{name}"}
    return "custom_reward_function.path is not given"


def _gpus(_: Any, given: Given, __: str) -> Translated:
    """verl's GPUs do both jobs in turn, or each its own where the rollout has some of its own (fully asynchronous)."""
    each = given.get(f"{_ROLLOUT}tensor_model_parallel_size", 1)
    gpus, of_rollout = _nodes_times_gpus("trainer", given), _nodes_times_gpus("rollout", given)
    if gpus is None or not _is_count(each):
        return "generators.count x generators.gpus_each + learner.ranks are the GPUs, nnodes x n_gpus_per_node"
    if of_rollout is not None:
        return {"generators.count": max(1, of_rollout // each), "learner.ranks": gpus}
    try:
        count, ranks = split_gpus(gpus, each)
    except ConfigError:
        return f"{gpus} GPUs cannot be shared by engines of {each} and a learner"
    return {"generators.count": count, "learner.ranks": ranks}


def _nodes_times_gpus(section: str, given: Given) -> int | None:
    nodes, gpus = given.get(f"{section}.nnodes", 1), given.get(f"{section}.n_gpus_per_node")
    return nodes * gpus if _is_count(nodes) and _is_count(gpus) else None


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
    return str(given.get(f"{_ACTOR}policy_loss.loss_mode", given.get(f"{_ACTOR}loss_mode", "vanilla")))


def _clip(value: Any, given: Given, _: str) -> Translated:
    if _loss(given) not in _CLIPPED:
        return f"the loss {_loss(given)} has no such bound"
    sides = {"algorithm.loss_args.low": "clip_ratio_low", "algorithm.loss_args.high": "clip_ratio_high"}
    written = {ours: given.get(f"{_ACTOR}{side}") for ours, side in sides.items()}
    return {ours: value if side is None else side for ours, side in written.items()}


def _clip_side(value: Any, given: Given, ours: str) -> Translated:
    if _loss(given) not in _CLIPPED:
        return f"the loss {_loss(given)} has no such bound"
    return {ours: value}


def _clip_dual(value: Any, given: Given, ours: str) -> Translated:
    if _loss(given) in ("dppo_tv", "dppo_kl"):
        return {"algorithm.loss_args.cap": value}
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
    return {ours: [{"high": value}] if value > 0 else []}


def _anchor(value: Any, given: Given, ours: str) -> Translated:
    if not value:
        return {ours: "proximal"}
    corrections = _corrections(value, given, "algorithm.corrections")
    return {ours: "behaviour"} | (corrections if isinstance(corrections, dict) else {})


def _corrections(_: Any, given: Given, ours: str) -> Translated:
    """The weight (`rollout_is`), then the rejection (`rollout_rs`). A bypass whose loss has the ratio takes no weight."""
    level = given.get(f"{_CORRECTION}rollout_is")
    bypass = given.get(f"{_CORRECTION}bypass_mode") or given.get("async_training.use_rollout_log_probs")
    has_ratio = bypass and given.get(f"{_CORRECTION}loss_type", "ppo_clip") != "reinforce"
    found: list[dict[str, Any]] = []
    if level is not None and not has_ratio:
        found.append({"level": level} | _weight_bounds(given.get(f"{_CORRECTION}rollout_is_threshold", _THRESHOLD)))
    for kind in _names(given.get(f"{_CORRECTION}rollout_rs")):
        rejection = _rejection(kind, given.get(f"{_CORRECTION}rollout_rs_threshold"))
        if isinstance(rejection, str):
            return rejection
        found.append(rejection)
    return {ours: found}


def _weight_bounds(threshold: Any) -> dict[str, Any]:
    low, high = _bounds(threshold)
    if low is None:
        return {"action": "truncate", "high": high}
    return {"action": "mask", "low": low, "high": high}


def _rejection(kind: str, threshold: Any) -> dict[str, Any] | str:
    """verl's *_k1 bound behaviour / policy, ours policy / behaviour; its *_k2 and *_k3 a divergence from above."""
    whose, _, estimator = kind.rpartition("_")
    low, high = _bounds(threshold)
    if threshold is None or high is None:
        return "rollout_rs needs rollout_rs_threshold"
    ratios = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}
    divergences = {"token": "token", "seq_mean": "sequence"}
    if estimator == "k1" and whose in ratios:
        bounds = {"low": 1 / high, "high": 1 / low if low else high}
        return {"level": ratios[whose], "action": "reject"} | bounds
    if estimator in ("k2", "k3") and whose in divergences:
        return {"kind": "divergence", "level": divergences[whose], "estimator": estimator, "high": high}
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


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


RULES: dict[str, Callable[[Any, Given, str], Translated]] = {
    "one_file": _one_file,
    "prompts_per_step": _prompts_per_step,
    "minibatches": _minibatches,
    "warmup_steps": _warmup_steps,
    "lora_targets": _lora_targets,
    "loggers": _loggers,
    "reward_function": _reward_function,
    "gpus": _gpus,
    "advantage": _advantage,
    "clip": _clip,
    "clip_side": _clip_side,
    "clip_dual": _clip_dual,
    "kl_in_loss": _kl_in_loss,
    "kl_in_reward": _kl_in_reward,
    "truncation_cap": _truncation_cap,
    "anchor": _anchor,
    "corrections": _corrections,
}
