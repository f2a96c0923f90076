"""Under `buffer.policy=mask` tokens above `buffer.max_lag` have no weight, and those of the others stay what they are."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncgrpo.types import Completion, Group, PolicyVersion, VersionSpan
from tests.learner.helpers import VERSION, assert_same_gradient, disturb, learner, random_groups, step_and_gradient

LONG_AGO = PolicyVersion(VERSION.lineage, VERSION.number - 2)
CASES = {
    "token-mean": {},
    "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
    "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean"},
    "prompt-mean": {"aggregation": "prompt-mean"},
    "gspo": {"loss": "gspo", "aggregation": "seq-mean-token-mean"},
    "kl and entropy": {"kl_coef": 0.3, "entropy_coef": 0.1},
    "m2po": {"corrections": ({"kind": "m2po", "max_mean_square": 0.04},)},
    "pairwise": {"loss": "pairwise", "loss_args": {"beta": 0.1}},
    "gae": {"advantage": "gae"},
}


def gradient_of(path, algorithm: dict, groups: list[Group], policy: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """What a step on weights that are not the initial ones reports, and its gradient."""
    ours = learner(path, algorithm=algorithm, buffer={"policy": policy, "max_lag": 1})
    disturb(ours)
    report, gradient = step_and_gradient(ours, groups)
    return report.diagnostics, gradient


def sampled_by(groups: list[Group], first: PolicyVersion, then: PolicyVersion) -> list[Group]:
    """The same groups: `first` sampled the first 40 % of every answer, `then` the rest."""

    def spans(completion: Completion) -> tuple[VersionSpan, ...]:
        length = len(completion.token_ids)
        cut = int(0.4 * length)
        return tuple(s for s in (VersionSpan(first, 0, cut), VersionSpan(then, cut, length)) if s.start < s.end)

    return [
        replace(
            g,
            rollouts=tuple(replace(r, completion=replace(r.completion, spans=spans(r.completion))) for r in g.rollouts),
        )
        for g in groups
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_gradients_of_the_two_parts_of_every_answer_add_up_to_that_of_the_whole(path, case):
    groups = random_groups(4, 3)
    _, whole = gradient_of(path, CASES[case], sampled_by(groups, LONG_AGO, VERSION), "wait")
    _, ends = gradient_of(path, CASES[case], sampled_by(groups, LONG_AGO, VERSION), "mask")
    _, beginnings = gradient_of(path, CASES[case], sampled_by(groups, VERSION, LONG_AGO), "mask")
    assert_same_gradient({name: ends[name] + beginnings[name] for name in whole}, whole, 1e-4)
    size = torch.stack([gradient.double().norm() for gradient in whole.values()]).norm()
    for part in (ends, beginnings):
        assert torch.stack([gradient.double().norm() for gradient in part.values()]).norm() > 1e-3 * size


def test_the_share_without_weight_is_reported_and_the_bound_itself_is_not_too_old(path):
    groups = random_groups(4, 3)
    lengths = np.array([len(r.completion.token_ids) for g in groups for r in g.rollouts])
    told, _ = gradient_of(path, {}, sampled_by(groups, LONG_AGO, VERSION), "mask")
    assert told["stale_dropped"] == pytest.approx((0.4 * lengths).astype(int).sum() / lengths.sum())
    at_the_bound = PolicyVersion(VERSION.lineage, VERSION.number - 1)
    for first, policy in ((at_the_bound, "mask"), (LONG_AGO, "train")):
        told, _ = gradient_of(path, {}, sampled_by(groups, first, VERSION), policy)
        assert told["stale_dropped"] == 0
