"""Attention for SGLang on a CPU that takes the whole batch at once.

SGLang's `torch_native` backend calls attention once for every sequence and layer. With the short sequences of a CPU run
that loop is most of the scheduler's time. Here keys are gathered into one padded tensor and attention is called once a
layer: the same numbers up to rounding. Where padding would cost more than the loop, the loop runs.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

LARGEST_PADDING = 4
"""Padded keys for each real one, above which sequences are taken one by one."""
LARGEST_MASK = 1 << 22
"""Entries (sequences x queries x keys) of a prefill's mask, above which sequences are taken one by one."""


class BatchedTorchAttention(TorchNativeAttnBackend):
    """`torch_native` with one call of attention for a layer, for causal self-attention without a window."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """What all layers of this forward share: which places of the cache hold the keys, and who may look at what."""
        super().init_forward_metadata(forward_batch)
        self._is_padded = False
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
        if forward_batch.encoder_lens is not None or not len(lengths) or not (mode.is_decode() or mode.is_extend()):
            return
        longest, total = int(lengths.max()), int(lengths.sum())
        if longest * len(lengths) > LARGEST_PADDING * total:
            return
        key_places = torch.arange(longest)
        rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, :longest].long()
        # Behind its end a sequence repeats its first key. What else lies there may not be finite, and 0 x NaN is NaN.
        self._key_rows = torch.where(key_places < lengths[:, None], rows, rows[:, :1])
        if mode.is_decode():
            self._mask = (key_places < lengths[:, None])[:, None, None, :]
        else:
            prefix, new = forward_batch.extend_prefix_lens.long(), forward_batch.extend_seq_lens.long()
            most_new = int(new.max())
            if longest * len(lengths) * most_new > LARGEST_MASK:
                return
            query_places = torch.arange(most_new)
            self._is_query = query_places < new[:, None]
            first = torch.cumsum(new, 0) - new
            self._query_rows = (first[:, None] + query_places).clamp_(max=int(new.sum()) - 1)
            # A padded query sees at least the first key, so no row of the softmax is empty.
            self._mask = (key_places <= (prefix[:, None] + query_places)[..., None])[:, None]
        self._is_padded = True

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """One query for each sequence. Shapes: query and output [sequences, heads, head_dim], caches [places, kv_heads,
        head_dim]."""
        if not self._can_batch(query, k_cache, kwargs):
            return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *args, **kwargs)
        keys, values = self._gather(k_cache), self._gather(v_cache)
        # The heads that share a key head ask as if they were several queries: keys need not be repeated.
        shape = (len(query), k_cache.shape[1], -1)
        attended = scaled_dot_product_attention(
            query.view(*shape, query.shape[-1]), keys, values, attn_mask=self._mask, scale=kwargs["scaling"]
        )
        output.view(*shape, output.shape[-1])[:] = attended
        return output

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Several queries for each sequence, one sequence after the other in `query`. Shapes as above."""
        if not self._can_batch(query, k_cache, kwargs) or not kwargs["causal"]:
            return super()._run_sdpa_forward_extend(query, output, k_cache, v_cache, *args, **kwargs)
        attended = scaled_dot_product_attention(
            query[self._query_rows].transpose(1, 2),
            self._gather(k_cache),
            self._gather(v_cache),
            attn_mask=self._mask,
            scale=kwargs["scaling"],
            enable_gqa=kwargs["enable_gqa"],
        )
        output[:] = attended.transpose(1, 2)[self._is_query]
        return output

    def _can_batch(self, query: Tensor, k_cache: Tensor, kwargs: dict[str, Any]) -> bool:
        return (
            self._is_padded
            and not kwargs["is_cross_attn"]
            and kwargs["sliding_window_size"] is None
            and query.dtype == k_cache.dtype
        )

    def _gather(self, cache: Tensor) -> Tensor:
        """[sequences, kv_heads, longest, head_dim]; what lies behind a sequence's end counts for nothing."""
        return cache[self._key_rows].transpose(1, 2)
