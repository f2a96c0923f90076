"""`asyncgrpo export`: the Hugging Face folder of a run or a checkpoint, copied whole or not at all."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from asyncgrpo.cli.output import JsonOption, print_json, size_in_words
from asyncgrpo.errors import CheckpointError


def register(app: typer.Typer) -> None:
    """Add `export`."""
    app.command("export", epilog="Example: asyncgrpo export runs/demo exported-model")(export)


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="Run folder, or one checkpoint in it.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder for the model.")],
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint of this step instead of the final model.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a trained model out of a run.

    The folder is one that transformers and SGLang load. Of a run it is the final model, or the newest checkpoint while
    there is none.
    """
    model = find_model(source, step)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there already and not an empty folder; give a new one")
    if model.resolve() in folder.resolve().parents:
        raise CheckpointError(f"{folder} is inside {model}, which is to be copied; give a folder elsewhere")
    sizes = _copy(model, folder)
    if as_json:
        print_json({"from": str(model), "to": str(folder), "files": len(sizes), "bytes": sum(sizes)})
    else:
        typer.echo(f"copied {len(sizes)} files, {size_in_words(sum(sizes))}, from {model} to {folder}")


def find_model(source: Path, step: int | None = None) -> Path:
    """The folder with `config.json` and weights that `source` stands for. Raises CheckpointError."""
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
    """Copy beside `folder`, then rename: whoever sees `folder` sees all of it. Returns the size of each file."""
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
