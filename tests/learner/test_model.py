"""Models whose numbers the learner would get wrong are refused, and the kernel is the best one that runs."""

import errno
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    HrmTextConfig,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    PhiConfig,
    PhimoeConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from asyncgrpo.errors import ConfigError
from asyncgrpo.learner import attention
from asyncgrpo.learner import model as learner_model
from asyncgrpo.learner.model import check_language_model, choose_kernel, load_language_model, recomputes
from tests.learner.helpers import assert_same_gradient, config, learner, random_groups, step_and_gradient
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 60}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_sliding_window_is_refused_only_where_it_would_be_felt(tmp_path):
    MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=24)).save_pretrained(tmp_path)
    load_language_model(str(tmp_path), longest=24)
    with pytest.raises(ConfigError, match=r"attends to 24 tokens in some layers, but .* may have 25"):
        load_language_model(str(tmp_path), longest=25)


SOFT = {"head_dim": 8, "sliding_window": 4096}
STACKS = {"hidden_size": 32, "intermediate_size": 16, "num_layers_per_stack": 1, "num_attention_heads": 2}
REFUSED = {
    "own attention": (BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=60), "is a bloom, whose attention"),
    "soft attention": (Gemma2Config(**SHAPE, **SOFT), "is a gemma2, whose attention the learner does not support"),
    "soft logits": (Gemma2Config(**SHAPE, **SOFT, attn_logit_softcapping=None), "sets final_logit_softcapping, which"),
    "a head with a bias": (PhiConfig(**SHAPE), "has a head with a bias, which the learner does not support"),
    "sinks": (GptOssConfig(num_hidden_layers=2), "is a gpt_oss, whose attention sinks the learner does not support"),
    "linear attention": (Qwen3NextConfig(num_hidden_layers=4), "has layers of linear_attention, in which packed"),
    "recurrence": (RecurrentGemmaConfig(**SHAPE, lru_width=32), "has layers of recurrence, in which packed"),
    "names on disk": (HrmTextConfig(**STACKS, head_dim=16, vocab_size=40), "is a hrm_text, .*gqkv_proj.* on disk"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_the_learner_would_get_wrong_is_refused_in_one_sentence(tmp_path, case):
    settings, message = REFUSED[case]
    settings.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^model.path \({tmp_path}\) {message}[^\n]*$"):
        check_language_model(str(tmp_path), config(tmp_path, learner={"parallel": {"expert": 2}}))


UNFIT = [
    (make_tiny_qwen3, {"model": {"routing_replay": "rollout"}}, "has no experts to choose from"),
    (make_tiny_qwen3, {"learner": {"ranks": 6, "parallel": {"expert": 2}}}, "is a qwen3, which has no experts"),
    (make_tiny_qwen3_moe, {"learner": {"ranks": 6, "parallel": {"expert": 3}}}, "expert is 3, .* the 5 experts"),
    (make_tiny_qwen3, {"learner": {"ranks": 6, "parallel": {"context": 3}}}, "context is 3, .* the 4 attention heads"),
    (make_tiny_deepseek_v3, {"algorithm": {"router_aux_coef": 0.1}}, "aux_coef is 0.1, but .* no router_aux_loss_coef"),
    (make_tiny_qwen3_moe, {"algorithm": {"router_bias_rate": 0.1}}, "bias_rate is 0.1, but .* e_score_correction_bias"),
]


@pytest.mark.parametrize(("make", "sections", "message"), UNFIT)
def test_a_model_that_a_setting_does_not_go_with_is_refused(tmp_path, make, sections, message):
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_language_model(str(path), config(path, **sections))


def test_a_teacher_that_the_learner_cannot_run_is_refused_by_its_key(tmp_path):
    student, teacher = make_tiny_qwen3_moe(tmp_path / "student", experts=8), make_tiny_qwen3(tmp_path / "teacher")
    settings = config(student, learner={"ranks": 2, "parallel": {"expert": 2}}, algorithm={"router_aux_coef": 0.1})
    check_language_model(str(teacher), settings, "algorithm.teacher")  # without experts, and a loss to balance them
    MistralConfig(**SHAPE, sliding_window=24).save_pretrained(teacher)
    with pytest.raises(ConfigError, match=r"^algorithm.teacher \(.*teacher\) attends to 24 tokens in some layers"):
        check_language_model(str(teacher), settings, "algorithm.teacher")


def test_a_full_disk_is_no_fault_of_the_model(path, monkeypatch):
    def refuse(*arguments, **named):
        raise OSError(number, "nothing more fits")

    monkeypatch.setattr(learner_model.AutoConfig, "from_pretrained", refuse)
    number = errno.EFBIG
    with pytest.raises(OSError, match="nothing more fits"):
        learner(path)
    number = errno.ENOENT
    with pytest.raises(ConfigError, match=r"cannot be loaded as a causal language model: .*nothing more fits"):
        learner(path)


@pytest.mark.parametrize("flash", [True, False])
def test_the_kernel_is_the_best_one_that_runs(monkeypatch, flash):
    monkeypatch.setattr(attention, "flash_function", lambda: torch.abs if flash else None)
    best = "flash_attention_2" if flash else "varlen"
    assert choose_kernel(CUDA, torch.bfloat16) == best
    assert choose_kernel(CUDA, torch.float32) == "sdpa", "those two have no float32"
    assert choose_kernel(CPU, torch.bfloat16) == choose_kernel(CPU, torch.float32) == "cpu"


def test_a_package_called_flash_attn_without_the_function_is_not_flash_attention(monkeypatch, tmp_path):
    """`flash-attn-4`, which SGLang installs, has only `flash_attn.cute`, in a package without __init__."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("flash_attn") is not None
    assert choose_kernel(CUDA, torch.bfloat16) == "varlen"


@pytest.mark.parametrize(("gib", "recomputed"), [(80, False), (1, True)])
def test_activations_are_recomputed_only_on_a_gpu_that_cannot_hold_them(path, monkeypatch, gib, recomputed):
    learner(path)  # there is a process group
    card = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert recomputes(config(path), CUDA) is recomputed and not recomputes(config(path), CPU)
    for wish in (False, True):
        wished = config(path, learner={"activation_checkpointing": wish})
        assert recomputes(wished, CUDA) == recomputes(wished, CPU) == wish
        assert learner(path, learner={"activation_checkpointing": wish}).model.layers[0].training == wish


OPT = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 260}
NOISY = {
    "opt": OPTConfig(**OPT, dropout=0.5),
    "phimoe": PhimoeConfig(**SHAPE | {"vocab_size": 260}, num_local_experts=4, router_jitter_noise=0.2),
}


@pytest.mark.parametrize("name", NOISY)
def test_layers_that_are_recomputed_have_no_dropout_and_no_noise(tmp_path, name):
    AutoModelForCausalLM.from_config(NOISY[name]).save_pretrained(tmp_path)
    plain, recomputed = (learner(tmp_path, learner={"activation_checkpointing": wish}) for wish in (False, True))
    (_, expected), (_, found) = (step_and_gradient(one, random_groups(2, 4)) for one in (plain, recomputed))
    assert_same_gradient(found, expected, 1e-5)
