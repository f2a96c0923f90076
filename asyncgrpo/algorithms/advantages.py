"""Shaping of rewards, and advantage estimators: from the rewards of a group to the advantage of each completion.

The edge cases are part of the formula of every estimator and equal for all:

- A completion without a reward (NaN) is in no statistic and gets exactly 0.
- A group with fewer than two rewards gets exactly 0. It never trains on the raw reward.
- A group with equal rewards gets exactly 0. Equality is tested in float64, because eps would amplify the rounding of the
  mean: in float32, fifteen rewards of 0.98 give 0.19.

`remax` does not use the group: there a missing baseline gives 0 instead of the last two rules.

Common arguments:
    rewards: [S] one reward per completion, finite or NaN if missing. No overflow up to 1e300.
    group_ids: [S] integers, equal for completions of one prompt. Any order, any values.
    lengths: [S] trained tokens of each completion; may be 0.
Returns [S] float64 without gradient. In formulas, `mean`, `std` (n - 1 in the denominator) and `n` are over the scored
completions of the group.
"""

from collections.abc import Callable
from functools import wraps
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms.aggregation import sum_by_sequence

# -- shaping: what a reward becomes before its advantage; a missing one (NaN) stays missing ----------------------------

TruncationRule = Literal["keep", "mask", "zero"]


@torch.no_grad()
def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return the length penalty of each completion, to be added to its reward.

        0 up to max_length - buffer tokens, then linear to -factor at max_length, and -factor beyond

    Args:
        lengths: [S] tokens of each completion, with the observations between its turns.
        max_length: tokens from which the full penalty applies.
        buffer: tokens over which the penalty grows, 1 to max_length.
        factor: full penalty, in units of reward.
    Returns:
        [S] float64 in [-factor, 0].
    Source:
        DAPO, arXiv:2503.14476.
    """
    assert 0 < buffer <= max_length and factor >= 0, (buffer, max_length, factor)
    over = lengths.to(torch.float64) - (max_length - buffer)
    return -factor * (over / buffer).clamp(0.0, 1.0)


@torch.no_grad()
def reward_with_kl(rewards: Tensor, kl_per_token: Tensor, mask: Tensor, cu_seqlens: Tensor, *, coef: float) -> Tensor:
    """Return R - coef Σ kl over the trained tokens of each completion: the KL as part of the reward.

    Args:
        rewards: [S] one reward per completion.
        kl_per_token: [T] estimate at each token, nats. k1 is unbiased here, unlike in a loss.
        mask: [T] bool, True on trained tokens. Values at other positions, even NaN, are ignored.
        cu_seqlens: [S+1] start of each sequence.
        coef: reward per nat.
    Returns:
        [S] float64.
    Source:
        arXiv:1909.08593; in an outcome reward as in RLOO, arXiv:2402.14740.
    """
    kl = sum_by_sequence(torch.where(mask, kl_per_token.to(torch.float64), 0.0), cu_seqlens)
    return rewards.to(torch.float64) - coef * kl


@torch.no_grad()
def apply_truncation(rewards: Tensor, is_truncated: Tensor, *, rule: TruncationRule) -> tuple[Tensor, Tensor]:
    """Apply a rule to completions that reached the length limit.

        keep    reward unchanged
        mask    the reward counts in the group's statistics, but the tokens are not trained
        zero    the reward becomes 0; a missing one stays missing

    Args:
        rewards: [S] one reward per completion, NaN if missing.
        is_truncated: [S] bool.
    Returns:
        The rewards, [S] float64, and [S] bool, true if the tokens of the completion are trained.
    Source:
        mask: overlong filtering of DAPO, arXiv:2503.14476. zero: AReaL.
    """
    rewards = rewards.to(torch.float64)
    if rule == "zero":
        rewards = rewards.masked_fill(is_truncated & ~rewards.isnan(), 0.0)
    is_trained = ~is_truncated if rule == "mask" else torch.ones_like(is_truncated)
    return rewards, is_trained


# -- statistics over groups --------------------------------------------------------------------------------------------


class Groups:
    """Partition of completions into groups. Every statistic is [S], the value of each completion's group."""

    number: Tensor
    """[S] group number of each completion, from 0."""

    def __init__(self, group_ids: Tensor) -> None:
        distinct, self.number = torch.unique(group_ids, return_inverse=True)
        self._num_groups = distinct.numel()

    def sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._num_groups).index_add(0, self.number, values)[self.number]

    def max(self, values: Tensor) -> Tensor:
        return self._reduce(values, "amax")

    def min(self, values: Tensor) -> Tensor:
        return self._reduce(values, "amin")

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        nothing = values.new_zeros(self._num_groups)
        return nothing.scatter_reduce(0, self.number, values, how, include_self=False)[self.number]


def has_signal(rewards: Tensor, groups: Groups) -> Tensor:
    """Return [S] bool, True in groups with two different rewards. `rewards` is float64, NaN if missing.

    Compares largest and smallest, which is exact. A standard deviation of equal numbers is not: in float32, fifteen rewards
    of 0.98 have 6e-8.
    """
    missing = rewards.isnan()
    return groups.max(rewards.masked_fill(missing, -torch.inf)) > groups.min(rewards.masked_fill(missing, torch.inf))


