"""verl's keys in ours: the map, the translation of values, and the message about unknown keys."""

import random
import shlex
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from asyncgrpo.config import foreign
from asyncgrpo.config.explain import knobs
from asyncgrpo.config.foreign import assignments, flat, report
from asyncgrpo.config.foreign_rules import RULES, TRL, VERL, merged
from asyncgrpo.config.load import load_config, load_values, parse
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"

read, read_words = partial(foreign.read, keys=VERL), partial(foreign.read_words, keys=VERL)


def read_script(text, environment):
    return foreign.read_script(text, VERL, environment)


def ours(given: dict) -> dict:
    return merged(VERL.translate(given))


def keys_of(words: str) -> dict:
    """Keys and values, as they are typed."""
    for short, name in (("ACTOR", ACTOR), ("ROLLOUT", ROLLOUT), ("CORRECTION", CORRECTION), ("HOME", str(Path.home()))):
        words = words.replace(short, name)
    return {key: parse(value) for key, _, value in (word.partition("=") for word in shlex.split(words))}


def is_ours(key: str) -> bool:
    return key in knobs() or any(
        isinstance(knob.type, inspect.DictType) and key.startswith(f"{knob.key}.") for knob in knobs().values()
    )


@pytest.mark.parametrize("system", [VERL, TRL], ids=lambda system: system.system)
class TestBothMaps:
    def test_every_counterpart_is_a_key_of_ours(self, system):
        named = {key for entry in system.keys.values() if entry.ours for key in entry.ours.split(" and ")}
        assert [key for key in named if not is_ours(key)] == []

    def test_every_entry_says_one_thing_under_conditions_that_exist(self, system):
        for key, entry in system.keys.items():
            assert sum(map(bool, (entry.ours or entry.without, entry.by_hand, entry.absent))) == 1, key
            assert [other for other in entry.when if other not in system.keys] == [], key

    def test_no_value_however_odd_breaks_the_translation(self, system):
        odd = [None, True, 0, -1, 0.1, "x", "", "0.5_5", [], ["a", "b"], {}, {"train": 3}, "${a}", "token_k1"]
        keys = [key for key in system.keys if not key.endswith("*")]
        rng = random.Random(0)
        for _ in range(500):
            given = {key: rng.choice(odd) for key in rng.sample(keys, rng.randint(1, 25))}
            assert all(row.ours or row.words for row in system.translate(given)), given
            system.unwritten(given)


class TestTheMap:
    def test_every_rule_exists(self):
        assert {entry.rule for keys in (VERL, TRL) for entry in keys.keys.values() if entry.rule} == set(RULES)

    def test_translated_values_fit_the_keys_they_are_for(self):
        for entry in VERL.keys.values():
            for value in [*(entry.values or {}).values(), *entry.special.values()]:
                section, _, name = entry.ours.rpartition(".")
                if entry.ours in knobs():  # raises where the key does not take the value
                    nested = {"model": {"path": "m"}, "data": {"train": "t"}}
                    nested[section] = nested.get(section, {}) | {name: value}
                    msgspec.convert(nested, Config)

    def test_a_starred_entry_comes_after_the_keys_that_it_would_cover(self):
        assert VERL.entry_of(f"{ROLLOUT}.engine_kwargs.sglang.dtype").ours == "generators.extra.dtype"
        assert VERL.entry_of(f"{ROLLOUT}.engine_kwargs.vllm.dtype") == VERL.keys["actor_rollout_ref.*"]
        assert VERL.entry_of("trainer.no_such_key") == VERL.keys["trainer.*"]
        assert VERL.entry_of("learner.lr") is None


def cases(table: str) -> list[tuple[str, str]]:
    """Words of theirs and of ours, of each line of a table."""
    lines = table.strip().replace("\n    ", " ").splitlines()
    return [(theirs, ours.strip()) for theirs, _, ours in (line.partition(" ->") for line in lines if line[0] != "#")]


