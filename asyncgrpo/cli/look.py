"""Watch and steer active runs, and print their samples: `status`, `top`, `page`, `pause` to `set`, `samples`."""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from asyncgrpo.cli.options import JsonOption, example, print_json, shorten
from asyncgrpo.errors import ConfigError, RunNotAlive
from asyncgrpo.logs import visible

if TYPE_CHECKING:
    from asyncgrpo.control.client import Command, Look

app = typer.Typer()

RUNS = Path("runs")
"""Searched for active runs if the command names none."""

RunArgument = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="Run folder. Default: the only active run in runs/.")
]
RunsArgument = Annotated[
    list[Path] | None, typer.Argument(metavar="RUN", help="Run folders. Default: all active runs in runs/.")
]

_PLAIN = {
    "pause": "Pause a run.\n\nIssue no leases and start no steps until `resume`. Work in flight is finished and kept.",
    "resume": "Resume a paused run.",
    "drain": "Finish the current step, write a checkpoint and exit.\n\nSame as SIGTERM. The run exits with code 0.",
    "checkpoint": "Write a checkpoint after the current step.",
    "evaluate": "Evaluate on data.eval after the current step.\n\nTo evaluate a saved model, use the command eval.",
}
"""Commands that take nothing but a run, and their help."""


# -- watch -------------------------------------------------------------------------------------------------------------


@app.command("status", epilog=example("status runs/demo --json"))
def status(runs: RunsArgument = None, as_json: JsonOption = False) -> None:
    """Show the status of active runs.

    Print metrics, processes, settings, advice with its commands, and problems with their runbooks.
    """
    from asyncgrpo.control.client import Look

    looks = []
    for run in _active(runs):
        look = Look(run)
        look.refresh()
        if look.status is None:
            raise RunNotAlive(look.silence)
        looks.append(look)
    if as_json:
        builtins = msgspec.to_builtins
        return print_json(
            [
                {"status": builtins(x.status), "problems": builtins(x.problems), "last_step": x.progress.last}
                for x in looks
            ]
        )
    typer.echo("\n\n".join(visible(_status(look)) for look in looks))


def _status(look: "Look") -> str:
    now = look.status
    assert now is not None
    rows = [("step", f"{look.position}, start number {now.lineage}"), *look.rows()]
    rows.append(("settings", ", ".join(f"{key}={value}" for key, value in now.settings.items())))
    odd = [p for p in now.processes if p.state != "working" and now.state != "starting"]
    rows += [("process", f"{p.name} is {p.state}, {p.restarts} restarts") for p in odd]
    rows += [("advice", text) for text in look.advice()]
    rows += [("problem", text) for text in look.warnings()]
    return "\n".join([f"{now.run}: {now.state}", *(f"  {name:<11}{text}" for name, text in rows)])


@app.command("top", epilog=example("top"))
def top(runs: RunsArgument = None) -> None:
    """Watch active runs in the terminal. Keys: q quits, p pauses, r resumes (both ask first), tab selects the next run."""
    from asyncgrpo.control.top import watch

    watch(_active(runs))


@app.command("page", epilog=example("page runs/demo"))
def page(run: RunArgument = None) -> None:
    """Print the URL of a run's page.

    The URL contains the access token of the run, with which the run can be viewed and steered.
    """
    from asyncgrpo.control.client import RunClient, one_run

    typer.echo(RunClient(one_run(run, RUNS)).page)


def _active(runs: list[Path] | None) -> list[Path]:
    from asyncgrpo.control.client import alive_in

    found = runs or alive_in(RUNS)
    if not found:
        raise RunNotAlive(f"no run in {RUNS}/ is active; name a run folder")
    return found


# -- steer -------------------------------------------------------------------------------------------------------------


def _plain(name: str, does: str) -> None:
    @app.command(name, help=does, epilog=example(f"{name} runs/demo"))
    def send(run: RunArgument = None) -> None:
        from asyncgrpo.control.client import Command

        _send(run, msgspec.convert({"command": name}, type=Command))


for _name, _does in _PLAIN.items():
    _plain(_name, _does)


@app.command("scale", epilog=example("scale generators 4 runs/demo"))
def scale(
    what: Annotated[Literal["generators"], typer.Argument(metavar="generators", help="The component to scale.")],
    count: Annotated[int, typer.Argument(metavar="N", min=1, max=4096, help="New number of generators.")],
    run: RunArgument = None,
) -> None:
    """Change the number of generators of a run.

    The bounds are generators.min and generators.max. Training continues meanwhile.
    """
    from asyncgrpo.control.client import Scale

    _send(run, Scale(generators=count))


