"""Advice names what holds a run back, from its own events alone."""

from typing import Any

import msgspec
import pytest

from asyncgrpo.config import schema
from asyncgrpo.recording.advice import Advice, advise, splits
from asyncgrpo.recording.events import Event
from asyncgrpo.recording.pace import FEWEST, SETTLE, TAIL, WINDOW, pace_of

BASE = schema.Config(
    model=schema.ModelConfig(path="m"),
    data=schema.DataConfig(train="t"),
    buffer=schema.BufferConfig(prompts_per_step=8, max_lag=4),
    generators=schema.GeneratorConfig(count=2, groups_in_flight=8, gpus_each=2),
)
STEP_S = 10.0


def config(**sections: Any) -> schema.Config:
    return schema.Config(**{name: sections.get(name, getattr(BASE, name)) for name in BASE.__struct_fields__})


def step(n: int, *, wait: float = 0.0, full: float = 0.7, there: int = 2, places: int = 8, **more: Any) -> Event:
    """A step of 10 s in which the learner waits `wait` of the time, and `full` of the generators' places hold a group.

    Groups of 4 completions are sampled all the time, but for what is said of the generators.
    """
    in_flight, of_generators = full * there * places, more.pop("generators", {})
    seconds = {"wait_data": wait * STEP_S, "publish": 0.1, "optimizer": 1.0}
    return {
        "event": "step", "time": 1000.0 + STEP_S * n, "step": n, "tokens_trained": 1000, "completions": 32,
        "seconds": {**seconds, "forward_backward": STEP_S - sum(seconds.values()), **more.pop("seconds", {})},
        "lags": {"1": 8}, "max_lag": 4, "slots": 40, "wanted": 24, "under_way": 24, "ready_seconds": 2.0,
        "zero_signal_groups": 0, "failures": {},
        "generators": {
            "in_touch": float(there), "places": float(there * places), "in_flight": in_flight, "generate": there * STEP_S,
            "reward": 0.0, "weights": 0.1, "idle": 0.0, "sampling": 4 * in_flight * STEP_S, "scoring": 1.0,
            **of_generators,
        },
        **more,
    }  # fmt: skip


def run(count: int = 20, **how: Any) -> list[Event]:
    return [{"event": "start", "time": 1000.0}, *(step(n, **how) for n in range(1, count + 1))]


def first(
    events: list[Event], config: schema.Config = BASE, now: float | None = None, gpus: int | None = None
) -> Advice:
    advice = advise(events, config, now, gpus)
    assert advice, "no advice"
    return advice[0]


STARVED = {"wait": 0.38, "full": 1.0}
ONE_PLACE = {"wait": 0.9, "full": 1.0, "there": 1, "places": 1}
"""A group takes an eighth of a step. Its lag is 1, because the batch takes a step to fill."""
MANY = {"wait": 0.02, "full": 0.2, "there": 4}
SLOW_LEARNER = {"wait": 0.01, "full": 0.8, "there": 1}
OFTEN = {"checkpoint": 6.0, "forward_backward": 2.9}
SCORING = {"sampling": 100.0, "scoring": 900.0, "generate": 20.0, "reward": 0.0}
"""The engine always samples some group, so a share of wall time would not show a slow reward."""
SLOW_REWARD = {"wait": 0.8, "full": 0.2, "generators": SCORING}
TIGHT = {"wait": 0.6, "full": 0.4, "max_lag": 1, "slots": 16, "under_way": 16, "ready_seconds": 0.5}
BEHIND = TIGHT | {"full": 0.2, "under_way": 12, "wanted": 16}
"""Slots are free, but not for generators that load the newest weights."""
LONG = {"wait": 0.5, "full": 0.4, "slots": 40, "under_way": 30, "ready_seconds": 25.0, "lags": {"1": 6, "4": 2}}
QUICK = {"wait_data": 0.04, "forward_backward": 0.2, "optimizer": 0.0, "publish": 0.01}
HANDS_OVER = {"wait_data": 0.09, "other": 0.2, "forward_backward": 0.0, "optimizer": 0.0, "publish": 0.01}
READY = {"under_way": 60, "slots": 144, "max_lag": 2, "lags": {"0": 30, "1": 18}, "ready_seconds": 0.3, "there": 1}
"""As in the demo: of steps of 0.25 s the hand-over of a batch that is ready takes a tenth."""
WAITS = READY | {"full": 0.2, "seconds": QUICK | {"wait_data": 0.4}}
NO_SIGNAL = {"wait": 0.01, "full": 0.1, "there": 1, "zero_signal_groups": 6}
PUBLISHES = {"wait": 0.02, "seconds": {"publish": 4.0, "forward_backward": 4.8}}
LOADS = {"wait": 0.3, "full": 1.0, "generators": {"weights": 8.0}}


