"""The LLM judge and the reward model ask SGLang's own server, which runs tiny random models on the CPU."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncgrpo.config.schema import JudgeConfig, RewardConfig, RewardModelConfig
from asyncgrpo.rewards.base import Sampled
from asyncgrpo.rewards.build import build_reward
from tests.rewards.conftest import prompt
from tests.rewards.sglang_server import serving
from tests.rewards.test_model import TEXTS, forward, make_reward_model

pytest.importorskip("sglang")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"


def make_judge(path: Path) -> Path:
    """Save a random model whose only tokens are digits, so that whatever it says is a number."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=10, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None, **shape)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({str(digit): digit for digit in range(10)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(path)
    return path


async def test_sglang_judges_a_group_and_the_same_completion_twice_alike(tmp_path: Path):
    texts = ["1 2 3", "9", "4 5 6 7", "9"]
    with serving(make_judge(tmp_path / "model"), tmp_path / "log") as url:
        reward = build_reward(
            RewardConfig(function="judge", judge=JudgeConfig(url=url, extra={"max_tokens": 1}, timeout_s=120))
        )
        scores = await reward.score(prompt(text="1 + 1 = ?", answer="2"), [Sampled(text) for text in texts])
        await reward.close()
    values = [score.value for score in scores]
    assert all(value is not None and 0 <= value <= 0.9 for value in values), scores
    assert values[1] == values[3]


async def test_sglang_gives_the_scores_of_a_plain_forward_pass_of_the_reward_model(tmp_path: Path):
    path = make_reward_model(tmp_path / "model")
    with serving(path, tmp_path / "log", "--is-embedding", "--context-length", "200") as url:
        settings = RewardModelConfig(path=str(path), url=url, timeout_s=120)
        reward = build_reward(RewardConfig(function="model", model=settings))
        scores = await reward.score(prompt(text="6 x 7?"), [Sampled(text) for text in (*TEXTS, "4" * 300)])
        await reward.close()
    expected = [forward(path, f"<user>6 x 7?;<assistant>{text};") for text in TEXTS]
    assert [score.value for score in scores[: len(TEXTS)]] == pytest.approx(expected, abs=1e-4)
    assert scores[-1].failure == "model", "it is too long"
