"""The reward model, against a plain forward pass of transformers, and that of a server that replies as it is told to."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification
from transformers import PreTrainedTokenizerFast as Tokenizers

from asyncgrpo.config.schema import RewardConfig, RewardModelConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled, score_one
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.rewards.model import SequenceScorer, sequences_of
from asyncgrpo.rewards.pool import call_of
from asyncgrpo.types import Score
from tests.rewards.conftest import prompt, workers_of
from tests.rewards.servers import Server

TEMPLATE = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }};{% endfor %}"
TEXTS = ["yes", "no, it is a much longer completion than the others", "", "it is 42"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch) -> None:
    """A scorer takes every core for its process, which is that of all later tests here: they would be ten times slower."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def make_reward_model(path: Path, *, outputs: int = 1, template: str | None = TEMPLATE) -> Path:
    """Save a tiny random Llama with a value head, whose tokens are bytes; the padding token is one that ends sequences."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, num_labels=outputs, pad_token_id=None,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    saved = Tokenizers(tokenizer_object=tokenizer, pad_token=";", eos_token=";")
    saved.chat_template = template
    saved.save_pretrained(path)
    return path


def forward(path: Path, text: str) -> float:
    """The model's output for one text, alone."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer = Tokenizers.from_pretrained(path)
    with torch.inference_mode():
        return float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0])


def reward_of(path: Path, **settings):
    return build_reward(RewardConfig(function="model", model=RewardModelConfig(path=str(path), **settings)))


async def test_a_group_has_the_scores_of_a_plain_forward_pass_of_each_completion_that_is_not_too_long(tmp_path):
    path = make_reward_model(tmp_path)
    reward = reward_of(path)
    assert reward.takes_groups
    turns = ({"role": "system", "content": "Be brief"}, {"role": "user", "content": "6 x 7?"})
    *scores, long = await reward.score(prompt(turns=turns), [Sampled(text) for text in (*TEXTS, "4" * 300)])
    expected = [forward(path, f"<system>Be brief;<user>6 x 7?;<assistant>{text};") for text in TEXTS]
    assert [score.value for score in scores] == pytest.approx(expected, abs=1e-5)
    assert long.failure == "model" and "tokens, and the reward model takes 256" in long.detail
    assert len({round(score, 3) for score in expected}) == len(TEXTS), "they differ, so that a mix-up would show"
    (worker,) = workers_of()
    assert (await score_one(reward, prompt(text="6 x 7?"), "42")).value == pytest.approx(
        forward(path, "<user>6 x 7?;<assistant>42;"), abs=1e-5
    )
    assert workers_of() == [worker], "it is loaded once"
    await reward.close()
    assert workers_of() == []


def scorer(path: Path, device: str = "cpu") -> SequenceScorer:
    return SequenceScorer(str(path), device)


def test_a_model_without_a_chat_template_reads_the_texts_as_they_are(tmp_path):
    path = make_reward_model(tmp_path, template=None)
    tokenizer = Tokenizers.from_pretrained(path)
    (ids,) = sequences_of(tokenizer, call_of(prompt(text="6 x 7? "), [Sampled("42")], is_group=True))
    assert tokenizer.decode(ids) == "6 x 7? 42"


def test_a_model_that_cannot_score_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(RewardError, match=r"reward.model.path: .*nowhere cannot be loaded"):
        scorer(tmp_path / "nowhere")
    with pytest.raises(RewardError, match=r"reward.model.path: .* has 2 outputs instead of one"):
        scorer(make_reward_model(tmp_path, outputs=2))
    if not torch.cuda.is_available():
        with pytest.raises(RewardError, match=r"reward.model.device is cuda, and this process sees no GPU"):
            scorer(make_reward_model(tmp_path), device="cuda")


# -- behind a URL; SGLang's own server is in `test_sglang_servers.py` --------------------------------------------------


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
    tokenizer = Tokenizers.from_pretrained(path)
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
