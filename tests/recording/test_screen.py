"""What a person sees of a run: the live page, one line a step, the summary, the curves."""

import io
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from asyncgrpo.recording.curves import plot
from asyncgrpo.recording.events import Event, EventLog, read_events
from asyncgrpo.recording.progress import (
    MOST_POINTS,
    Curve,
    Following,
    Progress,
    progress_of,
    sync_line,
)
from asyncgrpo.recording.screen import bar, line_plot, render, resample, watch
from asyncgrpo.recording.text import line_of, summary


def step(n: int, **more) -> Event:
    return {
        "event": "step", "time": 1000.0 + 2 * n, "step": n, "version": f"1.{n}", "reward_mean": n / 20, "loss": -0.0125,
        "lags": {"0": 2, "2": 6}, "completions": 64, "tokens_trained": 100, "tokens_generated": 120 * n,
        "tokens": {"generated": 120 * n, "trained": 100 * n, "filtered": 0, "stale": 5, "failed": 2, "waiting": 20 * n - 7},
        "tokens_dropped": 7, "logprob_gap_max": n * 1e-6, "completion_length_mean": 9.5, "failures": {}, "dropped": {},
        "seconds": {"wait_data": 0.5, "forward_backward": 1.0, "optimizer": 0.4, "publish": 0.1}, **more,
    }  # fmt: skip


def sync(n: int, **more) -> Event:
    at = {"event": "sync", "time": 1000.0 + 2 * n}
    return at | {"version": f"1.{n}", "engines": 2, "ms": 12.3, "checksum": "ok"} | more


def of(kind: str, **fields) -> Event:
    """An event of a process."""
    return {"event": kind, "time": 1.0, "actor": "generator-0"} | fields


START = {
    "event": "start", "time": 1000.0, "run": "demo", "lineage": 1, "version": "1.0", "step": 0,
    "sizes": "8 prompts x 8 completions", "steps": 20,
}  # fmt: skip
EVAL = {"event": "eval", "time": 1021.0, "step": 10, "version": "1.10", "reward_mean": 0.45, "completions": 32}
END = {"event": "end", "time": 1041.0, "status": "done", "step": 20}
RUN = [START, *(event for n in range(1, 21) for event in (step(n), sync(n))), EVAL, END]


def page(events: list[Event], width: int = 80, now: float | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, height=40)
    console.print(render(Progress.of(events), now))
    return console.file.getvalue()


def test_the_page_shows_the_reward_the_lag_the_time_and_the_syncs():
    text = page([*RUN[:35], EVAL])
    assert "demo" in text and "step 17/20" in text and "85%" in text
    assert "0.850" in text and "0.450 @ 10" in text
    assert "v17 -> 2 engines, 12 ms, checksum ok" in text
    assert "wait for data" in text and "25%" in text and "70%" in text
    assert "2.04k  60/s" in text and "1.7k  50/s" in text
    assert any("\u2801" <= character <= "\u28ff" for character in text)
    assert "0:02:05" in page(RUN[:5], now=1125.0) and "0:00:41" in page(RUN, now=5000.0) and "done" in page(RUN)
    assert "starting" in page([]) and "no step yet" in page([START])
    assert "format 0.920, qa/f1 0.510" in page([step(1, reward_parts={"format": 0.92, "qa/f1": 0.51})], width=120)
    assert "[red]\\x1b 1.000" in page([step(1, reward_parts={"[red]\x1b": 1.0})], width=120)
    several = {"aiw": {"reward_mean": 0.51}, "gsm8k": {"reward_mean": None}}
    assert "aiw 0.510, gsm8k -" in page([step(1, sources=several)], width=120)
    assert "aiw" not in page([step(1, sources={"aiw": {"reward_mean": 0.51}})], width=120)
    huge = [START, step(1, reward_mean=-2.5e300, loss=1e12), EVAL | {"reward_mean": 1e308}]
    for text in (page(huge), summary(Progress.of(huge))):
        assert "-2.5e+300" in text and "1e+308" in text and "00000" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_page_fits_a_small_terminal(width):
    trouble = [of("restart", time=1041.0, actor=f"generator-{i}", reason="killed " * 20) for i in range(9)]
    lines = page([*RUN[:-1], *trouble, step(21, lags={str(lag): 1 for lag in range(12)})], width).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= width


