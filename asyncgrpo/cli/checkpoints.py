"""`asyncgrpo eval` and `asyncgrpo export`: evaluate the model of a run or a checkpoint, or copy it out of the run."""

import asyncio
import json
import os
import shutil
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncgrpo.cli import options
from asyncgrpo.cli.options import RewardFuncOption, SettingsArgument, UnsafeRewardsOption
from asyncgrpo.cli.output import JsonOption, print_json, size_in_words
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import CheckpointError
from asyncgrpo.types import Lease, Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def register(app: typer.Typer) -> None:
    """Add `eval` and `export`."""
    app.command(
        "eval",
        epilog="Example: asyncgrpo eval runs/demo --data runs/demo/data/eval.jsonl --max-tokens 4",
    )(evaluate)
    app.command("export", epilog="Example: asyncgrpo export runs/demo exported-model")(export)


# -- export ------------------------------------------------------------------------------------------------------------


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="Run folder, or one checkpoint in it.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder for the model.")],
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint of this step instead of the final model.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a trained model out of a run.

    transformers and SGLang can load the folder. A run gives its final model, or its newest checkpoint while it has none.
    """
    model = find_model(source, step)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder; give a new one")
    if model.resolve() in folder.resolve().parents:
        raise CheckpointError(f"{folder} is inside {model}, which is to be copied; give a folder elsewhere")
    sizes = _copy(model, folder)
    if as_json:
        print_json({"from": str(model), "to": str(folder), "files": len(sizes), "bytes": sum(sizes)})
    else:
        typer.echo(f"copied {len(sizes)} files, {size_in_words(sum(sizes))}, from {model} to {folder}")


def find_model(source: Path, step: int | None = None) -> Path:
    """The folder in `source` with the model's `config.json` and weights. Raises CheckpointError."""
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}; give a run such as runs/demo, or a checkpoint in it")
    steps = {int(found.parent.name[5:]): found for found in source.glob("checkpoints/step_[0-9]*/hf")}
    if step is not None:
        if step not in steps:
            there = ", ".join(map(str, sorted(steps))) or "none"
            raise CheckpointError(f"{source} has no checkpoint of step {step}; there are: {there}")
        candidates = [steps[step]]
    else:
        candidates = [
            source,
            source / "hf",
            source / "final",
            *(steps[number] for number in sorted(steps, reverse=True)),
        ]
    for folder in candidates:
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    raise CheckpointError(
        f"{source} holds no model (config.json and *.safetensors) in final/ or checkpoints/step_*/hf; "
        "a run writes one at its first checkpoint"
    )


def _copy(model: Path, folder: Path) -> list[int]:
    """Copy beside `folder`, then rename, so that `folder` is never half copied. Returns the size of each file."""
    half = folder.with_name(f".{folder.name}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(model, half)
        if folder.exists():
            folder.rmdir()
        os.replace(half, folder)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(half, ignore_errors=True)
        raise CheckpointError(f"{model} cannot be copied to {folder}: {error}") from error
    return [file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()]


# -- eval --------------------------------------------------------------------------------------------------------------


def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="MODEL", help="Run folder, checkpoint, or folder of a Hugging Face model.")
    ],
    data: Annotated[list[str], typer.Option(help="Prompts: Parquet, JSONL or JSON; may be repeated.")],
    reward_func: RewardFuncOption = None,
    unsafe_rewards: UnsafeRewardsOption = False,
    engine: Annotated[
        str, typer.Option(help="Inference engine: sglang or torch.", autocompletion=options.engines)
    ] = "torch",
    rollout_n: Annotated[int, typer.Option("--rollout-n", help="Completions to each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest completion, tokens.")] = 1024,
    success: Annotated[
        float, typer.Option(help="Reward from which a completion is right, for pass@k and maj@k.")
    ] = 1.0,
    as_json: JsonOption = False,
    overrides: SettingsArgument = None,
) -> None:
    """Score the completions of a checkpoint to held-out files.

    Each file is a suite with numbers of its own. With --rollout-n above 1 there are pass@k and maj@k too, for which
    --temperature must be above 0. After each number stands its 95 % interval.
    """
    from asyncgrpo.cli.options import one_or_all
    from asyncgrpo.cli.running import check_inputs
    from asyncgrpo.config.load import load_config
    from asyncgrpo.environments.build import with_tools
    from asyncgrpo.learner.checkpoints import model_folder

    folder = model_folder(Path(checkpoint))
    settings = [
        f"model.path={folder}",
        f"data.train={data[0]}",
        f"data.eval={one_or_all(data)}",
        f"generators.engine={engine}",
        f"sampling.max_tokens={max_tokens}",
        f"sampling.eval_temperature={temperature}",
        f"sampling.eval_completions={rollout_n}",
        f"reward.success={success}",
        *_fit_to_machine(folder, max_tokens),
    ]
    if reward_func is not None:
        settings.append(f"reward.function={one_or_all(reward_func)}")
    if unsafe_rewards:
        settings.append("reward.code.unsafe=true")
    config = with_tools(load_config(None, [*settings, *(overrides or [])]))
    check_inputs(config)
    report = asyncio.run(_evaluate(config))
    if as_json:
        print_json(report)
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    """A table of the suites, and below it what is of all completions."""
    from rich.console import Console
    from rich.table import Table

    suites = report["suites"]
    numbers = list(dict.fromkeys(name for suite in suites.values() for name in suite["numbers"]))
    table = Table("suite", "prompts", *numbers, box=None, pad_edge=False, header_style="dim")
    for name, suite in suites.items():
        cells = [_with_interval(suite["numbers"].get(number)) for number in numbers]
        table.add_row(name, str(suite["prompts"]), *cells)
    Console(highlight=False).print(table)
    mean = f"{report['reward_mean']:.4f}" if report["reward_mean"] is not None else "none"
    typer.echo(f"{report['completions']} completions to {report['prompts']} prompts, mean reward {mean}")
    sources = report["by_source"].items() if len(report["by_source"]) > 1 else ()
    for name, mean in [(source or "(no source)", mean) for source, mean in sources]:
        typer.echo(f"  {name}: {mean:.4f}")
    for name, suite in suites.items():
        if suite["parts"]:
            typer.echo(
                f"  parts of {name}: " + ", ".join(f"{part} {mean:.4f}" for part, mean in suite["parts"].items())
            )
    for failure, count in report["failures"].items():
        typer.echo(f"  without a score ({failure}): {count}")


