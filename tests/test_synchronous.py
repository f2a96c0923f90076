"""At `max_lag: 0` a whole run is bitwise identical to a synchronous loop in one process."""

import asyncio
import statistics
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from asyncgrpo.buffer.buffer import group_seed
from asyncgrpo.cluster.wiring import sampling_of
from asyncgrpo.config.load import find, load_config
from asyncgrpo.config.schema import Config
from asyncgrpo.data.demo import make_demo_model, write_demo_task
from asyncgrpo.data.loading import Prompts
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.data.tokenizer import decoder, load_tokenizer, stop_token_ids
from asyncgrpo.engines.build import build_engine
from asyncgrpo.generators.rollout import GroupInFlight
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.report import StepReport
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.types import Group, PolicyVersion, Prompt
from tests.engines.shared import shared
from tests.generators.test_rollout import make_lease
from tests.runs import asyncgrpo, events

STEPS = 3


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


class Step(NamedTuple):
    reward_mean: float
    report: StepReport


async def train(config: Config) -> list[Step]:
    """Train the `run.steps` steps in this process, sampling one group at a time."""
    tokenizer = load_tokenizer(config.model.path)
    stops = stop_token_ids(tokenizer, config.model.path, config.sampling.stop)
    prompts = Prompts(config.data.sources, "train", tokenizer, config.data)
    source = PromptSource(prompts, seed=config.run.seed, shuffle=config.data.shuffle, epochs=None)
    engine, reward = build_engine(config, seed=config.run.seed), build_reward(config.reward)
    learner = Learner(config, rank=0, world=1, device="cpu")
    decode = decoder(tokenizer, keep_special=False)
    sampling = sampling_of(config, stops, evaluation=False)

    async def sample(number: int, prompt: Prompt) -> Group:
        how = {"group_id": f"train.{number}", "sampling": sampling, "seed": group_seed(config.run.seed, number, 0)}
        lease = make_lease(config.algorithm.group_size, prompt_index=number, prompt=prompt, **how)
        return await GroupInFlight(lease, engine, reward, decode).generate("one")

    steps: list[Step] = []
    await engine.start(PolicyVersion(1, 0))
    try:
        for step in range(config.run.steps or 0):
            version = PolicyVersion(1, step)
            await engine.load_weights(shared({info.name: tensor for info, tensor in learner.weights()}), version)
            wanted = [source.next() or (0, prompts[0]) for _ in range(config.buffer.prompts_per_step)]
            groups = [await sample(number, prompt) for number, prompt in wanted]
            rewards = [r.score.value for group in groups for r in group.rollouts if r.score.value is not None]
            steps.append(Step(statistics.fmean(rewards), learner.step(groups, version)))
        return steps
    finally:
        await engine.close()
        await reward.close()


def run(folder: Path, *settings: str) -> Path:
    result = asyncgrpo("train", "--config", "quickstart", f"run.out={folder}", *settings, cwd=folder.parent)
    assert result.returncode == 0, result.stdout + result.stderr
    assert events(folder, "end")[-1]["status"] == "done"
    return folder


@pytest.mark.slow
def test_a_run_at_lag_zero_is_bitwise_identical_to_a_synchronous_loop(settings: list[str], tmp_path: Path):
    ours = events(run(tmp_path / "run", *settings), "step")

    torch.set_num_threads(1)
    config = load_config(find("quickstart"), settings)
    plain = asyncio.run(train(config))

    assert len(ours) == len(plain) == STEPS
    for step, (mine, theirs) in enumerate(zip(ours, plain, strict=True), start=1):
        for name in ("loss", "grad_norm", "entropy", "tokens_trained"):
            expected = getattr(theirs.report, name)
            assert mine[name] == expected, f"step {step}: {name} {mine[name]!r} != {expected!r}"
        assert mine["reward_mean"] == pytest.approx(theirs.reward_mean, abs=1e-12)
        assert mine["lags"] == {"0": config.buffer.prompts_per_step}
        # Every token was sampled by the weights that train on it: engine and learner agree to float32 rounding.
        assert mine["logprob_gap_max"] < 2e-5
