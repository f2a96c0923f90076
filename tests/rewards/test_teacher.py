"""A served teacher: the log-probs of both protocols, what is refused at the start, and failures while the run goes on.

The servers are ours (`teachers.py`). SGLang's own is in `test_sglang_servers.py`.
"""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from asyncgrpo.config.load import load_config
from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.errors import ConfigError
from asyncgrpo.generators.rollout import Played
from asyncgrpo.host import reserved_port
from asyncgrpo.rewards.base import Sampled
from asyncgrpo.rewards.breaker import Breaker
from asyncgrpo.rewards.teacher import LONG_PROMPT, TaughtReward, TaughtScore, build_teachers, check_teachers
from asyncgrpo.types import Completion, Observation, PolicyVersion, Prompt, Score, VersionSpan
from tests.rewards.stubs import OneByOne
from tests.rewards.teachers import LOG_Q, VOCABULARY, TeacherServer, flat, top_of

TOP_K = 3
GROUP = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_demo_model(path, seed=0)
    return path


class Constant(OneByOne):
    async def score_one(self, prompt: Prompt, text: str) -> Score:
        return Score(failure="exception") if text == "fails" else Score(value=1.0, parts={"a": 2.0})


def config_of(model, url, *more: str, top_k: int = TOP_K):
    kind = "full" if top_k else "k2"
    settings = [f"model.path={model}", "data.train=unused.jsonl", f"teacher.top_k={top_k}", f"algorithm.kl_kind={kind}"]
    settings += ["algorithm.kl_coef=1", "teacher.timeout_s=1", "data.max_prompt_tokens=100", "sampling.max_tokens=40"]
    return load_config(None, [*settings, f"teacher.url={url}", *more])


def completion(tokens, observed=(), at: int = 1) -> Completion:
    length = len(tokens)
    spans = (VersionSpan(PolicyVersion(1, 0), 0, length),)
    seen = (Observation(at, np.array(observed, np.int32)),) if observed else ()
    return Completion(0, np.array(tokens, np.int32), np.zeros(length, np.float32), spans, "stop", seen)


def prompt(length: int = 4, name: str = "train/0", source: str = "") -> Prompt:
    return Prompt(prompt_id=name, token_ids=tuple(range(7, 7 + length)), source=source)


def scores(config, asked: Prompt, *completions: Completion, texts=None) -> list[Score]:
    """As a generator gets them."""

    async def score() -> list[Score]:
        reward = TaughtReward(Constant(), build_teachers(config), GROUP)
        given = [
            Sampled(text, (), one) for text, one in zip(texts or [""] * len(completions), completions, strict=True)
        ]
        try:
            return await reward.score(asked, given)
        finally:
            await reward.close()

    return asyncio.run(score())


@pytest.mark.parametrize("kind", ["sglang", "older_sglang", "vllm"])
@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_each_sampled_token_has_its_log_prob_and_those_of_the_most_likely_ones(model, kind, top_k):
    tokens, observed = [50, VOCABULARY - 1, 52], [60, 61]
    with TeacherServer(model, kind) as server:
        config = config_of(model, f"{server.url}/v1/", top_k=top_k)
        first, second = scores(config, prompt(), completion(tokens), completion(tokens, observed))
        assert {*server.paths} == {"/v1/completions" if kind == "vllm" else "/generate"}
        assert len(server.requests) == 2, "a short prompt is not sent alone"
    for score, before in ((first, [10, 50, VOCABULARY - 1]), (second, [10, 61, VOCABULARY - 1])):
        assert isinstance(score, TaughtScore) and score.plain == Score(value=1.0, parts={"a": 2.0})
        assert score.teacher is not None
        assert score.teacher.sampled == pytest.approx(LOG_Q[before, tokens])
        assert score.teacher.ids.tolist() == [top_of(one, top_k) for one in before]
        assert score.teacher.values == pytest.approx(np.take_along_axis(LOG_Q[before], score.teacher.ids, 1))
        assert score.teacher.ids.shape == (3, top_k)


def test_a_long_prompt_is_sent_once_before_its_completions(model):
    with TeacherServer(model) as server:
        scores(config_of(model, server.url), prompt(LONG_PROMPT), *[completion([50, 51])] * 3)
        first, *others = server.requests
    assert first["input_ids"] == list(prompt(LONG_PROMPT).token_ids) and "return_logprob" not in first
    assert [one["logprob_start_len"] for one in others] == [LONG_PROMPT - 1] * 3


