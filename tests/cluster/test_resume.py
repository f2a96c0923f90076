"""A resume refuses or applies each changed setting, and names it.

`APPLIED` lists the keys that a resume may change, so that each new key needs a decision.
"""

import functools

import msgspec
import pytest

from asyncgrpo.cluster.folder import NOT_COMPARED, REFUSED, Settings, Source, changes, values_in, values_of
from asyncgrpo.config.explain import knobs, removed
from asyncgrpo.config.load import load_config, recorded

NEEDED = ["model.path=/models/a", "data.train=/data/train.jsonl"]


# fmt: off
APPLIED = frozenset({
    "model.dtype", "model.routing_replay",
    "data.eval", "data.eval_rows", "data.curriculum",
    "run.steps", "run.epochs", "run.checkpoint_every", "run.keep_checkpoints", "run.eval_every", "run.loggers",
    "run.samples_every", "run.keep_samples",
    "reward.function", "reward.weights", "reward.combine", "reward.kwargs",
    "reward.format_score", "reward.qa_score", "reward.timeout_s", "reward.workers",
    "reward.code.url", "reward.code.max_concurrent", "reward.code.timeout_s", "reward.code.memory_mb", "reward.code.score",
    "reward.code.unsafe", "reward.success",
    "reward.judge.url", "reward.judge.template", "reward.judge.pattern", "reward.judge.scale",
    "reward.judge.max_concurrent", "reward.judge.timeout_s", "reward.judge.api_key_env",
    "reward.judge.extra", "reward.model.path", "reward.model.url", "reward.model.device",
    "reward.model.timeout_s",
    "environment.name", "environment.tools", "environment.max_turns", "environment.timeout_s", "environment.processes",
    "environment.agent",
    "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.max_tokens", "sampling.stop",
    "sampling.eval_temperature", "sampling.eval_completions",
    "algorithm.group_size", "algorithm.teacher", "algorithm.min_completions", "algorithm.filter_zero_signal",
    "algorithm.loss_args",
    "algorithm.anchor",
    "algorithm.corrections", "algorithm.aggregation", "algorithm.kl_coef", "algorithm.kl_kind", "algorithm.kl_in",
    "algorithm.behaviour_kl_coef", "algorithm.entropy_coef", "algorithm.truncated",
    "algorithm.overlong_buffer", "algorithm.overlong_factor", "algorithm.critic.gamma", "algorithm.critic.lam",
    "algorithm.critic.value_coef", "algorithm.critic.value_clip", "algorithm.critic.lr_scale",
    "buffer.prompts_per_step", "buffer.max_lag", "buffer.policy",
    "buffer.auto_lag.max",
    "buffer.lease_timeout_s",
    "buffer.straggler_factor", "buffer.durability",
    "buffer.keep_journal",
    "generators.engine", "generators.count", "generators.min", "generators.max", "generators.autopilot",
    "generators.gpus_each", "generators.groups_in_flight",
    "generators.memory_fraction",
    "generators.keep_kv", "generators.prefix_cache",
    "generators.extra", "generators.ray_resources",
    "generators.restarts",
    "control.port", "control.bind",
    "learner.ranks", "learner.parallel.context", "learner.parallel.expert",
    "learner.device", "learner.lr", "learner.warmup_steps", "learner.lr_schedule",
    "learner.lr_min_ratio", "learner.full_lr_signal",
    "learner.betas", "learner.weight_decay",
    "learner.grad_clip",
    "learner.minibatches", "learner.ppo_epochs", "learner.spike_factor", "learner.ess_lr",
    "learner.tokens_per_microbatch",
    "learner.share_prompts", "learner.compile", "learner.activation_checkpointing", "learner.offload_reference",
    "learner.offload_optimizer", "learner.ray_resources",
    "weights.backend", "weights.deltas", "weights.bucket_mb", "weights.timeout_s",
    "cluster.bind", "cluster.ray_address", "cluster.share_gpu", "cluster.gpu_memory_gb", "cluster.stall_timeout_s",
    "cluster.silent_timeout_s",
})
# fmt: on


def settings(*overrides: str, **digests: str) -> Settings:
    config = load_config(None, [*NEEDED, *overrides])
    paths = {"model.path": config.model.path, "data.train": config.data.train}
    names = {"model.path": "model", "data.train": "data"}
    sources = {key: Source(path=path, digest=digests.get(names[key], "same")) for key, path in paths.items()}
    return Settings(values=values_of(config), sources=sources)


def effects(before: Settings, now: Settings) -> dict[str, str]:
    return {change.key: change.effect for change in changes(before, now)}


def test_every_knob_has_exactly_one_rule():
    rules = [set(REFUSED), set(APPLIED), set(NOT_COMPARED)]
    assert set(knobs()) == set.union(*rules), "a new key goes into APPLIED, or with a reason into REFUSED"
    assert sum(map(len, rules)) == len(knobs())


def test_nothing_changed_is_nothing_said():
    assert changes(settings(), settings("run.out=elsewhere")) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.lr=2e-6", "learner.lr 1e-06 -> 2e-06"),
        ("algorithm.group_size=4", "algorithm.group_size 8 -> 4"),
        ("run.epochs=null", "run.epochs 1 -> null"),
    ],
)
def test_what_may_change_is_applied_and_named(override, said):
    (change,) = changes(settings(), settings(override))
    assert (str(change), change.effect) == (said, "applied")


@pytest.mark.parametrize("override", ["run.seed=1", "model.lora.rank=8", "algorithm.loss=gspo", "data.shuffle=false"])
def test_what_the_run_is_made_of_is_refused_with_a_reason(override):
    (change,) = changes(settings(), settings(override))
    assert change.effect == "refused" and change.why


def test_a_model_is_known_by_what_it_holds():
    assert effects(settings(), settings(model="other")) == {"model.path": "refused"}
    assert effects(settings(), settings("model.path=/models/b", model="other")) == {"model.path": "refused"}
    assert effects(settings(), settings("model.path=/models/b")) == {"model.path": "applied"}, "it has only moved"
    assert effects(settings(model=""), settings("model.path=/models/b")) == {"model.path": "refused"}
    assert effects(settings(model="", data=""), settings()) == {}, "an older release did not look"


def test_removed_keys_in_the_settings_of_an_older_start_are_no_change():
    written = msgspec.json.decode(msgspec.json.encode(load_config(None, NEEDED)))
    for key in removed().keys:
        *above, name = key.split(".")
        functools.reduce(lambda node, step: node.setdefault(step, {}), above, written)[name] = "anything"
    before = Settings(values=values_in(written), sources=settings().sources)
    assert changes(before, settings()) == []
    assert recorded(written, "config.yaml") == load_config(None, NEEDED)


def test_a_knob_that_an_older_release_did_not_know_had_its_default():
    before, now = settings(), settings("buffer.keep_journal=true")
    del before.values["buffer.keep_journal"]
    assert effects(before, now) == {"buffer.keep_journal": "applied"}
    assert effects(before, settings()) == {}
