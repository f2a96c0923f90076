"""Advice on a run from its own events: the bottleneck, and the change that would make steps shorter.

    adviser = Adviser(events, config)                  in the driver
    advice = adviser.look(now)                         every LOOK_S
    generators = autopilot.decide(advice, there, now)  None: unchanged

`advise` is a function of the last events and the configuration. It names one bottleneck, in this order: the health of the
run, groups without signal, the pace (`pace.py` has the model). It recommends no change that gains less than `WORTH`, and no
process for which no core or GPU is free. `docs/tuning.md` explains each bottleneck.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from asyncgrpo import metrics
from asyncgrpo.config.schema import MOST_GENERATORS, Config
from asyncgrpo.recording.events import NEWEST_BYTES, Event, EventLog, Follower
from asyncgrpo.recording.health import View, limit_of, problems_in, stops_tuning
from asyncgrpo.recording.pace import EVENTS, FULL, HALF, UNLIMITED, Cores, Pace, pace_of, scoring_setting

Bottleneck = Literal[
    "health", "signal", "generators", "learner", "reward", "bound", "lengths", "weights", "cores", "none"
]


class Advice(Struct, frozen=True, kw_only=True):
    """One piece of advice: a sentence, its evidence and its predicted gain."""

    bottleneck: Bottleneck
    sentence: str
    """The recommendation and its gain: "3 generators would make steps 18 % shorter; more would gain little"."""
    evidence: str
    """The measurements behind it."""
    gain: float = 0.0
    """Predicted share by which a step gets shorter, 0 to 1. For `signal` and `weights`: the time of a useful group."""
    command: str = ""
    """Command that carries it out, without the run's folder: `scale generators 3`. Empty: none."""
    generators: int | None = None
    """Recommended number of generators; None: the advice is not about generators."""


WORTH = 0.1
"""Smallest gain that is worth a change."""
ALMOST_ALL = limit_of("NoSignal")
"""Share of groups without signal above which the data is at fault: filtering would take twenty groups per trained one."""
PUBLISHES = 0.2
"""Share of a step, or of the generators' time, above which publications are a bottleneck."""


def advise(
    events: Iterable[Event], config: Config, now: float | None = None, gpus: int | None = None
) -> tuple[Advice, ...]:
    """Return the advice from the last events, the most urgent first; () while there are too few.

    Args:
        events: the last events of a run, in order; a few hundred suffice.
        config: the configuration in force.
        now: Unix time; None: the time of the last event.
        gpus: GPUs of the cluster; None: unknown.
    """
    events = list(events)
    if not events:
        return ()
    now = events[-1].get("time", 0.0) if now is None else now
    view = View(events=events, now=now)
    if trouble := stops_tuning(view):
        sentence = f"{trouble.text}; tuning can wait until this is over"
        return (Advice(bottleneck="health", sentence=sentence, evidence=f"see {trouble.runbook}"),)
    pace = pace_of(events, config)
    if pace is None:
        return ()
    is_far = any(problem.name == "Steps" for problem in problems_in(view))
    of_pace = _of_the_pace(pace, config, gpus, is_far)
    if found := tuple(one for one in (_signal(pace, config), *of_pace) if one is not None):
        return found
    sentence = "balanced: nothing to gain"
    if pace.hands_over:
        sentence = "nothing to change: waits as short as these are the hand-over of batches"
    if pace.lacks_groups:
        is_soon = pace.limit == "none"
        why = "more groups are about to begin" if is_soon else "no single change makes steps a tenth shorter"
        sentence = f"nothing to change: {why}"
    return (Advice(bottleneck="none", sentence=sentence, evidence=_waiting(pace)),)


def _of_the_pace(pace: Pace, config: Config, gpus: int | None, is_far: bool) -> tuple[Advice | None, ...]:
    publishing = pace.loading if pace.lacks_groups else pace.publish_s / pace.step_s
    if publishing > PUBLISHES and pace.limit != "reward":
        return (_weights(pace, config, publishing),)
    match pace.limit:
        case "reward":
            return (_reward(pace, config) or _more_generators(pace, config, gpus),)
        case "bound" | "lengths":
            return (_bound(pace, config, is_far),)
        case "generators":
            return (_more_generators(pace, config, gpus),)
        case "learner":
            return (_fewer_generators(pace, config), _faster_learner(pace, config, gpus))
    return ()


