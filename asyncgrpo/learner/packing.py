"""Packing of groups into micro-batches for every rank: usable completions, rows of about equal size, tensors.

Every rank calls `pack` with the same groups and builds its own share without communication. Every sampled token of a usable
completion is in exactly one micro-batch of one rank, unless the completion has no gradient and is skipped. No completion is
split. All ranks get the same number of micro-batches, because each runs the collectives of a sharded model. Advantages are
computed from complete groups before packing; they need communication only if the reward does (a KL in the reward, a critic).

A row is one forward and backward of one rank. Completions of one prompt stay together if possible, because a row computes
their prompt once. If no complete group fits the space left in a row, a group is divided and its prompt computed twice. Rows
depend on lengths alone, so all ranks find the same rows.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from asyncgrpo.algorithms.advantages import (
    ESTIMATORS,
    TruncationRule,
    apply_truncation,
    groups_with_signal,
    overlong_penalty,
    signal_of,
)
from asyncgrpo.config.schema import CRITIC, Config
from asyncgrpo.learner.attention import Family, Segments
from asyncgrpo.learner.head import Kept, Teacher
from asyncgrpo.types import Completion, Group, PolicyVersion, Prompt, Rollout

# -- completions and their rewards -------------------------------------------------------------------------------------

LEAST_LOGPROB = -1e4
"""Smallest valid log-prob, nats. A float32 sampler draws no token below it."""
ROUNDING = 1e-2
"""Tolerance above 0 for the log-prob of a certain token, nats."""


class Shaping(NamedTuple):
    """Shaping of rewards before they are compared."""

    truncated: TruncationRule = "keep"
    """Rule for a completion cut at the longest length: `keep`, `mask` or `zero`."""
    longest: int = 0
    """Maximum tokens of a completion, with the observations between its turns."""
    overlong_buffer: int = 0
    """Last tokens before `longest` over which a penalty grows; 0: no penalty."""
    overlong_factor: float = 1.0
    """The penalty at `longest`."""
    is_agent: bool = False
    """True if observations before the first token belong to the prompt, so that `longest` ignores them."""

    @classmethod
    def of(cls, config: Config) -> "Shaping":
        """Return the shaping of a configuration."""
        a, is_agent = config.algorithm, config.environment.agent is not None
        return cls(a.truncated, config.sampling.max_tokens, a.overlong_buffer, a.overlong_factor, is_agent)


UNSHAPED = Shaping()


class ScoredRollouts(NamedTuple):
    """A usable completions in the order of their groups."""

    completions: tuple[Completion, ...]
    keys: tuple[tuple[str, int], ...]
    """group_id, and index of the completion in its group."""
    groups: Tensor
    """[A] int64, number of the group, from 0."""
    scores: Tensor
    """[A] float64, rewards before shaping."""
    rewards: Tensor
    """[A] float64, shaped."""
    baseline_rewards: Tensor
    """[A] float64, shaped, reward of the greedy completion of the same prompt; NaN without one."""
    lengths: Tensor
    """[A] int64, sampled tokens."""
    is_trained: Tensor
    """[A] bool; the other completions only count in the statistics of their group."""
    num_malformed: int
    """Completions left out for an invalid behaviour log-prob; others have no finite score, or were aborted."""

    def advantages(self, estimator: str, rewards: Tensor | None = None) -> Tensor:
        """Return [A] float64 advantages of the named estimator, from `rewards` if given; 0 for a critic to replace."""
        if estimator == CRITIC:
            return torch.zeros_like(self.rewards)
        rewards, of_formula = self.rewards if rewards is None else rewards, ESTIMATORS[estimator]
        return of_formula(rewards, self.groups, lengths=self.lengths, baseline_rewards=self.baseline_rewards)


def read_rollouts(groups: Sequence[Group], *, group_size: int, shaping: Shaping) -> ScoredRollouts:
    """Return the usable completions of `groups`.

    Args:
        group_size: completions from this index on are greedy baselines and not trained.
        shaping: of the rewards.
    """
    assert all(g.prompt.token_ids for g in groups), (
        "a prompt has no tokens, so the first token of its completions has no context"
    )
    found = [(number, g.group_id, rollout) for number, g in enumerate(groups) for rollout in g.rollouts]
    completions = [rollout.completion for *_, rollout in found]
    of_group = torch.tensor([number for number, *_ in found], dtype=torch.int64)
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    rewards = scores = torch.tensor([_reward(rollout) for *_, rollout in found], dtype=torch.float64)
    if shaping.overlong_buffer:
        read = [sum(len(o.token_ids) for o in c.observations if o.at or not shaping.is_agent) for c in completions]
        rewards = rewards + overlong_penalty(
            lengths + torch.tensor(read, dtype=torch.int64),
            max_length=shaping.longest,
            buffer=shaping.overlong_buffer,
            factor=shaping.overlong_factor,
        )
    is_cut = torch.tensor([c.finish_reason == "length" for c in completions], dtype=torch.bool)
    rewards, is_trained = apply_truncation(rewards, is_cut, rule=shaping.truncated)
    is_greedy = torch.tensor([c.index >= group_size for c in completions], dtype=torch.bool)
    baselines = torch.full((len(groups),), torch.nan, dtype=torch.float64)
    baselines[of_group[is_greedy]] = rewards[is_greedy]
    usable = (~is_greedy & ~scores.isnan()).nonzero().squeeze(-1)
    return ScoredRollouts(
        completions=tuple(completions[i] for i in usable.tolist()),
        keys=tuple((found[i][1], completions[i].index) for i in usable.tolist()),
        groups=of_group[usable],
        scores=scores[usable],
        rewards=rewards[usable],
        baseline_rewards=baselines[of_group[usable]],
        lengths=lengths[usable],
        is_trained=is_trained[usable],
        num_malformed=sum(_is_malformed(c) for c in completions if c.index < group_size),
    )


def _reward(rollout: Rollout) -> float:
    """Return the reward; NaN if the completion is unusable."""
    completion, value = rollout.completion, rollout.score.value
    if value is None or not math.isfinite(value) or completion.finish_reason == "abort" or _is_malformed(completion):
        return math.nan
    return value


def _is_malformed(completion: Completion) -> bool:
    """Return True if a behaviour log-prob is invalid: not finite, above 0, or never sampled."""
    return not ((completion.logprobs >= LEAST_LOGPROB) & (completion.logprobs <= ROUNDING)).all()


# -- rows of about equal size ------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Completions of one prompt in one row."""

    tokens: int
    """Of the prompt and of these completions."""
    group: int
    rollouts: tuple[int, ...]
    """Indices into the lengths of that group, longest first."""


