"""Updates that would do harm are not made, and a run that makes none ends; moments on the CPU change no number."""

import math
from dataclasses import replace

import pytest
import torch

from asyncgrpo.config.schema import LearnerConfig
from asyncgrpo.errors import TrainingError
from asyncgrpo.learner import optimizer
from asyncgrpo.learner.optimizer import ENOUGH, MAX_SKIPS, WINDOW, GradientGuard, OptimizerOffload
from asyncgrpo.types import Score
from tests.learner.helpers import VERSION, learner, random_groups, weights

GROUPS, MORE = random_groups(3, 4), random_groups(3, 4, seed=1)


def used_to(norm: float, *, factor: float | None = 3.0, clip: float = 1e-3) -> GradientGuard:
    """A guard that has seen enough updates of that norm."""
    one = GradientGuard(factor, clip)
    assert [one.judge(norm) for _ in range(ENOUGH)] == [None] * ENOUGH
    return one


def test_a_spike_is_a_multiple_of_the_recent_median():
    one = used_to(2.0)
    assert one.judge(6.0) is None, "just not above"
    assert one.judge(6.01) == "the gradient norm, 6.01, is above learner.spike_factor (3) x the recent median, 2"
    clipped = used_to(2.0, clip=10.0)
    assert clipped.judge(30.0) is None, "what is clipped a little does no harm"
    assert clipped.judge(31.0) == "the gradient norm, 31, is above learner.spike_factor (3) x learner.grad_clip, 10"
    assert one.judge(0.0) is None, "a small gradient does no harm"
    assert all(used_to(1.0, factor=None).judge(norm) is None for norm in (1e6, 1e12)), "without a factor nothing is"
    assert one.judge(math.nan) == "the gradient norm is nan" and one.judge(math.inf) and one.judge(1.0) is None


def test_the_median_is_that_of_the_last_updates_that_were_made():
    early = GradientGuard(3.0, 1e-3)
    rising = [0.0] * WINDOW + [10.0**i for i in range(ENOUGH)]
    assert {early.judge(norm) for norm in rising} == {None}, "too little is known yet"
    one = used_to(1.0)
    assert all(one.judge(100.0) and one.judge(1.0) is None for _ in range(2 * WINDOW)) and one.judge(7.0)
    assert [one.judge(2.5) for _ in range(WINDOW)] == [None] * WINDOW
    assert one.judge(7.0) is None, "2.5 is what is usual now"


DEFAULTS = LearnerConfig()


@pytest.mark.parametrize("usual", [0.0003, 0.1, 1.0])
@pytest.mark.parametrize("norm", [6e14, 3e8, 1.2e5])
def test_the_defaults_catch_what_one_broken_token_makes(usual, norm):
    """The norms of the presets opsm, dppo and gmpo where one token was 50 nats off, before they were bounded."""
    one = used_to(usual, factor=DEFAULTS.spike_factor, clip=DEFAULTS.grad_clip)
    assert "learner.spike_factor" in one.judge(norm) and one.judge(usual) is None


def test_the_defaults_let_a_run_that_has_learnt_meet_a_group_with_signal():
    """Norms fall from 1 to next to nothing, or to nothing; then a group that is not solved is 1000 times the median."""
    falling = [10 ** (-3.5 * i / 60) for i in range(60)]
    one = used_to(2e4, factor=DEFAULTS.spike_factor, clip=DEFAULTS.grad_clip)
    assert one.judge(2e6) is None and one.judge(3e7), "large rewards are measured by their own median"
    for quiet in (3e-4, 0.0):
        one = GradientGuard(DEFAULTS.spike_factor, DEFAULTS.grad_clip)
        norms = [*falling, *[quiet] * WINDOW, 0.3, quiet, 1.0, quiet, 20.0, *reversed(falling)]
        assert [one.judge(norm) for norm in norms] == [None] * len(norms)


def test_a_guard_goes_on_from_what_another_one_knew():
    first = used_to(2.0)
    assert first.judge(100.0)
    resumed = GradientGuard(3.0, 1e-3)
    resumed.recall(first.memory())
    assert resumed.skips == 1 and resumed.memory().nan_to_num().equal(first.memory().nan_to_num())
    assert first.judge(7.0) == resumed.judge(7.0) is not None and resumed.judge(6.0) is None
    fresh = GradientGuard(3.0, 1e-3)
    fresh.recall(GradientGuard(3.0, 1e-3).memory())
    assert fresh.judge(1e9) is None, "nothing was known"


def test_a_gradient_of_zero_neither_counts_as_skipped_nor_ends_a_row_of_skips():
    one = GradientGuard(None, 1e-3)
    assert [one.judge(0.0) for _ in range(MAX_SKIPS)] == [None] * MAX_SKIPS and one.skips == 0
    assert all(one.judge(math.nan) and one.judge(0.0) is None for _ in range(MAX_SKIPS - 1))
    with pytest.raises(TrainingError, match=f"{MAX_SKIPS} updates in a row"):
        one.judge(math.nan)


