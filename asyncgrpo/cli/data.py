"""`asyncgrpo data check`: checks a data file before a run is started on it.

Every row goes through the same code as in a run, so a file that passes here loads there.
"""

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import typer

from asyncgrpo.cli.options import ModelOption, RewardFuncOption, one_or_all
from asyncgrpo.cli.output import JsonOption, print_json, shorten
from asyncgrpo.config.schema import Config, DataConfig
from asyncgrpo.data.prompts import all_too_long, open_source, rendered_rows
from asyncgrpo.data.rows import Record, Schema
from asyncgrpo.data.sources import DataRows
from asyncgrpo.data.tokenizer import Rendered, load_tokenizer
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.logs import visible
from asyncgrpo.rewards.rules import reference_of
from asyncgrpo.types import Frozen, Prompt, Score

# -- the report on a file ----------------------------------------------------------------------------------------------


class Lengths(Frozen):
    """How long the prompts are, in `CheckReport.unit`. A prompt far over the limit may count only its first tokens."""

    p50: int
    p90: int
    p99: int
    max: int


class CheckReport(Frozen):
    """What a data file holds."""

    file: str
    rows: int
    schema_name: str
    unit: Literal["tokens", "characters"]
    """Unit of the lengths. It is characters where no model was given."""
    lengths: Lengths
    max_prompt_tokens: int
    over_long: int | None
    """Rows that a run would drop; None without a tokenizer."""
    sources: dict[str, int]
    """Rows of each `data_source`, most frequent first."""
    answers_missing: int
    """Rows whose ground truth is null or an empty text."""
    first_missing: tuple[int, ...]
    """Up to `SHOWN_ROWS` of them, from 0."""
    prompt_text: str
    """Row 0 as the model would see it (without a tokenizer: its turns' contents)."""
    prompt_tokens: int | None
    """Tokens of row 0."""
    answer: str
    """Ground truth of row 0."""
    scored_answer: str | None
    """The text that the reward scored; None where no reward was given."""
    scored_as: str
    """What that text is; empty where it is the ground truth."""
    score: Score | None
    """Its score."""
    problem: str
    """Why a run would refuse the file, or the reward could not score row 0; empty where neither is so."""


SHOWN_ROWS = 10
"""Row numbers in a report."""


def check_file(
    path: str | Path,
    model_path: str | None,
    config: DataConfig,
    score: Callable[[Prompt, str], Score] | None = None,
    check_sources: Callable[[set[str]], object] = set,
) -> CheckReport:
    """Read a whole file as a run would.

    Args:
        model_path: model whose tokenizer and chat template are used. None: lengths are in characters.
        config: `columns`, `max_prompt_tokens` and `system_prompt` are used.
        score: a reward to try on row 0, with the ground truth as the completion; of code, with the row's solution.
        check_sources: of the reward; where it raises, the reward is not tried.
    Raises:
        DataError: the file or one of its rows cannot be used.
        ConfigError: the model's tokenizer cannot be loaded.
    """
    schema, rows = open_source(path, config)
    first, lengths, sources, missing = None, array("q"), Counter[str](), list[int]()
    for record, rendered in _rendered(path, schema, rows, model_path, config):
        first = first or (_prompt_of(record, rendered), rendered.text)
        if record.answer in (None, ""):
            missing.append(len(lengths))
        lengths.append(len(rendered.text if model_path is None else rendered.token_ids))
        sources[record.source] += 1
    assert first is not None, "a source has a row"
    prompt, prompt_text = first
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="higher")
    over_long = None if model_path is None else sum(length > config.max_prompt_tokens for length in lengths)
    reference, scored_as = reference_of(prompt)
    problem, scored = "", None
    try:
        if over_long == len(rows):
            raise all_too_long(path, len(rows), max(lengths), config)
        check_sources(set(sources))
    except AsyncGRPOError as error:
        problem = str(error)
    else:
        scored = None if score is None else score(prompt, reference)
    if scored is not None and scored.failure is not None:
        problem = f"{path}: the ground truth of row 0, as a completion, could not be scored{_why(scored)}"
    return CheckReport(
        file=str(path),
        rows=len(rows),
        schema_name=schema.name,
        unit="characters" if model_path is None else "tokens",
        lengths=Lengths(p50=int(p50), p90=int(p90), p99=int(p99), max=max(lengths)),
        max_prompt_tokens=config.max_prompt_tokens,
        over_long=over_long,
        sources=dict(sources.most_common()),
        answers_missing=len(missing),
        first_missing=tuple(missing[:SHOWN_ROWS]),
        prompt_text=prompt_text,
        prompt_tokens=None if model_path is None else lengths[0],
        answer="" if prompt.answer is None else str(prompt.answer),
        scored_answer=None if scored is None else reference,
        scored_as="" if scored is None else scored_as,
        score=scored,
        problem=problem,
    )


