"""At `max_lag: 0` a whole run is bitwise identical to a synchronous loop in one process."""

import asyncio
from pathlib import Path

import pytest
import torch

from asyncgrpo.config.load import load_config, shipped
from asyncgrpo.config.schema import Config
from asyncgrpo.data.demo import make_demo_model, write_demo_task
from tests import one_process
from tests.runs import asyncgrpo, events

STEPS = 4


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    make_demo_model(tmp_path / "model", seed=3)
    write_demo_task(tmp_path / "train.jsonl", tmp_path / "eval.jsonl", seed=3)
    return [
        f"model.path={tmp_path / 'model'}",
        f"data.train={tmp_path / 'train.jsonl'}",
        "data.eval=null",
        f"run.steps={STEPS}",
        "run.seed=3",
        "buffer.max_lag=0",
        "buffer.prompts_per_step=6",
        "generators.engine=torch",
        "generators.count=1",
        # One group at a time, so that the engine's batches are the same in both loops.
        "generators.groups_in_flight=1",
    ]


async def train_in_one_process(config: Config) -> list[one_process.Step]:
    return [step async for step in one_process.train(config)]


def run(folder: Path, *settings: str) -> Path:
    result = asyncgrpo("train", "--config", "quickstart", f"run.out={folder}", *settings, cwd=folder.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    assert events(folder, "end")[-1]["status"] == "done"
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 8], ids=["all weights", "adapters"])
def test_a_run_at_lag_zero_is_bitwise_identical_to_a_synchronous_loop(rank: int, settings: list[str], tmp_path: Path):
    if rank:
        pytest.importorskip("peft")
        settings = [*settings, f"model.lora.rank={rank}"]
    ours = events(run(tmp_path / "run", *settings), "step")

    torch.set_num_threads(1)
    config = load_config(shipped("quickstart"), settings)
    plain = asyncio.run(train_in_one_process(config))

    assert len(ours) == len(plain) == STEPS
    for step, (mine, theirs) in enumerate(zip(ours, plain, strict=True), start=1):
        for name in ("loss", "grad_norm", "entropy", "tokens_trained"):
            expected = getattr(theirs.report, name)
            assert mine[name] == expected, f"step {step}: {name} {mine[name]!r} != {expected!r}"
        assert mine["reward_mean"] == pytest.approx(theirs.reward_mean, abs=1e-12)
        assert mine["lags"] == {"0": config.buffer.prompts_per_step}
        # Every token was sampled by the weights that train on it: engine and learner agree to float32 rounding.
        assert mine["logprob_gap_max"] < 2e-5
