"""Names that people write for our knobs: typing slips, verl's keys, and ours of yesterday.

`suggest` turns a key that we do not have into the one that was probably meant, or into a sentence saying why there is
none. `VERL` is also the map behind anything that translates a verl command line.
"""

import difflib
from collections.abc import Collection

# verl's key -> ours. A value with a space is advice, because the two do not map one to one.
VERL: dict[str, str] = {
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.train_batch_size": "buffer.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "sampling.max_tokens",
    "data.shuffle": "data.shuffle",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.targets",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "learner.activation_checkpointing",
    "actor_rollout_ref.actor.optim.lr": "learner.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "learner.warmup_steps",
    "actor_rollout_ref.actor.optim.weight_decay": "learner.weight_decay",
    "actor_rollout_ref.actor.grad_clip": "learner.grad_clip",
    "actor_rollout_ref.actor.clip_ratio": "algorithm.loss_args.low and algorithm.loss_args.high are its two sides here",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.loss_args.low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.loss_args.high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.loss_args.dual",
    "actor_rollout_ref.actor.policy_loss.loss_mode": (
        "algorithm.loss; its vanilla is ppo_clip here, geo_mean is gmpo, and gpg is reinforce"
    ),
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation",
    "actor_rollout_ref.actor.loss_scale_factor": (
        "algorithm.aggregation=seq-mean-token-sum-norm divides by sampling.max_tokens"
    ),
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_coef=0 turns the KL loss off, anything above 0 on",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_kind",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        "learner.minibatches is the number of updates, buffer.prompts_per_step / ppo_mini_batch_size"
    ),
    "actor_rollout_ref.actor.ppo_epochs": "every group is trained once, so there is nothing to set",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": (
        "learner.tokens_per_microbatch says it in tokens, because sequences are packed"
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "learner.tokens_per_microbatch",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "learner.offload_optimizer",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "learner.offload_reference",
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    "actor_rollout_ref.rollout.name": "generators.engine",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "sampling.top_p",
    "actor_rollout_ref.rollout.top_k": "sampling.top_k",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "sampling.eval_temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "generators.gpus_each",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "generators.memory_fraction",
    "algorithm.adv_estimator": "algorithm.advantage, with the same names; grpo_passk is pass_at_k here",
    "algorithm.filter_groups.enable": "algorithm.filter_zero_signal",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage=dr_grpo leaves the division by the std out",
    "algorithm.gamma": "algorithm.critic.gamma",
    "algorithm.lam": "algorithm.critic.lam",
    "algorithm.use_kl_in_reward": "algorithm.kl_in=reward, with algorithm.kl_coef above 0",
    "algorithm.kl_penalty": "algorithm.kl_kind with algorithm.kl_in=reward; its kl is k1 here, and mse is k2",
    "algorithm.kl_ctrl.type": "algorithm.kl_target makes the coefficient adaptive, null leaves it fixed",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
    "algorithm.rollout_correction.rollout_is": (
        "an entry of algorithm.corrections, as [{level: token, action: truncate, high: 2.0}]; null is an empty list"
    ),
    "algorithm.rollout_correction.rollout_is_threshold": "the `high` of an entry of algorithm.corrections",
    "algorithm.rollout_correction.rollout_rs": (
        "an entry of algorithm.corrections: token_k1, seq_sum_k1 and seq_mean_k1 are action: reject at level token, "
        "sequence and geometric, and *_k2 and *_k3 are kind: divergence"
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": (
        "`low` and `high` of an entry of algorithm.corrections, which bound the ratio itself (verl's *_k1 bound its "
        "reciprocal)"
    ),
    "algorithm.rollout_correction.bypass_mode": "algorithm.anchor: behaviour for true, proximal for false",
    "algorithm.rollout_correction.loss_type": "algorithm.loss",
    "critic.cliprange_value": "algorithm.critic.value_clip",
    "critic.optim.lr": "algorithm.critic.lr_scale is the value head's rate, as a multiple of learner.lr",
    "reward_model.overlong_buffer.len": "algorithm.overlong_buffer",
    "reward_model.overlong_buffer.penalty_factor": "algorithm.overlong_factor",
    "async_training.staleness_threshold": "buffer.max_lag counts optimizer steps instead",
    "custom_reward_function.path": "reward.function",
    "custom_reward_function.name": "reward.function=FILE:NAME names file and function",
    "trainer.total_epochs": "run.epochs",
    "trainer.total_training_steps": "run.steps",
    "trainer.save_freq": "run.checkpoint_every",
    "trainer.test_freq": "run.eval_every",
    "trainer.logger": "run.loggers",
    "trainer.default_local_dir": "run.out",
    "trainer.n_gpus_per_node": "generators.count times generators.gpus_each, plus learner.ranks, are the GPUs of a run",
    "trainer.nnodes": "generators.count times generators.gpus_each, plus learner.ranks, are the GPUs of a run",
}

# Keys that were ours, and what says it now.
_RENAMED: dict[str, str] = {
    "algorithm.clip_low": "algorithm.loss_args.low, an argument of algorithm.loss",
    "algorithm.clip_high": "algorithm.loss_args.high, an argument of algorithm.loss",
    "algorithm.importance_cap": "the `high` of an entry of algorithm.corrections, as algorithm.corrections=[{high: 2.0}]",
}


def suggest(key: str, known: Collection[str]) -> str:
    """A hint of one clause for a key that is not in `known`; empty when nothing comes near.

    Looked for in this order: our old name, verl's name, our key in another section or without one (`lr`), the end of
    verl's name (`rollout.n`), a typing slip.
    """
    last = key.rpartition(".")[2]
    renamed = _RENAMED.get(key) or _RENAMED.get(f"algorithm.{key}")
    if renamed is not None:
        return f"it is now {renamed}"
    if key in VERL:
        return _from_verl(VERL[key])
    namesakes = [other for other in known if other.rpartition(".")[2] == last]
    if namesakes:
        return f"did you mean `{namesakes[0]}`?"
    verls = [ours for verl, ours in VERL.items() if verl.endswith("." + key)]
    if verls:
        return _from_verl(verls[0])
    slips = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not slips:  # `grp_size` is far from every dotted key, but near the end of one
        ends = {other.rpartition(".")[2]: other for other in known}
        slips = [ends[end] for end in difflib.get_close_matches(last, ends, n=1, cutoff=0.75)]
    return f"did you mean `{slips[0]}`?" if slips else ""


def near(name: str, known: Collection[str]) -> str:
    """`did you mean ...?` of the one of `known` that looks most like `name`; empty when none does."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else ""


def _from_verl(ours: str) -> str:
    return f"that is verl's name: {ours}" if " " in ours else f"that is verl's name for `{ours}`"
