"""The reward model of a server that replies as it is told to. SGLang's own is in `test_sglang_servers.py`."""

import json
from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerFast

from asyncgrpo.config.schema import RewardConfig, RewardModelConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.types import Score
from tests.rewards.conftest import prompt
from tests.rewards.servers import Server
from tests.rewards.test_model import make_reward_model


@pytest.fixture
def server() -> Iterator[Server]:
    """It gives each sequence its number of tokens."""
    with Server(lambda asked: (200, json.dumps([{"embedding": [len(ids)]} for ids in asked["input_ids"]]))) as server:
        yield server


async def scores(server: Server, path, *texts: str, **settings) -> list[Score]:
    model = RewardModelConfig(path=str(path), url=server.url + "/", **settings)
    reward = build_reward(RewardConfig(function="model", model=model))
    found = await reward.score(prompt(text="6 x 7?"), [Sampled(text) for text in texts])
    await reward.close()
    return found


async def test_a_group_is_one_request_of_the_tokens_that_the_model_reads(server, tmp_path):
    path = make_reward_model(tmp_path)
    found = await scores(server, path, "42", "no idea")
    texts = [f"<user>6 x 7?;<assistant>{text};" for text in ("42", "no idea")]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    assert server.requests == [{"input_ids": [tokenizer(text)["input_ids"] for text in texts]}]
    assert server.paths == ["/classify"]
    assert [score.value for score in found] == [len(text) for text in texts]


async def test_what_is_too_long_is_not_sent_and_the_others_have_their_scores(server, tmp_path):
    long, short = await scores(server, make_reward_model(tmp_path), "4" * 300, "42")
    assert long.failure == "model" and "the reward model takes 256" in long.detail
    assert short.value == len("<user>6 x 7?;<assistant>42;")
    assert [len(request["input_ids"]) for request in server.requests] == [1]
    assert [one.failure for one in await scores(server, tmp_path, "4" * 300)] == ["model"]
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ((400, "too long"), "HTTP 400: too long"),
        ((200, "<html>"), "the reply has no scores"),
        ((200, '[{"embedding": [1.0]}]'), "1 outputs for 2 sequences"),
        ((200, '[{"embedding": [1.0, 2.0]}, {"embedding": [1.0, 2.0]}]'), "the reply has no scores"),
    ],
)
async def test_a_reply_without_scores_is_a_named_failure_of_the_group(server, tmp_path, told, said):
    server.answer = lambda _: told
    found = await scores(server, make_reward_model(tmp_path), "1", "2")
    assert [score.failure for score in found] == ["model", "model"]
    assert all(said in score.detail for score in found), found


def test_a_url_without_a_tokenizer_is_refused_in_one_sentence(tmp_path):
    for path, said in ((None, "reward.model.url is set, and reward.model.path is not"), (tmp_path, "cannot be loaded")):
        with pytest.raises(RewardError, match=said):
            build_reward(
                RewardConfig(function="model", model=RewardModelConfig(path=path and str(path), url="http://x"))
            )