PackedRow = list[Piece]

_SLACK = (1.0, 1.01, 1.03, 1.1)
"""Row sizes to try, relative to equal shares."""

_CANDIDATES = 4
"""Number of pieces considered for division, largest first."""


def rows_for_ranks(
    prompts: Sequence[int],
    rollouts: Sequence[Sequence[int]],
    *,
    world: int,
    budget: int,
    share_prompts: bool,
    pair_cost: float = 0.0,
) -> list[list[PackedRow]]:
    """Return rows by rank, `[world][rows of a rank]`, with equal counts; empty rows fill up.

    The number of rows is the smallest multiple of `world` within the budget. The k-th rows of all ranks run in lockstep and
    cost about the same.

    Args:
        prompts: [G] tokens of each group's prompt.
        rollouts: [G] lists of the tokens of each completion.
        world: number of ranks.
        budget: maximum tokens of a row; only a single longer sequence exceeds it.
        share_prompts: True if a row computes the prompt of a group once; False: once per completion.
        pair_cost: cost of one query-key pair of attention, in tokens.
    """
    pieces = _pieces(prompts, rollouts, share_prompts)
    if not pieces:
        return [[] for _ in range(world)]
    rows = _fill(prompts, rollouts, pieces, budget)
    wanted = -(-len(rows) // world) * world
    total = sum(piece.tokens for piece in pieces)
    for slack in _SLACK:
        capacity = min(budget, int(slack * -(-total // wanted)))
        equal = _fill(prompts, rollouts, pieces, capacity)
        if len(equal) <= wanted:
            rows = equal
            break
    rows.sort(key=lambda row: -_cost(row, prompts, rollouts, pair_cost))
    rows += [[] for _ in range(wanted - len(rows))]
    return [rows[rank::world] for rank in range(world)]


def _pieces(prompts: Sequence[int], rollouts: Sequence[Sequence[int]], share_prompts: bool) -> list[Piece]:
    """Return the pieces to place into rows, smallest first."""
    pieces: list[Piece] = []
    for group, lengths in enumerate(rollouts):
        order = sorted(range(len(lengths)), key=lambda a: -lengths[a])
        if share_prompts and order:
            pieces.append(Piece(prompts[group] + sum(lengths), group, tuple(order)))
        else:
            pieces += [Piece(prompts[group] + lengths[a], group, (a,)) for a in order]
    return sorted(pieces)


def _fill(
    prompts: Sequence[int], rollouts: Sequence[Sequence[int]], pieces: list[Piece], capacity: int
) -> list[PackedRow]:
    """Fill rows of at most `capacity` tokens: the largest piece that fits, finally a part of one that does not."""
    left = list(pieces)
    rows: list[PackedRow] = []
    while left:
        row: PackedRow = []
        room = capacity
        while left:
            fitting = bisect_left(left, (room + 1,))
            part = left.pop(fitting - 1) if fitting else _divide(left, prompts, rollouts, room, is_empty=not row)
            if part is None:
                break
            row.append(part)
            room -= part.tokens
        rows.append(row)
    return rows


def _divide(
    left: list[Piece], prompts: Sequence[int], rollouts: Sequence[Sequence[int]], room: int, *, is_empty: bool
) -> Piece | None:
    """Split off the completions that fit from a piece that does not; None if no completion fits.

    An empty row takes the longest completion of the largest piece regardless of its size.
    """
    for index in range(len(left) - 1, max(-1, len(left) - 1 - _CANDIDATES), -1):
        size, group, members = left[index]
        lengths, free = rollouts[group], room - prompts[group]
        if free < lengths[members[-1]] and not is_empty:
            continue
        chosen = []
        for a in members:
            if lengths[a] <= free:
                chosen.append(a)
                free -= lengths[a]
        chosen = chosen or [members[0]]
        taken = sum(lengths[a] for a in chosen)
        del left[index]
        if len(chosen) < len(members):
            kept = tuple(a for a in members if a not in chosen)
            insort(left, Piece(size - taken, group, kept))
        return Piece(prompts[group] + taken, group, tuple(chosen))
    return None


def _cost(row: PackedRow, prompts: Sequence[int], rollouts: Sequence[Sequence[int]], pair_cost: float) -> float:
    """Return the cost of a forward pass, in tokens."""
    cost = 0.0
    for _, group, members in row:
        prompt = prompts[group]
        cost += prompt * (1 + pair_cost * prompt / 2)
        for a in members:
            cost += rollouts[group][a] * (1 + pair_cost * (prompt + rollouts[group][a] / 2))
    return cost


# -- tensors -----------------------------------------------------------------------------------------------------------


class Pictured(NamedTuple):
    """Tokens of a row that are of one prompt with images: the prompt and its completions."""

    start: int
    stop: int
    prompt: Prompt


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """N sampled tokens of S completions."""

    cu_seqlens: Tensor
    """[S+1] int64, start of each completion in N; the last entry is N."""
    mask: Tensor
    """[N] bool, False on completions that are not trained."""
    behaviour_logprobs: Tensor
    """[N] float32, nats, of the generator when it sampled."""
    versions: Tensor
    """[N] int64, version number of the weights that sampled each token."""

    def to(self, device: torch.device) -> Self:
        """Return the tokens on another device."""
        moved: dict[str, Any] = {f.name: _moved(getattr(self, f.name), device) for f in fields(self)}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class PackedBatch(SampledTokens):
    """One micro-batch: T tokens that the model runs on, without padding, and the N sampled tokens that they predict.

    The last token of a completion is not run, because it predicts no token. A prompt shared by several completions is run
    once. Observations of an environment are run but not predicted: they are among the T, never among the N.
    """

    token_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64, from 0 in every sequence."""
    segments: Segments
    """Which tokens attend to which."""
    read_at: Tensor
    """[N] int64, position in T of the token before each sampled token."""
    targets: Tensor
    """[N] int64, the sampled tokens."""
    advantages: Tensor
    """[N] float32, advantage of each token."""
    is_current: Tensor
    """[N] bool, True on completions that the learner's current weights sampled from first to last token."""
    rollouts: Tensor
    """[S] int64, index of each completion in the step."""
    tokens_in_group: Tensor
    """[S] int64, trained tokens of the completion's group in the full step."""
    kept: Kept | None = None
    """Tokens that each of the N could be sampled from; None: the whole vocabulary."""
    routes: Tensor | None = None
    """[T, layers, K] int16, experts that the generator's routers chose, -1 where that is unknown; None: not replayed."""
    pictured: tuple[Pictured, ...] = ()
    """Of each prompt with images. Pixels are built where the row is run."""
    teacher: Teacher | None = None
    """Log-probs of a served teacher for each of the N; None: there is none."""


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Kept):
        return value._replace(ids=value.ids.to(device, non_blocking=True))
    if isinstance(value, Teacher):
        return Teacher(*(part.to(device, non_blocking=True) for part in value))
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    return value.to(device) if isinstance(value, Segments) else value


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of a minibatch, and counts of the full minibatch, equal on all ranks."""

    trained: tuple[PackedBatch, ...]
    """Micro-batches to run forward and backward; at least one, which may have no completion."""
    not_run: SampledTokens
    """Tokens of all ranks whose gradient is certainly 0; only counted."""
    rollouts: ScoredRollouts
    """All usable completions of all ranks."""
    num_tokens: int
    """Trained tokens of all ranks."""
    num_completions: int
    """Trained completions, including those without tokens."""
    num_groups: int
    """Groups with a trained token."""
    zero_signal_groups: int
    """Groups with equal rewards on all usable completions, or with fewer than two, and no advantage; 0 with a critic or a
    teacher."""
    signal_share: float
    """Share of groups with a signal among groups that are solved or have a signal (`advantages.Signal`); 1 with a critic or
    a teacher."""
    bonus_share: float
    """Share of groups that are not hopeless (`advantages.Signal`), which scales an entropy bonus; 1 with a critic or a
    teacher."""
    advantages: Tensor
    """[A] float64; with a critic the mean over each completion's tokens."""

    def with_advantages(self, advantages: Tensor, of_microbatches: Sequence[Tensor]) -> "StepBatch":
        """Return the minibatch with these advantages [A] of completions, and [N] of the tokens of each micro-batch."""
        trained = (
            replace(batch, advantages=own.to(batch.mask.device, torch.float32))
            for batch, own in zip(self.trained, of_microbatches, strict=True)
        )
        return replace(self, trained=tuple(trained), advantages=advantages)


def pack(
    groups: Sequence[Group],
    version: PolicyVersion | None,
    *,
    rank: int,
    world: int,
    tokens_per_microbatch: int,
    advantage: str = "grpo",
    group_size: int | None = None,
    shaping: Shaping = UNSHAPED,
    success: float = 1.0,
    has_teacher: bool = False,
    share_prompts: bool = True,
    pair_cost: float = 0.0,
    skip_zero_advantage: bool = False,
    multiple: int = 1,
) -> StepBatch:
    """Return this rank's micro-batches of a minibatch.

    Args:
        groups: all groups of the minibatch, equal on all ranks.
        version: of the learner's weights, to mark the tokens that they sampled; None: mark no token.
        rank, world: index of this rank, and number of ranks. Ranks that run rows together count as one.
        tokens_per_microbatch: budget of a micro-batch; only a single longer sequence exceeds it.
        advantage: a name in `algorithms.advantages.ESTIMATORS`, or `gae`, which leaves 0 for the critic to replace.
        group_size: completions from this index on are greedy baselines; None: no baselines.
        shaping: of the rewards.
        success: reward before shaping from which a completion is right.
        has_teacher: True if groups with equal rewards have a signal as well, by a teacher.
        share_prompts: compute a prompt once for its completions in one micro-batch.
        pair_cost: cost of a query-key pair of attention, in tokens, to balance micro-batches over ranks.
        skip_zero_advantage: leave completions with advantage 0 out of the micro-batches, because they have no gradient.
        multiple: of the tokens of a row.
    """
    largest = max((len(group.rollouts) for group in groups), default=0)
    rollouts = read_rollouts(groups, group_size=largest if group_size is None else group_size, shaping=shaping)
    advantages = rollouts.advantages(advantage)
    in_group = torch.zeros(len(groups), dtype=torch.int64)
    in_group.index_add_(0, rollouts.groups, rollouts.lengths * rollouts.is_trained)
    rows = _Rows(groups, rollouts, advantages, in_group[rollouts.groups], version, share_prompts, multiple)
    has_tokens = rollouts.lengths > 0
    is_skipped = (advantages == 0) & skip_zero_advantage
    dealt = rows.deal(has_tokens & ~is_skipped, world, tokens_per_microbatch, pair_cost)
    with_signal = groups_with_signal(rollouts.rewards, rollouts.groups) | (advantages != 0)
    teaches = (advantages != 0) & rollouts.is_trained & has_tokens
    has_other_signal = has_teacher or advantage == CRITIC
    signal = signal_of(rollouts.scores, rollouts.groups, teaches, success=success)
    return StepBatch(
        trained=tuple(rows.build(row) for row in dealt[rank]) or (rows.build([]),),
        not_run=rows.sampled((has_tokens & is_skipped).nonzero().squeeze(-1)),
        rollouts=rollouts,
        num_tokens=int(in_group.sum()),
        num_completions=int(rollouts.is_trained.sum()),
        num_groups=int((in_group > 0).sum()),
        zero_signal_groups=0 if has_other_signal else len(groups) - rollouts.groups[with_signal].unique().numel(),
        signal_share=1.0 if has_other_signal else signal.share,
        bonus_share=1.0 if has_other_signal else signal.not_hopeless,
        advantages=advantages,
    )


@dataclass
class _Rows:
    """Builds micro-batches from the completions of a minibatch."""

    groups: Sequence[Group]
    rollouts: ScoredRollouts
    advantages: Tensor
    tokens_in_group: Tensor
    version: PolicyVersion | None
    share_prompts: bool
    multiple: int

    def __post_init__(self) -> None:
        self.prompts = [np.asarray(group.prompt.token_ids, dtype=np.int64) for group in self.groups]
        self.is_taught = all(one.teacher is not None for one in self.rollouts.completions)  # the same on all ranks

    def deal(self, wanted: Tensor, world: int, budget: int, pair_cost: float) -> list[list[list[list[int]]]]:
        """Return `[world][micro-batch][piece]` lists of completions. Completions of a piece share their prompt."""
        members: list[list[int]] = [[] for _ in self.prompts]
        for rollout in wanted.nonzero().squeeze(-1).tolist():
            members[int(self.rollouts.groups[rollout])].append(rollout)
        completions = self.rollouts.completions
        dealt = rows_for_ranks(
            [len(prompt) for prompt in self.prompts],
            [[_num_run(completions[rollout]) for rollout in group] for group in members],
            world=world,
            budget=budget,
            share_prompts=self.share_prompts,
            pair_cost=pair_cost,
        )
        return [[[[members[p.group][a] for a in p.rollouts] for p in row] for row in rows] for rows in dealt]

    def build(self, pieces: list[list[int]]) -> PackedBatch:
        """Build one micro-batch. Dummy tokens fill it up to a multiple, and give the model something to run without pieces."""
        layout, pictured = _Layout(), []
        for piece in pieces:
            group, start = int(self.rollouts.groups[piece[0]]), layout.size
            completions = [self.rollouts.completions[rollout] for rollout in piece]
            layout.add(self.prompts[group], completions, self.share_prompts)
            prompt = self.groups[group].prompt
            if prompt.images:
                pictured.append(Pictured(start, layout.size, prompt))
        if missing := -layout.size % self.multiple or (0 if pieces else self.multiple):
            layout.add(np.zeros(missing, np.int64), [], True)
        chosen = [rollout for piece in pieces for rollout in piece]
        index = torch.tensor(chosen, dtype=torch.int64)
        sampled, lengths = self.sampled(index), self.rollouts.lengths[index]
        completions = [self.rollouts.completions[rollout] for rollout in chosen]
        is_current = torch.tensor([_is_current(c, self.version) for c in completions], dtype=torch.bool)
        return PackedBatch(
            **vars(sampled),
            token_ids=_joined(layout.token_ids, np.int64),
            position_ids=_joined(layout.position_ids, np.int64),
            segments=Segments.of(layout.families),
            read_at=_joined(layout.read_at, np.int64),
            targets=_joined([c.token_ids for c in completions], np.int64),
            advantages=self.advantages[index].repeat_interleave(lengths).float(),
            is_current=is_current.repeat_interleave(lengths),
            rollouts=index,
            tokens_in_group=self.tokens_in_group[index],
            kept=_kept(completions),
            routes=_routes(layout.sources),
            pictured=tuple(pictured),
            teacher=_teacher(completions) if self.is_taught else None,
        )

    def sampled(self, index: Tensor) -> SampledTokens:
        """Return the tokens of the completions `index`, [S] int64, in that order."""
        completions, lengths = [self.rollouts.completions[i] for i in index.tolist()], self.rollouts.lengths[index]
        return SampledTokens(
            cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            mask=self.rollouts.is_trained[index].repeat_interleave(lengths),
            behaviour_logprobs=_joined([c.logprobs for c in completions], np.float32),
            versions=_joined([_versions(c) for c in completions], np.int64),
        )


class _Layout:
    """Positions of the tokens of a row."""

    def __init__(self) -> None:
        self.size = 0
        self.token_ids: list[np.ndarray] = []
        self.position_ids: list[np.ndarray] = []
        self.read_at: list[np.ndarray] = []
        self.sources: list[tuple[np.ndarray | None, int, int]] = []
        """Of each run of tokens: routes of a completion, and the run's start and end among its tokens."""
        self.families: list[Family] = []

    def add(self, prompt: np.ndarray, completions: Sequence[Completion], share_prompt: bool) -> None:
        """Append a prompt and its completions: the prompt once, or a copy before each completion.

        Observations are run like sampled tokens. No loss is computed for them, because no position before them is read.
        """
        if share_prompt and len(completions) != 1:
            start = self._run(prompt, 0, completions[0].routes if completions else None)
            prefix = (start, self.size)
            self.families.append(Family((start, start), prefix))
            bounds = [self.size]
            for completion in completions:
                first = self._run(completion.all_token_ids[: _num_run(completion)], len(prompt), completion.routes)
                places = completion.sampled_at
                self.read_at.append(np.where(places == 0, prefix[1] - 1, first + places - 1))
                bounds += [self.size] * (self.size > first)
            if len(bounds) > 1:
                self.families.append(Family(prefix, tuple(bounds)))
        else:
            for completion in completions:
                tokens = np.concatenate([prompt, completion.all_token_ids[: _num_run(completion)]])
                first = self._run(tokens, 0, completion.routes)
                self.read_at.append(first + len(prompt) + completion.sampled_at - 1)
                self.families.append(Family((first, first), (first, self.size)))

    def _run(self, token_ids: np.ndarray, position: int, routes: np.ndarray | None) -> int:
        """Append tokens and return their start."""
        self.sources.append((routes, position, position + len(token_ids)))
        self.token_ids.append(token_ids)
        self.position_ids.append(np.arange(position, position + len(token_ids)))
        self.size += len(token_ids)
        return self.size - len(token_ids)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False))


def _kept(completions: Sequence[Completion]) -> Kept | None:
    if all(completion.kept is None for completion in completions):
        return None
    nothing = np.zeros(0, np.int32)
    ids = [nothing if c.kept is None else c.kept.ids for c in completions]
    counts = [np.zeros(len(c.token_ids), np.int64) if c.kept is None else c.kept.counts for c in completions]
    return Kept(_joined(ids, np.int64), _joined(counts, np.int64).cumsum(0))


def _teacher(completions: Sequence[Completion]) -> Teacher:
    taught = [completion.teacher for completion in completions if completion.teacher is not None]
    if not taught:
        return Teacher(torch.zeros(0), torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0))
    sampled, ids, values = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*taught, strict=True))
    return Teacher(sampled, ids.long(), values)


