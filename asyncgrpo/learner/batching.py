"""Groups become packed micro-batches for every rank.

Every rank calls `pack` with the same groups and builds its own share, without communication. Every sampled token of a
usable answer is in exactly one micro-batch of one rank, no answer is split, and all ranks get the same number of
micro-batches, because a sharded model runs its collectives in each. Advantages are made of whole groups, before
anything is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncgrpo.algorithms.advantages import groups_with_signal
from asyncgrpo.algorithms.groups import signal_share
from asyncgrpo.learner.answers import CRITIC, UNSHAPED, Answers, Shaping, read_answers
from asyncgrpo.learner.attention import Family, Segments
from asyncgrpo.learner.packing import rows_for_ranks
from asyncgrpo.types import Completion, Group, WeightVersion


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: T tokens that the model runs on, without padding, and the N sampled tokens that they predict.

    The last token of an answer predicts nothing and is not run; a prompt that several answers share is run once.
    """

    token_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64, from 0 in every sequence."""
    segments: Segments
    """Which tokens attend to which."""
    read_at: Tensor
    """[N] int64, in T: the token before each sampled token."""
    targets: Tensor
    """[N] int64, the sampled tokens."""
    cu_seqlens: Tensor
    """[S+1] int64, where each answer starts in N; the last is N."""
    mask: Tensor
    """[N] bool, false on answers that are only compared with."""
    behaviour_logprobs: Tensor
    """[N] float32, nats, as the generator sampled them."""
    advantages: Tensor
    """[N] float32, the answer's."""
    versions: Tensor
    """[N] int64, the number of the weights that sampled each token."""
    is_current: Tensor
    """[N] bool, true on the tokens of answers that the learner's present weights sampled from first to last."""
    answers: Tensor
    """[S] int64, which of the step's answers each is."""
    tokens_in_group: Tensor
    """[S] int64, trained tokens of all answers of the same group, in the whole step."""

    def to(self, device: torch.device) -> "PackedBatch":
        """The same on another device."""
        moved: dict[str, Any] = {f.name: _moved(getattr(self, f.name), device) for f in fields(self)}
        return PackedBatch(**moved)

    def with_advantages(self, advantages: Tensor) -> "PackedBatch":
        """The same with the advantages [N] of its tokens."""
        return replace(self, advantages=advantages.to(self.mask.device, torch.float32))


def _moved(value: Tensor | Segments, device: torch.device) -> Tensor | Segments:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of a minibatch, and the counts of the whole, which are the same on all ranks."""

    trained: tuple[PackedBatch, ...]
    """Micro-batches to run forward and backward; at least one, perhaps of no answer."""
    silent: tuple[PackedBatch, ...]
    """Micro-batches whose gradient is zero for certain: forward only, for the report."""
    answers: Answers
    """All usable answers, of all ranks."""
    num_tokens: int
    """Trained tokens in all micro-batches of all ranks."""
    num_answers: int
    """Trained answers; one without tokens counts."""
    num_groups: int
    """Groups with a trained token."""
    zero_signal_groups: int
    """Groups whose usable answers all have the same reward, or that have fewer than two."""
    signal_share: float
    """Of the groups that are solved or have a signal, how many have a signal (`algorithms.groups`). Of a critic: 1."""
    advantages: Tensor
    """[A] float64. Of a critic: the mean over the answer's tokens."""

    def with_advantages(self, advantages: Tensor, of_microbatches: Sequence[Tensor]) -> "StepBatch":
        """The same with other advantages: of the answers [A], and of the tokens [N] of each trained micro-batch."""
        trained = tuple(m.with_advantages(a) for m, a in zip(self.trained, of_microbatches, strict=True))
        return replace(self, trained=trained, advantages=advantages)


def pack(
    groups: Sequence[Group],
    version: WeightVersion | None,
    *,
    rank: int,
    world: int,
    tokens_per_microbatch: int,
    advantage: str = "grpo",
    group_size: int | None = None,
    shaping: Shaping = UNSHAPED,
    share_prompts: bool = True,
    pair_cost: float = 0.0,
    skip_silent: bool = False,
) -> StepBatch:
    """This rank's micro-batches of a minibatch.

    Args:
        groups: all groups of the minibatch, the same on every rank.
        version: the learner's weights, to mark the tokens that they sampled; none: mark none.
        rank, world: this rank, and how many there are.
        tokens_per_microbatch: budget of one micro-batch; only a single longer sequence may exceed it.
        advantage: a name in `algorithms.advantages.ESTIMATORS`, or `gae`, which leaves 0 for the critic to replace.
        group_size: answers from this index on are greedy baselines; none: there are none.
        shaping: of the rewards.
        share_prompts: compute a prompt once for the answers to it in one micro-batch.
        pair_cost: cost of a query-key pair of attention, in tokens, to deal micro-batches of like cost to the ranks.
        skip_silent: answers with advantage 0 have no gradient: set them apart.
    """
    largest = max((len(group.rollouts) for group in groups), default=0)
    answers = read_answers(groups, group_size=largest if group_size is None else group_size, shaping=shaping)
    advantages = answers.advantages(advantage)
    in_group = torch.zeros(len(groups), dtype=torch.int64)
    in_group.index_add_(0, answers.groups, answers.lengths * answers.is_trained)
    rows = _Rows(groups, answers, advantages, in_group[answers.groups], version, share_prompts)
    is_silent = (advantages == 0) & skip_silent

    def share(wanted: Tensor) -> tuple[PackedBatch, ...]:
        dealt = rows.deal(wanted & (answers.lengths > 0), world, tokens_per_microbatch, pair_cost)
        return tuple(rows.build(row) for row in dealt[rank])

    with_signal = groups_with_signal(answers.rewards, answers.groups)
    teaches = (advantages != 0) & answers.is_trained & (answers.lengths > 0)
    return StepBatch(
        trained=share(~is_silent) or (rows.build([]),),
        silent=share(is_silent),
        answers=answers,
        num_tokens=int(in_group.sum()),
        num_answers=int(answers.is_trained.sum()),
        num_groups=int((in_group > 0).sum()),
        zero_signal_groups=len(groups) - answers.groups[with_signal].unique().numel(),
        signal_share=1.0 if advantage == CRITIC else signal_share(answers.rewards, answers.groups, teaches),
        advantages=advantages,
    )