# -- the bottleneck of a healthy run -----------------------------------------------------------------------------------


def _signal(pace: Pace, config: Config) -> Advice | None:
    """Return advice if most groups lack signal: their completions all have one reward."""
    lost = pace.filtered if config.algorithm.filter_zero_signal else pace.no_signal
    if lost < HALF:
        return None
    evidence = f"{_percent(lost)} of the groups {_window(pace)} have one reward for all their completions"
    if pace.reward is not None:
        evidence += f"; the mean reward is {pace.reward:.2f}"
    if lost > ALMOST_ALL:
        sentence = "almost no group has signal: choose prompts of other difficulty, or look at the reward function"
        return Advice(bottleneck="signal", sentence=sentence, evidence=evidence)
    if config.algorithm.filter_zero_signal:
        gain = pace.gain(max(pace.learn_s, (1 - lost) * pace.step_s))
        sentence = f"prompts of other difficulty would make steps up to {_percent(gain)} shorter"
        sentence += f": {_percent(lost)} of the groups are replaced, since they have no signal"
        return Advice(bottleneck="signal", sentence=sentence, evidence=evidence, gain=gain)
    gain = pace.gain_of_filter()
    sentence = f"algorithm.filter_zero_signal=true would train no group without signal, now {_percent(lost)}"
    sentence += f", and take {_percent(gain)} less time per group with signal" if gain >= WORTH else ""
    return Advice(bottleneck="signal", sentence=sentence, evidence=evidence, gain=gain)


def _reward(pace: Pace, config: Config) -> Advice | None:
    """Return advice on scoring: completions spend most of their time in the reward and queue for it.

    Without a queue, rewards do not limit the run, because groups that are only scored take no place of their generator.
    """
    setting = scoring_setting(config)
    assert setting is not None, "nothing limits how many are scored at once"
    workers, key = setting
    factor, gain = _smallest(pace, {factor: pace.predict(reward=1 / factor)[0] for factor in (2, 4, 8, 16)})
    if gain < WORTH:
        return _busy(pace, "reward worker", pace.generator_cores, pace.predict(reward=1 / factor, cores=False)[0])
    return Advice(
        bottleneck="reward",
        sentence=f"the reward sets the pace: {key}={factor * workers} would make steps {_percent(gain)} shorter",
        evidence=f"completions spend {_percent(pace.scoring)} of their time in scoring, "
        f"{pace.scored_at_once:.1f} at once with {key}={workers}; {_waiting(pace)}",
        gain=gain,
    )


def _more_generators(pace: Pace, config: Config, gpus: int | None) -> Advice | None:
    there = pace.generators
    limits = {
        f"generators.max={config.generators.most} allows": config.generators.most - there,
        "the free GPUs allow": free_gpus(config, gpus) // max(1, config.generators.gpus_each),
        "the free cores allow": pace.more_generators,
        "cluster.share_gpu allows": 0 if config.cluster.share_gpu else UNLIMITED,
    }
    why = min(limits, key=lambda reason: limits[reason])
    steps = {count: pace.predict(generators=count)[0] for count in range(there + 1, 4 * there + MOST_GENERATORS + 1)}
    wanted, best = _smallest(pace, steps)
    target = min(wanted, there + max(0, limits[why]))
    one_more, gain = pace.gain(steps[there + 1]), pace.gain(steps[target]) if target > there else 0.0
    if gain >= WORTH:
        sentence = f"{there + 1} generators would make steps {_percent(one_more)} shorter"
        sentence += f", {wanted} generators {_percent(best)}" if wanted > there + 1 else ""
        return Advice(
            bottleneck="generators",
            sentence=f"{sentence}; more would gain little",
            evidence=_waiting(pace) + (f"; {why} {target}" if target < wanted else ""),
            gain=gain,
            command=f"scale generators {target}",
            generators=target,
        )
    if busy := _busy(pace, "generator", pace.generator_cores, pace.predict(generators=wanted, cores=False)[0]):
        return busy
    if best < WORTH:
        return None
    sentence = f"{wanted} generators would make steps {_percent(best)} shorter, but {why} no more"
    return _other_split(pace, config, gpus) or Advice(
        bottleneck="generators", sentence=sentence, evidence=_waiting(pace)
    )


