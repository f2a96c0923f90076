"""What a person sees of a run: the live page, one line a step, the summary, the curves."""

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from asyncgrpo.recording import curves
from asyncgrpo.recording.curves import plot
from asyncgrpo.recording.events import Event, EventLog
from asyncgrpo.recording.progress import Progress
from asyncgrpo.recording.screen import curve_of, line_of, render, summary, watch


def step(n: int, **more) -> Event:
    return {
        "event": "step", "time": 1000.0 + 2 * n, "step": n, "version": f"1.{n}", "reward_mean": n / 20, "loss": -0.0125,
        "lags": {"0": 2, "2": 6}, "completions": 64, "tokens_trained": 100, "tokens_generated": 120 * n,
        "tokens": {"generated": 120 * n, "trained": 100 * n - 100, "stale": 5, "failed": 2, "waiting": 20 * n + 93},
        "tokens_dropped": 7, "logprob_gap_max": n * 1e-6, "completion_length_mean": 9.5, "failures": {}, "dropped": {},
        "seconds": {"wait_data": 0.5, "forward_backward": 1.0, "optimizer": 0.4, "publish": 0.1}, **more,
    }  # fmt: skip


def sync(n: int, **more) -> Event:
    at = {"event": "sync", "time": 1000.0 + 2 * n}
    return at | {"version": f"1.{n}", "engines": 2, "ms": 12.3, "checksum": "ok"} | more


def of(kind: str, **fields) -> Event:
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


def watched(path: Path, width: int = 80, *, is_terminal: bool = False, **how) -> tuple[str, Progress]:
    console = Console(file=io.StringIO(), width=width, height=30, force_terminal=is_terminal)
    progress = watch(path, console=console, **how)
    return console.file.getvalue(), progress


def stopped() -> threading.Event:
    stop = threading.Event()
    stop.set()
    return stop


def test_the_page_shows_the_reward_the_lag_the_time_and_the_syncs():
    text = page([*RUN[:35], EVAL])
    assert "demo" in text and "step 17/20" in text and "85%" in text
    assert "0.850, eval 0.450 @ 10" in text
    assert "v17 -> 2 engines, 12 ms, checksum ok" in text
    assert "waiting for data 25%, training 70%, publishing 5%" in text
    assert "1.8k steps/h, 60 tok/s generated, 50 trained" in text
    assert "curve       0.050 ▁" in text and "█ 0.850" in text and curve_of([3.0]) == "3.000 ▁ 3.000"
    assert "0:02:05" in page(RUN[:5], now=1125.0), "the clock runs between events"
    assert "0:00:41" in page(RUN, now=5000.0) and "done" in page(RUN)
    assert "12 ms, 2.5 of 100 MB sent" in page([START, sync(1, bytes=50_000_000, sent_bytes=2_500_000)])
    assert "sent" not in page([START, sync(1, bytes=50_000_000, sent_bytes=100_000_000)])
    several = {"aiw": {"reward_mean": 0.51}, "gsm8k": {"reward_mean": None}}
    text = page([step(1, reward_parts={"format": 0.92, "[red]\x1b": 1.0}, sources=several)], width=120)
    assert "format 0.920, [red]\\x1b 1.000" in text and "aiw 0.510, gsm8k -" in text
    assert "aiw" not in page([step(1, sources={"aiw": {"reward_mean": 0.51}})], width=120)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_page_fits_a_small_terminal(width):
    trouble = [of("restart", time=1041.0, actor=f"generator-{i}", reason="killed " * 20) for i in range(9)]
    lines = page([*RUN[:-1], *trouble, step(21, lags={str(lag): 1 for lag in range(12)})], width).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= width


