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
