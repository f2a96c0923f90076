"""One rank: what a step reports, and what it does to the weights."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs

from asyncgrpo.config.load import algorithm_names, load_config
from asyncgrpo.learner import learner as learner_module
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.optimizer import learning_rate
from asyncgrpo.types import Group, PolicyVersion, Score
from tests.learner.helpers import (
    OLDER,
    VERSION,
    assert_same_gradient,
    config,
    learner,
    load,
    make_group,
    plain_logprobs,
    random_groups,
    step_and_gradient,
    watch_updates,
    weights,
    with_true_logprobs,
)

GROUPS = random_groups(6, 4)


def test_the_gap_to_a_generator_with_the_same_weights_is_rounding(path):
    ours = learner(path, sampling={"temperature": 0.8})
    report = ours.step(with_true_logprobs(path, GROUPS, temperature=0.8), VERSION)
    assert report.logprob_gap_max < 1e-4 and report.logprob_gap_mean < 1e-5
    assert report.importance_mean == pytest.approx(1.0, abs=1e-5)
    assert report.diagnostics["ess_token"] == pytest.approx(1.0)
    assert (report.importance_capped, report.clip_ratio) == (0.0, 0.0)


@pytest.mark.parametrize("sections", [{}, {"sampling": {"temperature": 0.7}}])
def test_the_check_sequences_are_scored_as_by_a_plain_forward_whatever_the_sampling(path, sections):
    """The learner's half of the sync gap."""
    ours = learner(path, **sections)
    check = ours.check.sequences
    expected = [plain_logprobs(path, seq[: check.start], seq[check.start :]) for seq in check.tokens]
    np.testing.assert_allclose(ours.check.score(), np.concatenate(expected), atol=1e-5)
    ours.step(GROUPS, VERSION)
    assert not np.allclose(ours.check.score(), np.concatenate(expected), atol=1e-3), "of the weights that it has now"


def test_the_gradient_is_clipped(path):
    ours = learner(path, learner={"grad_clip": 1e-3, "lr": 1.0})
    seen = {}
    ours.optimizer.step = lambda: seen.update(norm=torch.nn.utils.get_total_norm([p.grad for p in ours.parameters]))
    report = ours.step(GROUPS, VERSION)
    assert report.grad_norm > 1e-2 and seen["norm"].full_tensor().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_warms_up_and_falls_over_the_updates_of_the_run(path, schedule):
    """Ten steps of two updates: four of warm-up, then down to a tenth where the twenty-first would be, and no further."""
    options = {"lr": 0.1, "warmup_steps": 4, "lr_schedule": schedule, "lr_min_ratio": 0.1, "ppo_epochs": 2}
    settings = config(path, learner=options, run={"steps": 10})
    if schedule == "constant":
        assert [learning_rate(k, settings) for k in range(6)] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])
        return
    left = {"linear": lambda p: 1 - p, "cosine": lambda p: math.cos(math.pi * p / 2) ** 2}[schedule]
    falling = [0.1 * (0.1 + 0.9 * left((k - 4) / 16)) for k in range(4, 21)]
    expected = [0.02, 0.04, 0.06, 0.08, *falling, 0.01, 0.01]
    assert [learning_rate(k, settings) for k in range(23)] == pytest.approx(expected)


@pytest.mark.parametrize(("before", "now", "left"), [(4, 1, [0.2, 0.1]), (1, 4, [0.5, 0.1])])
def test_a_resume_with_other_minibatches_reaches_the_end_of_the_schedule_in_the_last_step(
    path, tmp_path, before, now, left
):
    """Four steps in all; the rate is that of the last update of each."""
    run, settings = {"steps": 4}, {"lr": 1e-3, "lr_schedule": "linear", "full_lr_signal": 0.0}
    first = learner(path, learner=settings | {"minibatches": before}, run=run)
    for number in (0, 1):
        first.step(GROUPS, PolicyVersion(1, number))
    first.save(str(tmp_path / "checkpoint"))
    resumed = learner(path, learner=settings | {"minibatches": now}, run=run)
    resumed.load(str(tmp_path / "checkpoint"))
    rates = [resumed.step(GROUPS, PolicyVersion(2, number)).lr for number in (2, 3)]
    assert rates == pytest.approx([1e-3 * share for share in left])


