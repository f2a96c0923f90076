"""Looks at a data file before a run does: what `asyncgrpo data check` reports, as plain values.

Every row goes through the same code as in a run, so a file that passes here loads there.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from asyncgrpo.config import DataConfig
from asyncgrpo.data.files import read_rows
from asyncgrpo.data.schemas import Record, recognise
from asyncgrpo.data.tokenizer import Rendered, load_tokenizer, render
from asyncgrpo.types import Frozen, Prompt, Score


class Lengths(Frozen):
    """How long the prompts are, in `CheckReport.unit`. One far over the limit may count with its first tokens only."""

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
    """Of the lengths: characters where no model was given."""
    lengths: Lengths
    max_prompt_tokens: int
    over_long: int | None
    """Rows that a run would drop; None without a tokenizer."""
    sources: dict[str, int]
    """Rows of each `data_source`, most frequent first."""
    answers_missing: int
    """Rows whose ground truth is null or an empty text."""
    prompt_text: str
    """Row 0 as the model would see it (without a tokenizer: its turns' contents)."""
    prompt_tokens: int | None
    """Tokens of row 0."""
    answer: str
    """Ground truth of row 0."""
    scored_answer: str | None
    """What `score` was asked about; None where no reward was given."""
    score: Score | None
    """What it said."""


def check_file(
    path: str | Path,
    model_path: str | None,
    config: DataConfig,
    score: Callable[[Prompt, str], Score] | None = None,
) -> CheckReport:
    """Read a whole file as a run would.

    Args:
        model_path: whose tokenizer and chat template to use; None: lengths in characters.
        config: `columns`, `max_prompt_tokens` and `system_prompt` are used.
        score: a reward to try on row 0, with the ground truth itself as the answer.
    Raises:
        DataError: the file or one of its rows cannot be used.
        ConfigError: the model's tokenizer cannot be loaded.
    """
    rows = read_rows(path)
    schema = recognise(rows, config.columns, str(path))
    records = [schema.to_record(row, index) for index, row in enumerate(rows)]
    first = records[0]
    if model_path is None:
        rendered = [_without_template(record, config.system_prompt) for record in records]
        lengths = [len(text) for text, _ in rendered]
    else:
        tokenizer = load_tokenizer(model_path)
        rendered = [
            render(
                tokenizer,
                record.messages,
                config.system_prompt,
                where=f"{path}, row {index}",
                longest=config.max_prompt_tokens,
            )
            for index, record in enumerate(records)
        ]
        lengths = [len(token_ids) for _, token_ids in rendered]

    scored_answer = str(first.answer) if score is not None else None
    prompt = Prompt(
        prompt_id="check/0",
        token_ids=rendered[0].token_ids,
        answer=first.answer,
        source=first.source,
        info=first.info,
    )
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="higher")
    return CheckReport(
        file=str(path),
        rows=len(rows),
        schema_name=schema.name,
        unit="characters" if model_path is None else "tokens",
        lengths=Lengths(p50=int(p50), p90=int(p90), p99=int(p99), max=max(lengths)),
        max_prompt_tokens=config.max_prompt_tokens,
        over_long=None if model_path is None else sum(length > config.max_prompt_tokens for length in lengths),
        sources=dict(Counter(record.source for record in records).most_common()),
        answers_missing=sum(record.answer is None or record.answer == "" for record in records),
        prompt_text=rendered[0].text,
        prompt_tokens=None if model_path is None else lengths[0],
        answer="" if first.answer is None else str(first.answer),
        scored_answer=scored_answer,
        score=score(prompt, scored_answer) if score is not None and scored_answer is not None else None,
    )


def _without_template(record: Record, system_prompt: str | None) -> Rendered:
    contents = [turn["content"] for turn in record.messages]
    if system_prompt is not None and all(turn["role"] != "system" for turn in record.messages):
        contents.insert(0, system_prompt)
    return Rendered("\n".join(contents), ())