def at_most(generators: int) -> dict[str, Any]:
    return {"generators": schema.GeneratorConfig(count=2, max=generators)}


SANDBOX = {"reward": schema.RewardConfig(code=schema.CodeRewardConfig(url="http://sandbox", max_concurrent=2))}
JUDGE = {"reward": schema.RewardConfig(function="judge", judge=schema.JudgeConfig(url="http://j", max_concurrent=2))}
PARALLEL = {"reward": schema.RewardConfig(workers=64)}
AUTO = {"buffer": schema.BufferConfig(prompts_per_step=8, max_lag="auto")}
DROPS, TRAINS = ({"buffer": schema.BufferConfig(prompts_per_step=8, policy=policy)} for policy in ("drop", "train"))
FILTERING = {"algorithm": schema.AlgorithmConfig(filter_zero_signal=True)}
CALCULATOR, OWN = ({"environment": schema.EnvironmentConfig(name=name)} for name in ("calculator", "guess.py"))


@pytest.mark.parametrize(
    ("how", "sections", "bottleneck", "command", "gain", "words"),
    [
        (STARVED, {}, "generators", "scale generators 3", 1 / 3, "33 % shorter; more would gain little"),
        (STARVED | {"wait": 0.5}, {}, "generators", "scale generators 4", 0.5, "33 % shorter, 4 generators 50 %; more"),
        (ONE_PLACE, {}, "generators", "scale generators 9", 8 / 9, "2 generators would make steps 50 % shorter, 9"),
        (STARVED, at_most(3), "generators", "scale generators 3", 1 / 3, "3 generators would"),
        (STARVED, at_most(2), "generators", "", 0, "33 % shorter, but generators.max=2 allows no more"),
        (STARVED | {"there": 64, "slots": 999}, {}, "generators", "", 0, "but generators.max=64 allows no more"),
        (MANY, {}, "generators", "scale generators 2", 0, "2 of 4 generators would do: steps would be no longer"),
        (MANY, {"generators": schema.GeneratorConfig(min=3)}, "generators", "scale generators 3", 0, "3 of 4"),
        (SLOW_LEARNER, {}, "learner", "", 0.2, "learner.ranks=2 would make steps 20 % shorter"),
        (SLOW_LEARNER | {"wait": 0.0, "seconds": OFTEN}, {}, "learner", "", None, "run.checkpoint_every=40"),
        (SLOW_LEARNER | {"generators": SCORING}, {}, "learner", "", None, ""),  # it does not wait for the slow reward
        (SLOW_REWARD, {}, "reward", "", 0.79, "reward.workers=8 would make steps 79 % shorter"),
        (SLOW_REWARD | {"full": 1.0}, PARALLEL, "generators", None, None, ""),  # none waits for its turn
        (SLOW_REWARD | {"full": 0.12, "under_way": 40}, PARALLEL, "bound", None, None, ""),
        (SLOW_REWARD | {"full": 0.12, "under_way": 40, "ready_seconds": 6.0}, PARALLEL, "bound", None, None, ""),
        (SLOW_REWARD | {"full": 0.95}, {}, "generators", None, None, ""),  # places and workers are full
        (SLOW_REWARD, SANDBOX, "reward", "", None, "reward.code.max_concurrent=16"),
        (SLOW_REWARD, JUDGE, "reward", "", None, "reward.judge.max_concurrent=16"),
        (SLOW_REWARD, OWN, "reward", "", 0.79, "environment.processes=8"),
        (SLOW_REWARD, CALCULATOR, "none", "", None, ""),  # an environment of ours has no setting for it
        (TIGHT, {}, "bound", "set buffer.max_lag=4", 0.6, "buffer.max_lag=4 would make steps 60 % shorter"),
        (TIGHT, DROPS, "bound", "set buffer.max_lag=4", 0.6, ""),
        (TIGHT, TRAINS, "bound", "", 0.6, "buffer.max_lag=4 would"),  # a running run refuses it
        (BEHIND, {}, "bound", "set buffer.max_lag=4", 0.6, "the bound holds groups back while places are free"),
        (TIGHT | {"full": 0.9}, {}, "none", "", 0, "no single change makes steps a tenth shorter"),
        (LONG, {}, "lengths", "set buffer.max_lag=16", 0.5, "buffer.max_lag=16 would make steps 50 % shorter"),
        (LONG, AUTO, "lengths", "", None, "buffer.max_lag=auto holds the bound at 4"),
        (WAITS, {}, "none", "", 0, "more groups are about to begin"),
        (READY | {"seconds": HANDS_OVER}, {}, "none", "", 0, "waits as short as these are the hand-over of batches"),
        (WAITS | {"lags": {"0": 30, "2": 18}, "ready_seconds": 1.0}, {}, "lengths", None, None, ""),
        (NO_SIGNAL, {}, "signal", None, 1 - 0.25 * 0.99, "would train no group without signal, now 75 %"),
        ({"full": 0.8, "filtered": {"all_equal_low": 24}}, FILTERING, "signal", None, None, ""),
        (PUBLISHES, {}, "weights", "", None, "40 % of a step: buffer.prompts_per_step=16 would halve their share"),
        (LOADS, {}, "weights", "", None, "publications take 40 % of the generators' time: buffer.prompts_per_step=16"),
        ({"wait": 0.06, "full": 0.95}, {}, "none", "", 0, "balanced: nothing to gain"),
    ],
)
def test_what_holds_a_run_back_and_what_would_help(how, sections, bottleneck, command, gain, words):
    found = first(run(**how), config(**sections))
    assert found.bottleneck == bottleneck and words in found.sentence
    assert command is None or found.command == command
    assert found.generators == (int(found.command[-1]) if found.command.startswith("scale") else None)
    assert gain is None or found.gain == pytest.approx(gain, abs=0.005)


