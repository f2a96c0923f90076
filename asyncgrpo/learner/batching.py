"""Groups become packed micro-batches for every rank.

Every rank calls `pack` with the same groups and builds its own share, without communication. Every trained token is in
exactly one micro-batch of one rank, no answer is split, and all ranks get the same number of micro-batches, because a
sharded model runs its collectives in each. Advantages are computed here, from whole groups, before anything is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from asyncgrpo.algorithms.advantages import Scale, group_advantages, groups_with_signal
from asyncgrpo.types import Completion, Group, Rollout, WeightVersion

AnswerKey = tuple[str, int]
"""group_id, and the index of the answer in its group."""


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: S prompts with their answers, one after the other. T tokens, no padding."""

    token_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64, from 0 in every sequence."""
    cu_seqlens: Tensor
    """[S+1] int32, where each sequence starts; the last is T."""
    mask: Tensor
    """[T] bool, true on sampled tokens. Never true on the first token of a sequence."""
    behaviour_logprobs: Tensor
    """[T] float32, nats, as the generator sampled them; 0 where mask is false."""
    advantages: Tensor
    """[T] float32, the answer's on its sampled tokens; 0 where mask is false."""
    is_current: Tensor
    """[T] bool, true on the tokens of answers that the learner's present weights sampled from first to last."""

    @property
    def lengths(self) -> Tensor:
        """[S] tokens of each sequence."""
        return self.cu_seqlens.diff()

    def to(self, device: torch.device) -> "PackedBatch":
        """The same on another device."""
        return PackedBatch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of a step, and the counts of the whole step, which are the same on all ranks."""

    trained: tuple[PackedBatch, ...]
    """Micro-batches to run forward and backward; at least one, perhaps of no answer."""
    silent: tuple[PackedBatch, ...]
    """Micro-batches whose gradient is zero for certain: forward only, for the report."""
    num_tokens: int
    """Sampled tokens in all micro-batches of all ranks."""
    num_answers: int
    """Usable answers of the step; one without tokens counts."""
    num_unusable: int
    """Answers left out: without a score, aborted, or with a behaviour log-prob that is not a number."""
    zero_signal_groups: int
    """Groups whose usable answers all have the same reward, or that have fewer than two."""
    advantages: dict[AnswerKey, float]
    """Of the usable answers."""


@dataclass(frozen=True)
class _Answer:
    prompt: np.ndarray
    completion: Completion
    advantage: float

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion.token_ids)


def pack(
    groups: Sequence[Group],
    version: WeightVersion,
    *,
    rank: int,
    world: int,
    tokens_per_microbatch: int,
    scale: Scale = "group_std",
    padded: bool = True,
    skip_silent: bool = False,
) -> StepBatch:
    """This rank's micro-batches of a step.

    Args:
        groups: all groups of the step, the same on every rank.
        version: the learner's weights, to mark the tokens that they sampled.
        rank, world: this rank, and how many there are.
        tokens_per_microbatch: budget of one micro-batch; only a single longer sequence may exceed it.
        scale: of `group_advantages`.
        padded: sequences are run as a rectangle, whose area counts against the budget; false: end to end.
        skip_silent: answers with advantage 0 have no gradient (no KL and no entropy in the loss): set them apart.
    """
    answers, keys, zero_signal_groups, num_unusable = _read(groups, scale)
    present = [a for a in answers if len(a.completion.token_ids)]
    silent = [a for a in present if skip_silent and a.advantage == 0]
    trained = [a for a in present if not (skip_silent and a.advantage == 0)]

    def share(chosen: list[_Answer]) -> tuple[PackedBatch, ...]:
        bins = spread([len(a) for a in chosen], world, tokens_per_microbatch, padded=padded)
        return tuple(_pack([chosen[i] for i in members], version) for members in bins[rank])

    return StepBatch(
        trained=share(trained) or (_pack([], version),),
        silent=share(silent),
        num_tokens=sum(len(a.completion.token_ids) for a in present),
        num_answers=len(answers),
        num_unusable=num_unusable,
        zero_signal_groups=zero_signal_groups,
        advantages={key: answer.advantage for key, answer in zip(keys, answers, strict=True)},
    )


def spread(lengths: Sequence[int], world: int, budget: int, *, padded: bool) -> list[list[list[int]]]:
    """Deal sequences to ranks and micro-batches: `[world][micro-batch]` lists of indices into `lengths`.

    Sequences are sorted by length and cut into runs, so that those of a micro-batch are about equally long: a rectangle
    then wastes little, and the k-th micro-batches of all ranks, which wait for one another, take about the same time.
    There are as few micro-batches as the budget allows; then the largest is made as small as that number allows. Ranks
    that get fewer are given empty ones.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    descending = [lengths[i] for i in order]
    per_rank = -(-len(_cut(descending, budget, padded)) // world)
    low, high = 1, budget  # the smallest capacity that needs no more runs than there are micro-batches
    while low < high:
        middle = (low + high) // 2
        if len(_cut(descending, middle, padded)) <= per_rank * world:
            high = middle
        else:
            low = middle + 1
    bins: list[list[list[int]]] = [[[] for _ in range(per_rank)] for _ in range(world)]
    for number, (start, end) in enumerate(_cut(descending, low, padded)):
        bins[number % world][number // world] = order[start:end]
    return bins


def _cut(descending: list[int], capacity: int, padded: bool) -> list[tuple[int, int]]:
    """Cut sorted lengths into runs `[start, end)` that cost at most `capacity` (or have one member)."""
    runs, start, total = [], 0, 0
    for i, length in enumerate(descending):
        total += length
        cost = (i - start + 1) * descending[start] if padded else total
        if cost > capacity and i > start:
            runs.append((start, i))
            start, total = i, length
    if descending:
        runs.append((start, len(descending)))
    return runs


def _read(groups: Sequence[Group], scale: Scale) -> tuple[list[_Answer], list[AnswerKey], int, int]:
    """Usable answers with advantages, their keys, the number of groups without signal, and of answers left out."""
    rollouts = [(number, group, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    rewards = torch.tensor([_reward(rollout) for _, _, rollout in rollouts], dtype=torch.float64)
    group_ids = torch.tensor([number for number, _, _ in rollouts], dtype=torch.int64)
    advantages = group_advantages(rewards, group_ids, scale=scale).tolist()
    with_signal = group_ids[groups_with_signal(rewards, group_ids)].unique().numel()
    prompts = [np.asarray(group.prompt.token_ids, dtype=np.int64) for group in groups]
    assert all(len(prompt) for prompt in prompts), "a prompt without tokens gives its answer's first token no context"
    answers, keys = [], []
    is_usable = (~rewards.isnan()).tolist()
    for (number, group, rollout), advantage, usable in zip(rollouts, advantages, is_usable, strict=True):
        if usable:
            answers.append(_Answer(prompts[number], rollout.completion, advantage))
            keys.append((group.group_id, rollout.completion.index))
    return answers, keys, len(groups) - with_signal, len(rollouts) - len(answers)


def _reward(rollout: Rollout) -> float:
    """NaN where the answer takes no part in training."""
    completion, value = rollout.completion, rollout.score.value
    if value is None or completion.finish_reason == "abort" or np.isnan(completion.logprobs).any():
        return float("nan")
    return value


def _pack(answers: list[_Answer], version: WeightVersion) -> PackedBatch:
    """One micro-batch. Without answers it holds one sequence that trains nothing, so that the model can run it."""
    if not answers:
        nothing = Completion(0, np.zeros(0, np.int32), np.zeros(0, np.float32), (), "stop")
        answers = [_Answer(np.zeros(2, np.int64), nothing, 0.0)]
    lengths = np.array([len(a) for a in answers])
    sampled = np.array([len(a.completion.token_ids) for a in answers])
    starts = np.concatenate([[0], lengths.cumsum()])
    position_ids = np.arange(starts[-1]) - starts[:-1].repeat(lengths)
    mask = position_ids >= (lengths - sampled).repeat(lengths)

    def on_sampled(values: np.ndarray) -> Tensor:
        tokens = np.zeros(len(mask), values.dtype)
        tokens[mask] = values
        return torch.from_numpy(tokens)

    return PackedBatch(
        token_ids=torch.from_numpy(np.concatenate([x for a in answers for x in (a.prompt, a.completion.token_ids)])),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        mask=torch.from_numpy(mask),
        behaviour_logprobs=on_sampled(np.concatenate([a.completion.logprobs for a in answers]).astype(np.float32)),
        advantages=on_sampled(np.array([a.advantage for a in answers], np.float32).repeat(sampled)),
        is_current=on_sampled(np.concatenate([_is_current(a.completion, version) for a in answers])),
    )


def _is_current(completion: Completion, version: WeightVersion) -> np.ndarray:
    """[L] bool: all true if `version` sampled the answer from its first token to its last, else all false.

    An answer that began under older weights may go on with their keys and values: its later tokens are not what these
    weights alone would say, so they tell nothing of how well two kernels agree.
    """
    return np.full(len(completion.token_ids), all(span.version == version for span in completion.spans))