def _routes(sources: Sequence[tuple[np.ndarray | None, int, int]]) -> Tensor | None:
    """Return [T, layers, K] int16 of consecutive runs of tokens; None: no route is known."""
    known = next((routes for routes, _, _ in sources if routes is not None), None)
    if known is None:
        return None
    joined = np.full((sum(end - start for _, start, end in sources), *known.shape[1:]), -1, np.int16)
    at = 0
    for routes, start, end in sources:
        if routes is not None:
            part = routes[start:end]
            joined[at : at + len(part)] = part
        at += end - start
    return torch.from_numpy(joined)


def _num_run(completion: Completion) -> int:
    """Return the number of tokens before the last sampled token of a completion, which the model runs on."""
    sampled = len(completion.token_ids)
    return max(sampled - 1 + sum(len(one.token_ids) for one in completion.observations if one.at < sampled), 0)


def _versions(completion: Completion) -> np.ndarray:
    """Return [L] version numbers of the weights that sampled each token."""
    return np.concatenate([np.full(span.end - span.start, span.version.number) for span in completion.spans])


def _is_current(completion: Completion, version: PolicyVersion | None) -> bool:
    """Return True if `version` sampled the completion from its first token to its last.

    A completion that began under older weights may reuse their KV cache, so its later tokens do not measure the agreement of
    two kernels.
    """
    return all(span.version == version for span in completion.spans)
