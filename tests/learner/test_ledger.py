"""What became of every token adds up, however often the run was killed between two checkpoints."""

import errno
import itertools
import random
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest

from asyncgrpo.config.load import load_config
from asyncgrpo.errors import CheckpointError
from asyncgrpo.learner import record
from asyncgrpo.learner.record import DROPPED, KEPT, Ledger, Recorder
from asyncgrpo.recording import events
from asyncgrpo.recording.events import read_events
from asyncgrpo.recording.progress import Progress
from asyncgrpo.recording.samples import EVALS, TRAINED, path_of, paths_in
from asyncgrpo.recording.screen import summary
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.publication import Publication
from tests.test_metrics import value


class Tokens:
    """Of one buffer: what `Buffer.tokens` and `tokens_in_flight` say, with its sum always right."""

    def __init__(self, recovered: int = 0) -> None:
        self.waiting = recovered
        self.counts = {"tokens_recovered": recovered, "tokens_generated": 0}

    def generate(self, count: int) -> None:
        self.counts["tokens_generated"] += count
        self.waiting += count

    def settle(self, fate: str, count: int) -> None:
        count = min(count, self.waiting)
        self.waiting -= count
        self.counts[f"tokens_{fate}"] = self.counts.get(f"tokens_{fate}", 0) + count

    def counters(self) -> dict[str, float]:
        return {**self.counts, "tokens_in_flight": self.waiting, "prompts_done": 3}


def assert_balanced(tokens: dict[str, int]) -> None:
    assert tokens["generated"] == sum(count for fate, count in tokens.items() if fate != "generated"), tokens
    assert min(tokens.values()) >= 0, tokens


def test_any_history_of_crashes_adds_up():
    """A journal that is whole restores what waits and what was trained since the checkpoint, however new: all is counted."""
    rng = random.Random(0)
    for is_whole in (True, False) * 100:
        saved: dict[str, float] = {}
        seen: dict[str, int] = {}
        buffer, ledger, generated, trained = Tokens(), Ledger(), 0, 0
        for _ in range(rng.randint(1, 30)):
            match rng.choice(["generate", "settle", "settle", "checkpoint", "kill"]):
                case "generate":
                    buffer.generate(count := rng.randint(0, 50))
                    generated += count
                case "settle":
                    buffer.settle(fate := rng.choice((*KEPT, *DROPPED)), rng.randint(0, 50))
                    seen = seen if fate == "trained" else ledger.tokens(buffer.counters())
                case "checkpoint":
                    saved, trained = ledger.totals(buffer.counters()), buffer.counts.get("tokens_trained", 0)
                case "kill":
                    recovered = buffer.waiting + buffer.counts.get("tokens_trained", 0) - trained
                    recovered = recovered if is_whole else rng.randint(0, 100)
                    buffer, ledger, trained = Tokens(recovered), Ledger(saved, seen), 0
            tokens = ledger.tokens(buffer.counters())
            assert_balanced(tokens)
            assert tokens["generated"] == generated or not is_whole


@pytest.fixture
def recorder(tmp_path: Path):
    """Of the next start of one run."""
    config = load_config(None, ["model.path=m", "data.train=t"])
    return lambda: Recorder(config, tmp_path, lambda ids: "", {})


STEP = {"reward_mean": 0.5, "loss": 0.0, "lags": {"0": 1}, "tokens_trained": 10, "seconds": {}}


def write_step(recorder: Recorder, number: int, counters: dict[str, float]) -> None:
    recorder.events.write("step", **STEP, **recorder._count(counters), step=number, version=f"1.{number}")


def test_the_totals_of_a_killed_run_agree_with_each_other(recorder, tmp_path):
    first, buffer = recorder(), Tokens()
    buffer.generate(100)
    write_step(first, 1, buffer.counters())
    buffer.settle("trained", 60)
    buffer.settle("stale", 10)
    saved = first.last({**buffer.counters(), "groups_dropped_stale": 1})
    write_step(first, 2, {**buffer.counters(), "groups_dropped_stale": 1})
    buffer.generate(40)
    write_step(first, 3, {**buffer.counters(), "groups_dropped_stale": 1})

    start = {"run": "r", "sizes": "", "step": 1}
    second, buffer = recorder(), Tokens(recovered=70)
    second.resume(1, saved)
    second.start(**start, lineage=2, version="2.1", recovered={"ahead": 2, "ready": 5})
    buffer.settle("unusable", 20)
    write_step(second, 2, {**buffer.counters(), "groups_dropped_ahead": 2})

    third, buffer = recorder(), Tokens(recovered=50)
    third.resume(1, saved)
    third.start(**start, lineage=3, version="3.1", recovered={"ahead": 1, "ready": 4})
    buffer.settle("trained", 50)
    counters = {**buffer.counters(), "groups_dropped_ahead": 1}
    write_step(third, 2, counters)
    third.last(counters)
    third.end("done", 2)

    events = list(read_events(tmp_path / "metrics.jsonl"))
    progress = Progress.of(events)
    assert_balanced(progress.tokens)
    assert progress.undone_steps == 3
    assert progress.dropped == {"stale": 1, "ahead": 3}, "also what no step event before a crash told of"
    text = summary(Progress.of(events))
    assert "140 generated = 110 trained + 10 dropped (stale 10) + 20 undone by restarts" in text
    assert "4 groups: ahead 3, stale 1" in text and "3 steps after the last checkpoint before a crash" in text


