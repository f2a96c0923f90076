"""Advice on a run from its own events: what holds it back, and what would make its steps shorter.

`advise` is a function of the last events and the configuration. It names one bottleneck: a run that is not healthy needs
no tuning, then groups without signal, then whichever sets the pace (`pace.py` has the formulas). `docs/tuning.md` says what
each means.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import Struct

from asyncgrpo.config.schema import Config
from asyncgrpo.recording.events import Event
from asyncgrpo.recording.pace import FEWEST, Pace, is_command, pace_of
from asyncgrpo.recording.progress import Progress, counts_in_words, sync_line

Bottleneck = Literal["health", "signal", "generators", "learner", "reward", "bound", "lengths", "weights", "none"]


class Advice(Struct, frozen=True, kw_only=True):
    """One piece of advice: one sentence, its evidence, and what following it would gain."""

    bottleneck: Bottleneck
    sentence: str
    """What to do and what it gains: "a third generator would make steps 18 % shorter; a fifth nothing"."""
    evidence: str
    """The measured figures behind it."""
    gain: float = 0.0
    """Predicted share by which a step gets shorter, 0 to 1. Of groups without signal: the time per group that has one."""
    command: str = ""
    """That carries it out, without the run's folder: `scale generators 3`. Empty: there is none."""
    generators: int | None = None
    """Generators that it would have; None: the advice is about something else."""


WORTH = 0.1
"""Gains below it are not worth a change."""
FULL = 0.85
"""Saturation from which the generators' places count as full, and the most that fewer generators would have."""
PACKED = 0.95
"""Saturation from which another bound would not let more groups begin."""
HALF = 0.5
"""What takes more than half of something is the cause of it."""
ALMOST_ALL = 0.9
"""Groups without signal from which it is the data: to replace them takes more than ten groups for each that is trained."""
PUBLISHES = 0.2
"""Publications are a bottleneck from this share of a step, or of the generators' time."""
UNSCORED = 0.2
"""The share of completions without a score from which the reward does not work."""
MOST_GENERATORS = 64
"""Without `generators.max`."""
RESTART_S = 300.0
"""A restart is in the way of tuning for so long."""
SILENT_S = 60.0
"""A step that takes longer than this and than three others is a stall."""


def advise(events: Iterable[Event], config: Config, now: float | None = None) -> tuple[Advice, ...]:
    """The advice that the last events give, the most urgent first; () while they are too few.

    Args:
        events: the last ones of a run, in their order; a few hundred are enough.
        config: as the run was started.
        now: Unix time; None: that of the last event.
    """
    events = list(events)
    if trouble := unhealthy(events, now):
        sentence = f"{trouble}; tuning can wait until this is over"
        return (Advice(bottleneck="health", sentence=sentence, evidence=trouble),)
    pace = pace_of(events, is_auto=config.buffer.max_lag == "auto")
    if pace is None:
        return ()
    found = (*_signal(pace, config), *_what_sets_the_pace(pace, config))
    return found or (_balanced(pace),)


def _what_sets_the_pace(pace: Pace, config: Config) -> tuple[Advice, ...]:
    if pace.lacks_groups:
        if pace.scoring > HALF and pace.scored_at_once > config.reward.at_once:
            return (_reward(pace, config),)
        if pace.loading > PUBLISHES:
            return (_weights(pace, config, pace.loading),)
        is_full = pace.saturation >= FULL
        if (pace.must_wait and pace.saturation < PACKED) or (pace.has_full_slots and not is_full):
            return (_bound(pace, config),)
        return (_more_generators(pace, config),) if pace.saturation >= HALF else ()
    if pace.publish_s > PUBLISHES * pace.step_s:
        return (_weights(pace, config, pace.publish_s / pace.step_s),)
    return (*_fewer_generators(pace, config), *_learner(pace, config))


# -- a run that is not healthy -----------------------------------------------------------------------------------------


def unhealthy(events: Sequence[Event], now: float | None = None) -> str | None:
    """What must be over before tuning makes sense, in a sentence; None: nothing."""
    if not events:
        return None
    at = now if now is not None else events[-1].get("time", 0.0)
    checks: tuple[Callable[[Sequence[Event], float], str | None], ...] = (
        _rewards_paused, _restarted, _silent, _weights_missing, _rewards_fail,
    )  # fmt: skip
    return next((found for check in checks if (found := check(events, at))), None)


