"""`asyncgrpo demo`: the whole system on this machine, with a small model and a task that it makes itself."""

import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from asyncgrpo.cli import options
from asyncgrpo.cli.output import command, same_command
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import ConfigError
from asyncgrpo.importing import importing

if TYPE_CHECKING:
    from asyncgrpo.tools.chaos import Plan

UNDER_CHAOS = [
    "cluster.silent_timeout_s=6",  # the small model is up again in seconds; a large one loads for minutes
    "weights.timeout_s=10",  # a publication waits so long for a member that hangs
    "generators.restarts=1000000",  # --chaos asks for many restarts an hour
    "run.checkpoint_every=5",
    "run.eval_every=50",
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo", epilog="Example: asyncgrpo demo --engine torch --max-lag 0")(demo)


def demo(
    engine: options.EngineOption = None,
    max_lag: options.MaxLagOption = None,
    algorithm: options.AlgorithmOption = None,
    steps: options.StepsOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the model, the task and the sampling.")] = 0,
    out: options.OutOption = None,
    chaos: Annotated[
        float | None,
        typer.Option(
            "--chaos",
            metavar="PER_HOUR",
            help="Kill, freeze and cut off processes on purpose, this often; then audit that no group was lost.",
            show_default=False,
        ),
    ] = None,
    faults: Annotated[
        str | None, typer.Option("--faults", hidden=True, help="These for --chaos, in this order.")
    ] = None,
    observe: options.ObserveOption = False,
    dry_run: options.DryRunOption = False,
    overrides: options.SettingsArgument = None,
) -> None:
    """Train a small model from nothing, without a GPU or a download.

    Everything is real: Ray, SGLang, ZeroMQ, FSDP2, weight broadcast. There is nothing to configure: it makes its own
    random Qwen3 and its own task in the run folder.
    """
    from asyncgrpo.cli.audit import report
    from asyncgrpo.cli.running import choose_folder, execute, preview
    from asyncgrpo.config.files import algorithm_file
    from asyncgrpo.config.load import load_config

    if algorithm is not None:
        algorithm_file(algorithm)  # refuse an unknown name before a model is made
    folder = choose_folder("runs/demo", out)
    settings = _settings(folder, seed, engine, max_lag=max_lag, steps=steps, chaos=chaos)

    def configured(files: Path, tell: Callable[[str], None] | None = None) -> Config:
        return load_config(
            "quickstart", [*settings, *_files_in(files), *(overrides or [])], algorithm=algorithm, tell=tell
        )

    config = configured(folder, typer.echo)
    is_made = (folder / "model" / "config.json").exists()
    if not is_made:
        typer.echo(f"{'would make' if dry_run else 'making'} a small random Qwen3 and its task in {folder}")
        if not dry_run:
            seconds = 15 if config.generators.engine == "sglang" else 10
            typer.echo(f"the first step takes about {seconds} s on two cores")
    if dry_run:
        with tempfile.TemporaryDirectory() as elsewhere:
            if not is_made:
                _make(Path(elsewhere), seed)
            return preview(configured(folder if is_made else Path(elsewhere)), algorithm, shown=config)
    finished = execute(
        config,
        Console(),
        algorithm=algorithm,
        make=None if is_made else partial(_make, folder, seed),
        chaos=_plan(chaos, seed, faults),
        observe=observe,
    )
    if chaos is not None:
        report(finished.run_dir)
    is_done = finished.status == "done"
    said = command("samples", finished.run_dir, "--best") if is_done else same_command(None if out else folder)
    typer.echo(f"{'next' if is_done else 'to go on'}: {said}")


def _settings(
    folder: Path, seed: int, engine: str | None, *, max_lag: str | None, steps: int | None, chaos: float | None
) -> list[str]:
    """The settings of the demo that its flags decide."""
    if chaos is not None and not 0 < chaos < math.inf:
        raise ConfigError(f"--chaos {chaos:g}: faults per hour must be a number above 0")
    settings = [
        f"run.out={folder}",
        f"run.seed={seed}",
        f"generators.engine={_choose_engine(engine)}",
        f"learner.ranks={2 if (os.cpu_count() or 1) >= 4 else 1}",
        "buffer.keep_journal=true",  # a demo is small, and can be replayed
    ]
    settings += [f"buffer.max_lag={max_lag}"] if max_lag is not None else []
    settings += [f"run.steps={steps}"] if steps is not None else []
    return settings + (UNDER_CHAOS if chaos is not None else [])


def _plan(chaos: float | None, seed: int, faults: str | None) -> "Plan | None":
    """The faults that `--chaos` asks for.

    Args:
        faults: kinds and actors in their order, between commas, as benchmarks/soak.py asks for them.
    """
    from asyncgrpo.tools.chaos import Plan

    order = tuple(faults.split(",")) if faults else ()
    return Plan(per_hour=chaos, seed=seed, faults=order) if chaos is not None else None


def _choose_engine(asked: str | None) -> str:
    """The engine asked for, or the best that can run here. Prints why if that is not SGLang."""
    if asked is not None:
        return asked
    from asyncgrpo.engines.installed import why_sglang_cannot_run

    why = why_sglang_cannot_run()
    if why is None:
        return "sglang"
    typer.echo(f"using the torch engine: {why}")
    return "torch"


def _files_in(folder: Path) -> list[str]:
    """Settings that name the files of `_make`."""
    return [
        f"model.path={(folder / 'model').absolute()}",
        f"data.train={folder / 'data' / 'train.jsonl'}",
        f"data.eval={folder / 'data' / 'eval.jsonl'}",
    ]


def _make(folder: Path, seed: int) -> None:
    from asyncgrpo.data.demo import make_demo_model, write_demo_task

    folder.mkdir(0o700, parents=True, exist_ok=True)
    data = folder / "data"
    data.mkdir(exist_ok=True)
    with importing():
        make_demo_model(folder / "model", seed=seed)
    write_demo_task(data / "train.jsonl", data / "eval.jsonl", seed=seed)
