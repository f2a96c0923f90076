"""`asyncgrpo data check`: what a data file looks like to a run, before a run is started on it."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from asyncgrpo.cli.options import ModelOption, RewardFuncOption
from asyncgrpo.cli.output import JsonOption, print_json, shorten
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.logs import visible

if TYPE_CHECKING:
    from asyncgrpo.config import Config
    from asyncgrpo.data.check import CheckReport
    from asyncgrpo.types import Score


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
    model: ModelOption = None,
    reward_func: RewardFuncOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a file can be read and scored, and show a prompt of it.

    It tells the schema, one prompt as the model will see it, the lengths of prompts, and what a right answer scores.
    Without a model, lengths are in characters. Exits with 1 when rows have no schema or the reward cannot score.
    """
    import msgspec

    from asyncgrpo.config_loading import load_config

    base = {"model": {"path": model or ""}, "data": {"train": file}, "reward": {"function": reward_func}}
    report = _check(file, model, load_config(None, overrides or (), base=base))
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        _print(report)
    if report.score is not None and report.score.failure is not None:
        raise AsyncGRPOError(
            f"{file}: the ground truth of row 0, as an answer, could not be scored{_why(report.score)}"
        )


def _check(file: str, model: str | None, config: "Config") -> "CheckReport":
    from asyncgrpo.cli.preflight import REWARD_IMPORT_S
    from asyncgrpo.data.check import check_file
    from asyncgrpo.data.demo import demo_rules
    from asyncgrpo.rewards import build_reward
    from asyncgrpo.types import Prompt, Score

    reward = build_reward(config.reward, extra_rules=demo_rules(), import_timeout_s=REWARD_IMPORT_S)
    with asyncio.Runner() as runner:  # one loop for all calls: the workers of a reward belong to it

        def score(prompt: Prompt, answer: str) -> Score:
            return runner.run(reward.score(prompt, answer))

        try:
            return check_file(file, model, config.data, score=score)
        finally:
            runner.run(reward.close())


def _print(report: "CheckReport") -> None:
    lengths, limit = report.lengths, report.max_prompt_tokens
    sources = ", ".join(f"{source or '(none)'} {count:,}" for source, count in report.sources.items())
    dropped = f"; {report.over_long:,} longer than {limit}, which a run drops" if report.over_long is not None else ""
    facts = {
        "file": report.file,
        "rows": f"{report.rows:,}",
        "schema": report.schema_name,
        "data_source": sources,
        "prompt lengths": f"{report.unit}: half up to {lengths.p50:,}, 90 % up to {lengths.p90:,}, "
        f"99 % up to {lengths.p99:,}, longest {lengths.max:,}{dropped}",
        "without answer": f"{report.answers_missing:,} rows",
        "row 0, prompt": shorten(report.prompt_text, 2000),
        "row 0, answer": shorten(report.answer, 600),
    }
    if report.score is not None:
        value = f"{report.score.value:g}" if report.score.value is not None else f"no score{_why(report.score)}"
        facts["row 0, reward"] = f"{value} for `{shorten(report.scored_answer or '', 60)}` as the answer"
    for name, value in facts.items():
        first, *rest = visible(value).splitlines() or [""]
        typer.echo("\n".join([f"{name:16} {first}", *(f"{'':16} {line}" for line in rest)]))


def _why(score: "Score") -> str:
    return f" ({score.failure}{f': {score.detail}' if score.detail else ''})"