EXAMPLE = """
algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=1024
    data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=true data.truncation=error
    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.model.enable_gradient_checkpointing=true
    ACTOR.optim.lr=1e-06 ACTOR.ppo_mini_batch_size=256 ACTOR.use_kl_loss=true ACTOR.kl_loss_coef=0.002
    ACTOR.kl_loss_type=low_var_kl ACTOR.entropy_coeff=0 ACTOR.fsdp_config.optimizer_offload=true
    ROLLOUT.tensor_model_parallel_size=2 ROLLOUT.name=vllm ROLLOUT.gpu_memory_utilization=0.6 ROLLOUT.n=5
    actor_rollout_ref.ref.fsdp_config.param_offload=true algorithm.use_kl_in_reward=false trainer.critic_warmup=0
    'trainer.logger=[console, wandb]' trainer.val_before_train=false trainer.n_gpus_per_node=8 trainer.nnodes=2
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
    -> algorithm.advantage=grpo data.train=train.parquet data.eval=test.parquet buffer.prompts_per_step=1024
    data.max_prompt_tokens=512 sampling.max_tokens=1024 model.path=Qwen/Qwen3-8B learner.activation_checkpointing=true
    learner.lr=1e-06 learner.minibatches=4 algorithm.kl_coef=0.002 algorithm.kl_kind=low_var_kl
    algorithm.entropy_coef=0 learner.offload_optimizer=true generators.gpus_each=2 generators.engine=sglang
    generators.memory_fraction=0.6 algorithm.group_size=5 learner.offload_reference=true algorithm.kl_in=loss
    'run.loggers=[wandb]' generators.count=4 learner.ranks=8 run.checkpoint_every=20 run.eval_every=5 run.epochs=15
"""
"""The keys of verl's GRPO example for one node, with values of our own, and what becomes of them."""

