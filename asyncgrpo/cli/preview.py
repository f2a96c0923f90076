"""`--dry-run`: what a run would do and need. Nothing is started and nothing written; what the run would refuse is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import typer

from asyncgrpo.config import Config


def preview(config: Config, algorithm: str | None = None, *, shown: Config | None = None) -> None:
    """Look at everything that `execute` looks at before it starts, and print it.

    Args:
        algorithm: name of the preset that `config` was made with.
        shown: where the files of `config` only stand for those of the run: the configuration that names these.
    Raises:
        AsyncGRPOError: what the run would end with, in one sentence.
    """
    from asyncgrpo.cli.preflight import check_run
    from asyncgrpo.cluster.folder import RunFolder
    from asyncgrpo.cluster.starts import look
    from asyncgrpo.config_help import sizes_in_words

    check_run(config)
    folder = RunFolder(Path(config.run.out))
    folder.check_free()
    standing = look(config, folder)
    rows = [*_files(config, shown or config), ("processes", _processes(config)), ("GPUs", _gpus(config))]
    begins = ["new: it would begin at step 0"] if standing.is_new else standing.lines(config.run.out)
    rows += [("folder" if i == 0 else "", line) for i, line in enumerate([str(folder.path), *begins])]
    typer.echo(sizes_in_words(config, algorithm))
    for name, text in rows:
        typer.echo(f"{name:<11} {text}")
    typer.echo("dry run: nothing was started, and nothing was written")


def _files(config: Config, shown: Config) -> Iterator[tuple[str, str]]:
    from asyncgrpo.config_checks import local_model
    from asyncgrpo.data.prompts import load_prompts
    from asyncgrpo.data.tokenizer import load_tokenizer

    tokenizer = None
    if (model := local_model(config.model.path)) is not None:
        tokenizer = load_tokenizer(config.model.path)
        yield "model", str(model.absolute() if shown is config else Path(shown.model.path))
    else:
        yield "model", f"{shown.model.path}, to be downloaded: no prompt was counted"
    keys: tuple[Literal["train", "eval"], ...] = ("train", "eval")
    for key in keys:
        path: str | None = getattr(config.data, key)
        if path is None:
            continue
        text = str(Path(getattr(shown.data, key)).absolute())
        if tokenizer is not None:
            limit = config.data.eval_rows if key == "eval" else None
            loaded = load_prompts(path, key, tokenizer, config.data, limit=limit)
            text += f": {len(loaded.prompts):,} prompts, {loaded.dropped_too_long:,} longer than data.max_prompt_tokens"
        yield f"data.{key}", text
    yield "reward", config.reward.function or "by data_source"


def _processes(config: Config) -> str:
    from asyncgrpo.cluster.actors import uses_cuda

    generators = config.generators
    learner = "one GPU each" if uses_cuda(config) else "on CPU"
    engine = f"{generators.gpus_each} GPUs each" if generators.gpus_each else "on CPU"
    return (
        f"driver 1; buffer 1; learner {config.learner.ranks} ({learner}); generator {generators.count} "
        f"({generators.engine}, {engine}), with reward worker {config.reward.workers} each"
    )


def _gpus(config: Config) -> str:
    """How many it needs, of those that are here; `check_run` has compared the two."""
    import torch

    from asyncgrpo.cluster.actors import uses_cuda
    from asyncgrpo.cluster.placement import gpus_wanted

    wanted = gpus_wanted(config, learner_on_gpu=uses_cuda(config))
    if config.cluster.ray_address is not None:
        return f"{wanted} wanted, of the cluster at {config.cluster.ray_address}"
    return f"{wanted} wanted, {torch.cuda.device_count()} here"