def _with_interval(estimate: Sequence[float | None] | None) -> str:
    if estimate is None:
        return "-"
    value, low, high = estimate
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def _fit_to_machine(folder: Path, max_tokens: int) -> list[str]:
    """Settings for a machine without a GPU, and for prompts that fit into the model's context with a completion."""
    import torch

    from asyncgrpo.config.schema import DataConfig

    settings = [] if torch.cuda.is_available() else ["generators.gpus_each=0", "model.dtype=float32"]
    context = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    default = DataConfig(train="").max_prompt_tokens
    if context is not None and max_tokens < context < default + max_tokens:
        settings.append(f"data.max_prompt_tokens={context - max_tokens}")
    return settings


async def _evaluate(config: Config) -> dict[str, Any]:
    """The report of an evaluation: of each suite, and of all completions."""
    from asyncgrpo.buffer.suites import Scored, Suite
    from asyncgrpo.data.kept import Several
    from asyncgrpo.data.prompts import load_prompts
    from asyncgrpo.data.tokenizer import load_tokenizer

    tokenizer, limit = load_tokenizer(config.model.path, config.data.chat_template_kwargs), config.data.eval_rows
    tables = {
        name: load_prompts(file, name, tokenizer, config.data, limit=limit) for name, file in config.data.suites.items()
    }
    rollouts = iter(await _rollouts(config, tokenizer, Several(list(tables.values()))))
    suites = {name: Suite(config.reward.success) for name in tables}
    by_source: dict[str, list[float]] = defaultdict(list)
    for name, prompts in tables.items():
        for prompt in prompts:
            group = next(rollouts)
            suites[name].add(prompt.source, [Scored(r.score, r.text, len(r.completion.token_ids)) for r in group])
            by_source[prompt.source] += [r.score.value for r in group if r.score.value is not None]
    values = [value for suite in suites.values() for value in suite.rewards]
    results = {name: suite.result() for name, suite in suites.items()}
    return {
        "prompts": sum(map(len, tables.values())),
        "completions": sum(suite.completions for suite in results.values()),
        "reward_mean": statistics.fmean(values) if values else None,
        "by_source": {source: statistics.fmean(scores) for source, scores in sorted(by_source.items()) if scores},
        "failures": dict(sum((Counter(suite.failures) for suite in results.values()), Counter())),
        "suites": {name: suite.fields() for name, suite in results.items()},
    }


async def _rollouts(
    config: Config, tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[Prompt]
) -> list[tuple[Rollout, ...]]:
    """The rollouts of each prompt. At most `generators.groups_in_flight` prompts are sampled at once."""
    from asyncgrpo.data.tokenizer import decoder, stop_token_ids
    from asyncgrpo.engines.build import build_engine
    from asyncgrpo.generators.build import build_sampler
    from asyncgrpo.generators.rollout import GroupInFlight
    from asyncgrpo.generators.service import UNPUBLISHED
    from asyncgrpo.rewards.build import build_reward

    decode = decoder(tokenizer, keep_special=False)
    sampling = Sampling(
        temperature=config.sampling.eval_temperature,
        max_tokens=config.sampling.max_tokens,
        stop_token_ids=stop_token_ids(tokenizer, config.model.path, config.sampling.stop),
    )
    completions = config.sampling.eval_completions
    engine = build_engine(config, seed=config.run.seed)
    reward = build_reward(config.reward)
    turns = build_sampler(config, engine, tokenizer)
    await engine.start(UNPUBLISHED)
    slots = asyncio.Semaphore(config.generators.groups_in_flight)

    async def rollouts(index: int) -> tuple[Rollout, ...]:
        lease = Lease(
            lease_id=f"eval.{index}",
            group_id=f"eval.{index}",
            attempt=0,
            prompt_index=index,
            purpose="eval",
            prompt=prompts[index],
            num_completions=completions,
            sampling=sampling,
            seed=config.run.seed + index * completions,
        )
        async with slots:
            sampler = engine if turns is None else turns.of(lease.prompt)
            return (await GroupInFlight(lease, sampler, reward, decode).generate("eval")).rollouts

    try:
        return await asyncio.gather(*map(rollouts, range(len(prompts))))
    finally:
        await reward.close()
        if turns is not None:
            await turns.close()
        await engine.close()
