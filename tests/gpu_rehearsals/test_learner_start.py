"""A learner rank on a GPU: what it does before it has loaded anything, with torch's own checks and no card."""

from pathlib import Path

import pytest
import torch
from torch.cuda._utils import _get_device_index

from asyncgrpo.cluster import wiring
from asyncgrpo.learner import learner as learner_module
from asyncgrpo.learner import parallel
from tests.learner.helpers import config

WORLD = 8


@pytest.fixture
def chosen(monkeypatch) -> list[int]:
    """Devices that `torch.cuda.set_device` was called with, by the index that torch finds, or does not."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(_get_device_index(device)))
    monkeypatch.setattr(learner_module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(learner_module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(learner_module.dist, "get_world_size", lambda: WORLD)
    monkeypatch.setattr(parallel, "init_device_mesh", lambda kind, shape: (kind, shape))
    return chosen


def test_a_rank_names_its_card_by_index(monkeypatch, chosen):
    """Ray shows each rank one card, which is card 0 to it."""
    monkeypatch.setattr(wiring, "begin", lambda *arguments, **named: ("127.0.0.1", 1))
    settings = config("unused", learner={"device": "cuda", "ranks": WORLD})
    actor = wiring.LearnerActor({}, 1)
    actor.start(wiring.Setup(settings, Path("unused"), 1, None, None, "tcp://127.0.0.1:1", 1))
    assert learner_module._ranks(actor._device, 0, WORLD, settings).mesh == ("cuda", (WORLD,))
    assert chosen == [0]
