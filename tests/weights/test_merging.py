"""Adapters are merged to the same bits wherever that is done, and bases are told apart."""

import math
from fractions import Fraction

import pytest
import torch
from safetensors.torch import save_file

from asyncgrpo.errors import WeightsError
from asyncgrpo.types import TensorInfo
from asyncgrpo.weights.adapters import SAMPLES, AdapterMerger, BaseWeights, content_digest, fingerprint, merge, pairs


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def adapter(out: int, inner: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`up` and `down` whose values lie many orders of magnitude apart."""
    spread = 10.0 ** torch.arange(rank).sub(rank / 2).clamp(-6, 6)
    return random(out, rank, seed=1) * spread, random(rank, inner, seed=2) / spread[:, None] * 1e-3


def exact_product(up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The documented product by rational numbers: rounded to a grid, multiplied, added, rounded to float32."""
    bits = (53 - (len(down) - 1).bit_length()) // 2

    def grid(values: list[float]) -> list[Fraction]:
        step = Fraction(2) ** (math.frexp(max(map(abs, values)))[1] - bits)
        return [round(Fraction(value) / step) * step for value in values]

    size = [2.0 ** math.frexp(max(map(abs, row)))[1] for row in down.tolist()]
    rows = [grid([x * s for x, s in zip(row, size, strict=True)]) for row in up.tolist()]
    columns = [grid([x / s for x, s in zip(column, size, strict=True)]) for column in down.T.tolist()]
    return torch.tensor([[float(sum(x * y for x, y in zip(r, c, strict=True))) for c in columns] for r in rows]).float()


@pytest.mark.parametrize("rank", [1, 2, 5, 16])
def test_the_product_is_exact_before_it_is_rounded(rank):
    up, down = adapter(6, 9, rank)
    assert merge(torch.zeros(6, 9), up, down, torch.float32).equal(exact_product(up, down))


@pytest.mark.parametrize("rank", [3, 32, 200])
def test_no_order_of_summation_changes_a_bit(rank):
    up, down = adapter(70, 90, rank)
    base = random(70, 90, scale=0.02)
    merged = merge(base, up, down, torch.float32)
    for seed in range(5):
        prompt_index = torch.randperm(rank, generator=torch.Generator().manual_seed(seed))
        assert merge(base, up[:, prompt_index], down[prompt_index], torch.float32).equal(merged)
    alone = torch.cat([merge(base[i : i + 1], up[i : i + 1], down, torch.float32) for i in range(70)])
    assert alone.equal(merged), "rows may be merged one by one"
    expected = base.double() + up.double() @ down.double()
    torch.testing.assert_close(merged.double(), expected, rtol=2e-6, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("kept_as", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_added_in_float32_and_rounded_once(kept_as):
    up, down = adapter(40, 30, 4)
    base = random(40, 30, scale=0.02).to(kept_as)
    addition = merge(torch.zeros(40, 30), up, down, torch.float32)
    assert merge(base, up, down, torch.bfloat16).equal((base.float() + addition).bfloat16())


def test_an_adapter_of_zeros_and_one_of_tiny_numbers_leave_the_base_as_it_is():
    base = random(8, 8)
    for up in (torch.zeros(8, 2), torch.full((8, 2), 1e-44)):  # 1e-44 is a subnormal number
        assert merge(base, up, random(2, 8), torch.float32).equal(base)


def test_large_matrices_are_merged_in_parts_without_a_seam():
    up, down = adapter(1500, 700, 8)
    base = random(1500, 700)
    whole = merge(base, up, down, torch.float32)
    assert torch.cat(
        [merge(base[i : i + 300], up[i : i + 300], down, torch.float32) for i in range(0, 1500, 300)]
    ).equal(whole)


def test_published_adapters_are_read_in_pairs():
    tensors = [("x.lora_A", torch.zeros(1)), ("x.lora_B", torch.ones(1))]
    assert [(name, up.item(), down.item()) for name, up, down in pairs(tensors)] == [("x", 1.0, 0.0)]
    with pytest.raises(AssertionError, match="are no adapter"):
        list(pairs(reversed(tensors)))


def test_a_fingerprint_tells_names_shapes_and_values_apart_but_not_dtypes_that_hold_the_same():
    tensor = random(300, 200).bfloat16()
    ours = fingerprint([("w", tensor)])
    assert ours == fingerprint([("w", tensor.float())])
    trained_on = (tensor.float() * (1 + 1e-2 * random(300, 200, seed=3))).bfloat16()
    others = [("v", tensor), ("w", tensor.reshape(200, 300)), ("w", trained_on), ("w", tensor.roll(1, 0))]
    assert ours not in {fingerprint([other]) for other in others}
    few = random(SAMPLES)
    assert fingerprint([("w", few)]) != fingerprint([("w", few + torch.eye(SAMPLES)[17] * 1e-3)]), "all of a small one"


def test_a_content_digest_sees_one_bit():
    tensor = random(50, 40).bfloat16()
    changed = tensor.clone()
    changed.view(torch.int16)[31, 7] ^= 1
    assert content_digest([("w", tensor)]) == content_digest([("w", tensor.clone())])
    assert content_digest([("w", tensor)]) != content_digest([("w", changed)])


@pytest.fixture
def folder(tmp_path):
    save_file({"w": random(20, 10), "norm": random(10)}, tmp_path / "model.safetensors")
    return tmp_path


def published(rank: int = 3) -> list[tuple[str, torch.Tensor]]:
    up, down = adapter(20, 10, rank)
    return [("w.lora_A", down), ("w.lora_B", up)]


def test_a_merger_gives_whole_weights_of_what_is_adapted_and_nothing_else(folder):
    merger = AdapterMerger(str(folder), torch.bfloat16)
    (_, down), (_, up) = published()
    ((name, merged),) = merger.merge(published(), BaseWeights(str(folder)).fingerprint(["w"]))
    assert name == "w" and merged.equal(merge(random(20, 10), up, down, torch.bfloat16))
    assert merger.layout(published()) == [TensorInfo(name="w", shape=(20, 10), dtype="bfloat16")]


def test_files_in_several_parts_are_one_base(folder, tmp_path_factory):
    parts = tmp_path_factory.mktemp("parts")
    save_file({"norm": random(10)}, parts / "a.safetensors")
    save_file({"w": random(20, 10)}, parts / "b.safetensors")
    index = '{"weight_map": {"norm": "a.safetensors", "w": "b.safetensors"}}'
    (parts / "model.safetensors.index.json").write_text(index)
    names = ["w", "norm"]
    assert BaseWeights(str(parts)).fingerprint(names) == BaseWeights(str(folder)).fingerprint(names)


def test_a_hub_id_is_read_from_the_cache(folder, tmp_path_factory, monkeypatch):
    import huggingface_hub.constants

    cache = tmp_path_factory.mktemp("cache")
    snapshot = cache / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (cache / "models--some--model" / "refs").mkdir()
    (cache / "models--some--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    assert BaseWeights("some/model").tensor("w").equal(random(20, 10))
    with pytest.raises(WeightsError, match=r"other/model.* neither a folder nor in the local Hugging Face cache"):
        BaseWeights("other/model")


def test_another_base_a_missing_tensor_and_a_missing_file_are_said_in_a_sentence(folder, tmp_path_factory):
    merger = AdapterMerger(str(folder), torch.float32)
    with pytest.raises(WeightsError, match="holds other weights here than where the learner runs"):
        merger.merge(published(), fingerprint([("w", random(20, 10, seed=5))]))
    with pytest.raises(WeightsError, match=r"none named v; set weights\.adapters_only=false"):
        merger.merge([(name.replace("w", "v"), tensor) for name, tensor in published()], "")
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(WeightsError, match=r"no readable model.safetensors or .*; set weights.adapters_only=false"):
        BaseWeights(str(empty))
    (empty / "model.safetensors").write_bytes(b"no")
    with pytest.raises(WeightsError, match="no readable"):
        BaseWeights(str(empty))
