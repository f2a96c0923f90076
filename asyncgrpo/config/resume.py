"""What a resume does with a configuration that changed since the start before it. One rule for every knob.

    refused   the run would become another one: its checkpoint, the order of its prompts or its objective belong to the old value
    applied   holds from the next step on
    ignored   the checkpoint decides, so it has no effect

Pure: two configurations and what is known of the files they name in, changes out. `cluster/starts.py` keeps them on disk.
"""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from asyncgrpo.config.explain import knobs, value_in_words
from asyncgrpo.config.schema import Config

REFUSED: dict[str, str] = {
    "model.path": "the checkpoint holds the weights of that model",
    "model.lora.rank": "the checkpoint holds adapters of that rank",
    "model.lora.alpha": "the adapters in the checkpoint were trained at that scale",
    "model.lora.targets": "the checkpoint holds adapters of those layers",
    "data.train": "the checkpoint counts its prompts by their place in that file",
    "data.columns": "the checkpoint counts prompts that were read so",
    "data.max_prompt_tokens": "it decides which prompts there are, and the checkpoint counts them",
    "data.shuffle": "the checkpoint counts prompts in that order",
    "data.system_prompt": "it is part of every prompt that the checkpoint counts",
    "run.seed": "the checkpoint counts prompts in the order of that seed",
    "algorithm.advantage": "one run has one algorithm",
    "algorithm.loss": "one run has one algorithm",
}
"""Key to why a resume cannot change it."""

# fmt: off
APPLIED = frozenset({
    "model.dtype",
    "data.eval", "data.eval_rows",
    "run.steps", "run.epochs", "run.checkpoint_every", "run.keep_checkpoints", "run.eval_every", "run.loggers",
    "run.samples_every",
    "reward.function", "reward.timeout_s", "reward.workers",
    "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.max_tokens", "sampling.stop",
    "sampling.eval_temperature",
    "algorithm.group_size", "algorithm.min_completions", "algorithm.filter_zero_signal", "algorithm.loss_args",
    "algorithm.anchor",
    "algorithm.corrections", "algorithm.aggregation", "algorithm.kl_coef", "algorithm.kl_kind", "algorithm.kl_in",
    "algorithm.kl_target",
    "algorithm.kl_horizon", "algorithm.behaviour_kl_coef", "algorithm.entropy_coef", "algorithm.truncated",
    "algorithm.overlong_buffer", "algorithm.overlong_factor", "algorithm.critic.gamma", "algorithm.critic.lam",
    "algorithm.critic.value_coef", "algorithm.critic.value_clip", "algorithm.critic.lr_scale",
    "buffer.prompts_per_step", "buffer.max_lag", "buffer.policy", "buffer.bias_threshold", "buffer.lease_timeout_s",
    "buffer.max_attempts", "buffer.straggler_factor", "buffer.durability", "buffer.after_resume",
    "buffer.keep_journal",
    "generators.engine", "generators.count", "generators.gpus_each", "generators.groups_in_flight",
    "generators.memory_fraction",
    "generators.keep_kv", "generators.prefix_cache", "generators.extra_completions", "generators.completion_retries",
    "generators.extra",
    "generators.restarts",
    "learner.ranks", "learner.device", "learner.lr", "learner.warmup_steps", "learner.lr_schedule",
    "learner.lr_min_ratio", "learner.full_lr_signal",
    "learner.betas", "learner.weight_decay",
    "learner.grad_clip",
    "learner.minibatches", "learner.ppo_epochs", "learner.spike_factor", "learner.max_skips", "learner.ess_lr",
    "learner.tokens_per_microbatch",
    "learner.share_prompts", "learner.compile", "learner.activation_checkpointing", "learner.offload_reference",
    "learner.offload_optimizer", "learner.attention",
    "weights.backend", "weights.bucket_mb", "weights.adapters_only", "weights.timeout_s",
    "cluster.bind", "cluster.ray_address", "cluster.stall_timeout_s", "cluster.silent_timeout_s", "cluster.restarts",
    "cluster.standby_after_s",
})
# fmt: on
"""Keys that a resume may change."""

NOT_COMPARED = frozenset({"run.out"})
"""The folder is where the run is, whatever it was called before."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that a knob names."""

    path: str
    """Absolute; a hub id as it stands."""
    digest: str = ""
    """Of what it holds; empty: not known."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a start of a run was configured with."""

    values: dict[str, Any]
    """By knob, as plain values. One that an older release did not know is missing."""
    sources: dict[str, Source]
    """By knob, of those that name a file."""


@dataclass(frozen=True)
class Change:
    """One knob that is not what it was."""

    key: str
    before: str
    now: str
    effect: Literal["refused", "applied", "ignored"]
    why: str = ""
    """It is refused or ignored."""

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def values_of(config: Config) -> dict[str, Any]:
    """Every knob's value, plain."""
    return values_in(_plain(config))


def values_in(written: Any) -> dict[str, Any]:
    """The same from nested plain values of any release: what it did not know is missing, what we do not know is left out."""
    return {key: found for key in knobs() if (found := _look_up(written, key)) is not _MISSING}


def changes(before: Settings, now: Settings) -> list[Change]:
    """What is other now, in the order of the knobs.

    A file is compared by what it holds where that is known of both, so that one that moved is not refused, and one whose
    contents were replaced is.
    """
    found = []
    for key in knobs():
        if key in NOT_COMPARED:
            continue
        words = _other(key, before, now)
        if words is not None:
            found.append(Change(key, *words, *_effect(key, before, now)))
    return found


def _other(key: str, before: Settings, now: Settings) -> tuple[str, str] | None:
    """The knob's value before and now, in words; None where nothing changed."""
    then, here = before.sources.get(key), now.sources.get(key)
    if then is None or here is None:
        then_value = before.values.get(key, _plain(knobs()[key].default))
        if then_value == now.values[key]:
            return None
        return value_in_words(then_value), value_in_words(now.values[key])
    if then.path != here.path:
        return then.path, here.path
    if _is_same(then, here) is False:
        return f"{then.path} (digest {then.digest})", f"with other contents (digest {here.digest})"
    return None


def _effect(key: str, before: Settings, now: Settings) -> tuple[Literal["refused", "applied", "ignored"], str]:
    if key == "algorithm.kl_coef" and now.values["algorithm.kl_target"] is not None:
        return "ignored", "algorithm.kl_target steers it, and goes on from what the checkpoint holds"
    then, here = before.sources.get(key), now.sources.get(key)
    has_moved = then is not None and here is not None and _is_same(then, here) is True
    return ("refused", REFUSED[key]) if key in REFUSED and not has_moved else ("applied", "")


def _is_same(one: Source, other: Source) -> bool | None:
    """Whether both hold the same; None where that is not known."""
    return one.digest == other.digest if one.digest and other.digest else None


def _plain(value: Any) -> Any:
    """As a file gives it back: a tuple is a list."""
    return msgspec.json.decode(msgspec.json.encode(value))


_MISSING = object()


def _look_up(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name, _MISSING) if isinstance(values, dict) else _MISSING
    return values