def test_a_resume_removes_the_samples_of_undone_steps(recorder, tmp_path):
    """The newest samples are of a step that the run has."""
    first = recorder()
    for folder, step in itertools.product((TRAINED, EVALS), (0, 10, 11, 1000)):
        path_of(tmp_path / folder, step).parent.mkdir(parents=True, exist_ok=True)
        path_of(tmp_path / folder, step).touch()
    first.resume(10, {})
    assert [list(paths_in(tmp_path / folder)) for folder in (TRAINED, EVALS)] == [[0, 10]] * 2


def test_a_resume_reads_the_events_after_its_checkpoint_and_knows_what_all_of_them_say(recorder, tmp_path, monkeypatch):
    """What it needs of those before is in the checkpoint: a run of a month has 800 MB of them."""
    first, buffer, dropped = recorder(), Tokens(), 0
    saved: dict[str, float] = {}
    for number in range(1, 121):
        buffer.generate(100)
        buffer.settle("trained", 60)
        dropped += number % 3
        counters = {**buffer.counters(), "groups_dropped_stale": dropped}
        event = STEP | first._count(counters) | {"zero_signal_groups": 1 - number % 2, "entropy": 1.0 / number}
        first._warn_of(first.events.write("step", **event, step=number, version=f"1.{number}"))
        if number % 10 == 0:
            result = {"version": "1.1", "reward_mean": 1.0 / number, "completions": 4}
            first._warn_of(first.events.write("eval", step=number, **result))
        if number == 100:
            saved, state = first.last(counters), msgspec.json.decode(msgspec.json.encode(first.state()))
    first.last({**buffer.counters(), "groups_dropped_stale": dropped + 5})
    first.end("drained", 120)

    kept = (tmp_path / "metrics.jsonl").read_bytes()
    whole = recorder()
    whole.resume(100, saved)
    after_whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(kept)
    read = []
    monkeypatch.setattr(record, "read_events", lambda *place: (read.append(e) or e for e in read_events(*place)))
    second = recorder()
    second.resume(100, saved, state)
    assert 20 < len(read) < 40 and read[0]["step"] == 101
    assert (tmp_path / "metrics.jsonl").read_bytes() == after_whole
    assert second.undone == whole.undone == {"generated": 12_000, "undone_steps": 20}
    assert second._reported == whole._reported and second._watch == whole._watch
    assert second._watch.best == (10, 0.1) and len(second._watch.steps) == 20


def test_a_state_that_does_not_fit_the_events_is_not_believed(recorder, tmp_path):
    """A machine that lost power may have lost their end."""
    first = recorder()
    write_step(first, 1, Tokens().counters())
    write_step(first, 2, Tokens().counters())
    state = first.state()
    (tmp_path / "metrics.jsonl").write_bytes((tmp_path / "metrics.jsonl").read_bytes()[:-3])
    second = recorder()
    second.resume(2, {}, state)
    assert [event["step"] for event in read_events(tmp_path / "metrics.jsonl")] == [1]


def test_a_step_tells_the_figures_of_its_batch_and_a_checkpoint_keeps_none_of_them(recorder, tmp_path):
    first = recorder()
    now = {"now_max_lag": 4.0, "now_slots": 40.0, "now_wanted": 20.0, "now_under_way": 19.0, "now_ready_seconds": 1.5}
    now |= {"now_in_touch": 2.0, "now_places": 64.0, "now_in_flight": 12.25, "now_generate": 3.5, "now_reward": 0.5}
    counters = Tokens().counters() | now
    write_step(first, 1, counters)
    assert not [name for name in first.last(counters) if name.startswith("now_")]
    now = {"now_max_lag": 4.0, "now_slots": 40.0, "now_wanted": 40.0, "now_under_way": 40.0}
    write_step(first, 2, Tokens().counters() | now)
    one, two = read_events(tmp_path / "metrics.jsonl")
    assert (one["max_lag"], one["slots"], one["wanted"], one["under_way"], one["ready_seconds"]) == (4, 40, 20, 19, 1.5)
    assert one["generators"] == {"in_touch": 2.0, "places": 64.0, "in_flight": 12.25, "generate": 3.5, "reward": 0.5}
    assert "ready_seconds" not in two and "generators" not in two


@pytest.mark.parametrize(
    ("attempts", "dropped", "outcome"), [(1, (), "ok"), (2, (), "repeated"), (2, ("generator-1",), "degraded")]
)
def test_a_publication_is_counted_by_its_outcome_in_a_series_that_began_at_0(
    recorder, tmp_path, attempts, dropped, outcome
):
    before = value("weight_sync_total", outcome=outcome)
    fields = {"version": PolicyVersion(1, 3), "generators": ("generator-0",), "dropped": dropped, "attempts": attempts}
    recorder().sync(Publication(**fields, seconds=0.1, num_bytes=8, digest="d", sent_bytes=8))
    assert value("weight_sync_total", outcome=outcome) == before + 1
    progress = Progress.of(read_events(tmp_path / "metrics.jsonl"))
    assert progress.counts["restart"] == 0, "a generator that is left out was not restarted"
    assert list(progress.warnings) == ["v3 -> 1 engine, 100 ms, checksum ok, without generator-1"] * len(dropped)


def test_a_checkpoint_covers_no_event_that_the_disk_refused(recorder, monkeypatch):
    """The learner may die before the disk has room again, and the next start does not repeat the step."""

    def full(file: BinaryIO, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = recorder()
    write_step(first, 1, Tokens().counters())
    with monkeypatch.context() as patch:
        patch.setattr(events, "_append", full)
        write_step(first, 2, Tokens().counters())
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written"):
            first.state()
    assert first.state()["num_bytes"] == first.events.path.stat().st_size
    assert [event["step"] for event in read_events(first.events.path)] == [1, 2]