class Signal(NamedTuple):
    """Kinds of groups. A group is hopeless if it has no signal and not all its completions are right."""

    share: float
    """Share of groups with a signal among groups that are solved or have a signal; 1 without either."""
    not_hopeless: float
    """Share of groups that are solved or have a signal; 1 without groups."""


def signal_of(scores: Tensor, group_ids: Tensor, teaches: Tensor, *, success: float) -> Signal:
    """Count the groups of a minibatch. A group is solved if no completion has a signal and all are right.

    Args:
        scores: [S] float64, finite: rewards before shaping.
        group_ids: [S] integers, equal for completions of one prompt.
        teaches: [S] bool, True if the completion is trained and its advantage is not 0.
        success: score from which a completion is right.
    """
    groups = Groups(group_ids)
    has_signal = groups.max(teaches.double()) > 0
    is_solved = ~has_signal & (groups.min(scores) >= success)
    with_signal, solved = (groups.number[which].unique().numel() for which in (has_signal, is_solved))
    good, total = with_signal + solved, groups.number.unique().numel()
    return Signal(with_signal / good if good else 1.0, good / total if total else 1.0)


# -- estimators --------------------------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Terms of the formulas, [S] each, float64 except for the two bools."""

    groups: Groups
    rewards: Tensor
    """0 if missing."""
    scored: Tensor
    """True if the completion has a reward."""
    trains: Tensor
    """True if the completion has a reward and its group has two different ones."""
    num_scored: Tensor
    """Scored completions of the group, n."""
    mean: Tensor
    tokens: Tensor
    """Trained tokens of each scored completion, else 0."""


ESTIMATORS: dict[str, Callable[..., Tensor]] = {}
"""Estimators by name, with the constants of their papers: `ESTIMATORS["grpo"](rewards, group_ids)`. All accept `lengths` and
`baseline_rewards`."""


