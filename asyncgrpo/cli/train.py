"""`asyncgrpo train` and `asyncgrpo serve`: a run from flags, and a run from a file."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(train)
    app.command()(serve)


def train(
    model: Annotated[str, typer.Option(help="folder of a Hugging Face model, or a hub id")],
    data: Annotated[str, typer.Option(help="training prompts: Parquet, JSONL or JSON")],
    eval_data: Annotated[str | None, typer.Option("--eval-data", "--eval_data", help="held-out prompts")] = None,
    reward_func: Annotated[
        str | None, typer.Option("--reward-func", "--reward_func", help="file with compute_score; none: rules by data_source")
    ] = None,
    rollout_n: Annotated[int | None, typer.Option("--rollout-n", "--rollout_n", help="answers to each prompt")] = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the file")] = None,
    steps: Annotated[int | None, typer.Option(help="optimizer steps; ends before the epochs do")] = None,
    n_gpus: Annotated[
        int | None, typer.Option("--n-gpus", "--n_gpus", help="GPUs, split between generators and learner; 0: CPU")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate")] = None,
    kl_coef: Annotated[float | None, typer.Option("--kl-coef", "--kl_coef", help="weight of the KL to the initial model")] = None,
    max_lag: Annotated[int | None, typer.Option("--max-lag", "--max_lag", help="optimizer steps; 0: synchronous")] = None,
    engine: Annotated[str | None, typer.Option(help="sglang or torch")] = None,
    out: Annotated[str | None, typer.Option(help="run folder; none: runs/train, runs/train-2, ...")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file, or the name of a shipped one, below the flags")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="any further knob; wins over flags")] = None,
) -> None:
    """Train a model on a file of prompts. The same command goes on after an interruption.

    Example: asyncgrpo train --model Qwen/Qwen3-8B --data gsm8k.parquet --reward-func my_reward.py --n-gpus 8
    """
    from asyncgrpo.cli.options import train_overrides
    from asyncgrpo.cli.running import choose_folder, execute
    from asyncgrpo.config_checks import check_model
    from asyncgrpo.config_files import find
    from asyncgrpo.config_loading import load_config

    settings = train_overrides(
        model=model,
        data=data,
        eval_data=eval_data,
        reward_func=reward_func,
        rollout_n=rollout_n,
        epochs=epochs,
        steps=steps,
        n_gpus=n_gpus,
        lr=lr,
        kl_coef=kl_coef,
        max_lag=max_lag,
        engine=engine,
        out=str(choose_folder("runs/train", out)),
    )
    resolved = load_config(find(config) if config else None, [*settings, *(overrides or [])])
    check_model(resolved)
    check_reward(resolved.reward.function)
    finished = execute(resolved, Console())
    next_ = f"asyncgrpo samples {finished.run_dir}" if finished.status == "done" else "the same command goes on from here"
    typer.echo(f"next: {next_}")


def serve(
    config: Annotated[str, typer.Argument(help="YAML file, or the name of a shipped one: quickstart, one_node_8gpu, ...")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="any knob; wins over the file")] = None,
) -> None:
    """Run without an end: until SIGTERM or Ctrl-C, which drain, write a checkpoint and exit with 0.

    Started again, it goes on from its newest checkpoint. `run.steps` and `run.epochs` count only on the command line.

    Example: asyncgrpo serve configs/one_node_8gpu.yaml run.out=/data/runs/gsm8k
    """
    from asyncgrpo.cli.running import execute
    from asyncgrpo.config_checks import check_model
    from asyncgrpo.config_files import find
    from asyncgrpo.config_loading import load_config

    resolved = load_config(find(config), ["run.steps=null", "run.epochs=null", *(overrides or [])])
    check_model(resolved)
    check_reward(resolved.reward.function)
    finished = execute(resolved, Console())
    typer.echo(f"{finished.status}: {Path(finished.run_dir)}")


def check_reward(function: str | None) -> None:
    """Find out now, not on a cluster, that a reward function cannot be loaded. Raises RewardError."""
    from asyncgrpo.rewards import check_user_function

    if function is not None:
        check_user_function(function)
