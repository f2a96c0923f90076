"""One rank: what a step reports, and what it does to the weights."""

import math

import numpy as np
import pytest
import torch

from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.learner import Learner, learning_rate
from tests.algorithms import oracle
from tests.learner.helpers import (
    OLDER,
    VERSION,
    config,
    load,
    make_group,
    plain_logprobs,
    random_groups,
    weights,
    with_true_logprobs,
)
from tests.models import make_tiny_qwen3

GROUPS = random_groups(6, 4)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


def learner(path, **sections) -> Learner:
    return Learner(config(path, **sections), rank=0, world=1, device="cpu")


def step_and_gradient(learner, groups, version=VERSION):
    """A step's report, and the gradient it used, by name. The learner steps as well."""
    seen = {}
    update = learner._update

    def keep_gradients(lr):
        for name, p in learner.model.language_model.named_parameters():
            seen[name] = p.grad.full_tensor().clone()
        return update(lr)

    learner._update = keep_gradients
    return learner.step(groups, version), seen


def reference_loss(model, groups, *, kl_coef=0.0, entropy_coef=0.0, scale="group_std", anchor="proximal", initial=None):
    """The step's loss, differentiable, one answer at a time and straight from the papers."""
    total, tokens = 0.0, sum(g.num_tokens for g in groups)
    for group in groups:
        rewards = [r.score.value for r in group.rollouts]
        for advantage, rollout in zip(
            oracle.advantages(rewards, [0] * len(rewards), scale=scale), group.rollouts, strict=True
        ):
            prompt, answer = group.prompt.token_ids, torch.from_numpy(rollout.completion.token_ids).long()
            ids = torch.cat([torch.tensor(prompt), answer])[None]
            rows = slice(len(prompt) - 1, ids.shape[1] - 1)
            logits = model(ids).logits[0, rows].log_softmax(-1)
            policy = logits.gather(-1, answer[:, None]).squeeze(-1)
            behaviour = torch.from_numpy(rollout.completion.logprobs)
            if anchor == "proximal":
                ratio, weight = (policy - policy.detach()).exp(), (policy.detach() - behaviour).exp().clip(max=2.0)
            else:
                ratio, weight = (policy - behaviour).exp(), 1.0
            loss = -(weight * torch.minimum(ratio * advantage, ratio.clip(0.8, 1.28) * advantage)).sum()
            if kl_coef:
                with torch.no_grad():
                    reference = initial(ids).logits[0, rows].log_softmax(-1).gather(-1, answer[:, None]).squeeze(-1)
                loss = loss + kl_coef * (torch.exp(reference - policy) - 1 + policy - reference).sum()
            if entropy_coef:
                loss = loss + entropy_coef * (logits.exp() * logits).sum()
            total = total + loss / tokens
    return total


CASES = {
    "grpo": ({}, {}),
    "behaviour anchor": ({"anchor": "behaviour"}, {"anchor": "behaviour"}),
    "dr_grpo": ({"advantage": "dr_grpo"}, {"scale": "none"}),
    "entropy and kl": ({"kl_coef": 0.1, "entropy_coef": 0.01}, {"kl_coef": 0.1, "entropy_coef": 0.01}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_the_papers(path, case):
    algorithm, options = CASES[case]
    ours = learner(path, algorithm=algorithm)
    ours.step(random_groups(2, 4, seed=9), VERSION)  # leave the initial model, so that the KL is not zero
    model = load(path)
    model.load_state_dict(weights(ours), strict=True)
    report, gradients = step_and_gradient(ours, GROUPS)
    loss = reference_loss(model, GROUPS, initial=load(path), **options)
    loss.backward()
    assert report.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=2e-5, msg=name)
    if options.get("kl_coef"):
        assert report.kl_reference > 0


@pytest.mark.parametrize("budget", [1, 50])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum-norm"])
def test_the_split_into_microbatches_changes_nothing(path, budget, aggregation):
    options = {"aggregation": aggregation, "kl_coef": 0.01}
    whole, split = (
        learner(path, algorithm=options, learner={"tokens_per_microbatch": tokens, "lr": 1e-3})
        for tokens in (10_000, budget)
    )
    (first, expected), (second, gradients) = step_and_gradient(whole, GROUPS), step_and_gradient(split, GROUPS)
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-4, atol=1e-6)
    for field in ("loss", "grad_norm", "entropy", "importance_mean", "kl_reference", "logprob_gap_max"):
        assert getattr(second, field) == pytest.approx(getattr(first, field), rel=1e-5, abs=1e-7), field


def test_setting_silent_answers_apart_changes_nothing(path):
    """Forward-only micro-batches count in the report and contribute the zero gradient that they have."""
    groups = [*GROUPS, make_group(9, [1.0, 1.0], [[1, 2], [3]]), make_group(10, [0.0, 0.0], [[4], [5, 6, 7]])]
    apart, (together) = learner(path), learner(path)
    pack = together._pack
    together._pack = lambda groups, version: _all_trained(pack(groups, version))
    (first, gradients), (second, expected) = step_and_gradient(apart, groups), step_and_gradient(together, groups)
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-4, atol=1e-6)
    assert first.entropy == pytest.approx(second.entropy) and first.tokens_trained == second.tokens_trained
    # The second step sees the weights of the first: forward-only passes leave no gathered copy behind.
    assert apart.step(groups, VERSION).entropy == pytest.approx(together.step(groups, VERSION).entropy, rel=1e-5)


def _all_trained(batch):
    from dataclasses import replace

    assert batch.silent
    return replace(batch, trained=batch.trained + batch.silent, silent=())


