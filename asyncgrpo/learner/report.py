"""What one step says of itself, and how long its phases took."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from asyncgrpo.algorithms.diagnostics import Sums, merge, report, shares_within
from asyncgrpo.learner.packing import StepBatch

RolloutKey = tuple[str, int]
"""group_id, and the index of the completion in its group."""


class Update(NamedTuple):
    """One call of the optimizer, made or not."""

    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of this update (of the one that would have been, if skipped)."""
    skipped: str | None
    """Why an update with a gradient was not made; None: it was, or the gradient was exactly 0."""


@dataclass(frozen=True)
class StepReport:
    """One step, over all its updates and all ranks; log-probs in nats.

    Means are over the trained tokens. Where completions of advantage 0 are not run, what compares the learner's log-probs
    with others is over the tokens that are run: ratios, effective sample shares, rejections and the gap.
    """

    skipped: str | None
    """Why the last update that was skipped was; None: none was."""
    zero_gradients: int
    """Updates that were not made because their gradient was exactly 0."""
    loss: float
    """Value of the objective that was minimised: surrogate, penalties and entropy; mean over the updates."""
    grad_norm: float
    """Before clipping; the largest."""
    lr: float
    """Learning rate of the last update."""
    entropy: float
    """A token that is not run counts with the engine's -log-prob, an estimate by one sample."""
    clip_ratio: float
    """Share of tokens whose gradient the surrogate's clip took away."""
    importance_mean: float
    """Mean of proximal / behaviour policy before any correction, whatever the anchor. Of several updates, unless the
    weights at the start of the step were scored beforehand, those of each update of the first pass stand in for them."""
    importance_capped: float
    """Share of tokens above the upper bound of the first importance correction."""
    effective_sample_share: float
    """(Σρ)² / (n Σρ²) of those ratios: 1 when all are equal."""
    shares_within: dict[int, float]
    """By lag: that share of the completions of at most this lag; the largest lag is that of the oldest token."""
    kl_reference: float | None
    """Mean estimate of the KL to the reference; None without a reference."""
    value_loss: float | None
    """Mean of the critic's loss; None without a critic."""
    logprob_gap_mean: float | None
    """Mean |learner - generator| log-prob on tokens that these very weights sampled: what their kernels disagree by.
    None where there are no such tokens."""
    logprob_gap_max: float | None
    diagnostics: dict[str, float]
    """What `algorithms.diagnostics` reports of ratios, updates, rejections and lags, all before anything is rejected."""
    group_size: int
    """Completions of a group that are sampled; those from this index on are greedy baselines."""
    tokens_trained: int
    rollouts: int
    """Completions trained."""
    rollouts_unusable: int
    """Completions left out: no finite score, aborted, or malformed."""
    malformed_logprobs: int
    """Unusable completions with a behaviour log-prob that is not finite, above 0 or below -10,000 nats."""
    zero_signal_groups: int
    """Groups whose advantages are all exactly 0."""
    signal_share: float
    """Share of the groups with a signal among those that are solved or have one; mean over the minibatches."""
    advantages: dict[RolloutKey, float]
    """Advantage of every usable completion, by (group_id, index of the completion)."""
    seconds: dict[str, float]
    """By phase: `pack`, `forward_backward`, `optimizer`, `report`."""


def of_start(sums: Sums, update: int, minibatches: int) -> Sums:
    """Return the sums of an update without those that say nothing of the weights at the start of the step.

    Where those weights were not scored beforehand, the present ones stand in for them. In the first update they are the
    same. In the rest of the first pass they have moved: the gap between kernels must not contain that, while ratios of all
    tokens are still nearer to the truth than those of the first update alone (docs/staleness.md).

    Args:
        update: number of the update in the step, from 1.
        minibatches: updates of one pass.
    """
    gone = () if update == 1 else ("gap",) if update <= minibatches else ("gap", "rho_", "share_")
    return {name: total for name, total in sums.items() if not name.startswith(gone)}


def build_report(
    totals: Sequence[Sums],
    batches: Sequence[StepBatch],
    updates: Sequence[Update],
    *,
    group_size: int,
    seconds: dict[str, float],
) -> StepReport:
    """Divide the merged sums of `algorithms.diagnostics`, once, and put the rest beside them.

    Args:
        totals: of each update. They have the learner's own `loss` as well, `kl` only where there is a reference, and
            `value_loss` only where there is a critic.
        group_size: completions of a group that are sampled.
    """
    sums = {name: total.item() for name, total in merge(totals).items()}
    tokens, current = max(sums["tokens"], 1.0), sums["gap_tokens"]
    diagnostics = report(totals)
    return StepReport(
        skipped=next((u.skipped for u in reversed(updates) if u.skipped is not None), None),
        zero_gradients=sum(u.grad_norm == 0 for u in updates),
        loss=sums["loss"] / len(updates),
        grad_norm=max(u.grad_norm for u in updates),
        lr=updates[-1].lr,
        entropy=sums["entropy"] / tokens,
        clip_ratio=sums["clipped"] / tokens,
        importance_mean=diagnostics["ratio_mean"],
        importance_capped=diagnostics.get("bounded_above", 0.0),
        effective_sample_share=diagnostics["ess_token"],
        shares_within=shares_within(sums),
        kl_reference=sums["kl"] / tokens if "kl" in sums else None,
        value_loss=sums["value_loss"] / len(updates) if "value_loss" in sums else None,
        logprob_gap_mean=sums["gap"] / current if current else None,
        logprob_gap_max=sums["gap_max"] if current else None,
        diagnostics=diagnostics,
        group_size=group_size,
        tokens_trained=sum(batch.num_tokens for batch in batches),
        rollouts=sum(batch.num_completions for batch in batches),
        rollouts_unusable=sum(batch.rollouts.num_unusable for batch in batches),
        malformed_logprobs=sum(batch.rollouts.num_malformed for batch in batches),
        zero_signal_groups=sum(batch.zero_signal_groups for batch in batches),
        signal_share=sum(batch.signal_share for batch in batches) / len(batches),
        advantages={
            key: advantage
            for batch in batches
            for key, advantage in zip(batch.rollouts.keys, batch.advantages.tolist(), strict=True)
        },
        seconds=seconds,
    )


class PhaseClock:
    """Seconds by phase; on a GPU a phase ends when its work is done. Other streams, as that of a broadcast, are not awaited."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block as `phase`."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