@pytest.mark.parametrize("bad", [math.nan, 100.0])
def test_too_many_in_a_row_end_the_run(bad):
    one = used_to(1.0)
    for _ in range(2):
        assert all(one.judge(bad) for _ in range(MAX_SKIPS - 1)) and one.skips == MAX_SKIPS - 1
        assert one.judge(1.0) is None and one.skips == 0
    assert all(one.judge(bad) for _ in range(MAX_SKIPS - 1))
    with pytest.raises(TrainingError, match=rf"{MAX_SKIPS} updates in a row were skipped, .* gradient norm"):
        one.judge(bad)


def loud(groups) -> list:
    """The same completions with rewards that are much larger."""
    return [
        replace(g, rollouts=tuple(replace(r, score=Score(value=100.0 * r.score.value)) for r in g.rollouts))
        for g in groups
    ]


def test_the_learner_skips_a_spike_and_goes_on_as_if_it_had_not_been(path, monkeypatch):
    monkeypatch.setattr(optimizer, "ENOUGH", 2)
    settings, algorithm = {"spike_factor": 5.0, "warmup_steps": 9, "grad_clip": 0.1}, {"advantage": "dr_grpo"}
    ours, undisturbed = (learner(path, learner=settings, algorithm=algorithm) for _ in range(2))
    for one in (ours, undisturbed):
        for _ in range(2):
            assert one.step(GROUPS, VERSION).skipped is None
    before = weights(ours)
    report = ours.step(loud(GROUPS), VERSION)
    assert "learner.spike_factor" in report.skipped and report.grad_norm > 10 and ours.steps == 2
    assert report.lr == pytest.approx(3e-4), "of the update that would have been"
    assert all(before[name].equal(tensor) for name, tensor in weights(ours).items())
    assert all(p.grad is None for p in ours.parameters)
    assert ours.step(GROUPS, VERSION).lr == undisturbed.step(GROUPS, VERSION).lr
    expected = weights(undisturbed)
    assert all(expected[name].equal(tensor) for name, tensor in weights(ours).items())


# -- moments on the CPU between updates ---------------------------------------------------------------------------------


def moments(of: torch.optim.AdamW) -> list[torch.Tensor]:
    return [state[name] for state in of.state.values() for name in ("exp_avg", "exp_avg_sq")]


def test_one_chunk_of_moments_is_at_hand_at_a_time(monkeypatch):
    """The meta device stands for a GPU; nothing can be copied out of it, so moments lose their values on the way."""
    monkeypatch.setattr(optimizer, "CHUNK_BYTES", 2 * 4 * 100)
    monkeypatch.setattr(optimizer, "_bring_back", lambda here, waiting: None)
    parameters = [torch.nn.Parameter(torch.zeros(size, device="meta")) for size in (60, 40, 96, 300, 4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adam = torch.optim.AdamW(parameters)
    offload = OptimizerOffload(adam)
    at_hand, stepped = [], []

    def look():
        at_hand.append(sum(tensor.nbytes for tensor in moments(adam) if tensor.is_meta))
        stepped.extend(p for group in adam.param_groups for p in group["params"])

    adam.step = look  # AdamW itself cannot count its steps on meta
    assert not any(tensor.is_meta for tensor in moments(adam))
    for _ in range(2):
        offload.step()
        assert not any(tensor.is_meta for tensor in moments(adam))
    assert at_hand == 2 * [2 * 4 * size for size in (60 + 40, 96, 300, 4)], "one that is larger comes alone"
    assert len(stepped) == 10 and all(a is b for a, b in zip(stepped, 2 * parameters, strict=True))
    groups, adam.step = adam.param_groups, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        offload.step()
    assert not any(tensor.is_meta for tensor in moments(adam)) and adam.param_groups is groups


@pytest.mark.parametrize("chunk_bytes", [1, 50_000, 2**30])
def test_steps_are_the_same_with_it(path, monkeypatch, chunk_bytes):
    """With groups that differ in their learning rate: a critic's value head has its own."""
    monkeypatch.setattr(optimizer, "CHUNK_BYTES", chunk_bytes)
    results = []
    for is_on in (False, True):
        ours = learner(path, learner={"offload_optimizer": is_on, "lr": 1e-2}, algorithm={"advantage": "gae"})
        assert bool(ours.optimizer.state) == is_on
        assert (len(ours.optimizer.param_groups) > 3) == (is_on and chunk_bytes < 2**30)
        for groups in (GROUPS, MORE):
            ours.step(groups, VERSION)
        held = [x.full_tensor() for x in moments(ours.optimizer)]
        results.append([*(p.to_local() for p in ours.parameters), *held])
    assert all(one.equal(other) for one, other in zip(*results, strict=True))
