"""The record of each step: events, metrics, samples. It reads the run and never changes it.

    generated = trained + filtered + dropped (stale, failed, aborted, duplicate, unusable) + waiting + undone

A start counts from its checkpoint on. The counts of the previous start at that checkpoint are known, and so are the tokens
that the journal restored. The difference was generated and lost in a crash: `undone`.

The counts are a pure function of the events of a run, in order. A start that resumes replays the events so far.
"""

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from asyncgrpo import metrics
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import CheckpointError
from asyncgrpo.host import CoreClock, CoreSeconds, refused_as
from asyncgrpo.learner.report import StepReport, lag_of, step_fields
from asyncgrpo.recording.events import Event, EventLog, is_undone, read_events
from asyncgrpo.recording.health import limit_of
from asyncgrpo.recording.loggers import Loggers
from asyncgrpo.recording.progress import unusable_of
from asyncgrpo.recording.samples import EVALS, TRAINED, SampleWriter, paths_in, samples_of
from asyncgrpo.types import Group, PolicyVersion
from asyncgrpo.weights.publication import Publication
from asyncgrpo.wire.rollouts import OF_ONE_BATCH, EvalResult

# -- warnings about the curves: a pure function of the events, in order (docs/small-tasks.md explains each) ------------

WINDOW = 20
"""Number of steps in the window."""
LITTLE, ENOUGH = 1 - limit_of("LittleSignal"), 0.5
"""Mean shares of groups with a signal: the warning starts below the first and ends above the second."""
FALL = 0.05
"""Share of the best evaluation's gain over the first: two consecutive evaluations that lost more than this, and more than the
interval of the mean of a suite, are a fall."""
NARROW = 0.05
"""Share of the first step's entropy below which the policy hardly explores."""
SHORT = 0.1
"""Remaining share of the way from the first mean reward to the best completion's reward above which a task is unsolved."""
RISES = 0.01
"""The reward still improves if it rises from one half of the window to the next by more than this share of that way."""
FAR = 0.5
"""Mean KL of the behaviour policy to the trained one, nats per token, above which most ratios are uninformative."""


_LOOKED_AT = ("zero_signal_groups", "lags", "reward_mean", "reward_max", "entropy", "diagnostics")


