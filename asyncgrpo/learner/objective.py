"""The step's loss on one micro-batch, put together from `algorithms/` as the configuration says.

Every surrogate and every penalty is a detached coefficient before `∇ log π(y_t)`, so the loss is a slope for each
token, and adding a paper is one function in `algorithms/surrogates.py`. Where the slope of a token depends on nothing
but that token, the head asks for it block by block; else the log-probs of the micro-batch must be known first (`know`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms import corrections, diagnostics
from asyncgrpo.algorithms.aggregation import token_weights, weighted_sum
from asyncgrpo.algorithms.corrections import Correction
from asyncgrpo.algorithms.diagnostics import Sums
from asyncgrpo.algorithms.penalties import kl_penalty
from asyncgrpo.algorithms.surrogates import SEQUENCE_LEVEL, SURROGATES, Surrogate
from asyncgrpo.config.schema import PAIRWISE, AlgorithmConfig, CorrectionConfig
from asyncgrpo.learner.batch import PackedBatch, StepBatch
from asyncgrpo.learner.head import Slopes, TokenScores


class Known(NamedTuple):
    """What is known of the [N] tokens of a micro-batch before its gradient; none where nobody asked."""

    proximal: Tensor | None = None
    """Log-probs under the weights at the start of the step. None: the present ones are those."""
    reference: Tensor | None = None
    """Log-probs under the reference."""
    keep: Tensor | None = None
    """bool, of corrections that look at the whole step (M2PO)."""
    pair_coefficient: Tensor | None = None
    """Derivative of the pairwise objective of the step by each log-prob."""
    pair_value: Tensor | None = None
    """That objective, divided up among tokens in any way."""
    values: Tensor | None = None
    """Of the critic, before the step."""
    returns: Tensor | None = None
    """What the critic is to learn."""

    def at(self, where: slice) -> "Known":
        """The same of some tokens."""
        return Known(*(None if x is None else x[where] for x in self))


class _Tokens(NamedTuple):
    """Some tokens of a micro-batch."""

    mask: Tensor
    behaviour: Tensor
    advantages: Tensor
    versions: Tensor
    weights: Tensor
    cu_seqlens: Tensor | None
    """None where they are a slice that sequences do not respect."""
    known: Known

    def at(self, where: slice) -> "_Tokens":
        """Some of them."""
        parts = (self.mask, self.behaviour, self.advantages, self.versions, self.weights)
        mask, behaviour, advantages, versions, weights = (x[where] for x in parts)
        return _Tokens(mask, behaviour, advantages, versions, weights, None, self.known.at(where))


class _Terms(NamedTuple):
    """The loss of some tokens. Nothing has a gradient."""

    slope: Tensor
    """[n] derivative of the step's loss by the log-prob."""
    value: Tensor
    """[n] the token's loss, to be weighted."""
    surrogate: Surrogate
    correction: Correction
    log_ratio: Tensor
    """[n] policy over anchor."""
    log_rho: Tensor
    """[n] what corrections look at: anchor (or policy, where the anchor is the behaviour policy) over behaviour."""
    kl: Tensor | None
    """[n] estimate of the KL to the reference."""


