"""What some algorithms must know of the whole step before its first gradient.

Most need nothing: the weights at the start of a step are the policy's own. A forward pass over all micro-batches comes
first only where the batch is trained in several updates, where the reward contains a KL, where advantages come from a
critic, or where a correction or a pair looks at answers that may lie in other micro-batches or on other ranks. Each
rank then puts the values of its tokens into one vector of the step, the vectors are added up, and every rank computes
the same from the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncgrpo.algorithms import critic, pairwise, shaping
from asyncgrpo.algorithms.penalties import kl_penalty
from asyncgrpo.config.schema import CRITIC, PAIRWISE, AlgorithmConfig
from asyncgrpo.learner.batch import Answers, PackedBatch, StepBatch
from asyncgrpo.learner.objective import Known, correct


class Scored(NamedTuple):
    """A micro-batch under the weights at the start of the step, [N] each."""

    logprobs: Tensor
    reference: Tensor | None
    values: Tensor | None


Score = Callable[[PackedBatch], Scored]


def is_needed(settings: AlgorithmConfig, minibatches: int) -> bool:
    """Whether the step begins with a forward pass over everything."""
    return (
        (minibatches > 1 and settings.anchor == "proximal")
        or (settings.kl_coef > 0 and settings.kl_in == "reward")
        or settings.advantage == CRITIC
        or settings.loss == PAIRWISE
        or any(one.kind == "m2po" for one in settings.corrections)
    )


def look_ahead(
    step: StepBatch, score: Score, settings: AlgorithmConfig, *, kl_coef: float
) -> tuple[StepBatch, list[Known]]:
    """Score all micro-batches of this rank, and tell each what it must know. Collective.

    Args:
        step: one minibatch.
        score: the forward pass of a micro-batch; results on its device.
        kl_coef: of a KL in the reward.
    Returns:
        The minibatch, with the advantages that only now are known, and what its trained micro-batches must know.
    """
    microbatches, answers = step.trained, step.answers
    scored = [score(batch) for batch in microbatches]
    tokens = _Tokens(microbatches, answers)
    policy = tokens.all([s.logprobs for s in scored])
    behaviour = torch.from_numpy(np.concatenate([np.zeros(0), *(c.logprobs for c in answers.completions)]))
    fields: dict[str, Tensor] = {}
    rewards = answers.rewards

    if settings.kl_coef > 0 and settings.kl_in == "reward":
        reference = tokens.all([_present(s.reference) for s in scored])
        assert settings.kl_kind != "full", "checked with the configuration"
        per_token = kl_penalty(policy, reference, kind=settings.kl_kind).value
        rewards = shaping.reward_with_kl(answers.rewards, per_token, tokens.mask, tokens.cu_seqlens, coef=kl_coef)
        advantages = answers.advantages(settings.advantage, rewards)
        step = step.with_advantages(advantages, tokens.of_microbatches(advantages.repeat_interleave(answers.lengths)))
    if settings.advantage == CRITIC:
        values = tokens.all([_present(s.values) for s in scored])
        result = critic.gae(
            tokens.on_last_tokens(rewards),
            values,
            tokens.mask,
            tokens.cu_seqlens,
            gamma=settings.critic.gamma,
            lam=settings.critic.lam,
        )
        advantages = critic.whiten(result.advantages, tokens.mask)
        step = step.with_advantages(tokens.means(advantages), tokens.of_microbatches(advantages))
        fields |= {"values": values, "returns": result.returns}
    for one in settings.corrections:
        if one.kind == "m2po":
            fields["keep"] = correct(one, policy - behaviour, policy, tokens.mask, None).keep
    if settings.loss == PAIRWISE:
        fields |= _pairs(settings, answers, policy, tokens, [s.reference for s in scored])

    known = []
    for batch, own in zip(microbatches, scored, strict=True):
        positions = tokens.positions(batch)
        device = own.logprobs.device
        told = {name: values[positions].to(device) for name, values in fields.items()}
        told = {name: x.float() if x.is_floating_point() else x for name, x in told.items()}
        known.append(Known(proximal=own.logprobs, reference=own.reference, **told))
    return step, known


def _pairs(
    settings: AlgorithmConfig, answers: Answers, policy: Tensor, tokens: "_Tokens", references: list[Tensor | None]
) -> dict[str, Tensor]:
    """The pairwise objective of the step: its coefficient at every token, and its value, laid on first tokens."""
    arguments = dict(settings.loss_args)
    with_reference = bool(arguments.pop("reference", False))
    generator = torch.Generator().manual_seed(len(answers.completions))
    kind = str(arguments.pop("pairs", "best_worst"))
    has_trained_tokens = answers.is_trained & (answers.lengths > 0)
    rewards = torch.where(has_trained_tokens, answers.rewards, torch.nan)
    winner, loser = pairwise.pairs(rewards, answers.groups, kind=kind, generator=generator)  # type: ignore[arg-type]
    result = pairwise.pairwise(
        policy,
        tokens.cu_seqlens,
        tokens.mask,
        winner,
        loser,
        reference_logprobs=tokens.all([_present(r) for r in references]) if with_reference else None,
        **arguments,  # type: ignore[arg-type]  # checked with the configuration
    )
    count = max(winner.numel(), 1)
    value = torch.zeros_like(policy)
    value.index_add_(0, tokens.cu_seqlens[:-1][winner], result.value / count)
    return {"pair_coefficient": result.coefficient / count, "pair_value": value}


class _Tokens:
    """All tokens of a minibatch, answer after answer; [M] in all, the same on every rank."""

    def __init__(self, microbatches: Sequence[PackedBatch], answers: Answers) -> None:
        self._microbatches = microbatches
        self.lengths = answers.lengths
        self.cu_seqlens = torch.cat([answers.lengths.new_zeros(1), answers.lengths.cumsum(0)])
        self.mask = answers.is_trained.repeat_interleave(answers.lengths)

    def positions(self, batch: PackedBatch) -> Tensor:
        """[N] where the tokens of a micro-batch are."""
        members, lengths = batch.answers.cpu(), batch.cu_seqlens.cpu().diff()
        starts = self.cu_seqlens[members] - batch.cu_seqlens.cpu()[:-1]
        return starts.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))

    def of_microbatches(self, values: Tensor) -> list[Tensor]:
        """[M] to [N] of each micro-batch of this rank."""
        return [values[self.positions(batch)] for batch in self._microbatches]

    def all(self, values: Sequence[Tensor]) -> Tensor:
        """[M] float64 from what each rank has of its micro-batches. Collective."""
        everything = torch.zeros(self.mask.numel(), dtype=torch.float64)
        for batch, own in zip(self._microbatches, values, strict=True):
            everything[self.positions(batch)] = own.cpu().double()
        if dist.get_world_size() > 1:
            dist.all_reduce(everything)
        return everything

    def on_last_tokens(self, rewards: Tensor) -> Tensor:
        """[A] to [M]: each answer's reward where it ends."""
        placed = torch.zeros(self.mask.numel(), dtype=torch.float64)
        has_tokens = self.lengths > 0
        placed[self.cu_seqlens[1:][has_tokens] - 1] = rewards[has_tokens]
        return placed

    def means(self, values: Tensor) -> Tensor:
        """[M] to [A]."""
        owner = torch.arange(self.lengths.numel()).repeat_interleave(self.lengths)
        return values.new_zeros(self.lengths.numel()).index_add(0, owner, values) / self.lengths.clamp(min=1)


def _present(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