def test_diagnostics_are_of_the_ratios_to_the_generator(path):
    """Behaviour log-probs that are all off by the same amount: every number is known. Tokens that are rejected count too."""
    groups = with_true_logprobs(path, GROUPS)
    for completion in (rollout.completion for group in groups for rollout in group.rollouts):
        completion.logprobs[:] += 0.25
    later = PolicyVersion(VERSION.lineage, VERSION.number + 1)
    corrections = ({"high_ratio": 0.5}, {"action": "reject", "high_ratio": 0.7})
    report = learner(path, algorithm={"corrections": corrections}).step(groups, later)
    found = report.diagnostics
    assert found["kl_k1"] == pytest.approx(0.25, abs=1e-4)
    assert found["ratio_mean"] == report.importance_mean == pytest.approx(math.exp(-0.25), abs=1e-4)
    assert found["bounded_above"] == report.importance_capped == 1.0 and found["rejected_dropped"] == 1.0
    assert (found["lag_mean"], found["lag_max"]) == (1.0, 1.0)
    assert report.grad_norm == 0.0 and report.logprob_gap_max is None


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
@pytest.mark.parametrize("algorithm", [{}, {"corrections": ({"kind": "m2po", "max_mean_square": 0.04},)}])
def test_completions_from_the_wire_cannot_be_written_and_need_not_be(path, algorithm):
    groups = random_groups(3, 4)
    for rollout in (r for group in groups for r in group.rollouts):
        rollout.completion.logprobs.flags.writeable = rollout.completion.token_ids.flags.writeable = False
    expected = learner(path, algorithm=algorithm).step(random_groups(3, 4), VERSION)
    assert learner(path, algorithm=algorithm).step(groups, VERSION).loss == expected.loss


@pytest.mark.parametrize("anchor", ["proximal", "interpolated"])
def test_the_learning_rate_falls_with_the_effective_sample_share(path, anchor):
    settings, algorithm = {"lr": 1e-3, "warmup_steps": 1}, {"anchor": anchor}
    plain = learner(path, learner=settings, algorithm=algorithm)
    scaled = learner(path, learner=settings | {"ess_lr": True}, algorithm=algorithm)
    off_policy = [plain.step(GROUPS, VERSION), scaled.step(GROUPS, VERSION)]
    share = off_policy[1].diagnostics["ess_sequence"]
    assert share < 0.9 and off_policy[0].lr == pytest.approx(5e-4)
    assert off_policy[1].lr == pytest.approx(5e-4 * math.sqrt(share))
    before = load(path).state_dict()
    moved = [max((t - before[n]).abs().max().item() for n, t in weights(one).items()) for one in (plain, scaled)]
    assert moved[1] == pytest.approx(moved[0] * math.sqrt(share), rel=0.05), "and the weights move so much less"
    on_policy = learner(path, learner=settings | {"ess_lr": True}).step(with_true_logprobs(path, GROUPS), VERSION)
    assert on_policy.lr == pytest.approx(5e-4, rel=1e-3)


def test_the_learning_rate_falls_as_groups_are_solved(path):
    settings = {"lr": 1e-3, "warmup_steps": 1}
    solved = [GROUPS[0], *(all_with(1e3, group) for group in GROUPS[1:])]
    share = 1 / len(GROUPS)
    whole = learner(path, learner=settings | {"full_lr_signal": 0.0}).step(solved, VERSION)
    root = learner(path, learner=settings).step(solved, VERSION)
    assert whole.signal_share == root.signal_share == pytest.approx(share)
    assert whole.lr == pytest.approx(5e-4) and root.lr == pytest.approx(5e-4 * math.sqrt(share))
    enough = learner(path, learner=settings | {"full_lr_signal": share}).step(solved, VERSION)
    assert enough.lr == pytest.approx(5e-4)
    hopeless = [GROUPS[0], *(all_with(-1e3, group) for group in GROUPS[1:])]
    for groups in (GROUPS, hopeless):
        assert learner(path, learner=settings).step(groups, VERSION).lr == pytest.approx(5e-4)


def test_the_learning_rate_of_each_update_follows_the_signal_of_its_own_groups(path):
    solved = [all_with(1.0, group) for group in GROUPS]
    still, before = learner(path, algorithm={"entropy_coef": 0.1}, learner={"lr": 1e-2}), load(path).state_dict()
    report = still.step(solved, VERSION)
    assert report.grad_norm > 0 and report.lr == 0.0 and report.skipped is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(still).items())
    ours, seen = learner(path, learner={"lr": 1e-3, "minibatches": 3}), []
    ours.optimizer.step = lambda: seen.append(ours.optimizer.param_groups[0]["lr"])
    report = ours.step([*GROUPS[:2], GROUPS[2], solved[3], solved[4], GROUPS[5]], VERSION)
    assert seen == pytest.approx([1e-3, 1e-3 * math.sqrt(1 / 2), 1e-3 * math.sqrt(1 / 2)])
    assert report.signal_share == pytest.approx((1 + 1 / 2 + 1 / 2) / 3)


