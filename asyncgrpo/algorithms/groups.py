"""Statistics over the answers to one prompt, for groups of any size, in any order, under any ids."""

import torch
from torch import Tensor


class Groups:
    """Who is in a group with whom. Every statistic is [S]: what each answer sees of its own group."""

    number: Tensor
    """[S] the answer's group, counted from 0."""

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
    """[S] bool: the group has two different rewards. `rewards` is float64, NaN where an answer has none.

    Largest and smallest are compared because that is exact, where a standard deviation of equal numbers is not: in
    float32, fifteen rewards of 0.98 have one of 6e-8.
    """
    missing = rewards.isnan()
    return groups.max(rewards.masked_fill(missing, -torch.inf)) > groups.min(rewards.masked_fill(missing, torch.inf))


def signal_share(rewards: Tensor, group_ids: Tensor, teaches: Tensor) -> float:
    """Of the groups that are solved or have a signal, how many have a signal; 1 where there are neither.

    A group is solved if all its rewards are equal and nearer to the best reward of the batch than to the worst; where the
    whole batch has one reward, if that is above 0. A group that is equally bad in all its answers is neither: it has
    nothing to lose.

    Args:
        rewards: [S] float64, finite.
        group_ids: [S] integers; answers to one prompt have the same.
        teaches: [S] bool, the answer is trained and its advantage is not 0.
    """
    if not rewards.numel():
        return 1.0
    groups = Groups(group_ids)
    best, worst = rewards.max(), rewards.min()
    is_good = groups.min(rewards) > ((best + worst) / 2 if best > worst else 0.0)
    has_signal = groups.max(teaches.double()) > 0
    is_solved = ~has_signal & is_good & (groups.min(rewards) == groups.max(rewards))
    with_signal, solved = (groups.number[which].unique().numel() for which in (has_signal, is_solved))
    return with_signal / (with_signal + solved) if with_signal + solved else 1.0
