"""Every attention kernel that can run on the card is plain attention in float64, forward and backward, in bfloat16."""

import pytest
import torch

from asyncgrpo.learner.attention import Family, Segments
from tests.learner.test_attention import check, random_families

ON = {"cuda": ("varlen", "flash_attention_2", "sdpa"), "cpu": ("cpu", "sdpa")}
LENGTHS = {
    "one token": [(1, [])],
    "segments of one token": [(1, [1, 1, 1]), (1, []), (2, [1])],
    "whole tiles": [(128, [128, 256])],
    "a token more than a tile": [(129, [1, 257, 65])],
    "a long prefix": [(700, [30, 2])],
    "no prefix": [(5, []), (300, []), (64, [])],
}
HEADS = [(4, 4, 64), (4, 2, 64), (16, 8, 128), (14, 2, 64), (4, 1, 32)]
"""Heads, those of keys, and their width."""


def of_lengths(*groups: tuple[int, list[int]]) -> Segments:
    """Prompts, each with the completions to it."""
    families, end = [], 0
    for prompt, completions in groups:
        prefix = (end, end + prompt)
        families.append(Family((end, end), prefix))
        bounds = [end := end + prompt]
        for completion in completions:
            bounds.append(end := end + completion)
        if completions:
            families.append(Family(prefix, tuple(bounds)))
    return Segments.of(families)


@pytest.fixture(params=sorted({*ON["cuda"], *ON["cpu"]}))
def kernel(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param not in ON[device.type]:
        pytest.skip(f"{request.param} does not run on {device.type}")
    if request.param == "flash_attention_2":
        reason = "flash_attn with flash_attn_varlen_func is not installed"
        if not hasattr(pytest.importorskip("flash_attn", reason=reason), "flash_attn_varlen_func"):
            pytest.skip(reason)
    return request.param


@pytest.mark.parametrize(("heads", "groups", "width"), HEADS)
@pytest.mark.parametrize("seed", range(2))
def test_random_families(device, kernel, seed, heads, groups, width):
    shape = {"heads": heads, "groups": groups, "width": width, "seed": seed}
    check(kernel, random_families(seed, groups=3, longest=90), torch.bfloat16, scale=0.125, device=device.type, **shape)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(device, kernel, lengths):
    shape = {"heads": 4, "groups": 2, "width": 64}
    check(kernel, of_lengths(*LENGTHS[lengths]), torch.bfloat16, scale=0.125, device=device.type, **shape)
