"""Several updates from the groups of one step."""

import numpy as np
import pytest

from asyncgrpo.types import PolicyVersion
from tests.learner.helpers import (
    VERSION,
    learner,
    load,
    plain_logprobs,
    random_groups,
    watch_updates,
    with_true_logprobs,
)

GROUPS = random_groups(6, 4)


@pytest.mark.parametrize("several", ["minibatches", "ppo_epochs"])
@pytest.mark.parametrize("anchor", ["proximal", "behaviour"])
def test_the_gap_between_kernels_does_not_contain_the_updates(path, anchor, several):
    algorithm = {"anchor": anchor, "corrections": []}
    ours = learner(path, algorithm=algorithm, learner={several: 3, "lr": 0.05})
    report = ours.step(with_true_logprobs(path, GROUPS), VERSION)
    assert ours.steps == 3
    assert report.diagnostics["update_ratio_max"] > 2
    assert report.logprob_gap_max < 1e-4


def test_further_passes_are_shuffled_anew_in_every_step(path):
    first = learner(path, learner={"minibatches": 3, "ppo_epochs": 3})
    orders = [first._order(3, PolicyVersion(1, number)) for number in range(20)]
    assert len({tuple(order[3:]) for order in orders}) > 5 and all(order[:3] == [0, 1, 2] for order in orders)
    once = learner(path, learner={"minibatches": 3})
    assert once._order(3, VERSION) == [0, 1, 2], "one pass is in prompt order, as it always was"


KL_IN_REWARD = {"kl_coef": 0.1, "kl_in": "reward", "kl_kind": "k1"}


@pytest.mark.parametrize(
    ("anchor", "several", "others", "is_exact"),
    [
        ("proximal", {}, {}, True),
        ("behaviour", {}, {}, True),
        ("interpolated", {}, {}, True),
        ("proximal", {"minibatches": 3, "ppo_epochs": 2}, {}, True),
        ("interpolated", {"ppo_epochs": 2}, {}, True),
        ("interpolated", {"minibatches": 3}, KL_IN_REWARD, True),
        ("behaviour", {"minibatches": 3}, KL_IN_REWARD, True),
        ("behaviour", {"minibatches": 3, "ppo_epochs": 2}, {}, False),
        ("interpolated", {"minibatches": 3, "ppo_epochs": 2}, {}, False),
    ],
)
def test_sample_shares_compare_the_weights_at_the_start_with_those_that_sampled(
    path, anchor, several, others, is_exact
):
    """Against a plain forward pass. Where the weights at the start are not scored beforehand, those of each update of the
    first pass stand in for them."""
    algorithm = {"anchor": anchor, "corrections": [], "entropy_coef": 0.01} | others  # with it all completions are run
    ours = learner(path, algorithm=algorithm, learner={"lr": 0.05} | several)
    updates = watch_updates(ours)
    report = ours.step(GROUPS, VERSION)
    model, count, log_rho = load(path), several.get("minibatches", 1), []
    for number in range(count):
        model.load_state_dict(updates[0 if is_exact else number].weights, strict=False)
        log_rho += [
            plain_logprobs(model, group.prompt.token_ids, r.completion.token_ids) - r.completion.logprobs
            for group in GROUPS[6 // count * number : 6 // count * (number + 1)]
            for r in group.rollouts
        ]
    of_tokens, of_completions = np.exp(np.concatenate(log_rho)), np.exp([x.sum() for x in log_rho])
    assert report.diagnostics["ess_sequence"] == pytest.approx(sample_share(of_completions), rel=1e-4)
    expected = pytest.approx(sample_share(of_tokens), rel=1e-4)
    assert report.diagnostics["ess_token"] == expected and report.shares_within[1] == expected
    assert report.importance_mean == pytest.approx(of_tokens.mean(), rel=1e-4)


def sample_share(weights: np.ndarray) -> float:
    return weights.sum() ** 2 / (len(weights) * (weights**2).sum())