def test_the_page_says_that_rewards_are_paused_and_when_they_are_tried_again():
    failed = of(
        "reward_failed", failure="exception my_reward.py:12: OSError", detail="my_reward.py:12: OSError: no", count=1
    )
    paused = of("rewards_paused", time=100.0, reason="OSError: no", probe_in_s=2.0)
    again = paused | {"time": 103.0, "probe_in_s": 8.0}
    resumed = of("rewards_resumed", time=111.0, seconds=11.0)
    assert "reward failed at generator-0 (exception my_reward.py:12: OSError): my_re" in page([START, failed], 120)
    assert "(exception my_reward.py:12: OSError), 10 so far" in page([START, failed | {"count": 10}], 120)
    line = "paused at generator-0 for 5 s, probing again in 6 s: OSError: no"
    assert line in page([START, step(1), sync(1), sync(2), sync(3), paused, again], now=105.0)
    text = page([START, paused, again, resumed], now=112.0)
    assert "probing again" in text and line[:6] not in text.splitlines()[-1]
    assert "rewards work again at generator-0, after 11 s" in text
    assert Progress.of([START, paused, again, resumed]).paused == {}
    text = page([START, of("lease_failed", reason="failed", detail="too long", count=10)])
    assert "group failed at generator-0 (failed), 10 so far: too long" in text


CURRICULUM = {
    "event": "curriculum", "time": 1.0, "round": 2, "source": "",
    "prompts": {"unknown": 0, "hopeless": 40, "mixed": 340, "solved": 120},
    "places": {"unknown": 0, "hopeless": 40, "mixed": 400, "solved": 60},
}  # fmt: skip
BY_DELTAS = sync(1, bytes=50_000_000, sent_bytes=2_500_000)
DEGRADED = sync(2, engines=1, left_out=["generator-1"])
NO_SCORE = EVAL | {"reward_mean": None, "failures": {"timeout": 30, "crash": 2}}


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (CURRICULUM, "epoch 2: 500 places; prompts: 120 solved with 60, 340 mixed with 400, 40 hopeless with 40"),
        (CURRICULUM | {"source": "hf:a/b", "round": 3}, "round 3 of hf:a/b: 500 places; prompts: 120 solved with 60, "),
        (CURRICULUM | {"prompts": {"unknown": 500, "hopeless": 0, "mixed": 0, "solved": 0}}, None),
        (EVAL, "eval  10  reward 0.450  completions 32"),
        (NO_SCORE, "eval  10  reward -  completions 32  failures: crash 2, timeout 30"),
        (sync(1), None),
        (DEGRADED, "warning: v2 -> 1 engine, 12 ms, checksum ok, without generator-1"),
    ],
)
def test_the_line_of_an_event(event, line):
    progress = Progress.of([event])
    found = line_of(event, progress)
    assert found is None if line is None else found.startswith(line)
    assert progress.num_bad_syncs == 0 and len(progress.warnings) == (event is DEGRADED)
    if event["event"] == "curriculum" and line:
        assert line in page([event, step(1)], width=140)
    assert sync_line(BY_DELTAS) == "v1 -> 2 engines, 12 ms, 2.5 of 100 MB sent, checksum ok"
    assert sync_line(BY_DELTAS | {"sent_bytes": 100_000_000}) == "v1 -> 2 engines, 12 ms, checksum ok"


def test_progress_follows_stops_resumes_and_what_is_shown_again():
    progress = Progress.of([{**START, "steps": None, "prompts": 200}, step(1, prompts_done=50)])
    assert progress.share_done == 0.25 and Progress.of([{**START, "steps": None}, step(1)]).share_done is None
    rewound = Progress.of([*RUN, {"event": "rewound"}, START, step(1)])
    assert rewound.step == 1 and len(rewound.steps) == 1
    again = Progress.of([START, step(1), step(2), step(3), step(2, reward_mean=0.9)])
    assert list(again.curves["reward"]) == [(1, 0.05), (2, 0.9)] and again.step == 2
    events = [START, step(1), step(2), {**START, "time": 9000.0}, step(3, time=9002.0), step(4, time=9004.0)]
    assert Progress.of(events).training_seconds == pytest.approx(2 + 2 + 2 + 2), "without the time in between"


