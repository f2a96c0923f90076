"""The loss of a micro-batch, composed from `algorithms/` as configured.

Every surrogate and every penalty is a detached coefficient of `∇ log π(y_t)`, so the loss is one gradient per log-prob, and a
new paper is one function in `algorithms/surrogates.py`. If the gradient of a token depends on that token alone, the head
evaluates it block by block. Otherwise the log-probs of the micro-batch are computed first (`use_scores`).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import asdict
from torch import Tensor

from asyncgrpo.algorithms import corrections, critic, diagnostics, pairwise
from asyncgrpo.algorithms.advantages import reward_with_kl
from asyncgrpo.algorithms.aggregation import token_weights, weighted_sum
from asyncgrpo.algorithms.corrections import Correction
from asyncgrpo.algorithms.diagnostics import Sums
from asyncgrpo.algorithms.surrogates import SEQUENCE_LEVEL, SURROGATES, Surrogate, kl_penalty
from asyncgrpo.config.schema import CRITIC, PAIRWISE, AlgorithmConfig, CorrectionConfig
from asyncgrpo.learner.head import LossGradients, TokenScores
from asyncgrpo.learner.packing import PackedBatch, SampledTokens, ScoredRollouts, StepBatch

# -- one micro-batch ---------------------------------------------------------------------------------------------------


class Precomputed(NamedTuple):
    """Values of the [N] tokens of a micro-batch that are computed before its gradient; None if not needed."""

    proximal: Tensor | None = None
    """Log-probs under the weights at the start of the step. None: equal to the current ones."""
    reference: Tensor | None = None
    """Log-probs under the reference model."""
    keep: Tensor | None = None
    """bool, of corrections over the full step (M2PO)."""
    pair_gradient: Tensor | None = None
    """Derivative of the pairwise objective of the step by each log-prob."""
    pair_value: Tensor | None = None
    """Value of that objective, distributed over tokens in any way."""
    values: Tensor | None = None
    """Values of the critic before the step."""
    returns: Tensor | None = None
    """Targets of the critic."""

    def at(self, where: slice) -> "Precomputed":
        """Return the values of a slice of the tokens."""
        return Precomputed(*(None if x is None else x[where] for x in self))


class _Tokens(NamedTuple):
    """A slice of the tokens of a micro-batch."""

    mask: Tensor
    behaviour: Tensor
    advantages: Tensor
    versions: Tensor
    weights: Tensor
    cu_seqlens: Tensor | None
    """None if the slice cuts through sequences."""
    precomputed: Precomputed

    def at(self, where: slice) -> "_Tokens":
        """Return a slice."""
        mask, behaviour, advantages, versions, weights = (x[where] for x in self[:5])
        return _Tokens(mask, behaviour, advantages, versions, weights, None, self.precomputed.at(where))


class _Terms(NamedTuple):
    """The loss of a slice of tokens, all without gradient."""

    gradient: Tensor
    """[n] derivative of the step's loss by the log-prob."""
    value: Tensor
    """[n] loss of each token before weighting."""
    surrogate: Surrogate
    correction: Correction
    log_ratio: Tensor
    """[n] log policy / anchor."""
    log_rho: Tensor
    """[n] input of corrections: log anchor / behaviour, or log policy / behaviour if the anchor is the behaviour policy."""
    kl: Tensor | None
    """[n] estimate of the KL to the reference."""


