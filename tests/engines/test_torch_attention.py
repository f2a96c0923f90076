"""The `torch` engine's attention gives what transformers' `sdpa` gives, whichever of the two computes it."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from asyncgrpo.engines.torch.decoder import attention


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_it_is_transformers_sdpa(kv_heads: int, num_queries: int) -> None:
    random = torch.Generator().manual_seed(kv_heads)
    query = torch.randn(5, 4, num_queries, 8, generator=random)
    key, value = (torch.randn(5, kv_heads, 11, 8, generator=random) for _ in "kv")
    lengths = torch.tensor([1, 4, 11, 7, 2])
    mask = (torch.arange(11) < lengths[:, None])[:, None, None, :].expand(5, 1, num_queries, 11)
    module = nn.Module()
    module.num_key_value_groups = 4 // kv_heads
    ours, _ = attention(module, query, key, value, mask, scaling=0.3)
    theirs, _ = AttentionInterface()["sdpa"](module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(ours, theirs)
