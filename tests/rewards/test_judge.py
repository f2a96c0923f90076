"""The LLM judge, against a small server that replies as it is told to, and against SGLang's own."""

import json
import re
from collections.abc import Iterator

import pytest

from asyncgrpo.config.schema import JudgeConfig, RewardConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled, score_one
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.rewards.model import PATTERN, number_in
from asyncgrpo.types import Score
from tests.rewards.conftest import prompt
from tests.rewards.servers import Reply, Server


def chat(text: str | None) -> Reply:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest.fixture
def judge() -> Iterator[Server]:
    with Server(lambda _: chat("Fine.\nScore: 7")) as server:
        yield server


async def judged(judge: Server, text: str = "It is 42.", row=None, **settings) -> Score:
    reward = build_reward(RewardConfig(function="judge", judge=JudgeConfig(url=judge.url, **settings)))
    score = await score_one(reward, row or prompt(answer="42", text="What is 6 x 7?"), text)
    await reward.close()
    return score


async def test_the_judge_sees_prompt_completion_and_answer_and_its_number_is_the_score(judge):
    score = await judged(judge, "It is {answer}.", extra={"model": "judy", "max_tokens": 99})
    assert (score.value, score.failure) == (0.7, None) and score.seconds > 0
    assert judge.paths == ["/v1/chat/completions"] and judge.keys == [None]
    (asked,) = judge.requests
    (message,) = asked.pop("messages")
    assert asked == {"model": "judy", "max_tokens": 99, "temperature": 0.0}
    assert message["role"] == "user"
    parts = ["What is 6 x 7?", "\n42\n", "It is {answer}."]  # what a completion writes in braces stays as it is
    assert re.search(".*".join(map(re.escape, parts)), message["content"], re.DOTALL)


async def test_all_turns_of_a_chat_are_shown_and_a_template_is_a_text_or_a_file(judge, tmp_path):
    turns = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello?"})
    await judged(judge, "Hi", prompt(turns=turns), template="{prompt}|{completion}|{other}")
    file = tmp_path / "judge.txt"
    file.write_text("{completion} of {answer}")
    await judged(judge, "Hi", prompt(answer={"a": 1}, turns=turns[1:]), template=str(file))
    texts = [asked["messages"][0]["content"] for asked in judge.requests]
    assert texts == ["system: Be kind.\n\nuser: Hello?|Hi|{other}", 'Hi of {"a":1}']


async def test_the_key_comes_from_the_environment_and_fields_of_the_request_are_the_users(judge, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    extra = {"temperature": None, "max_tokens": None, "max_completion_tokens": 5}
    await judged(judge, api_key_env="JUDGE_KEY", extra=extra)
    assert judge.keys == ["Bearer s3cret"]
    assert judge.requests[0].keys() == {"model", "messages", "max_completion_tokens"}


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("Score: 7", 7.0),
        ("It is good.\n**Score:** 8/10", 8.0),
        ("Score (0 to 10): 6.5", 6.5),
        ('{"reason": "ok", "score": 4}', 4.0),
        ("Two mistakes.\n[[9]]", 9.0),
        ("Score: 2? No.\nScore: 5", 5.0),
        ("<think>Score: 2</think>\nScore: 5", 5.0),
        ("<think>Score: 2</think>\nI cannot say.", None),
        ("<think>It may be Score: 2, or", None),
        ("Its <think> block is right. Score: 2", 2.0),
        ("There are 3 mistakes in it.", None),
        ("\n" * 500_000 + "x", None),  # in linear time
    ],
)
def test_the_number_of_a_reply(reply, number):
    assert number_in(reply, re.compile(PATTERN)) == number


async def test_a_pattern_and_a_scale_of_the_user(judge):
    judge.answer = lambda _: chat("grade=A4, score: 1")
    assert (await judged(judge, pattern=r"grade=A(\d)", scale=5.0)).value == 0.8
    assert (await judged(judge, pattern=r"(?<=A)\d", scale=4.0)).value == 1.0
    judge.answer = lambda _: chat("Score: NaN")
    assert (await judged(judge, pattern=r"Score: (\S+)")).failure == "no_score"


@pytest.mark.parametrize(
    ("reply", "failure", "detail"),
    [
        (chat("I cannot say."), "no_score", "no number: 'I cannot say.'"),
        (chat(None), "no_score", "no number: ''"),
        (chat("Score: 75"), "no_score", "gave 75, above reward.judge.scale (10)"),
        ((200, "<html>"), "judge", "not a chat completion"),
        ((200, '{"choices": ["\udce2"]}'), "judge", "not a chat completion"),  # no UTF-8
        ((200, "[" * 100_000), "judge", "not a chat completion"),
        ((200, '{"choices": []}'), "no_score", "no number"),
        ((401, "who are you?"), "judge", "HTTP 401: who are you?"),
    ],
)
async def test_a_reply_without_a_score_is_a_named_failure_and_final(judge, reply, failure, detail):
    judge.replies = [reply]
    score = await judged(judge)
    assert (score.value, score.failure) == (None, failure) and detail in score.detail
    assert len(judge.requests) == 1


async def test_a_redirect_keeps_the_method_or_is_refused(judge):
    judge.replies = [(308, "/v2")]
    assert (await judged(judge)).value == 0.7 and judge.paths == ["/v1/chat/completions", "/v2"]
    judge.replies = [(301, "/v3")]  # a client makes a GET of it
    score = await judged(judge)
    assert score.failure == "judge" and f"HTTP 301 moves it; name {judge.url}/v3" in score.detail


@pytest.mark.parametrize("reply", [None, (503, ""), (429, "slow down")])
async def test_a_judge_that_is_busy_or_fails_is_asked_again(judge, reply):
    judge.replies = [reply] * 4
    assert (await judged(judge)).value == 0.7
    assert len(judge.requests) == 5


async def test_a_judge_that_fails_hangs_or_is_not_there_is_a_named_failure_within_the_deadline(judge):
    judge.replies = [(429, "")] * 1000
    score = await judged(judge, timeout_s=0.5)
    assert score.failure == "judge" and re.search(r"HTTP 429, \d+ times", score.detail) and len(judge.requests) > 2
    judge.replies = []
    judge.may_reply.clear()
    score = await judged(judge, timeout_s=0.2)
    assert score.failure == "timeout" and score.detail.endswith("did not reply within 0.2 s")
    judge.may_reply.set()
    judge.stop()
    score = await judged(judge, timeout_s=0.2)
    assert score.failure == "judge" and "times" in score.detail


async def test_no_more_than_max_concurrent_requests_run_at_once(judge):
    config = JudgeConfig(url=judge.url, max_concurrent=3)
    reward = build_reward(RewardConfig(function="judge", judge=config))
    scores = await reward.score(prompt(), [Sampled("a")] * 12)
    assert [score.value for score in scores] == [0.7] * 12
    assert judge.most <= 3
    assert max(score.waited for score in scores) > 0
    await reward.close()


def test_a_template_that_does_not_show_the_completion_is_refused(tmp_path):
    (tmp_path / "judge.txt").write_text("{prompt}")
    config = JudgeConfig(url="http://h", template=str(tmp_path / "judge.txt"))
    with pytest.raises(RewardError, match="which the judge judges"):
        build_reward(RewardConfig(function="judge", judge=config))
