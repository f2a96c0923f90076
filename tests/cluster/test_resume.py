"""A resume refuses or applies each changed setting, and names it.

`APPLIED` lists the keys that a resume may change, so that each new key needs a decision.
"""

import functools

import msgspec

from asyncgrpo.cluster.folder import NOT_COMPARED, REFUSED, Settings, Source, changes, values_in, values_of
from asyncgrpo.config.explain import knobs, removed
from asyncgrpo.config.load import load_config, recorded

NEEDED = ["model.path=/models/a", "data.train=/data/train.jsonl"]


_APPLIED = {
    "model": "dtype routing_replay",
    "data": "eval eval_rows curriculum",
    "run": "steps epochs checkpoint_every keep_checkpoints eval_every loggers samples_every keep_samples",
    "reward": (
        "function weights combine kwargs format_score qa_score timeout_s workers code.url code.max_concurrent "
        "code.timeout_s code.memory_mb code.score code.unsafe success judge.url judge.template judge.pattern "
        "judge.scale judge.max_concurrent judge.timeout_s judge.api_key_env judge.extra model.path model.url "
        "model.device model.timeout_s"
    ),
    "environment": "name tools max_turns timeout_s processes agent",
    "sampling": "temperature top_p top_k max_tokens stop eval_temperature eval_completions",
    "algorithm": (
        "group_size teacher min_completions filter_zero_signal loss_args anchor corrections aggregation "
        "kl_coef kl_kind kl_in behaviour_kl_coef entropy_coef truncated overlong_buffer overlong_factor "
        "critic.gamma critic.lam critic.value_coef critic.value_clip critic.lr_scale"
    ),
    "buffer": ("prompts_per_step max_lag policy auto_lag.max lease_timeout_s straggler_factor durability keep_journal"),
    "generators": (
        "engine count min max autopilot gpus_each groups_in_flight memory_fraction keep_kv prefix_cache extra "
        "ray_resources restarts"
    ),
    "control": "port bind",
    "learner": (
        "ranks parallel.context parallel.expert device lr warmup_steps lr_schedule lr_min_ratio "
        "full_lr_signal betas weight_decay grad_clip minibatches ppo_epochs spike_factor ess_lr "
        "tokens_per_microbatch share_prompts compile activation_checkpointing offload_reference "
        "offload_optimizer ray_resources"
    ),
    "weights": "backend deltas bucket_mb timeout_s",
    "cluster": "bind ray_address share_gpu gpu_memory_gb stall_timeout_s silent_timeout_s",
}
APPLIED = {f"{section}.{key}" for section, keys in _APPLIED.items() for key in keys.split()}


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


def test_what_may_change_is_applied_and_named_and_what_the_run_is_made_of_is_refused_with_a_reason():
    assert changes(settings(), settings("run.out=elsewhere")) == []
    found = changes(settings(), settings("learner.lr=2e-6", "run.epochs=null", "algorithm.loss=gspo"))
    effects = {str(change): change.effect for change in found}
    assert effects["learner.lr 1e-06 -> 2e-06"] == effects["run.epochs 1 -> null"] == "applied"
    assert [bool(change.why) for change in found if change.effect == "refused"] == [True]


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
