"""The state of a run, computed from its events for `screen.py`, which formats it for the screen, `status` and the summary.

`Progress.update` consumes the events in order in constant memory: sums and the newest events.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncgrpo.recording.events import Event

RECENT = 10
"""Steps over which rates and shares are averaged."""
MOST_REWARDS = 10_000
"""Steps whose rewards are kept."""
_ENDS = 5
"""First and last rewards of the summary."""


_ACTIVITIES = ("generate", "reward", "weights", "idle")
_MEANS = ("under_way", "wanted", "ready_seconds", "slots", "logprob_gap_mean")


@dataclass
class Totals:
    """Sums over some steps."""

    learner: Counter[str] = field(default_factory=Counter)
    """Seconds by activity (`seconds_by_activity`)."""
    generators: Counter[str] = field(default_factory=Counter)
    """Seconds of all generators by activity."""
    lags: Counter[int] = field(default_factory=Counter)
    """Trained groups by lag."""
    max_lag: int | None = None
    """Largest bound on the lag in force; None: unknown."""
    sums: Counter[str] = field(default_factory=Counter)
    """Of the fields `_MEANS`."""
    counts: Counter[str] = field(default_factory=Counter)
    """Steps that have the field."""

    @classmethod
    def of(cls, steps: Iterable[Event]) -> "Totals":
        totals = cls()
        for step in steps:
            totals.add(step)
        return totals

    def add(self, step: Event) -> None:
        spent = step.get("generators") or {}
        self.learner.update(seconds_by_activity(step))
        self.generators.update({what: spent[what] for what in _ACTIVITIES if what in spent})
        self.lags.update(lags_of(step))
        if (bound := step.get("max_lag")) is not None:
            self.max_lag = max(bound, self.max_lag or 0)
        values = {name: step[name] for name in _MEANS if step.get(name) is not None}
        self.sums.update(values)
        self.counts.update(values.keys())

    def mean(self, name: str) -> float | None:
        """Return the mean of a field; None if no step has it."""
        return self.sums[name] / self.counts[name] if name in self.sums else None


@dataclass
class Progress:
    """Snapshot of a run's state."""

    run: str = ""
    sizes: str = ""
    total_steps: int | None = None
    total_prompts: int | None = None
    started: float | None = None
    """Unix time of the first event."""
    updated: float | None = None
    """Unix time of the last event."""
    steps: list[Event] = field(default_factory=list)
    """The newest of this start, `RECENT` and one more."""
    generated_before: int = 0
    """Tokens generated before this start."""
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_REWARDS))
    """Mean rewards of the newest steps."""
    first_rewards: list[float] = field(default_factory=list)
    """Mean rewards of the first five steps."""
    first_kl: float | None = None
    """KL to the reference or the teacher in the first step, nats per token."""
    tokens_trained: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind."""
    newest: dict[str, Event] = field(default_factory=dict)
    """Last event of each kind, but the evaluation of the latest step: it may end before an earlier one."""
    first_eval: Event | None = None
    syncs: list[Event] = field(default_factory=list)
    """The newest."""
    num_gaps: int = 0
    largest_gap: float | None = None
    """Largest sync gap of a token, nats."""
    largest_logprob_gap: float | None = None
    """Largest `logprob_gap_max`, nats."""
    warnings: list[str] = field(default_factory=list)
    """The newest."""
    undone_steps: int = 0
    """Steps trained again after a crash."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Sampled tokens of the run by fate, from the last event that has them."""
    slowest_recovery_s: float = 0.0
    paused: dict[str, Event] = field(default_factory=dict)
    """Last `rewards_paused` event of each generator whose rewards are paused, with `since`, its first."""
    is_paused: bool = False
    """True between the commands `pause` and `resume`."""
    advice: Event | None = None
    """The last `advice` event, until conditions change."""
    training_seconds: float = 0.0
    """From the start of the first step to the end of the last, without the time between a stop and a resume."""
    end: Event | None = None
    """`end` event of the current start."""
    totals: Totals = field(default_factory=Totals)
    """Of all steps."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups by reason."""
    filtered: Counter[str] = field(default_factory=Counter)
    """Groups by reason."""
    resumed: bool = True
    """True if the next step is the first of its process."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Progress":
        progress = cls()
        for event in events:
            progress.update(event)
        return progress

    def update(self, event: Event) -> None:
        """Consume one event. Unknown kinds are ignored, and `rewound` resets everything (see `events.Follower`)."""
        kind = event["event"]
        if kind == "rewound":
            self.__dict__.update(Progress().__dict__)
            return
        self.counts[kind] += 1
        self.newest[kind] = max(event, self.newest.get(kind, event), key=_step_of) if kind == "eval" else event
        if "time" in event:
            self.started = event["time"] if self.started is None else self.started
            self.updated = event["time"]
        if handle := getattr(self, f"_on_{kind}", None):
            handle(event)
        if (warning := warning_of(event)) is not None:
            _keep(self.warnings, warning, 5)

    def _on_start(self, event: Event) -> None:
        self.run, self.sizes = event.get("run", ""), event.get("sizes", "")
        self.total_steps, self.total_prompts = event.get("steps"), event.get("prompts")
        self.undone_steps += event.get("undone_steps") or 0
        self.generated_before = event.get("generated") or 0
        self.dropped.update(unusable_of(event))
        self.end = self.advice = None
        self.paused, self.is_paused = {}, False
        self.syncs.clear()  # this start has not landed their versions
        self.resumed = True

    def _on_step(self, event: Event) -> None:
        if self.resumed:
            self.training_seconds += seconds_of(event)
            self.steps.clear()
        else:
            self.training_seconds += max(0.0, event["time"] - self.steps[-1]["time"])
        self.resumed = False
        _keep(self.steps, event, RECENT + 1)
        self.tokens = event.get("tokens") or self.tokens
        # Its `tokens` are of the time before the step. A view that follows the end of a long file has not seen all steps.
        self.tokens_trained = self.tokens.get("trained", self.tokens_trained) + (event.get("tokens_trained") or 0)
        self.totals.add(event)
        self._count_untrained(event)
        if (gap := event.get("logprob_gap_max")) is not None:
            self.largest_logprob_gap = max(gap, self.largest_logprob_gap or gap)
        if (reward := event.get("reward_mean")) is not None:
            self.rewards.append(reward)
            if len(self.first_rewards) < _ENDS:
                self.first_rewards.append(reward)
        if self.first_kl is None:
            self.first_kl = event.get("kl_reference")

    def _count_untrained(self, event: Event) -> None:
        self.dropped.update(event.get("dropped") or {})
        self.filtered.update(event.get("filtered") or {})

    def _on_eval(self, event: Event) -> None:
        self.first_eval = min(self.first_eval or event, event, key=_step_of)

    def _on_sync(self, event: Event) -> None:
        _keep(self.syncs, event, 8)
        if (gap := event.get("gap_max")) is not None:
            self.num_gaps += 1
            self.largest_gap = max(gap, self.largest_gap or 0.0)

    def _on_command(self, event: Event) -> None:
        if event["refused"]:
            return
        self.advice = None
        if event["command"] in ("pause", "resume"):
            self.is_paused = event["command"] == "pause"

    def _on_restart(self, event: Event) -> None:
        self.advice = None
        if not event["actor"].startswith("generator"):  # the buffer is new, and reports again whose rewards are paused
            self.paused = {}

    def _on_recovered(self, event: Event) -> None:
        self.slowest_recovery_s = max(self.slowest_recovery_s, event["seconds"])

    def _on_advice(self, event: Event) -> None:
        self.advice = event

    def _on_rewards_paused(self, event: Event) -> None:
        first = self.paused.get(event["actor"], {"since": event["time"]})
        self.paused[event["actor"]] = event | {"since": first["since"]}

    def _on_rewards_resumed(self, event: Event) -> None:
        self.paused.pop(event["actor"], None)
        if self.advice is not None and self.advice["bottleneck"] == "health" and not self.paused:
            self.advice = None

    def _on_end(self, event: Event) -> None:
        self.end = event
        self._count_untrained(event)
        self.tokens = event.get("tokens") or self.tokens

    @property
    def recent(self) -> Totals:
        """Sums over the last `RECENT` steps."""
        return Totals.of(self.steps[-RECENT:])

    @property
    def last(self) -> Event:
        """The last step, or an empty event."""
        return self.steps[-1] if self.steps else {}

    @property
    def step(self) -> int:
        """Number of the last step, 0 before the first; after the end, of the step at which the run ended.

        A run that ends while its learner restarts loses the steps since the last checkpoint.
        """
        return int((self.end or self.last).get("step", 0))

    @property
    def share_done(self) -> float | None:
        """Share of the run that is done, 0 to 1. None for a run without an end."""
        if self.total_steps:
            return min(1.0, self.step / self.total_steps)
        if self.total_prompts:
            return min(1.0, (self.last.get("prompts_done") or 0) / self.total_prompts)
        return None

    @property
    def last_rewards(self) -> list[float]:
        """Mean rewards of the last five steps."""
        return list(self.rewards)[-_ENDS:]

    @property
    def elapsed_s(self) -> float:
        """Seconds of all steps in `steps` but the oldest, without the time between a stop and a resume."""
        return sum(map(seconds_of, self.steps[1:]))

    def tokens_per_second(self) -> tuple[float, float]:
        """Return tokens generated and trained per second, over the last steps."""
        if (elapsed := self.elapsed_s) == 0:
            seconds = seconds_of(self.last)
            generated = (self.last.get("tokens_generated") or 0) - self.generated_before
            first = (generated, self.last.get("tokens_trained") or 0)
            return (first[0] / seconds, first[1] / seconds) if seconds > 0 else (0.0, 0.0)
        generated = (self.last.get("tokens_generated") or 0) - (self.steps[0].get("tokens_generated") or 0)
        trained = sum(step.get("tokens_trained") or 0 for step in self.steps[1:])
        return generated / elapsed, trained / elapsed


def _keep(newest: list[Any], one: Any, most: int) -> None:
    newest.append(one)
    del newest[:-most]


def unusable_of(start: Event) -> dict[str, int]:
    """Return the groups of earlier starts that a start dropped, by reason."""
    return {why: groups for why, groups in (start.get("recovered") or {}).items() if why != "ready"}


def _step_of(event: Event) -> int:
    return event["step"]


def lags_of(step: Event) -> dict[int, int]:
    return {int(lag): groups for lag, groups in (step.get("lags") or {}).items()}


def shares(spent: Mapping[str, float]) -> dict[str, float]:
    """Return shares of the time by activity; {} without any."""
    total = sum(spent.values())
    return {what: seconds / total for what, seconds in spent.items()} if total > 0 else {}


def seconds_of(step: Event) -> float:
    """Return the wall time of a step; 0 if it has none."""
    return sum((step.get("seconds") or {}).values())


def seconds_by_activity(step: Event) -> Counter[str]:
    """Return the learner's seconds by activity. Forward, backward and optimizer count as `train`."""
    spent: Counter[str] = Counter()
    for activity, seconds in (step.get("seconds") or {}).items():
        spent["train" if activity in ("forward_backward", "optimizer") else activity] += seconds
    return spent