def test_constant_groups_have_no_gradient(path):
    groups = [make_group(i, [0.98] * 15, [[i + 1, j + 1] for j in range(15)]) for i in range(2)]
    report, gradients = step_and_gradient(learner(path), groups)
    assert report.grad_norm == 0.0 and report.zero_signal_groups == 2 and report.skipped is None
    assert all((g == 0).all() for g in gradients.values())
    assert report.tokens_trained == 60 and set(report.advantages.values()) == {0.0}


def test_rewarded_answers_become_likelier(path):
    ours = learner(path)
    group = make_group(0, [1.0, 0.0], [[1, 2], [3, 4]])
    before = [plain_logprobs(path, (5, 6, 7), a).sum() for a in ([1, 2], [3, 4])]
    for _ in range(3):
        ours.step([group], VERSION)
    model = load(path)
    model.load_state_dict(weights(ours))
    after = [plain_logprobs(model, (5, 6, 7), a).sum() for a in ([1, 2], [3, 4])]
    assert after[0] > before[0] + 0.1 and after[1] < before[1] - 0.1


def test_the_gap_to_a_generator_with_the_same_weights_is_rounding(path):
    ours = learner(path, sampling={"temperature": 0.8})
    report = ours.step(with_true_logprobs(path, GROUPS, temperature=0.8), VERSION)
    assert report.logprob_gap_max < 1e-4 and report.logprob_gap_mean < 1e-5
    assert report.importance_mean == pytest.approx(1.0, abs=1e-5)
    assert report.effective_sample_share == pytest.approx(1.0)
    assert (report.importance_capped, report.clip_ratio) == (0.0, 0.0)


def test_the_gap_is_measured_only_on_tokens_of_the_present_weights(path):
    stale = [make_group(0, [1.0, 0.0], [[1], [2]], version=OLDER)]
    assert learner(path).step(stale, VERSION).logprob_gap_max is None
    assert learner(path).step(stale, OLDER).logprob_gap_max > 0


def test_a_gradient_that_is_not_finite_changes_nothing(path):
    ours, undisturbed = learner(path), learner(path)
    before = weights(ours)
    poisoned = make_group(0, [float("inf"), 0.0, 1.0], [[1], [2], [3]])
    report = ours.step([poisoned, *GROUPS], VERSION)
    assert report.skipped is not None and not math.isfinite(report.grad_norm) and ours.steps == 0
    assert all(before[name].equal(tensor) for name, tensor in weights(ours).items())
    ours.step(GROUPS, VERSION)
    undisturbed.step(GROUPS, VERSION)
    expected = weights(undisturbed)
    assert all(expected[name].equal(tensor) for name, tensor in weights(ours).items())


def test_a_step_without_usable_answers_is_a_step_of_zero_gradient(path):
    report = learner(path).step([make_group(0, [None, None], [[1], [2]])], VERSION)
    assert (report.tokens_trained, report.answers, report.answers_unusable) == (0, 0, 2)
    assert (report.loss, report.grad_norm, report.entropy) == (0.0, 0.0, 0.0)


def test_the_gradient_is_clipped(path):
    ours = learner(path, learner={"grad_clip": 1e-3, "lr": 1.0})
    seen = {}
    ours.optimizer.step = lambda: seen.update(norm=torch.nn.utils.get_total_norm([p.grad for p in ours.parameters]))
    report = ours.step(GROUPS, VERSION)
    assert report.grad_norm > 1e-2 and seen["norm"].full_tensor().item() == pytest.approx(1e-3, rel=1e-3)


def test_the_learning_rate_warms_up_and_stays(path):
    settings = config(path, learner={"lr": 0.1, "warmup_steps": 4}).learner
    assert [learning_rate(k, settings) for k in range(6)] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1, 0.1])
    assert learner(path, learner={"warmup_steps": 1, "lr": 0.2}).step(GROUPS, VERSION).lr == pytest.approx(0.1)


def test_recomputing_activations_changes_nothing(path):
    (_, expected), (_, gradients) = (
        step_and_gradient(learner(path, learner={"activation_checkpointing": flag, "lr": 1e-3}), GROUPS)
        for flag in (False, True)
    )
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-5, atol=1e-7)


def test_bfloat16_keeps_float32_masters(path):
    ours = learner(path, model={"path": str(path), "dtype": "bfloat16"}, learner={"lr": 1e-6})
    report = ours.step(GROUPS, VERSION)
    assert report.skipped is None and all(p.dtype == torch.float32 for p in ours.parameters)
    assert {t.dtype for _, t in ours.weights()} == {torch.bfloat16}
    exact = learner(path).step(GROUPS, VERSION)
    assert report.loss == pytest.approx(exact.loss, abs=0.05) and report.entropy == pytest.approx(
        exact.entropy, rel=0.02
    )


def test_what_cannot_be_loaded_is_said_in_one_sentence(tmp_path, path):
    with pytest.raises(ConfigError, match=r"model\.path .*nothing"):
        learner(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="flash_attention_2, but"):
        learner(path, learner={"attention": "flash_attention_2"})


def test_the_report_knows_every_advantage(path):
    report = learner(path).step(GROUPS, VERSION)
    assert report.advantages.keys() == {(g.group_id, i) for g in GROUPS for i in range(4)}
    for group in GROUPS:
        expected = oracle.advantages([r.score.value for r in group.rollouts], [0] * 4, scale="group_std")
        assert np.allclose([report.advantages[group.group_id, i] for i in range(4)], expected, atol=1e-12)
