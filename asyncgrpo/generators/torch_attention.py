"""Attention of one new token per row, without copying keys and values once per query head.

Where several query heads share one head of keys and values, transformers repeats those before PyTorch's attention when
there is a mask, which on a CPU is most of a decode step. Here the query heads of a group are the "query tokens" of one
attention instead: the same sum without the copy. Everything else is left to transformers' own `sdpa`.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "asyncgrpo_sdpa"
"""What a model is told as `attn_implementation`, after `register`."""


def register() -> None:
    """Make the implementation known to transformers, in this process. Again does nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """In transformers' own form.

    Args:
        query: [R, heads, Q, head_dim].
        key, value: [R, kv_heads, L, head_dim].
        attention_mask: [R, 1, Q, L] bool, true where a query may look.
        options: `scaling`, and others that only transformers' implementation knows.
    Returns:
        [R, Q, heads, head_dim], and no attention weights.
    """
    num_rows, num_heads, num_queries, head_dim = query.shape
    has_more = any(options.get(name) is not None for name in ("position_bias", "s_aux", "softcap"))
    if num_queries != 1 or attention_mask is None or has_more:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)
    grouped = query.reshape(num_rows, key.shape[1], num_heads // key.shape[1], head_dim)
    attended = scaled_dot_product_attention(grouped, key, value, attention_mask, scale=options.get("scaling"))
    return attended.reshape(num_rows, 1, num_heads, attended.shape[-1]), None
