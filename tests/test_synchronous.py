"""At `max_lag: 0` the asynchronous system is a synchronous trainer, to the last bit."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch

from asyncgrpo.buffer.groups import group_seed
from asyncgrpo.cluster.folder import RunFolder
from asyncgrpo.cluster.run import Run
from asyncgrpo.cluster.wiring import sampling_of
from asyncgrpo.config.files import shipped
from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config, LoraConfig
from asyncgrpo.data.demo import demo_rules, make_demo_model, write_demo_task
from asyncgrpo.data.prompts import PromptSource, load_prompts
from asyncgrpo.data.tokenizer import decoder, load_tokenizer, stop_token_ids
from asyncgrpo.engines.build import build_engine
from asyncgrpo.generators.rollout import GroupInFlight
from asyncgrpo.learner.learner import Learner
from asyncgrpo.rewards import build_reward
from asyncgrpo.types import Group, Lease, PolicyVersion
from tests.runs import events

STEPS = 4


@pytest.fixture
def config(tmp_path: Path) -> Config:
    make_demo_model(tmp_path / "model", seed=3)
    write_demo_task(tmp_path / "train.jsonl", tmp_path / "eval.jsonl", seed=3)
    return load_config(
        shipped("quickstart"),
        [
            f"model.path={tmp_path / 'model'}",
            f"data.train={tmp_path / 'train.jsonl'}",
            "data.eval=null",
            f"run.out={tmp_path / 'run'}",
            f"run.steps={STEPS}",
            "run.seed=3",
            "buffer.max_lag=0",
            "buffer.prompts_per_step=6",
            "generators.engine=torch",
            "generators.count=1",
            # One group at a time, so that the engine's batches are the same in both loops.
            "generators.groups_in_flight=1",
        ],
    )


async def plain_loop(config: Config) -> list[dict[str, float]]:
    """Generate, score, step, load: GRPO in one process, without buffer, wire, Ray or leases."""
    tokenizer = load_tokenizer(config.model.path)
    sampling = sampling_of(config, tuple(stop_token_ids(tokenizer, config.model.path, ())), evaluation=False)
    prompts = load_prompts(config.data.train, "train", tokenizer, config.data).prompts
    source = PromptSource(prompts, seed=config.run.seed, shuffle=config.data.shuffle, epochs=config.run.epochs)
    engine, reward = build_engine(config, seed=config.run.seed), build_reward(config.reward, extra_rules=demo_rules())
    learner = Learner(config, rank=0, world=1, device="cpu")
    await engine.start(PolicyVersion(1, 0))
    steps = []
    for step in range(STEPS):
        version, groups = PolicyVersion(1, step), []
        await engine.load_weights([(info.name, tensor) for info, tensor in learner.weights()], version)
        for _ in range(config.buffer.prompts_per_step):
            groups.append(await one_group(config, source, sampling, engine, reward, tokenizer))
        report = learner.step(groups, version)
        rewards = [r.score.value for g in groups for r in g.rollouts]
        steps.append(
            {
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "entropy": report.entropy,
                "reward_mean": sum(rewards) / len(rewards),
                "tokens_trained": report.tokens_trained,
            }
        )
    await engine.close()
    await reward.close()
    return steps


async def one_group(config, source, sampling, engine, reward, tokenizer) -> Group:
    prompt_index, prompt = source.next()
    lease = Lease(
        lease_id=f"1.{prompt_index}.0",
        group_id=f"1.{prompt_index}",
        attempt=0,
        prompt_index=prompt_index,
        purpose="train",
        prompt=prompt,
        num_completions=config.algorithm.group_size,
        sampling=sampling,
        seed=group_seed(config.run.seed, prompt_index, 0),
    )
    decode = decoder(tokenizer, keep_special=False)
    return await GroupInFlight(lease, engine, reward, decode).generate("plain")


def run(config: Config) -> Path:
    """The whole system, to its end; the run's folder."""
    folder = RunFolder(Path(config.run.out))
    folder.claim()
    assert Run(config, folder, "").execute().status == "done"
    return folder.path


@pytest.mark.slow
def test_a_run_that_publishes_adapters_is_the_run_that_publishes_whole_weights_to_the_last_bit(config: Config):
    pytest.importorskip("peft")
    adapted = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, lora=LoraConfig(rank=8)))
    runs = {}
    for only in (True, False):
        runs[only] = run(
            msgspec.structs.replace(
                adapted,
                run=msgspec.structs.replace(config.run, out=f"{config.run.out}-{only}"),
                weights=msgspec.structs.replace(config.weights, adapters_only=only),
            )
        )
    syncs = {only: events(path, "sync") for only, path in runs.items()}
    assert all(sync["checksum"] == "ok" for sync in syncs[True]) and len(syncs[True]) == STEPS + 1
    assert syncs[True][0]["bytes"] < syncs[False][0]["bytes"] / 4
    ours, whole = (events(runs[only], "step") for only in (True, False))
    for mine, theirs in zip(ours, whole, strict=True):
        for name in ("loss", "grad_norm", "entropy", "tokens_trained", "reward_mean", "logprob_gap_max"):
            assert mine[name] == theirs[name], name
    assert ours[0]["loss"] != ours[-1]["loss"]


@pytest.mark.slow
def test_lag_zero_is_a_plain_synchronous_loop_to_the_last_bit(config: Config):
    ours = events(run(config), "step")

    torch.set_num_threads(1)
    plain = asyncio.run(plain_loop(config))

    assert len(ours) == len(plain) == STEPS
    for step, (mine, theirs) in enumerate(zip(ours, plain, strict=True), start=1):
        for name in ("loss", "grad_norm", "entropy", "tokens_trained"):
            assert mine[name] == theirs[name], f"step {step}: {name} {mine[name]!r} != {theirs[name]!r}"
        assert mine["reward_mean"] == pytest.approx(theirs["reward_mean"], abs=1e-12)
        assert mine["lags"] == {"0": config.buffer.prompts_per_step}
        # Every token was sampled by the weights that train on it: engine and learner agree to float32 rounding.
        assert mine["logprob_gap_max"] < 2e-5
