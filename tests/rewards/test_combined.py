"""Several rewards are one weighted sum, each is a part of it, and one that fails is never a 0."""

from pathlib import Path

import pytest

from asyncgrpo.config.schema import JudgeConfig, RewardConfig, RewardModelConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled, failed, score_one
from asyncgrpo.rewards.build import CombinedReward, Weighted, build_reward
from asyncgrpo.types import Score
from tests.rewards.conftest import prompt
from tests.rewards.stubs import OneByOne

FINE = "<think>15 + 27</think><answer>42</answer>"
NOTHING = failed("not_applicable", "returned None")


class Gives(OneByOne):
    """Gives every completion one score, or each text the score that a test says, and keeps what it was asked."""

    about = "a stub"

    def __init__(self, scores: Score | dict[str, Score]) -> None:
        self.scores = scores
        self.asked: list[str] = []

    async def score_one(self, prompt, text) -> Score:
        self.asked.append(text)
        return self.scores if isinstance(self.scores, Score) else self.scores[text]


def combined(*scores: tuple[float, Score]) -> CombinedReward:
    return CombinedReward([Weighted(f"r{i}", weight, Gives(score)) for i, (weight, score) in enumerate(scores)])


async def test_the_score_is_the_weighted_sum_and_the_parts_are_the_scores():
    reward = combined((1.0, Score(value=0.5, seconds=0.1)), (-0.2, Score(value=2.0, parts={"long": 1.0}, seconds=0.3)))
    score = await score_one(reward, prompt(), "")
    assert score.value == pytest.approx(0.1) and score.seconds == 0.3
    assert score.parts == {"r0": 0.5, "r1": 2.0, "r1/long": 1.0}


async def test_a_reward_may_be_called_score_and_too_many_parts_are_left_out_by_name():
    many = Score(value=1.0, parts={f"p{i}": 1.0 for i in range(40)})
    reward = CombinedReward([Weighted("score", 1.0, Gives(Score(value=0.5))), Weighted("many", 1.0, Gives(many))])
    score = await score_one(reward, prompt(), "")
    assert (score.value, score.parts["score"], len(score.parts)) == (1.5, 0.5, 32)
    assert score.detail.startswith("parts left out, more than 32: many/p30, ")


@pytest.mark.parametrize(
    ("scores", "value", "failure"),
    [
        ([(1.0, Score(value=0.5)), (0.0, failed("exception", "/r.py:3: KeyError: x"))], None, "exception"),
        ([(1.0, NOTHING), (2.0, Score(value=0.5))], 1.0, None),  # one that does not apply adds nothing
        ([(1.0, NOTHING), (2.0, NOTHING)], None, "not_applicable"),
        ([(10.0, Score(value=9e5))], None, "too_large"),  # a sum has the bounds of a score
    ],
)
async def test_one_reward_that_fails_fails_the_whole_by_its_name(scores, value, failure):
    score = await score_one(combined(*scores), prompt(), "")
    assert (score.value, score.failure) == (value, failure)
    assert failure != "exception" or score.detail == "r1: /r.py:3: KeyError: x"


async def test_the_first_that_applies_scores_and_those_behind_it_are_not_called():
    rule = Gives({"a": Score(value=0.0), "b": NOTHING, "c": NOTHING, "d": failed("timeout", "late")})
    judge = Gives({"b": Score(value=0.5), "c": NOTHING})
    reward = CombinedReward([Weighted("rule", 1.0, rule), Weighted("judge", 2.0, judge)], "first")
    a, b, c, d = await reward.score(prompt(), [Sampled(text) for text in "abcd"])
    assert (a.value, a.parts) == (0.0, {"rule": 0.0})
    assert (b.value, b.parts) == (1.0, {"judge": 0.5})
    assert (c.failure, d.failure, d.detail) == ("not_applicable", "timeout", "rule: late")
    assert (rule.asked, judge.asked) == (["a", "b", "c", "d"], ["b", "c"])
    assert reward.about == "first of 1 x a stub, 2 x a stub"