TRANSLATED = """
trainer.nnodes=1 trainer.n_gpus_per_node=2 -> generators.count=1 learner.ranks=1
trainer.n_gpus_per_node=1 -> cluster.share_gpu=true
# engines and the learner of verl share their GPUs; here an engine leaves half of them
trainer.n_gpus_per_node=2 ROLLOUT.tensor_model_parallel_size=2
    -> generators.count=1 learner.ranks=1 generators.gpus_each=1
trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=8 rollout.nnodes=2 -> generators.count=16 learner.ranks=4
ROLLOUT.name=null data.train_files=null ACTOR.clip_ratio_low=null ->
'data.val_files=[a, ~/b]' -> 'data.eval=[a, HOME/b]'
ACTOR.ppo_mini_batch_size=256 ->
data.train_batch_size=0 ACTOR.ppo_mini_batch_size=32 async_training.require_batches=4
    -> buffer.prompts_per_step=128 learner.minibatches=4
ACTOR.ppo_max_token_len_per_gpu=3000 ACTOR.ulysses_sequence_parallel_size=4
    -> learner.tokens_per_microbatch=3000 learner.parallel.context=4
# two of verl's four GPUs generate, so each of the other two holds half of a sequence
ACTOR.megatron.context_parallel_size=4 trainer.n_gpus_per_node=4 ACTOR.megatron.expert_model_parallel_size=2
    -> learner.parallel.context=2 learner.parallel.expert=2 generators.count=2 learner.ranks=2
ACTOR.optim.lr_warmup_steps=-1 -> learner.warmup_steps=0
# verl's rate moves once a step, ours at every update
ACTOR.optim.lr_warmup_steps=10 ACTOR.ppo_epochs=2 ACTOR.ppo_mini_batch_size=16 data.train_batch_size=64
    -> learner.warmup_steps=80 learner.ppo_epochs=2 learner.minibatches=4 buffer.prompts_per_step=64
ACTOR.optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=200
    -> learner.warmup_steps=20 run.steps=200 run.epochs=30
ACTOR.mindspeedllm.param_offload=true model_engine=megatron ->
ACTOR.clip_ratio=0.1 ACTOR.clip_ratio_high=0.3 -> algorithm.loss_args.clip_low=0.1 algorithm.loss_args.clip_high=0.3
ACTOR.clip_ratio_low=0.1 ACTOR.policy_loss.loss_mode=gpg -> algorithm.loss=reinforce
ACTOR.use_kl_loss=false ACTOR.kl_loss_coef=0.1 -> algorithm.kl_coef=0.0
algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.1 algorithm.kl_penalty=kl
    -> algorithm.kl_in=reward algorithm.kl_coef=0.1 algorithm.kl_kind=k1
algorithm.norm_adv_by_std_in_grpo=false -> algorithm.advantage=dr_grpo
ROLLOUT.engine_kwargs.sglang.attention_backend=fa3 -> generators.extra.attention_backend=fa3
custom_reward_function.path=r.py custom_reward_function.name=f -> reward.function=r.py:f
reward_model.enable=true reward_model.model.path=rm reward_model.max_length=99
    -> reward.function=model reward.model.path=rm
reward_model.enable=true custom_reward_function.path=r.py -> reward.function=r.py
reward_model.reward_kwargs.overlong_buffer_cfg.enable=true
    reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
    -> algorithm.overlong_buffer=4096
CORRECTION.rollout_is=sequence CORRECTION.rollout_is_threshold=0.5_5.0
    -> 'algorithm.corrections=[{level: sequence, action: mask, low_ratio: 0.5, high_ratio: 5.0}]'
# the loss of a bypass has the ratio, so verl gives no weight either
CORRECTION.rollout_is=token CORRECTION.bypass_mode=true -> algorithm.anchor=behaviour algorithm.corrections=[]
CORRECTION.rollout_rs=token_k1,seq_mean_k3 CORRECTION.rollout_rs_threshold=0.5_2.0,0.01
    -> 'algorithm.corrections=[{level: token, action: reject, low_ratio: 0.5, high_ratio: 2.0},
    {kind: divergence, level: sequence, estimator: k3, max_nats: 0.01}]'
# of several rejections those are kept that are here
CORRECTION.rollout_rs=token_k1,seq_max_k2 CORRECTION.rollout_rs_threshold=0.5_2.0,2.5
    -> 'algorithm.corrections=[{level: token, action: reject, low_ratio: 0.5, high_ratio: 2.0}]'
CORRECTION.rollout_rs=seq_max_k2 CORRECTION.bypass_mode=false -> algorithm.anchor=proximal algorithm.corrections=[]
# verl averages two losses by completion, whatever loss_agg_mode is
ACTOR.policy_loss.loss_mode=sapo ACTOR.loss_agg_mode=token-mean
    -> algorithm.loss=sapo algorithm.aggregation=seq-mean-token-mean
ACTOR.loss_mode=geo_mean -> algorithm.loss=gmpo algorithm.aggregation=seq-mean-token-mean
CORRECTION.bypass_mode=true CORRECTION.loss_type=reinforce ACTOR.policy_loss.loss_mode=gspo
    -> algorithm.anchor=behaviour algorithm.corrections=[] algorithm.loss=reinforce
algorithm.adv_estimator=grpo_vectorized algorithm.norm_adv_by_std_in_grpo=false -> algorithm.advantage=grpo
# one step off
actor_rollout_ref.hybrid_engine=false -> buffer.max_lag=1 algorithm.anchor=behaviour algorithm.corrections=[]
# verl's first version of its trainer counts batches ahead, and has GPUs of each kind
trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.num_warmup_batches=1.5
    actor_rollout_ref.hybrid_engine=false trainer.n_gpus_per_node=4 trainer.nnodes=2
    ROLLOUT.nnodes=1 ROLLOUT.tensor_model_parallel_size=4
    -> generators.count=1 learner.ranks=8 generators.gpus_each=4 buffer.max_lag=2
trainer.v1.trainer_mode=sync -> buffer.max_lag=0
trainer.v1.trainer_mode=colocate_async -> buffer.max_lag=1
trainer.n_gpus_per_node=4 ROLLOUT.nnodes=1 -> generators.count=2 learner.ranks=2
critic.model.path=m trainer.unheard_of=1 learner.lr=1 ->
"""
"""verl's keys -> ours. A line that begins with blanks goes on with the one before."""