def estimator(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register a formula of `Scores`. It runs without gradient, and counts where a group has a signal."""

    @wraps(formula)
    @torch.no_grad()
    def of_rewards(
        rewards: Tensor,
        group_ids: Tensor,
        *,
        lengths: Tensor | None = None,
        baseline_rewards: Tensor | None = None,
    ) -> Tensor:
        scores = _scores(rewards, group_ids, torch.ones_like(rewards) if lengths is None else lengths)
        return _of_trained(scores, formula(scores))

    ESTIMATORS[formula.__name__] = of_rewards
    return of_rewards


def _scores(rewards: Tensor, group_ids: Tensor, lengths: Tensor) -> Scores:
    rewards, groups = rewards.to(torch.float64), Groups(group_ids)
    scored = ~rewards.isnan()
    known, tokens = torch.where(scored, rewards, 0.0), torch.where(scored, lengths.to(torch.float64), 0.0)
    num_scored = groups.sum(scored.to(torch.float64))
    mean = groups.sum(known) / num_scored
    return Scores(groups, known, scored, scored & has_signal(rewards, groups), num_scored, mean, tokens)


EPS = 1e-6
"""Added to a standard deviation, as in verl."""


def _of_trained(scores: Scores, values: Tensor) -> Tensor:
    """Return values where a group has a signal, else 0."""
    return torch.where(scores.trains, values, 0.0)


def _group_std(scores: Scores) -> Tensor:
    deviations = torch.where(scores.scored, scores.rewards - scores.mean, 0.0)
    peak = scores.groups.max(deviations.abs()).clamp(min=1.0)  # as `_peak`, of each group
    return peak * (scores.groups.sum((deviations / peak).square()) / (scores.num_scored - 1)).sqrt()


@torch.no_grad()
def groups_with_signal(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return [S] bool, True in groups with two different rewards. Arguments as in the module."""
    return has_signal(rewards.to(torch.float64), Groups(group_ids))


@estimator
def grpo(scores: Scores) -> Tensor:
    """A = (R - mean) / (std + EPS). Source: GRPO, arXiv:2402.03300; n - 1 and eps as in verl."""
    return (scores.rewards - scores.mean) / (_group_std(scores) + EPS)


@estimator
def dr_grpo(scores: Scores) -> Tensor:
    """A = R - mean. Source: Dr. GRPO, arXiv:2503.20783."""
    return scores.rewards - scores.mean


@estimator
def rloo(scores: Scores) -> Tensor:
    """A = R - mean of the others = n / (n - 1) (R - mean). Source: RLOO, arXiv:2402.14740."""
    others = scores.groups.sum(scores.rewards) - scores.rewards
    return scores.rewards - others / (scores.num_scored - 1)


@estimator
def lite(scores: Scores) -> Tensor:
    """A = (R - mean) / (std of the batch + EPS), over all scored completions of the batch, singletons included.

    Source: Lite PPO in "Tricks or Traps", arXiv:2508.08221.
    """
    batch_size = scores.scored.sum().to(torch.float64)
    deviations = torch.where(scores.scored, scores.rewards - scores.rewards.sum() / batch_size, 0.0)
    peak = _peak(deviations)
    std = peak * ((deviations / peak).square().sum() / (batch_size - 1)).sqrt()
    return (scores.rewards - scores.mean) / (std + EPS)


@estimator
def max_rl(scores: Scores) -> Tensor:
    """A = (R - mean) / mean, and 0 where mean <= 0: hard prompts get a larger weight.

    For rewards >= 0 only, because the mean of mixed signs can be close to 0.

    Source: MaxRL, arXiv:2602.02710; the rule for mean <= 0 as in prime-rl.
    """
    positive = torch.where(scores.mean > 0, scores.mean, torch.inf)
    return (scores.rewards - scores.mean) / positive


@estimator
def opo(scores: Scores) -> Tensor:
    """A = R - Σ length R / Σ length over the group; 0 if all scored completions of the group are empty.

    Source: OPO, arXiv:2505.23585: the minimum-variance baseline if the gradient norm grows with the length.
    """
    total = scores.groups.sum(scores.tokens)
    baseline = torch.where(total > 0, scores.groups.sum(scores.tokens * scores.rewards) / total, scores.rewards)
    return scores.rewards - baseline


@estimator
def gpg(scores: Scores) -> Tensor:
    """A = alpha (R - mean), alpha = B / number of nonzero rewards, both over the scored completions of the batch.

    Source: GPG, arXiv:2504.02546; alpha as in verl.
    """
    alpha = scores.scored.sum().to(torch.float64) / (scores.rewards != 0).sum()
    return alpha * (scores.rewards - scores.mean)


@estimator
def pass_at_k(scores: Scores) -> Tensor:
    """The best completion of a group: A = (R_max - R_2nd) / (std + EPS); all others 0.

    R_2nd is the second reward, counted with repetition. If two completions share the best reward, R_2nd = R_max and the
    group gets 0, because the group would have passed without either of them.

    Source: pass@k policy optimisation, arXiv:2503.19595; as in verl.
    """
    ranked = torch.where(scores.scored, scores.rewards, -torch.inf)
    is_best = ranked == scores.groups.max(ranked)
    is_only_best = is_best & (scores.groups.sum(is_best.to(torch.float64)) == 1)
    second = scores.groups.max(ranked.masked_fill(is_best, -torch.inf))
    return torch.where(is_only_best, (scores.rewards - second) / (_group_std(scores) + EPS), 0.0)


@estimator
def reinforce_plus_plus_baseline(scores: Scores) -> Tensor:
    """R - mean, whitened over all trained tokens of the batch.

        x = R - mean                           0 in a group with fewer than two rewards, or with equal ones
        A = (x - m) / sqrt(v + 1e-8)           m, v (N - 1 in the denominator) over N tokens; A = 0 if N < 2

    The tokens of a sequence share one x, so m and v are mean and variance over the scored sequences, weighted by length.

    Whitening would give a group without signal the value -m / sqrt(v + 1e-8), an equal push for all its completions. With
    group means removed from x, m is only the correlation of length and reward on other prompts. So such a group counts in m
    and v but keeps its exact 0.

    Source: REINFORCE++, arXiv:2501.03262; denominators and eps as in verl.
    """
    centred = _of_trained(scores, scores.rewards - scores.mean)
    return standardised(centred, scores.tokens)


@torch.no_grad()
def remax(rewards: Tensor, group_ids: Tensor, *, baseline_rewards: Tensor, lengths: Tensor | None = None) -> Tensor:
    """A = R - R_greedy; 0 where either is NaN.

    The baseline is independent of the group, so one completion is enough, and equal rewards may differ from it.

    Args:
        group_ids, lengths: unused; part of the common signature.
        baseline_rewards: [S] reward of the greedy completion of the same prompt; NaN if missing.
    Source:
        ReMax, arXiv:2310.10505.
    """
    del group_ids, lengths
    difference = rewards.to(torch.float64) - baseline_rewards.to(torch.float64)
    return torch.where(difference.isnan(), 0.0, difference)


ESTIMATORS["remax"] = remax


@torch.no_grad()
def standardised(values: Tensor, weights: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(variance + 1e-8), where each value counts for `weights` tokens.

        mean = Σ w x / N        variance = Σ w (x - mean)² / (N - 1)        N = Σ w

    Args:
        values: [*] any float; values of weight 0 are not in the statistics.
        weights: [*] number of tokens, 0 or more.
    Returns:
        [*] float64; 0 everywhere if N < 2.
    """
    values, weights = values.to(torch.float64), weights.to(torch.float64)
    counted = torch.where(weights > 0, values, 0.0)
    total = weights.sum()
    mean = (weights * counted).sum() / total
    deviations = torch.where(weights > 0, counted - mean, 0.0)
    peak = _peak(deviations)
    variance = (weights * (deviations / peak).square()).sum() / (total - 1)
    return torch.where(total >= 2, (values - mean) / peak * torch.rsqrt(variance + 1e-8 / peak.square()), 0.0)


def _peak(deviations: Tensor) -> Tensor:
    """Return [] the largest deviation, at least 1: dividing by it before squaring prevents overflow."""
    return torch.cat([deviations.abs().flatten(), deviations.new_ones(1)]).max()
