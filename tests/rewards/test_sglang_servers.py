"""The LLM judge, the reward model and a teacher ask SGLang's own server, which runs tiny random models on the CPU."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncgrpo.config.schema import RewardConfig, RewardModelConfig
from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.rewards.base import Sampled
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.rewards.http import ServiceError
from asyncgrpo.rewards.teacher import build_teachers
from tests.rewards.conftest import prompt
from tests.rewards.sglang_server import serving
from tests.rewards.test_model import TEXTS, forward, make_reward_model
from tests.rewards.test_teacher import TOP_K, completion, config_of

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


async def test_sglang_gives_the_log_probs_of_a_plain_forward_pass_of_the_teacher(tmp_path: Path):
    """A prompt that is sent ahead, observations, and an id that would end the server."""
    make_demo_model(tmp_path / "teacher", seed=5)
    rng = np.random.default_rng(0)
    prompt_ids = tuple(rng.integers(48, 58, 100).tolist())
    some = [completion([*rng.integers(48, 58, 20), 260, 5], observed) for observed in ((), (60, 61, 62), ())]
    with serving(tmp_path / "teacher", tmp_path / "log", "--context-length", "200") as url:
        (teacher,) = build_teachers(config_of(tmp_path / "teacher", url, "teacher.timeout_s=60")).values()
        with pytest.raises(ServiceError, match="is not in a vocabulary"):
            await teacher.score(prompt_ids, completion([10**5]))
        with pytest.raises(ServiceError, match="HTTP 400"):
            await teacher.score(prompt_ids, completion([50] * 150))
        found = await asyncio.gather(*(teacher.score(prompt_ids, one) for one in some))
        await teacher.close()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32).eval()
    for one, scored in zip(some, found, strict=True):
        with torch.no_grad():
            log_q = model(torch.tensor([[*prompt_ids, *one.all_token_ids.tolist()]])).logits[0].log_softmax(-1)
        log_q = log_q[len(prompt_ids) - 1 + one.sampled_at]
        expected = log_q.gather(-1, torch.from_numpy(one.token_ids).long()[:, None])[:, 0]
        assert scored.sampled == pytest.approx(expected.numpy(), abs=1e-4)
        assert scored.values == pytest.approx(log_q.topk(TOP_K).values.numpy(), abs=1e-4)
        assert scored.values == pytest.approx(log_q.gather(-1, torch.from_numpy(scored.ids).long()).numpy(), abs=1e-4)