class TrainingWatch(msgspec.Struct, kw_only=True):
    """Emits each warning once per occurrence of its condition. Its fields are its state in a checkpoint."""

    steps: list[Event] = []
    """The newest `WINDOW` steps, reduced to the watched fields."""
    start: Event | None = None
    """The first step."""
    is_on: dict[str, bool] = {}
    """By warning, True while its condition lasts."""
    first: float | None = None
    """Mean reward of the first evaluation."""
    best: tuple[int, float] | None = None
    """Step and mean reward of the best evaluation."""
    before: tuple[int, float] | None = None
    """Step and mean reward of the newest evaluation."""

    def see(self, event: Event) -> tuple[str, str] | None:
        """Process one event. Return the topic (`signal`, `entropy`, `steps` or `evaluation`) and the text of a new warning,
        or None."""
        if event["event"] == "step" and event.get("zero_signal_groups") is not None:
            event = {name: event.get(name) for name in _LOOKED_AT}
            self.steps = [*self.steps[1 - WINDOW :], event]
            self.start = self.start or event
            watched = {"signal": self._signal, "entropy": self._entropy, "steps": self._far}
            return next(filter(None, (self._new(about, look) for about, look in watched.items())), None)
        if event["event"] == "eval" and event.get("reward_mean") is not None:
            return self._new("evaluation", lambda: self._fall(event))
        return None

    def _new(self, about: str, look: Callable[[], str | bool]) -> tuple[str, str] | None:
        """Return the warning if it is new. `look` returns its text, False if the condition is over, True to keep the state."""
        if about != "evaluation" and len(self.steps) < WINDOW:
            return None
        found, was_on = look(), self.is_on.get(about, False)
        if found is not True:
            self.is_on[about] = bool(found)
        return (about, found) if isinstance(found, str) and not was_on else None

    def _signal(self) -> str | bool:
        share = fmean(1 - step["zero_signal_groups"] / max(sum(step["lags"].values()), 1) for step in self.steps)
        if share >= LITTLE:
            return share <= ENOUGH
        reward = self.steps[-1]["reward_mean"]
        if all(step.get("reward_max") == step["reward_mean"] for step in self.steps) and reward <= 0:
            return (
                f"no completion of the last {WINDOW} steps has earned more than another (all have {reward:.4g}), so there "
                "is no signal: reward parts of a right answer, start with easier prompts, or give the model examples "
                "first; a larger algorithm.group_size helps if one completion in some hundreds is right"
            )
        return (
            f"only {share:.0%} of the groups of the last {WINDOW} steps have two different rewards (mean reward "
            f"{reward:.4g}): the others are solved or hopeless and have no signal; "
            "choose other prompts, or set algorithm.filter_zero_signal=true"
        )

    def _entropy(self) -> str | bool:
        """Detect entropy collapse: the policy hardly explores and does not improve, although better completions exist."""
        assert self.start is not None
        entropies, rewards, best = (self._numbers(name) for name in ("entropy", "reward_mean", "reward_max"))
        before, first = self.start.get("entropy"), self.start["reward_mean"]
        if not (entropies and rewards and best and before) or fmean(entropies) >= 2 * NARROW * before:
            return False
        way, half = max(best) - first, WINDOW // 2
        if max(best) - fmean(rewards) <= SHORT * way:  # equal where all rewards are
            return False
        if fmean(entropies) >= NARROW * before or fmean(rewards[half:]) - fmean(rewards[:half]) > RISES * way:
            return True
        return (
            f"the policy has settled at a mean reward of {fmean(rewards):.4g}, where the best completion has {max(best):.4g}: "
            f"its entropy is {fmean(entropies):.2g} nats, from {before:.2g}, so it no longer explores; return to an earlier "
            "checkpoint or restart with a smaller learner.lr, and check whether the reward favours its present behaviour: "
            "asyncgrpo samples RUN --worst"
        )

    def _far(self) -> str | bool:
        distances = [(step.get("diagnostics") or {}).get("kl_k3") for step in self.steps]
        known = [distance for distance in distances if distance is not None]
        if not known or fmean(known) <= FAR:
            return bool(known) and fmean(known) > FAR / 2
        return (
            f"the updates are large: in the last {WINDOW} steps the policy had moved {fmean(known):.2g} nats per token from "
            "the weights that sampled, so training is unstable; lower learner.lr or buffer.max_lag"
        )

    def _numbers(self, name: str) -> Sequence[float]:
        """Return one field of every step of the window; empty if a step lacks it."""
        found = [step.get(name) for step in self.steps]
        return [] if None in found else [number for number in found if number is not None]

    def _fall(self, event: Event) -> str | bool:
        step, reward = event["step"], event["reward_mean"]
        numbers = [suite["numbers"] for suite in event.get("suites", {}).values()]
        chance = min((some["reward"][0] - some["reward"][1] for some in numbers if some), default=0.0)
        self.first = reward if self.first is None else self.first
        newest, before = (step, reward), self.before or (0, -math.inf)
        best_step, best = max(self.best or newest, newest, key=lambda seen: seen[1])
        self.best, self.before = (best_step, best), newest
        if max(before[1], reward) >= best - max(FALL * (best - self.first), chance):
            return False
        return (
            f"the evaluation has fallen to {reward:.4g} at step {step}, from {best:.4g} at step {best_step}: "
            "the policy is getting worse; see docs/stability.md"
        )


# -- token accounting --------------------------------------------------------------------------------------------------

KEPT = ("trained", "filtered")
DROPPED = ("stale", "failed", "aborted", "duplicate", "unusable")
_PREFIX = "tokens_"
_OF_NOW = ("tokens_in_flight", "tokens_recovered", "prompts_done")
"""Counters that are gauges, or that the buffer already counts over all starts."""