class TestTranslation:
    def test_a_whole_example_becomes_a_configuration_that_loads(self):
        ((given, expected),) = cases(EXAMPLE)
        assert load_config(None, assignments(ours(keys_of(given)))) == load_config(None, assignments(keys_of(expected)))

    @pytest.mark.parametrize(("given", "expected"), [*cases(TRANSLATED), *cases(EXAMPLE)])
    def test_values_are_translated_where_they_differ(self, given, expected):
        assert ours(keys_of(given)) == keys_of(expected)
        assert all(row.ours or row.words for row in VERL.translate(keys_of(given)))

    @pytest.mark.parametrize(
        ("given", "note"),
        [
            ("ACTOR.clip_ratio=0.1", "takes clip_ratio_low and clip_ratio_high"),
            ("ACTOR.clip_ratio=0.1 ACTOR.clip_ratio_low=0.1 ACTOR.clip_ratio_high=0.1", ""),
            ("ACTOR.entropy_coeff=0.01", "hopeless groups lower it"),
            ("ACTOR.entropy_coeff=0", ""),
            ("ACTOR.entropy_coeff=0.01 algorithm.adv_estimator=gae", ""),
            ("algorithm.use_kl_in_reward=true algorithm.adv_estimator=remax", "the KL of a token"),
            ("CORRECTION.rollout_rs=token_k3 CORRECTION.rollout_rs_threshold=0.1", "leaves verl's denominators"),
            ("CORRECTION.rollout_rs=null", ""),
            ("ACTOR.loss_agg_mode=seq-mean-token-sum-norm", "without loss_scale_factor"),
            ("algorithm.adv_estimator=gae ACTOR.ppo_mini_batch_size=8 data.train_batch_size=16", "of a minibatch here"),
            ("algorithm.adv_estimator=gae ACTOR.ppo_mini_batch_size=16 data.train_batch_size=16", ""),
            ("CORRECTION.rollout_is=token ACTOR.policy_loss.loss_mode=geo_mean", "geometric mean"),
            ("async_training.require_batches=1 ACTOR.policy_loss.loss_mode=gspo", "by default ppo_clip"),
        ],
    )
    def test_what_verl_computes_otherwise_is_noted(self, given, note):
        notes = [row.words for row in VERL.translate(keys_of(given)) if row.ours and row.words]
        assert all(note in words for words in notes) and bool(notes) == bool(note)

    def test_what_verl_does_unasked_is_told_where_ours_is_another(self):
        assert VERL.unwritten({})["algorithm.critic.lam"] == 1.0
        assert VERL.unwritten({"algorithm.use_kl_in_reward": True})["algorithm.kl_kind"] == "k1"
        assert (
            VERL.unwritten({"algorithm.adv_estimator": "grpo"})
            .keys()
            .isdisjoint(("algorithm.critic.lam", "algorithm.kl_kind"))
        )
        unasked = VERL.unwritten({"trainer.total_epochs": 3, f"{ACTOR}.clip_ratio": 0.1})
        assert (unasked["algorithm.corrections"], unasked["buffer.max_lag"]) == ([], 0)
        assert "run.epochs" not in unasked and "algorithm.loss_args.clip_low" not in unasked
        assert "buffer.max_lag=0 (4)" in report(read(["data.seed=1"]), "", as_yaml=False)
        given = read(["-"], stdin=ASYNC)
        assert "buffer.max_lag" not in given.unwritten and given.ours["buffer.max_lag"] == 5


ASYNC = """
python3 -m verl.experimental.fully_async_policy.fully_async_main --config-name='fully_async_ppo_trainer.yaml' \\
    data.train_files=t.parquet data.train_batch_size=0 data.gen_batch_size=1 \\
    data.max_prompt_length=1024 data.max_response_length=3072 \\
    actor_rollout_ref.model.path=m actor_rollout_ref.hybrid_engine=False \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    trainer.n_gpus_per_node=8 trainer.nnodes=8 trainer.save_freq=10 \\
    rollout.n_gpus_per_node=8 rollout.nnodes=8 rollout.total_rollout_steps=$((512*400)) rollout.test_freq=20 \\
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 \\
    async_training.require_batches=4 async_training.partial_rollout=True \\
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0 \\
"""


