"""verl's configuration in our keys: the rules that `verl_keys.yaml` names, and the map made of both.

A key of verl's is renamed, translated (by a table, under a condition, or by a rule that reads several of its keys), left
to do by hand, or has no counterpart, with the reason. Hydra's `+key` and `++key` are the same key.
"""

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

_ACTOR, _ROLLOUT, _CORRECTION = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "algorithm.rollout_correction.",
)

# verl's defaults, where a rule needs a key that was not given.
_MINI_BATCH, _KL_COEF, _THRESHOLD, _LENGTH = 256, 0.001, 2.0, 512

_CLIPPED = {"geo_mean": "clip_{}_nats", "dppo_tv": "{}_prob", "dppo_kl": "{}_nats"} | dict.fromkeys(
    ("vanilla", "ppo_clip", "gspo", "cispo"), "clip_{}"
)
"""Losses with a lower and an upper bound: verl's name to that of our argument, where {} is the side."""

_ADVANTAGES = {
    name: name for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "remax", "gae", "reinforce_plus_plus_baseline")
} | {"grpo_passk": "pass_at_k", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}


def _prompts_per_step(value: Any, given: Given, ours: str) -> Translated:
    """0 in the fully asynchronous recipe: a step is as many mini-batches as are asked for at once."""
    if value:
        return {ours: value}
    mini, asked = given.get(f"{_ACTOR}ppo_mini_batch_size", _MINI_BATCH), given.get("async_training.require_batches", 1)
    if not is_count(mini) or not is_count(asked):
        return "the prompts of a step, ppo_mini_batch_size x async_training.require_batches"
    return {ours: mini * asked}


def _minibatches(value: Any, given: Given, ours: str) -> Translated:
    batch = given.get("data.train_batch_size")
    if not is_count(value) or not isinstance(batch, int):
        return "the number of updates of a step, data.train_batch_size / ppo_mini_batch_size"
    updates = max(1, round(batch / value)) if batch else given.get("async_training.require_batches", 1)
    return {ours: updates}


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
    found = _minibatches(given.get(f"{_ACTOR}ppo_mini_batch_size"), given, ours)
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
    gpus, of_rollout = _nodes_times_gpus("trainer", given), _nodes_times_gpus("rollout", given)
    if gpus is None or not is_count(each):
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
    "tokens": _tokens,
    "warmup_steps": _warmup_steps,
    "warmup_share": _warmup_share,
    "lora_targets": lora_targets,
    "loggers": loggers,
    "reward_function": _reward_function,
    "reward_model": _reward_model,
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

VERL = KeyMap("verl", "verl_keys.yaml", RULES, reads_null={"corrections"})