class _Rows:
    """Builds micro-batches of the answers of a minibatch."""

    def __init__(
        self,
        groups: Sequence[Group],
        answers: Answers,
        advantages: Tensor,
        tokens_in_group: Tensor,
        version: WeightVersion | None,
        share_prompts: bool,
    ) -> None:
        self.prompts = [np.asarray(group.prompt.token_ids, dtype=np.int64) for group in groups]
        self.answers, self.advantages, self.tokens_in_group = answers, advantages, tokens_in_group
        self.version, self.share_prompts = version, share_prompts

    def deal(self, wanted: Tensor, world: int, budget: int, pair_cost: float) -> list[list[list[list[int]]]]:
        """`[world][micro-batch][piece]` lists of answers; those of a piece have the same prompt."""
        members: list[list[int]] = [[] for _ in self.prompts]
        for answer in wanted.nonzero().squeeze(-1).tolist():
            members[int(self.answers.groups[answer])].append(answer)
        lengths = self.answers.lengths.tolist()
        dealt = rows_for_ranks(
            [len(prompt) for prompt in self.prompts],
            [[lengths[answer] - 1 for answer in group] for group in members],
            world=world,
            budget=budget,
            share_prompts=self.share_prompts,
            pair_cost=pair_cost,
        )
        return [[[[members[p.group][a] for a in p.answers] for p in row] for row in rows] for rows in dealt]

    def build(self, pieces: list[list[int]]) -> PackedBatch:
        """One micro-batch. Without answers it has one token, which nothing reads, so that the model can run it."""
        layout = _Layout()
        for piece in pieces:
            prompt = self.prompts[int(self.answers.groups[piece[0]])]
            layout.add(prompt, [self.answers.completions[answer].token_ids for answer in piece], self.share_prompts)
        if not pieces:
            layout.add(np.zeros(1, np.int64), [], True)
        chosen = [answer for piece in pieces for answer in piece]
        index = torch.tensor(chosen, dtype=torch.int64)
        completions = [self.answers.completions[answer] for answer in chosen]
        lengths = self.answers.lengths[index]
        return PackedBatch(
            token_ids=_joined(layout.token_ids, np.int64),
            position_ids=_joined(layout.position_ids, np.int64),
            segments=Segments.of(layout.families),
            read_at=_joined(layout.read_at, np.int64),
            targets=_joined([c.token_ids for c in completions], np.int64),
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            mask=self.answers.is_trained[index].repeat_interleave(lengths),
            behaviour_logprobs=_joined([c.logprobs for c in completions], np.float32),
            advantages=self.advantages[index].repeat_interleave(lengths).float(),
            versions=_joined([_versions(c) for c in completions], np.int64),
            is_current=torch.tensor(
                [_is_current(c, self.version) for c in completions], dtype=torch.bool
            ).repeat_interleave(lengths),
            answers=index,
            tokens_in_group=self.tokens_in_group[index],
        )


class _Layout:
    """Where the tokens of a row lie."""

    def __init__(self) -> None:
        self.size = 0
        self.token_ids: list[np.ndarray] = []
        self.position_ids: list[np.ndarray] = []
        self.read_at: list[np.ndarray] = []
        self.families: list[Family] = []

    def add(self, prompt: np.ndarray, answers: Sequence[np.ndarray], share_prompt: bool) -> None:
        """A prompt and the answers to it: the prompt once, or each answer after a prompt of its own."""
        if share_prompt and len(answers) != 1:
            start = self._run(prompt, 0)
            prefix = (start, self.size)
            self.families.append(Family((start, start), prefix))
            bounds = [self.size]
            for answer in answers:
                first = self._run(answer[:-1], len(prompt))
                self.read_at.append(np.concatenate([[prefix[1] - 1], np.arange(first, self.size)]))
                bounds += [self.size] * (self.size > first)
            if len(bounds) > 1:
                self.families.append(Family(prefix, tuple(bounds)))
        else:
            for answer in answers:
                first = self._run(np.concatenate([prompt, answer[:-1]]), 0)
                self.read_at.append(np.arange(first + len(prompt) - 1, self.size))
                self.families.append(Family((first, first), (first, self.size)))

    def _run(self, token_ids: np.ndarray, position: int) -> int:
        """Append tokens; where they start."""
        self.token_ids.append(token_ids)
        self.position_ids.append(np.arange(position, position + len(token_ids)))
        self.size += len(token_ids)
        return self.size - len(token_ids)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False))


def _versions(completion: Completion) -> np.ndarray:
    """[L] number of the weights that sampled each token."""
    return np.concatenate([np.full(span.end - span.start, span.version.version) for span in completion.spans])


def _is_current(completion: Completion, version: WeightVersion | None) -> bool:
    """True if `version` sampled the answer from its first token to its last.

    An answer that began under older weights may go on with their keys and values: its later tokens are not what these
    weights alone would say, so they tell nothing of how well two kernels agree.
    """
    return all(span.version == version for span in completion.spans)
