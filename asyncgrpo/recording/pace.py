"""The model of a run's pace: measurements of its last steps, and the predicted step time under other settings.

`advise` (advice.py), the autopilot, `status`, the summary and `plan --from` all use this model and this window.
The step time is the largest of five terms:

    T_learn(r)       = T - waiting - training + training · ranks / r
    T_generate(n')   = saturation · T · n / n'        saturation: share of the generators' places that hold a group
    T_bound(n', L')  = T · max(in flight / room, (oldest - 1/2) / (L + 1)) · (L + 1) / (L' + 1)
                       to the power TAIL if stragglers hold up the other groups
    T_reward(n', s)  = T · (1 - scoring + scoring · s) · n / n'
    T_cores          = T · work                       work: share of their machine's core-seconds that the run's processes used

The term that limits the run now counts as T. Work on CPUs is conserved, so T_cores holds for every setting. A process
that needs a core of its own also needs one that is idle (`more_generators`, `more_ranks`).

Spare generator capacity is measured by saturation, because a generator that works on 1 group of 32 is never idle.
T_generate assumes the present time of a group. A larger batch slows each token down, so the gain of fewer generators is an
upper bound.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from asyncgrpo.config.schema import Config
from asyncgrpo.recording.events import Event
from asyncgrpo.recording.progress import seconds_of

WINDOW = 50
"""Largest number of steps in a window. After a change that no event shows, advice is of both conditions for so long."""
EVENTS = 16 * WINDOW
"""Newest events that suffice for a window: its steps and the events between them."""
FEWEST = 5
"""Smallest number of steps in a window."""
SETTLE = 3
"""Warm-up steps left out after a change: their groups began before it, and caches and compilers are cold."""

WAITS = 0.1
"""Idle share of a step below which the learner is not starved. A short wait is right, because it keeps the lag small."""
HAND_OVER_S = 0.1
"""Largest latency of handing a ready batch to the learner."""
TAIL = 0.75
"""Exponent of a larger bound under stragglers: among more groups the longest is longer, so that the bound gains less.
Measured: docs/staleness.md, `wait`, L 1 and 4."""
FULL = 0.85
"""Saturation from which the generators' places count as full, and the target of a smaller number of generators."""
PACKED = 0.95
"""Saturation above which a larger bound starts no more groups."""
HALF = 0.5
"""Share above which one cause counts as the main one."""
ROUNDING = 0.1
"""Tolerated busy share of a core that counts as free."""
UNLIMITED = 1 << 16
"""Room for further processes if the cores are not measured, or nothing limits them."""

Limit = Literal["learner", "generators", "reward", "bound", "lengths", "cores", "none"]
"""The limiting term. `lengths`: the bound, through stragglers. `none`: groups are about to begin."""

