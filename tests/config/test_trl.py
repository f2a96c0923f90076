"""TRL's fields in ours: the map, the translation of values, and what is read of scripts and command lines."""

import ast
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from asyncgrpo.config.foreign import assignments, flat, from_commands, read_script, report
from asyncgrpo.config.foreign import read as read_any
from asyncgrpo.config.foreign_rules import TRL, merged
from asyncgrpo.config.load import load_config
from asyncgrpo.errors import ConfigError
from tests.config.test_verl import cases, keys_of


def read(words):
    return read_any(words, TRL)


def ours(given: dict) -> dict:
    return merged(TRL.translate(given))


def test_every_field_of_transformers_is_accounted_for():
    """Those of TrainingArguments, read from its text: to import it takes seconds."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "training_args.py").read_text(encoding="utf-8"))
    (config,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"]
    fields = [node.target.id for node in config.body if isinstance(node, ast.AnnAssign)]
    assert len(fields) > 90 and [name for name in fields if name not in TRL.keys] == []


TRANSLATED = """
# 16 x 4 x 8 = 512 completions, 64 prompts
per_device_train_batch_size=16 gradient_accumulation_steps=4 num_processes=8
    -> buffer.prompts_per_step=64 generators.count=4 learner.ranks=4
# 4 updates of 32 completions to each generation batch of 128, twice: a step is 8 of TRL's updates
per_device_train_batch_size=32 steps_per_generation=4 num_iterations=2 max_steps=80 save_steps=40 eval_steps=12
    -> buffer.prompts_per_step=16 learner.minibatches=4 learner.ppo_epochs=2 run.steps=10 run.epochs=null
    run.checkpoint_every=5
generation_batch_size=64 num_generations=4 -> buffer.prompts_per_step=16 learner.minibatches=8 algorithm.group_size=4
num_train_epochs=3.0 max_steps=-1 -> run.epochs=3
warmup_ratio=0.1 max_steps=50 -> learner.warmup_steps=5 run.steps=50 run.epochs=null
dataset_name=openai/gsm8k dataset_config=main dataset_train_split=train[:9]
    -> data.train=hf:openai/gsm8k?name=main&split=train[:9]
dataset_name=a/b dataset_test_split=dev eval_strategy=steps -> data.train=hf:a/b data.eval=hf:a/b?split=dev
train_dataset=make() eval_dataset=hf:a/b?split=test -> data.eval=hf:a/b?split=test
beta=0.04 -> algorithm.kl_coef=0.04 algorithm.kl_kind=k3_reweighted
epsilon_high=0.28 -> algorithm.loss_args.clip_low=0.2 algorithm.loss_args.clip_high=0.28
# TRL's bound of CISPO is the largest ratio, ours a distance from 1
loss_type=cispo epsilon_high=5.0
    -> algorithm.loss=cispo algorithm.aggregation=token-mean algorithm.loss_args.clip_low=1.0
    algorithm.loss_args.clip_high=4.0
delta=4.0 -> algorithm.loss_args.dual_ratio=4.0
importance_sampling_level=sequence loss_type=grpo -> algorithm.loss=gspo algorithm.aggregation=seq-mean-token-mean
loss_type=dr_grpo -> algorithm.loss=ppo_clip algorithm.aggregation=seq-mean-token-sum-norm
loss_type=sapo sapo_temperature_neg=1.1 epsilon=0.1
    -> algorithm.loss=sapo algorithm.aggregation=seq-mean-token-mean algorithm.loss_args.tau_negative=1.1
loss_type=luspo -> algorithm.loss=ppo_clip algorithm.aggregation=seq-mean-token-sum
# the weight of vLLM's log-probs is in the ratio of VESPO's loss
loss_type=vespo use_vllm=true vllm_importance_sampling_mode=token_truncate
    -> algorithm.loss=vespo algorithm.aggregation=token-mean generators.engine=sglang algorithm.corrections=[]
    algorithm.anchor=behaviour
router_aux_loss_coef=0.002 entropy_coef=0.01 -> algorithm.router_aux_coef=0.002 algorithm.entropy_coef=0.01
scale_rewards=false -> algorithm.advantage=dr_grpo
scale_rewards=batch -> algorithm.advantage=lite
mask_truncated_completions=true -> algorithm.truncated=mask
use_vllm=true vllm_importance_sampling_mode=token_truncate vllm_importance_sampling_cap=2.0
    -> generators.engine=sglang 'algorithm.corrections=[{level: token, action: truncate, high_ratio: 2.0}]'
num_processes=1 vllm_gpu_memory_utilization=0.3 -> cluster.share_gpu=true generators.memory_fraction=0.3
adam_beta2=0.95 -> 'learner.betas=[0.9, 0.95]'
use_peft=true lora_alpha=64 -> model.lora.rank=16 model.lora.alpha=64
'report_to=[wandb, none]' -> run.loggers=[wandb]
'lr_scheduler_kwargs={min_lr_rate: 0.1}' -> learner.lr_min_ratio=0.1
'reward_funcs=[accuracy_reward, r.py:correct]' 'reward_weights=[1.0, 0.5]'
    -> 'reward.function=[math, r.py:correct]' 'reward.weights=[1.0, 0.5]'
'data_files={train: a.jsonl, test: b.jsonl}' -> data.train=a.jsonl
"""
"""TRL's fields -> our keys."""


