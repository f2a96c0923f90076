"""Adapters are merged to the same bits wherever that is done."""

import math
from fractions import Fraction

import pytest
import torch

from asyncgrpo.learner.publishing import merge


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


@pytest.mark.parametrize(("rows", "rank"), [(70, 3), (70, 32), (70, 200), (1500, 8)])
def test_no_order_of_summation_and_no_division_into_parts_changes_a_bit(rows, rank):
    up, down = adapter(rows, 90, rank)
    base = random(rows, 90, scale=0.02)
    merged = merge(base, up, down, torch.float32)
    for seed in range(5):
        order = torch.randperm(rank, generator=torch.Generator().manual_seed(seed))
        assert merge(base, up[:, order], down[order], torch.float32).equal(merged)
    parts = [merge(base[i : i + 7], up[i : i + 7], down, torch.float32) for i in range(0, rows, 7)]
    assert torch.cat(parts).equal(merged)
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
