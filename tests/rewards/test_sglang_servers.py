"""The LLM judge and the reward model ask SGLang's own server, which runs tiny random models on the CPU."""

from pathlib import Path

import pytest

from asyncgrpo.config.schema import RewardConfig, RewardModelConfig
from asyncgrpo.rewards.base import Sampled
from asyncgrpo.rewards.build import build_reward
from tests.rewards.conftest import prompt
from tests.rewards.sglang_server import serving
from tests.rewards.test_model import TEXTS, forward, make_reward_model

pytest.importorskip("sglang")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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
