"""Attention over packed sequences with shared prefixes.

A micro-batch is one row of tokens without padding. `Segments` defines its mask: a segment attends causally to itself and
fully to its prefix, another part of the row. So the completions of one prompt share the prompt's tokens, which every layer
computes once. A sequence that shares no tokens is a segment without a prefix. `install` replaces the attention of any
transformers model through transformers' registry.

On a CPU, the forward of a segment is two calls of the flash kernel, to itself and to its prefix, merged by their log softmax
denominators as in ring attention. All segments of a family share one call for the prefix. Torch's bfloat16 backward kernel is
several times slower than the matrix products that it stands for (64 tokens, 4 heads of 64: 1.2 against 0.4 ms on one core of
an AMD EPYC 9004), so backward runs these products over blocks of queries.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from asyncgrpo.learner.parallel import ALONE, Row

# -- on a CPU ----------------------------------------------------------------------------------------------------------


OWN_BLOCK = 256
"""Queries per block of the causal part. Larger blocks compute more masked scores."""
PREFIX_BLOCK = 1024
"""Queries per block of the prefix, where no score is masked."""

Families = Sequence[tuple[tuple[int, int], Sequence[int]]]
"""`Family`s as plain tuples."""


def attend(query: Tensor, key: Tensor, value: Tensor, families: Families, scale: float) -> Tensor:
    """Compute `softmax(scale QKᵀ) V` of every segment over its prefix and, causally, itself.

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
            for start, end in pairwise(bounds):
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
            for start, end in pairwise(bounds):
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
    Heads that share keys are rows of one product: a slice of tokens is [G, tokens * (H / G), D]. P is computed with exp2, which
    torch's CPU kernels compute three times as fast as exp.
    """

    def __init__(self, ctx: FunctionCtx, grad_out: Tensor) -> None:
        query, key, value, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        self.scale: float = ctx.scale  # type: ignore[attr-defined]
        self.dtype, self.exact = query.dtype, lse.dtype
        self.groups, self.shared = key.shape[0], query.shape[0] // key.shape[0]
        delta = (grad_out.to(self.exact) * out.to(self.exact)).sum(-1)
        self.query, self.grad_out = self._by_group(query), self._by_group(grad_out)
        self.log2_sum, self.delta = self._by_group(lse[..., None] / math.log(2)), self._by_group(delta[..., None])
        self.key, self.value = key.contiguous(), value.contiguous()
        self.grad_query = torch.zeros_like(self.query)
        self.grad_key, self.grad_value = torch.zeros_like(self.key), torch.zeros_like(self.value)

    def add(self, rows: slice, columns: slice, *, is_causal: bool) -> None:
        """Add one block. Causal: its last query attends to its last key."""
        query, grad_out, log2_sum, delta = (
            x[:, rows].flatten(1, 2) for x in (self.query, self.grad_out, self.log2_sum, self.delta)
        )
        key, value = self.key[:, columns], self.value[:, columns]
        scores = torch.bmm(query, key.transpose(1, 2)).to(self.exact)
        p = scores.mul_(self.scale / math.log(2)).sub_(log2_sum)  # log2 of P
        if is_causal:
            size = rows.stop - rows.start
            by_token = p.view(self.groups, size, self.shared, -1)
            by_token[..., -size:].add_(_future(size, self.exact)[:, None])  # before exp2, which may overflow there
        p.exp2_()
        self.grad_value[:, columns] += torch.bmm(p.to(self.dtype).transpose(1, 2), grad_out)
        grad_p = torch.bmm(grad_out, value.transpose(1, 2)).to(self.exact)
        grad_scores = p.mul_(grad_p.sub_(delta)).mul_(self.scale).to(self.dtype)
        self.grad_query[:, rows] += torch.bmm(grad_scores, key).view_as(self.grad_query[:, rows])
        self.grad_key[:, columns] += torch.bmm(grad_scores.transpose(1, 2), query)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in their shapes."""
        return self.grad_query.transpose(1, 2).flatten(0, 1), self.grad_key, self.grad_value

    def _by_group(self, x: Tensor) -> Tensor:
        """Reshape [H, T, D] to [G, T, H/G, D], so that a slice of tokens is a slice of rows."""
        return x.unflatten(0, (self.groups, self.shared)).transpose(1, 2).contiguous()


def _cpu_flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention and [H, queries] log softmax denominators."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], key[None], value[None], 0.0, is_causal, scale=scale
    )
    return out[0], lse[0]


@cache
def _future(size: int, dtype: torch.dtype) -> Tensor:
    """Return a causal mask [size, size]: -inf for columns after the row, else 0."""
    return torch.full((size, size), -torch.inf, dtype=dtype).triu(1)


# -- kernels -----------------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """Consecutive segments with the same prefix. All numbers are positions in the row."""

    prefix: tuple[int, int]
    """`[start, end)` of the prefix; empty without a prefix."""
    bounds: tuple[int, ...]
    """Start of each segment, and end of the last one."""


