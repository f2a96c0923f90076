"""Names that people write for our knobs: typing slips, and verl's keys.

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
    "actor_rollout_ref.actor.clip_ratio": "algorithm.clip_low and algorithm.clip_high are its two sides here",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.aggregation",
    "actor_rollout_ref.actor.use_kl_loss": "algorithm.kl_coef=0 turns the KL loss off, anything above 0 on",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_kind",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        "buffer.prompts_per_step is the number of prompts of one optimizer step; there is no second batch size"
    ),
    "actor_rollout_ref.actor.ppo_epochs": "every group is trained once, so there is nothing to set",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": (
        "learner.tokens_per_microbatch says it in tokens, because sequences are packed"
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "learner.tokens_per_microbatch",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "learner.offload_reference",
    "actor_rollout_ref.rollout.n": "algorithm.group_size",
    "actor_rollout_ref.rollout.name": "generators.engine",
    "actor_rollout_ref.rollout.temperature": "sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "sampling.top_p",
    "actor_rollout_ref.rollout.top_k": "sampling.top_k",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "sampling.eval_temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "generators.gpus_each",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "generators.memory_fraction",
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage=dr_grpo leaves the division by the std out",
    "algorithm.use_kl_in_reward": "the KL is always in the loss; its weight is algorithm.kl_coef",
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


def suggest(key: str, known: Collection[str]) -> str:
    """A hint of one clause for a key that is not in `known`; empty when nothing comes near.

    Looked for in this order: verl's name, our key in another section or without one (`lr`), the end of verl's name
    (`rollout.n`), a typing slip.
    """
    if key in VERL:
        return _from_verl(VERL[key])
    last = key.rpartition(".")[2]
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


def _from_verl(ours: str) -> str:
    return f"that is verl's name: {ours}" if " " in ours else f"that is verl's name for `{ours}`"
