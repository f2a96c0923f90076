"""Every attention kernel that can run on the card is plain attention in float64, forward and backward, in bfloat16."""

import pytest
import torch

from asyncgrpo.learner.attention import KERNELS, Segments
from tests.learner.test_attention import TOLERANCE, inputs, of_lengths, plain, random_families, results, visible

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


@pytest.fixture(params=sorted({*ON["cuda"], *ON["cpu"]}))
def kernel(request: pytest.FixtureRequest, device: torch.device) -> str:
    if request.param not in ON[device.type]:
        pytest.skip(f"{request.param} does not run on {device.type}")
    if request.param == "flash_attention_2":
        reason = "flash_attn with flash_attn_varlen_func is not installed"
        if not hasattr(pytest.importorskip("flash_attn", reason=reason), "flash_attn_varlen_func"):
            pytest.skip(reason)
    return request.param


def check(device: torch.device, kernel: str, segments: Segments, **shape: int) -> None:
    """Compare the output and its gradients by query, key and value, each as a whole tensor."""
    scale, dtype = 0.125, torch.bfloat16
    tensors = inputs(segments, **shape)
    exact = results(plain(visible(segments), scale), [x.to(dtype).double() for x in tensors], torch.float64)
    there = segments.to(device)
    found = results(lambda q, k, v: KERNELS[kernel](q, k, v, there, scale), [x.to(device) for x in tensors], dtype)
    for what, expected, got in zip(("output", "dQ", "dK", "dV"), exact, found, strict=True):
        assert got.device.type == device.type and got.shape == expected.shape and got.isfinite().all(), what
        error = (got.double().cpu() - expected).norm() / max(expected.norm(), exact[0].norm())
        assert error < TOLERANCE[dtype], (what, error)


@pytest.mark.parametrize(("heads", "groups", "width"), HEADS)
@pytest.mark.parametrize("seed", range(2))
def test_random_families(device, kernel, seed, heads, groups, width):
    check(
        device, kernel, random_families(seed, groups=3, longest=90), heads=heads, groups=groups, width=width, seed=seed
    )


@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(device, kernel, lengths):
    check(device, kernel, of_lengths(*LENGTHS[lengths]), heads=4, groups=2, width=64)