class MicrobatchObjective:
    """The loss of one micro-batch, a `head.Objective`."""

    def __init__(
        self,
        settings: AlgorithmConfig,
        batch: PackedBatch,
        step: StepBatch,
        precomputed: Precomputed,
        *,
        version: int,
        max_length: int,
    ) -> None:
        """
        Args:
            settings: selects loss, anchor, corrections and penalties.
            step: for the counts of the full step.
            version: number of the learner's weights.
            max_length: longest completion that may be sampled, tokens.
        """
        self.settings, self.batch, self.version = settings, batch, version
        self.kl_coef = settings.kl_coef if settings.kl_in == "loss" else 0.0
        # If nearly all groups are hopeless the bonus would dominate: AdamW scales any gradient to a full step.
        self.entropy_coef = settings.entropy_coef * step.bonus_share
        self.weights = weights = token_weights(
            batch.mask,
            batch.cu_seqlens,
            mode=settings.aggregation,
            num_tokens=step.num_tokens,
            num_sequences=step.num_completions,
            max_length=max_length,
            tokens_in_group=batch.tokens_in_group,
            num_groups=step.num_groups,
        ).to(torch.float32)
        """[N] weight of each token in the loss of the step."""
        of_batch = (batch.mask, batch.behaviour_logprobs, batch.advantages, batch.versions)
        self._tokens = _Tokens(*of_batch, weights, batch.cu_seqlens, precomputed)
        self._gradients: LossGradients | None = None

    def __call__(self, tokens: slice, scores: TokenScores) -> LossGradients:
        """Return the loss gradients of a slice of the tokens."""
        if self._gradients is not None:
            return self._gradients.at(tokens)
        return self._gradients_of(self._tokens.at(tokens), scores.logprobs)

    def use_scores(self, scores: TokenScores) -> None:
        """Compute the gradients from the log-probs of the full micro-batch."""
        self._gradients = self._gradients_of(self._tokens, scores.logprobs)

    def _gradients_of(self, tokens: _Tokens, policy: Tensor) -> LossGradients:
        settings, weights = self.settings, tokens.weights
        return LossGradients(
            logprobs=self._terms(tokens, policy).gradient,
            entropy=-self.entropy_coef * weights if self.entropy_coef else None,
            reference_kl=self.kl_coef * weights if self.kl_coef and settings.kl_kind == "full" else None,
        )

    @torch.no_grad()
    def _terms(self, tokens: _Tokens, policy: Tensor) -> _Terms:
        settings, precomputed = self.settings, tokens.precomputed
        anchor = self._anchor(tokens, policy)
        log_rho = (policy if settings.anchor == "behaviour" else anchor) - tokens.behaviour
        correction = self._correction(tokens, log_rho)
        surrogate = self._surrogate(tokens, policy, anchor)
        weight = correction.weight * correction.keep
        gradient = -weight * surrogate.objective_gradient
        # The objective of a pair stands on one token, which may be rejected.
        value = -surrogate.value if settings.loss == PAIRWISE else -weight * surrogate.value
        kl = None
        if precomputed.reference is not None and settings.kl_kind != "full":
            penalty = kl_penalty(
                policy, precomputed.reference, kind=settings.kl_kind, log_ratio=policy - tokens.behaviour
            )
            kl = penalty.value
            if self.kl_coef:
                gradient, value = gradient + self.kl_coef * penalty.loss_gradient, value + self.kl_coef * kl
        if settings.behaviour_kl_coef:
            penalty = kl_penalty(policy, tokens.behaviour, kind="k2")
            gradient = gradient + settings.behaviour_kl_coef * penalty.loss_gradient
            value = value + settings.behaviour_kl_coef * penalty.value
        gradient = torch.where(tokens.mask, tokens.weights * gradient, 0.0)
        return _Terms(gradient, value, surrogate, correction, policy - anchor, log_rho, kl)

    def _anchor(self, tokens: _Tokens, policy: Tensor) -> Tensor:
        match self.settings.anchor:
            case "behaviour":
                return tokens.behaviour
            case "interpolated":
                return corrections.interpolated(policy, tokens.behaviour, tokens.versions, self.version)
        return policy if tokens.precomputed.proximal is None else tokens.precomputed.proximal

    def _surrogate(self, tokens: _Tokens, policy: Tensor, anchor: Tensor) -> Surrogate:
        if self.settings.loss == PAIRWISE:
            gradient, value = tokens.precomputed.pair_gradient, tokens.precomputed.pair_value
            assert gradient is not None and value is not None
            # Pairs are averaged already, so divide by the weights that the aggregation will apply.
            undone = torch.where(tokens.weights > 0, 1 / tokens.weights, 0.0)
            return Surrogate(gradient * undone, value * undone, torch.zeros_like(tokens.mask))
        function = SURROGATES[self.settings.loss]
        return function(policy, anchor, tokens.advantages, tokens.mask, tokens.cu_seqlens, **self.settings.loss_args)

    def _correction(self, tokens: _Tokens, log_rho: Tensor) -> Correction:
        keep = tokens.mask if tokens.precomputed.keep is None else tokens.mask & tokens.precomputed.keep
        parts = [Correction(tokens.mask.to(log_rho.dtype), keep)]
        for one in self.settings.corrections:
            if one.kind != "m2po":
                parts.append(correct(one, log_rho, tokens.advantages, tokens.mask, tokens.cu_seqlens))
        return corrections.combine(parts)

    @torch.no_grad()
    def report(self, scores: TokenScores) -> Sums:
        """Return the sums that the micro-batch adds to the step's report; ratios are before rejection."""
        settings, tokens, batch = self.settings, self._tokens, self.batch
        terms = self._terms(tokens, scores.logprobs)
        value = terms.value - self.entropy_coef * scores.entropy
        kl = terms.kl if scores.reference_kl is None else scores.reference_kl
        if scores.reference_kl is not None:
            value = value + self.kl_coef * scores.reference_kl
        sums = diagnostics.mean_sums(
            tokens.mask, entropy=scores.entropy, clipped=terms.surrogate.clipped, **({} if kl is None else {"kl": kl})
        )
        sums |= diagnostics.update_sums(
            terms.log_ratio,
            tokens.advantages,
            terms.surrogate.clipped,
            tokens.mask,
            dual_ratio=settings.loss_args.get("dual_ratio"),  # type: ignore[arg-type]  # checked with the configuration
        )
        sums |= diagnostics.kept_sums("rejected", terms.correction.keep, tokens.mask, batch.cu_seqlens)
        bounded = next((c for c in settings.corrections if c.kind == "importance"), None)
        if bounded is not None:
            sums |= diagnostics.outside_sums(
                "bounded",
                terms.log_rho,
                tokens.mask,
                batch.cu_seqlens,
                level=bounded.level,
                low_ratio=bounded.low_ratio,
                high_ratio=bounded.high_ratio,
            )
        sums |= diagnostics.lag_sums(tokens.versions, self.version, tokens.mask, batch.cu_seqlens)
        # Independent of the anchor: an interpolated anchor is too close to the behaviour policy to measure age.
        at_start = scores.logprobs if tokens.precomputed.proximal is None else tokens.precomputed.proximal
        log_age = at_start - tokens.behaviour
        sums |= diagnostics.ratio_sums(log_age, tokens.mask, batch.cu_seqlens)
        sums |= diagnostics.share_sums(log_age, tokens.versions, self.version, tokens.mask, batch.cu_seqlens)
        sums |= diagnostics.gap_sums(at_start, tokens.behaviour, batch.is_current)
        return sums | {"loss": weighted_sum(value, tokens.weights).double()}


