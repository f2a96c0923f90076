"""`asyncgrpo eval`: answer a file of prompts with one checkpoint and say how good the answers are."""

import asyncio
import json
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncgrpo.cli import options
from asyncgrpo.cli.options import RewardFuncOption, SettingsArgument
from asyncgrpo.cli.output import JsonOption, print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "eval",
        epilog="Example: asyncgrpo eval runs/demo --data runs/demo/data/eval.jsonl --max-tokens 4",
    )(evaluate)


def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="MODEL", help="Run folder, checkpoint, or folder of a Hugging Face model.")
    ],
    data: Annotated[str, typer.Option(help="Prompts: Parquet, JSONL or JSON.")],
    reward_func: RewardFuncOption = None,
    engine: Annotated[
        str, typer.Option(help="Inference engine: sglang or torch.", autocompletion=options.engines)
    ] = "torch",
    rollout_n: Annotated[int, typer.Option("--rollout-n", help="Answers to each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer, tokens.")] = 1024,
    as_json: JsonOption = False,
    overrides: SettingsArgument = None,
) -> None:
    """Score the answers of a checkpoint to a held-out file."""
    from asyncgrpo.cli.preflight import check_inputs
    from asyncgrpo.config.load import load_config
    from asyncgrpo.learner.checkpoints import model_folder

    folder = model_folder(Path(checkpoint))
    settings = [
        f"model.path={folder}",
        f"data.train={data}",
        f"generators.engine={engine}",
        f"sampling.max_tokens={max_tokens}",
        f"sampling.eval_temperature={temperature}",
        *_fit_to_machine(folder, max_tokens),
    ]
    if reward_func is not None:
        settings.append(f"reward.function={reward_func}")
    config = load_config(None, [*settings, *(overrides or [])])
    check_inputs(config)
    report = asyncio.run(_evaluate(config, rollout_n))
    if as_json:
        print_json(report)
        return
    typer.echo(f"{report['answers']} answers to {report['prompts']} prompts, mean reward {report['reward_mean']:.4f}")
    for source, mean in report["by_source"].items():
        typer.echo(f"  {source or '(no source)'}: {mean:.4f}")
    for failure, count in report["failures"].items():
        typer.echo(f"  without a score ({failure}): {count}")


def _fit_to_machine(folder: Path, max_tokens: int) -> list[str]:
    """Without a GPU: the CPU and float32. And prompts no longer than the model's context leaves room for."""
    import torch

    from asyncgrpo.config.schema import DataConfig

    settings = [] if torch.cuda.is_available() else ["generators.gpus_each=0", "model.dtype=float32"]
    context = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    default = DataConfig(train="").max_prompt_tokens
    if context is not None and max_tokens < context < default + max_tokens:
        settings.append(f"data.max_prompt_tokens={context - max_tokens}")
    return settings


async def _evaluate(config: Any, rollout_n: int) -> dict[str, Any]:
    """Every prompt answered `rollout_n` times, at most `groups_in_flight` prompts at once."""
    from asyncgrpo.data.demo import demo_rules
    from asyncgrpo.data.prompts import load_prompts
    from asyncgrpo.data.tokenizer import decoder, load_tokenizer, stop_token_ids
    from asyncgrpo.engines.build import build_engine
    from asyncgrpo.generators.rollout import GroupUnderWay
    from asyncgrpo.generators.service import UNPUBLISHED
    from asyncgrpo.rewards import build_reward
    from asyncgrpo.types import Lease, Rollout, Sampling

    tokenizer = load_tokenizer(config.model.path)
    decode = decoder(tokenizer, keep_special=False)
    sampling = Sampling(
        temperature=config.sampling.eval_temperature,
        max_tokens=config.sampling.max_tokens,
        stop_token_ids=tuple(stop_token_ids(tokenizer, config.model.path, config.sampling.stop)),
    )
    prompts = load_prompts(config.data.train, "eval", tokenizer, config.data, limit=config.data.eval_rows).prompts
    engine = build_engine(config, seed=config.run.seed)
    reward = build_reward(config.reward, extra_rules=demo_rules())
    await engine.start(UNPUBLISHED)
    room = asyncio.Semaphore(config.generators.groups_in_flight)

    async def answer(index: int) -> tuple[Rollout, ...]:
        async with room:
            lease = Lease(
                lease_id=f"eval.{index}",
                group_id=f"eval.{index}",
                attempt=0,
                order=index,
                purpose="eval",
                prompt=prompts[index],
                num_answers=rollout_n,
                sampling=sampling,
                seed=config.run.seed + index * rollout_n,
            )
            group = await GroupUnderWay(lease, engine, reward, decode).generate("eval")
            return group.rollouts

    try:
        answered = await asyncio.gather(*(answer(index) for index in range(len(prompts))))
    finally:
        await reward.close()
        await engine.close()
    by_source: dict[str, list[float]] = defaultdict(list)
    failures: Counter[str] = Counter()
    for prompt, rollouts in zip(prompts, answered, strict=True):
        for rollout in rollouts:
            if rollout.score.value is None:
                failures[rollout.score.failure or "unknown"] += 1
            else:
                by_source[prompt.source].append(rollout.score.value)
    values = [value for source in by_source.values() for value in source]
    return {
        "prompts": len(prompts),
        "answers": len(prompts) * rollout_n,
        "reward_mean": statistics.fmean(values) if values else float("nan"),
        "by_source": {source: statistics.fmean(scores) for source, scores in sorted(by_source.items())},
        "failures": dict(failures),
    }