def test_the_page_says_that_rewards_are_paused_and_when_they_are_tried_again():
    failed = of("reward_failed", failure="exception my_reward.py:12: OSError", detail="no", count=10)
    paused = of("rewards_paused", time=100.0, reason="OSError: no", probe_in_s=2.0)
    again = paused | {"time": 103.0, "probe_in_s": 8.0}
    resumed = of("rewards_resumed", time=111.0, seconds=11.0)
    assert "generator-0 (exception my_reward.py:12: OSError), 10 so far" in page([START, failed], 120)
    line = "paused at generator-0 for 5 s, probing again in 6 s: OSError: no"
    assert line in page([START, step(1), sync(1), sync(2), sync(3), paused, again], now=105.0)
    text = page([START, paused, again, resumed], now=112.0)
    assert "rewards work again at generator-0, after 11 s" in text
    assert Progress.of([START, paused, again, resumed]).paused == {}
    for bottleneck, is_shown in (("health", False), ("reward", True)):
        advice = of("advice", bottleneck=bottleneck, sentence="every call fails", evidence="")
        assert (Progress.of([START, paused, advice, resumed]).advice is not None) == is_shown
    assert Progress.of([START, paused, of("restart", actor="buffer", reason="signal 9")]).paused == {}
    assert Progress.of([START, paused, of("restart", actor="generator-1", reason="signal 9")]).paused != {}
    text = page([START, of("lease_failed", reason="failed", detail="too long", count=10)])
    assert "group failed at generator-0 (failed), 10 so far: too long" in text


def test_the_page_and_the_log_say_how_often_prompts_come():
    prompts = {"unknown": 0, "hopeless": 40, "mixed": 340, "solved": 120}
    places = {"unknown": 0, "hopeless": 40, "mixed": 400, "solved": 60}
    curriculum = {"event": "curriculum", "time": 1.0, "round": 2, "source": "", "prompts": prompts, "places": places}
    line = "epoch 2: 500 places; prompts: 120 solved with 60, 340 mixed with 400, 40 hopeless with 40"
    assert line in page([curriculum, step(1)], width=140)
    assert line_of(curriculum, Progress.of([curriculum])) == line
    unknown = curriculum | {"prompts": {"unknown": 500, "hopeless": 0, "mixed": 0, "solved": 0}}
    assert line_of(unknown, Progress.of([unknown])) is None, "nothing is known of any yet"


def test_the_kl_is_in_the_line_of_a_step_on_the_page_and_in_the_summary():
    for events, said in (([step(1, kl_reference=2.0), step(2, kl_reference=0.25)], True), ([step(1)], False)):
        progress = Progress.of([START, *events, END])
        assert ("  kl 0.250  tok/s" in line_of(events[-1], progress)) == said
        assert (", kl 0.250, length" in page([START, *events])) == said
        assert ("kl            2.000 -> 0.250 nats per token" in summary(progress)) == said
        assert said or "kl " not in line_of(events[-1], progress) + page([START, *events]) + summary(progress)


def test_lines_of_an_evaluation_without_scores_and_of_a_publication_that_missed_a_generator_say_so():
    event = EVAL | {"reward_mean": None, "failures": {"timeout": 30, "crash": 2}}
    assert line_of(event, Progress.of([event])) == "eval  10  reward -  completions 32  failures: crash 2, timeout 30"
    degraded = sync(2, engines=1, left_out=["generator-1"])
    progress = Progress.of([START, sync(1), degraded])
    assert list(progress.warnings) == ["v2 -> 1 engine, 12 ms, checksum ok, without generator-1"]
    assert line_of(degraded, progress) == f"warning: {progress.warnings[-1]}"
    assert line_of(sync(1), progress) is None


