"""From rewards to advantages again, as loops over plain floats that follow the notation. No torch; slow on purpose."""

import math
import random
from typing import NamedTuple

NAN = math.nan


class Batch(NamedTuple):
    """Rollouts of several prompts, interleaved."""

    rewards: list[float]
    groups: list[int]
    lengths: list[int]
    greedy: list[float]


def batch(seed: int) -> Batch:
    """Unequal groups and every edge: a singleton, a constant group at 0.1, missing rewards, empty and short completions."""
    rng = random.Random(seed)
    by_group = [
        [rng.choice([0.0, 1.0]) for _ in range(8)],
        [rng.uniform(-1, 1) for _ in range(rng.randint(2, 5))],
        [rng.choice([0.0, 0.25, 0.5]) for _ in range(6)] + [1.0],
        [rng.uniform(0, 1) for _ in range(3)] + [NAN, 0.5],
        [-0.2, -0.7, -0.3],  # mean below 0
        [0.1] * 5,
        [0.1, NAN, 0.1, 0.1],
        [0.7],  # a singleton
        [0.9, NAN],  # one that became a singleton
        [NAN, NAN, NAN],
        [1.0, 0.0],
    ]
    ids = rng.sample(range(-1000, 1000), len(by_group))
    completions = [
        (reward, group, rng.choice([0, 1, rng.randint(2, 40)]), rng.choice([NAN, 0.0, 1.0, rng.random()]))
        for group, rewards in zip(ids, by_group, strict=True)
        for reward in rewards
    ]
    rng.shuffle(completions)
    return Batch(*(list(column) for column in zip(*completions, strict=True)))


def estimate(
    name: str, rewards: list[float], groups: list[int], lengths: list[int], greedy: list[float]
) -> list[float]:
    """The advantage of every answer by the estimator of that name, with the constants of its paper."""
    if name == "remax":
        return [0.0 if math.isnan(r) or math.isnan(b) else r - b for r, b in zip(rewards, greedy, strict=True)]
    if name == "reinforce_plus_plus_baseline":
        return _reinforce_plus_plus_baseline(rewards, groups, lengths)
    batch_rewards = [r for r in rewards if not math.isnan(r)]
    result = []
    for i, reward in enumerate(rewards):
        members = _scored_members(i, rewards, groups)
        if math.isnan(reward) or not _differ([rewards[j] for j in members]):
            result.append(0.0)
            continue
        group = [rewards[j] for j in members]
        others = [rewards[j] for j in members if j != i]
        if name == "grpo":
            a = (reward - _mean(group)) / (_std(group) + 1e-6)
        elif name == "dr_grpo":
            a = reward - _mean(group)
        elif name == "rloo":
            a = reward - _mean(others)
        elif name == "lite":
            a = (reward - _mean(group)) / (_std(batch_rewards) + 1e-6)
        elif name == "max_rl":
            a = (reward - _mean(group)) / _mean(group) if _mean(group) > 0 else 0.0
        elif name == "opo":
            tokens = sum(lengths[j] for j in members)
            a = reward - sum(lengths[j] * rewards[j] for j in members) / tokens if tokens else 0.0
        elif name == "gpg":
            alpha = len(batch_rewards) / sum(1 for r in batch_rewards if r != 0)
            a = alpha * (reward - _mean(group))
        else:
            assert name == "pass_at_k", name
            best, second = sorted(group, reverse=True)[:2]
            a = (best - second) / (_std(group) + 1e-6) if reward == best else 0.0
        result.append(a)
    return result


def _reinforce_plus_plus_baseline(rewards: list[float], groups: list[int], lengths: list[int]) -> list[float]:
    """With one number for every token of the batch, as the paper whitens."""
    centred, has_signal = [], []
    for i, reward in enumerate(rewards):
        group = [rewards[j] for j in _scored_members(i, rewards, groups)]
        has_signal.append(not math.isnan(reward) and _differ(group))
        centred.append(reward - _mean(group) if has_signal[i] else 0.0)
    tokens = [x for x, r, n in zip(centred, rewards, lengths, strict=True) if not math.isnan(r) for _ in range(n)]
    if len(tokens) < 2:
        return [0.0] * len(rewards)
    scale = math.sqrt(_std(tokens) ** 2 + 1e-8)
    return [(x - _mean(tokens)) / scale if s else 0.0 for x, s in zip(centred, has_signal, strict=True)]


def whiten(values: list[float], mask: list[bool], eps: float = 1e-8) -> list[float]:
    trained = [v for v, m in zip(values, mask, strict=True) if m]
    if len(trained) < 2:
        return [0.0] * len(values)
    scale = math.sqrt(_std(trained) ** 2 + eps)
    return [(v - _mean(trained)) / scale if m else 0.0 for v, m in zip(values, mask, strict=True)]


def gae(rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float) -> list[float]:
    """Advantages of one sequence, from its last token to its first; 0 on observation tokens."""
    advantages = [0.0] * len(values)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = advantages[t] = delta + gamma * lam * next_advantage
            next_value = values[t]
    return advantages


def pairs(rewards: list[float], groups: list[int]) -> set[tuple[int, int]]:
    """Every (winner, loser)."""
    n = range(len(rewards))
    return {(i, j) for i in n for j in n if groups[i] == groups[j] and rewards[i] > rewards[j]}


def _scored_members(i: int, rewards: list[float], groups: list[int]) -> list[int]:
    return [j for j, group in enumerate(groups) if group == groups[i] and not math.isnan(rewards[j])]


def _differ(rewards: list[float]) -> bool:
    return len(rewards) >= 2 and max(rewards) > min(rewards)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: list[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
