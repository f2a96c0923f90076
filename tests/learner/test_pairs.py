"""The pairwise loss beside other terms: each is averaged by its own rule."""

import pytest
import torch

from tests.learner.helpers import learner, random_groups, step_and_gradient

GROUPS = random_groups(4, 4)
PAIRWISE = {"loss": "pairwise", "loss_args": {"beta": 0.1}, "corrections": []}
REINFORCE = {"loss": "reinforce", "corrections": []}


def gradient(path, **algorithm) -> torch.Tensor:
    _, found = step_and_gradient(learner(path, algorithm=algorithm), GROUPS)
    return torch.cat([one.flatten() for one in found.values()])


@pytest.mark.parametrize("penalty", [{"entropy_coef": 0.1}, {"behaviour_kl_coef": 0.1}], ids=lambda p: next(iter(p)))
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum"])
def test_a_penalty_weighs_the_same_beside_pairs_as_beside_any_loss(path, penalty, aggregation):
    beside_pairs = gradient(path, **PAIRWISE, **penalty, aggregation=aggregation) - gradient(path, **PAIRWISE)
    expected = gradient(path, **REINFORCE, **penalty, aggregation=aggregation)
    expected = expected - gradient(path, **REINFORCE, aggregation=aggregation)
    torch.testing.assert_close(beside_pairs, expected, rtol=1e-3, atol=1e-6)