class TestTranslation:
    @pytest.mark.parametrize(("given", "expected"), cases(TRANSLATED))
    def test_values_are_translated_where_they_differ(self, given, expected):
        assert ours(keys_of(given)) == keys_of(expected)
        assert all(row.ours or row.words for row in TRL.translate(keys_of(given)))

    def test_what_trl_computes_otherwise_is_noted(self):
        given = {"loss_type": "cispo", "entropy_coef": 0.1, "epsilon": 0.3, "beta": 0.1}
        notes = {row.key: row.words for row in TRL.translate(given)}
        assert "largest ratio is epsilon (0.3)" in notes["loss_type"] and "hopeless groups" in notes["entropy_coef"]
        assert not notes["beta"]
        given = {"beta": 0.1, "importance_sampling_level": "sequence"}
        assert "ratio of the completion" in TRL.translate(given)[0].words

    def test_what_trl_does_unasked_is_told_where_ours_is_another(self):
        unasked = read(["learning_rate=1e-5"]).unwritten
        expected = keys_of("buffer.max_lag=0 buffer.prompts_per_step=1 sampling.max_tokens=512")
        assert expected.items() <= unasked.items() and "learner.lr" not in unasked
        printed = report(read(["warmup_ratio=0.1", "seed=1"]), "", as_yaml=False)
        head, by_hand = printed.split("# To be done by hand:\n")
        assert "#   warmup_ratio=0.1: learner.warmup_steps counts updates" in by_hand and "warmup_ratio" not in head


COMMAND = """
N=${N:-4}
FLAGS=(
    --num_generations 8
    --reward_funcs accuracy_reward think_format_reward
)
if [ "$1" = long ]; then
    trl grpo --max_completion_length 9000
fi
trl vllm-serve --model Qwen/Qwen3-8B
accelerate launch --num_processes $N grpo.py \\
    --model_name_or_path Qwen/Qwen3-8B "${FLAGS[@]}" --learning-rate=2e-6 --use_vllm --no_bf16 --output_dir $NOWHERE
"""


class TestSources:
    def test_a_command_line_is_read_with_its_variables_and_its_launcher(self):
        given, unread = read_script(COMMAND, TRL, {})
        expected = "num_generations=8 'reward_funcs=[accuracy_reward, think_format_reward]' num_processes=4"
        expected += " model_name_or_path=Qwen/Qwen3-8B learning_rate=2e-6 use_vllm=true bf16=false"
        assert given == keys_of(expected)
        assert unread == [
            "output_dir: `$NOWHERE` is not set in the script",
            "max_completion_length: no command that the script starts has it",
        ]

    def test_a_python_script_is_refused_with_the_way_out(self, tmp_path):
        (tmp_path / "t.py").write_text("GRPOConfig(seed=1)\n")
        with pytest.raises(ConfigError, match=r"t.py is Python.*args.to_json_string\(\)"):
            read([str(tmp_path / "t.py")])


def test_a_file_of_trls_arguments_has_the_number_of_processes_in_its_sizes_and_later_words_win(tmp_path):
    fields = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "seed": 1}
    fields |= {"output_dir": "out", "hub_token": "<HUB_TOKEN>", "generation_batch_size": 64, "num_generations": 8}
    (tmp_path / "args.json").write_text(json.dumps({**fields, "fsdp": [], "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}))
    found = read([str(tmp_path / "args.json"), "dataset_name=a/b", "seed=2"])
    expected = "buffer.prompts_per_step=8 algorithm.group_size=8 run.out=out data.train=hf:a/b run.seed=2"
    assert found.ours == keys_of(f"{expected} generators.count=4 learner.ranks=4 learner.lr_min_ratio=0.1")
    assert found.unread == []
    assert read([str(tmp_path / "args.json"), "num_processes=1"]).ours["cluster.share_gpu"] is True


@pytest.mark.parametrize(
    ("loss", "mode"),
    [("grpo", "token_truncate"), ("dr_grpo", "token_mask"), ("dapo", "sequence_truncate"), ("bnpo", "sequence_mask"),
     ("cispo", "token_truncate"), ("sapo", "token_mask")],
)  # fmt: skip
def test_a_translation_is_a_configuration_that_a_run_takes(loss, mode):
    found = read(
        ["model_name_or_path=m", "data_files=t.jsonl", f"loss_type={loss}", "epsilon_high=2", "use_vllm=true", "beta=0.01",
         f"vllm_importance_sampling_mode={mode}", "per_device_train_batch_size=32", "max_steps=10", "num_processes=8",
         "lr_scheduler_type=cosine"]
    )  # fmt: skip
    config = load_config(None, assignments(found.ours))
    assert (config.buffer.prompts_per_step, config.run.steps, config.learner.ranks) == (32, 10, 4)


def test_the_two_runs_of_the_page_are_the_same():
    page = (Path(__file__).parents[2] / "docs" / "from-trl.md").read_text(encoding="utf-8")
    command = re.search(r"```\n(accelerate launch.*?)```", page, re.DOTALL)
    file = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert command is not None and file is not None
    given, unread = from_commands([shlex.split(command[1].replace("\\\n", ""))], TRL)
    assert unread == []
    assert ours(given) == flat(msgspec.yaml.decode(file[1]))
