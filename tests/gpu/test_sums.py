"""The sum of a tensor on the card is that of the same tensor on the CPU."""

import pytest
import torch

from asyncgrpo.weights.sums import TILE_BYTES_ON_DEVICE, word_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_bytes", [4, 8, 60, 2**20, 2 * TILE_BYTES_ON_DEVICE + 12])
def test_one_value_on_both(device, num_bytes, dtype):
    noise = torch.Generator().manual_seed(num_bytes)
    tensor = torch.randint(0, 256, (num_bytes,), generator=noise).byte().view(dtype)
    assert word_sum(tensor.to(device)) == word_sum(tensor)