def _smallest(pace: Pace, steps: Mapping[int, float]) -> tuple[int, float]:
    """Return the first key from which no other gains `WORTH`, and its gain."""
    least_s = min(steps.values())
    return next((key, pace.gain(step_s)) for key, step_s in steps.items() if (1 - WORTH) * step_s <= least_s)


def _busy(pace: Pace, what: str, cores: Cores | None, step_s: float) -> Advice | None:
    """Return the advice that no core is free, if one more process would help but lacks one; else None.

    Args:
        what: the process.
        cores: cores of the machine where it would run; None: unknown.
        step_s: predicted step time with free cores.
    """
    if cores is None or (cores.room >= 1 and 1 - pace.work >= WORTH) or pace.gain(step_s) < WORTH:
        return None  # unknown, or cores do not limit the run
    return Advice(
        bottleneck="cores",
        sentence=f"no core is free for another {what}: {cores.idle:.1f} of {cores.count:.0f} idle, "
        f"and it needs {cores.process:.1f}",
        evidence=_waiting(pace),
    )


# -- splits ------------------------------------------------------------------------------------------------------------


class Option(Struct, frozen=True, kw_only=True):
    """One split of a run's GPUs or cores, with the prediction of `pace.py`."""

    generators: int
    ranks: int
    step_s: float
    limit: str
    """The limiting term."""


def free_gpus(config: Config, gpus: int | None) -> int:
    """Return the number of GPUs that this run leaves free; `UNLIMITED` if it needs none, or `gpus` is None (unknown)."""
    generators = config.generators
    if not generators.gpus_each or gpus is None:
        return UNLIMITED
    used = generators.count * generators.gpus_each + config.learner.ranks * (not config.cluster.share_gpu)
    return max(0, gpus - used - config.teacher_gpus)


