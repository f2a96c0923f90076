"""Which parameters are seen not to follow weights whose signs are changed. The real engine is in `test_sglang_engine.py`."""

import pytest
import torch

from asyncgrpo.engines.sglang import signs

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def model(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    made = torch.nn.ModuleDict({"fused": torch.nn.Linear(5, 9), "norm": torch.nn.LayerNorm(7)}).to(dtype)
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def change_signs(made: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(signs.changed(parameter))


@dtypes
def test_signs_are_changed_bit_by_bit_and_back(dtype):
    given = torch.tensor([1.5, -2.0, 0.0, -0.0, torch.inf, 1e-7, torch.nan], dtype=dtype)
    flipped = signs.changed(given)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(flipped[:-1].view(bits), (-given)[:-1].view(bits))
    assert torch.equal(signs.changed(flipped).view(bits), given.view(bits))
    counts = torch.arange(3)
    assert signs.changed(counts) is counts, "it has no signs"


@dtypes
def test_a_model_that_follows_is_as_expected(dtype, monkeypatch):
    monkeypatch.setattr(signs, "_AT_ONCE", 8)
    made = model(dtype)
    expected = signs.signs_of(made, change=True)
    assert sorted(signs.unmoved(made, expected)) == sorted(name for name, _ in made.named_parameters())
    change_signs(made)
    assert signs.unmoved(made, expected) == []


def test_one_element_that_does_not_follow_names_its_parameter():
    made = model()
    expected = signs.signs_of(made, change=True)
    change_signs(made)
    with torch.no_grad():
        made["fused"].weight[8, 4] *= -1
    assert signs.unmoved(made, expected) == ["fused.weight"]
    assert signs.describe(["fused.weight"]).endswith("the model: fused.weight did not follow them")
    assert signs.describe([f"w{i}" for i in range(23)]).endswith("w19 and 3 more did not follow them")


def test_padding_and_what_a_checkpoint_need_not_have_is_no_finding():
    made = model()
    made["scale"] = torch.nn.Linear(3, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(made["scale"].weight)
    made["count"] = torch.nn.ParameterList([torch.nn.Parameter(torch.arange(3), requires_grad=False)])
    with torch.no_grad():
        made["fused"].weight[6:] = 0.0
    expected = signs.signs_of(made, change=True)
    with torch.no_grad():
        made["fused"].weight[:6] *= -1
        for parameter in (made["fused"].bias, made["norm"].weight, made["norm"].bias):
            parameter.mul_(-1)
    assert signs.unmoved(made, expected) == []
