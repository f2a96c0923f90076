"""Several updates from the groups of one step."""

import pytest

from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import PolicyVersion
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


@pytest.mark.parametrize("anchor", ["proximal", "behaviour"])
def test_nor_those_of_a_second_pass(path, anchor):
    algorithm = {"anchor": anchor, "corrections": []}
    learner = Learner(
        config(path, algorithm=algorithm, learner={"ppo_epochs": 3, "lr": 0.05}), rank=0, world=1, device="cpu"
    )
    report = learner.step(with_true_logprobs(path, random_groups(6, 4)), VERSION)
    assert learner.steps == 3
    assert report.diagnostics["update_ratio_max"] > 2
    assert report.logprob_gap_max < 1e-4


def test_further_passes_are_shuffled_anew_in_every_step_and_alike_after_a_resume(path, tmp_path):
    several = {"minibatches": 3, "ppo_epochs": 3}
    first, resumed = (Learner(config(path, learner=several), rank=0, world=1, device="cpu") for _ in range(2))
    orders = [first._order(3, PolicyVersion(1, number)) for number in range(20)]
    assert len({tuple(order[3:]) for order in orders}) > 5 and all(order[:3] == [0, 1, 2] for order in orders)
    once = Learner(config(path, learner={"minibatches": 3}), rank=0, world=1, device="cpu")
    assert once._order(3, VERSION) == [0, 1, 2], "one pass is in prompt order, as it always was"
    groups = random_groups(6, 4)
    first.step(groups, PolicyVersion(1, 0))
    first.save(str(tmp_path / "checkpoint"))
    resumed.load(str(tmp_path / "checkpoint"))
    ours, theirs = resumed.step(groups, PolicyVersion(2, 1)), first.step(groups, PolicyVersion(1, 1))
    assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm) and resumed.steps == 18
    for mine, other in zip(resumed.parameters, first.parameters, strict=True):
        assert mine.full_tensor().equal(other.full_tensor())