def test_evaluations_are_not_taught_and_scores_of_an_environment_are(model):
    given = Score(value=0.25)
    played = Played(**vars(completion([50])), score=given)
    with TeacherServer(model) as server:
        config = config_of(model, server.url)
        assert scores(config, prompt(name="eval/0"), completion([50]), played) == [
            Score(value=1.0, parts={"a": 2.0}),
            given,
        ]
        assert server.requests == []
        good, bad, scored = scores(
            config, prompt(), completion([50]), completion([51]), played, texts=["", "fails", ""]
        )
    assert (good.value, bad.failure, scored.value) == (1.0, "exception", 0.25)
    assert isinstance(good, TaughtScore) and isinstance(scored, TaughtScore) and not isinstance(bad, TaughtScore)


def test_the_greedy_baseline_is_not_taught(model):
    with TeacherServer(model) as server:
        greedy = replace(completion([51]), index=GROUP)
        taught, baseline = scores(config_of(model, server.url), prompt(), completion([50]), greedy)
        assert len(server.requests) == 1
    assert taught.teacher is not None and baseline.teacher is None
    assert baseline.plain == Score(value=1.0, parts={"a": 2.0})


def test_an_agents_own_prompt_is_the_one_that_the_teacher_reads(model):
    played = Played(**vars(completion([50])), score=None, opening=(7, 99))
    with TeacherServer(model) as server:
        (score,) = scores(config_of(model, server.url), prompt(), played)
    assert score.teacher.sampled == pytest.approx(LOG_Q[[99], [50]])


def test_each_source_has_its_teacher(model):
    with TeacherServer(model) as maths, TeacherServer(model, "vllm") as code:
        config = config_of(model, f"{{maths: '{maths.url}', code: '{code.url}'}}")
        for source, server in (("maths", maths), ("code", code)):
            scores(config, prompt(source=source), completion([50]))
            assert len(server.requests) == 1
        with pytest.raises(ConfigError, match=r"teacher.url has no URL for data_source 'law'; give one for each"):
            check_teachers(config, {"maths", "code", "law"})
        check_teachers(config, {"maths"})


def test_a_token_outside_the_teachers_vocabulary_is_never_sent(model):
    with TeacherServer(model) as server:
        good, bad = scores(config_of(model, server.url), prompt(), completion([50]), completion([VOCABULARY]))
        assert len(server.requests) == 1
    assert isinstance(good, TaughtScore)
    assert bad.failure == "teacher" and f"token id {VOCABULARY} is not in a vocabulary of {VOCABULARY}" in bad.detail


def entries(*tokens, value=-1.0, top=((-1.0, 1, None),) * TOP_K, arrays=None) -> str:
    found = [[None, 10, None], *([value, token, None] for token in tokens)]
    tops = {"input_top_logprobs": [None] + [top] * len(tokens)} if arrays is None else flat(arrays)
    return json.dumps({"meta_info": {"input_token_logprobs": found} | tops})


@pytest.mark.parametrize(
    ("reply", "failure", "detail"),
    [
        ((400, "too long"), "teacher", "HTTP 400: too long"),
        ((200, "<html>"), "teacher", "the reply has no log-probs of the request"),
        ((200, entries(50, 52)), "teacher", "it is for other tokens"),
        ((200, entries(50, 51, value=None)), "teacher", "a log-prob is not finite"),
        ((200, entries(50, 51, top=((None, 1, None),) * TOP_K)), "teacher", "a log-prob is not finite"),
        ((200, entries(50, 51, top=((-1.0, 1, None),))), "teacher", "the reply has no log-probs"),
        ((200, entries(50, 51, arrays=[[(-np.inf, 1)] * TOP_K] * 2)), "teacher", "a log-prob is not finite"),
        ((200, entries(50, 51, arrays=[[(-1.0, 1)] * TOP_K])), "teacher", "the reply has no log-probs"),
        ("slow", "timeout", "did not reply within 1 s"),
        ("down", "teacher", "HTTP 500"),
    ],
)
def test_a_reply_that_cannot_be_used_is_a_named_failure(model, reply, failure, detail):
    with TeacherServer(model) as server:
        if reply == "slow":
            server.may_reply.clear()
        elif reply == "down":
            server.answer = lambda asked: (500, "")
        else:
            server.replies = [reply]
        (score,) = scores(config_of(model, server.url), prompt(), completion([50, 51]))
        server.may_reply.set()
    assert score.failure == failure and detail in score.detail
    assert type(score) is Score


