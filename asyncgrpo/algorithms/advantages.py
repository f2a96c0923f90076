"""From the rewards of a group to the advantage of each of its answers.

Every group estimator is a baseline times a scale. The edge cases are part of the formula: an answer without a reward
takes part in no statistic and gets 0, a group with fewer than two rewards gets 0, and equal rewards give exactly 0.
"""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group_mean"]
Scale = Literal["group_std", "none"]


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "group_std",
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of each answer relative to the other answers to its prompt.

        A_i = (R_i - mean_g) / (std_g + eps)        scale "group_std": GRPO
        A_i =  R_i - mean_g                         scale "none": Dr. GRPO

    The mean and the standard deviation (n - 1 in the denominator) are over the scored answers of the group, in float64.

    Args:
        rewards: [S] one reward per answer; NaN where the answer has none.
        group_ids: [S] integers; answers to one prompt have the same. Any order, any values.
        baseline: what is subtracted.
        scale: what it is divided by.
        eps: added to the standard deviation.
    Returns:
        [S] float64, no gradient. Exactly 0 for an answer without a reward, in a group with fewer than two rewards, and
        in a group whose rewards are all equal (where rounding of the mean would otherwise be divided by eps: in
        float32, fifteen rewards of 0.98 give 0.19).
    Source:
        GRPO: arXiv:2402.03300. Dr. GRPO: arXiv:2503.20783. Denominators as in verl.
    """
    assert baseline == "group_mean" and scale in ("group_std", "none"), (baseline, scale)
    rewards = rewards.detach().to(torch.float64)
    num_groups, group = _number_groups(group_ids)
    scored = ~torch.isnan(rewards)
    count = _sum_by_group(scored.to(torch.float64), group, num_groups)
    mean = _sum_by_group(torch.where(scored, rewards, 0.0), group, num_groups) / count
    centred = rewards - mean[group]
    if scale == "group_std":
        squares = _sum_by_group(torch.where(scored, centred.square(), 0.0), group, num_groups)
        centred = centred / ((squares / (count - 1)).sqrt() + eps)[group]
    return torch.where(scored & _has_signal(rewards, scored, group, num_groups)[group], centred, 0.0)


def groups_with_signal(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Which answers are in a group with two different rewards: [S] bool. Arguments as in `group_advantages`."""
    num_groups, group = _number_groups(group_ids)
    return _has_signal(rewards, ~torch.isnan(rewards), group, num_groups)[group]


def _number_groups(group_ids: Tensor) -> tuple[int, Tensor]:
    """How many groups there are, and [S] the number of each answer's, from 0."""
    distinct, group = torch.unique(group_ids, return_inverse=True)
    return distinct.numel(), group


def _sum_by_group(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add(0, group, values)


def _has_signal(rewards: Tensor, scored: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """[G] bool: largest and smallest reward differ. Comparing them is exact where a standard deviation is not."""
    empty = rewards.new_full((num_groups,), float("nan"))
    largest = empty.scatter_reduce(0, group, torch.where(scored, rewards, -torch.inf), "amax", include_self=False)
    smallest = empty.scatter_reduce(0, group, torch.where(scored, rewards, torch.inf), "amin", include_self=False)
    return largest > smallest