class TestFullyAsynchronous:
    """verl's recipe with generators of its own: a step is a fetch of prompts, and a version several steps."""

    def test_its_sizes_count_prompts_and_versions_and_ours_count_steps(self):
        given, left_out = read_script(ASYNC, {})
        assert left_out == []
        sizes = "buffer.prompts_per_step=128 learner.minibatches=4 run.steps=1600 run.epochs=30 run.eval_every=80"
        sizes += " run.checkpoint_every=40 generators.count=64 learner.ranks=64"
        assert keys_of(sizes).items() <= ours(given).items()

    @pytest.mark.parametrize(
        ("threshold", "every", "lag"), [(0, 1, 0), (0, 4, 3), (1, 1, 1), (0.5, 4, 5), (0.1, 4, 4), (0.3, 1, 1)]
    )
    def test_its_freshness_becomes_the_steps_by_which_a_group_is_behind(self, threshold, every, lag):
        keys = {"staleness_threshold": threshold, "trigger_parameter_sync_step": every, "require_batches": 4}
        given = {f"async_training.{key}": value for key, value in keys.items()} | {f"{ACTOR}.ppo_mini_batch_size": 32}
        assert ours(given)["buffer.max_lag"] == lag

    @pytest.mark.parametrize(
        ("keys", "anchor"),
        [
            ("", "behaviour"),
            (f"{CORRECTION}.bypass_mode=false", "proximal"),
            ("async_training.use_rollout_log_probs=true async_training.compute_prox_log_prob=false", "behaviour"),
            ("async_training.use_rollout_log_probs=true async_training.compute_prox_log_prob=true", "proximal"),
            ("async_training.use_rollout_log_probs=false", "proximal"),
        ],
    )
    def test_the_anchor_is_where_verl_centres_its_clip(self, keys, anchor):
        given = read_script(ASYNC, {})[0] | keys_of(keys)
        found = ours(given)
        assert found["algorithm.anchor"] == anchor
        weight = [{"level": "token", "action": "truncate", "high_ratio": 2.0}]
        assert found["algorithm.corrections"] == (weight if anchor == "proximal" else [])
        said = {row.key: row.words for row in VERL.translate(given) if not row.ours}
        for key in (f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"):
            assert (key in said) == (anchor == "behaviour")


class TestNothingIsLost:
    """Each key of a script is in what is printed: translated, said to have no counterpart, or named as not read."""

    def test_every_key_is_in_the_report(self):
        given, _ = read_script(ASYNC, {})
        printed = report(read(["-"], stdin=ASYNC), "", as_yaml=False)
        assert [key for key in given if key not in printed] == []
        assert "actor_rollout_ref.actor.ppo_mini_batch_size=32: learner.minibatches=4" in printed

    def test_a_loss_without_a_clip_has_none_of_verls_defaults_for_it(self):
        given = [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce"]
        assert [key for key in read(given).unwritten if key.startswith("algorithm.loss_args")] == []

    def test_keys_that_belong_together_are_all_named(self):
        megatron = [f"{ACTOR}.megatron.a=1", f"{ACTOR}.megatron.b=2"]
        epochs = ["rollout.total_epochs=3", "trainer.total_epochs=2"]
        printed = report(read([*megatron, *epochs, f"{ROLLOUT}.name=vllm"]), "", as_yaml=False)
        assert f"{ACTOR}.megatron.a=1, {ACTOR}.megatron.b=2: the learner is FSDP2" in printed
        assert "rollout.total_epochs=3: run.epochs=3, but trainer.total_epochs=2 comes later" in printed
        assert "rollout.name=vllm: generators.engine=sglang (SGLang generates; vLLM and TensorRT-LLM" in printed

    def test_a_key_that_several_commands_set_has_its_last_value_and_all_are_named(self):
        given, left_out = read_script("for N in 1 2 3; do run data.seed=$N data.shuffle=true; done", {})
        assert given == {"data.seed": 3, "data.shuffle": True}
        assert left_out == ["data.seed: commands of the script set 1 and 2 and 3; the last one counts"]

    def test_a_file_that_a_command_names_is_to_be_named_too(self):
        given, left_out = read_script("python3 -m verl.trainer.main_ppo --config-name=mine data.seed=1", {})
        assert given == {"data.seed": 1} and left_out == ["--config-name=mine: name that file too, before the script"]

    def test_a_script_that_ends_early_is_named_with_its_line(self):
        given, left_out = read_script("set -u\nrun data.seed=1\nrun data.shuffle=$1", {})
        assert given == {"data.seed": 1}
        assert left_out[1:] == ["the script ends early: exit code 1, line 3: $1: unbound variable"]


NEWER = """
DEVICE=${DEVICE:-$(python3 -c 'import npu' 2>/dev/null && echo npu || echo gpu)}
ENGINE=${1:-vllm}
case "${DEVICE}" in
    gpu) TP=2 ;;
    npu) TP=4 ;;
    *) echo "DEVICE=${DEVICE} data.seed=7" >&2; exit 1 ;;
esac
ACTOR="
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.loss_agg_mode=\\"token-mean\\"
"
EXTRA=()
if [ "$DEVICE" = npu ]; then
    EXTRA+=("trainer.device=npu")
fi
#    data.seed=8 \\
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer'\\
    model_engine=megatron \\            # a comment between the lines of a command ends no command

    # nor do these
    $ACTOR actor_rollout_ref.rollout.name=$ENGINE "${EXTRA[@]}" \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$TP \\
    global_profiler.nsys.capture-range-end='repeat:2' \\
    trainer.experiment_name="a_$(date +%Y%m%d)" \\
    trainer.nnodes=$NODES "$@" 2>&1 | tee "log_$(date +%H).txt"
"""


class TestSources:
    def test_a_script_is_read_with_its_branches_and_its_text_over_several_lines(self):
        given, left_out = read_script(NEWER, {})
        expected = "model_engine=megatron ACTOR.use_kl_loss=true ACTOR.loss_agg_mode=token-mean ROLLOUT.name=vllm"
        expected += " ROLLOUT.tensor_model_parallel_size=2 global_profiler.nsys.capture-range-end=repeat:2"
        assert given == keys_of(f"{expected} trainer.experiment_name={time.strftime('a_%Y%m%d')}")
        assert left_out == [
            "trainer.nnodes: `$NODES` is not set in the script",
            "trainer.device: no command that the script starts has it",
        ]

    def test_the_users_variables_decide(self):
        given, left_out = read_script(NEWER, {"DEVICE": "npu", "NODES": "2"})
        expected = "ROLLOUT.tensor_model_parallel_size=4 trainer.device=npu trainer.nnodes=2 ROLLOUT.name=vllm"
        assert keys_of(expected).items() <= given.items() and left_out == []

    def test_a_key_whose_value_is_not_known_has_no_default_beside_it(self):
        found = read(["-"], stdin="run data.train_batch_size=$N")
        assert found.unread == ["data.train_batch_size: `$N` is not set in the script"]
        assert "buffer.prompts_per_step" not in found.unwritten and "run.epochs" in found.unwritten

    def test_interpolations_of_a_file_are_worked_out_and_missing_values_are_null(self, tmp_path):
        (tmp_path / "v.yaml").write_text(
            "data: {max_prompt_length: 64, custom_cls: {path: null}}\n"
            "actor_rollout_ref: {rollout: {name: '???', prompt_length: '${data.max_prompt_length}', n: '${oc.no:x}'}}\n"
        )
        assert flat(load_values(tmp_path / "v.yaml"))[f"{ROLLOUT}.n"] == "${oc.no:x}"
        given, _ = read_words([str(tmp_path / "v.yaml"), "+data.seed=3"])
        expected = "ROLLOUT.prompt_length=64 data.custom_cls.path=null data.seed=3 ROLLOUT.name=null"
        assert keys_of(expected).items() <= given.items()

    def test_a_mapping_on_the_command_line_is_its_keys(self):
        found = read(["-"], stdin="run '+data.apply_chat_template_kwargs={enable_thinking: False}'")
        assert found.ours == {"data.chat_template_kwargs.enable_thinking": False} and found.unread == []

    @pytest.mark.parametrize("word", ["nowhere.sh", "nowhere.yaml", "--flag"])
    def test_what_is_no_source_is_refused(self, word):
        with pytest.raises(ConfigError, match=word):
            read_words([word])
