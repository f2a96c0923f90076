"""Every preset under numbers that are extreme and finite: gradients and report are numbers, and nothing is without bound.

The objective is given log-probs by hand, without a model: the gradient by the logits of a token is its gradient times at
most 1, so a bound of the gradients is a bound of the gradient.
"""

import math
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from asyncgrpo.config.load import algorithm_names, load_config
from asyncgrpo.config.schema import Config
from asyncgrpo.learner.head import TokenScores
from asyncgrpo.learner.objective import MicrobatchObjective, Precomputed, needs_precompute, precompute
from asyncgrpo.learner.packing import PackedBatch, Shaping, StepBatch, pack
from asyncgrpo.learner.report import StepReport, Update, build_report
from asyncgrpo.types import Group
from tests.learner.helpers import OLDER, VERSION, make_group

LENGTHS = ((5, 2, 1), (1, 1, 1), (3, 4))
LIKELY = -0.5
GAPS = {"none": (0.0,), "+50": (50.0,), "-50": (-50.0,), "+700": (700.0,), "-700": (-700.0,)}
GAPS |= {"both": (50.0, -700.0, 700.0, 0.0, -50.0)}
"""log π - log μ of the tokens, in turn."""
REWARDS = {"zero": (0.0, 0.0, 0.0), "one": (1.0, 0.0, 0.0), "tiny": (1e-300, 0.0, 0.0), "huge": (1e6, -1e6, 0.0)}
LARGEST_WEIGHT = math.exp(20)
"""Of a token, by any ratio: log-ratios are cut there."""


@pytest.fixture(scope="module", autouse=True)
def process_group():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def settings_of(name: str, *overrides: str) -> Config:
    needed = ["model.path=m", "data.train=t", "algorithm.group_size=3", "sampling.max_tokens=8"]
    return load_config(None, [*needed, *overrides], algorithm=name)


def made_groups(gaps: tuple[float, ...], rewards: tuple[float, ...], finish_reason: str = "stop") -> list[Group]:
    """Behaviour log-probs for `gaps`; token n has token id n, so that the policy's can be told."""
    made, token = [], 0
    for number, sizes in enumerate(LENGTHS):
        completions = [list(range(token := token + 10, token + size)) for size in sizes]
        behaviour = [[LIKELY + min(-gaps[t % len(gaps)], 0.0) for t in completion] for completion in completions]
        group = make_group(
            number, rewards[: len(sizes)], completions, logprobs=behaviour, version=(VERSION, OLDER)[number % 2]
        )
        for rollout in group.rollouts:
            object.__setattr__(rollout.completion, "finish_reason", finish_reason)
        made.append(group)
    return made


def one_step(
    config: Config, gaps: tuple[float, ...], rewards: tuple[float, ...], **others
) -> tuple[torch.Tensor, StepReport]:
    """LossGradients of all tokens, and the report; the step began with the behaviour policy's weights."""
    settings = config.algorithm
    shaping = Shaping(settings.truncated, 8, settings.overlong_buffer, settings.overlong_factor)
    options = {"advantage": settings.advantage, "group_size": 3, "shaping": shaping, "tokens_per_microbatch": 1000}
    step: StepBatch = pack(made_groups(gaps, rewards, **others), VERSION, rank=0, world=1, **options)
    if settings.advantage == "remax":
        baseline = torch.zeros_like(step.rollouts.rewards)
        advantages = step.rollouts._replace(baseline_rewards=baseline).advantages("remax")
        step = step.with_advantages(
            advantages, [advantages[b.rollouts].repeat_interleave(b.cu_seqlens.diff()) for b in step.trained]
        )

    def before(batch: PackedBatch) -> Precomputed:
        scores = batch.behaviour_logprobs
        return Precomputed(scores, scores, values=torch.zeros_like(scores))

    precomputed = [Precomputed(reference=batch.behaviour_logprobs) for batch in step.trained]
    if needs_precompute(settings, config.learner.updates_per_step):
        step, precomputed = precompute(step, before, settings)
    (batch,), (told,) = step.trained, precomputed
    gap = torch.tensor([gaps[t % len(gaps)] for t in batch.targets.tolist()], dtype=torch.float32)
    policy = LIKELY + gap.clamp(max=0.0)
    scores = TokenScores(policy, torch.ones_like(policy))
    objective = MicrobatchObjective(settings, batch, step, told, version=VERSION.number, max_length=8)
    objective.use_scores(scores)
    gradients = objective(slice(0, len(policy)), scores).logprobs
    update = Update(grad_norm=gradients.double().norm().item(), lr=1.0, skipped=None)
    report = build_report([objective.report(scores)], [step], [update], group_size=3, seconds={}, more_diagnostics={})
    return gradients, report


def numbers_of(report: StepReport) -> dict[str, float]:
    """All of them, those of `diagnostics` and `advantages` too."""
    plain = asdict(report)
    nested = plain.pop("diagnostics") | {str(key): value for key, value in plain.pop("advantages").items()}
    return {name: value for name, value in (plain | nested).items() if isinstance(value, float)}


@pytest.mark.parametrize("name", algorithm_names())
def test_a_preset_is_finite_and_bounded_under_extreme_numbers(name):
    config = settings_of(name)
    for gap, gaps in GAPS.items():
        for reward, rewards in REWARDS.items():
            gradients, report = one_step(config, gaps, rewards)
            assert gradients.isfinite().all(), (gap, reward)
            assert [n for n, value in numbers_of(report).items() if not math.isfinite(value)] == [], (gap, reward)
            largest = max((abs(a) for a in report.advantages.values()), default=0.0)
            penalties = 1e3 * (config.algorithm.behaviour_kl_coef + config.algorithm.kl_coef * LARGEST_WEIGHT + 0.1)
            assert gradients.abs().sum() <= LARGEST_WEIGHT * largest + penalties, (gap, reward)


@pytest.mark.parametrize("name", algorithm_names())
def test_a_preset_of_nothing_to_train_is_zero(name):
    gradients, report = one_step(
        settings_of(name, "algorithm.truncated=mask"), GAPS["both"], REWARDS["huge"], finish_reason="length"
    )
    assert (gradients == 0).all() and report.tokens_trained == 0
    assert [n for n, value in numbers_of(report).items() if not math.isfinite(value)] == []
