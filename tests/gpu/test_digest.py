"""The digest of weights on the card, which copies them to the host, is that of the same bytes there."""

import pytest
import torch

from asyncgrpo.weights.digest import BLOCK, digest


@pytest.mark.parametrize("start", [0, 8, BLOCK - 64, 2**34])
@pytest.mark.parametrize("num_words", [1, 7, BLOCK // 8, 65 * BLOCK // 8 + 3])
def test_one_value_on_both(device, num_words, start):
    flat = torch.randint(0, 256, (num_words * 8,), generator=torch.Generator().manual_seed(num_words)).byte()
    assert digest(flat.to(device), start) == digest(flat, start)
