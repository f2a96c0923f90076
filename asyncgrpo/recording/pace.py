"""The model of a run's pace: what its last steps measured, and how long a step would be with other settings.

`advise` (advice.py), the autopilot, `status`, the summary and `plan --from` use this model and this window, and no other.
A step takes as long as the slowest of five:

    T_learn(r)       = T - waiting - training + training · ranks / r
    T_generate(n')   = saturation · T · n / n'        saturation: the share of the generators' places that holds a group
    T_bound(n', L')  = T · max(in flight / room, oldest / (L + 1)) · (L + 1) / (L' + 1)
                       to the power TAIL where a few long groups hold up the others
    T_reward(n', s)  = T · (1 - scoring + scoring · s) · n / n'
    T_cores          = T · work                       work: the share of their machine's core-seconds that our processes used

The term that limits the run now counts as T. Work on CPUs is conserved, so T_cores holds for every setting; a process
that needs a core of its own also needs one that is idle (`more_generators`, `more_ranks`).

Saturation and not idleness says what generators could do: one that works on 1 group of 32 is never idle. T_generate takes
the time of a group as it is now. An engine whose batch grows takes longer for each token, so that the gain of fewer
generators is an upper bound.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from asyncgrpo.config.schema import Config
from asyncgrpo.recording.events import Event

WINDOW = 100
"""Steps that are looked at, at most."""
EVENTS = 8 * WINDOW
"""Newest events that are enough for a window: its steps, and all that happens between them."""
FEWEST = 5
"""Steps that are needed to say something."""
SETTLE = 3
"""Steps left out after something has changed: their groups began before it, and caches and compilers warm up."""

WAITS = 0.1
"""A learner that waits for a smaller share of a step is not held back. A little of it is right: it keeps the lag small."""
HAND_OVER_S = 0.1
"""A batch that is ready takes up to so long to reach the learner."""
TAIL = 0.75
"""Among more groups the longest is longer, so that a larger bound gains less. Measured: docs/staleness.md, `wait`, L 1 and 4."""
FULL = 0.85
"""Saturation from which the generators' places count as full, and the most that fewer generators would have."""
PACKED = 0.95
"""Saturation from which another bound would not let more groups begin."""
HALF = 0.5
"""What takes more than half of something is the cause of it."""
ROUNDING = 0.1
"""A core that is idle but for this share counts as free."""
UNLIMITED = 1 << 16
"""Processes for which there is room where nothing is known of the cores, or nothing limits them."""

Limit = Literal["learner", "generators", "reward", "bound", "lengths", "cores", "none"]
"""What sets the pace. `lengths`: the bound, through a few long completions. `none`: groups are about to begin."""