class MicrobatchObjective:
    """The loss of one micro-batch; what `head.Objective` asks for."""

    def __init__(
        self,
        settings: AlgorithmConfig,
        batch: PackedBatch,
        step: StepBatch,
        known: Known,
        *,
        version: int,
        max_length: int,
        kl_coef: float,
        oldest_trained: int | None = None,
    ) -> None:
        """
        Args:
            settings: which loss it is.
            step: for the counts of the whole step.
            version: number of the learner's weights.
            max_length: longest answer that may be sampled, tokens.
            kl_coef: the present one, where it is steered.
            oldest_trained: tokens of older weights than these have no weight; None: all have theirs. The weights of
                the others are as if nothing were left out.
        """
        self.settings, self.batch, self.version = settings, batch, version
        self.kl_coef = kl_coef if settings.kl_in == "loss" else 0.0
        weights = token_weights(
            batch.mask,
            batch.cu_seqlens,
            mode=settings.aggregation,
            num_tokens=step.num_tokens,
            num_sequences=step.num_answers,
            max_length=max_length,
            tokens_in_group=batch.tokens_in_group,
            num_groups=step.num_groups,
        ).to(torch.float32)
        self._is_aged = batch.mask & (batch.versions < (-1 if oldest_trained is None else oldest_trained))
        self.weights = weights = torch.where(self._is_aged, 0.0, weights)
        """[N] of each token in the loss of the step."""
        self._tokens = _Tokens(
            batch.mask,
            batch.behaviour_logprobs,
            batch.advantages,
            batch.versions,
            weights,
            batch.cu_seqlens,
            known,
        )
        self._slopes: Slopes | None = None

    def __call__(self, tokens: slice, scores: TokenScores) -> Slopes:
        """Slopes of some of the tokens."""
        if self._slopes is not None:
            return self._slopes.at(tokens)
        return self._slopes_of(self._tokens.at(tokens), scores.logprobs)

    def know(self, scores: TokenScores) -> None:
        """Take the slopes from these log-probs, which are the whole micro-batch's."""
        self._slopes = self._slopes_of(self._tokens, scores.logprobs)

    def _slopes_of(self, tokens: _Tokens, policy: Tensor) -> Slopes:
        settings, weights = self.settings, tokens.weights
        return Slopes(
            logprobs=self._terms(tokens, policy).slope,
            entropy=-settings.entropy_coef * weights if settings.entropy_coef else None,
            reference_kl=self.kl_coef * weights if self.kl_coef and settings.kl_kind == "full" else None,
        )

    @torch.no_grad()
    def _terms(self, tokens: _Tokens, policy: Tensor) -> _Terms:
        settings, known = self.settings, tokens.known
        anchor = self._anchor(tokens, policy)
        log_rho = (policy if settings.anchor == "behaviour" else anchor) - tokens.behaviour
        correction = self._correction(tokens, log_rho)
        surrogate = self._surrogate(tokens, policy, anchor)
        weight = correction.weight * correction.keep
        slope, value = -weight * surrogate.coefficient, -weight * surrogate.value
        kl = None
        if known.reference is not None and settings.kl_kind != "full":
            penalty = kl_penalty(policy, known.reference, kind=settings.kl_kind, log_ratio=policy - tokens.behaviour)
            kl = penalty.value
            if self.kl_coef:
                slope, value = slope + self.kl_coef * penalty.coefficient, value + self.kl_coef * kl
        if settings.behaviour_kl_coef:
            penalty = kl_penalty(policy, tokens.behaviour, kind="k2")
            slope = slope + settings.behaviour_kl_coef * penalty.coefficient
            value = value + settings.behaviour_kl_coef * penalty.value
        slope = torch.where(tokens.mask, tokens.weights * slope, 0.0)
        return _Terms(slope, value, surrogate, correction, policy - anchor, log_rho, kl)

    def _anchor(self, tokens: _Tokens, policy: Tensor) -> Tensor:
        match self.settings.anchor:
            case "behaviour":
                return tokens.behaviour
            case "interpolated":
                return corrections.interpolated(policy, tokens.behaviour, tokens.versions, self.version)
        return policy if tokens.known.proximal is None else tokens.known.proximal

    def _surrogate(self, tokens: _Tokens, policy: Tensor, anchor: Tensor) -> Surrogate:
        if self.settings.loss == PAIRWISE:
            coefficient, value = tokens.known.pair_coefficient, tokens.known.pair_value
            assert coefficient is not None and value is not None
            # Pairs are averaged already: what the weights of the aggregation will do is undone beforehand.
            undone = torch.where(tokens.weights > 0, 1 / tokens.weights, 0.0)
            return Surrogate(coefficient * undone, value * undone, torch.zeros_like(tokens.mask))
        function = SURROGATES[self.settings.loss]
        return function(policy, anchor, tokens.advantages, tokens.mask, tokens.cu_seqlens, **self.settings.loss_args)

    def _correction(self, tokens: _Tokens, log_rho: Tensor) -> Correction:
        keep = tokens.mask if tokens.known.keep is None else tokens.mask & tokens.known.keep
        parts = [Correction(tokens.mask.to(log_rho.dtype), keep)]
        parts += [
            correct(one, log_rho, tokens.advantages, tokens.mask, tokens.cu_seqlens)
            for one in self.settings.corrections
            if one.kind != "m2po"
        ]
        return corrections.combine(parts)

    @torch.no_grad()
    def report(self, scores: TokenScores) -> Sums:
        """What the micro-batch adds to the step's report; ratios before anything is rejected."""
        settings, tokens, batch = self.settings, self._tokens, self.batch
        terms = self._terms(tokens, scores.logprobs)
        value = terms.value - settings.entropy_coef * scores.entropy
        kl = terms.kl if scores.reference_kl is None else scores.reference_kl
        if scores.reference_kl is not None:
            value = value + self.kl_coef * scores.reference_kl
        sums = diagnostics.mean_sums(
            tokens.mask, entropy=scores.entropy, clipped=terms.surrogate.clipped, **({} if kl is None else {"kl": kl})
        )
        sums |= diagnostics.ratio_sums(terms.log_rho, tokens.mask, batch.cu_seqlens)
        sums |= diagnostics.update_sums(
            terms.log_ratio,
            tokens.advantages,
            terms.surrogate.clipped,
            tokens.mask,
            dual=settings.loss_args.get("dual"),  # type: ignore[arg-type]  # checked with the configuration
        )
        sums |= diagnostics.kept_sums("rejected", terms.correction.keep, tokens.mask, batch.cu_seqlens)
        sums |= diagnostics.kept_sums("aged", ~self._is_aged, tokens.mask, batch.cu_seqlens)
        bounded = next((c for c in settings.corrections if c.kind == "importance"), None)
        if bounded is not None:
            sums |= diagnostics.outside_sums(
                "bounded",
                terms.log_rho,
                tokens.mask,
                batch.cu_seqlens,
                level=bounded.level,
                low=bounded.low,
                high=bounded.high,
            )
        sums |= diagnostics.lag_sums(tokens.versions, self.version, tokens.mask, batch.cu_seqlens)
        at_start = scores.logprobs if tokens.known.proximal is None else tokens.known.proximal
        sums |= diagnostics.gap_sums(at_start, tokens.behaviour, batch.is_current)
        return sums | {"loss": weighted_sum(value, tokens.weights).double()}


