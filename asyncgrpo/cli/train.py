"""`asyncgrpo train` and `asyncgrpo serve`: a run from flags, and a run without an end from a file."""

import typer
from rich.console import Console

from asyncgrpo.cli import options
from asyncgrpo.cli.output import command, same_command


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(
        "train",
        epilog="Example: asyncgrpo train --model Qwen/Qwen3-8B --data gsm8k.parquet --reward-func my_reward.py --n-gpus 8",
    )(train)
    app.command("serve", epilog="Example: asyncgrpo serve configs/one_node_8gpu.yaml run.out=/data/runs/gsm8k")(serve)


def train(
    model: options.ModelOption = None,
    data: options.DataOption = None,
    eval_data: options.EvalDataOption = None,
    reward_func: options.RewardFuncOption = None,
    unsafe_rewards: options.UnsafeRewardsOption = False,
    rollout_n: options.RolloutNOption = None,
    epochs: options.EpochsOption = None,
    steps: options.StepsOption = None,
    n_gpus: options.NGpusOption = None,
    lr: options.LrOption = None,
    kl_coef: options.KlCoefOption = None,
    max_lag: options.MaxLagOption = None,
    algorithm: options.AlgorithmOption = None,
    engine: options.EngineOption = None,
    out: options.OutOption = None,
    config: options.ConfigOption = None,
    observe: options.ObserveOption = False,
    dry_run: options.DryRunOption = False,
    overrides: options.SettingsArgument = None,
) -> None:
    """Train a model on a file of prompts. The same command goes on after an interruption."""
    from asyncgrpo.cli.running import choose_folder, execute, preview
    from asyncgrpo.config.load import load_config
    from asyncgrpo.environments.build import with_tools

    folder = choose_folder("runs/train", out)
    settings = options.train_overrides(
        model=model,
        data=data,
        eval_data=eval_data,
        reward_func=reward_func,
        unsafe_rewards=unsafe_rewards,
        rollout_n=rollout_n,
        epochs=epochs,
        steps=steps,
        n_gpus=n_gpus,
        lr=lr,
        kl_coef=kl_coef,
        max_lag=max_lag,
        engine=engine,
        out=str(folder),
        explicit=overrides or (),
    )
    if n_gpus:
        settings += options.fitted(load_config(config, settings, algorithm=algorithm), n_gpus, overrides or ())
    resolved = with_tools(load_config(config, settings, algorithm=algorithm, tell=typer.echo))
    if dry_run:
        return preview(resolved, algorithm)
    finished = execute(resolved, Console(), algorithm=algorithm, observe=observe)
    if finished.status == "done":
        typer.echo(f"next: {command('samples', finished.run_dir)}")
    else:
        typer.echo(f"to go on: {same_command(None if out else folder)}")


def serve(
    config: options.ConfigArgument,
    overrides: options.SettingsArgument = None,
    algorithm: options.AlgorithmOption = None,
    observe: options.ObserveOption = False,
    dry_run: options.DryRunOption = False,
) -> None:
    """Train without an end, until SIGTERM or Ctrl-C.

    Either signal finishes the step in flight, writes a checkpoint and exits with 0. The same command goes on from the
    newest checkpoint. `run.steps` and `run.epochs` count only on the command line.
    """
    from asyncgrpo.cli.running import execute, preview
    from asyncgrpo.config.load import load_config
    from asyncgrpo.environments.build import with_tools

    settings = ["run.steps=null", "run.epochs=null", *(overrides or [])]
    resolved = with_tools(load_config(config, settings, algorithm=algorithm, tell=typer.echo))
    if dry_run:
        return preview(resolved, algorithm)
    finished = execute(resolved, Console(), algorithm=algorithm, observe=observe)
    typer.echo(f"{finished.status}: {finished.run_dir}")
    if finished.status != "done":
        typer.echo(f"to go on: {same_command()}")