_ANEW = frozenset({"rewound", "changed", "start", "restart", "fault"})
"""Events that start a new window: earlier measurements no longer apply."""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The cores of a machine, and one process on it. Means over the window."""

    count: float
    idle: float
    process: float
    """Cores that one learner rank or one generator keeps busy, subprocesses included."""

    @property
    def spare(self) -> float:
        """Idle share, 0 to 1."""
        return min(1.0, self.idle / self.count)

    @property
    def room(self) -> int:
        """Number of further processes like this one that the free cores allow."""
        return int(min(UNLIMITED, (self.idle + ROUNDING) / max(self.process, 1e-3)))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Means over the steps of a window. Times are seconds per step."""

    steps: tuple[int, int]
    """The first and the last step of the window."""
    step_s: float
    """T: wall time of a step."""
    wait_s: float
    """Time in which the learner waits for a batch."""
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
    wanted: float
    """Groups that admission wanted under way."""
    ready: float
    """Mean number of ready groups, by Little's law."""
    max_lag: int
    oldest: float
    """Mean of the largest lag of each step."""
    at_bound: float
    """Share of the steps that trained a group as old as the bound, 0 to 1."""
    scoring: float
    """Share of a completion's time in a generator that went to its reward, 0 to 1."""
    scored_at_once: float
    """Mean number of completions of one generator in scoring, the queue for reward workers included."""
    scorers: float
    """Completions that a generator can score at once; infinite if no setting limits it."""
    loading: float
    """Share of the generators' time that went to weight changes, 0 to 1."""
    groups: float
    """Trained groups."""
    reward: float | None
    no_signal: float
    """Share of the trained groups without signal, 0 to 1."""
    filtered: float
    """Share of the accepted groups that were filtered for lack of signal, 0 to 1."""
    learner_cores: Cores | None
    """Cores of rank 0 and its machine; None: not measured."""
    generator_cores: Cores | None
    """Cores of a generator and its machine; None: not measured."""

    @property
    def lacks_groups(self) -> bool:
        """True if the learner is starved of groups, beyond the latency of handing a batch over."""
        return self.wait_s > max(WAITS * self.step_s, HAND_OVER_S)

    @property
    def hands_over(self) -> bool:
        """True if the learner waits, but no longer than handing a ready batch over may take."""
        return WAITS * self.step_s < self.wait_s <= HAND_OVER_S

    @property
    def wait(self) -> float:
        """Share of a step in which the learner waits, 0 to 1."""
        return self.wait_s / self.step_s

    @property
    def learn_s(self) -> float:
        """T_learn: the step time if every batch were ready in time."""
        return self.step_s - self.wait_s

    @property
    def saturation(self) -> float:
        """Share of the generators' places that hold a group, 0 to 1."""
        return min(1.0, self.in_flight / self.places)

    @property
    def is_held_up(self) -> bool:
        """True if more groups are ready than the generators hold, scored ones included: they wait for stragglers."""
        return self.ready * (1 - self.scoring) > self.in_flight

    @property
    def must_wait(self) -> bool:
        """True if ready groups wait for older ones: more are ready than while a batch fills, and some are at the bound."""
        return self.ready > 0.6 * self.groups and self.at_bound > 0.25

    @property
    def has_full_slots(self) -> bool:
        """True if nearly all slots are taken, so that no other group may begin."""
        return self.under_way >= 0.9 * self.slots

    @property
    def wants_all_slots(self) -> bool:
        """True if admission holds no group back that the bound allows."""
        return self.wanted >= 0.9 * self.slots

    @property
    def limit(self) -> Limit:
        """The term that limits the run, by its measurements."""
        if not self.lacks_groups:
            return "learner"
        if self.scoring > HALF and self.scored_at_once > self.scorers:
            return "reward"
        if (self.must_wait and self.saturation < PACKED) or (self.has_full_slots and self.saturation < FULL):
            return "lengths" if self.is_held_up else "bound"
        if self.saturation >= HALF:
            return "generators"
        # At the bound a generator may begin fewer groups until it serves the newest version, so slots stay free.
        return "bound" if self.wants_all_slots and self.at_bound > 0.25 else "none"

    @property
    def work(self) -> float:
        """Share of a machine's core-seconds that the run's own processes used, 0 to 1; 0 if it was not measured.

        It assumes learner and generators on one machine, capped by that machine's busy share. Other processes are excluded.
        """
        learner, generator = self.learner_cores, self.generator_cores
        if learner is None or generator is None:
            return 0.0
        used = self.ranks * learner.process * (1 - self.wait) + self.generators * generator.process
        return min(used / learner.count, 1 - min(learner.spare, generator.spare))

    @property
    def more_generators(self) -> int:
        """Number of further generators that the free cores allow."""
        return self.generator_cores.room if self.generator_cores else UNLIMITED

    @property
    def more_ranks(self) -> int:
        """Number of further learner ranks that the free cores allow."""
        return self.learner_cores.room if self.learner_cores else UNLIMITED

    def has_cores(self, generators: int, ranks: int) -> bool:
        """Return True if the free cores allow the additional processes. Both kinds are assumed to share the cores."""
        of_generators = max(0, generators - self.generators) / max(self.more_generators, 1e-9)
        return of_generators + max(0, ranks - self.ranks) / max(self.more_ranks, 1e-9) <= 1

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
        """Return T with other settings, and the term that would limit the run.

        Args:
            generators, ranks, max_lag: None: unchanged.
            reward, checkpoint: factor on the present time of rewards and checkpoints.
            cores: False: ignore the cores.
        """
        ranks = ranks or self.ranks
        fewer = self.generators / (generators or self.generators)
        scored = 1 - self.scoring * (1 - reward)
        wider = (self.max_lag + 1) / (self.max_lag + 1 if max_lag is None else max_lag + 1)
        wider **= TAIL if self.is_held_up else 1.0
        saved_s = (1 - self.ranks / ranks) * self.train_s + (1 - checkpoint) * self.checkpoint_s
        bound: Limit = "lengths" if self.is_held_up else "bound"

        def now(term: Limit, share: float) -> float:
            """Return the present value of the term: T if it limits the run, else its share of T."""
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
        """Share of T that the bound imposes for any number of generators: the slots of a batch in training are not free,
        and a group of lag k, which now takes k - 1 to k steps, may take L + 1 shorter ones."""
        room = max(1.0, self.groups, self.slots - self.groups)
        return min(1.0, max(self.in_flight / room, (self.oldest - 0.5) / (self.max_lag + 1)))

    def gain(self, step_s: float) -> float:
        """Return the share by which a step of `step_s` is shorter than now, 0 to 1."""
        return max(0.0, 1 - step_s / self.step_s)

    def gain_of_filter(self) -> float:
        """Return the share by which `algorithm.filter_zero_signal` shortens the time per group with signal, 0 to 1.

        Generators sample 1 / (1 - no_signal) times as many groups, and need that many times their cores.
        """
        kept = 1 - self.no_signal
        cores_s = 0.0
        if (cores := self.generator_cores) is not None:
            more = (1 / kept - 1) * self.generators * cores.process / cores.count
            cores_s = (self.work + more) * self.step_s
        return self.gain(kept * max(self.learn_s, self.saturation * self.step_s / kept, cores_s))