@dataclass(frozen=True)
class Segments:
    """The mask of a row of T tokens; K is the number of keys, with a prefix counted for each of its segments."""

    families: tuple[Family, ...]
    queries: Tensor
    """[S+1] int32, start of each segment, and T. Segments cover the row."""
    keys: Tensor
    """[S+1] int32, start of the keys of each segment, and K."""
    key_positions: Tensor | None
    """[K] int64, position in the row of each key; None without prefixes, when K is T."""
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, families: Sequence[Family]) -> "Segments":
        """Build segments from families that cover the row in order."""
        pieces = [(f.prefix, start, end) for f in families for start, end in pairwise(f.bounds)]
        own = torch.tensor([end - start for _, start, end in pieces], dtype=torch.int64)
        shared = torch.tensor([end - start for (start, end), _, _ in pieces], dtype=torch.int64)
        zero = torch.zeros(1, dtype=torch.int64)
        positions = [torch.arange(*span) for prefix, start, end in pieces for span in (prefix, (start, end))]
        return cls(
            families=tuple(families),
            queries=torch.cat([zero, own.cumsum(0)]).int(),
            keys=torch.cat([zero, (own + shared).cumsum(0)]).int(),
            key_positions=torch.cat(positions) if shared.any() else None,
            longest_query=int(own.max()),
            longest_key=int((own + shared).max()),
        )

    def to(self, device: torch.device) -> "Segments":
        """Return the segments with tensors on another device."""
        positions = None if self.key_positions is None else self.key_positions.to(device, non_blocking=True)
        queries, keys = (x.to(device, non_blocking=True) for x in (self.queries, self.keys))
        return Segments(self.families, queries, keys, positions, self.longest_query, self.longest_key)


Kernel = Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]
"""Queries [T, H, D], keys [T, G, D] and values [T, G, E] (H a multiple of G), segments and the scale of the scores to
[T, H, E]."""


def install(model: PreTrainedModel, kernel: str, row: Row = ALONE) -> None:
    """Make `model` run on rows of segments, passed as `segments=` to its forward.

    Args:
        kernel: a name in `KERNELS`.
        row: ranks that run a row together.
    """
    name = f"asyncgrpo_{kernel}"
    AttentionInterface.register(name, _for_transformers(KERNELS[kernel], row))
    AttentionMaskInterface.register(name, lambda *_, **__: None)  # no mask
    parts = model.config.sub_configs  # a vision tower keeps its own attention
    model.set_attn_implementation({"text_config": name} if "vision_config" in parts else name)


def _for_transformers(kernel: Kernel, row: Row) -> Callable[..., tuple[Tensor, None]]:
    """Adapt `kernel` to the interface of transformers: [1, heads, T, D] in, [1, T, heads, E] out, of this rank's tokens."""

    @torch.compiler.disable  # segments are Python numbers, so every batch would be recompiled
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        scaling: float,
        segments: Segments,
        **ignored: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        query, key, value = row.by_heads(query), row.shared_by_heads(key), row.shared_by_heads(value)
        return row.by_tokens(kernel(query, key, value, segments, scaling))[None], None

    return attention


def _expand(key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Repeat each prefix of keys and values before each of its segments."""
    if segments.key_positions is None:
        return key, value
    return key.index_select(0, segments.key_positions), value.index_select(0, segments.key_positions)


def _as_wide(value: Tensor, key: Tensor) -> Tensor:
    """Pad values with zeros to the width of the keys, as these kernels need (MLA: keys of 192, values of 128)."""
    return F.pad(value, (0, key.shape[-1] - value.shape[-1])) if value.shape[-1] < key.shape[-1] else value


def _ragged(
    function: Callable[..., Any] | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    **options: Any,
) -> Tensor:
    """Call a kernel for sequences of several lengths."""
    assert function is not None, "chosen only where it is installed"
    width = value.shape[-1]
    key, value = _expand(key, _as_wide(value, key), segments)
    lengths = (segments.queries, segments.keys, segments.longest_query, segments.longest_key)
    found: Tensor = function(query, key, value, *lengths, **options)
    return found[..., :width]


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """The flash_attn package, which aligns the causal mask to the last key, as a prefix needs."""
    return _ragged(flash_function(), query, key, value, segments, softmax_scale=scale, causal=True)


@cache
def flash_function() -> Callable[..., Tensor] | None:
    """Return the kernel of the flash_attn package; None if it is not installed.

    Imports the function, because SGLang installs `flash-attn-4`, a package of the same name without it.
    """
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Torch's variable-length kernel, for GPUs without flash_attn."""
    copies = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}  # causal
    if copies > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    elif copies > 1:  # torch 2.11
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    return _ragged(varlen_attn, query, key, value, segments, **options)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """One `scaled_dot_product_attention` per segment: any device, dtype and head size."""
    key, value = _expand(key, value, segments)
    lengths = [(f.prefix[1] - f.prefix[0], end - start) for f in segments.families for start, end in pairwise(f.bounds)]
    queries, keys = [own for _, own in lengths], [prefix + own for prefix, own in lengths]
    outputs = []
    for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        own, seen, mask = q.shape[2], k.shape[2], None
        if own != seen:  # the last query attends to the last key
            mask = torch.ones(own, seen, dtype=torch.bool, device=q.device).tril(seen - own)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def _cpu(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Flash attention on the CPU; `_sdpa` if values are wider than keys."""
    width = value.shape[-1]
    if width > key.shape[-1]:
        return _sdpa(query, key, value, segments, scale)
    return attend(query, key, _as_wide(value, key), segments.families, scale)[..., :width]


KERNELS: dict[str, Kernel] = {"flash_attention_2": _flash, "varlen": _varlen, "sdpa": _sdpa, "cpu": _cpu}
