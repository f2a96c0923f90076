"""Adapters alone cross the wire, and engines hold exactly what whole merged weights would have given them."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.engines.torch.engine import TorchEngine
from asyncgrpo.errors import ConfigError, WeightsError
from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.adapters import AdapterMerger
from asyncgrpo.weights.arena import size_bytes
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
from tests.learner.helpers import VERSION, config, random_groups, weights
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe
from tests.weights.publishing import publish as published

pytest.importorskip("peft")

GROUPS = random_groups(4, 4, seed=1)


def learner(path, *, dtype="float32", rank=4, targets=(), adapters_only=True) -> Learner:
    sections = {
        "model": {"path": str(path), "dtype": dtype, "lora": {"rank": rank, "targets": targets}},
        "learner": {"device": "cpu", "lr": 1e-2},
        "weights": {"adapters_only": adapters_only},
    }
    return Learner(config(path, **sections), rank=0, world=1, device="cpu")


def saved_as(path, dtype: torch.dtype):
    """The same folder with its tensors in another dtype."""
    file = path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    return path


def adapters(learner: Learner) -> list[tuple[str, torch.Tensor]]:
    return [(info.name, tensor.clone()) for info, tensor in learner.sent.weights()]


@pytest.mark.parametrize("on_disk", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_deepseek_v3])
def test_merging_at_the_generator_gives_the_bits_of_merged_publishing(tmp_path, make, dtype, on_disk):
    path = saved_as(make(tmp_path), getattr(torch, on_disk))
    ours, merger = learner(path, dtype=dtype), AdapterMerger(str(path), getattr(torch, dtype))
    for _ in range(3):
        merged, whole = dict(merger.merge(adapters(ours), ours.sent.base)), weights(ours)
        for name, tensor in merged.items():
            assert tensor.dtype == whole[name].dtype and tensor.equal(whole[name]), name
        base = {name: t.to(whole[name].dtype) for name, t in load_file(path / "model.safetensors").items()}
        others = whole.keys() - merged.keys()
        assert others and all(whole[name].equal(base[name]) for name in others), "the rest is what the files hold"
        ours.step(GROUPS, VERSION)
    assert any(not merged[name].equal(base[name]) for name in merged), "the adapters were trained"


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_the_layout_says_what_is_sent(tmp_path, targets):
    ours = learner(make_tiny_qwen3(tmp_path), targets=targets)
    sent = list(ours.sent.weights())
    assert [info for info, _ in sent] == ours.sent.layout()
    assert all((info.shape, torch.float32) == (tuple(tensor.shape), tensor.dtype) for info, tensor in sent)
    assert len(sent) == 2 * 2 * (len(targets) or 7), "two matrices for each layer of two blocks"


def test_only_adapters_cross_the_wire(tmp_path):
    ours = learner(make_tiny_qwen3(tmp_path, hidden=512, vocab=2000), rank=8, dtype="bfloat16")
    sent, whole = (sum(map(size_bytes, layout)) for layout in (ours.sent.layout(), ours.layout()))
    trained = sum(parameter.numel() for parameter in ours.parameters)
    assert sent == 4 * trained, "float32 masters of the adapters and nothing else"
    assert sent < 0.12 * whole, "a small model has a large share; see benchmarks/publication.py for real shapes"


def test_a_learner_without_lora_or_asked_to_sends_whole_weights(tmp_path):
    path = make_tiny_qwen3(tmp_path)
    for ours in (learner(path, rank=0), learner(path, adapters_only=False)):
        assert ours.sent.layout() == ours.layout() and ours.sent.base == ""


def test_a_base_that_cannot_be_merged_into_is_refused_at_the_start(tmp_path):
    path = make_tiny_qwen3(tmp_path)
    tensors = load_file(path / "model.safetensors")
    torch.save(tensors, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no readable model\.safetensors .*set weights\.adapters_only=false"):
        learner(path)
    learner(path, adapters_only=False)


def test_a_tied_weight_that_would_be_adapted_is_refused(tmp_path):
    path = make_tiny_qwen3(tmp_path, tie=True)
    with pytest.raises(ConfigError, match=r"adapts lm_head\.weight, which is tied"):
        learner(path, targets=("lm_head",))


class Generator:
    """A torch engine behind a receiver, and the loop it lives on."""

    def __init__(self, path, dtype: torch.dtype) -> None:
        self.engine = TorchEngine(str(path), dtype=dtype, device=torch.device("cpu"), max_context=64, max_completions=2)
        self.path, self.dtype = path, dtype
        self.receiver: Receiver | None = None
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.engine.start(PolicyVersion(0, 0)))

    def join(self, publisher: Publisher, name: str) -> None:
        self.receiver = Receiver(
            publisher.endpoint,
            generator_id=name,
            incarnation="0",
            host="127.0.0.1",
            apply=self.apply,
            keys=None,
            merger=AdapterMerger(str(self.path), self.dtype),
        )
        self.receiver.start()

    def apply(self, tensors, version: PolicyVersion) -> str:
        self.loop.run_until_complete(self.engine.load_weights(tensors, version, partial=True))
        return self.checksum()

    def checksum(self) -> str:
        return self.loop.run_until_complete(self.engine.checksum())

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.engine._model.named_parameters())

    def close(self) -> None:
        if self.receiver is not None:
            self.receiver.stop()
        self.loop.run_until_complete(self.engine.close())
        self.loop.close()


@pytest.fixture
def plane():
    """A publisher on real sockets and a real gloo group, and a way to start generators."""
    publisher = Publisher(
        WeightsConfig(timeout_s=10.0), maps=False, backend="gloo", bind="127.0.0.1", host="127.0.0.1", keys=None
    )
    generators: list[Generator] = []

    def start(path, dtype: torch.dtype) -> Generator:
        generators.append(Generator(path, dtype))
        return generators[-1]

    def publish(ours: Learner, version: int):
        return published(publisher, PolicyVersion(1, version), ours.sent.weights())

    yield publisher, start, publish
    for generator in generators:
        generator.close()
    publisher.close()


def await_members(publisher: Publisher, count: int) -> None:
    publisher.wait_for(count, 20.0, lambda what, seconds: None)
    assert len(publisher.generators) == count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_hold_the_merged_weights_also_those_that_come_later(tmp_path, plane, dtype):
    publisher, start, publish = plane
    path = make_tiny_qwen3(tmp_path)
    ours = learner(path, dtype=dtype)
    publisher.start(ours.sent.layout(), ours.sent.base)
    first = start(path, getattr(torch, dtype))
    first.join(publisher, "generator-0")
    await_members(publisher, 1)
    publish(ours, 0)
    for version in (1, 2):
        ours.step(GROUPS, VERSION)
        publication = publish(ours, version)
    assert publication.attempts == 1
    assert publication.num_bytes < 1.2 * 4 * sum(p.numel() for p in ours.parameters), "64-byte places at most"

    late = start(path, getattr(torch, dtype))
    late.join(publisher, "generator-1")
    await_members(publisher, 2)
    publication = publish(ours, 2)
    assert publication.generators == ("generator-0", "generator-1")
    whole = weights(ours)
    for generator in (first, late):
        assert all(parameter.equal(whole[name]) for name, parameter in generator.parameters().items())

    beside = start(path, getattr(torch, dtype))  # gets whole weights, as merged publishing would send them
    beside.loop.run_until_complete(beside.engine.load_weights(whole.items(), PolicyVersion(1, 2)))
    assert {beside.checksum()} == set(publication.checksums.values())


def test_a_generator_with_another_base_is_left_out_before_it_samples(tmp_path, plane):
    publisher, start, publish = plane
    path = make_tiny_qwen3(tmp_path / "ours")
    ours = learner(path)
    publisher.start(ours.sent.layout(), ours.sent.base)
    right, wrong = start(path, torch.float32), start(make_tiny_qwen3(tmp_path / "other", seed=1), torch.float32)
    right.join(publisher, "generator-0")
    wrong.join(publisher, "generator-1")
    await_members(publisher, 2)
    publication = publish(ours, 0)
    assert publication.generators == ("generator-0",) and publication.dropped == ("generator-1",)
    assert wrong.engine.version == PolicyVersion(0, 0), "it was never told to swap"
    wrong.receiver._thread.join(5.0)
    assert isinstance(wrong.receiver.failure, WeightsError) and "holds other weights here" in str(
        wrong.receiver.failure
    )


def test_a_run_in_which_every_generator_has_another_base_ends_with_the_reason(tmp_path, plane):
    publisher, start, publish = plane
    ours = learner(make_tiny_qwen3(tmp_path / "ours"))
    publisher.start(ours.sent.layout(), ours.sent.base)
    start(make_tiny_qwen3(tmp_path / "other", seed=1), torch.float32).join(publisher, "generator-0")
    await_members(publisher, 1)
    with pytest.raises(WeightsError, match=r"reached no generator; first failure: .*holds other weights"):
        publish(ours, 0)


def test_a_change_too_small_for_bfloat16_is_no_engine_that_kept_its_weights(tmp_path, plane):
    publisher, start, publish = plane
    path = saved_as(make_tiny_qwen3(tmp_path), torch.bfloat16)
    ours = learner(path, dtype="bfloat16")
    publisher.start(ours.sent.layout(), ours.sent.base)
    start(path, torch.bfloat16).join(publisher, "generator-0")
    await_members(publisher, 1)
    first = publish(ours, 0)
    for name, parameter in ours.model.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter.to_local(), 1e-9)
    second = publish(ours, 1)
    assert second.digest != first.digest and second.checksums == first.checksums
