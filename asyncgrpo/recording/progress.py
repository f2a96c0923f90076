"""The state of a run as its events tell it, for the live screen, the lines of a log and the summary.

`Progress.update` takes the events in order. It uses no clock, no file and no terminal.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from asyncgrpo.recording.events import Event

RECENT = 10
"""Steps over which rates and shares are averaged."""

_GROUPED = {"forward_backward": "train", "optimizer": "train"}


@dataclass
class Progress:
    """What is known of a run from its events so far."""

    run: str = ""
    sizes: str = ""
    total_steps: int | None = None
    total_prompts: int | None = None
    started: float | None = None
    """Unix time of the first event."""
    updated: float | None = None
    """Unix time of the last event."""
    steps: list[Event] = field(default_factory=list)
    evals: list[Event] = field(default_factory=list)
    checkpoints: list[Event] = field(default_factory=list)
    syncs: deque[Event] = field(default_factory=lambda: deque(maxlen=8))
    num_syncs: int = 0
    num_bad_syncs: int = 0
    num_gaps: int = 0
    largest_gap: float | None = None
    """Of one token, in all publications that were checked, nats."""
    gaps: deque[tuple[int, float]] = field(default_factory=deque)
    """Number of the version and largest gap, of as many publications as there are steps."""
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    num_restarts: int = 0
    undone_steps: int = 0
    """Steps done before a crash, and trained again after it."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Sampled tokens of the whole run by fate, from the last event that has them; empty if none has."""
    faults: list[Event] = field(default_factory=list)
    """Faults that `--chaos` injected."""
    recoveries: list[Event] = field(default_factory=list)
    paused: dict[str, Event] = field(default_factory=dict)
    """The last `rewards_paused` event of each generator whose rewards are paused, with the time `since` when."""
    is_paused: bool = False
    """True between the commands `pause` and `resume`."""
    advice: Event | None = None
    """The last `advice` event of the present start."""
    curriculum: Event | None = None
    """The last `curriculum` event."""
    training_seconds: float = 0.0
    """From the beginning of the first step to the end of the last, less the time between a stop and a resume."""
    end: Event | None = None
    """The end of the present start, once it is over."""
    ends: list[Event] = field(default_factory=list)
    """The ends of all starts."""
    _resumed: bool = True
    """Whether the next step is the first of its process."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Progress":
        """The state after `events`."""
        progress = cls()
        for event in events:
            progress.update(event)
        return progress

    def update(self, event: Event) -> None:
        """Take one event in. Unknown kinds are ignored, and `rewound` resets everything (see `events.Follower`)."""
        kind = event["event"]
        if kind == "rewound":
            self.__dict__.update(Progress().__dict__)
            return
        if "time" in event:
            self.started = event["time"] if self.started is None else self.started
            self.updated = event["time"]
        kept = {"eval": self.evals, "checkpoint": self.checkpoints, "recovered": self.recoveries}
        if kind in kept:
            kept[kind].append(event)
        elif handle := getattr(self, f"_on_{kind}", None):
            handle(event)

    def _on_start(self, event: Event) -> None:
        self.run, self.sizes = event.get("run", ""), event.get("sizes", "")
        self.total_steps, self.total_prompts = event.get("steps"), event.get("prompts")
        self.undone_steps += event.get("undone_steps") or 0
        self.end = self.advice = None
        self.paused, self.is_paused = {}, False
        self._resumed = True

    def _on_step(self, event: Event) -> None:
        while self.steps and self.steps[-1]["step"] >= event["step"]:
            self.steps.pop()
        if self.steps and not self._resumed:
            self.training_seconds += max(0.0, event["time"] - self.steps[-1]["time"])
        else:
            self.training_seconds += sum((event.get("seconds") or {}).values())
        self._resumed = False
        self.steps.append(event)
        self.tokens = event.get("tokens") or self.tokens
        if failures := event.get("failures"):
            self.warnings.append(f"step {event['step']}: reward failures: {counts_in_words(failures)}")

    def _on_sync(self, event: Event) -> None:
        self.syncs.append(event)
        self.num_syncs += 1
        if event.get("checksum") != "ok":
            self.num_bad_syncs += 1
        if is_bad_sync(event):
            self.warnings.append(sync_line(event))
        if (gap := event.get("gap_max")) is not None:
            self.num_gaps += 1
            self.gaps.append((int(str(event["version"]).rpartition(".")[2]), gap))
            if len(self.gaps) > max(len(self.steps), 8):
                self.gaps.popleft()
            self.largest_gap = max(gap, self.largest_gap or 0.0)

    def _on_restart(self, event: Event) -> None:
        self.num_restarts += 1
        self.warnings.append(f"restarted {event.get('actor', '?')}: {event.get('reason', '')}")

    def _on_fault(self, event: Event) -> None:
        self.faults.append(event)
        self.warnings.append(f"chaos: {event.get('fault', '?')} {event.get('actor', '')}")

    def _on_advice(self, event: Event) -> None:
        self.advice = event

    def _on_command(self, event: Event) -> None:
        if event["command"] in ("pause", "resume") and not event["refused"]:
            self.is_paused = event["command"] == "pause"

    def _on_curriculum(self, event: Event) -> None:
        self.curriculum = event

    def _on_drain(self, event: Event) -> None:
        self.warnings.append(f"draining: {event.get('reason', '')}")

    def _on_warning(self, event: Event) -> None:
        self.warnings.append(event["text"])

    def _on_stall(self, event: Event) -> None:
        self.warnings.append(f"waiting for {event.get('what', '?')} for {event.get('seconds') or 0:.0f} s")

    def _on_reward_failed(self, event: Event) -> None:
        self.warnings.append(f"{_counted('reward', event, event.get('failure'))}: {event.get('detail')}")

    def _on_lease_failed(self, event: Event) -> None:
        self.warnings.append(f"{_counted('group', event, event.get('reason'))}: {event.get('detail')}")

    def _on_rewards_paused(self, event: Event) -> None:
        actor = event.get("actor", "?")
        since = self.paused[actor]["since"] if actor in self.paused else event["time"]
        self.paused[actor] = event | {"since": since}
        self.warnings.append(
            f"rewards paused at {actor}: {event.get('reason')}; probing again in {event.get('probe_in_s') or 0:.0f} s"
        )

    def _on_rewards_resumed(self, event: Event) -> None:
        actor = event.get("actor", "?")
        self.paused.pop(actor, None)
        self.warnings.append(f"rewards work again at {actor}, after {event.get('seconds') or 0:.0f} s")

    def _on_end(self, event: Event) -> None:
        self.end = event
        self.ends.append(event)
        self.tokens = event.get("tokens") or self.tokens

    @property
    def last(self) -> Event:
        """The last step, or an empty event."""
        return self.steps[-1] if self.steps else {}

    @property
    def step(self) -> int:
        """The number of the last step; 0 before the first."""
        return self.last.get("step", 0)

    @property
    def share_done(self) -> float | None:
        """The share of the run that is done, 0 to 1. None for a run without an end."""
        if self.total_steps:
            return min(1.0, self.step / self.total_steps)
        if self.total_prompts:
            return min(1.0, (self.last.get("prompts_done") or 0) / self.total_prompts)
        return None

    def rewards(self) -> list[float]:
        """The mean reward of each step that has one."""
        return [step["reward_mean"] for step in self.steps if step.get("reward_mean") is not None]

    def lags(self, last_steps: int | None = None) -> dict[int, int]:
        """Trained groups by lag, over all steps or the last ones."""
        counts: Counter[int] = Counter()
        for step in self.steps[-last_steps:] if last_steps else self.steps:
            counts.update({int(lag): groups for lag, groups in (step.get("lags") or {}).items()})
        return dict(sorted(counts.items()))

    def mean(self, name: str, last_steps: int | None = None) -> float | None:
        """The mean of a field over all steps or the last ones; None if no step has it."""
        steps = self.steps[-last_steps:] if last_steps else self.steps
        values = [step[name] for step in steps if step.get(name) is not None]
        return fmean(values) if values else None

    def time_shares(self, last_steps: int | None = None) -> dict[str, float]:
        """The share of the learner's time by activity (`seconds_by_activity`), over all steps or the last ones."""
        spent = seconds_by_activity(self.steps[-last_steps:] if last_steps else self.steps)
        return {activity: seconds / spent.total() for activity, seconds in spent.items()} if spent.total() > 0 else {}

    def generator_shares(self, last_steps: int | None = None) -> dict[str, float]:
        """The share of the generators' time by activity, over all steps or the last ones; {} if none tells."""
        spent: Counter[str] = Counter()
        for step in self.steps[-last_steps:] if last_steps else self.steps:
            told = step.get("generators") or {}
            spent.update({what: told[what] for what in ("generate", "reward", "weights", "idle") if what in told})
        return {what: seconds / spent.total() for what, seconds in spent.items()} if spent.total() > 0 else {}

    def untrained(self, how: Literal["dropped", "filtered"]) -> Counter[str]:
        """Groups of the whole run that were dropped or filtered, by reason."""
        counts: Counter[str] = Counter()
        for event in (*self.steps, *self.ends):
            counts.update(event.get(how) or {})
        return counts

    def tokens_trained(self) -> int:
        """Tokens trained by all steps."""
        return sum(step.get("tokens_trained") or 0 for step in self.steps)

    def tokens_per_second(self) -> tuple[float, float]:
        """Tokens generated and trained per second, over the last steps."""
        recent = self.steps[-RECENT - 1 :]
        if len(recent) < 2 or (elapsed := recent[-1]["time"] - recent[0]["time"]) <= 0:
            seconds = sum((self.last.get("seconds") or {}).values())
            first = (self.last.get("tokens_generated") or 0, self.last.get("tokens_trained") or 0)
            return (first[0] / seconds, first[1] / seconds) if seconds > 0 else (0.0, 0.0)
        generated = (recent[-1].get("tokens_generated") or 0) - (recent[0].get("tokens_generated") or 0)
        trained = sum(step.get("tokens_trained") or 0 for step in recent[1:])
        return generated / elapsed, trained / elapsed


