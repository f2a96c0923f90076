"""A whole learner on fake cards: it is built, steps and publishes, with everything where a card wants it.

Rank 0 of 8. The backward pass cannot run (`fake_cuda`); gradients of the right shapes stand for it.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncgrpo.cluster import wiring
from asyncgrpo.learner import attention
from asyncgrpo.learner.learner import Learner
from tests.gpu_rehearsals.fake_cuda import fake_gpu
from tests.learner.helpers import VERSION, config, random_groups
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe

WORLD = 8
CARD = torch.device("cuda", 0)
CASES = {
    "full": {},
    "float32": {"model": {"dtype": "float32"}},
    "reference": {"algorithm": {"kl_coef": 0.1, "kl_kind": "full", "entropy_coef": 0.1}},
    "reference on the card": {"algorithm": {"kl_coef": 0.1}, "learner": {"offload_reference": False}},
    "critic": {"algorithm": {"advantage": "gae"}},
    "sequences": {"algorithm": {"loss": "gspo"}},
    "moments on the CPU": {"learner": {"offload_optimizer": True, "minibatches": 2}},
    "adapters": {"model": {"lora": {"rank": 2}}, "algorithm": {"kl_coef": 0.1}},
}


@pytest.fixture
def kernels(monkeypatch) -> list[str]:
    """The kernels that ran. torch's own has a fake of its own; flash_attn is not installed here."""
    ran = []
    for name in ("varlen", "sdpa"):
        kernel = attention.KERNELS[name]
        monkeypatch.setitem(attention.KERNELS, name, lambda *given, n=name, k=kernel: ran.append(n) or k(*given))
    return ran


def learner(path: Path, sections: dict) -> Learner:
    model = {"dtype": "bfloat16"} | sections.get("model", {})
    return Learner(config(path, **sections | {"model": model}), rank=0, world=WORLD, device=CARD)


def fake_backward(ours: Learner, monkeypatch) -> None:
    def backward(root: Tensor) -> None:
        assert root.device == CARD and root.shape == ()
        for parameter in ours.parameters:
            parameter.grad = torch.zeros_like(parameter)

    monkeypatch.setattr(Tensor, "backward", backward)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_is_built_steps_and_publishes(tmp_path, monkeypatch, kernels, case):
    if case == "adapters":
        pytest.importorskip("peft")
    path = make_tiny_qwen3(tmp_path)
    with fake_gpu(WORLD):
        ours = learner(path, CASES[case])
        fake_backward(ours, monkeypatch)
        assert all(p.device == CARD and isinstance(p, DTensor) for p in ours.model.parameters())
        assert ours.model.language_model.is_gradient_checkpointing
        report = ours.step(random_groups(WORLD, 4), VERSION)
        assert report.skipped is None and report.tokens_trained > 0
        published = list(ours.weights())
        assert [info for info, _ in published] == ours.layout()
        assert {tensor.device for _, tensor in published} == {CARD}
    waiting = {t.device.type for s in ours.optimizer.state.values() for n, t in s.items() if n != "step"}
    assert waiting == {"cpu" if case == "moments on the CPU" else "cuda"}
    assert set(kernels) == {"sdpa" if case == "float32" else "varlen"}


@pytest.mark.parametrize("make", [make_tiny_qwen3_moe, make_tiny_deepseek_v3])
def test_a_mixture_is_built_and_publishes(tmp_path, make):
    """Its experts' kernels read how many tokens each has, which fake tensors cannot say."""
    with fake_gpu(WORLD):
        ours = learner(make(tmp_path), {})
        published = list(ours.weights())
        assert [info for info, _ in published] == ours.layout()
        assert {tensor.device for _, tensor in published} == {CARD}


def test_a_rank_names_its_card_by_index(tmp_path, monkeypatch):
    """Ray shows each rank one card, which is card 0 to it."""
    monkeypatch.setattr(wiring, "begin", lambda *arguments, **named: ("127.0.0.1", 1))
    settings = config(make_tiny_qwen3(tmp_path), learner={"device": "cuda", "ranks": WORLD})
    actor = wiring.LearnerActor({}, 1)
    with fake_gpu(WORLD):
        actor.start(wiring.Setup(settings, tmp_path, 1, None, None, "tcp://127.0.0.1:1", 1))
        ours = Learner(settings, rank=0, world=WORLD, device=actor._device)
    assert {parameter.device for parameter in ours.parameters} == {CARD}


def test_the_rehearsal_finds_a_card_without_an_index(tmp_path):
    with fake_gpu(WORLD), pytest.raises(ValueError, match="a specified index"):
        Learner(config(make_tiny_qwen3(tmp_path)), rank=0, world=WORLD, device="cuda")


def test_the_rehearsal_finds_what_is_on_the_wrong_device(tmp_path, monkeypatch):
    monkeypatch.setattr(attention.Segments, "to", lambda segments, device: segments)
    with fake_gpu(WORLD), pytest.raises(RuntimeError, match="device"):
        learner(make_tiny_qwen3(tmp_path), {}).step(random_groups(WORLD, 4), VERSION)
