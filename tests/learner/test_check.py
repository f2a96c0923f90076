"""The learner's half of the sync gap."""

import numpy as np
import pytest

from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import PolicyVersion
from tests.learner.helpers import config, learner, plain_logprobs, random_groups
from tests.learner.ranks import run_on_ranks
from tests.models import make_tiny_qwen3

GROUPS = random_groups(4, 4)


@pytest.mark.parametrize("sections", [{}, {"sampling": {"temperature": 0.7}}, {"learner": {"compile": True}}])
def test_the_learner_scores_as_a_plain_forward_does_whatever_the_sampling(path, sections):
    ours = learner(path, **sections)
    check = ours.check.sequences
    expected = [plain_logprobs(path, seq[: check.start], seq[check.start :]) for seq in check.tokens]
    np.testing.assert_allclose(ours.check.score(), np.concatenate(expected), atol=1e-5)
    ours.step(GROUPS, PolicyVersion(1, 0))
    assert not np.allclose(ours.check.score(), np.concatenate(expected), atol=1e-3), "of the weights that it has now"


def scores_on_a_rank(rank: int, world: int, path: str) -> None:
    learner = Learner(config(path), rank=rank, world=world, device="cpu")
    learner.step(GROUPS, PolicyVersion(1, 0))
    first = learner.check.score()
    learner.step(GROUPS, PolicyVersion(1, 1))
    if world == 1:
        np.save(f"{path}/one.npy", [first, learner.check.score()])
    else:
        np.testing.assert_allclose([first, learner.check.score()], np.load(f"{path}/one.npy"), atol=1e-4)


def test_all_ranks_score_together(tmp_path):
    make_tiny_qwen3(tmp_path)
    run_on_ranks(scores_on_a_rank, str(tmp_path), 1, 2)
