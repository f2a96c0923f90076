"""`asyncgrpo tune` measures engines of a known curve, in real runs of the demo's model."""

import msgspec
import pytest

from asyncgrpo.config.load import load_config
from asyncgrpo.data.demo import make_demo_model, write_demo_task
from asyncgrpo.planner.plan import DecodeCurve, Profile, make_plan, read_profile
from asyncgrpo.planner.tune import Measure, learner_points, profile_of
from tests.runs import assert_nothing_left, asyncgrpo

ENGINE = "{vocab_size: 261, seconds_per_token: 0.004, seconds_per_completion: 0.0002, median_tokens: 20, sigma: 0.5}"
CURVE = DecodeCurve(base_s=0.01, each_s=0.001)
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
    """Ten seconds, of which 1 is publication; three engines change weights for 0.5 s each."""
    return {
        "event": "step", "step": number, "lags": {"1": 2}, "tokens_trained": tokens,
        "filtered": {"all_equal_low": 1} if number % 2 else {}, "generators": {"in_touch": 3.0, "weights": 1.5},
        "seconds": {"wait_data": 5.0, "forward_backward": 3.0, "optimizer": 0.5, "publish": 1.0, "other": 0.5, "checkpoint": 9.0},
    }  # fmt: skip


class Words:
    def encode(self, text: str, **how: object) -> list[int]:
        return [0] * len(text.split())


def measured(tmp_path, steps: list[dict], *settings: str, beside: tuple[int, ...] = ()) -> Profile:
    rows = [
        {"group_id": f"{one['step']}.{group}", "num_tokens": tokens, "prompt": "three words long"}
        for one in steps
        for group, lengths in enumerate(LENGTHS)
        for tokens in (*lengths, *beside)
    ]
    incomplete = {"group_id": "last", "num_tokens": 1000, "prompt": "three words long"}
    (tmp_path / "config.yaml").write_text(CONFIG)
    config = load_config(str(tmp_path / "config.yaml"), [*settings])
    return profile_of(config, steps, [*rows, incomplete], Words(), CURVE)  # type: ignore[arg-type]


def test_a_profile_has_what_events_and_samples_contain(tmp_path):
    steps = [step(number) for number in range(1, 13)]
    profile = measured(tmp_path, steps)
    assert (profile.gpus, profile.units) == (5, "processes")
    assert (profile.publish_s, profile.pause_s, profile.prompt_tokens) == (1.0, 0.5, 3.0)
    assert profile.lengths.mean == pytest.approx(20.0, rel=0.05), "an incomplete group does not count"
    assert (profile.filtered, profile.decode) == (pytest.approx(6 / 30), CURVE)
    tokens = (80 + 2 * 3) / 2  # of two ranks, with a prompt for each group
    assert learner_points(steps, profile)[0] == (tokens, 4.0), "publication and checkpoint do not count"


def test_the_greedy_completion_of_a_group_is_not_one_of_its_lengths(tmp_path):
    steps = [step(number) for number in range(1, 13)]
    with_greedy = measured(tmp_path, steps, "algorithm.advantage=remax", beside=(500,))
    assert with_greedy.lengths == measured(tmp_path, steps).lengths


def test_the_learner_s_points_are_of_steps_of_different_sizes(tmp_path):
    steps = [step(number, tokens=40 + 40 * (number % 3)) for number in range(1, 13)]
    for one in steps:
        one["seconds"]["forward_backward"] = 1.0 + one["tokens_trained"] * 0.05
    points = learner_points(steps, measured(tmp_path, steps))
    assert points == [(23.0, 4.0), (43.0, 6.0), (63.0, 8.0)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_profile_is_measured_on_the_cluster(tmp_path):
    make_demo_model(tmp_path / "model", seed=0)
    write_demo_task(tmp_path / "train.jsonl", tmp_path / "eval.jsonl", seed=0)
    result = asyncgrpo(
        "tune", "quickstart", f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'train.jsonl'}", "data.eval=null",
        "generators.engine=fake", f"generators.extra={ENGINE}", "buffer.prompts_per_step=8", "algorithm.group_size=4",
        "sampling.max_tokens=80", "generators.groups_in_flight=4", "--out", "profile.json", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("run: ") == 2 and "next: asyncgrpo plan --profile profile.json" in result.stdout
    assert_nothing_left(tmp_path)
    profile = read_profile(tmp_path / "profile.json")
    assert [load for load, _ in profile.decode.measured][:6] == [1, 2, 4, 8, 16, 32]
    # A busy machine is slower than its engine; a difference of two times may come out a little below.
    assert all(seconds >= 0.85 * (0.004 + 0.0002 * load) for load, seconds in profile.decode.measured)
    assert 15 < profile.lengths.mean < 35 and profile.lengths.spread(4) > 1.2
    assert profile.publish_s > 0 and profile.learner.at(800) > 0
    assert {tokens < 200 for tokens, _ in profile.learner.measured} == {True, False}, "steps of two sizes"
    assert len(make_plan(profile, 4).options) == 3
    assert msgspec.json.decode((tmp_path / "profile.json").read_bytes())["config"]["generators"]["engine"] == "fake"


class Timed(Measure):
    """Takes a second to start, and half a second for a token."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.asked: list[int] = []

    async def seconds(self, load: int, tokens: int) -> float:
        self.asked.append(tokens)
        return 1.0 + 0.5 * tokens


async def test_the_start_of_a_completion_is_no_part_of_a_token_unless_all_are_too_short_to_separate_it():
    assert await Timed(longest=100).token_seconds(1) == pytest.approx(0.5)
    short = Timed(longest=10)
    assert await short.token_seconds(1) == pytest.approx(5.0 / 8)
    assert short.asked == [8, 8]