def test_the_page_warns_of_restarts_reward_failures_stalls_and_bad_syncs():
    events = [
        START,
        of("restart", reason="signal 9"),
        {"event": "stall", "time": 1.0, "what": "batch", "seconds": 61.2},
        sync(3, checksum="mismatch"),
    ]
    assert "restarted generator-0: signal 9" in page(events)
    assert "waiting for batch for 61 s" in page(events)
    assert "v3 -> 2 engines, 12 ms, checksum mismatch" in page(events)
    assert "step 1: reward failures: crash 1, timeout 2" in page([START, step(1, failures={"timeout": 2, "crash": 1})])


def test_a_file_gets_one_tidy_line_a_step(tmp_path):
    log = EventLog(tmp_path / "metrics.jsonl", clock=iter([1000.0, 1002.0, 1002.0, 1004.0, 1004.5, 1005.0]).__next__)
    for event in (START, sync(1), step(1), step(2), {**EVAL, "step": 2}, {**END, "step": 2}):
        fields = {key: value for key, value in event.items() if key not in ("event", "time")}
        log.write(event["event"], **fields)
    console = Console(file=io.StringIO(), width=60)
    progress = watch(tmp_path / "metrics.jsonl", console=console, poll_s=0.01)
    assert console.file.getvalue().splitlines() == [
        "start demo at step 0",
        "step   1/20  reward 0.050  lag 1.5 (max 2)  loss -0.0125  tok/s 60 gen 50 train  wait 25%  sync v1 12 ms ok",
        "step   2/20  reward 0.100  lag 1.5 (max 2)  loss -0.0125  tok/s 60 gen 50 train  wait 25%  sync v1 12 ms ok",
        "eval   2  reward 0.450  completions 32",
        "end   done at step 2",
    ]
    assert progress.step == 2


