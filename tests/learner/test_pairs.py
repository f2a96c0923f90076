"""The pairwise loss beside other terms: each is averaged by its own rule."""

import pytest
import torch

from asyncgrpo.learner.learner import Learner
from tests.learner.helpers import VERSION, config, random_groups
from tests.models import make_tiny_qwen3

GROUPS = random_groups(4, 4)
PAIRWISE = {"loss": "pairwise", "loss_args": {"beta": 0.1}, "corrections": []}
REINFORCE = {"loss": "reinforce", "corrections": []}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


def gradient(path, **algorithm) -> torch.Tensor:
    learner = Learner(config(path, algorithm=algorithm), rank=0, world=1, device="cpu")
    seen = []
    update = learner._update
    learner._update = lambda *args: (
        seen.extend(p.grad.full_tensor().flatten().clone() for p in learner.parameters),
        update(*args),
    )[1]
    learner.step(GROUPS, VERSION)
    return torch.cat(seen)


@pytest.mark.parametrize("penalty", [{"entropy_coef": 0.1}, {"behaviour_kl_coef": 0.1}], ids=lambda p: next(iter(p)))
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum"])
def test_a_penalty_weighs_the_same_beside_pairs_as_beside_any_loss(path, penalty, aggregation):
    beside_pairs = gradient(path, **PAIRWISE, **penalty, aggregation=aggregation) - gradient(path, **PAIRWISE)
    expected = gradient(path, **REINFORCE, **penalty, aggregation=aggregation)
    expected = expected - gradient(path, **REINFORCE, aggregation=aggregation)
    torch.testing.assert_close(beside_pairs, expected, rtol=1e-3, atol=1e-6)