def test_a_reply_of_vllm_without_log_probs_is_a_named_failure(model):
    with TeacherServer(model, "vllm") as server:
        server.replies = [(200, json.dumps({"choices": [{"prompt_logprobs": [None] * 6}]}))]
        (score,) = scores(config_of(model, server.url), prompt(), completion([50, 51]))
    assert score.failure == "teacher" and "the reply has no log-probs of the request" in score.detail


def test_a_server_that_restarted_is_asked_again_for_a_prompt_that_failed(model):
    async def twice() -> list[Score]:
        with TeacherServer(model) as server:
            reward = TaughtReward(Constant(), build_teachers(config_of(model, server.url)), GROUP)
            server.answer, works = (lambda asked: (400, "starting")), server.answer
            given = [Sampled("", (), completion([50]))]
            found = await reward.score(prompt(LONG_PROMPT), given)
            server.answer = works
            found += await reward.score(prompt(LONG_PROMPT), given)
            await reward.close()
        return found

    first, second = asyncio.run(twice())
    assert first.failure == "teacher" and isinstance(second, TaughtScore)


async def test_an_evaluation_does_not_end_an_outage_of_the_teacher():
    class Dead(Constant):
        teaches = True

        async def score_one(self, asked: Prompt, text: str) -> Score:
            return Score(failure="teacher") if asked.prompt_id.startswith("train/") else Score(value=1.0)

    breaker = Breaker(Dead(), at_once=4)
    for _ in range(2):
        await breaker.score(prompt(), [Sampled("")])
        await breaker.score(prompt(name="eval/0"), [Sampled("")])
    assert (breaker.health.worked, breaker.health.failed) == (0, 2)
    await breaker.close()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        (
            {"context": 140},
            "the context of .* is 140 tokens; data.max_prompt_tokens .* need 141",
        ),
        ({"tokens": "<extra>"}, "needs the vocabulary of model.path .*: token '<extra>' differs"),
        ({"vocabulary": 200}, "has 200 rows for 261 tokens; too few"),
        ({"path": "/nowhere/model"}, "teacher.path: the folder /nowhere/model does not exist"),
        ({"kind": "other"}, "teacher.url: .*the server is neither SGLang's nor vLLM's"),
    ],
)
def test_what_cannot_teach_is_refused_at_the_start(model, tmp_path, change, complaint):
    path = change.get("path", model)
    if "tokens" in change or "vocabulary" in change:
        from transformers import AutoConfig, AutoTokenizer

        path, tokenizer = tmp_path, AutoTokenizer.from_pretrained(model)
        tokenizer.add_tokens(change.get("tokens", []))
        tokenizer.save_pretrained(path)
        served = AutoConfig.from_pretrained(model)
        served.vocab_size = change.get("vocabulary", VOCABULARY)
        served.save_pretrained(path)
    refused = partial(pytest.raises, ConfigError, match=complaint) if complaint else nullcontext
    if not {"kind", "context"} & change.keys():  # a server that the run starts is checked by the folder alone
        with refused():
            check_teachers(config_of(model, "null", f"teacher.path={path}", "teacher.gpus_each=0"), {"anything"})
    with TeacherServer(path, context=change.get("context", 512)) as server:
        if "kind" in change:
            server.card = {"hello": "world"}
        with refused():
            check_teachers(config_of(model, server.url), {"anything"})


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("sampling.max_tokens=9999", r"the context of .* is \d+ tokens; .* need 10100"),
        ("teacher.gpus_each=3", r"teacher.gpus_each is 3, which does not divide the \d+ attention heads"),
        ("teacher.path={law: t}", r"teacher.path has no model for data_source 'anything'; give one for each"),
    ],
)
def test_a_teacher_that_the_run_cannot_serve_is_refused_at_the_start(model, setting, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_teachers(config_of(model, "null", f"teacher.path={model}", setting), {"anything"})


def test_a_server_that_does_not_run_is_refused_at_the_start(model):
    with reserved_port() as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=r"teacher.url: .* cannot be reached .*; start the service before the run"
        ):
            check_teachers(config_of(model, url), {"anything"})
