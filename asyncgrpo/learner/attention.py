"""Attention over packed sequences, some of which begin with the same tokens.

A micro-batch is one row of tokens without padding. `Segments` says who sees whom: a segment attends causally to itself
and wholly to its prefix, another part of the row. So the answers to one prompt share the prompt's tokens, which every
layer computes once; a sequence that shares nothing is a segment without a prefix. `install` puts this in the place of
a transformers model's attention, whatever the model, through the registry that transformers has for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from asyncgrpo.learner.cpu_attention import attend as cpu_attend


class Family(NamedTuple):
    """Segments that lie one after the other and have the same prefix. All numbers are positions in the row."""

    prefix: tuple[int, int]
    """`[start, end)` of the prefix; equal where there is none."""
    bounds: tuple[int, ...]
    """Where each segment starts; the last number is where the last one ends."""


@dataclass(frozen=True)
class Segments:
    """Who sees whom in a row of T tokens; K is the number of keys, where a prefix counts for each of its segments."""

    families: tuple[Family, ...]
    queries: Tensor
    """[S+1] int32, where each segment starts, and T. Segments cover the row."""
    keys: Tensor
    """[S+1] int32, where the keys of each segment start, and K."""
    key_positions: Tensor | None
    """[K] int64, the position in the row of each key; none where no segment has a prefix, so that K is T."""
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, families: Sequence[Family]) -> "Segments":
        """From families that cover the row in order."""
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
        """The same with its tensors on another device."""
        positions = None if self.key_positions is None else self.key_positions.to(device, non_blocking=True)
        queries, keys = (x.to(device, non_blocking=True) for x in (self.queries, self.keys))
        return Segments(self.families, queries, keys, positions, self.longest_query, self.longest_key)


Kernel = Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]
"""Queries [T, H, D], keys [T, G, D] and values [T, G, E] (H a multiple of G), segments and the scale of the scores to
[T, H, E]."""


def install(model: PreTrainedModel, kernel: str) -> None:
    """Let `model` run on rows of segments, given as `segments=` to its forward.

    Args:
        kernel: a name in `KERNELS`.
    """
    name = f"asyncgrpo_{kernel}"
    AttentionInterface.register(name, _for_transformers(KERNELS[kernel]))
    AttentionMaskInterface.register(name, _no_mask)
    model.set_attn_implementation(name)


def _for_transformers(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """`kernel` as transformers calls it in every layer: [1, heads, T, D] in, [1, T, heads, E] out."""

    @torch.compiler.disable  # segments are Python numbers: the compiler would make a program for every batch
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
        return kernel(query, key, value, segments, scaling)[None], None

    return attention


def _no_mask(*ignored: Any, **also_ignored: Any) -> None:
    return None


def _expand(key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Keys and values with each prefix repeated before each of its segments."""
    if segments.key_positions is None:
        return key, value
    return key.index_select(0, segments.key_positions), value.index_select(0, segments.key_positions)


def _flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """The flash_attn package: causal is aligned to the last key, which is what a prefix needs."""
    function = _flash_function()
    key, value = _expand(key, value, segments)
    lengths = (segments.queries, segments.keys, segments.longest_query, segments.longest_key)
    return function(query, key, value, *lengths, softmax_scale=scale, causal=True)


@cache
def _flash_function() -> Callable[..., Tensor]:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """torch's own kernel of the same kind, for GPUs where flash_attn is not installed."""
    from torch.nn.attention.varlen import varlen_attn

    key, value = _expand(key, value, segments)
    heads, groups = query.shape[1], key.shape[1]
    if heads != groups:
        key, value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
    lengths = (segments.queries, segments.keys, segments.longest_query, segments.longest_key)
    attended = varlen_attn(query, key, value, *lengths, scale=scale, window_size=(-1, 0))  # causal
    assert isinstance(attended, Tensor)
    return attended


def _sdpa(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """One `scaled_dot_product_attention` a segment: any device, any dtype, any head size."""
    key, value = _expand(key, value, segments)
    queries, keys = segments.queries.diff().tolist(), segments.keys.diff().tolist()
    outputs = []
    for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = _sees(q.shape[2], k.shape[2], q.device) if q.shape[2] != k.shape[2] else None
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(attended[0].transpose(0, 1))
    return torch.cat(outputs)


def _sees(queries: int, keys: int, device: torch.device) -> Tensor:
    """[queries, keys] bool: causal, the last query sees the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _cpu(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """Flash attention on the CPU needs values as wide as keys; the others take the general way."""
    if query.shape[-1] != value.shape[-1]:
        return _sdpa(query, key, value, segments, scale)
    return cpu_attend(query, key, value, segments.families, scale)


KERNELS: dict[str, Kernel] = {"flash_attention_2": _flash, "varlen": _varlen, "sdpa": _sdpa, "cpu": _cpu}
