"""The usable answers of a minibatch and their rewards: what advantages are made of.

All ranks hold all of them, so advantages need no communication unless the reward itself does (a KL in the reward, a
critic).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncgrpo.algorithms.advantages import ESTIMATORS
from asyncgrpo.algorithms.shaping import TruncationRule, apply_truncation, overlong_penalty
from asyncgrpo.types import Completion, Group, Rollout

CRITIC = "gae"
"""The advantage that a critic makes; the others are functions of rewards."""


LEAST_LOGPROB = -1e4
"""Nats. No sampler in float32 draws a token that is less likely."""
ROUNDING = 1e-2
"""Nats that the log-prob of a certain token may be above 0."""


class Shaping(NamedTuple):
    """What happens to rewards before they are compared."""

    truncated: TruncationRule = "keep"
    """What becomes of an answer cut at the longest length: `keep`, `mask` or `zero`."""
    longest: int = 0
    """Tokens at which an answer is cut."""
    overlong_buffer: int = 0
    """Tokens before that in which a penalty grows; 0: no penalty."""
    overlong_factor: float = 1.0
    """The penalty at `longest`."""


UNSHAPED = Shaping()


class Answers(NamedTuple):
    """A usable answers, in the order of their groups."""

    completions: tuple[Completion, ...]
    keys: tuple[tuple[str, int], ...]
    """group_id, and the index of the answer in its group."""
    groups: Tensor
    """[A] int64, number of the group, from 0."""
    rewards: Tensor
    """[A] float64, shaped."""
    baseline_rewards: Tensor
    """[A] float64, of the greedy answer to the same prompt; NaN where there is none."""
    lengths: Tensor
    """[A] int64, sampled tokens."""
    is_trained: Tensor
    """[A] bool; the others are only compared with."""
    num_unusable: int
    """Answers left out: without a finite score, aborted, or malformed."""
    num_malformed: int
    """Of these, answers with a behaviour log-prob that cannot be one."""

    def advantages(self, estimator: str, rewards: Tensor | None = None) -> Tensor:
        """[A] float64 by the estimator of that name, of these rewards or of others; 0 where a critic is to say."""
        if estimator == CRITIC:
            return torch.zeros_like(self.rewards)
        rewards = self.rewards if rewards is None else rewards
        return ESTIMATORS[estimator](rewards, self.groups, lengths=self.lengths, baseline_rewards=self.baseline_rewards)


def read_answers(groups: Sequence[Group], *, group_size: int, shaping: Shaping) -> Answers:
    """The usable answers of `groups`.

    Args:
        group_size: an answer with this index or a higher one is greedy, a baseline that is not trained.
        shaping: of the rewards.
    """
    assert all(g.prompt.token_ids for g in groups), "a prompt without tokens gives its answer's first token no context"
    found = [
        (number, group.group_id, rollout, _reward(rollout))
        for number, group in enumerate(groups)
        for rollout in group.rollouts
    ]
    greedy = {number: reward for number, _, r, reward in found if r.completion.index >= group_size}
    sampled = [entry for entry in found if entry[2].completion.index < group_size]
    usable = [entry for entry in sampled if not np.isnan(entry[3])]
    completions = tuple(rollout.completion for _, _, rollout, _ in usable)
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    rewards = torch.tensor([reward for *_, reward in usable], dtype=torch.float64)
    if shaping.overlong_buffer:
        rewards = rewards + overlong_penalty(
            lengths, max_length=shaping.longest, buffer=shaping.overlong_buffer, factor=shaping.overlong_factor
        )
    is_cut = torch.tensor([c.finish_reason == "length" for c in completions], dtype=torch.bool)
    rewards, is_trained = apply_truncation(rewards, is_cut, rule=shaping.truncated)
    return Answers(
        completions=completions,
        keys=tuple((group_id, rollout.completion.index) for _, group_id, rollout, _ in usable),
        groups=torch.tensor([number for number, *_ in usable], dtype=torch.int64),
        rewards=rewards,
        baseline_rewards=torch.tensor([greedy.get(number, np.nan) for number, *_ in usable], dtype=torch.float64),
        lengths=lengths,
        is_trained=is_trained,
        num_unusable=len(sampled) - len(usable),
        num_malformed=sum(_is_malformed(rollout.completion) for _, _, rollout, _ in sampled),
    )


def _reward(rollout: Rollout) -> float:
    """NaN where the answer takes no part in training."""
    completion, value = rollout.completion, rollout.score.value
    if value is None or not math.isfinite(value) or completion.finish_reason == "abort" or _is_malformed(completion):
        return math.nan
    return value


def _is_malformed(completion: Completion) -> bool:
    """Whether a number that came as a behaviour log-prob is none: not finite, above 0, or of what is never sampled."""
    return not bool(((completion.logprobs >= LEAST_LOGPROB) & (completion.logprobs <= ROUNDING)).all())