_ANEW = frozenset({"rewound", "changed", "start", "restart", "fault"})
"""Events after which nothing said of the steps before is true any more."""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The cores of a machine, and one process on it. Means over the window."""

    count: float
    idle: float
    process: float
    """Cores that one learner rank or one generator keeps busy, with all its subprocesses."""

    @property
    def spare(self) -> float:
        """Idle share, 0 to 1."""
        return min(1.0, self.idle / self.count)

    @property
    def room(self) -> int:
        """Processes like this one for which a core is free."""
        return int(min(UNLIMITED, (self.idle + ROUNDING) / max(self.process, 1e-3)))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Means over the steps of a window. Times are seconds of one step."""

    steps: tuple[int, int]
    """The first and the last step of the window."""
    step_s: float
    """T: wall time of a step."""
    wait_s: float
    """The learner waited for a batch."""
    train_s: float
    publish_s: float
    checkpoint_s: float
    generators: int
    ranks: int
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
    scorers: float
    """Completions that a generator can score at once; infinite where no setting limits it."""
    loading: float
    """The share of the generators' time that went to changes of weights, 0 to 1."""
    groups: float
    """Groups that were trained."""
    reward: float | None
    """The mean reward."""
    no_signal: float
    """The share of the trained groups without signal, 0 to 1."""
    filtered: float
    """The share of the groups that came, which were filtered for that, 0 to 1."""
    learner_cores: Cores | None
    """Of rank 0 and its machine; None: not counted."""
    generator_cores: Cores | None
    """Of a generator and its machine; None: not counted."""

    @property
    def lacks_groups(self) -> bool:
        """True if the learner waits for groups, and not for a batch to be handed over."""
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
        """True if more groups are ready than in flight, and wait for a few that take long."""
        return self.ready > self.in_flight

    @property
    def must_wait(self) -> bool:
        """True if ready groups wait for older ones: more of them than while a batch fills, and some at the bound."""
        return self.ready > 0.6 * self.groups and self.at_bound > 0.25

    @property
    def has_full_slots(self) -> bool:
        """True if no other group may begin."""
        return self.under_way >= 0.9 * self.slots

    @property
    def limit(self) -> Limit:
        """What sets the pace, by what was measured."""
        if not self.lacks_groups:
            return "learner"
        if self.scoring > HALF and self.scored_at_once > self.scorers:
            return "reward"
        if (self.must_wait and self.saturation < PACKED) or (self.has_full_slots and self.saturation < FULL):
            return "lengths" if self.is_held_up else "bound"
        return "generators" if self.saturation >= HALF else "none"

    @property
    def work(self) -> float:
        """The share of a machine's core-seconds that the run's own processes used, 0 to 1; 0 where nothing is known.

        Learner and generators are taken to be on one machine, but not to work more than it did. What others did there is
        not in it.
        """
        learner, generator = self.learner_cores, self.generator_cores
        if learner is None or generator is None:
            return 0.0
        used = self.ranks * learner.process * (1 - self.wait) + self.generators * generator.process
        return min(used / learner.count, 1 - min(learner.spare, generator.spare))

    @property
    def more_generators(self) -> int:
        """Generators for which there are free cores, beside those that there are."""
        return self.generator_cores.room if self.generator_cores else UNLIMITED

    @property
    def more_ranks(self) -> int:
        """Learner ranks for which there are free cores, beside those that there are."""
        return self.learner_cores.room if self.learner_cores else UNLIMITED

    def has_cores(self, generators: int, ranks: int) -> bool:
        """True if there are free cores for the processes that are more than now. Both kinds are taken to share them."""
        more = (max(0, generators - self.generators), max(0, ranks - self.ranks))
        return (
            sum(n / max(room, 1e-9) for n, room in zip(more, (self.more_generators, self.more_ranks), strict=True)) <= 1
        )

    def predict(
        self,
        *,
        generators: int | None = None,
        ranks: int | None = None,
        max_lag: int | None = None,
        reward: float = 1.0,
        checkpoint: float = 1.0,
        cores: bool = True,
    ) -> tuple[float, Limit]:
        """Return T with other settings, and what would set the pace.

        Args:
            generators, ranks, max_lag: None: as they are.
            reward, checkpoint: share of the time that they would take.
            cores: False: as if there were always a free one.
        """
        ranks = ranks or self.ranks
        fewer = self.generators / (generators or self.generators)
        scored = 1 - self.scoring * (1 - reward)
        wider = (self.max_lag + 1) / (self.max_lag + 1 if max_lag is None else max_lag + 1)
        wider **= TAIL if self.is_held_up else 1.0
        saved_s = (1 - self.ranks / ranks) * self.train_s + (1 - checkpoint) * self.checkpoint_s
        bound: Limit = "lengths" if self.is_held_up else "bound"

        def now(term: Limit, share: float) -> float:
            """What the term is at present: T if it limits the run, else its share of T."""
            return self.step_s * (1.0 if term == self.limit else share)

        terms: dict[Limit, float] = {
            "learner": now("learner", 1 - self.wait) - saved_s,
            "generators": now("generators", self.saturation) * fewer,
            bound: now(bound, self._room_taken) * wider * scored,
            "reward": now("reward", 0.0) * scored * fewer,
            "cores": now("cores", cores * self.work),
            "none": now("none", 0.0),
        }
        limit = max(terms, key=lambda term: terms[term])
        return terms[limit], limit

    @property
    def _room_taken(self) -> float:
        """The share of T that the bound leaves, however many generators there are: the slots of a batch in training are
        not free, and a group that now takes `oldest` steps may take L + 1 shorter ones."""
        room = max(1.0, self.groups, self.slots - self.groups)
        return min(1.0, max(self.in_flight / room, self.oldest / (self.max_lag + 1)))

    def gain(self, step_s: float) -> float:
        """The share by which a step of `step_s` is shorter, 0 to 1."""
        return max(0.0, 1 - step_s / self.step_s)

    def gain_of_filter(self) -> float:
        """The share by which `algorithm.filter_zero_signal` shortens the time for a group with signal, 0 to 1.

        Generators sample 1 / (1 - no_signal) times as many groups, and need that much more of their cores.
        """
        kept = 1 - self.no_signal
        cores_s = 0.0
        if (cores := self.generator_cores) is not None:
            more = (1 / kept - 1) * self.generators * cores.process / cores.count
            cores_s = (self.work + more) * self.step_s
        return self.gain(kept * max(self.learn_s, self.saturation * self.step_s / kept, cores_s))