def test_no_advice_asks_for_a_larger_bound_beside_the_warning_that_asks_for_a_smaller_one():
    warning = {"event": "warning", "time": 1200.0, "about": "steps", "text": "the updates are large"}
    found = first([*run(**TIGHT), warning])
    assert (found.bottleneck, found.command, found.gain) == ("bound", "", 0.0)
    assert "buffer.max_lag=1 should not grow, since the updates are large" in found.sentence


def test_the_evidence_and_what_stands_beside_the_most_urgent():
    assert "the learner waits 38 % of 10.00 s" in first(run(**STARVED)).evidence
    assert "90 % of their time in scoring, 45.0 at once with reward.workers=1" in first(run(**SLOW_REWARD)).evidence
    none, *others = advise(run(**SLOW_LEARNER, zero_signal_groups=8, reward_mean=0.98), BASE)
    assert none.bottleneck == "signal" and none.command == "" and "look at the reward function" in none.sentence
    assert none.evidence.endswith("; the mean reward is 0.98") and [other.bottleneck for other in others] == ["learner"]


def test_a_wider_bound_gains_less_where_stragglers_hold_up_the_others():
    assert pace_of(run(**LONG), BASE).predict(max_lag=5)[0] == pytest.approx(STEP_S * (5 / 6) ** TAIL)
    assert pace_of(run(**TIGHT), BASE).predict(max_lag=2)[0] == pytest.approx(STEP_S * 2 / 3)


def test_few_steps_say_nothing():
    assert advise(run(SETTLE + FEWEST - 1), BASE) == ()
    assert advise(run(SETTLE + FEWEST), BASE) != ()
    assert advise([], BASE) == advise(run(0), BASE) == ()


@pytest.mark.parametrize(
    "change", [{"there": 3}, {"max_lag": 8}, {"places": 16}], ids=["generators", "bound", "groups in flight"]
)
def test_what_was_before_a_change_does_not_count(change):
    before, after = run(wait=0.5, full=1.0), [step(n, **change) for n in range(WINDOW + 1, 2 * WINDOW)]
    assert first(before).bottleneck == "generators"
    assert advise([*before, *after[: SETTLE + FEWEST - 1]], BASE) == ()
    found = pace_of([*before, *after], BASE)
    assert found is not None and found.wait == 0


def test_a_change_that_no_event_shows_counts_alone_after_fifty_steps():
    events = [*run(60, **STARVED), *(step(n, **SLOW_LEARNER | {"there": 2}) for n in range(61, 111))]
    assert pace_of(events, BASE).wait == pytest.approx(0.01)
    assert pace_of(events[:-1], BASE).wait > 0.01