def mean_lag(lags: Mapping[int, int]) -> float:
    """Return the mean lag of groups, given their counts by lag; 0 without any."""
    groups = sum(lags.values())
    return sum(lag * count for lag, count in lags.items()) / groups if groups else 0.0


def short_version(version: str) -> str:
    """Format the version "1.17" as "v17"."""
    return f"v{version.rpartition('.')[2]}"


def sync_line(sync: Event) -> str:
    """Format a publication as "v17 -> 2 engines, 12 ms, checksum ok", with the generators that it did not reach."""
    engines, left_out = sync.get("engines", 0), sync.get("left_out")
    sent, whole = sync.get("sent_bytes") or 0, engines * (sync.get("bytes") or 0)
    return (
        f"{short_version(str(sync.get('version', '?')))} -> {engines} engine{'' if engines == 1 else 's'}, "
        f"{sync.get('ms') or 0:.0f} ms, "
        + (f"{sent / 1e6:.1f} of {whole / 1e6:.0f} MB sent, " if 0 < sent < whole else "")
        + f"checksum {sync.get('checksum', '?')}"
        + (f", without {', '.join(left_out)}" if left_out else "")
        + (f", other log-probs at {', '.join(differing)}" if (differing := sync.get("differing")) else "")
    )


def warning_of(event: Event) -> str | None:
    """Return the warning of an event; None: it has none."""
    match event:
        case {"event": "step", "failures": failures} if failures:
            return f"step {event['step']}: reward failures: {counts_in_words(failures)}"
        case {"event": "sync"} if event.get("left_out") or event.get("differing"):
            return sync_line(event)
        case {"event": "restart"}:
            return f"restarted {event['actor']}: {event['reason']}"
        case {"event": "fault"}:
            return f"chaos: {event['fault']} {event['actor']}"
        case {"event": "drain"}:
            return f"draining: {event['reason']}"
        case {"event": "warning"}:
            return event["text"]
        case {"event": "stall"}:
            return f"waiting for {event['what']} for {event['seconds']:.0f} s"
        case {"event": "reward_failed" | "lease_failed" as kind}:
            what, why = ("reward", event["failure"]) if kind == "reward_failed" else ("group", event["reason"])
            count = f", {event['count']} so far" if event["count"] > 1 else ""
            return f"{what} failed at {event['actor']} ({why}){count}: {event['detail']}"
        case {"event": "rewards_paused"}:
            return (
                f"rewards paused at {event['actor']}: {event['reason']}; probing again in {event['probe_in_s']:.0f} s"
            )
        case {"event": "rewards_resumed"}:
            return f"rewards work again at {event['actor']}, after {event['seconds']:.0f} s"
    return None


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Format counts as "crash 1, timeout 3"."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