def test_large_numbers_are_printed_shortly(tmp_path):
    events = [START, step(1, reward_mean=-2.5e300, loss=1e12), EVAL | {"reward_mean": 1e308}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    lines, _ = watched(tmp_path / "metrics.jsonl", 200, stop=stopped())
    for text in (page(events), summary(Progress.of(events)), lines):
        assert "-2.5e+300" in text and "1e+308" in text
        assert "00000" not in text


def test_the_page_warns_of_restarts_reward_failures_stalls_and_bad_syncs():
    stall = of("stall", what="batch", seconds=61.2)
    text = page([START, of("restart", reason="signal 9"), stall, sync(3, left_out=["generator-1"])])
    assert "restarted generator-0: signal 9" in text and "waiting for batch for 61 s" in text
    assert "v3 -> 2 engines, 12 ms, checksum ok, without generator-1" in text
    assert "step 1: reward failures: crash 1, timeout 2" in page([START, step(1, failures={"timeout": 2, "crash": 1})])


def test_progress_counts_prompts_where_steps_have_no_end_and_goes_back_with_the_file():
    progress = Progress.of([{**START, "steps": None, "prompts": 200}, step(1, prompts_done=50)])
    assert progress.share_done == 0.25
    assert Progress.of([{**START, "steps": None}, step(1)]).share_done is None
    rewound = Progress.of([*RUN, {"event": "rewound"}, START, step(1)])
    assert (rewound.step, len(rewound.steps)) == (1, 1)
    resumed = [START, step(1), sync(1), {**START, "lineage": 2, "step": 1}, step(2)]
    assert not Progress.of(resumed).syncs and Progress.of(resumed).counts["sync"] == 1, "the sync of an earlier start"
    resumed = [START, step(1), step(2), {**START, "time": 9000.0}, step(3, time=9002.0), step(4, time=9004.0)]
    assert Progress.of(resumed).training_seconds == pytest.approx(8), "without the time between stop and resume"
    start, first = {**START, "generated": 10_000}, step(3, time=9002.0, tokens_generated=10_400, tokens_trained=200)
    assert Progress.of([*resumed[:3], start, first]).tokens_per_second() == (200, 100), "of this start alone"
    second = step(4, time=9004.0, tokens_generated=11_000, tokens_trained=200)
    assert Progress.of([*resumed[:3], start, first, second]).tokens_per_second() == (300, 100)
    assert "1.8k steps/h, 60 tok/s generated, 50 trained; so far 480 and 400 tokens" in page(resumed, 120)
    assert "so far 480 and 400 tokens" in page(resumed[-1:], 120), "of a long file only the end is read"
    assert "0.25 steps/h" in page([step(1), step(2, seconds={"train": 14400.0})], 120)


def test_a_file_gets_one_tidy_line_a_step(tmp_path):
    log = EventLog(tmp_path / "metrics.jsonl", clock=iter([1000.0, 1002.0, 1002.0, 1004.0, 1004.5, 1005.0]).__next__)
    for event in (START, sync(1), step(1), step(2), {**EVAL, "step": 2}, {**END, "step": 2}):
        fields = {key: value for key, value in event.items() if key not in ("event", "time")}
        log.write(event["event"], **fields)
    text, progress = watched(tmp_path / "metrics.jsonl", 60, poll_s=0.01)
    assert text.splitlines() == [
        "start demo at step 0",
        "step   1/20  reward 0.050  lag 1.5 (max 2)  loss -0.0125  tok/s 60 gen 50 train  wait 25%  sync v1 12 ms ok",
        "step   2/20  reward 0.100  lag 1.5 (max 2)  loss -0.0125  tok/s 60 gen 50 train  wait 25%  sync v1 12 ms ok",
        "eval   2  reward 0.450  completions 32",
        "end   done at step 2",
    ]
    assert progress.step == 2


def test_the_cursor_stays_in_sight_as_a_killed_run_could_not_bring_it_back(tmp_path):
    console = Console(file=io.StringIO(), width=80, height=30, force_terminal=True)

    class Stop(threading.Event):
        def wait(self, timeout=None):
            shown.append(console.file.getvalue())
            self.set()
            return True

    shown: list[str] = []
    watch(tmp_path / "metrics.jsonl", console=console, stop=Stop())
    assert shown and all(text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") for text in shown)


def test_a_reason_from_outside_moves_no_cursor(tmp_path):
    log = EventLog(tmp_path / "metrics.jsonl")
    log.write("restart", actor="generator-0", reason="said \x1b[2Jgone", count=1)
    log.write("end", status="failed", step=0, reason="\x1b[2J")
    for is_terminal in (True, False):
        text, _ = watched(tmp_path / "metrics.jsonl", is_terminal=is_terminal)
        assert "\x1b[2J" not in text and "said" in text


def test_a_resumed_run_neither_ends_with_its_old_end_nor_shows_its_past_again(tmp_path):
    path, now = tmp_path / "metrics.jsonl", [1000.0]
    log = EventLog(path, clock=lambda: now[0])
    log.write("restart", actor="buffer", reason="signal 9")
    log.write("end", status="drained", step=1)
    now[0] = 2000.0
    log.write("stall", what="groups", seconds=31.0)
    log.write("end", status="done", step=2)
    text, progress = watched(path, since=1500.0, poll_s=0.01)
    assert text.splitlines()[-1] == "end   done at step 2" and "drained" not in text and "signal 9" not in text
    assert list(progress.warnings) == ["waiting for groups for 31 s"]
    assert progress.counts["restart"] == 1, "it is still counted"
    text, progress = watched(path, since=2500.0, stop=stopped())
    assert text == "" and progress.end["time"] == 2000.0


def test_a_clock_that_is_set_back_hides_no_line(tmp_path):
    path, now = tmp_path / "metrics.jsonl", [2000.0]
    log = EventLog(path, clock=lambda: now[0])
    log.write("restart", actor="buffer", reason="signal 9")

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] = 1000.0
            log.write("stall", what="groups", seconds=31.0)
            self.set()
            return False

    text, progress = watched(path, since=2500.0, stop=Stop())
    assert text.splitlines() == ["warning: waiting for groups for 31 s"]
    assert list(progress.warnings) == ["waiting for groups for 31 s"]


def test_lines_are_not_told_again_when_a_resume_replaces_the_file(tmp_path):
    path, now = tmp_path / "metrics.jsonl", [1000.0]
    log = EventLog(path, clock=lambda: now[0])

    def write_step(n: int) -> None:
        now[0] += 1
        log.write("step", **{key: value for key, value in step(n).items() if key not in ("event", "time")})

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            log.resume_at(1)
            write_step(2)
            now[0] += 1
            log.write("end", status="done", step=2)
            return False

    write_step(1)
    write_step(2)
    text, _ = watched(path, 200, stop=Stop())
    said = [line.split("  reward")[0].split(" at")[0] for line in text.splitlines()]
    assert said == ["step   1", "step   2", "step   2", "end   done"]


def test_the_summary_says_what_the_run_did():
    checkpoint = {"event": "checkpoint", "time": 1040.0, "step": 20, "path": "runs/demo/checkpoints/20", "seconds": 1.0}
    text = summary(Progress.of([*RUN[:-1], checkpoint, END]))
    rows = {line[:14].strip(): line[14:] for line in reversed(text.splitlines())}
    assert rows["run"] == "demo: done at step 20 of 20, 40.0 s of training"
    assert rows["reward"] == "0.150 -> 0.900 (means of 5 first and last steps)"
    assert rows["eval"] == "0.450"
    assert rows["tokens"] == "2,400 generated = 1,900 trained + 7 dropped (failed 2, stale 5) + 493 waiting"
    assert rows["lag"] == "mean 1.50, p50 2, p90 2, max 2 steps"
    assert rows["weight syncs"] == "20, each proved by checksum"
    assert rows["log-prob gap"] == "max 2e-05 nats between learner and engine"
    assert rows["learner"] == "waiting for data 25%, training 70%, publishing 5%"
    assert rows["checkpoint"] == "runs/demo/checkpoints/20 (step 20)"
    cut = Progress.of([START, step(1), step(2), END | {"status": "drained", "step": 1}])
    assert "demo: drained at step 1 of 20" in summary(cut), "the learner died after its last checkpoint"


def test_the_summary_has_the_evaluations_of_the_first_and_the_latest_step_in_whichever_order_they_ended():
    first, middle, latest = (EVAL | {"step": n, "reward_mean": n / 100} for n in (0, 10, 20))
    for ended in ([first, latest, middle], [middle, first, latest]):
        text = summary(Progress.of([START, *ended[:2], step(1), ended[2], END]))
        assert "eval          0.000 -> 0.200" in text.splitlines()


def flow(n: int, **more) -> Event:
    """A step at which `fresh` keeps eleven groups under way, and four generators have places for 32."""
    at = {"max_lag": 4, "slots": 40, "wanted": 12, "under_way": 11, "ready_seconds": 0.3 * n}
    at |= {"lags": {"0": 5, "3": 4, "4": 1}, "generators": generators(8), "seconds": {"wait_data": 0.1, "train": 1.9}}
    return step(n) | at | more


def generators(in_flight: float) -> dict[str, float]:
    return {"in_touch": 4.0, "places": 32.0, "in_flight": in_flight}


def test_the_page_and_the_summary_tell_the_lag_the_groups_under_way_and_what_generators_do():
    busy = generators(30) | {"generate": 1.5, "reward": 0.25, "weights": 0.05, "idle": 0.2}
    later = [flow(n, max_lag=8 - n, generators=busy) for n in range(2, 4)]  # `auto` lowers the bound
    events = [START, flow(1), *later]
    for line in (
        "lag           mean 1.60, p50 0, p90 3, max 4 of 6 steps",
        "under way     mean 11.0 groups of 12.0 wanted; a group waits ready 0.60 s",
        "generators    sampling 75%, only scoring 12%, changing weights 2%, idle 10%",
    ):
        assert line in summary(Progress.of(events)) and line[14:] in page(events, width=100)
    assert "mean 11.0 groups of 40.0 slots; a group" in page([START, flow(1, wanted=None)])
    older = page([START, step(1)]) + summary(Progress.of([START, step(1)]))
    assert "under way" not in older and "sampling" not in older


ADVICE = {
    "event": "advice", "time": 1030.0, "bottleneck": "generators", "sentence": "1 of 4 generators would do",
    "evidence": "the learner waits 5 %", "gain": 0.0, "command": "scale generators 1", "generators": 1, "also": (),
}  # fmt: skip


def command(name: str, **more) -> Event:
    return {"event": "command", "time": 1035.0, "command": name, "by": "person", "reply": "", "refused": False, **more}


def test_the_advice_is_on_the_page_in_the_log_and_in_the_summary_unless_something_is_more_urgent():
    events = [START, *(flow(n) for n in range(1, 4)), ADVICE]
    assert "advice      1 of 4 generators would do" in page(events)
    assert "advice        1 of 4 generators would do (the learner waits 5 %)" in summary(Progress.of(events))
    assert line_of(ADVICE, Progress.of(events)) == "advice  1 of 4 generators would do"
    for urgent in (of("rewards_paused", reason="no", probe_in_s=2.0), command("pause"), START | {"lineage": 2}):
        assert "would do" not in page([*events, urgent])
    assert "3/20  paused" in page([*events, command("pause")])
    assert "3/20  training" in page([*events, command("pause"), command("resume")])
    assert "training" in page([*events, command("pause", refused=True)])


def test_the_summary_counts_what_was_filtered_to_the_end_of_the_run_bad_syncs_and_restarts():
    first = step(1, filtered={"all_equal_low": 3}, tokens={"generated": 1600, "trained": 100, "filtered": 1500})
    end = END | {"filtered": {"all_equal_high": 1}}
    events = [START, first, sync(1), sync(2), of("restart", reason="signal 9"), end]
    text = summary(Progress.of(events))
    assert "4 groups without signal: all_equal_high 1, all_equal_low 3" in text and "1,500 filtered" in text
    assert "2, each proved by checksum" in text and "restarts      1" in text
    assert "1 group without signal" in summary(Progress.of([START, end])), "also when no step could be made"


def test_curves_are_drawn_whatever_there_is(tmp_path):
    for events in ([], [START, step(1, lags={}, reward_mean=None)], RUN):
        path = plot(events, tmp_path / "curves.png")
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert [p.name for p in Path(tmp_path).iterdir()] == ["curves.png"]


def test_the_curves_of_a_run_of_months_are_drawn_from_every_few_steps(monkeypatch):
    monkeypatch.setattr(curves, "MOST_ROWS", 10)
    for count in (10, 11, 45, 400):
        drawn = [row["step"] for row in curves._rows(month_of(count))["step"]]
        gap = drawn[1] - drawn[0]
        assert drawn == list(range(1, count + 1, gap)) and (len(drawn) > 5 or gap == 1) and len(drawn) <= 10


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


def test_a_run_of_months_takes_no_more_room_than_one_of_days():
    short, long = (Progress.of(month_of(steps)) for steps in (11_000, 16_000))
    assert long.step == 16_000 and len(long.steps) == 11
    sizes = [len(msgspec.json.encode(vars(progress), enc_hook=list)) for progress in (short, long)]
    assert sizes[1] < 1.1 * sizes[0]
    render(long)


def test_sums_and_ends_of_a_long_run_are_exact():
    events = list(month_of(5_000))
    steps = [event for event in events if event["event"] == "step"]
    progress = Progress.of(events)
    assert progress.tokens_trained == sum(event["tokens_trained"] for event in steps)
    assert progress.dropped == {"stale": 5_000} and progress.totals.lags.total() == 8 * len(steps)
    assert progress.first_rewards == [n / 20 for n in range(1, 6)]
    assert progress.last_rewards == [n / 20 for n in range(4_996, 5_001)]
    assert progress.totals.mean("under_way") == 9
    assert progress.totals.generators == {"generate": 15_000.0, "idle": 5_000.0}
    assert (progress.counts["fault"], progress.counts["recovered"], progress.slowest_recovery_s) == (100, 100, 2.0)