def test_a_bound_that_steers_itself_is_no_change_and_one_long_step_says_nothing_but_bursts_do():
    events = [step(n, max_lag=n % 3) for n in range(WINDOW)]
    assert pace_of(events, BASE) is None
    assert pace_of(events, config(buffer=schema.BufferConfig(max_lag="auto"))) is not None
    calm = run(wait=0.01, full=0.8, there=1)
    calm[12]["seconds"] = {"wait_data": 500.0, "forward_backward": 9.0}
    assert pace_of(calm, BASE).wait < 0.05
    bursts = [step(n, seconds={"wait_data": 12.0 if n % 5 == 0 else 0.0}) for n in range(WINDOW + 2)]
    assert pace_of(bursts, BASE).wait > 0.15, "a median would say 0"


HUNGRY = run(wait=0.5, full=1.0)
"""20 steps, the last at 1,200 s, of a run that would else be told to have more generators."""
RESTART = {"event": "restart", "time": 1201.0, "actor": "generator-1", "reason": "signal 9"}
STALL = {"event": "stall", "time": 1290.0, "what": "batch", "seconds": 90.0}
GOOD = {"event": "sync", "time": 1200.0, "version": "1.20", "engines": 2, "ms": 5.0, "checksum": "ok"}
BAD = GOOD | {"left_out": ["generator-1"], "engines": 1}
PAUSED = {"event": "rewards_paused", "time": 1201.0, "actor": "generator-0", "reason": "OSError: no", "probe_in_s": 2.0}
FAILING = [step(n, failures={"timeout": 12, "crash": 4}) for n in range(21, 26)]
COMMAND = {"event": "command", "time": 5000.0, "by": "person", "command": "resume", "reply": "", "refused": False}


@pytest.mark.parametrize(
    ("events", "now", "words"),
    [
        ([RESTART] * 4, 1210.0, "generator-1 was restarted 4 times in 30 minutes (signal 9)"),
        ([STALL], 1300.0, "no optimizer step for 100 s, where one takes 10.0 s; the learner waits for batch"),
        ([STALL, step(30)], 1400.0, "no optimizer step for 100 s, where one takes 10.0 s; tuning"),  # nor a wait since
        ([GOOD, BAD], None, "without generator-1"),
        ([PAUSED], None, "every reward call fails at generator-0: OSError: no"),
        (FAILING, None, "25% of the completions have no score: crash 20, timeout 60"),
        ([COMMAND], 5100.0, "no optimizer step"),  # none since it was resumed
    ],
)
def test_what_is_not_healthy_comes_first(events, now, words):
    (advice,) = advise([*HUNGRY, *events], BASE, now)
    assert (advice.bottleneck, advice.command, advice.gain) == ("health", "", 0) and words in advice.sentence
    assert advice.evidence.startswith("see docs/runbooks/")


@pytest.mark.parametrize(
    ("events", "now"),
    [
        ([STALL], 1225.0),
        ([COMMAND | {"time": 1201.0, "command": "scale generators 900", "refused": True}], None),
        ([BAD, GOOD], None),
    ],
)
def test_what_was_made_good_is_past(events, now):
    assert first([*HUNGRY, *events], now=now).bottleneck == "generators"


def test_without_steps_since_a_start_a_restart_or_a_pause_nothing_is_known():
    assert advise([*HUNGRY, RESTART], BASE, 1210.0) == advise([*HUNGRY, COMMAND], BASE, 5020.0) == ()
    assert advise(run(0), BASE, 1500.0) == (), "engines load"
    assert advise(run(0), BASE, 1700.0)[0].bottleneck == "health", "for more than ten minutes"
    assert advise([*run(), {"event": "end", "time": 1201.0}], BASE, 9000.0)[0].bottleneck != "health"


def on_cores(idle: float, *, count: int = 2, rank: float = 0.9, generator: float = 0.5, **how: Any) -> list[Event]:
    """A run on a machine of so many cores, of which so many are idle; a rank and a generator keep so many busy."""
    there = how.get("there", 2)
    seconds = {"cores": count * STEP_S, "spare": idle * STEP_S}
    of_generators = {name: there * value for name, value in seconds.items()} | {"cpu": there * generator * STEP_S}
    trains = 1 - how.get("wait", 0.0)
    return run(generators=of_generators, cores=seconds | {"cpu": rank * trains * STEP_S}, **how)