class Ledger:
    """The counters of a run, from the counters of this start's buffer."""

    def __init__(self, before: Mapping[str, float] | None = None, seen: Mapping[str, float] | None = None) -> None:
        """
        Args:
            before: `totals` of the checkpoint that this start resumes from.
            seen: `tokens` of the last event of the previous start.
        """
        self._before: Mapping[str, float] = defaultdict(float, before or {})
        self._seen = max((seen or {}).get("generated", 0.0), self._before["tokens_generated"])
        fates = ("filtered", *DROPPED, "undone")  # the journal restores none of these
        self._lost = sum((seen or {}).get(fate, 0.0) - self._before[_PREFIX + fate] for fate in fates)

    def totals(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Return the counters of the run so far, for the next checkpoint.

        Args:
            counters: of the buffer of this start (`buffer/service.py`).
        """
        before = self._before
        totals: dict[str, float] = defaultdict(float, before)
        for name, count in counters.items():
            if name not in _OF_NOW and not name.startswith(("bias_", OF_ONE_BATCH)):
                totals[name] += count
        there = sum(before[_PREFIX + fate] for fate in (*KEPT, *DROPPED, "undone"))
        there += counters.get("tokens_recovered", 0.0)
        # Restored tokens may be newer than the last event, so they do not account for those that were lost before it.
        undone = max(0.0, self._lost, self._seen - there)
        totals["tokens_generated"] = there + undone + counters.get("tokens_generated", 0.0)
        totals["tokens_undone"] = before["tokens_undone"] + undone
        return totals

    def tokens(self, counters: Mapping[str, float]) -> dict[str, int]:
        """Return the terms of the sum at the top of this file."""
        totals = self.totals(counters)
        fates = {fate: int(totals[_PREFIX + fate]) for fate in ("generated", *KEPT, *DROPPED, "undone")}
        return fates | {"waiting": int(counters.get("tokens_in_flight", 0.0))}


# -- the record --------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """State of the record at a checkpoint, so that a resume reads only the events after it."""

    num_bytes: int = 0
    """Size of the file of events at the checkpoint."""
    reported: dict[str, int] = {}
    """Groups and completions reported so far, by counter."""
    watched: TrainingWatch = msgspec.field(default_factory=TrainingWatch)


class Recorder:
    """Writes events, samples and external loggers of a run."""

    def __init__(self, config: Config, run_dir: Path, decode: Callable[[Sequence[int]], str], settings: dict) -> None:
        """
        Args:
            decode: token ids to text, special tokens kept.
            settings: the resolved configuration, for external loggers.
        """
        self._every = config.run.samples_every
        self._success = config.reward.success
        self._decode = decode
        self.events = EventLog(run_dir / "metrics.jsonl")
        self._samples = SampleWriter(run_dir / "samples", config.run.keep_samples)
        # Decoding thousands of completions takes seconds, so a thread does it, at most one step behind.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None
        self._loggers = Loggers(names, run_dir, run_dir.name, settings) if (names := config.run.loggers) else None
        self._watch = TrainingWatch()
        self._published = 0
        self._in_sync: deque[set[str]] = deque(maxlen=2)  # last two publications: a busy generator skips one
        self._ledger = Ledger()
        self._cores, self._cores_before = CoreClock(), CoreSeconds(0.0, 0.0, 0.0)
        self._reported: Counter[str] = Counter()
        """Groups and completions reported in events, by counter."""
        self._left: dict[str, Any] = {}
        """Counts of the `end` event, should the run end now."""
        self.undone: dict[str, float] = {}
        """Tokens and steps that a crash before this start undid, for the `start` event."""

    def state(self) -> dict[str, Any]:
        """Return a `Recorded` of the events so far for a checkpoint.

        Raises:
            CheckpointError: the disk refuses events. After a crash those of the steps before the checkpoint would be missing.
        """
        with refused_as(CheckpointError, f"no checkpoint while {self.events.path} cannot be written"):
            num_bytes = self.events.sync()
        return msgspec.to_builtins(Recorded(num_bytes=num_bytes, reported=self._reported, watched=self._watch))

    def resume(self, step: int, totals: dict[str, float], record: Mapping[str, Any] | None = None) -> None:
        """Resume after `step`: drop later events and samples, continue the counters from `totals`.

        Args:
            record: `state` at the checkpoint; None: unknown, so every event is read.
        """
        before = msgspec.convert(record or {}, Recorded)
        self._reported, self._watch, undone = Counter(before.reported), before.watched, 0
        seen: dict[str, int] = {"generated": 0}
        for event in read_events(self.events.path, before.num_bytes):
            # Tokens of the run so far; not every event has them.
            tokens = event.get("tokens") or {"generated": event.get("generated") or 0}
            seen = max(seen, tokens, key=lambda tokens: tokens["generated"])
            if is_undone(event, step):
                undone += event["event"] == "step"
            else:
                self._watch.see(event)
                for prefix, field in _REPORTED.items():
                    self._reported.update({prefix + name: n for name, n in (event.get(field) or {}).items()})
        self.undone = {"generated": int(seen["generated"]), "undone_steps": undone}
        self.events.resume_at(step, before.num_bytes)
        for folder in TRAINED, EVALS:
            for later, path in paths_in(self.events.path.with_name(folder)).items():
                if later > step:
                    path.unlink(missing_ok=True)
        self._ledger = Ledger(totals, seen)

    def start(self, **fields: Any) -> None:
        """Record a start. No step reports the groups that it dropped: a resume may undo that step, but not the drops."""
        self._reported.update({f"groups_dropped_{why}": n for why, n in unusable_of(fields).items()})
        self.events.write("start", **self.undone, **fields)

    def step(
        self,
        step: int,
        version: PolicyVersion,
        groups: list[Group],
        report: StepReport,
        counters: dict[str, float],
        seconds: dict[str, float],
    ) -> None:
        """Record one optimizer step that started from `version`."""
        event = step_fields(groups, version, report, self._success) | self._count(counters)
        self._left = {}
        now, before = self._cores.count(), self._cores_before
        self._cores_before = now
        event |= {
            "step": step,
            "version": f"{version.lineage}.{step}",
            "seconds": seconds,
            "cores": {name: count - old for name, count, old in zip(now._fields, now, before, strict=True)},
        }
        metrics.observe_step(event)
        written = self.events.write("step", **event)
        if self._loggers is not None:
            self._loggers.log(step, written)
        self._warn_of(written)
        if step % self._every == 0:
            self.flush()
            self._writing = self._writer.submit(self._write_samples, step, version, groups, report)

    def sync(self, publication: Publication) -> None:
        """Record a publication that landed."""
        outcome = "degraded" if publication.dropped else "repeated" if publication.attempts > 1 else "ok"
        metrics.weight_sync_total.labels(outcome=outcome).inc()
        metrics.weight_sync_seconds.observe(publication.seconds)
        metrics.weight_sync_bytes_total.inc(publication.sent_bytes)
        self._in_sync.append(set(publication.generators))
        metrics.generators_in_sync.set(len(set().union(*self._in_sync)))
        self._published = max(self._published, publication.version.number)
        metrics.learner_policy_version.set(self._published)
        fields: dict[str, Any] = {"left_out": list(publication.dropped)} if publication.dropped else {}
        if (gap := publication.gap) is not None:
            metrics.sync_gap_mean.set(gap.mean)
            metrics.sync_gap_max.set(gap.max)
            metrics.sync_gap_limit.set(publication.gap_limit)
            fields |= {"gap_mean": gap.mean, "gap_max": gap.max, "gap_limit": publication.gap_limit}
            fields |= {"differing": list(publication.differing)} if publication.differing else {}
        self.events.write(
            "sync",
            version=str(publication.version),
            engines=len(publication.generators),
            ms=1000 * publication.seconds,
            checksum="ok",
            bytes=publication.num_bytes,
            sent_bytes=publication.sent_bytes,
            weights_digest=publication.digest,
            attempts=publication.attempts,
            **fields,
        )

    def last(self, counters: dict[str, float]) -> dict[str, float]:
        """Take the buffer's counters after the last batch, for the `end` event should the run end here.

        Returns the totals for a checkpoint.
        """
        self._left = {"tokens": self._ledger.tokens(counters)}
        self._left |= {name: count for name, count in self._since(counters).items() if count}
        return self._ledger.totals(counters)

    def end(self, status: str, step: int) -> None:
        """Record the end of the run."""
        self.events.write("end", status=status, step=step, **self._left)

    def evaluation(self, result: EvalResult) -> None:
        """Record a complete evaluation."""
        of_all = result.fields()
        fields: dict[str, Any] = {
            "step": result.step,
            **{name: of_all[name] for name in _OF_EVALUATION},
            "reward_mean": result.reward_mean,
            "ms": 1000 * result.seconds,
            "suites": {name: suite.fields() for name, suite in result.suites.items()},
        }
        if result.reward_mean is not None:
            metrics.eval_reward_mean.set(result.reward_mean)
            if self._loggers is not None:
                numbers = {name: {k: n[0] for k, n in suite.numbers.items()} for name, suite in result.suites.items()}
                self._loggers.log(result.step, {"eval": {"reward_mean": result.reward_mean} | numbers})
        for name, suite in result.suites.items():
            for number, (value, _, _) in suite.numbers.items():
                metrics.eval_suite.labels(suite=name, number=number).set(value)
        self._warn_of(self.events.write("eval", **fields))

    def _warn_of(self, event: Event) -> None:
        warning = self._watch.see(event)
        if warning is not None:
            about, text = warning
            log.warning("%s", text)
            self.events.write("warning", about=about, text=text)

    def flush(self) -> None:
        """Wait until the samples of all steps so far are written. Failures of the disk are logged, not raised."""
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
        if self._loggers is not None:
            self._loggers.close()

    def _write_samples(self, step: int, version: PolicyVersion, groups: list[Group], report: StepReport) -> None:
        rows = []
        for group in groups:
            advantages = [report.advantages.get((group.group_id, r.completion.index)) for r in group.rollouts]
            rows += samples_of(group, step=step, lag=lag_of(group, version), advantages=advantages, decode=self._decode)
        self._samples.write(step, rows)

    def _count(self, counters: dict[str, float]) -> dict[str, Any]:
        """Return totals of the run, and groups dropped, filtered and discarded since the last event."""
        bias = {name.removeprefix("bias_"): value for name, value in counters.items() if name.startswith("bias_")}
        tokens, since = self._ledger.tokens(counters), self._since(counters)
        for prefix, name in _REPORTED.items():
            self._reported.update({prefix + key: count for key, count in since[name].items()})
        return {
            "tokens": tokens,
            "tokens_generated": tokens["generated"],
            "tokens_dropped": sum(tokens[fate] for fate in DROPPED),
            "tokens_filtered": tokens["filtered"],
            "prompts_done": int(counters.get("prompts_done", 0.0)),
            **({"bias": bias} if bias else {}),
            **figures(counters),
            **since,
        }

    def _since(self, counters: dict[str, float]) -> dict[str, dict[str, int]]:
        """Return the groups and completions that no event reported yet, by field and reason."""
        new = {name: int(count) - self._reported[name] for name, count in self._ledger.totals(counters).items()}
        return {
            field: {name.removeprefix(prefix): n for name, n in new.items() if n > 0 and name.startswith(prefix)}
            for prefix, field in _REPORTED.items()
        }


_OF_EVALUATION = ("version", "versions_sampled", "completions", "failures", "completion_length_mean")


def figures(counters: Mapping[str, float]) -> dict[str, Any]:
    """Return the buffer's figures of a batch and of the time since the previous one, as fields of the step; may be empty."""
    found = {
        name.removeprefix(OF_ONE_BATCH): value for name, value in counters.items() if name.startswith(OF_ONE_BATCH)
    }
    occupancy = ("max_lag", "slots", "under_way", "wanted")
    fields: dict[str, Any] = {name: int(found.pop(name)) for name in occupancy if name in found}
    if "ready_seconds" in found:
        fields["ready_seconds"] = found.pop("ready_seconds")
    return fields | ({"generators": found} if found else {})


_REPORTED = {"groups_dropped_": "dropped", "filtered_": "filtered", "completions_": "discarded"}
"""Prefixes of counters whose growth an event reports, and the field of the event."""
