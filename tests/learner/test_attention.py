"""Attention over segments with prefixes is plain attention with the mask that they stand for, forward and backward."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncgrpo.learner import attention
from asyncgrpo.learner.attention import KERNELS, Family, Segments

ON_CPU = ("cpu", "sdpa")
"""Kernels that run without a GPU."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of a whole tensor, relative."""


def random_families(seed: int, *, groups: int, longest: int) -> Segments:
    """Prompts with completions, prompts of their own, and a family whose prefix lies further back; lengths from 1."""
    rng = random.Random(seed)
    families: list[Family] = []
    end = 0

    def add(prefix: tuple[int, int], count: int) -> None:
        nonlocal end
        bounds = [end]
        for _ in range(count):
            bounds.append(bounds[-1] + rng.choice([1, 2, rng.randint(1, longest)]))
        families.append(Family(prefix, tuple(bounds)))
        end = bounds[-1]

    for _ in range(groups):
        start = end
        add((start, start), rng.choice([1, 1, 3]))
        prefix = (families[-1].bounds[-2], end)
        for _ in range(rng.choice([0, 1, 1, 2])):
            add(prefix, rng.randint(1, 5))
    return Segments.of(families)


def visible(segments: Segments) -> Tensor:
    """[T, T] bool, token by token: whether the row's token sees the column's."""
    size = segments.families[-1].bounds[-1]
    mask = torch.zeros(size, size, dtype=torch.bool)
    for (first, last), bounds in segments.families:
        for start, end in itertools.pairwise(bounds):
            for t in range(start, end):
                mask[t, first:last] = True
                mask[t, start : t + 1] = True
    return mask


def inputs(segments: Segments, *, heads=4, groups=2, width=16, value_width=None, seed=0, scale=1.0) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output, float64."""
    generator = torch.Generator().manual_seed(seed)
    size, value_width = int(segments.queries[-1]), value_width or width

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    query, key = scale * draw(size, heads, width), scale * draw(size, groups, width)
    return [query, key, draw(size, groups, value_width), draw(size, heads, value_width)]


def results(attend, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and its gradients by query, key and value."""
    *leaves, grad_out = (x.to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in leaves]
    out = attend(*leaves)
    assert out.dtype == dtype
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def plain(mask: Tensor, scale: float):
    """Attention as the textbooks have it."""

    def attend(query, key, value):
        shared = query.shape[1] // key.shape[1]
        q, k, v = (x.transpose(0, 1)[None] for x in (query, *(y.repeat_interleave(shared, 1) for y in (key, value))))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1)

    return attend


def check(
    kernel: str, segments: Segments, dtype: torch.dtype, *, scale: float = 0.25, device: str = "cpu", **shape
) -> None:
    """Compare the output and its gradients by query, key and value, each as a whole tensor."""
    tensors, there = inputs(segments, **shape), segments.to(torch.device(device))
    exact = results(plain(visible(segments), scale), [x.to(dtype).double() for x in tensors], torch.float64)
    ours = results(lambda q, k, v: KERNELS[kernel](q, k, v, there, scale), [x.to(device) for x in tensors], dtype)
    for what, expected, found in zip(("output", "dQ", "dK", "dV"), exact, ours, strict=True):
        assert found.device.type == device and found.shape == expected.shape and found.isfinite().all(), what
        scale_of_error = max(expected.norm(), exact[0].norm())  # one token alone has no gradient by its query
        error = (found.double().cpu() - expected).norm() / scale_of_error
        assert error < TOLERANCE[dtype], (what, error)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", ON_CPU)
@pytest.mark.parametrize("seed", range(4))
def test_random_families_attend_as_their_mask_says(kernel, seed, dtype):
    check(kernel, random_families(seed, groups=3, longest=20), dtype, seed=seed)


