"""What sets the pace of a run: figures of its last steps, and how long a step would be with other settings.

    T = max(T_learn, T_generate, T_bound)        seconds of a step: the slowest of the three sets the pace

    T_learn(r)     = T - waiting - training + training · ranks / r
    T_generate(n') = saturation · T · n / n'     saturation: the share of the generators' places that holds a group
    T_bound(L')    = T · (L + 1) / (L' + 1)      where the slots that `buffer.max_lag` L allows are full, and places are free;
                     to the power TAIL where a few long groups hold up the others

Saturation and not idleness says what generators could do: one that works on 1 group of 32 is never idle. T_generate takes
the time of a group as it is now. An engine whose batch grows takes longer for each token, so that the gain of fewer
generators is an upper bound; the planner knows the engine's curve.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncgrpo.recording.events import Event

WINDOW = 20
"""Steps that are looked at, at most."""
FEWEST = 5
"""Steps that are needed to say something."""
SETTLE = 2
"""Steps left out after something has changed: their groups began before it."""

WAITS = 0.1
"""A learner that waits for a smaller share of a step is not held back. A little of it is right: it keeps the lag small."""
HAND_OVER_S = 0.1
"""A batch that is ready takes up to so long to reach the learner."""
TAIL = 0.75
"""Among more groups the longest is longer, so that a larger bound gains less. Measured: docs/staleness.md, `wait`, L 1 and 4."""

_ANEW = frozenset({"rewound", "changed", "start", "restart", "fault"})
"""Events after which nothing said of the steps before is true any more."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Means over the steps of a window. Times are seconds of one step."""

    steps: int
    step_s: float
    """T: wall time of a step."""
    wait_s: float
    """The learner waited for a batch."""
    train_s: float
    publish_s: float
    checkpoint_s: float
    generators: int
    places: float
    """Groups that the generators may work on at once."""
    in_flight: float
    slots: float
    under_way: float
    ready: float
    """Groups that waited ready, on average (by Little's law)."""
    max_lag: int
    oldest: float
    """The largest lag of a step, on average."""
    at_bound: float
    """The share of the steps that trained a group as old as the bound, 0 to 1."""
    scoring: float
    """The share of a completion's time in a generator that went to its reward, 0 to 1."""
    scored_at_once: float
    """Completions of one generator that were scored, or waited for a reward worker, at once."""
    loading: float
    """The share of the generators' time that went to changes of weights, 0 to 1."""
    groups: float
    """Groups that were trained."""
    tokens: float
    """Sampled tokens that were trained."""
    reward: float | None
    """The mean reward."""
    no_signal: float
    """The share of the trained groups without signal, 0 to 1."""
    filtered: float
    """The share of the groups that came, which were filtered for that, 0 to 1."""

    @property
    def lacks_groups(self) -> bool:
        """Whether the learner waits for groups, and not for a batch to be handed over."""
        return self.wait_s > max(WAITS * self.step_s, HAND_OVER_S)

    @property
    def wait(self) -> float:
        """The share of a step in which the learner waits, 0 to 1."""
        return self.wait_s / self.step_s

    @property
    def learn_s(self) -> float:
        """T_learn: a step if every batch were there in time."""
        return self.step_s - self.wait_s

    @property
    def saturation(self) -> float:
        """The share of the generators' places that holds a group, 0 to 1."""
        return min(1.0, self.in_flight / self.places)

    @property
    def is_held_up(self) -> bool:
        """Whether more groups are ready than in flight, and wait for a few that take long."""
        return self.ready > self.in_flight

    @property
    def must_wait(self) -> bool:
        """Whether groups that are ready wait for older ones: more of them than while a batch fills, and some at the bound."""
        return self.ready > 0.6 * self.groups and self.at_bound > 0.25

    @property
    def has_full_slots(self) -> bool:
        """Whether no other group may begin."""
        return self.under_way >= 0.9 * self.slots

    def with_generators(self, generators: int) -> float:
        """T with so many generators and the bound as it is.

        However many they are: the slots of a batch in training are not free, and a group that now takes as long as `oldest`
        steps may take L + 1 shorter ones.
        """
        generate_s = self.saturation * self.step_s * self.generators / generators
        room = max(self.groups, self.slots - self.groups)
        bound_s = self.step_s * min(1.0, max(self.in_flight / room, self.oldest / (self.max_lag + 1)))
        return max(self.learn_s, generate_s, bound_s)

    def with_max_lag(self, max_lag: int) -> float:
        """T with another bound, where this one sets the pace."""
        bound_s = self.step_s * ((self.max_lag + 1) / (max_lag + 1)) ** (TAIL if self.is_held_up else 1.0)
        return max(self.learn_s, self.saturation * self.step_s, bound_s)

    def with_training(self, share: float) -> float:
        """T if forward, backward and optimizer took `share` of what they take."""
        generate_s = self.saturation * self.step_s
        return max(self.learn_s - (1 - share) * self.train_s, min(generate_s, self.step_s))

    def with_reward(self, share: float) -> float:
        """T if rewards took `share` of what they take, where they set the pace, until the places of generators do."""
        scored_s = self.step_s * (1 - self.scoring + self.scoring * share)
        return max(self.learn_s, scored_s, self.step_s * self.saturation)

    def gain(self, step_s: float) -> float:
        """The share by which a step of `step_s` is shorter, 0 to 1."""
        return max(0.0, 1 - step_s / self.step_s)