async def test_behind_a_gate_the_others_are_called_only_where_the_first_is_above_it():
    first = Gives({
        "no": Score(value=-0.25), "yes": Score(value=0.5), "broken": failed("crash", "gone"), "none": NOTHING,
    })  # fmt: skip
    costly = [Gives({"yes": Score(value=3.0)}), Gives({"yes": NOTHING})]
    rewards = [Weighted("first", 2.0, first), Weighted("x", 1.0, costly[0]), Weighted("y", 1.0, costly[1])]
    reward = CombinedReward(rewards, "gate")
    no, yes, broken, none = await reward.score(prompt(), [Sampled(t) for t in ("no", "yes", "broken", "none")])
    assert (no.value, no.parts) == (-0.5, {"first": -0.25})
    assert (yes.value, yes.parts) == (4.0, {"first": 0.5, "x": 3.0})
    assert (broken.failure, broken.detail) == ("crash", "first: gone")
    assert none.failure == "not_applicable", "what has no first reward passes no gate, and is no silent 0"
    assert [one.asked for one in costly] == [["yes"], ["yes"]]
    assert reward.about == "gate of 2 x a stub, 1 x a stub, 1 x a stub"


async def test_functions_and_built_in_rewards_are_mixed_by_name(reward_file):
    path = reward_file("def brief(completions, **columns): return [float(len(c) < 99) for c in completions]", "r.py")
    config = RewardConfig(
        function=("exact_match", f"{path}:brief", "format", "length"), weights=(1.0, 0.5, 0.2, -0.1), timeout_s=30
    )
    reward = build_reward(config)
    assert reward.takes_groups
    assert reward.about == (
        "sum of 1 x exact_match, built in, 0.5 x brief(completions, **columns), TRL's form, one call for a group, "
        "0.2 x format, built in, -0.1 x length, built in"
    )
    right, wrong = await reward.score(prompt(answer="42"), [Sampled("42", [1]), Sampled(FINE, [1] * 500)])
    assert right.parts == {"exact_match": 1.0, "brief": 1.0, "format": 0.0, "length": 0.001}
    assert wrong.value == pytest.approx(0.5 + 0.2 - 0.05)
    await reward.close()


def judge_with(**settings) -> RewardConfig:
    return RewardConfig(function="judge", judge=JudgeConfig(**{"url": "http://h"} | settings))


def model_at(path: str | None) -> RewardConfig:
    return RewardConfig(function="model", model=RewardModelConfig(path=path, url="http://h"))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (RewardConfig(function=()), "reward.function is an empty list"),
        (
            RewardConfig(function=("format", "qa"), weights=(1.0,)),
            "reward.weights has 1 and reward.function 2 entries",
        ),
        (RewardConfig(weights=(1.0, 2.0)), "reward.weights has 2 and reward.function 1 entries"),
        (RewardConfig(function=("format", "format")), "names format twice"),
        (RewardConfig(function="qa", combine="gate"), "reward.combine=gate needs two rewards or more"),
        (RewardConfig(function="gsm8"), r"reward.function: gsm8 is not built in; there are .*gsm8k"),
        (RewardConfig(function="nowhere.py"), "reward file .*nowhere.py does not exist"),
        (RewardConfig(function="model"), "reward.function names model, which needs .*: reward.model.path"),
        (model_at(None), "reward.model.url needs reward.model.path"),
        (model_at(str(Path(__file__).parent)), "cannot be loaded"),
        (judge_with(url=None), "reward.function names judge, and reward.judge.url is not set"),
        (judge_with(template="judge.txt"), "reward.judge.template: judge.txt is neither a file"),
        (judge_with(pattern="("), r"reward.judge.pattern \( cannot be compiled"),
        (judge_with(api_key_env="NOT_SET"), "reward.judge.api_key_env names NOT_SET, which is not set"),
    ],
)
def test_what_is_wrong_with_a_setting_is_one_sentence(config, sentence):
    with pytest.raises(RewardError, match=sentence):
        build_reward(config)


def test_the_rule_of_each_source_is_checked_before_the_run_also_in_a_list():
    reward = build_reward(RewardConfig(function=("data_source", "format")))
    reward.check_sources({"gsm8k"})
    with pytest.raises(RewardError, match="no reward rule for data_source 'my_data'"):
        reward.check_sources({"my_data"})
    build_reward(RewardConfig(function="qa")).check_sources({"my_data"})
