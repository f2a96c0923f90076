"""Code that runs in Sandbox Fusion: a small server that speaks its protocol. What code scores is in `test_code.py`."""

import json
from collections.abc import Iterator

import pytest

from asyncgrpo.config.schema import CodeRewardConfig, JudgeConfig, RewardConfig
from asyncgrpo.rewards import code as code_module
from asyncgrpo.rewards.base import score_one
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.types import Score
from tests.rewards.conftest import prompt
from tests.rewards.servers import Reply, Server

SQUARES = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}
GOOD = "n = int(input())\nprint(n * n)"


def ran(stdout: str = "", *, status: str = "Finished", code: int = 0, stderr: str = "", **others: object) -> Reply:
    result = {"status": status, "return_code": code, "stdout": stdout, "stderr": stderr}
    outcome = "Failed" if code or status != "Finished" else "Success"
    return 200, json.dumps({"status": outcome, "message": "", "compile_result": None, "run_result": result} | others)


@pytest.fixture
def service() -> Iterator[Server]:
    with Server(lambda asked: ran(str(int(asked["stdin"]) ** 2))) as server:
        yield server


async def score(url: str, text: str = GOOD, answer: object = SQUARES, **settings) -> Score:
    rules = build_reward(RewardConfig(code=CodeRewardConfig(url=url, **settings)))
    scored = await score_one(rules, prompt(source="code", answer=answer), text)
    await rules.close()
    return scored


@pytest.mark.parametrize("path", ["", "/", "/run_code"])
async def test_code_is_run_in_the_service(service, path):
    scored = await score(service.url + path, memory_mb=512, timeout_s=3.0)
    assert scored.value == 1.0
    assert service.paths == ["/run_code"] * 2
    assert service.requests[0] == {
        "code": GOOD, "language": "python", "stdin": "2\n", "run_timeout": 3.0, "compile_timeout": 3.0,
        "memory_limit_MB": 512,
    }  # fmt: skip


UNCOMPILED = {"status": "Finished", "return_code": 1, "stderr": "a.cpp:1\nno main"}


@pytest.mark.parametrize(
    ("replies", "value", "detail"),
    [
        ([ran("4")] * 2, 0.5, "test 2: wrong output"),
        ([ran("4"), ran("9", code=1, stderr="x.py:1\nValueError: y")], 0.5, "test 2: exit code 1: ValueError: y"),
        ([ran(status="TimeLimitExceeded")], 0.0, "test 1: timeout"),
        ([ran(compile_result=UNCOMPILED)] * 2, 0.0, "test 1: it does not compile: exit code 1: no main"),
    ],
)
async def test_what_the_service_says_of_the_code_is_its_score(service, replies, value, detail):
    service.replies = list(replies)
    scored = await score(service.url, "```cpp\n```")
    assert (scored.value, scored.detail) == (value, detail)
    assert {asked["language"] for asked in service.requests} == {"cpp"}


async def test_a_service_that_hangs_until_the_deadline_is_a_named_failure(service, monkeypatch):
    monkeypatch.setattr(code_module, "QUEUE_S", 0.1)
    service.may_reply.clear()
    scored = await score(service.url, timeout_s=0.1)
    assert scored.failure == "timeout" and "did not reply" in scored.detail


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        ((422, "unknown language"), "HTTP 422: unknown language"),
        ((200, "<html>"), "not one of Sandbox Fusion"),
        ((200, '{"status": "SandboxError", "message": "disk full"}'), "SandboxError: disk full"),
        ((200, '{"status": "Success"}'), "no run_result"),
    ],
)
async def test_a_reply_that_says_nothing_of_the_code_is_a_named_failure_and_final(service, reply, detail):
    service.replies = [reply]
    scored = await score(service.url)
    assert (scored.value, scored.failure) == (None, "sandbox") and detail in scored.detail
    assert len(service.requests) == 1


def test_a_generator_has_as_many_calls_at_once_as_a_service_takes():
    assert RewardConfig(workers=2, code=CodeRewardConfig(max_concurrent=8)).at_once == 2
    assert RewardConfig(workers=2, code=CodeRewardConfig(url="http://h", max_concurrent=8)).at_once == 8
    assert RewardConfig(workers=2, judge=JudgeConfig(max_concurrent=8)).at_once == 2
    assert RewardConfig(function=("judge", "length"), judge=JudgeConfig(max_concurrent=8)).at_once == 8