def pace_of(events: Iterable[Event], *, is_auto: bool = False) -> Pace | None:
    """The pace of the last steps under the present conditions; None: they are fewer than `FEWEST`, or say too little.

    Args:
        events: in their order.
        is_auto: `buffer.max_lag` is auto, so that another bound is no change of conditions.
    """
    steps = _typical(_recent(events, is_auto))
    if len(steps) < FEWEST:
        return None
    seconds, generators, filtered = Counter[str](), Counter[str](), 0
    for step in steps:
        seconds.update(step["seconds"])
        generators.update(step["generators"])
        filtered += sum((step.get("filtered") or {}).values())
    count, total_s = len(steps), seconds.total()
    sampling, scoring = generators["sampling"], generators["scoring"]
    in_touch = generators["in_touch"] / count
    if total_s <= 0 or generators["places"] <= 0:
        return None
    lags_of = [[int(lag) for lag in step["lags"]] for step in steps]
    rewards = [step["reward_mean"] for step in steps if step.get("reward_mean") is not None]
    groups = sum(sum(step["lags"].values()) for step in steps)
    ready_s = sum(sum(step["lags"].values()) * (step.get("ready_seconds") or 0.0) for step in steps)
    return Pace(
        steps=count,
        step_s=total_s / count,
        wait_s=seconds["wait_data"] / count,
        train_s=sum(seconds[name] for name in ("forward_backward", "optimizer", "train")) / count,
        publish_s=seconds["publish"] / count,
        checkpoint_s=seconds["checkpoint"] / count,
        generators=max(1, round(in_touch)),
        places=generators["places"] / count,
        in_flight=generators["in_flight"] / count,
        slots=sum(step["slots"] for step in steps) / count,
        under_way=sum(step["under_way"] for step in steps) / count,
        ready=ready_s / total_s,
        max_lag=steps[-1]["max_lag"],
        oldest=fmean(max(lags, default=0) for lags in lags_of),
        at_bound=fmean(max(lags, default=0) >= step["max_lag"] for lags, step in zip(lags_of, steps, strict=True)),
        scoring=scoring / (sampling + scoring) if sampling + scoring > 0 else 0.0,
        scored_at_once=scoring / total_s / max(1.0, in_touch),
        loading=generators["weights"] / total_s / max(1.0, in_touch),
        groups=groups / count,
        tokens=sum(step["tokens_trained"] for step in steps) / count,
        reward=fmean(rewards) if rewards else None,
        no_signal=sum(step.get("zero_signal_groups") or 0 for step in steps) / max(1, groups),
        filtered=filtered / max(1, groups + filtered),
    )


def _recent(events: Iterable[Event], is_auto: bool) -> list[Event]:
    """The last steps that were made under one set of conditions, once they had settled."""
    steps: list[Event] = []
    for event in events:
        if event["event"] in _ANEW or is_command(event):
            steps = []
        elif event["event"] == "step" and event.get("generators"):
            if steps and _conditions(event, is_auto) != _conditions(steps[-1], is_auto):
                steps = []
            steps.append(event)
    return steps[SETTLE:][-WINDOW:]


def is_command(event: Event) -> bool:
    """Whether a person or the autopilot changed something."""
    return event["event"] == "command" and not event["refused"]


def _conditions(step: Event, is_auto: bool) -> tuple[int, ...]:
    """Generators, places of one, and the bound."""
    in_touch = round(step["generators"]["in_touch"])
    return in_touch, round(step["generators"]["places"] / max(1, in_touch)), 0 if is_auto else step["max_lag"]


def _typical(steps: Sequence[Event]) -> list[Event]:
    """The steps without one that took more than twice as long as any other.

    Means and not medians are taken of the rest: batches come in bursts, and a wait in every fifth step has no part in a
    median.
    """
    if len(steps) <= FEWEST:
        return list(steps)
    longest, next_longest = sorted(steps, key=_seconds, reverse=True)[:2]
    return [step for step in steps if step is not longest or _seconds(step) <= 2 * _seconds(next_longest)]


def _seconds(step: Event) -> float:
    return sum(step["seconds"].values())