def _prompt_of(record: Record, rendered: Rendered) -> Prompt:
    return Prompt(
        prompt_id="check/0",
        token_ids=rendered.token_ids,
        text=record.prompt if isinstance(record.prompt, str) else "",
        turns=() if isinstance(record.prompt, str) else tuple(record.prompt),
        answer=record.answer,
        source=record.source,
        info=record.info,
    )


def _rendered(
    path: str | Path, schema: Schema, rows: DataRows, model_path: str | None, config: DataConfig
) -> Iterator[tuple[Record, Rendered]]:
    """Each record with its prompt as the model would see it; without a model, the contents of its turns."""
    if model_path is None:
        records = (schema.to_record(row, index) for index, row in enumerate(rows))
        return ((record, _without_template(record, config.system_prompt)) for record in records)
    tokenizer = load_tokenizer(model_path, config.chat_template_kwargs)
    return rendered_rows(path, schema, rows, tokenizer, config)


def _without_template(record: Record, system_prompt: str | None) -> Rendered:
    contents = [turn["content"] for turn in record.messages]
    if system_prompt is not None and all(turn["role"] != "system" for turn in record.messages):
        contents.insert(0, system_prompt)
    return Rendered("\n".join(contents), ())


# -- the command -------------------------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Add `data check`."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(group, name="data", help="Look at data files.", epilog="Example: asyncgrpo data check train.parquet")
    group.command("check", epilog="Example: asyncgrpo data check train.parquet --model Qwen/Qwen3-8B")(check)


def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Parquet, JSONL or JSON file of prompts, or hf:ID.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="As for a run: data.columns.prompt=question", show_default=False),
    ] = None,
    model: ModelOption = None,
    reward_func: RewardFuncOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a file can be read and scored, and show a prompt of it.

    It shows the schema, one prompt as the model will see it, the lengths of prompts, and the score of the ground truth as
    a completion; of code, that of the row's solution. Without a model, lengths are in characters. Exits with 1 when a
    run would refuse the file, or the reward cannot score.
    """
    from asyncgrpo.config.load import load_config

    base = {"model": {"path": model or ""}, "data": {"train": file}, "reward": {"function": one_or_all(reward_func)}}
    report, reward = _check(file, model, load_config(None, overrides or (), base=base))
    if as_json:
        print_json(msgspec.to_builtins(report) | {"reward": reward})
    else:
        _print(report, reward)
    if report.problem:
        raise AsyncGRPOError(report.problem)


def _check(file: str, model: str | None, config: Config) -> tuple[CheckReport, str]:
    """The report, and what scores in words."""
    from asyncgrpo.cli.running import REWARD_IMPORT_S
    from asyncgrpo.rewards.base import score_one
    from asyncgrpo.rewards.build import build_reward

    reward = build_reward(config.reward, import_timeout_s=REWARD_IMPORT_S)
    with asyncio.Runner() as runner:  # one loop for all calls: the workers of a reward belong to it

        def score(prompt: Prompt, answer: str) -> Score:
            return runner.run(score_one(reward, prompt, answer))

        try:
            return check_file(file, model, config.data, score, reward.check_sources), reward.about
        finally:
            runner.run(reward.close())


def _print(report: CheckReport, reward: str) -> None:
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
        "without answer": f"{report.answers_missing:,} rows{_listed(report)}",
        "reward": reward,
        "row 0, prompt": shorten(report.prompt_text, 2000),
        "row 0, answer": shorten(report.answer, 600),
    }
    if report.score is not None:
        value = f"{report.score.value:g}" if report.score.value is not None else f"no score{_why(report.score)}"
        why = f": {report.scored_as}" if report.scored_as else ""
        note = f"; {report.score.detail}" if report.score.value is not None and report.score.detail else ""
        facts["row 0, reward"] = f"{value} for `{shorten(report.scored_answer or '', 60)}` as the completion{why}{note}"
    for name, value in facts.items():
        first, *rest = visible(value).splitlines() or [""]
        typer.echo("\n".join([f"{name:16} {first}", *(f"{'':16} {line}" for line in rest)]))


def _listed(report: CheckReport) -> str:
    rows = ", ".join(map(str, report.first_missing))
    return f": {rows}{', ...' if report.answers_missing > SHOWN_ROWS else ''}" if rows else ""


def _why(score: Score) -> str:
    return f" ({score.failure}{f': {score.detail}' if score.detail else ''})"