def report_not_run(tokens: SampledTokens, *, version: int) -> Sums:
    """Return the sums of tokens without gradient that are not run.

    Their entropy is estimated by the engine's -log μ, under the weights that sampled the token. No token is clipped. Sums
    that need the learner's log-probs are over the tokens that are run.
    """
    mask, cu_seqlens = tokens.mask, tokens.cu_seqlens
    sums = diagnostics.mean_sums(mask, entropy=-tokens.behaviour_logprobs, clipped=torch.zeros_like(mask))
    sums["update_tokens"] = sums["tokens"]
    return sums | diagnostics.lag_sums(tokens.versions, version, mask, cu_seqlens)


def correct(
    one: CorrectionConfig, log_rho: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor | None
) -> Correction:
    """Call the function of `corrections` with what it reads of these and of the configuration.

    `m2po` needs the tokens of the full step.
    """
    correction = getattr(corrections, one.kind)
    given = {"advantages": advantages, "cu_seqlens": cu_seqlens}
    given |= {name: value for name, value in asdict(one).items() if value is not None}
    read = inspect.signature(correction).parameters
    return correction(log_rho, mask=mask, **{name: value for name, value in given.items() if name in read})


def is_elementwise(settings: AlgorithmConfig) -> bool:
    """True if the gradient of a token depends on that token alone, given `Precomputed`."""
    return settings.loss not in SEQUENCE_LEVEL and all(
        one.kind == "m2po" or (one.kind in ("importance", "divergence") and one.level == "token")
        for one in settings.corrections
    )


