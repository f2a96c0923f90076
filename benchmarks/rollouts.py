"""Groups of rollouts with lengths of a long tail, for benchmarks of what happens to them after sampling.

Nothing generates them: tokens are random, log-probs those of a random model, rewards such that no group is without a
signal. So every completion is trained, and the measurement does not depend on luck.
"""

from dataclasses import dataclass

import numpy as np

from asyncgrpo.types import Completion, Group, PolicyVersion, Prompt, Rollout, Score, VersionSpan

VERSION = PolicyVersion(1, 0)
"""The policy version that sampled all of them."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of some groups, in tokens."""

    prompts: list[int]
    completions: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and completions, a prompt counted for each of its completions."""
        return sum(p * len(a) + sum(a) for p, a in zip(self.prompts, self.completions, strict=True))


def reasoning_lengths(
    groups: int | None = None,
    *,
    seed: int,
    size: int = 8,
    prompt: tuple[int, int] = (64, 256),
    median: float = 700,
    sigma: float = 0.9,
    longest: int = 8192,
    tokens: int | None = None,
) -> Lengths:
    """Prompts of `prompt` tokens, completions lognormal between 8 and `longest`; their mean is about 1,050.

    Args:
        groups: how many; none: as many as have `tokens` tokens.
        size: completions of each prompt.
    """
    rng = np.random.default_rng(seed)
    found = Lengths([], [])
    while len(found.prompts) < groups if groups is not None else found.num_tokens < (tokens or 1):
        drawn = np.exp(rng.normal(np.log(median), sigma, size)).astype(int).clip(8, longest)
        found.prompts.append(int(rng.integers(prompt[0], prompt[1] + 1)))
        found.completions.append(drawn.tolist())
    return found


def make_groups(lengths: Lengths, *, vocabulary: int, seed: int) -> list[Group]:
    """Random groups of those lengths; in each, every second completion is right."""
    rng = np.random.default_rng([seed, 1])
    groups = []
    for number, (prompt, completions) in enumerate(zip(lengths.prompts, lengths.completions, strict=True)):
        rollouts = tuple(_rollout(rng, index, length, vocabulary) for index, length in enumerate(completions))
        groups.append(
            Group(
                group_id=f"g{number}",
                lease_id=f"l{number}",
                attempt=0,
                prompt_index=number,
                purpose="train",
                prompt=Prompt(prompt_id=f"p/{number}", token_ids=tuple(rng.integers(0, vocabulary, prompt).tolist())),
                rollouts=rollouts,
            )
        )
    return groups


def _rollout(rng: np.random.Generator, index: int, length: int, vocabulary: int) -> Rollout:
    completion = Completion(
        index=index,
        token_ids=rng.integers(0, vocabulary, length, dtype=np.int32),
        logprobs=rng.normal(-np.log(vocabulary), 0.05, length).astype(np.float32),
        spans=(VersionSpan(VERSION, 0, length),),
        finish_reason="stop",
    )
    return Rollout(completion, Score(value=float(index % 2)))