@app.command("set", epilog=example("set learner.lr=1e-6 buffer.max_lag=2 runs/demo"))
def change(
    arguments: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE... [RUN]", help="New values. RUN is as in the other commands.")
    ],
) -> None:
    """Change settings of an active run.

    All of them change or none. The next start uses the values of its own configuration.
    """
    from asyncgrpo.control.client import ChangeSettings

    settings: dict[str, float | int] = {}
    for text in (text for text in arguments if "=" in text):
        key, _, value = text.partition("=")
        try:
            settings[key] = msgspec.convert(value, type=int | float, strict=False)
        except msgspec.ValidationError:
            raise ConfigError(f"{text}: {value!r} is not a number") from None
    runs = [Path(text) for text in arguments if "=" not in text]
    if not settings or len(runs) > 1:
        raise typer.BadParameter("give one or more KEY=VALUE and at most one run folder")
    try:
        command = ChangeSettings(settings=settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _send(runs[0] if runs else None, command)


def _send(run: Path | None, command: "Command") -> None:
    from asyncgrpo.control.client import RunClient, one_run

    typer.echo(visible(RunClient(one_run(run, RUNS)).send(command)))


# -- samples -----------------------------------------------------------------------------------------------------------


@app.command("samples", epilog=example("samples runs/demo --step 20 --worst --limit 3"))
def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[int | None, typer.Option("--step", help="Optimizer step. Default: the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Print the highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Print the lowest rewards first.")] = False,
    at_random: Annotated[bool, typer.Option("--random", help="Print a random choice with a fixed seed.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Number of completions to print.")] = 5,
    evals: Annotated[bool, typer.Option("--evals", help="Print completions of evaluations.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print texts in full.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print completions of a step with their rewards and lag.

    Identical completions are printed once, with a count. --json prints one object per line, with full texts.
    """
    from asyncgrpo.recording.samples import EVALS, TRAINED, search

    if best + worst + at_random > 1:
        raise typer.BadParameter("give only one of --best, --worst and --random")
    length = None if full else 600
    sort: Literal["best", "worst", "file"] = "best" if best else "worst" if worst else "file"
    rows = search(run, step, folder=EVALS if evals else TRAINED, sort=sort, limit=sys.maxsize).rows
    chosen = _distinct(random.Random(0).sample(rows, len(rows)) if at_random else rows)[:limit]
    if as_json:
        for row in chosen:
            print_json(row, indent=None)
        return
    for row in chosen:
        texts = {"prompt": row["prompt"], "completion": _marked(row), "ground truth": row["ground_truth"]}
        _print_card(_headline(row), _style(row), texts, length)
    shown = sum(row["count"] for row in chosen)
    different = f" ({len(chosen)} different)" if shown > len(chosen) else ""
    _print_note(f"{shown} of the {len(rows)} completions of step {rows[0]['step'] if rows else '?'}{different}")
    rewards = {row["reward"] for row in rows if row["reward"] is not None}
    if len(rewards) == 1:
        _print_note(f"all completions of this step have reward {rewards.pop():g}: they give no training signal")


def _distinct(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge rows with the same prompt, completion and reward; `count` is how many there were."""
    keys = [(row["prompt"], row["completion"], row["reward"]) for row in rows]
    counts = Counter(keys)
    return [row | {"count": counts.pop(key)} for key, row in zip(keys, rows, strict=True) if key in counts]


def _marked(row: dict[str, Any]) -> str:
    """Return the completion with each reply of an environment as `[environment: reply]`."""
    text = str(row["completion"])
    for start, end in reversed(json.loads(row.get("observed") or "[]")):  # older releases wrote none
        text = f"{text[:start]}[environment: {text[start:end]}]{text[end:]}"
    return text


def _headline(row: dict[str, Any]) -> str:
    reward = f"failed: {row['failure']}" if row["reward"] is None else f"reward {row['reward']:g}"
    advantage = "not trained" if row["advantage"] is None else f"advantage {row['advantage']:+.3f}"
    oldest, newest = row["version_oldest"], row["version_newest"]
    weights = f"weights {oldest}" if oldest == newest else f"weights {oldest} to {newest}"
    ended = f"{row['num_tokens']} tokens, {row['finish_reason']}"
    times = f"  x{row['count']}" if row["count"] > 1 else ""
    return f"{row['prompt_id']}{times}  {reward}  {advantage}  lag {row['lag']} ({weights})  {ended}"


def _style(row: dict[str, Any]) -> str:
    if row["reward"] is None:
        return "bold yellow"
    return "bold green" if (row["advantage"] or row["reward"]) > 0 else "bold red"


def _print_card(headline: str, style: str, texts: dict[str, str], length: int | None) -> None:
    """Print a headline and the texts below it, each cut to `length` characters. Control characters are escaped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in texts.items():
        text = visible(str(text).strip())
        grid.add_row(f"  {name}", Text(text if length is None else shorten(text, length)))
    console = Console(highlight=False)
    console.print(Text(headline, style=style))
    console.print(grid)
    console.print()


def _print_note(line: str) -> None:
    typer.secho(line, dim=True)
