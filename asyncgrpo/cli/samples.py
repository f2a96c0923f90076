"""`asyncgrpo samples`: the completions of a step, with their rewards and their lag."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from asyncgrpo.cli.output import JsonOption, print_json, shorten
from asyncgrpo.logs import visible
from asyncgrpo.recording.sample_changes import Changed, Changes, changes
from asyncgrpo.recording.sample_search import EVALS, TRAINED, Folder, Row, files_of, read_table


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
    evals: Annotated[bool, typer.Option("--evals", help="Completions of evaluations instead of trained ones.")] = False,
    from_step: Annotated[
        int | None, typer.Option("--from", help="Step of an evaluation: print which held-out prompts changed since it.")
    ] = None,
    to_step: Annotated[
        int | None, typer.Option("--to", help="Step of the evaluation to compare it with; the newest without it.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Full texts, however long.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the completions of a step, with their rewards and lag.

    A completion that was sampled several times is shown once, with a count. --json prints one object on each line, with
    full texts. With --from or --to it prints the held-out prompts that are right in one of two evaluations only.
    """
    if best + worst + at_random > 1:
        raise typer.BadParameter("give one of --best, --worst and --random")
    length = None if full else 600
    if from_step is not None or to_step is not None:
        if step is not None or best or worst or at_random:
            raise typer.BadParameter(
                "--from and --to compare two evaluations; --step, --best, --worst, --random do not"
            )
        return _compare(changes(run, from_step, to_step), limit, length, as_json=as_json)
    rows = read_step(run, step, EVALS if evals else TRAINED)
    order: Literal["best", "worst", "random"] | None = (
        "best" if best else "worst" if worst else "random" if at_random else None
    )
    chosen = distinct(choose(rows, order))[:limit]
    if as_json:
        for row in chosen:
            print_json(row, indent=None)
        return
    _print(chosen, rows, length=length)


def read_step(run: Path, step: int | None = None, folder: Folder = TRAINED) -> list[Row]:
    """The rows of `step_NNNNNN.parquet` in a folder of the run, in the order of the file. Raises DataError."""
    return read_table(files_of(run, folder), run, step)[1].to_pylist()


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
        for name, said in (
            ("prompt", row["prompt"]),
            ("completion", _marked(row)),
            ("ground_truth", row["ground_truth"]),
        ):
            text = visible(str(said).strip())
            grid.add_row(f"  {name.replace('_', ' ')}", Text(text if length is None else shorten(text, length)))
        console.print(grid)
        console.print()
    for line in _last_lines(rows, of):
        console.print(Text(line, style="dim"))


def _marked(row: Row) -> str:
    """The completion, with what an environment said between `[environment: ` and `]`."""
    text = str(row["completion"])
    for start, end in reversed(json.loads(row.get("observed") or "[]")):  # a file of an older release has none
        text = f"{text[:start]}[environment: {text[start:end]}]{text[end:]}"
    return text


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


# -- two evaluations ---------------------------------------------------------------------------------------------------


def _compare(found: Changes, limit: int, length: int | None, *, as_json: bool) -> None:
    """Print the first `limit` prompts that were fixed and as many that were broken, or all that changed as JSON."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if as_json:
        for change in found.changed:
            print_json(msgspec.to_builtins(change), indent=None)
        return
    console = Console(highlight=False)
    shown = [change for way in ("fixed", "broken") for change in [c for c in found.changed if c.way == way][:limit]]
    for change in shown:
        is_fixed = change.way == "fixed"
        headline = f"{change.prompt_id}  {'wrong -> right' if is_fixed else 'right -> wrong'}  {_rewards(change)}"
        console.print(Text(headline, style="bold green" if is_fixed else "bold red"))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, text in (
            ("prompt", change.prompt),
            (f"step {found.from_step}", change.before.completion),
            (f"step {found.to_step}", change.after.completion),
            ("ground truth", change.ground_truth),
        ):
            text = visible(text.strip())
            grid.add_row(f"  {name}", Text(text if length is None else shorten(text, length)))
        console.print(grid)
        console.print()
    last = f"{found.prompts} prompts, step {found.from_step} to step {found.to_step}: {found.right_before} right, then "
    last += f"{found.right_after}; {found.fixed} went from wrong to right, {found.broken} from right to wrong"
    console.print(Text(last + (f" ({len(shown)} shown)" if len(shown) < len(found.changed) else ""), style="dim"))


def _rewards(change: Changed) -> str:
    before, after = (
        "none" if side.reward_mean is None else f"{side.reward_mean:g}" for side in (change.before, change.after)
    )
    return f"reward {before} -> {after}  weights {change.before.version} -> {change.after.version}"
