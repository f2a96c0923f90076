"""The LLM judge asks SGLang's own server, which runs a tiny random model on the CPU."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncgrpo.config.schema import JudgeConfig, RewardConfig
from asyncgrpo.rewards import Sampled, build_reward
from tests.rewards.conftest import prompt

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


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "model-path": make_judge(tmp_path / "model"), "port": port, "device": "cpu", "dtype": "float32",
        "attention-backend": "torch_native", "sampling-backend": "pytorch", "max-total-tokens": 4096,
        "max-running-requests": 16, "context-length": 1024,
    }  # fmt: skip
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "sglang.launch_server", *arguments, "--disable-overlap-schedule"]
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        while not serves(address):
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def serves(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


async def test_sglang_judges_a_group_and_the_same_completion_twice_alike(url):
    reward = build_reward(RewardConfig(function="judge", judge=JudgeConfig(url=url, max_tokens=1, timeout_s=120)))
    texts = ["1 2 3", "9", "4 5 6 7", "9"]
    scores = await reward.score(prompt(text="1 + 1 = ?", answer="2"), [Sampled(text) for text in texts])
    values = [score.value for score in scores]
    assert all(value is not None and 0 <= value <= 0.9 for value in values), scores
    assert values[1] == values[3]
    await reward.close()