def scoring_setting(config: Config) -> tuple[int, str] | None:
    """Return the number of completions that a generator scores at once and the key that sets it; None: no setting does.

    An environment scores by itself. Only a user's own environment has processes here whose number can change.
    """
    if config.teacher.is_on:
        return config.teacher.max_concurrent, "teacher.max_concurrent"
    environment = config.environment
    if not environment.is_on:
        return config.reward.at_once_and_key
    return (environment.processes, "environment.processes") if environment.files and not environment.agent else None


def pace_of(events: Iterable[Event], config: Config) -> Pace | None:
    """Return the pace of the last steps under the present conditions; None: fewer than `FEWEST`, or without measurements."""
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
        wanted=sum(step.get("wanted") or 0 for step in steps) / count,
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


def _cores(counted: Counter[str], seconds: float, active: float) -> Cores | None:
    """Return the cores from the core-seconds of a window; None: none were counted.

    Args:
        seconds: wall time of the window, summed over the processes that counted.
        active: share of the time in which the process works and needs its cores.
    """
    if counted["cores"] <= 0:
        return None
    count = max(1.0, float(round(counted["cores"] / seconds)))
    idle, process = (count * counted[name] / counted["cores"] for name in ("spare", "cpu"))
    return Cores(count=count, idle=idle, process=process / active)


def _recent(events: Iterable[Event], is_auto: bool) -> list[Event]:
    """Return the last steps under one set of conditions, without the warm-up steps."""
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
    """Return True if the event is a command, of the user or the autopilot, that was carried out."""
    return event["event"] == "command" and not event["refused"]


def _conditions(step: Event, is_auto: bool) -> tuple[int, ...]:
    """Return the number of generators, the places of each and the bound."""
    in_touch = round(step["generators"]["in_touch"])
    return in_touch, round(step["generators"]["places"] / max(1, in_touch)), 0 if is_auto else step["max_lag"]


def _typical(steps: Sequence[Event]) -> list[Event]:
    """Return the steps without an outlier, one that took more than twice as long as any other.

    The rest is averaged by means, because batches come in bursts, and a median misses a wait in every fifth step.
    """
    if len(steps) <= FEWEST:
        return list(steps)
    longest, next_longest = sorted(steps, key=seconds_of, reverse=True)[:2]
    return [step for step in steps if step is not longest or seconds_of(step) <= 2 * seconds_of(next_longest)]
