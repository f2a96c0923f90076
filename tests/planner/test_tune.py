"""`asyncgrpo tune` measures what it was given: engines of a known curve, in real runs of the demo's model."""

import msgspec
import pytest

from asyncgrpo.data.demo import make_demo_model, write_demo_task
from asyncgrpo.planner.profile import read_profile
from asyncgrpo.planner.sweep import Measure
from tests.runs import assert_nothing_left, asyncgrpo

ENGINE = "{vocab_size: 261, seconds_per_token: 0.01, seconds_per_completion: 0.0005, median_tokens: 20, sigma: 0.5}"


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
    # A busy machine is slower than what its engine was told to take; a difference of two times may come out a little below.
    assert all(seconds >= 0.85 * (0.01 + 0.0005 * load) for load, seconds in profile.decode.measured)
    assert 15 < profile.lengths.mean < 35 and profile.lengths.spread(4) > 1.2
    assert profile.publish_s > 0 and profile.learner.seconds(800, ranks=1) > 0
    assert {tokens < 200 for tokens, _ in profile.learner.measured} == {True, False}, "steps of two sizes"
    assert asyncgrpo("plan", "--simulate", "0", "--gpus", "4", cwd=tmp_path).returncode == 0
    assert msgspec.json.decode((tmp_path / "profile.json").read_bytes())["config"]["generators"]["engine"] == "fake"


class Timed(Measure):
    """Takes a second to start, and half a second for a token."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.asked: list[int] = []

    async def seconds(self, load: int, tokens: int) -> float:
        self.asked.append(tokens)
        return 1.0 + 0.5 * tokens


async def test_the_start_of_a_completion_is_no_part_of_a_token():
    assert await Timed(longest=100).token_seconds(1) == pytest.approx(0.5)


async def test_completions_too_short_to_be_told_apart_count_whole():
    short = Timed(longest=10)
    assert await short.token_seconds(1) == pytest.approx(5.0 / 8)
    assert short.asked == [8, 8]
