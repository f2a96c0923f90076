"""What one step says of itself, and how long its phases took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from asyncgrpo.algorithms.diagnostics import effective_sample_share
from asyncgrpo.learner.batching import AnswerKey, StepBatch


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, over all ranks. Means are over the trained tokens of the step; log-probs in nats."""

    skipped: str | None
    """Why the weights were left as they were; None: they were changed."""
    loss: float
    """Value of the objective that was minimised: surrogate, KL and entropy."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of this step (of the step that would have been, if skipped)."""
    entropy: float
    clip_ratio: float
    """Share of tokens whose gradient the clip took away."""
    importance_mean: float
    """Mean of proximal / behaviour policy before truncation."""
    importance_capped: float
    """Share of tokens above the cap."""
    effective_sample_share: float
    """(Σρ)² / (n Σρ²) of those ratios: 1 when all are equal."""
    kl_reference: float | None
    """Mean estimate of the KL to the reference; None without a reference."""
    logprob_gap_mean: float | None
    """Mean |learner - generator| log-prob on tokens that these very weights sampled: what their kernels disagree by.
    None where there are no such tokens."""
    logprob_gap_max: float | None
    tokens_trained: int
    answers: int
    """Answers trained."""
    answers_unusable: int
    """Answers left out: no score, aborted, or a log-prob that is not a number."""
    zero_signal_groups: int
    """Groups whose advantages are all exactly 0."""
    advantages: dict[AnswerKey, float]
    """Of every trained answer, by (group_id, index of the answer)."""
    seconds: dict[str, float]
    """By phase: `pack`, `forward_backward`, `optimizer`, `report`."""


def build_report(
    sums: dict[str, float],
    batch: StepBatch,
    *,
    skipped: str | None,
    grad_norm: float,
    lr: float,
    seconds: dict[str, float],
) -> StepReport:
    """Divide the merged sums of `algorithms.diagnostics`, once, and put the rest beside them.

    `sums` has the learner's own `loss` as well, and `kl` only where there is a reference.
    """
    tokens, current = max(sums["tokens"], 1.0), sums["gap_tokens"]
    return StepReport(
        skipped=skipped,
        loss=sums["loss"],
        grad_norm=grad_norm,
        lr=lr,
        entropy=sums["entropy"] / tokens,
        clip_ratio=sums["clipped"] / tokens,
        importance_mean=sums["importance"] / tokens,
        importance_capped=sums["importance_capped"] / tokens,
        effective_sample_share=effective_sample_share(sums["importance"], sums["importance_squares"], sums["tokens"]),
        kl_reference=sums["kl"] / tokens if "kl" in sums else None,
        logprob_gap_mean=sums["gap"] / current if current else None,
        logprob_gap_max=sums["gap_max"] if current else None,
        tokens_trained=batch.num_tokens,
        answers=batch.num_answers,
        answers_unusable=batch.num_unusable,
        zero_signal_groups=batch.zero_signal_groups,
        advantages=batch.advantages,
        seconds=seconds,
    )


class PhaseClock:
    """Seconds by phase; on a GPU a phase ends when its work is done."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block as `phase`."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
