"""Several updates from the groups of one step."""

import pytest

from asyncgrpo.learner.learner import Learner
from tests.learner.helpers import VERSION, config, random_groups, with_true_logprobs
from tests.models import make_tiny_qwen3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("anchor", ["proximal", "behaviour"])
def test_the_gap_between_kernels_does_not_contain_the_updates(path, anchor):
    algorithm = {"anchor": anchor, "corrections": []}
    sections = {"algorithm": algorithm, "learner": {"minibatches": 3, "lr": 0.05}}
    learner = Learner(config(path, **sections), rank=0, world=1, device="cpu")
    report = learner.step(with_true_logprobs(path, random_groups(6, 4)), VERSION)
    assert learner.steps == 3
    assert report.diagnostics["update_ratio_max"] > 2
    assert report.logprob_gap_max < 1e-4
