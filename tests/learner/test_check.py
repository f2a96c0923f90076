"""The learner's half of the sync gap."""

import numpy as np
import pytest

from asyncgrpo.types import PolicyVersion
from tests.learner.helpers import learner, plain_logprobs, random_groups

GROUPS = random_groups(4, 4)


@pytest.mark.parametrize("sections", [{}, {"sampling": {"temperature": 0.7}}])
def test_the_learner_scores_as_a_plain_forward_does_whatever_the_sampling(path, sections):
    ours = learner(path, **sections)
    check = ours.check.sequences
    expected = [plain_logprobs(path, seq[: check.start], seq[check.start :]) for seq in check.tokens]
    np.testing.assert_allclose(ours.check.score(), np.concatenate(expected), atol=1e-5)
    ours.step(GROUPS, PolicyVersion(1, 0))
    assert not np.allclose(ours.check.score(), np.concatenate(expected), atol=1e-3), "of the weights that it has now"