# -- values over the full step, before its first gradient --------------------------------------------------------------


Score = Callable[[PackedBatch], Precomputed]
"""Scores a micro-batch under the weights at the start of the step: proximal, reference and values, as far as needed."""


def needs_precompute(settings: AlgorithmConfig, updates: int) -> bool:
    """True if a step with this number of updates begins with a forward pass over all tokens."""
    return (
        (updates > 1 and settings.anchor == "proximal")
        or (settings.kl_coef > 0 and settings.kl_in == "reward")
        or settings.advantage == CRITIC
        or settings.loss == PAIRWISE
        or any(one.kind == "m2po" for one in settings.corrections)
    )


def precompute(
    step: StepBatch, score: Score, settings: AlgorithmConfig, *, is_counted: bool = True
) -> tuple[StepBatch, list[Precomputed]]:
    """Score all micro-batches of this rank and compute their `Precomputed`. Collective.

    Args:
        step: one minibatch.
        score: forward pass of a micro-batch; results on its device.
        is_counted: False: another rank runs the same rows, and its scores count.
    Returns:
        The minibatch with final advantages, and the `Precomputed` of each trained micro-batch.
    """
    microbatches, rollouts = step.trained, step.rollouts
    scored = [score(batch) for batch in microbatches]
    tokens = _StepTokens(microbatches, rollouts, is_counted=is_counted)
    policy = tokens.all([_present(s.proximal) for s in scored])
    behaviour = torch.from_numpy(np.concatenate([np.zeros(0), *(c.logprobs for c in rollouts.completions)]))
    fields: dict[str, Tensor] = {}
    of_tokens = tokens.on_last_tokens(rollouts.rewards)  # rewards, for a critic

    if settings.kl_coef > 0 and settings.kl_in == "reward":
        reference = tokens.all([_present(s.reference) for s in scored])
        assert settings.kl_kind != "full", "checked with the configuration"
        per_token = kl_penalty(policy, reference, kind=settings.kl_kind).value
        coef = settings.kl_coef
        of_tokens -= coef * per_token
        rewards = reward_with_kl(rollouts.rewards, per_token, tokens.mask, tokens.cu_seqlens, coef=coef)
        advantages = rollouts.advantages(settings.advantage, rewards)
        step = step.with_advantages(advantages, tokens.of_microbatches(advantages.repeat_interleave(rollouts.lengths)))
    if settings.advantage == CRITIC:
        values = tokens.all([_present(s.values) for s in scored])
        gamma, lam = settings.critic.gamma, settings.critic.lam
        result = critic.gae(of_tokens, values, tokens.mask, tokens.cu_seqlens, gamma=gamma, lam=lam)
        advantages = critic.whiten(result.advantages, tokens.mask)
        step = step.with_advantages(tokens.means(advantages), tokens.of_microbatches(advantages))
        fields |= {"values": values, "returns": result.returns}
    for one in settings.corrections:
        if one.kind == "m2po":
            fields["keep"] = correct(one, policy - behaviour, policy, tokens.mask, None).keep
    if settings.loss == PAIRWISE:
        fields |= _pairs(settings, rollouts, policy, tokens, [s.reference for s in scored])

    precomputed = []
    for batch, own in zip(microbatches, scored, strict=True):
        positions = tokens.positions(batch)
        device = _present(own.proximal).device
        local = {name: values[positions].to(device) for name, values in fields.items()}
        local = {name: x.float() if x.is_floating_point() else x for name, x in local.items()}
        precomputed.append(own._replace(**local))
    return step, precomputed


