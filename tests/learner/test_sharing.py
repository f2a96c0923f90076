"""A learner that shares its GPU with an engine keeps no second copy of the model, and trains the same."""

import pytest
import torch

from asyncgrpo.learner import learner as learner_module
from tests.learner.helpers import VERSION, learner, random_groups, weights
from tests.models import make_tiny_qwen3


@pytest.fixture
def kept(monkeypatch) -> list[bool]:
    """Whether gathered weights were to be kept, call by call."""
    calls: list[bool] = []
    real = learner_module.keep_gathered
    monkeypatch.setattr(learner_module, "keep_gathered", lambda model, keep: (calls.append(keep), real(model, keep)))
    return calls


def test_a_shared_gpu_holds_one_copy_of_the_weights(tmp_path, kept):
    path = make_tiny_qwen3(tmp_path / "model")
    groups, trained = random_groups(6, 4), []
    for share in (False, True):
        kept.clear()
        one = learner(path, learner={"tokens_per_microbatch": 64}, cluster={"share_gpu": share})
        one.step(groups, VERSION)
        assert any(kept) is not share
        trained.append(weights(one))
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=0, atol=1e-6)