SHAPES = [{"heads": 4, "groups": 1}, {"heads": 6, "groups": 3, "width": 64}, {"value_width": 8}, {"value_width": 24}]
"""Heads that share keys, and values of another width than keys, as in latent attention."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", ON_CPU)
def test_shapes_of_heads(kernel, shape):
    check(kernel, random_families(7, groups=2, longest=9), torch.float64, **shape)


def test_blocks_of_any_size_do(monkeypatch):
    for seed, (own, prefix) in enumerate([(1, 1), (2, 3), (7, 5)]):
        monkeypatch.setattr(attention, "OWN_BLOCK", own)
        monkeypatch.setattr(attention, "PREFIX_BLOCK", prefix)
        check("cpu", random_families(seed, groups=3, longest=12), torch.float64, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", ON_CPU)
def test_scores_far_apart_are_no_trouble(kernel, dtype):
    """A future token that would score hundreds of nats more than all that is visible stays invisible."""
    segments = random_families(3, groups=2, longest=20)
    query, key, value, grad_out = inputs(segments, scale=20.0)
    found = results(lambda q, k, v: KERNELS[kernel](q, k, v, segments, 1.0), [query, key, value, grad_out], dtype)
    exact = results(plain(visible(segments), 1.0), [query, key, value, grad_out], torch.float64)
    assert (torch.einsum("qhd,khd->hqk", query[:, ::2], key).abs().max() > 1000).all()
    for expected, ours in zip(exact, found, strict=True):
        assert (ours.double() - expected).norm() < 1e3 * TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("kernel", ON_CPU)
def test_nothing_leaks_from_tokens_outside(kernel):
    """Whatever another token is: what does not see it is bitwise identical, and everything that does is not."""
    segments = random_families(5, groups=3, longest=6)
    mask = visible(segments)
    query, key, value, _ = inputs(segments)

    def attend(k, v):
        return KERNELS[kernel](query, k, v, segments, 0.25)

    before = attend(key, value)
    for t in range(len(mask)):
        other_key, other_value = key.clone(), value.clone()
        other_key[t] += 1.0
        other_value[t] = 100.0
        is_same = (attend(other_key, other_value) == before).flatten(1).all(-1)
        assert torch.equal(is_same, ~mask[:, t]), t


def by_lengths(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, *longest: int, scale: float) -> Tensor:
    """What kernels for GPUs compute: attention within each sequence, whose last query sees its last key."""
    assert longest == (queries.diff().max(), keys.diff().max()) and keys[-1] == len(k) == len(v)
    found = []
    for parts in zip(*(x.tensor_split(at[1:-1].long()) for x, at in ((q, queries), (k, keys), (v, keys))), strict=True):
        size, seen = len(parts[0]), len(parts[1])
        mask = torch.ones(size, seen, dtype=torch.bool).tril(seen - size)
        found.append(plain(mask, scale)(*parts))
    return torch.cat(found)


@pytest.mark.parametrize("has_gqa", [True, False], ids=["torch 2.13", "torch 2.11"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 4)])
def test_varlen_repeats_keys_only_where_the_kernel_cannot_share_them(monkeypatch, heads, groups, has_gqa):
    """A stand-in with the signature of either release of torch notes what it is given."""
    segments = random_families(heads, groups=3, longest=9)
    query, key, value, _ = inputs(segments, heads=heads, groups=groups)
    given = {}

    def newer(q, k, v, *lengths, scale, window_size, enable_gqa=False):
        assert q.shape[1] == k.shape[1] or enable_gqa, "what torch refuses"
        return older(q, k, v, *lengths, scale=scale, window_size=window_size)

    def older(q, k, v, *lengths, scale, window_size):
        assert window_size == (-1, 0)
        given.update(keys=k.shape[1], values=v.shape[1])
        return by_lengths(q, k, v, *lengths, scale=scale)

    monkeypatch.setattr(attention, "varlen_attn", newer if has_gqa else older)
    found = KERNELS["varlen"](query, key, value, segments, 0.25)
    torch.testing.assert_close(found, plain(visible(segments), 0.25)(query, key, value))
    assert set(given.values()) == {groups if has_gqa else heads}


@pytest.mark.parametrize("kernel", ["varlen", "flash_attention_2"])
def test_kernels_that_need_equal_widths_get_values_with_zeros_and_return_their_own_width(monkeypatch, kernel):
    """As in latent attention: keys of 12, values of 8."""
    query, key, value = torch.randn(10, 4, 12), torch.randn(10, 4, 12), torch.randn(10, 4, 8)
    segments = Segments.of([Family((0, 0), (0, 4)), Family((0, 4), (4, 7, 10))])

    def equal_widths(q, k, v, *lengths, **options):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1], "the kernel's condition"
        return by_lengths(q, k, v, *lengths, scale=0.3)

    monkeypatch.setattr(attention, "varlen_attn", equal_widths)
    monkeypatch.setattr(attention, "flash_function", lambda: equal_widths)
    found = KERNELS[kernel](query, key, value, segments, 0.3)
    assert found.shape == value.shape
    torch.testing.assert_close(found, KERNELS["sdpa"](query, key, value, segments, 0.3))