def _pairs(
    settings: AlgorithmConfig,
    rollouts: ScoredRollouts,
    policy: Tensor,
    tokens: "_StepTokens",
    references: list[Tensor | None],
) -> dict[str, Tensor]:
    """Compute the pairwise objective of the step: its gradient at every token, and its value on first tokens."""
    arguments = dict(settings.loss_args)
    with_reference = bool(arguments.pop("reference", False))
    # The same on every rank and in a replay, and another one in the next step.
    generator = torch.Generator().manual_seed(int(rollouts.lengths.sum()))
    kind = str(arguments.pop("pairs", "best_worst"))
    has_trained_tokens = rollouts.is_trained & (rollouts.lengths > 0)
    rewards = torch.where(has_trained_tokens, rollouts.rewards, torch.nan)
    winner, loser = pairwise.pairs(rewards, rollouts.groups, kind=kind, generator=generator)  # type: ignore[arg-type]
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
    return {"pair_gradient": result.objective_gradient / count, "pair_value": value}


class _StepTokens:
    """All [M] tokens of a minibatch in the order of its completions, equal on all ranks."""

    def __init__(self, microbatches: Sequence[PackedBatch], rollouts: ScoredRollouts, *, is_counted: bool) -> None:
        self._microbatches, self._is_counted = microbatches, is_counted
        self.lengths = rollouts.lengths
        self.cu_seqlens = torch.cat([rollouts.lengths.new_zeros(1), rollouts.lengths.cumsum(0)])
        self.mask = rollouts.is_trained.repeat_interleave(rollouts.lengths)

    def positions(self, batch: PackedBatch) -> Tensor:
        """Return [N] positions of the tokens of a micro-batch."""
        members, lengths = batch.rollouts.cpu(), batch.cu_seqlens.cpu().diff()
        starts = self.cu_seqlens[members] - batch.cu_seqlens.cpu()[:-1]
        return starts.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))

    def of_microbatches(self, values: Tensor) -> list[Tensor]:
        """Split [M] values into [N] of each micro-batch of this rank."""
        return [values[self.positions(batch)] for batch in self._microbatches]

    def all(self, values: Sequence[Tensor]) -> Tensor:
        """Merge the values of all ranks' micro-batches into [M] float64. Collective."""
        everything = torch.zeros(self.mask.numel(), dtype=torch.float64)
        for batch, own in zip(self._microbatches, values, strict=True):
            if self._is_counted:
                everything[self.positions(batch)] = own.cpu().double()
        if dist.get_world_size() > 1:
            dist.all_reduce(everything)
        return everything

    def on_last_tokens(self, rewards: Tensor) -> Tensor:
        """Place the rewards [A] on the last tokens of their completions, [M]."""
        placed = torch.zeros(self.mask.numel(), dtype=torch.float64)
        has_tokens = self.lengths > 0
        placed[self.cu_seqlens[1:][has_tokens] - 1] = rewards[has_tokens]
        return placed

    def means(self, values: Tensor) -> Tensor:
        """Return [A] means of [M] values over each completion."""
        owner = torch.arange(self.lengths.numel()).repeat_interleave(self.lengths)
        return values.new_zeros(self.lengths.numel()).index_add(0, owner, values) / self.lengths.clamp(min=1)


def _present(values: Tensor | None) -> Tensor:
    assert values is not None
    return values
