"""A run's folder says what a profile needs, or which part of it is missing."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncgrpo.errors import ConfigError
from asyncgrpo.planner.from_run import profile_of_run

CONFIG = """
model: {path: nowhere/model}
data: {train: nowhere/train.jsonl}
buffer: {prompts_per_step: 2, max_lag: 3}
algorithm: {group_size: 2}
generators: {engine: fake, count: 3, gpus_each: 0, groups_in_flight: 5}
learner: {ranks: 2, device: cpu}
reward: {workers: 4}
"""
LENGTHS = [(10, 30), (20, 20)]
"""Tokens of the two groups of every step: mean 20, the longest of a group 25."""


def step(number: int, *, tokens: int = 80) -> dict:
    """Ten seconds, of which 1 is publication; three engines sample for eight, six groups in flight in all."""
    return {
        "event": "step", "time": 10.0 * number, "step": number, "version": f"1.{number}", "reward_mean": 0.0, "loss": 0.0,
        "lags": {"1": 2}, "tokens_trained": tokens, "tokens": {"generated": 80 * number}, "completions": 4,
        "filtered": {"all_equal_low": 1} if number % 2 else {},
        "generators": {
            "in_touch": 3.0, "places": 15.0, "in_flight": 6.0, "generate": 24.0, "reward": 3.0, "weights": 1.5, "idle": 1.5,
            "sampling": 102.0, "scoring": 2.0,
        },
        "seconds": {"wait_data": 5.0, "forward_backward": 3.0, "optimizer": 0.5, "publish": 1.0, "other": 0.5, "checkpoint": 9.0},
    }  # fmt: skip


def run(folder: Path, steps: list[dict], *, samples: bool = True) -> Path:
    (folder / "samples").mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    started = {"event": "start", "time": 0.0, "run": "r", "lineage": 1, "version": "1.0", "step": 0, "sizes": ""}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [step(99), started, *steps]))
    for one in steps if samples else ():
        rows = [
            {"group_id": f"{one['step']}.{group}", "num_tokens": tokens, "prompt": f"prompt {group}"}
            for group, lengths in enumerate(LENGTHS)
            for tokens in lengths
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "samples" / f"step_{one['step']:06d}.parquet")
    return folder


def test_a_profile_has_what_the_events_and_samples_say(tmp_path):
    profile = profile_of_run(run(tmp_path, [step(number) for number in range(1, 16)]))
    assert (profile.generators, profile.ranks, profile.groups_in_flight, profile.max_lag) == (3, 2, 5, 3)
    assert (profile.publish_s, profile.pause_s) == (1.0, 0.5)
    assert profile.lengths.mean == pytest.approx(20.0, rel=0.05)
    assert profile.reward_s == pytest.approx(2.0 / 4)
    assert profile.filtered == pytest.approx(6 / 30)
    assert profile.learner.measured[0] == (40.0, 4.0), "80 tokens of two ranks; publication and checkpoint do not count"
    sampling = 102.0 * 24.0 / 25.5  # the rest of the time weights were changed
    assert profile.decode.measured[0] == (sampling / 24.0, sampling / 80)


def test_a_reward_takes_no_longer_than_its_workers_have(tmp_path):
    steps = [step(number) for number in range(1, 16)]
    for one in steps:
        one["generators"]["scoring"] = 1e6
    assert profile_of_run(run(tmp_path, steps)).reward_s == pytest.approx(4 * 30.0 / 4)


def test_the_learner_s_two_parts_come_out_of_steps_of_different_sizes(tmp_path):
    steps = []
    for number in range(1, 16):
        one = step(number, tokens=40 + 40 * (number % 3))
        one["seconds"]["forward_backward"] = 1.0 + one["tokens_trained"] * 0.05
        steps.append(one)
    learner = profile_of_run(run(tmp_path, steps)).learner
    assert learner.rank_s_per_token == pytest.approx(0.1)
    assert learner.base_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("steps", "samples", "said"),
    [
        (4, True, "has 4 steps since its last start, and a profile needs 8"),
        (15, False, "has no samples of complete groups"),
    ],
)
def test_what_is_missing_is_said(tmp_path, steps, samples, said):
    with pytest.raises(ConfigError, match=said):
        profile_of_run(run(tmp_path, [step(number) for number in range(1, steps + 1)], samples=samples))


def test_events_without_the_generators_time_are_refused(tmp_path):
    steps = [step(number) for number in range(1, 16)]
    for one in steps:
        del one["generators"]
    with pytest.raises(ConfigError, match="nothing of its generators' time"):
        profile_of_run(run(tmp_path, steps))


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"{tmp_path} is no run folder: it has no config.yaml"):
        profile_of_run(tmp_path)
