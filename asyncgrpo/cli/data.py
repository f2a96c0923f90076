"""`asyncgrpo data check`: what a data file looks like to a run, before a run is started on it."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from asyncgrpo.cli.output import JsonOption, print_json, visible


def register(app: typer.Typer) -> None:
    """Add `data check`."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name="data", help="Look at data files.", epilog="Example: asyncgrpo data check train.parquet")
    group.command("check", epilog="Example: asyncgrpo data check train.parquet --model Qwen/Qwen3-8B")(check)


def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Parquet, JSONL or JSON file of prompts.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="As for a run: data.columns.prompt=question", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Renders and counts as this model's tokenizer does.")
    ] = None,
    reward_func: Annotated[
        str | None, typer.Option("--reward-func", help="Python file with compute_score, or FILE:NAME.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Which schema a file has, one prompt as the model will see it, prompt lengths, and one answer scored."""
    import msgspec

    from asyncgrpo.config_loading import load_config
    from asyncgrpo.data.check import check_file
    from asyncgrpo.rewards import build_reward
    from asyncgrpo.types import Prompt, Score

    base = {"model": {"path": model or ""}, "data": {"train": file}, "reward": {"function": reward_func}}
    config = load_config(None, overrides or (), base=base)
    with asyncio.Runner() as runner:  # one loop for all calls: the workers of a reward belong to it
        reward = build_reward(config.reward)

        def score(prompt: Prompt, answer: str) -> Score:
            return runner.run(reward.score(prompt, answer))

        try:
            report = check_file(file, model, config.data, score=score)
        finally:
            runner.run(reward.close())
    values = msgspec.to_builtins(report)
    if as_json:
        print_json(values)
        return
    for name, value in values.items():
        typer.echo(_line(name.replace("_", " "), value))


def _line(name: str, value: Any) -> str:
    """One fact of the report; a text of several lines is indented below its name."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} {number}" for key, number in value.items()) or "none"
    text = visible(str(value))
    if "\n" not in text:
        return f"{name:18} {text}"
    return f"{name}\n" + "\n".join(f"    {line}" for line in text.splitlines())