def seconds_by_activity(steps: Iterable[Event]) -> "Counter[str]":
    """The learner's seconds by activity. Forward, backward and optimizer count together as `train`."""
    spent: Counter[str] = Counter()
    for step in steps:
        for activity, seconds in (step.get("seconds") or {}).items():
            spent[_GROUPED.get(activity, activity)] += seconds
    return spent


def _counted(what: str, event: Event, kind: str | None) -> str:
    """Such as "reward failed at generator-0 (timeout), 10 so far"."""
    count = event.get("count") or 1
    return f"{what} failed at {event.get('actor', '?')} ({kind})" + (f", {count} so far" if count > 1 else "")


def mean_lag(lags: Mapping[int, int]) -> float:
    """The mean lag of groups, given how many have each lag; 0 without any."""
    groups = sum(lags.values())
    return sum(lag * count for lag, count in lags.items()) / groups if groups else 0.0


def lag_quantile(lags: Mapping[int, int], share: float) -> int:
    """The smallest lag that at least `share` of the groups do not exceed, given how many have each lag; 0 without any."""
    left = share * sum(lags.values())
    for lag, groups in sorted(lags.items()):
        left -= groups
        if left <= 0:
            return lag
    return 0


def lag_line(lags: Mapping[int, int], bound: int | None) -> str:
    """Lags such as "p50 1, p90 3, max 4 of 6", where 6 is the bound, if it is known."""
    of = "" if bound is None else f" of {bound}"
    return f"p50 {lag_quantile(lags, 0.5)}, p90 {lag_quantile(lags, 0.9)}, max {max(lags, default=0)}{of}"


def short_version(version: str) -> str:
    """The version "1.17" as "v17"."""
    return f"v{version.rpartition('.')[2]}"


def sync_line(sync: Event) -> str:
    """A publication such as "v17 -> 2 engines, 12 ms, checksum ok", with the generators that it did not reach."""
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


def is_bad_sync(sync: Event) -> bool:
    """Whether a publication did not land everywhere, or engines compute something else than the learner."""
    return bool(sync.get("checksum") != "ok" or sync.get("left_out") or sync.get("differing"))


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Counts such as "crash 1, timeout 3"."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
