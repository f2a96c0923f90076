"""`plan` and `tune`: their output, and bad input in one sentence."""

import json
from pathlib import Path

import pytest

from asyncgrpo.planner.plan import pace_of_run, write_profile
from asyncgrpo.recording.advice import advise
from asyncgrpo.recording.events import read_events
from tests.planner.profiles import long_tail, profile
from tests.planner.test_tune import CONFIG
from tests.recording.test_advice import run


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_profile(profile(lengths=long_tail()), tmp_path / "profile.json")


def test_a_plan_names_the_settings_to_use(measured, asyncgrpo):
    result = asyncgrpo("plan", "--gpus", "4")
    assert result.code == 0
    assert "use: generators.count=" in result.out and "buffer.max_lag=" in result.out
    assert sum(":" in line.split()[0] for line in result.out.splitlines() if line) >= 3, "a row for each split"
    made = json.loads(asyncgrpo("plan", "--gpus", "4", "--max-lag", "3", "--json").out)
    assert [one["split"]["max_lag"] for one in made["options"]] == [3, 3, 3]
    assert made["options"][0]["step_s"] == min(one["step_s"] for one in made["options"])


@pytest.mark.parametrize("setting", ["name=game.py", "tools=[calculator]", "agent=agent.py"])
def test_a_plan_says_that_it_knows_no_environment(measured, asyncgrpo, setting):
    for made, is_said in ((profile(), False), (profile(f"environment.{setting}"), True)):
        write_profile(made, Path("profile.json"))
        assert ("note: no time of the environment or agent" in asyncgrpo("plan", "--gpus", "4").out) == is_said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--profile", "gone.json"], "gone.json cannot be read (No such file or directory)"),
        (["plan", "--from", "gone"], "gone is not a run folder"),
        (["plan", "--profile", "mine.json", "--from", "gone"], "--profile and --from exclude each other"),
        (["plan", "--gpus", "1"], "--gpus"),
        (["tune", "nothing.yaml"], "nothing.yaml"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(measured, asyncgrpo, arguments, message):
    result = asyncgrpo(*arguments)
    assert result.code != 0
    assert message in result.err and "Traceback" not in result.err


def paced(folder: Path) -> Path:
    """A run whose learner waits for half of each step, on a cluster of eight GPUs."""
    started, *steps = run(15, wait=0.5, full=1.0, there=3)
    begin = {"run": "run", "lineage": 1, "version": "1.0", "step": 0, "sizes": "", "gpus": 8}
    whole = {"version": "1.1", "reward_mean": 0.5, "loss": 0.0}
    events = [started | begin, *(step | whole | {"tokens": {"generated": 80 * step["step"]}} for step in steps)]
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_a_plan_of_a_run_is_its_advice(tmp_path, asyncgrpo):
    run_dir = paced(tmp_path)
    _, config, gpus, advice = pace_of_run(run_dir)
    assert gpus == 8
    events = list(read_events(run_dir / "metrics.jsonl"))
    assert advice == advise(events, config, gpus=8)
    assert advice[0].command == "scale generators 4"
    plan = json.loads(asyncgrpo("plan", "--from", str(run_dir), "--json").out)
    assert plan["limit"] == advice[0].bottleneck == "generators"
    gains = {(one["generators"], one["ranks"]): one["gain"] for one in plan["options"]}
    assert gains[4, 2] == pytest.approx(advice[0].gain) and gains[3, 2] == 0
    assert [one["sentence"] for one in plan["advice"]] == [one.sentence for one in advice]
    text = asyncgrpo("plan", "--from", str(run_dir)).out
    assert f"advice: {advice[0].sentence}" in text and "GPU" not in text
    refused = asyncgrpo("plan", "--from", str(run_dir), "--gpus", "4")
    assert refused.code == 1 and "uses no GPU" in refused.err
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:5]))
    refused = asyncgrpo("plan", "--from", str(run_dir))
    assert refused.code == 1 and "fewer than 8 steps" in refused.err
