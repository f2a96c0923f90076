"""What the learner writes down of each step: events, metrics, samples. It reads, and changes nothing of the run."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from asyncgrpo import metrics
from asyncgrpo.config import Config
from asyncgrpo.learner.learner import StepReport
from asyncgrpo.recording.events import Event, EventLog, read_events
from asyncgrpo.recording.loggers import Loggers
from asyncgrpo.recording.samples import SampleWriter, samples_of
from asyncgrpo.recording.training_watch import TrainingWatch
from asyncgrpo.types import Group, Rollout, WeightVersion
from asyncgrpo.weights.publisher import Publication
from asyncgrpo.wire.messages import EvalResult

log = logging.getLogger(__name__)


def lag_of(group: Group, version: WeightVersion) -> int:
    """Optimizer steps from the oldest token of `group` to the step that starts at `version`."""
    return version.version - group.versions[0].version


class Recorder:
    """Writes a run's events, samples and outside loggers."""

    def __init__(self, config: Config, run_dir: Path, decode: Callable[[Sequence[int]], str], settings: dict) -> None:
        """
        Args:
            decode: token ids to text, special tokens kept.
            settings: the resolved configuration, for outside loggers.
        """
        self._every = config.run.samples_every
        self._decode = decode
        self.events = EventLog(run_dir / "metrics.jsonl")
        self._samples = SampleWriter(run_dir / "samples")
        # Thousands of answers take seconds to decode, which the next step must not wait for; at most one step is behind.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None
        self._loggers = Loggers(config.run.loggers, run_dir, run_dir.name, settings)
        self._watch = TrainingWatch()
        self.totals: dict[str, float] = {}
        """Counters of the run, those before a resume included."""
        self._before: dict[str, float] = {}
        self._left: dict[str, Any] = {}

    def resume(self, step: int, totals: dict[str, float]) -> None:
        """Go on after `step`: later events are forgotten, counters go on from `totals`."""
        self.events.resume_at(step)
        for event in read_events(self.events.path):
            self._watch.see(event)
        self._before = dict(totals)
        self.totals = dict(totals)

    def step(
        self,
        step: int,
        version: WeightVersion,
        groups: list[Group],
        report: StepReport,
        counters: dict[str, float],
        seconds: dict[str, float],
    ) -> None:
        """One optimizer step: `version` is what it started from."""
        event = step_fields(groups, version, report) | self._count(counters)
        event |= {"step": step, "version": f"{version.lineage}.{step}", "seconds": seconds}
        metrics.observe_step(event)
        written = self.events.write("step", **event)
        self._loggers.log(step, written)
        self._warn_of(written)
        if step % self._every == 0:
            self.flush()
            self._writing = self._writer.submit(self._write_samples, step, version, groups, report)

    def sync(self, publication: Publication) -> None:
        """A publication that landed."""
        metrics.weight_sync_total.labels(outcome="ok").inc()
        metrics.weight_sync_seconds.observe(publication.seconds)
        metrics.weight_sync_bytes_total.inc(publication.num_bytes * len(publication.generators))
        metrics.generators_in_sync.set(len(publication.generators))
        metrics.learner_weight_version.set(publication.version.version)
        self.events.write(
            "sync",
            version=str(publication.version),
            engines=len(publication.generators),
            ms=1000 * publication.seconds,
            checksum="ok",
            bytes=publication.num_bytes,
            digest=publication.digest,
            attempts=publication.attempts,
        )
        for name in publication.dropped:
            self.events.write("restart", actor=name, reason="left out of the weight group: it did not answer")

    def no_more(self, counters: dict[str, float]) -> None:
        """There is no further batch. Groups may have left untrained since the last one; the `end` event will say so."""
        counted = self._count(counters)
        self._left = {name: counted[name] for name in ("dropped", "filtered", "discarded") if counted[name]}

    def end(self, status: str, step: int) -> None:
        """The run is over."""
        self.events.write("end", status=status, step=step, **self._left)

    def evaluation(self, result: EvalResult) -> None:
        """An evaluation that ended."""
        fields: dict[str, Any] = {
            "step": result.step,
            "version": None if result.newest is None else str(result.newest),
            "versions_answered": sorted({str(v) for v in (result.oldest, result.newest) if v is not None}),
            "reward_mean": result.reward_mean,
            "answers": result.answers,
            "failures": result.failures,
            "answer_length_mean": result.answer_length_mean,
            "ms": 1000 * result.seconds,
        }
        if result.reward_mean is not None:
            metrics.eval_reward_mean.set(result.reward_mean)
            self._loggers.log(result.step, {"eval": {"reward_mean": result.reward_mean}})
        self._warn_of(self.events.write("eval", **fields))

    def _warn_of(self, event: Event) -> None:
        warning = self._watch.see(event)
        if warning is not None:
            about, text = warning
            log.warning("%s", text)
            self.events.write("warning", about=about, text=text)

    def flush(self) -> None:
        """Wait until the samples of every step so far are on disk, or the disk has refused them, which is only said."""
        if self._writing is not None:
            try:
                self._writing.result()
            except OSError as error:
                log.warning("samples of a step cannot be written: %s", error)
            self._writing = None

    def close(self) -> None:
        """Finish writing."""
        self.flush()
        self._writer.shutdown()
        self._loggers.close()

    def _write_samples(self, step: int, version: WeightVersion, groups: list[Group], report: StepReport) -> None:
        rows = []
        for group in groups:
            advantages = [report.advantages.get((group.group_id, r.completion.index)) for r in group.rollouts]
            rows += samples_of(group, step=step, lag=lag_of(group, version), advantages=advantages, decode=self._decode)
        self._samples.write(step, rows)

    def _count(self, counters: dict[str, float]) -> dict[str, Any]:
        """Totals of the run, and groups that left untrained since the last count."""
        prompts_done = counters.get("prompts_done", 0.0)  # the buffer counts these over all starts by itself
        bias = {name.removeprefix("bias_"): value for name, value in counters.items() if name.startswith("bias_")}
        totals = Counter(self._before)
        totals.update({n: count for n, count in counters.items() if n != "prompts_done" and not n.startswith("bias_")})

        def since_before(prefix: str) -> dict[str, int]:
            names = [name for name in totals if name.startswith(prefix)]
            new = {name.removeprefix(prefix): int(totals[name] - self.totals.get(name, 0.0)) for name in names}
            return {name: count for name, count in new.items() if count}

        left = {"dropped": since_before("groups_dropped_"), "filtered": since_before("filtered_")}
        left["discarded"] = since_before("answers_")
        self.totals = dict(totals)
        return {
            "tokens_generated": int(totals["tokens_generated"]),
            "tokens_dropped": int(totals["tokens_stale"]),
            "tokens_filtered": int(totals["tokens_filtered"]),
            "prompts_done": int(prompts_done),
            **({"bias": bias} if bias else {}),
        } | left


