"""The digest of a box on the card is that of the same box on the CPU."""

import pytest
import torch

from asyncgrpo.weights.digest import box_digest, box_digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(7,), (300, 400), (3, 2**12, 2**11)])
@pytest.mark.parametrize("first", [0, 1])
def test_one_value_on_both(device, shape, dtype, first):
    tensor = (100 * torch.randn(shape)).to(dtype)
    start = (first,) * len(shape)
    one, other = (box_digest(t, "w", tuple(n + 1 for n in shape), start) for t in (tensor, tensor.to(device)))
    assert one == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_on_a_card_have_the_digests_of_each(device, dtype):
    fused, names = torch.randn(128, 2 * 384, 1024).to(dtype), [f"expert {number}" for number in range(128)]
    expected = [box_digest(up, name, (768, 1024), (384, 0)) for up, name in zip(fused[:, 384:], names, strict=True)]
    assert box_digests(fused.to(device)[:, 384:], names, (384, 0)) == expected
