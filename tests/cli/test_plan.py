"""`plan`, `tune` and `simulate`: what they print, and what they refuse in one sentence."""

import json

import pytest

from asyncgrpo.planner.profile import write_profile
from tests.planner.profiles import long_tail, profile


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
