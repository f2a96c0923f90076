"""What `config/memory.py` predicts of a rank's GPU is what a real step of the learner holds."""

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncgrpo.config import memory
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.placement import changed
from asyncgrpo.learner import attention, head, model
from asyncgrpo.learner.learner import Learner
from tests.gpu_rehearsals.step_memory import fake_ranks, peak_bytes
from tests.learner.helpers import VERSION, config, make_group, random_groups
from tests.models import make_tiny_qwen3, make_tiny_qwen3_moe

TILE = 2**18


@pytest.fixture
def small_tiles(monkeypatch) -> None:
    """Of the head, in the learner and in the prediction."""
    for where in (head.TILE_LOGITS, head.BLOCK_LOGITS):
        monkeypatch.setitem(where, "cpu", TILE)
    monkeypatch.setattr(head, "SUMMED_ROWS", 1)  # as few as a tile holds, which is more than 512 with real tiles
    monkeypatch.setattr(memory, "TILE_LOGITS", TILE)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """Large enough that weights, activations and logits each matter."""
    path = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 12000, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, **none)).bfloat16().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (4, {"learner.activation_checkpointing": False}),
        (4, {"learner.activation_checkpointing": True}),
        (4, {"model.lora.rank": 8}),
        (1, {"learner.activation_checkpointing": True, "cluster.share_gpu": True}),
        pytest.param(1, {"learner.activation_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_a_step_is_as_predicted(path, small_tiles, ranks, settings):
    base = config(path, model={"dtype": "bfloat16"}, sampling={"max_tokens": 128}, data={"max_prompt_tokens": 64})
    run = changed(base, {"learner.ranks": ranks, "learner.tokens_per_microbatch": 300} | settings)
    groups = random_groups(4 * ranks, 4, vocab=4000, prompt=(20, 40), answer=(40, 60))
    with fake_ranks(ranks):
        learner = Learner(run, rank=0, world=ranks, device="cpu")
        learner.step(groups[:1], VERSION)  # makes the moments
        peak = peak_bytes(learner, lambda: learner.step(groups, VERSION))
        sizes = [batch.token_ids.numel() for batch in learner._pack(groups, VERSION).trained]
    assert len(sizes) > 1, "a later micro-batch finds the gradients of the first"
    filled = changed(run, {"learner.tokens_per_microbatch": max(sizes)})
    if "learner.activation_checkpointing" not in settings:
        filled = changed(filled, {"learner.activation_checkpointing": False})  # the default of a CPU
    predicted = memory.learner_tensors(size_at(path), filled).total()
    assert predicted == pytest.approx(peak, rel=0.12)
    assert predicted > 0.94 * peak, "rather too much than too little"


@pytest.mark.parametrize("recompute", [True, "offload"])
def test_context_divides_the_activations_of_a_long_row(tmp_path, monkeypatch, small_tiles, recompute):
    """Of one row of 8,192 tokens. Attention saves what it saves, and computes nothing; host memory is not counted."""
    path, length = make_tiny_qwen3(tmp_path, hidden=128, layers=2), 8192
    monkeypatch.setitem(attention.KERNELS, "cpu", lambda q, k, v, *_: _SavesAttention.apply(q, k, v))
    monkeypatch.setattr(model, "save_on_cpu", _uncounted)

    def groups(tokens: int) -> list:
        return [make_group(0, [1.0, 0.0], [np.arange(tokens) % 200, [1]])]

    def peak(context: int, tokens: int) -> int:
        ours = {"ranks": 4, "tokens_per_microbatch": (length + 8) // context, "parallel": {"context": context}}
        ours |= {"activation_checkpointing": recompute}
        run = config(path, learner=ours, sampling={"max_tokens": length})
        with fake_ranks(4):
            learner = Learner(run, rank=0, world=4, device="cpu")
            learner.step(groups(8), VERSION)  # makes the moments
            held = peak_bytes(learner, lambda: learner.step(groups(tokens), VERSION))
        if tokens == length:
            predicted = memory.learner_tensors(size_at(str(path)), run).total()
            assert 0.94 * held < predicted < 1.15 * held
        return held

    whole, *parts = (peak(context, length) - peak(context, 64) for context in (1, 2, 4))
    assert parts == [pytest.approx(whole / 2, rel=0.1), pytest.approx(whole / 4, rel=0.1)]


class _SavesAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        out = query.new_zeros(*query.shape[:2], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_zeros(query.shape[:2]))
        return out

    @staticmethod
    def backward(ctx, gradient):
        return tuple(map(torch.zeros_like, ctx.saved_tensors[:3]))


def _uncounted(pin_memory: bool) -> saved_tensors_hooks:
    """Keep saved tensors outside torch."""
    return saved_tensors_hooks(lambda x: x.detach().clone().numpy().copy(), torch.tensor)


def test_expert_divides_the_experts_that_are_gathered(tmp_path):
    """Each of four ranks gathers a quarter of the experts of a layer."""
    mixture = make_tiny_qwen3_moe(tmp_path / "mixture", experts=8)
    held = []
    for expert in (1, 4):
        with fake_ranks(4):
            run = config(mixture, learner={"ranks": 4, "parallel": {"expert": expert}})
            scorer = Learner(run, rank=0, world=4, device="cpu").model
            experts = [p for name, p in scorer.named_parameters() if ".experts." in name]
            assert sum(p.to_local().numel() for p in experts) == sum(p.numel() for p in experts) // 4
            scorer.unshard()
            for module in scorer.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
            gathered = (
                p.to_local() if isinstance(p, DTensor) else p for n, p in scorer.named_parameters() if ".experts." in n
            )
            held.append(sum(p.numel() for p in gathered))
    assert held[1] == held[0] // 4
