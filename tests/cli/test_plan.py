"""`plan`, `tune` and `simulate`: what they print, and what they refuse in one sentence."""

import json
from pathlib import Path

import pytest

from asyncgrpo.planner.from_run import pace_of_run
from asyncgrpo.planner.profile import write_profile
from asyncgrpo.recording.advice import advise
from asyncgrpo.recording.events import read_events
from tests.planner.profiles import long_tail, profile
from tests.planner.test_from_run import CONFIG, run, step
from tests.recording.test_advice import step as paced_step


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_profile(profile(lengths=long_tail()), tmp_path / "profile.json")


def test_a_plan_names_the_settings_to_use(measured, asyncgrpo):
    result = asyncgrpo("plan", "--gpus", "4", "--simulate", "1")
    assert result.code == 0
    assert "use: generators.count=" in result.out and "buffer.max_lag=" in result.out
    assert "valid for a mean length of" in result.out
    assert sum(":" in line.split()[0] for line in result.out.splitlines() if line) >= 3, "a row for each split"


def test_a_plan_as_json_has_every_split_and_the_what_if(measured, asyncgrpo):
    result = asyncgrpo(
        "plan", "--gpus", "4", "--simulate", "0", "--what-if", "length=2x", "--what-if", "gpus=5", "--json"
    )
    plan = json.loads(result.out)
    assert len(plan["options"]) == 3 and len(plan["what_if"]["options"]) == 4
    assert plan["what_if"]["options"][0]["step_s"] > plan["options"][0]["step_s"]


def test_what_if_says_the_difference(measured, asyncgrpo):
    result = asyncgrpo("plan", "--gpus", "4", "--simulate", "0", "--what-if", "decode=2x")
    assert "what if decode=2x" in result.out and "a step takes" in result.out.splitlines()[-1]


def test_simulate_has_a_row_for_each_schedule(measured, asyncgrpo):
    result = asyncgrpo("simulate", "--gpus", "3", "--policy", "synchronous", "--policy", "one-step-off", "--json")
    rows = json.loads(result.out)
    assert [row["policy"] for row in rows] == ["synchronous", "one-step-off"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--profile", "gone.json"], "gone.json cannot be read"),
        (["plan", "--from", "gone"], "gone is no run folder"),
        (["plan", "--preset", "9b"], "--preset 9b: there is no such profile"),
        (["plan", "--preset", "7b-long-tail", "--from", "gone"], "--from and --preset name two profiles"),
        (["plan", "--what-if", "speed=2x"], "--what-if speed=2x: expected KEY=VALUE"),
        (["simulate", "--policy", "magic"], "--policy magic: there is no such schedule"),
        (["tune", "nothing.yaml"], "nothing.yaml"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(measured, asyncgrpo, arguments, said):
    result = asyncgrpo(*arguments)
    assert result.code == 1
    assert said in result.err and "Traceback" not in result.err


def test_without_a_profile_the_way_to_one_is_said(tmp_path, monkeypatch, asyncgrpo):
    monkeypatch.chdir(tmp_path)
    assert "asyncgrpo tune CONFIG" in asyncgrpo("plan").err


def paced(folder: Path, **how: object) -> Path:
    """A run whose learner waits for half of each step, on a cluster of eight GPUs."""
    started = {
        "event": "start",
        "time": 0.0,
        "run": "r",
        "lineage": 1,
        "version": "1.0",
        "step": 0,
        "sizes": "",
        "gpus": 8,
    }
    steps = [
        paced_step(number, wait=0.5, full=1.0, there=3, tokens={"generated": 80 * number}, **how)
        for number in range(1, 16)
    ]
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [started, *steps]))
    return folder


def test_a_plan_of_a_run_is_its_advice(tmp_path, asyncgrpo):
    """They had two models and two windows, and named two sides as the limit."""
    run_dir = paced(tmp_path)
    found = pace_of_run(run_dir)
    assert found.gpus == 8
    events = list(read_events(run_dir / "metrics.jsonl"))
    assert found.advice == advise(events, found.config, gpus=8)
    assert found.advice[0].command == "scale generators 4"
    plan = json.loads(asyncgrpo("plan", "--from", str(run_dir), "--json").out)
    assert plan["limit"] == found.advice[0].bottleneck == "generators"
    gains = {(one["generators"], one["ranks"]): one["gain"] for one in plan["options"]}
    assert gains[4, 2] == pytest.approx(found.advice[0].gain) and gains[3, 2] == 0
    assert [one["sentence"] for one in plan["advice"]] == [one.sentence for one in found.advice]
    text = asyncgrpo("plan", "--from", str(run_dir)).out
    assert f"advice: {found.advice[0].sentence}" in text and "GPU" not in text


def test_what_would_be_starts_from_the_measured_steps(tmp_path, asyncgrpo):
    (tmp_path / "run").mkdir()
    run_dir = run(tmp_path / "run", [step(number) for number in range(1, 16)])
    paced(run_dir)
    plan = json.loads(asyncgrpo("plan", "--from", str(run_dir), "--what-if", "length=2x", "--json").out)
    before = {(one["generators"], one["ranks"]): one["step_s"] for one in plan["options"]}
    after = {(one["generators"], one["ranks"]): one["step_s"] for one in plan["what_if"]["options"]}
    assert before.keys() == after.keys() and all(1.2 < after[split] / before[split] < 2.5 for split in before)


def test_a_run_without_gpus_has_none_to_share(tmp_path, asyncgrpo):
    for arguments in (["--gpus", "4"], ["--what-if", "gpus=4"]):
        refused = asyncgrpo("plan", "--from", str(paced(tmp_path)), *arguments)
        assert refused.code == 1 and "uses no GPU" in refused.err
