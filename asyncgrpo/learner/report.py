"""The report of a step: losses, ratios, counts, seconds by phase, and the fields of its event."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncgrpo import metrics
from asyncgrpo.algorithms.diagnostics import Sums, merge, report, shares_within
from asyncgrpo.learner.packing import StepBatch
from asyncgrpo.types import Group, PolicyVersion, Rollout

RolloutKey = tuple[str, int]
"""group_id, and index of the completion in its group."""


class Update(NamedTuple):
    """One optimizer update, made or skipped."""

    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of this update, also if it was skipped."""
    skipped: str | None
    """Reason of a skip; None if the update was made or its gradient was exactly 0."""


@dataclass(frozen=True)
class StepReport:
    """One step over all its updates and all ranks. `recording/events.py` has the meaning of the fields of its event.

    Means are over the trained tokens. If completions of advantage 0 are not run, ratios, effective sample shares, rejections
    and the gap are over the tokens that are run, because they need the learner's log-probs.
    """

    skipped: str | None
    zero_gradients: int
    loss: float
    grad_norm: float
    lr: float
    entropy: float
    clip_ratio: float
    importance_mean: float
    """Before any correction, for every anchor. With several updates and without a scoring pass at the start of the step, the
    weights of each update of the first pass stand in for the proximal policy."""
    importance_capped: float
    shares_within: dict[int, float]
    """Effective sample share of the completions up to each lag; the largest lag is that of the oldest token."""
    kl_reference: float | None
    value_loss: float | None
    logprob_gap_mean: float | None
    logprob_gap_max: float | None
    diagnostics: dict[str, float]
    """Report of `algorithms.diagnostics` on ratios, updates, rejections and lags, all before rejection."""
    group_size: int
    """Sampled completions per group. Completions from this index on are greedy baselines."""
    tokens_trained: int
    malformed_logprobs: int
    zero_signal_groups: int
    signal_share: float
    advantages: dict[RolloutKey, float]
    """Advantage of every usable completion, by (group_id, index of the completion)."""
    seconds: dict[str, float]
    """By phase: `pack`, `forward_backward`, `optimizer`, `report`."""