def test_a_terminal_gets_the_live_page_whose_cursor_stays_in_sight(tmp_path):
    """A run that is killed could not bring it back."""
    path, shown = tmp_path / "metrics.jsonl", list[str]()
    console = Console(file=io.StringIO(), width=80, height=30, force_terminal=True)
    stop = threading.Event()
    stop.wait = lambda timeout=None: (shown.append(console.file.getvalue()), stop.set())
    watch(path, console=console, stop=stop)
    assert shown and all(text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") for text in shown)
    EventLog(path).write("end", status="failed", step=0)
    watch(path, console=console, poll_s=0.01)
    assert "failed" in console.file.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_reason_from_outside_moves_no_cursor(tmp_path, is_terminal):
    log = EventLog(tmp_path / "metrics.jsonl")
    log.write("restart", actor="generator-0", reason="said \x1b[2Jgone", count=1)
    log.write("end", status="failed", step=0, reason="\x1b[2J")
    console = Console(file=io.StringIO(), width=80, height=30, force_terminal=is_terminal)
    watch(tmp_path / "metrics.jsonl", console=console)
    assert "\x1b[2J" not in console.file.getvalue()
    assert "said" in console.file.getvalue()


def test_a_resumed_run_does_not_end_with_its_old_end_nor_tell_its_past_again(tmp_path):
    path, now = tmp_path / "metrics.jsonl", [1000.0]
    log = EventLog(path, clock=lambda: now[0])
    log.write("restart", actor="buffer", reason="signal 9")
    log.write("end", status="drained", step=1)
    now[0] = 2000.0
    log.write("stall", what="groups", seconds=31.0)
    log.write("end", status="done", step=2)
    console = Console(file=io.StringIO(), width=80)
    progress = watch(path, console=console, since=1500.0, poll_s=0.01)
    assert console.file.getvalue() == "warning: waiting for groups for 31 s\nend   done at step 2\n"
    assert progress.end["time"] == 2000.0 and list(progress.warnings) == ["waiting for groups for 31 s"]
    assert progress.num_restarts == 1, "it is still counted"

    stop, console = threading.Event(), Console(file=io.StringIO(), width=80)
    stop.set()
    assert watch(path, console=console, since=2500.0, stop=stop).end["time"] == 2000.0
    assert console.file.getvalue() == ""


def test_lines_are_not_told_again_when_a_resume_replaces_the_file(tmp_path):
    path, now = tmp_path / "metrics.jsonl", [1000.0]
    log = EventLog(path, clock=lambda: now[0])

    def write_step(n: int) -> None:
        now[0] += 1
        log.write("step", **{key: value for key, value in step(n).items() if key not in ("event", "time")})

    def die_and_resume(timeout: float | None = None) -> None:
        log.resume_at(1)
        write_step(2)
        now[0] += 1
        log.write("end", status="done", step=2)

    write_step(1)
    write_step(2)
    stop, console = threading.Event(), Console(file=io.StringIO(), width=200)
    stop.wait = die_and_resume
    watch(path, console=console, stop=stop)
    said = [line.split("  reward")[0].split(" at")[0] for line in console.file.getvalue().splitlines()]
    assert said == ["step   1", "step   2", "step   2", "end   done"]


def test_the_summary_says_what_the_run_did(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_000001.parquet").touch()
    (tmp_path / "metrics.jsonl").touch()
    checkpoint = {"event": "checkpoint", "time": 1040.0, "step": 20, "path": "runs/demo/checkpoints/20", "seconds": 1.0}
    text = summary(Progress.of([*RUN[:-1], checkpoint, END]), tmp_path)
    rows = {line[:14].strip(): line[14:] for line in reversed(text.splitlines())}
    assert rows["run"] == "demo: done at step 20 of 20, 40.0 s of training"
    assert rows["reward"] == "0.150 -> 0.900 (means of 5 first and last steps)"
    assert rows["eval"] == "0.450"
    assert rows["tokens"] == "2,400 generated = 2,000 trained + 7 dropped (failed 2, stale 5) + 393 waiting"
    assert rows["lag"] == "mean 1.50, p50 2, p90 2, max 2 steps"
    assert rows["weight syncs"] == "20 of 20 proved by checksum"
    assert rows["log-prob gap"] == "max 2e-05 nats between learner and engine"
    assert rows["waiting"] == "25% of the learner's time"
    assert rows["checkpoint"] == "runs/demo/checkpoints/20 (step 20)"
    assert f"{tmp_path / 'samples'}/ (1 entry)" in text and str(tmp_path / "metrics.jsonl") in text
    assert summary(Progress.of([START])) == "run  demo: not ended at step 0 of 20, 0.0 s of training"
    old = summary(Progress.of([START, {**step(1), "tokens": None}]))
    assert "120 generated, 100 trained" in old and " = " not in old, "an older release does not count all of them"
    bad = summary(
        Progress.of([START, step(1), sync(1), sync(2, checksum="mismatch"), of("restart", reason="signal 9")])
    )
    assert "1 of 2 proved by checksum" in bad and "restarts      1" in bad


def flow(n: int, **more) -> Event:
    """A step at which `fresh` keeps eleven groups under way, and four generators have places for 32."""
    at = {"max_lag": 4, "slots": 40, "wanted": 12, "under_way": 11, "ready_seconds": 0.3 * n}
    at |= {"generators": {"in_touch": 4.0, "places": 32.0, "in_flight": 8}}
    at |= {"lags": {"0": 5, "3": 4, "4": 1}, "seconds": {"wait_data": 0.1, "train": 1.9}}
    return step(n) | at | more


BUSY = {"in_touch": 4.0, "places": 32.0, "generate": 1.5, "reward": 0.25, "weights": 0.06, "idle": 0.2}


def test_the_page_and_the_summary_show_lags_groups_under_way_and_generators():
    def both(*events: Event) -> tuple[str, str]:
        return page([START, *events]), summary(Progress.of([START, *events]))

    on_page, in_summary = both(flow(1), flow(2), flow(3, max_lag=6))
    assert "p50 0, p90 3, max 4 of 6" in on_page and "mean 1.60, p50 0, p90 3, max 4 of 6 steps\n" in in_summary
    assert "under way 11 of 12 wanted, ready 0.6 s" in on_page
    assert "mean 11.0 groups of 12.0 wanted; a group waits ready 0.60 s\n" in in_summary
    on_page, in_summary = both(*(flow(n, wanted=None, generators=BUSY) for n in range(1, 4)))
    assert "under way 11 of 40 slots" in on_page and "mean 11.0 groups of 40.0 slots" in in_summary
    assert "sampling 75%, scoring 12%" in on_page
    assert "sampling 75%, only scoring 12%, changing weights 3%, idle 10% of their time\n" in in_summary
    on_page, in_summary = both(step(1))
    assert "p50 2, p90 2, max 2" in on_page and "under way" not in on_page + in_summary, "of an older release"


ADVICE = {
    "event": "advice", "time": 1030.0, "bottleneck": "generators", "sentence": "1 of 4 generators would do",
    "evidence": "the learner waits 5 %", "gain": 0.0, "command": "scale generators 1", "generators": 1, "also": (),
}  # fmt: skip


def command(name: str, **more) -> Event:
    return {"event": "command", "time": 1035.0, "command": name, "by": "person", "reply": "", "refused": False, **more}


def test_a_paused_run_is_shown_as_paused_and_gets_no_advice():
    running = [*RUN[:31], ADVICE]
    paused = page([*running, command("pause")])
    assert "15/20  paused" in paused and ADVICE["sentence"] not in paused
    for again in (command("resume"), START):
        assert "15/20  training" in page([*running, command("pause"), again])
    assert "training" in page([*running, command("pause", refused=True)])


def test_the_advice_is_on_the_page_in_the_log_and_in_the_summary():
    events = [START, *(flow(n) for n in range(1, 4)), ADVICE]
    assert "advice  1 of 4 generators would do" in page(events)
    assert "advice        1 of 4 generators would do (the learner waits 5 %)" in summary(Progress.of(events))
    assert line_of(ADVICE, Progress.of(events)) == "advice  1 of 4 generators would do"
    assert len(page([*events, sync(1), sync(2), sync(3), *[{**END, "event": "restart"}] * 4]).splitlines()) <= 24
    paused = of("rewards_paused", reason="no", probe_in_s=2.0)
    assert "would do" not in page([*events, paused]), "first what is urgent"
    assert "would do" not in page([*events, START | {"lineage": 2}]), "it was about the start before"


def test_the_summary_counts_what_was_filtered_to_the_end_of_the_run():
    first = step(1, filtered={"all_equal_low": 3}, tokens={"generated": 1600, "trained": 100, "filtered": 1500})
    end = END | {"filtered": {"all_equal_high": 1, "all_equal_low": 1}}
    text = summary(Progress.of([START, first, end]))
    assert "5 groups without signal: all_equal_high 1, all_equal_low 4" in text and "1,500 filtered" in text
    assert "5 groups" not in summary(Progress.of([START, first]))
    assert "2 groups without signal" in summary(Progress.of([START, end])), "also when no step could be made"


@pytest.mark.parametrize("events", [[], [START, step(1, lags={}, reward_mean=None)], RUN])
def test_curves_are_drawn_whatever_there_is(events, tmp_path):
    path = plot(Progress.of(events), tmp_path / "curves.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [p.name for p in Path(tmp_path).iterdir()] == ["curves.png"]


def test_lines_and_bars():
    lines = line_plot([0.0, 1.0], width=2, height=2)
    assert [len(line) for line in lines] == [2, 2]
    assert lines[0][0] == "\u2800" and lines[1][0] != "\u2800"
    assert lines[0][1] != "\u2800" and ord(lines[0][1]) & 0x08  # the dot in the upper right corner
    assert line_plot([3.0], 3, 2) == ["\u2800" * 3, "\u28c0" * 3] and line_plot([], 3, 2) == ["   ", "   "]
    assert resample([0.0, 1.0], 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert (resample([1.0, 3.0, 5.0, 7.0], 2), resample([4.0], 3)) == ([2.0, 6.0], [4.0, 4.0, 4.0])
    assert [bar(share, 4) for share in (0, 0.5, 1, 2)] == ["    ", "██  ", "████", "████"] and bar(0.125, 1) == "▏"


# -- a run of months ---------------------------------------------------------------------------------------------------


def month_of(steps: int) -> Iterator[Event]:
    yield START
    for n in range(1, steps + 1):
        yield step(n, generators={"generate": 3.0, "idle": 1.0}, under_way=9, slots=12, max_lag=4, dropped={"stale": 1})
        yield sync(n, gap_max=1e-5 * n)
        if n % 10 == 0:
            yield {**EVAL, "step": n, "reward_mean": n / steps}
            yield {"event": "checkpoint", "time": 1000.0 + 2 * n, "step": n, "path": f"checkpoints/{n}", "seconds": 1.0}
        if n % 50 == 0:
            yield {"event": "fault", "time": 1000.0 + 2 * n, "fault": "kill", "actor": "learner-0"}
            yield {"event": "recovered", "time": 1000.0 + 2 * n, "fault": "kill", "actor": "learner-0", "seconds": 2.0}


def bytes_of(progress: Progress) -> int:
    return len(msgspec.json.encode(progress, enc_hook=list))


def test_a_run_of_months_takes_no_more_room_than_one_of_days():
    short, long = (Progress.of(month_of(steps)) for steps in (2_000, 16_000))
    assert long.step == 16_000 and len(long.steps) == 11
    assert bytes_of(long) < 1.5 * bytes_of(short)
    assert max(len(curve.x) for curve in long.curves.values()) <= MOST_POINTS
    render(long)


def test_sums_and_ends_of_a_long_run_are_exact():
    events = list(month_of(5_000))
    steps = [event for event in events if event["event"] == "step"]
    progress = Progress.of(events)
    assert progress.tokens_trained == sum(event["tokens_trained"] for event in steps)
    assert progress.untrained("dropped") == {"stale": 5_000} and sum(progress.lags().values()) == sum(
        sum(event["lags"].values()) for event in steps
    )
    assert progress.first_rewards == [n / 20 for n in range(1, 6)]
    assert progress.last_rewards == [n / 20 for n in range(4_996, 5_001)]
    assert progress.mean("under_way") == 9 and progress.generator_shares() == {"generate": 0.75, "idle": 0.25}
    assert (progress.num_steps, progress.num_faults, progress.num_recoveries) == (5_000, 100, 100)


def test_a_curve_becomes_coarser_and_keeps_mean_and_maximum():
    mean, most = Curve(), Curve(is_max=True)
    for x in range(1, 10 * MOST_POINTS + 4):
        for curve in (mean, most):
            curve.add(x, float(x % 7))
    assert mean.every == most.every == 16 and len(mean.x) <= MOST_POINTS
    assert mean.x[-1] == 10 * MOST_POINTS + 3 and set(most.y) == {6.0}
    whole = mean.y[:-1]
    assert sum(whole) / len(whole) == pytest.approx(3.0, abs=1e-3)
    progress = Progress()
    for n in range(1, 2_345):  # an activity may come for the first time after a thousand steps, as an evaluation does
        progress.update(step(n, seconds={"train": 1.0} | ({"eval": 3.0} if n % 1_500 == 0 else {})))
    assert progress.seconds["eval"].x == progress.seconds["train"].x
    assert sum(progress.seconds["eval"].y) * progress.seconds["eval"].every == pytest.approx(3.0)
    for x in range(20):
        most.add(10 * MOST_POINTS - 50 + x, 99.0)
    assert max(most.x) == 10 * MOST_POINTS - 31 and sorted(set(most.y)) == [6.0, 99.0], "values shown again replace"


def write_events(path: Path, events: Iterable[Event]) -> None:
    with open(path, "ab") as file:
        file.writelines(json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in events)


def test_progress_that_was_kept_is_that_of_all_events(tmp_path, monkeypatch):
    path, events = tmp_path / "metrics.jsonl", list(month_of(3_000))
    write_events(path, events[:4_000])
    following = Following(path)
    for event in following.poll():
        if event["event"] == "checkpoint":
            following.keep()
    write_events(path, events[4_000:])
    read: list[Event] = []
    monkeypatch.setattr(
        Progress, "update", lambda self, event, real=Progress.update: (read.append(event), real(self, event))
    )
    again = progress_of(path)
    assert 1_000 < len(read) < 3_000, "only those after the last checkpoint that was kept"
    assert again == Progress.of(events)


def test_kept_progress_counts_only_while_the_events_before_it_are_the_same(tmp_path):
    path, events = tmp_path / "metrics.jsonl", list(month_of(40))
    write_events(path, events)
    following = Following(path)
    list(following.poll())
    following.keep()
    EventLog(path).resume_at(20)  # the checkpoints after it are broken
    assert next(iter(following.poll()))["event"] == "rewound"
    write_events(path, events[-100:])
    assert progress_of(path) == Progress.of(read_events(path))
    kept = tmp_path / "progress.json"
    for text in (b"", b"{", kept.read_bytes().replace(b'"release":"', b'"release":"0')):
        kept.write_bytes(text)
        assert progress_of(path) == Progress.of(read_events(path))