def _rewards_paused(events: Sequence[Event], at: float) -> str | None:
    paused = Progress.of(events).paused
    return (
        f"rewards are paused at {', '.join(sorted(paused))}: {next(iter(paused.values()))['reason']}"
        if paused
        else None
    )


def _restarted(events: Sequence[Event], at: float) -> str | None:
    recent = [event for event in events if event["event"] == "restart" and at - event["time"] < RESTART_S]
    if not recent:
        return None
    last, times = recent[-1], f", {len(recent)} restarts in {RESTART_S / 60:.0f} min" if len(recent) > 1 else ""
    return f"{last['actor']} was started again {at - last['time']:.0f} s ago ({last['reason']}){times}"


def _silent(events: Sequence[Event], at: float) -> str | None:
    """A step that is not made. Before the first one, engines load, and after the end nothing is awaited."""
    since = next((i for i in reversed(range(len(events))) if events[i]["event"] in ("start", "end")), -1)
    steps = [event for event in events[since + 1 :] if event["event"] == "step"]
    if len(steps) < FEWEST:
        return None
    usual_s = sorted(sum(step["seconds"].values()) for step in steps)[len(steps) // 2]
    silent_s = at - max(event["time"] for event in events if event is steps[-1] or is_command(event))
    if silent_s <= max(SILENT_S, 3 * usual_s):
        return None
    what = next((event["what"] for event in reversed(events) if event["event"] == "stall"), None)
    return f"no step for {silent_s:.0f} s, where one takes {usual_s:.1f} s" + (f": it waits for {what}" if what else "")


def _weights_missing(events: Sequence[Event], at: float) -> str | None:
    """Whether the last publication did not reach all, or two of the last five did not."""
    syncs = [event for event in events if event["event"] == "sync"][-5:]
    bad = [event for event in syncs if event.get("checksum") != "ok" or event.get("left_out")]
    if not bad or (bad[-1] is not syncs[-1] and len(bad) == 1):
        return None
    return f"weights did not reach every generator: {sync_line(bad[-1])}"


def _rewards_fail(events: Sequence[Event], at: float) -> str | None:
    steps = [event for event in events if event["event"] == "step"][-FEWEST:]
    completions = sum(step.get("completions") or 0 for step in steps)
    failures: dict[str, int] = {}
    for step in steps:
        for kind, count in (step.get("failures") or {}).items():
            failures[kind] = failures.get(kind, 0) + count
    if sum(failures.values()) <= UNSCORED * completions:
        return None
    share = sum(failures.values()) / max(1, completions)
    return f"{_percent(share)} of the completions have no score: {counts_in_words(failures)}"


# -- what holds a healthy run back -------------------------------------------------------------------------------------


def _signal(pace: Pace, config: Config) -> tuple[Advice, ...]:
    """Most groups teach nothing: their completions all have one reward."""
    lost = pace.filtered if config.algorithm.filter_zero_signal else pace.no_signal
    if lost < HALF:
        return ()
    evidence = f"{_percent(lost)} of the groups of {pace.steps} steps have one reward for all their completions"
    if pace.reward is not None:
        evidence += f"; the mean reward is {pace.reward:.2f}"
    if lost > ALMOST_ALL:
        sentence = "almost no group has signal: choose prompts of other difficulty, or look at the reward function"
        return (Advice(bottleneck="signal", sentence=sentence, evidence=evidence),)
    if config.algorithm.filter_zero_signal:
        gain = pace.gain(max(pace.learn_s, (1 - lost) * pace.step_s))
        sentence = f"prompts of other difficulty would make steps up to {_percent(gain)} shorter"
        sentence += f": {_percent(lost)} of the groups are replaced, since they have no signal"
        return (Advice(bottleneck="signal", sentence=sentence, evidence=evidence, gain=gain),)
    per_group = max(pace.saturation, (1 - lost) * (1 - pace.wait))
    gain = max(0.0, 1 - per_group)
    sentence = f"algorithm.filter_zero_signal=true would train no group without signal, now {_percent(lost)}"
    sentence += f", and take {_percent(gain)} less time per group with signal" if gain >= WORTH else ""
    return (Advice(bottleneck="signal", sentence=sentence, evidence=evidence, gain=gain),)


def _reward(pace: Pace, config: Config) -> Advice:
    """Completions spend most of their time in the reward, and wait for their turn in it.

    Where they do not wait, groups that are only scored take no place of their generator, and what sets the pace is elsewhere.
    """
    workers, key = config.reward.at_once, config.reward.at_once_key
    needed = pace.step_s / max(pace.learn_s, pace.step_s * (1 - pace.scoring), 0.01 * pace.step_s)
    factor = next((f for f in (2, 4, 8) if f >= needed), 16)
    gain = pace.gain(pace.with_reward(1 / factor))
    return Advice(
        bottleneck="reward",
        sentence=f"the reward sets the pace: {key}={factor * workers} would make steps {_percent(gain)} shorter",
        evidence=f"completions spend {_percent(pace.scoring)} of their time in scoring, "
        f"{pace.scored_at_once:.1f} at once with {key}={workers}; {_waiting(pace)}",
        gain=gain,
    )


def _more_generators(pace: Pace, config: Config) -> Advice:
    there, most = pace.generators, config.generators.max or MOST_GENERATORS
    best = pace.with_generators(max(MOST_GENERATORS, 4 * there))
    wanted = next(n for n in range(there + 1, 4 * there + MOST_GENERATORS) if pace.with_generators(n) <= 1.03 * best)
    one_more, gain = pace.gain(pace.with_generators(there + 1)), pace.gain(pace.with_generators(wanted))
    sentence = f"a {_ordinal(there + 1)} generator would make steps {_percent(one_more)} shorter"
    if wanted > there + 1:
        sentence += f", {wanted} generators {_percent(gain)}"
    allowed = min(wanted, most)
    return Advice(
        bottleneck="generators",
        sentence=f"{sentence}; a {_ordinal(wanted + 1)} nothing",
        evidence=_waiting(pace) + (f"; generators.max={most} allows no more" if allowed <= there else ""),
        gain=pace.gain(pace.with_generators(allowed)),
        command=f"scale generators {allowed}" if allowed > there else "",
        generators=allowed if allowed > there else None,
    )


def _bound(pace: Pace, config: Config) -> Advice:
    """The slots are full, or ready groups wait for others: then only another bound lets more begin."""
    floor_s = max(pace.learn_s, pace.saturation * pace.step_s, 0.01 * pace.step_s)
    needed = (pace.max_lag + 1) * pace.step_s / floor_s - 1
    doubled = [2**power for power in range(12) if 2**power > pace.max_lag]
    wanted = next((lag for lag in doubled if lag >= needed or lag >= 4 * pace.max_lag), doubled[-1])
    gain = pace.gain(pace.with_max_lag(wanted))
    are_long = pace.is_held_up
    why = (
        "a few long completions hold up groups that are ready"
        if are_long
        else "the slots are full while places are free"
    )
    change = f"buffer.max_lag={wanted} would make steps {_percent(gain)} shorter"
    is_auto = config.buffer.max_lag == "auto"
    if is_auto:
        change = f"buffer.max_lag=auto holds the bound at {pace.max_lag}, as the importance ratios allow"
    return Advice(
        bottleneck="lengths" if are_long else "bound",
        sentence=f"{why}: {change}",
        evidence=f"{pace.ready:.1f} groups ready and {pace.in_flight:.1f} in flight of {pace.slots:.0f} slots; {_waiting(pace)}",
        gain=0.0 if is_auto else gain,
        command="" if is_auto else f"set buffer.max_lag={wanted}",
    )


def _fewer_generators(pace: Pace, config: Config) -> tuple[Advice, ...]:
    """At most half are given back at once: how an engine slows down when its batch grows shows only then."""
    there = pace.generators
    of_rewards = pace.scored_at_once / config.reward.at_once
    needed = math.ceil(there * max(pace.saturation, of_rewards) / FULL)
    enough = max(math.ceil(there / 2), config.generators.min, needed)
    if (
        enough >= there
        or pace.gain(pace.with_generators(enough)) < 0
        or pace.with_generators(enough) > 1.02 * pace.step_s
    ):
        return ()
    freed = (there - enough) * config.generators.gpus_each
    sentence = f"{enough} of {there} generators would do: steps would be no longer"
    return (
        Advice(
            bottleneck="generators",
            sentence=sentence + (f", and {freed} GPU{'s' * (freed > 1)} are free for the learner" if freed else ""),
            evidence=f"{_waiting(pace)}; each would hold groups in {_percent(pace.saturation * there / enough)} of its places",
            command=f"scale generators {enough}",
            generators=enough,
        ),
    )


def _learner(pace: Pace, config: Config) -> tuple[Advice, ...]:
    """The learner sets the pace: shorter steps need more of it."""
    ranks = config.learner.ranks
    best, gain = ranks, 0.0
    for more in range(ranks + 1, 2 * ranks + 1):
        if (found := pace.gain(pace.with_training(ranks / more))) > gain + 0.01:
            best, gain = more, found
    if pace.checkpoint_s > PUBLISHES * pace.step_s:
        gain = pace.gain(pace.step_s - pace.checkpoint_s / 2)
        change = f"run.checkpoint_every={2 * config.run.checkpoint_every}"
    elif gain >= WORTH:
        change = f"learner.ranks={best}"
    else:
        return ()
    passes = pace.tokens / (ranks * config.learner.updates_per_step * config.learner.tokens_per_microbatch)
    is_small = passes > 4 and config.learner.tokens_per_microbatch < 4096
    sentence = f"the learner sets the pace: {change} would make steps {_percent(gain)} shorter"
    if is_small:
        sentence += f"; try learner.tokens_per_microbatch={_larger(config, passes)} first"
    evidence = f"{pace.train_s:.2f} s of training in a step of {pace.step_s:.2f} s; {_waiting(pace)}"
    if is_small:
        evidence += f"; {passes:.0f} micro-batches in an update"
    return (Advice(bottleneck="learner", sentence=sentence, evidence=evidence, gain=gain),)


def _larger(config: Config, passes: float) -> int:
    """Tokens of a micro-batch that has a fourth of an update, as a power of two; the default at most."""
    wanted = config.learner.tokens_per_microbatch * passes / 4
    return int(min(16384, 2 ** math.ceil(math.log2(wanted))))


def _weights(pace: Pace, config: Config, share: float) -> Advice:
    """Publications take much of a step. Their cost is that of a step, however large its batch."""
    if config.model.lora.rank and not config.weights.adapters_only:
        change = "weights.adapters_only=true sends the adapters alone"
    else:
        change = f"buffer.prompts_per_step={2 * config.buffer.prompts_per_step} would halve their share"
    return Advice(
        bottleneck="weights",
        sentence=f"publications take {_percent(share)} of a step: {change}",
        evidence=f"{pace.publish_s:.2f} s of {pace.step_s:.2f} s, {_percent(pace.loading)} of the generators' time",
        gain=share / 2,
    )


def _balanced(pace: Pace) -> Advice:
    """Nothing was found. If the learner waits all the same, groups are on their way: more begin than before."""
    found = (
        "balanced: nothing to gain" if not pace.lacks_groups else "nothing to change: more groups are about to begin"
    )
    return Advice(bottleneck="none", sentence=found, evidence=_waiting(pace))


# -- words -------------------------------------------------------------------------------------------------------------


def _waiting(pace: Pace) -> str:
    places = f"{_percent(pace.saturation)} of the generators' places"
    return f"the learner waits {_percent(pace.wait)} of {pace.step_s:.2f} s, groups hold {places} ({pace.steps} steps)"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def _ordinal(number: int) -> str:
    if number <= len(_ORDINALS):
        return _ORDINALS[number - 1]
    endings = {1: "st", 2: "nd", 3: "rd"} if number % 100 not in (11, 12, 13) else {}
    return f"{number}{endings.get(number % 10, 'th')}"
