"""Start a run: `train` from flags, `serve` from a file, `demo` without any input."""

import math
import os
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, cast

import typer

from asyncgrpo.cli import options
from asyncgrpo.cli.options import command, example, same_command
from asyncgrpo.errors import ConfigError
from asyncgrpo.host import importing

if TYPE_CHECKING:
    from asyncgrpo.config.schema import Config

app = typer.Typer()

UNDER_CHAOS = [
    "cluster.silent_timeout_s=6",  # the demo model restarts in seconds, a large one loads for minutes
    "weights.timeout_s=10",  # a publication waits this long for a generator that hangs
    "generators.restarts=1000000",  # --chaos asks for many restarts an hour
    "run.checkpoint_every=5",
    "run.eval_every=50",
]

ONLY_DISTILLED = [
    "reward.weights=[0]",  # the reward is a part of the score with no weight: it is measured, and not trained on
    "algorithm.entropy_coef=0",
    "data.eval=null",
    "run.steps=60",
]


@app.command(
    "train", epilog=example("train --model Qwen/Qwen3-8B --data gsm8k.parquet --reward-func my_reward.py --n-gpus 8")
)
def train(
    ctx: typer.Context,
    model: options.ModelOption = None,
    data: Annotated[str | None, typer.Option("--data", help=f"Training prompts: {options.PROMPTS}.")] = None,
    eval_data: Annotated[
        list[str] | None, typer.Option("--eval-data", help="Held-out prompts to evaluate during training; repeatable.")
    ] = None,
    reward_func: options.RewardFuncOption = None,
    unsafe_rewards: options.UnsafeRewardsOption = False,
    rollout_n: Annotated[int | None, typer.Option("--rollout-n", help="Completions per prompt, at least 2.")] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", help="Passes over the training data; unlimited with only --steps.")
    ] = None,
    steps: options.StepsOption = None,
    n_gpus: Annotated[
        int | None,
        typer.Option(
            "--n-gpus", min=0, help="GPUs to split between generators and learner; 1: share it, 0: use the CPU."
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")] = None,
    kl_coef: Annotated[
        float | None, typer.Option("--kl-coef", help="Weight of the KL to the initial model; 0: none.")
    ] = None,
    max_lag: options.MaxLagOption = None,
    algorithm: options.AlgorithmOption = None,
    engine: options.EngineOption = None,
    out: options.OutOption = None,
    config: Annotated[str | None, typer.Option("--config", help=options.FILE)] = None,
    dry_run: options.DryRunOption = False,
    overrides: options.SettingsArgument = None,
) -> None:
    """Train a model on a file of prompts. Repeat the command to resume an interrupted run."""
    from asyncgrpo.cluster.folder import unused
    from asyncgrpo.config.load import COMMAND_LINE, complete, load_config

    settings = options.train_overrides(**ctx.params, explicit=overrides or ())
    base = {"run": {"out": "runs/train"}}
    found = load_config(config, settings, base=base, algorithm=algorithm, is_complete=False)
    changes = {} if n_gpus is None else options.placed(found, n_gpus, overrides or ())
    folder = None if "run.out" in options.keys_of(settings) else unused(Path(found.run.out))
    if folder is not None:
        changes["run.out"] = str(folder)
    _start(complete(found, config or COMMAND_LINE, changes), algorithm, folder=folder, dry_run=dry_run)


@app.command("serve", epilog=example("serve configs/one_node_8gpu.yaml run.out=/data/runs/gsm8k"))
def serve(
    config: options.ConfigArgument,
    overrides: options.SettingsArgument = None,
    algorithm: options.AlgorithmOption = None,
    dry_run: options.DryRunOption = False,
) -> None:
    """Train until SIGTERM or Ctrl-C.

    Either signal finishes the current step, writes a checkpoint and exits with 0. Repeat the command to resume from the
    newest checkpoint. `run.steps` and `run.epochs` take effect only on the command line.
    """
    from asyncgrpo.config.load import load_config

    settings = ["run.steps=null", "run.epochs=null", *(overrides or [])]
    _start(load_config(config, settings, algorithm=algorithm), algorithm, dry_run=dry_run)


def _start(config: "Config", algorithm: str | None, *, folder: Path | None = None, dry_run: bool) -> None:
    """Run or preview a configuration. `folder` is the run folder if the command line did not name it."""
    from asyncgrpo.cli.running import execute, preview
    from asyncgrpo.environments.build import with_tools

    config = with_tools(config)
    if dry_run:
        return preview(config, algorithm)
    _print_next(execute(config, algorithm=algorithm), config.run.out, folder)


def _print_next(status: str, out: str, folder: Path | None) -> None:
    """Print the command for the samples of a finished run, or the one that resumes an interrupted run."""
    from asyncgrpo.cli.running import Output

    done, run_dir = status == "done", Path(out).absolute()
    text = f"next: {command('samples', run_dir, '--best')}" if done else f"to resume: {same_command(folder)}"
    typer.echo(text, file=cast(IO[str], Output()))


# -- demo --------------------------------------------------------------------------------------------------------------


@app.command("demo", epilog=example("demo --engine torch --max-lag 0"))
def demo(
    engine: options.EngineOption = None,
    max_lag: options.MaxLagOption = None,
    algorithm: options.AlgorithmOption = None,
    steps: options.StepsOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the model, the task and the sampling.")] = 0,
    out: options.OutOption = None,
    teacher: Annotated[
        bool, typer.Option("--teacher", help="Distil from a teacher that solves the task; the reward is only measured.")
    ] = False,
    chaos: Annotated[
        float | None,
        typer.Option(
            "--chaos",
            metavar="PER_HOUR",
            help="Inject this many faults per hour (kill, freeze, network partition, full disk), then run the audit.",
            show_default=False,
        ),
    ] = None,
    faults: Annotated[str | None, typer.Option("--faults", hidden=True, help="Faults for --chaos, in order.")] = None,
    overrides: options.SettingsArgument = None,
) -> None:
    """Train a small model from scratch, without a GPU or a download.

    The run has all components of a cluster run: Ray, SGLang, ZeroMQ, FSDP2, weight broadcast. It creates a random Qwen3
    and a task in the run folder.
    """
    from asyncgrpo.cli.look import audit
    from asyncgrpo.cli.running import execute
    from asyncgrpo.cluster.folder import unused
    from asyncgrpo.config.load import algorithm_file, load_config

    if algorithm is not None:
        algorithm_file(algorithm)  # refuse an unknown name before a model is made
    if chaos is not None and not 0 < chaos < math.inf:
        raise ConfigError(f"--chaos {chaos:g}: faults per hour must be a number above 0")
    folder = unused(Path("runs/demo")) if out is None else Path(out)
    settings = [
        f"run.seed={seed}",
        f"learner.ranks={2 if (os.cpu_count() or 1) >= 4 else 1}",
        "buffer.keep_journal=true",  # small enough to keep, and allows a replay
        *options.train_overrides(engine=engine or _best_engine(), max_lag=max_lag, steps=steps, out=str(folder)),
        *(UNDER_CHAOS if chaos is not None else []),
    ]
    if teacher:
        algorithm = algorithm or "distill"
        settings = [*ONLY_DISTILLED, f"algorithm.teacher={(folder / 'teacher').absolute()}", *settings]
    settings += [f"model.path={(folder / 'model').absolute()}"]
    settings += [
        f"data.{split}={folder / 'data' / split}.jsonl" for split in (["train"] if teacher else ["train", "eval"])
    ]
    config = load_config("quickstart", [*settings, *(overrides or [])], algorithm=algorithm)
    is_made = (folder / "model" / "config.json").exists()
    if not is_made:
        seconds = 15 if config.generators.engine == "sglang" else 10
        typer.echo(f"creating a small random Qwen3 and its task in {folder}; the first step takes about {seconds} s")
        if teacher:
            typer.echo("its teacher is a larger model, which is trained on all answers first, for some seconds")
    plan = None
    if chaos is not None:
        from asyncgrpo.cluster.chaos import Plan  # imports ray

        plan = Plan(per_hour=chaos, seed=seed, faults=tuple(faults.split(",")) if faults else ())
    make = None if is_made else partial(_make, folder, seed, has_teacher=teacher)
    status = execute(config, algorithm=algorithm, make=make, chaos=plan)
    if chaos is not None:
        audit(Path(config.run.out).absolute())
    _print_next(status, config.run.out, None if out else folder)


def _best_engine() -> str:
    """Return `sglang`, or `torch` if SGLang cannot run here. Prints the reason."""
    from asyncgrpo.engines.build import why_sglang_cannot_run

    why = why_sglang_cannot_run()
    if why is None:
        return "sglang"
    typer.echo(f"using the torch engine: {why}")
    return "torch"


def _make(folder: Path, seed: int, *, has_teacher: bool = False) -> None:
    from asyncgrpo.data.demo import make_demo_model, make_demo_teacher, write_demo_task

    data = folder / "data"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    data.mkdir(exist_ok=True)
    with importing():
        make_demo_model(folder / "model", seed=seed)
        if has_teacher:
            make_demo_teacher(folder / "teacher", seed=seed + 1)
    write_demo_task(data / "train.jsonl", data / "eval.jsonl", seed=seed)