def test_a_gradient_of_zero_moves_nothing_and_counts_for_the_schedule(path):
    """AdamW alone would go on by its momentum, and shrink the weights by their decay."""
    settings = {"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 3, "minibatches": 2}
    ours = learner(path, learner=settings, algorithm={"entropy_coef": 0.5})
    hopeless = [all_with(0.0, group) for group in GROUPS]  # of an entropy bonus they would make noise
    assert ours.step(GROUPS, VERSION).zero_gradients == 0
    before = weights(ours)
    report = ours.step(hopeless, VERSION)
    assert (report.grad_norm, report.zero_gradients, report.skipped) == (0.0, 2, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(ours).items())
    assert ours.steps == 4 and ours.step(GROUPS, VERSION).lr == pytest.approx(1e-2)


def all_with(reward: float, group: Group) -> Group:
    """The same completions, all with one reward."""
    score = Score(value=reward)
    return replace(group, rollouts=tuple(replace(rollout, score=score) for rollout in group.rollouts))


# --- several updates from the groups of one step


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


ALIKE = [
    make_group(7, [1.0] * 4, [[1, 2], [3], [4, 5, 6], [7, 8]], logprobs=[[-1.0, -3.0], [-2.0], [-1.0] * 3, [-4.0] * 2]),
    make_group(8, [0.0] * 4, [[4], [5, 6, 7], [8], [9, 1]], version=OLDER),
]
"""Groups without signal; 7 tokens of them were sampled by older weights."""
SOME = [*random_groups(3, 4, seed=1, answer=(2, 6)), *ALIKE]
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
    config = structs.replace(config, learner=structs.replace(config.learner, tokens_per_microbatch=1))
    ours = Learner(config, rank=0, world=1, device="cpu")
    groups, silent = [*SOME[:2], ALIKE[0]], ALIKE[0].rollouts[: config.algorithm.group_size]
    count, sums, found = gradient(ours, groups)
    monkeypatch.setattr(learner_module, "has_only_policy_gradient", lambda config: False)
    total, all_sums, expected = gradient(ours, groups)
    assert count == total if name in RUN_ALL else count <= total - sum(len(r.completion.token_ids) for r in silent)
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
    for counted in ("tokens", "clipped", "update_tokens", "lag_tokens", "lag_sum", "lag_max"):
        assert sums[counted] == all_sums[counted], counted
    assert sums["loss"].item() == pytest.approx(all_sums["loss"].item(), abs=1e-9)


def test_what_is_not_run_is_reported_as_far_as_the_engine_knows_it(path):
    """The entropy is the mean over all tokens; what compares log-probs with the engine's is over those that were run."""
    ours = learner(path, learner={"lr": 1e-12})
    trained, silent, both = (ours.step(groups, VERSION) for groups in (SOME[:3], ALIKE, SOME))
    counts = [sum(group.num_tokens for group in groups) for groups in (SOME[:3], ALIKE)]
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


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"kl_coef": 0.1, "kl_kind": "full", "entropy_coef": 0.1},
        {"advantage": "gae"},
        {"loss": "pairwise", "loss_args": {"beta": 0.1, "reference": True}, "corrections": ()},
    ],
)
def test_bfloat16_keeps_float32_masters_and_changes_little(path, algorithm):
    exact, ours = (learner(path, algorithm=algorithm, model={"dtype": dtype}) for dtype in ("float32", "bfloat16"))
    expected, report = (one.step(GROUPS, VERSION) for one in (exact, ours))
    assert report.skipped is None and {p.dtype for p in ours.parameters} == {torch.float32}
    assert {t.dtype for _, t in ours.weights()} == {torch.bfloat16}
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=0.1)
    assert report.loss == pytest.approx(expected.loss, abs=0.1)
    assert report.entropy == pytest.approx(expected.entropy, rel=0.02)


def test_gathered_weights_are_kept_where_all_are_trained_and_no_gpu_is_shared(path, monkeypatch):
    calls, trained, real = list[bool](), [], learner_module.keep_gathered
    monkeypatch.setattr(learner_module, "keep_gathered", lambda model, keep: (calls.append(keep), real(model, keep)))
    for share, lora, is_kept in ((False, 0, True), (True, 0, False), (False, 2, False)):
        calls.clear()
        options = {"cluster": {"share_gpu": share}, "model": {"lora": {"rank": lora}}}
        one = learner(path, learner={"tokens_per_microbatch": 64}, **options)
        one.step(GROUPS, VERSION)
        assert any(calls) is is_kept
        trained.append(weights(one))
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def programs(cache_home):
    """What is kept of compiled layers between starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_home))
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        yield cache_home / "asyncgrpo" / "compiled"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiling_changes_nothing(path, programs, checkpointing):
    """Two steps that are compiled after one that is not; another learner that does the same is bitwise equal."""
    options = {"lr": 1e-3, "tokens_per_microbatch": 50, "activation_checkpointing": checkpointing}
    plain = learner(path, learner=options | {"compile": False})
    compiled, again = (learner(path, learner=options | {"compile": True}) for _ in range(2))
    for groups in (GROUPS, GROUPS, random_groups(4, 4, seed=5)):
        (first, expected), (second, gradients) = (step_and_gradient(one, groups) for one in (plain, compiled))
        assert_same_gradient(gradients, expected, 1e-4)
        assert first.loss == pytest.approx(second.loss, rel=1e-4)
        same = step_and_gradient(again, groups)[1]
        assert all(same[name].equal(gradient) for name, gradient in gradients.items())
    assert all(layer._compiled_call_impl is not None for layer in compiled.model.layers)
    assert list(programs.rglob("*.so")), "kept for the next start"
