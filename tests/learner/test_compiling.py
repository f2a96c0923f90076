"""When the layers are compiled, and what happens if they cannot be. That compiling changes nothing: `test_learner`."""

import logging

import pytest
import torch
from torch import nn

from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.model import compiling_pays
from tests.learner.helpers import VERSION, config, learner, random_groups

GROUPS = random_groups(1, 4)


@pytest.fixture
def compiled(monkeypatch) -> list[nn.Module]:
    """The layers that were compiled, which torch is spared, like the programs of the head."""
    layers: list[nn.Module] = []
    monkeypatch.setattr("asyncgrpo.learner.learner.can_compile", lambda device: True)
    monkeypatch.setattr("asyncgrpo.learner.learner.compile_layers", layers.extend)
    monkeypatch.setattr("asyncgrpo.learner.head._compiled", lambda function: function)
    return layers


def test_the_first_step_of_a_process_is_not_compiled_and_all_others_are(path, compiled):
    ours = learner(path, learner={"compile": True})
    ours.step(GROUPS, VERSION)
    assert compiled == []
    ours.step(GROUPS, VERSION)
    assert compiled == ours.model.layers and len(compiled) == ours.model.language_model.config.num_hidden_layers
    ours.step(GROUPS, VERSION)
    assert compiled == ours.model.layers
    compiled.clear()
    later = Learner(config(path, learner={"compile": True}), rank=0, world=1, device="cpu", has_stepped=True)
    later.step(GROUPS, VERSION)
    assert compiled == later.model.layers, "its process had stepped before"
    compiled.clear()
    ours = learner(path, learner={"compile": True}, algorithm={"kl_coef": 0.1})
    ours.compile()
    assert compiled == [*ours.model.layers, *ours._reference.layers], "the reference too"
    compiled.clear()
    for wish in (None, False):  # the model is small
        ours = learner(path, learner={"compile": wish})
        ours.step(GROUPS, VERSION)
        ours.step(GROUPS, VERSION)
    assert compiled == []


def layers(weights: int) -> list[nn.Module]:
    with torch.device("meta"):
        return [nn.Linear(1024, weights // 2048, bias=False) for _ in range(2)]


@pytest.mark.parametrize(
    ("expected", "weights", "vocabulary", "steps", "changed"),
    [
        (True, 2**22, 512, 400, {}),
        (True, 2**22, 512, None, {}),
        (False, 2**22, 512, 200, {}),  # too short
        (False, 2**22, 512, 400, {"sampling": {"max_tokens": 4}}),
        (True, 2**25, 512, 60, {}),
        (True, 2**22, 151_936, 12, {}),  # for the head
        (False, 2**22, 151_936, 1, {}),
        (False, 2**19, 151_936, None, {}),  # too small
        (False, 2**22, 512, None, {"learner": {"device": "cuda"}}),  # nothing was measured there
        (False, 2**22, 512, None, {"model": {"path": "m", "lora": {"rank": 8}}}),
    ],
)
def test_it_pays_where_the_run_is_long_and_the_model_large_enough(expected, weights, vocabulary, steps, changed):
    sections = {"run": {"steps": steps}, "buffer": {"prompts_per_step": 8}, "algorithm": {"group_size": 8}}
    settings = config("m", **sections | {"sampling": {"max_tokens": 1024}} | changed)
    device = torch.device(settings.learner.device)
    assert compiling_pays(settings, layers(weights), vocabulary, device) == expected


def test_where_nothing_can_be_compiled_the_layers_run_as_they_are_with_one_warning(path, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def broken(*_, **__):
        raise RuntimeError("\nno C++ compiler found\nmore of it")

    monkeypatch.setattr(torch, "compile", broken)
    ours, plain = learner(path, learner={"compile": True}), learner(path, learner={"compile": False})
    with caplog.at_level(logging.WARNING):
        losses = [[one.step(GROUPS, VERSION).loss for _ in range(3)] for one in (ours, plain)]
    assert losses[0] == losses[1]
    assert [r.getMessage() for r in caplog.records if "compile" in r.getMessage()] == [
        "learner.compile: the layers run uncompiled, because torch.compile fails here: no C++ compiler found"
    ]
    assert all(layer._compiled_call_impl is None for layer in ours.model.layers)