def correct(
    one: CorrectionConfig, log_rho: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor | None
) -> Correction:
    """One correction as configured. `m2po` needs the tokens of the whole step."""
    if one.kind == "importance":
        return corrections.importance(
            log_rho, mask, cu_seqlens, level=one.level, action=one.action, low=one.low, high=one.high
        )
    if one.kind == "divergence":
        assert one.high is not None and one.level != "geometric"
        return corrections.divergence(
            log_rho, mask, cu_seqlens, estimator=one.estimator, level=one.level, high=one.high
        )
    if one.kind == "m2po":
        return corrections.m2po(log_rho, mask, threshold=0.04 if one.threshold is None else one.threshold)
    assert cu_seqlens is not None
    if one.kind == "veto":
        return corrections.veto(log_rho, mask, cu_seqlens, low=one.low, high=one.high)
    assert one.kind == "opsm" and one.threshold is not None, one
    return corrections.opsm(log_rho, advantages, mask, cu_seqlens, delta=one.threshold)


def is_elementwise(settings: AlgorithmConfig) -> bool:
    """Whether the slope of a token depends on nothing but that token, once `Known` is known."""
    return settings.loss not in SEQUENCE_LEVEL and all(
        one.kind == "m2po" or (one.kind in ("importance", "divergence") and one.level == "token")
        for one in settings.corrections
    )
