"""`asyncgrpo samples`: the completions of a step, with their rewards and their lag."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from asyncgrpo.cli.output import JsonOption, print_json, shorten
from asyncgrpo.errors import DataError
from asyncgrpo.logs import visible

Row = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Add `samples`."""
    app.command("samples", epilog="Example: asyncgrpo samples runs/demo --step 20 --worst --limit 3")(samples)


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[int | None, typer.Option("--step", help="Optimizer step; the newest without it.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    at_random: Annotated[bool, typer.Option("--random", help="A random choice, the same each time.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Completions to print.")] = 5,
    full: Annotated[bool, typer.Option("--full", help="Full texts, however long.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print prompts, completions, rewards and lag of one training step.

    A completion that was sampled several times is shown once, with a count. --json prints one object on each line, with
    full texts.
    """
    if best + worst + at_random > 1:
        raise typer.BadParameter("give one of --best, --worst and --random")
    rows = read_step(run, step)
    order: Literal["best", "worst", "random"] | None = (
        "best" if best else "worst" if worst else "random" if at_random else None
    )
    chosen = distinct(choose(rows, order))[:limit]
    if as_json:
        for row in chosen:
            print_json(row, indent=None)
        return
    _print(chosen, rows, length=None if full else 600)


def read_step(run: Path, step: int | None = None) -> list[Row]:
    """The rows of `RUN/samples/step_NNNNNN.parquet`, in the order of the file. Raises DataError."""
    files = {int(file.stem[5:]): file for file in (run / "samples").glob("step_*.parquet") if file.stem[5:].isdigit()}
    if not files:
        why = "it writes them after its first step" if run.is_dir() else "there is no such folder"
        raise DataError(f"{run} holds no samples/step_*.parquet: {why}")
    if step is not None and step not in files:
        there = f"there are steps {min(files)} to {max(files)} (run.keep_samples, run.samples_every)"
        raise DataError(f"{run} has no samples of step {step}; {there}")
    file = files[max(files) if step is None else step]

    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(file).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{file} cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from error


def choose(rows: list[Row], order: Literal["best", "worst", "random"] | None) -> list[Row]:
    """`rows` in the order asked for. For best and worst, completions without a reward come last."""
    if order is None:
        return rows
    if order == "random":
        return random.Random(0).sample(rows, len(rows))
    sign = -1 if order == "best" else 1
    return sorted(rows, key=lambda row: (row["reward"] is None, sign * (row["reward"] or 0.0)))


def distinct(rows: list[Row]) -> list[Row]:
    """`rows` without repetitions of the same prompt, completion and reward; `count` says how often each occurs."""
    counts = Counter(map(_alike, rows))
    first = {_alike(row): row for row in reversed(rows)}
    return [row | {"count": counts[_alike(row)]} for row in rows if row is first[_alike(row)]]


def _alike(row: Row) -> tuple[str, str, float | None]:
    return row["prompt"], row["completion"], row["reward"]


def _print(rows: list[Row], of: list[Row], length: int | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for row in rows:
        console.print(Text(_headline(row), style=_style(row)))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name in ("prompt", "completion", "ground_truth"):
            text = visible(str(row[name]).strip())
            grid.add_row(f"  {name.replace('_', ' ')}", Text(text if length is None else shorten(text, length)))
        console.print(grid)
        console.print()
    for line in _last_lines(rows, of):
        console.print(Text(line, style="dim"))


def _last_lines(rows: list[Row], of: list[Row]) -> Iterator[str]:
    """How much of the step was shown, and whether its rewards differ at all."""
    shown = sum(row["count"] for row in rows)
    different = f" ({len(rows)} different)" if shown > len(rows) else ""
    yield f"{shown} of the {len(of)} completions of step {of[0]['step'] if of else '?'}{different}"
    rewards = {row["reward"] for row in of if row["reward"] is not None}
    if len(rewards) == 1:
        yield f"every completion of this step has reward {rewards.pop():g}: none is better or worse"


def _headline(row: Row) -> str:
    reward = f"failed: {row['failure']}" if row["reward"] is None else f"reward {row['reward']:g}"
    advantage = "not trained" if row["advantage"] is None else f"advantage {row['advantage']:+.3f}"
    oldest, newest = row["version_oldest"], row["version_newest"]
    weights = f"weights {oldest}" if oldest == newest else f"weights {oldest} to {newest}"
    ended = f"{row['num_tokens']} tokens, {row['finish_reason']}"
    times = f"  x{row['count']}" if row["count"] > 1 else ""
    return f"{row['prompt_id']}{times}  {reward}  {advantage}  lag {row['lag']} ({weights})  {ended}"


def _style(row: Row) -> str:
    if row["reward"] is None:
        return "bold yellow"
    return "bold green" if (row["advantage"] or row["reward"]) > 0 else "bold red"