def splits(pace: Pace, config: Config, gpus: int | None = None, max_lag: int | None = None) -> list[Option]:
    """Return the feasible splits, the shortest step first, then the fewest processes.

    On GPUs a split uses all of them: those of the run, or `gpus` without those of its teachers. On CPUs a new process needs
    a free core, and the number of each kind at most doubles. Ranks are a multiple of what `learner.parallel` needs. One GPU
    that both sides share has one split.

    Args:
        max_lag: the bound; None: unchanged.
    """
    each, multiple, is_shared = config.generators.gpus_each, config.learner.parallel.multiple, config.cluster.share_gpu
    total = gpus - config.teacher_gpus if gpus else pace.generators * each + pace.ranks
    if is_shared and (total <= each or not gpus):
        pairs = [(pace.generators, pace.ranks)]
    elif each:
        left = [(count, total - count * each) for count in range(1, (total - 1) // each + 1)]
        pairs = [(count, ranks - ranks % multiple) for count, ranks in left if ranks >= multiple]
    else:
        both = itertools.product(range(1, 2 * pace.generators + 1), range(multiple, 2 * pace.ranks + 1, multiple))
        pairs = [(count, ranks) for count, ranks in both if pace.has_cores(count, ranks)]
    options = []
    for count, ranks in pairs:
        step_s, limit = pace.predict(generators=count, ranks=ranks, max_lag=max_lag)
        options.append(Option(generators=count, ranks=ranks, step_s=step_s, limit=limit))
    return sorted(options, key=lambda option: (round(option.step_s, 6), option.generators + option.ranks))


def _other_split(pace: Pace, config: Config, gpus: int | None) -> Advice | None:
    """Return the best split of the same GPUs, if it gains enough; else None."""
    options = splits(pace, config, gpus) if config.generators.gpus_each and not config.cluster.share_gpu else []
    if not options or (gain := pace.gain(options[0].step_s)) < WORTH:
        return None
    flags = f"generators.count={options[0].generators} learner.ranks={options[0].ranks}"
    return Advice(
        bottleneck="generators" if options[0].generators > pace.generators else "learner",
        sentence=f"no GPU is free, but another split would make steps {_percent(gain)} shorter: {flags}",
        evidence=_waiting(pace),
        gain=gain,
    )


def _bound(pace: Pace, config: Config, is_far: bool) -> Advice | None:
    """Return advice on the bound: slots are full or ready groups wait for stragglers, so only a larger bound starts more.

    Args:
        is_far: True if a warning asks for a smaller bound, since updates are large.
    """
    wider = [2**power for power in range(12) if 2**power > pace.max_lag]
    allowed = [lag for lag in wider if lag <= max(1, 4 * pace.max_lag)] or wider[:1]
    wanted, gain = _smallest(pace, {lag: pace.predict(max_lag=lag)[0] for lag in allowed})
    if gain < WORTH:
        return None
    why = "the bound holds groups back while places are free"
    if pace.limit == "lengths":
        why = "a few long completions hold up groups that are ready"
    change = f"buffer.max_lag={wanted} would make steps {_percent(gain)} shorter"
    if is_auto := config.buffer.max_lag == "auto":
        change = f"buffer.max_lag=auto holds the bound at {pace.max_lag}, as the importance ratios allow"
    elif is_far:
        change = f"buffer.max_lag={pace.max_lag} should not grow, since the updates are large"
    return Advice(
        bottleneck="lengths" if pace.limit == "lengths" else "bound",
        sentence=f"{why}: {change}",
        evidence=f"{pace.ready:.1f} groups ready and {pace.in_flight:.1f} in flight of {pace.slots:.0f} slots; {_waiting(pace)}",
        gain=0.0 if is_auto or is_far else gain,
        command="" if is_auto or is_far or config.buffer.policy == "train" else f"set buffer.max_lag={wanted}",
    )


def _fewer_generators(pace: Pace, config: Config) -> Advice | None:
    """Return advice to release generators, at most half at once, because larger batches slow engines down measurably."""
    there = pace.generators
    needed = math.ceil(there * max(pace.saturation, pace.scored_at_once / pace.scorers) / FULL)
    enough = max(math.ceil(there / 2), config.generators.min, needed)
    if enough >= there or pace.predict(generators=enough)[0] > 1.02 * pace.step_s:
        return None
    freed = (there - enough) * config.generators.gpus_each
    sentence = f"{enough} of {there} generators would do: steps would be no longer"
    return Advice(
        bottleneck="generators",
        sentence=sentence + (f", and {freed} GPU{'s' * (freed > 1)} are free for the learner" if freed else ""),
        evidence=f"{_waiting(pace)}; each would hold groups in {_percent(pace.saturation * there / enough)} of its places",
        command=f"scale generators {enough}",
        generators=enough,
    )


def _faster_learner(pace: Pace, config: Config, gpus: int | None) -> Advice | None:
    """Return advice for a run that the learner limits: more ranks or rarer checkpoints."""
    ranks, multiple = pace.ranks, config.learner.parallel.multiple
    room = 0 if config.cluster.share_gpu else min(ranks, free_gpus(config, gpus), pace.more_ranks)
    if pace.checkpoint_s > PUBLISHES * pace.step_s:
        gain = pace.gain(pace.predict(checkpoint=0.5)[0])
        change = f"run.checkpoint_every={2 * config.run.checkpoint_every}"
    else:
        steps = {more: pace.predict(ranks=more)[0] for more in range(ranks + multiple, ranks + room + 1, multiple)}
        wanted, gain = _smallest(pace, steps or {ranks: pace.step_s})
        change = f"learner.ranks={wanted}"
    if gain < WORTH:
        most_s = pace.predict(ranks=2 * ranks, cores=False)[0]
        return _busy(pace, "learner rank", pace.learner_cores, most_s) or _other_split(pace, config, gpus)
    sentence = f"the learner sets the pace: {change} would make steps {_percent(gain)} shorter"
    evidence = f"{pace.train_s:.2f} s of training in a step of {pace.step_s:.2f} s; {_waiting(pace)}"
    return Advice(bottleneck="learner", sentence=sentence, evidence=evidence, gain=gain)


def _weights(pace: Pace, config: Config, share: float) -> Advice:
    """Return advice to enlarge batches: a publication costs the same per step, whatever the size of the batch."""
    change = f"buffer.prompts_per_step={2 * config.buffer.prompts_per_step} would halve their share"
    whose = "the generators' time" if pace.lacks_groups else "a step"
    return Advice(
        bottleneck="weights",
        sentence=f"publications take {_percent(share)} of {whose}: {change}",
        evidence=f"{pace.publish_s:.2f} s of {pace.step_s:.2f} s, {_percent(pace.loading)} of the generators' time",
        gain=share / 2,
    )


# -- words -------------------------------------------------------------------------------------------------------------


def _waiting(pace: Pace) -> str:
    places = f"{_percent(pace.saturation)} of the generators' places"
    return f"the learner waits {_percent(pace.wait)} of {pace.step_s:.2f} s, groups hold {places} ({_window(pace)})"


def _window(pace: Pace) -> str:
    return f"of steps {pace.steps[0]} to {pace.steps[1]}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# -- in a running run --------------------------------------------------------------------------------------------------

LOOK_S = 5.0
"""Interval between two computations of the advice."""
TELL_S = 60.0
"""Shortest interval between two `advice` events."""


class Adviser:
    """Follows the events of a run and writes an `advice` event when the advice has changed."""

    def __init__(self, events: EventLog, config: Config, gpus: int | None = None) -> None:
        self._events, self._gpus = events, gpus
        self.config = config
        """The configuration in force, updated by commands to the run."""
        self._follower = Follower(events.path, NEWEST_BYTES)
        self._last: deque[Event] = deque(maxlen=EVENTS)
        self._written: tuple[str, str] | None = None
        self._written_at = float("-inf")

    def look(self, now: float, *, is_last: bool = False) -> tuple[Advice, ...]:
        """Return the advice at `now` (Unix seconds), the most urgent first; () while there are too few steps.

        Args:
            is_last: True at the end of the run: an event is always written, for the summary.
        """
        self._last += (event for event in self._follower.poll() if event["event"] != "advice")
        advice = advise(self._last, self.config, now, self._gpus)
        gains = {one.bottleneck: one.gain for one in reversed(advice)}
        for bottleneck in get_args(Bottleneck):
            metrics.advice_gain_ratio.labels(bottleneck=bottleneck).set(gains.get(bottleneck, 0.0))
        newest = (advice[0].bottleneck, advice[0].command) if advice else None
        is_due = self._written is None or (now - self._written_at >= TELL_S and self._written != newest)
        if not advice:
            self._written = None  # conditions have changed, and the earlier advice is no longer shown
        elif is_last or is_due:
            self._written, self._written_at = newest, now
            fields = msgspec.structs.asdict(advice[0])
            self._events.write("advice", **fields, also=tuple(one.sentence for one in advice[1:]))
        return advice


class Autopilot:
    """Decides when to follow the advice on the number of generators. It changes one at a time and does not oscillate.

    It samples the advice every `EVERY_S`, and follows it after `LOOKS` equal samples. After a change it waits for `REST_S`,
    until new steps show the effect. A number that proved too small is not tried again for `RETRY_S`.
    """

    EVERY_S = 20.0
    LOOKS = 3
    REST_S = 120.0
    RETRY_S = 3600.0

    def __init__(self, fewest: int, most: int) -> None:
        self._fewest, self._most = fewest, most
        self._direction, self._looks = 0, 0
        self._changed_s = self._looked_s = float("-inf")
        self._shrunk_to: int | None = None
        self._too_few: tuple[int, float] = (0, float("-inf"))

    def decide(self, advice: tuple[Advice, ...], generators: int, now_s: float) -> int | None:
        """Return the new number of generators; None: unchanged.

        Args:
            advice: the present advice.
            generators: number of generators that the run should have now.
            now_s: time of any clock.
        """
        if now_s - self._looked_s < self.EVERY_S:
            return None
        self._looked_s = now_s
        # Advice about signal comes first but is ignored: it sets no pace.
        of_pace = next((one.generators for one in advice if one.bottleneck != "signal"), None)
        direction = 0 if of_pace is None else (of_pace > generators) - (of_pace < generators)
        self._looks = self._looks + 1 if direction == self._direction else 1
        self._direction = direction
        wanted = generators + direction
        if not direction or self._looks < self.LOOKS or now_s - self._changed_s < self.REST_S:
            return None
        number, since_s = self._too_few
        if not self._fewest <= wanted <= self._most or (wanted <= number and now_s - since_s < self.RETRY_S):
            return None
        if direction > 0 and self._shrunk_to == generators:
            self._too_few = generators, now_s
        self._shrunk_to = wanted if direction < 0 else None
        self._changed_s, self._looks = now_s, 0
        return wanted
