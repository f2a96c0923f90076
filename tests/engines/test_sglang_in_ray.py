"""Two SGLang engines in two Ray actors, as a run has them: they start inside a running event loop in the actor's main
thread, and end with the actor.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from asyncgrpo.engines.sglang.engine import SGLangEngine
from asyncgrpo.types import Completion, PolicyVersion, Sampling
from tests.models import make_tiny_qwen3
from tests.runs import wait_until

pytest.importorskip("sglang")
ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = (5, 77, 130, 9, 201)
LONG = 240
"""Tokens that a scheduler does not sample while this process, which may get less of the machine, loads weights."""


class Generator:
    """No method is `async`: one would make this an actor whose event loop is Ray's, in another thread."""

    def run(self, folder: str, change: float) -> dict[str, Any]:
        self.engine = SGLangEngine(folder, dtype=torch.float32, max_context=256, device="cpu")
        return asyncio.run(start_sample_and_load(self.engine, folder, change))


async def start_sample_and_load(engine: SGLangEngine, folder: str, change: float) -> dict[str, Any]:
    """The engine is left running."""
    await engine.start(PolicyVersion(3, 0))
    sums = [await engine.checksum()]
    long = asyncio.create_task(sample(engine, "long", LONG))
    short = await sample(engine, "short", 3)
    tensors = {name: tensor * change for name, tensor in load_file(f"{folder}/model.safetensors").items()}
    await engine.load_weights(tensors.items(), PolicyVersion(3, 1))
    sums.append(await engine.checksum())
    await sample(engine, "later", 3)  # when this is back, the new weights have sampled of the long ones too
    await engine.abort("long")
    return {
        "sums": sums,
        "short": short,
        "long": await long,
        "pids": [os.getpid(), *engine._engine.get_all_child_pids()],
    }


async def sample(engine: SGLangEngine, request_id: str, max_tokens: int) -> list[Completion]:
    return [
        completion
        async for completion in engine.generate(request_id, PROMPT, 4, Sampling(max_tokens=max_tokens), seed=0)
    ]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # as in a run; else whatever else the machine does comes first
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ray.init(include_dashboard=False, num_cpus=2, log_to_driver=False, runtime_env={"env_vars": paths})
    yield
    ray.shutdown()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_two_engines_in_two_actors_sample_change_weights_and_end_with_them(cluster: None, tmp_path: Path) -> None:
    folder = str(make_tiny_qwen3(tmp_path))
    generators = [ray.remote(num_cpus=1)(Generator).remote() for _ in range(2)]
    first, second = ray.get([generator.run.remote(folder, 0.5) for generator in generators])
    assert first["sums"] == second["sums"]
    assert first["sums"][0] != first["sums"][1]
    for result in (first, second):
        assert [len(completion.token_ids) for completion in result["short"]] == [3] * 4
        for completion in result["long"]:
            assert [span.version for span in completion.spans] == [PolicyVersion(3, 0), PolicyVersion(3, 1)]
    pids = first["pids"] + second["pids"]
    assert len(set(pids)) == 4 and all(map(is_running, pids))
    ray.shutdown()
    wait_until(lambda: not any(map(is_running, pids)), "end of the engines with their actors", 30.0)
