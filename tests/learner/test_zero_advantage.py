"""Completions with advantage 0 are not run where that changes nothing, and the report says so much as is known of them."""

import pytest
from msgspec.structs import replace

from asyncgrpo.config.load import algorithm_names, load_config
from asyncgrpo.learner import learner as module
from asyncgrpo.learner.learner import Learner
from tests.learner.helpers import OLDER, VERSION, learner, make_group, random_groups

ALIKE = [
    make_group(7, [1.0] * 4, [[1, 2], [3], [4, 5, 6], [7, 8]], logprobs=[[-1.0, -3.0], [-2.0], [-1.0] * 3, [-4.0] * 2]),
    make_group(8, [0.0] * 4, [[4], [5, 6, 7], [8], [9, 1]], version=OLDER),
]
"""Groups without signal; 7 tokens of them were sampled by older weights."""
GROUPS = [*random_groups(3, 4, seed=1, answer=(2, 6)), *ALIKE]
RUN_ALL = {
    "dppo": "a KL to the behaviour policy",
    "dro": "a regulariser in the surrogate",
    "gspo": "several updates: log-probs of the whole step come first",
    "m2po": "a correction that looks at the whole step",
    "opsm": "a KL to the reference",
    "pairwise": "pairs of the whole step",
    "distill": "the distance to a teacher",
    "distill_sampled": "the distance to a teacher",
    "ppo": "a critic",
    "vcpo": "a learning rate by the ratios of all completions",
}
"""Presets that run completions of advantage 0 too, and what asks for it."""


def gradient(ours: Learner, groups) -> tuple[int, dict, list]:
    """Tokens that were run, what is reported, and the gradient; the weights stay."""
    batch, precomputed = ours._precompute(ours._pack(groups, VERSION))
    sums = ours._accumulate(batch, precomputed, VERSION)
    found = [p.grad.full_tensor().clone() for p in ours.parameters]
    ours.optimizer.zero_grad(set_to_none=True)
    return sum(len(micro.targets) for micro in batch.trained), sums, found


@pytest.mark.parametrize("name", algorithm_names())
def test_a_preset_runs_no_completion_that_changes_nothing_and_every_one_that_does(name, path, monkeypatch):
    """Each completion is a micro-batch of its own, so that the sums are made in one order and can be bitwise equal."""
    settings = [f"model.path={path}", "learner.device=cpu", f"algorithm.group_size={3 if name == 'remax' else 4}"]
    config = load_config("quickstart", settings, algorithm=name)
    config = replace(config, learner=replace(config.learner, tokens_per_microbatch=1))
    ours = Learner(config, rank=0, world=1, device="cpu")
    groups, silent = [*GROUPS[:2], ALIKE[0]], ALIKE[0].rollouts[: config.algorithm.group_size]
    count, sums, found = gradient(ours, groups)
    monkeypatch.setattr(module, "has_only_policy_gradient", lambda config: False)
    total, all_sums, expected = gradient(ours, groups)
    assert count == total if name in RUN_ALL else count <= total - sum(len(r.completion.token_ids) for r in silent)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    for counted in ("tokens", "clipped", "update_tokens", "lag_tokens", "lag_sum", "lag_max"):
        assert sums[counted] == all_sums[counted], counted
    assert sums["loss"].item() == pytest.approx(all_sums["loss"].item(), abs=1e-9)


def test_what_is_not_run_is_reported_as_far_as_the_engine_knows_it(path):
    """The entropy is the mean over all tokens; what compares log-probs with the engine's is over those that were run."""
    ours = learner(path, learner={"lr": 1e-12})
    trained, silent, both = (ours.step(groups, VERSION) for groups in (GROUPS[:3], ALIKE, GROUPS))
    counts = [sum(group.num_tokens for group in groups) for groups in (GROUPS[:3], ALIKE)]
    said = -sum(float(r.completion.logprobs.sum()) for group in ALIKE for r in group.rollouts) / counts[1]
    assert silent.entropy == pytest.approx(said) and silent.grad_norm == silent.loss == 0.0
    assert silent.logprob_gap_max is None and silent.diagnostics["kl_k1"] == 0.0 and silent.shares_within == {}
    assert [r.tokens_trained for r in (trained, silent, both)] == [*counts, sum(counts)]
    assert silent.diagnostics["lag_mean"] == pytest.approx(ALIKE[1].num_tokens / counts[1])
    assert silent.diagnostics["lag_max"] == 1.0
    assert silent.diagnostics["update_ratio_min"] == silent.diagnostics["update_ratio_max"] == 1.0
    weighted = sum(one.entropy * one.tokens_trained for one in (trained, silent))
    assert both.entropy == pytest.approx(weighted / both.tokens_trained, rel=1e-6)
    assert both.diagnostics["kl_k1"] == pytest.approx(trained.diagnostics["kl_k1"], rel=1e-6)