def of_start(sums: Sums, update: int, minibatches: int) -> Sums:
    """Return the sums of an update that describe the weights at the start of the step.

    Without a scoring pass the current weights stand in for those at the start. They are equal in the first update. In the
    rest of the first pass they have moved: the kernel gap must not contain that change, but the ratios of all tokens are
    still closer to the exact ones than those of the first update alone (docs/staleness.md).

    Args:
        update: number of the update in the step, from 1.
        minibatches: updates per pass.
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
    more_diagnostics: dict[str, float],
) -> StepReport:
    """Build the report from the sums of all updates. Each quotient is taken once, from merged sums.

    Args:
        totals: sums of each update (`algorithms.diagnostics`), with `loss`; `kl` only with a reference, `value_loss` only
            with a critic.
        group_size: sampled completions per group.
    """
    sums = {name: total.item() for name, total in merge(totals).items()}
    tokens, current = max(sums["tokens"], 1.0), sums["gap_tokens"]
    diagnostics = report(sums) | more_diagnostics
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
        shares_within=shares_within(sums),
        kl_reference=sums["kl"] / tokens if "kl" in sums else None,
        value_loss=sums["value_loss"] / len(updates) if "value_loss" in sums else None,
        logprob_gap_mean=sums["gap"] / current if current else None,
        logprob_gap_max=sums["gap_max"] if current else None,
        diagnostics=diagnostics,
        group_size=group_size,
        tokens_trained=sum(batch.num_tokens for batch in batches),
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
    """Seconds by phase. On a GPU a phase ends when the current stream is done; other streams (a broadcast) are ignored."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._device, self._lap_started = device, time.monotonic()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block as `phase`, without the phases inside it."""
        started = time.monotonic() - sum(self.seconds.values())
        try:
            yield
        finally:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            spent = time.monotonic() - sum(self.seconds.values()) - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def lap(self, inside: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return seconds by phase since the last lap; `other` is the time outside of all phases.

        Args:
            inside: seconds by phase inside `forward_backward`; `optimizer` is listed separately.
        """
        now = time.monotonic()
        spent, self.seconds = self.seconds, {}
        total, self._lap_started = now - self._lap_started, now
        spent["optimizer"] = (inside or {}).get("optimizer", 0.0)
        spent["forward_backward"] = spent.get("forward_backward", 0.0) - spent["optimizer"]
        spent["other"] = max(0.0, total - sum(spent.values()))
        return spent


# -- the event of a step -----------------------------------------------------------------------------------------------


def lag_of(group: Group, version: PolicyVersion) -> int:
    """Return the optimizer steps from the oldest token of `group` to the step that starts at `version`."""
    return version.number - group.versions[0].number


_NOT_IN_EVENT = frozenset({"shares_within", "group_size", "advantages", "seconds"})


def step_fields(groups: list[Group], version: PolicyVersion, report: StepReport, success: float) -> dict[str, Any]:
    """Return the fields of a `step` event for a batch and its report (`recording/events.py` lists them).

    Args:
        success: reward from which a completion is right.
    """
    rollouts = [r for g in groups for r in g.rollouts if r.completion.index < report.group_size]
    rewards = np.array([r.score.value for r in rollouts if r.score.value is not None], dtype=np.float64)
    lengths = [len(r.completion.token_ids) for r in rollouts]
    lags = Counter(lag_of(g, version) for g in groups)
    parts = parts_of(rollouts)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_max": float(rewards.max()),
        **{name: value for name, value in vars(report).items() if name not in _NOT_IN_EVENT},
        "lags": {str(lag): count for lag, count in sorted(lags.items())},
        "completions": len(rollouts),
        "completion_length_mean": float(np.mean(lengths)),
        **turn_fields(rollouts),
        "truncated_share": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
        "reward_parts": {name: float(np.mean(values)) for name, values in parts.items()},
        "reward_parts_std": {name: float(np.std(values)) for name, values in parts.items()},
        "failures": dict(Counter(r.score.failure for r in rollouts if r.score.failure is not None)),
        "sources": by_source(groups, report.group_size, success),
    }


def by_source(groups: list[Group], group_size: int, success: float) -> dict[str, dict[str, float | None]]:
    """Return the figures of each `data_source`. The rarest sources over the limit are merged into one."""
    found: dict[str, list[list[Rollout]]] = defaultdict(list)
    for group in groups:
        rollouts = [r for r in group.rollouts if r.completion.index < group_size]
        found[group.prompt.source or "(none)"].append(rollouts)
    names = sorted(found, key=lambda name: (-len(found[name]), name))
    if rest := names[metrics.MAX_SOURCES - 1 :] if len(names) > metrics.MAX_SOURCES else []:
        found["(others)"] = [rollouts for name in rest for rollouts in found.pop(name)]
    return {name: _of_source(found[name], success) for name in sorted(found)}


def _of_source(groups: list[list[Rollout]], success: float) -> dict[str, float | None]:
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [[r.score.value for r in group if r.score.value is not None] for group in groups]
    values = [value for of_group in rewards for value in of_group]
    return {
        "groups": len(groups),
        "reward_mean": float(np.mean(values)) if values else None,
        "success_share": sum(value >= success for value in values) / len(values) if values else None,
        "zero_signal_share": sum(len(set(of_group)) <= 1 for of_group in rewards) / len(groups),
        "completion_length_mean": float(np.mean([len(r.completion.token_ids) for r in rollouts])) if rollouts else None,
        "truncated_share": sum(r.completion.finish_reason == "length" for r in rollouts) / max(1, len(rollouts)),
    }


def turn_fields(rollouts: list[Rollout]) -> dict[str, float]:
    """Return the figures of a batch with environments; empty without observations."""
    completions = [r.completion for r in rollouts]
    observed = sum(len(one.token_ids) for c in completions for one in c.observations)
    turns_mean = float(np.mean([len(c.turns) for c in completions]))
    return {"turns_mean": turns_mean, "tokens_observed": observed} if observed else {}


def parts_of(rollouts: list[Rollout]) -> dict[str, list[float]]:
    """Return the values of each named reward part. Over the limit, the most frequent names are kept."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.score.parts.items():
            values[name].append(value)
    most = sorted(values, key=lambda name: (-len(values[name]), name))[: metrics.MAX_REWARD_PARTS]
    return {name: values[name] for name in sorted(most)}
