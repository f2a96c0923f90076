"""Attention over segments with prefixes on the CPU: torch's flash kernel forward, matrix products backward.

Forward, a segment's attention to itself and to its prefix are two calls of the flash kernel, merged by the logarithms
of their softmax denominators, as ring attention does; all segments of a family share one call for the prefix.
Backward, torch's bfloat16 kernel is several times slower than the matrix products that it stands for (64 tokens, 4
heads of 64: 1.2 against 0.4 ms on one core of an AMD EPYC 9004), so here it is those products, over blocks of queries.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

OWN_BLOCK = 256
"""Queries at once where half of the scores are masked: larger blocks waste more of them."""
PREFIX_BLOCK = 1024
"""Queries at once where none is."""

Families = Sequence[tuple[tuple[int, int], Sequence[int]]]
"""`attention.Family`s."""


def attend(query: Tensor, key: Tensor, value: Tensor, families: Families, scale: float) -> Tensor:
    """`softmax(scale QKᵀ) V` for every segment over its prefix and, causally, itself.

    Args:
        query: [T, H, D] float32, bfloat16 or float64.
        key, value: [T, G, D]; H is a multiple of G.
        families: cover the row.
    Returns:
        [T, H, D], with gradient. Softmax statistics are at least float32.
    """
    attended: Tensor = _SegmentAttention.apply(*(x.transpose(0, 1) for x in (query, key, value)), families, scale)
    return attended.transpose(0, 1)


class _SegmentAttention(torch.autograd.Function):
    """Heads first: [H, T, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, families: Families, scale: float) -> Tensor:
        heads, num_tokens, width = query.shape
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        out = query.new_empty(num_tokens, heads, width).transpose(0, 1)
        lse = query.new_empty(heads, num_tokens, dtype=exact)
        for (prefix_start, prefix_end), bounds in families:
            for start, end in itertools.pairwise(bounds):
                own = (x[:, start:end] for x in (query, key, value))
                out[:, start:end], lse[:, start:end] = _cpu_flash(*own, is_causal=True, scale=scale)
            if prefix_start < prefix_end:
                rows, prefix = slice(bounds[0], bounds[-1]), slice(prefix_start, prefix_end)
                there, there_lse = _cpu_flash(
                    query[:, rows], key[:, prefix], value[:, prefix], is_causal=False, scale=scale
                )
                both = torch.logaddexp(lse[:, rows], there_lse)
                share = (lse[:, rows] - both).exp_()[..., None]
                out[:, rows] = torch.lerp(there.to(exact), out[:, rows].to(exact), share).to(out.dtype)
                lse[:, rows] = both
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.families, ctx.scale = families, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        blocks = _Backward(ctx, gradients[0])
        for (prefix_start, prefix_end), bounds in ctx.families:
            for start, end in itertools.pairwise(bounds):
                for first in range(start, end, OWN_BLOCK):
                    last = min(first + OWN_BLOCK, end)
                    blocks.add(slice(first, last), slice(start, last), is_causal=True)
            if prefix_start < prefix_end:
                for first in range(bounds[0], bounds[-1], PREFIX_BLOCK):
                    last = min(first + PREFIX_BLOCK, bounds[-1])
                    blocks.add(slice(first, last), slice(prefix_start, prefix_end), is_causal=False)
        return *blocks.gradients(), None, None


class _Backward:
    """Gradients of attention, summed over blocks of queries and keys.

    With P = exp(scale QKᵀ - lse) and δ = Σ dO O:  dV = Pᵀ dO,  dS = P (dO Vᵀ - δ),  dQ = scale dS K,  dK = scale dSᵀ Q.
    The heads that share keys are rows of one product: a slice of tokens is [G, tokens * (H / G), D].
    """

    def __init__(self, ctx: FunctionCtx, grad_out: Tensor) -> None:
        query, key, value, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        self.scale: float = ctx.scale  # type: ignore[attr-defined]
        self.dtype, self.exact = query.dtype, lse.dtype
        self.groups, self.shared = key.shape[0], query.shape[0] // key.shape[0]
        delta = (grad_out.to(self.exact) * out.to(self.exact)).sum(-1)
        self.query, self.grad_out = self._by_group(query), self._by_group(grad_out)
        self.lse, self.delta = self._by_group(lse[..., None]), self._by_group(delta[..., None])
        self.key, self.value = key.contiguous(), value.contiguous()
        self.grad_query = torch.zeros_like(self.query)
        self.grad_key, self.grad_value = torch.zeros_like(self.key), torch.zeros_like(self.value)

    def add(self, rows: slice, columns: slice, *, is_causal: bool) -> None:
        """One block. Causal: its last query sees its last key."""
        query, grad_out, lse, delta = (
            x[:, rows].flatten(1, 2) for x in (self.query, self.grad_out, self.lse, self.delta)
        )
        key, value = self.key[:, columns], self.value[:, columns]
        p = torch.bmm(query, key.transpose(1, 2)).to(self.exact).mul_(self.scale).sub_(lse)
        if is_causal:
            size = rows.stop - rows.start
            by_token = p.view(self.groups, size, self.shared, -1)
            by_token[..., -size:].add_(_future(size, self.exact)[:, None])  # before exp, which may be infinite there
        p.exp_()
        self.grad_value[:, columns] += torch.bmm(p.to(self.dtype).transpose(1, 2), grad_out)
        grad_p = torch.bmm(grad_out, value.transpose(1, 2)).to(self.exact)
        grad_scores = p.mul_(grad_p.sub_(delta)).mul_(self.scale).to(self.dtype)
        self.grad_query[:, rows] += torch.bmm(grad_scores, key).view_as(self.grad_query[:, rows])
        self.grad_key[:, columns] += torch.bmm(grad_scores.transpose(1, 2), query)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of query, key and value, in their shapes."""
        return self.grad_query.transpose(1, 2).flatten(0, 1), self.grad_key, self.grad_value

    def _by_group(self, x: Tensor) -> Tensor:
        """[H, T, D] to [G, T, H/G, D], so that a slice of tokens is a slice of rows."""
        return x.unflatten(0, (self.groups, self.shared)).transpose(1, 2).contiguous()


def _cpu_flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the softmax denominator [H, queries]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], key[None], value[None], 0.0, is_causal, scale=scale
    )
    return out[0], lse[0]


@cache
def _future(size: int, dtype: torch.dtype) -> Tensor:
    """[size, size], -inf where the column's token comes after the row's, else 0."""
    return torch.full((size, size), -torch.inf, dtype=dtype).triu(1)