def step_fields(groups: list[Group], version: WeightVersion, report: StepReport) -> dict[str, Any]:
    """What a `step` event says of a batch and of its step (`recording/event_kinds.py` lists the fields)."""
    rollouts = [r for g in groups for r in g.rollouts if r.completion.index < report.group_size]
    rewards = np.array([r.score.value for r in rollouts if r.score.value is not None], dtype=np.float64)
    lengths = [len(r.completion.token_ids) for r in rollouts]
    lags = Counter(lag_of(g, version) for g in groups)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_max": float(rewards.max()),
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "entropy": report.entropy,
        "clip_ratio": report.clip_ratio,
        "importance_mean": report.importance_mean,
        "importance_capped": report.importance_capped,
        "kl_reference": report.kl_reference,
        "logprob_gap_mean": report.logprob_gap_mean,
        "logprob_gap_max": report.logprob_gap_max,
        "lags": {str(lag): count for lag, count in sorted(lags.items())},
        "answers": len(rollouts),
        "zero_signal_groups": report.zero_signal_groups,
        "signal_share": report.signal_share,
        "malformed_logprobs": report.malformed_logprobs,
        "value_loss": report.value_loss,
        "diagnostics": report.diagnostics,
        "skipped": report.skipped,
        "answer_length_mean": float(np.mean(lengths)),
        "truncated_share": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
        "tokens_trained": report.tokens_trained,
        "reward_parts": mean_parts(rollouts),
        "failures": dict(Counter(r.score.failure for r in rollouts if r.score.failure is not None)),
    }


def mean_parts(rollouts: list[Rollout]) -> dict[str, float]:
    """Mean of each named part of the rewards, over the answers that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.score.parts.items():
            values[name].append(value)
    return {name: float(np.mean(part)) for name, part in sorted(values.items())}
