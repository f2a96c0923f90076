"""What is said to be on disk is on disk, and a piece is a view of the memory it comes from.

The conversions are transformers' own; these tests pin down what we need of them: they can be reverted for one tensor
at a time, also where there is nothing but shapes.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from asyncgrpo.weights.files import disk_pieces, disk_tensors, saved_tensors
from tests.learner.helpers import FAMILIES
from tests.models import make_tiny_qwen3, make_tiny_qwen3_moe


def make_tiny_mixtral(path: Path) -> Path:
    """Its modules have other names on disk too, not only its experts."""
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    MixtralForCausalLM(MixtralConfig(**shape, num_key_value_heads=2, vocab_size=40)).save_pretrained(path)
    return path


MAKERS = FAMILIES | {"mixtral": make_tiny_mixtral}


@pytest.fixture(params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MAKERS[request.param](tmp_path)


@pytest.fixture
def model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_names_shapes_and_values_are_those_of_the_file(folder, model) -> None:
    expected, tensors = load_file(folder / "model.safetensors"), disk_tensors(model)
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].equal(tensor) for name, tensor in expected.items())


def test_what_is_written_into_the_pieces_is_what_the_model_holds(folder, model) -> None:
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in model.state_dict().values():
        tensor.zero_()
    places = disk_tensors(model)
    for name, tensor in load_file(folder / "model.safetensors").items():
        places[name].data.copy_(tensor)
    assert all(tensor.equal(expected[name]) for name, tensor in model.state_dict().items())


def test_without_memory_the_pieces_are_the_same_in_the_same_order(model) -> None:
    for name, tensor in saved_tensors(model):
        pieces = disk_pieces(model, name, tensor)
        empty = disk_pieces(model, name, torch.empty(tensor.shape, device="meta"))
        assert [(n, t.shape) for n, t in empty.items()] == [(n, t.shape) for n, t in pieces.items()]


def test_a_model_that_was_never_loaded_gives_the_same_names(folder, model) -> None:
    """So a model that is built without memory and filled later is published alike."""
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(model.config)
    built.tie_weights()
    expected = {name: tensor.shape for name, tensor in disk_tensors(model).items()}
    assert {name: tensor.shape for name, tensor in disk_tensors(built).items()} == expected


def test_all_names_of_a_tied_tensor_are_given_where_asked(tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_qwen3(tmp_path, tie=True))
    extra = disk_tensors(model, remove_duplicate=False).keys() - disk_tensors(model).keys()
    assert extra == {"lm_head.weight"}


def test_a_conversion_that_fails_names_the_tensor(tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_qwen3_moe(tmp_path))
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ValueError, match=f"{name} cannot be converted back"):
        disk_pieces(model, name, torch.tensor(1.0))