def scoring_setting(config: Config) -> tuple[int, str] | None:
    """Return how many completions a generator scores at once, and the key that says so; None: no setting does.

    An environment scores by itself. Only one of your own has processes here that could be more.
    """
    environment = config.environment
    if environment.name is None and environment.agent is None and not environment.tools:
        return config.reward.at_once, config.reward.at_once_key
    return (environment.processes, "environment.processes") if environment.files and not environment.agent else None


def pace_of(events: Iterable[Event], config: Config) -> Pace | None:
    """Return the pace of the last steps under the present conditions; None: they are fewer than `FEWEST`, or say too little.

    Args:
        events: in their order.
        config: as it is in force.
    """
    steps = _typical(_recent(events, config.buffer.max_lag == "auto"))
    if len(steps) < FEWEST:
        return None
    seconds, generators, learner, filtered = Counter[str](), Counter[str](), Counter[str](), 0
    for step in steps:
        seconds.update(step["seconds"])
        generators.update(step["generators"])
        learner.update(step.get("cores") or {})
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
    scorers = scoring_setting(config)
    trains = max(0.01, 1 - seconds["wait_data"] / total_s)
    return Pace(
        steps=(steps[0]["step"], steps[-1]["step"]),
        step_s=total_s / count,
        wait_s=seconds["wait_data"] / count,
        train_s=sum(seconds[name] for name in ("forward_backward", "optimizer", "train")) / count,
        publish_s=seconds["publish"] / count,
        checkpoint_s=seconds["checkpoint"] / count,
        generators=max(1, round(in_touch)),
        ranks=config.learner.ranks,
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
        scorers=scorers[0] if scorers is not None else float("inf"),
        loading=generators["weights"] / total_s / max(1.0, in_touch),
        groups=groups / count,
        reward=fmean(rewards) if rewards else None,
        no_signal=sum(step.get("zero_signal_groups") or 0 for step in steps) / max(1, groups),
        filtered=filtered / max(1, groups + filtered),
        learner_cores=_cores(learner, total_s, trains),
        generator_cores=_cores(generators, total_s * max(1.0, in_touch), 1.0),
    )


def _cores(told: Counter[str], seconds: float, active: float) -> Cores | None:
    """Return what the core-seconds of a window say; None: none were counted.

    Args:
        told: core-seconds.
        seconds: in which they were counted, of all processes that counted them.
        active: share of the time in which the process works; while it does, it needs its cores.
    """
    if told["cores"] <= 0:
        return None
    count = max(1.0, float(round(told["cores"] / seconds)))
    idle, process = (count * told[name] / told["cores"] for name in ("spare", "cpu"))
    return Cores(count=count, idle=idle, process=process / active)


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
    """True if a person or the autopilot changed something."""
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