def test_a_rank_without_a_free_core_is_not_advised():
    found = first(on_cores(0.3, **SLOW_LEARNER))
    assert (found.bottleneck, found.gain, found.command) == ("cores", 0.0, "")
    assert found.sentence == "no core is free for another learner rank: 0.3 of 2 idle, and it needs 0.9"
    assert "learner.ranks=2 would make steps 20 % shorter" in first(on_cores(1.0, **SLOW_LEARNER)).sentence


def test_a_step_is_no_shorter_than_the_work_of_the_cores():
    def of_cores(used: float, idle: float) -> list[Event]:
        seconds = {"cores": 20.0, "spare": 10.0 * idle}
        told = SCORING | {name: 2 * value for name, value in seconds.items()} | {"cpu": 10.0 * used}
        return run(wait=0.8, full=0.2, generators=told, cores=seconds | {"cpu": 0.0})

    assert first(of_cores(1.9, 0.1)).sentence.startswith("no core is free for another reward worker")
    half = "the reward sets the pace: reward.workers=2 would make steps 45 % shorter"
    assert first(of_cores(1.0, 1.0)).sentence == half
    assert first(of_cores(1.0, 0.1)).sentence == half, "others keep the cores busy, and may have less of them"


def test_a_gpu_that_is_not_free_is_not_advised():
    gpus = schema.GeneratorConfig(count=2, groups_in_flight=8, gpus_each=2)
    four = config(generators=gpus, learner=schema.LearnerConfig(ranks=4))
    starved = run(wait=0.7, full=1.0)
    (found,) = advise(starved, four, gpus=8)
    assert (found.command, found.gain) == ("", pytest.approx(1 / 3))
    split = "generators.count=3 learner.ranks=2"
    assert found.sentence == f"no GPU is free, but another split would make steps 33 % shorter: {split}"
    (found,) = advise(run(wait=0.3, full=1.0), four, gpus=8)
    assert found.sentence == "3 generators would make steps 30 % shorter, but the free GPUs allow no more"
    taught = msgspec.structs.replace(four, teacher=schema.TeacherConfig(path="t", gpus_each=2))
    assert advise(starved, four, gpus=10)[0].command == "scale generators 3"
    (found,) = advise(starved, taught, gpus=10)
    assert found.sentence.endswith(f"shorter: {split}"), "two of the ten are the teacher's"


def test_no_advice_names_a_setting_that_the_configuration_refuses():
    parallel = schema.LearnerConfig(ranks=4, parallel=schema.ParallelConfig(context=4))
    four = config(learner=parallel, generators=schema.GeneratorConfig(count=1, gpus_each=1))
    (found,) = advise(run(**SLOW_LEARNER), four, gpus=9)
    assert "learner.ranks=8 would" in found.sentence
    assert [(one.generators, one.ranks) for one in splits(pace_of(run(**SLOW_LEARNER), four), four, 9)] == [
        (1, 8), (2, 4), (3, 4), (4, 4), (5, 4)
    ]  # fmt: skip


def test_a_gpu_that_both_sides_share_has_one_generator_and_one_rank():
    shared = config(
        cluster=schema.ClusterConfig(share_gpu=True), generators=schema.GeneratorConfig(count=1, gpus_each=1)
    )
    for how in (SLOW_LEARNER, STARVED | {"there": 1}):
        for gpus in (1, 8):
            found = first(run(**how), shared, gpus=gpus)
            assert (found.command, found.generators, found.gain) == ("", None, 0.0)
        ((generators, ranks),) = [(one.generators, one.ranks) for one in splits(pace_of(run(**how), shared), shared, 1)]
        assert (generators, ranks) == (1, 1)


def test_cores_are_not_to_blame_where_gpus_or_a_setting_are():
    idle = {"count": 64, "rank": 1.0, "generator": 1.0, "idle": 50.0}
    four = config(learner=schema.LearnerConfig(ranks=4))
    (found,) = advise(on_cores(wait=0.7, full=1.0, **idle), four, gpus=8)
    assert found.sentence.startswith("no GPU is free, but another split")
    advice = advise(on_cores(wait=0.01, full=0.8, **idle), four, gpus=8)
    assert [one.bottleneck for one in advice if one.bottleneck == "cores"] == []
