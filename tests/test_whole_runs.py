"""Whole runs from the command line, with everything real: what a newcomer types, and what ends a run."""

import signal
import tempfile
import time
from pathlib import Path

import pytest

from asyncgrpo import scratch
from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.recording.events import read_events
from tests.models import make_tiny_qwen3_moe
from tests.runs import assert_nothing_left, asyncgrpo, audited, events, left_behind, replay, start, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHORT = ["--engine", "torch", "--max-lag", "1"]


def assert_steps_are_gapless(run: Path, last: int) -> None:
    steps = [event["step"] for event in read_events(run / "metrics.jsonl") if event["event"] == "step"]
    assert steps == list(range(1, last + 1))


@pytest.mark.parametrize(("engine", "signals"), [("torch", [signal.SIGINT] * 2), ("sglang", [signal.SIGKILL])])
def test_a_run_that_is_cut_off_leaves_no_process_shared_memory_or_folder_behind(
    tmp_path: Path, monkeypatch, engine, signals
):
    """SGLang's processes and the learner's weights have both, and nothing else starts afterwards.

    At `max_lag: 0` the weights that sampled a token are those that train on it: engine and learner agree on every one.
    """
    run = tmp_path / "run"
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # a path that is short enough for Ray's sockets
        monkeypatch.setenv("TMPDIR", temporary)
        process = start("demo", "--engine", engine, "--max-lag", "0", "--steps", "500", "--out", "run", cwd=tmp_path)
        wait_until(lambda: len(events(run, "step")) >= 3, "third step", 200.0)
        (root,) = Path(temporary).glob("asyncgrpo-*")
        marks = [folder.name for folder in root.iterdir() if folder.is_dir()]
        assert len(marks) > (2 if engine == "sglang" else 1) and memory_of(marks)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)
        process.wait(timeout=60)
        wait_until(lambda: not left_behind(tmp_path), lambda: f"end of {left_behind(tmp_path)}", 20.0)
        wait_until(lambda: [path.name for path in root.iterdir()] == [".lock"], lambda: f"removal of {marks}", 10.0)
        assert not memory_of(marks)
    for step in events(run, "step"):
        assert step["lags"] == {"0": 48}
        assert step["logprob_gap_max"] < 1e-4  # nats: float32 rounding of two implementations
    assert all(event["engines"] == 2 and event["checksum"] == "ok" for event in events(run, "sync"))


def memory_of(marks: list[str]) -> list[Path]:
    return [path for path in scratch.SHARED_MEMORY.iterdir() if any(mark in path.name for mark in marks)]


def test_ctrl_c_drains_and_two_ranks_are_replayed_in_the_same_order(tmp_path: Path):
    arguments = ["demo", *SHORT, "--out", "run", "--steps", "500", "run.eval_every=100", "learner.ranks=2"]
    run = tmp_path / "run"
    process = start(*arguments, cwd=tmp_path)
    wait_until(lambda: len(events(run, "step")) >= 3, "third step", 200.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=90) == 0, (tmp_path / "output.txt").read_text()
    assert events(run, "checkpoint")[-1]["step"] == events(run, "step")[-1]["step"]
    assert events(run, "end")[-1]["status"] == "drained"
    assert_steps_are_gapless(run, events(run, "step")[-1]["step"])
    assert max(int(lag) for event in events(run, "step") for lag in event["lags"]) <= 1
    assert_nothing_left(tmp_path)
    code, found = replay(tmp_path, "--to-step", "3")
    assert code == 0 and found["equal"] and len(found["steps"]) == 3
    assert found["weights"]["equal"] == ["1.0", "1.3"]


def test_a_mixture_trains_on_divided_ranks_with_replayed_choices_and_resumes_on_fewer(tmp_path: Path):
    """Four ranks share rows and experts, then two share experts: SGLang's experts and kept tokens reach the learner."""
    make_demo_model(tmp_path / "mixture", seed=0)  # its tokenizer
    make_tiny_qwen3_moe(tmp_path / "mixture", vocab=261, experts=8)
    demo = ["demo", "--engine", "sglang", "--out", "run", "generators.count=1", "run.eval_every=9"]
    demo += ["model.path=mixture", "model.routing_replay=rollout", "sampling.top_p=0.9", "buffer.prompts_per_step=8"]
    for steps, ranks, context in ((2, 4, 2), (4, 2, 1)):
        sizes = [f"learner.ranks={ranks}", "learner.parallel.expert=2", f"learner.parallel.context={context}"]
        ended = asyncgrpo(*demo, "--steps", str(steps), *sizes, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
    run = tmp_path / "run"
    assert_steps_are_gapless(run, 4)
    for step in events(run, "step"):
        assert step["diagnostics"]["expert_load"] >= 1
        assert step["logprob_gap_max"] is None or step["logprob_gap_max"] < 1e-4
    assert any(step["logprob_gap_max"] is not None for step in events(run, "step"))
    audited(run)
