"""Commands for one run: watch and steer it (`status`, `top`, `page`, `pause` to `set`), print its samples, and verify it.

`audit` compares the files of a run, `replay` trains again from its journal.
"""

import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from asyncgrpo.cli.options import AlgorithmOption, JsonOption, example, print_fact, print_json, shorten
from asyncgrpo.config.explain import counted
from asyncgrpo.errors import ConfigError, RunNotAlive
from asyncgrpo.logs import visible

if TYPE_CHECKING:
    from rich.console import Group

    from asyncgrpo.control.client import Command, Look
    from asyncgrpo.tools.replay import Pair, Replayed, Timeline

app = typer.Typer()

RUNS = Path("runs")
"""Searched for active runs if the command names none."""
REFRESH_S = 1.0
"""Interval of `top`."""

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

    looks = [Look(run) for run in _active(runs)]
    for look in looks:
        look.refresh()
        if look.status is None:
            raise RunNotAlive(look.silence)
    if as_json:
        found = [{"status": x.status, "problems": x.problems, "last_step": x.progress.last} for x in looks]
        return print_json(msgspec.to_builtins(found))
    typer.echo("\n\n".join(visible(_status(look)) for look in looks))


def _status(look: "Look") -> str:
    now = look.status
    assert now is not None
    rows = [("step", f"{look.position}, start number {now.lineage}"), *look.rows()]
    rows.append(("settings", ", ".join(f"{key}={value}" for key, value in now.settings.items())))
    odd = [p for p in now.processes if p.state != "working" and now.state != "starting"]
    rows += [("process", f"{p.name} is {p.state}, {counted(p.restarts, 'restart')}") for p in odd]
    rows += [("advice", text) for text in look.advice()]
    rows += [("problem", text) for text in look.warnings()]
    return "\n".join([f"{now.run}: {now.state}", *(f"  {name:<11}{text}" for name, text in rows)])


@app.command("top", epilog=example("top"))
def top(runs: RunsArgument = None) -> None:
    """Watch active runs in the terminal until Ctrl-C. If the output is not a terminal, print them once."""
    from rich.console import Console
    from rich.live import Live

    from asyncgrpo.control.client import Look

    looks, console = [Look(run) for run in _active(runs)], Console()
    if not console.is_terminal:
        console.print(panels(looks))
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(panels(looks), refresh=True)
            time.sleep(REFRESH_S)


def panels(looks: "Sequence[Look]") -> "Group":
    from rich.console import Group

    from asyncgrpo.recording.screen import panel

    shown = []
    for look in looks:
        look.refresh()
        notes = [("advice", text, "green") for text in look.advice()]
        notes += [("problems", text, "bold yellow") for text in look.warnings()]
        shown.append(panel(look.progress, f"{look.name}  step {look.position}", look.state, look.rows(), notes))
    return Group(*shown)


@app.command("page", epilog=example("page runs/demo"))
def page(run: RunArgument = None) -> None:
    """Print the URL of a run's page.

    The URL contains the access token of the run, with which the run can be viewed and steered.
    """
    from asyncgrpo.control.client import RunClient, one_run

    typer.echo(RunClient(one_run(run, RUNS)).page)


def _active(runs: list[Path] | None) -> list[Path]:
    from asyncgrpo.control.client import alive_in, not_alive

    found = runs or alive_in(RUNS)
    if not found:
        raise RunNotAlive(f"no run in {RUNS}/ is active; name a run folder")
    for run in found:
        if not (run / "metrics.jsonl").exists():
            raise RunNotAlive(not_alive(run))
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

    These can change: learner.lr, buffer.max_lag and generators.groups_in_flight. All of the given ones change or none. The
    next start uses the values of its own configuration.
    """
    from asyncgrpo.control.client import ChangeSettings

    given = dict(text.split("=", 1) for text in arguments if "=" in text)
    settings = {key: _number(value) for key, value in given.items()}
    runs = [Path(text) for text in arguments if "=" not in text]
    if not settings or len(runs) > 1:
        raise typer.BadParameter("give one or more KEY=VALUE and at most one run folder")
    try:
        command = ChangeSettings(settings=settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for key, value in given.items():
        if not math.isfinite(settings[key]):
            raise ConfigError(f"{key}={value}: {value!r} is not a number")
    _send(runs[0] if runs else None, command)


def _number(text: str) -> float | int:
    """Return the number in a text; NaN if there is none."""
    try:
        return msgspec.convert(text, type=int | float, strict=False)
    except msgspec.ValidationError:
        return math.nan


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
    sort: Literal["best", "worst", "file"] = "best" if best else "worst" if worst else "file"
    rows = search(run, step, folder=EVALS if evals else TRAINED, sort=sort, limit=sys.maxsize).rows
    chosen = _distinct(random.Random(0).sample(rows, len(rows)) if at_random else rows)[:limit]
    for row in chosen:
        if as_json:
            print_json(row, indent=None)
            continue
        texts = {"prompt": row["prompt"], "completion": _marked(row), "ground truth": row["ground_truth"]}
        if files := json.loads(row["images"]):
            texts |= {"images": " ".join(str(run / file) for file in files)}
        typer.secho(visible(_headline(row)), fg=_colour(row), bold=True)
        for name, text in texts.items():
            text = str(text).strip()
            print_fact(f"  {name}", text if full else shorten(text, 600))
        typer.echo()
    if as_json:
        return
    shown = sum(row["count"] for row in chosen)
    different = f" ({len(chosen)} different)" if shown > len(chosen) else ""
    of_step = rows[0]["step"] if rows else "?"
    typer.secho(f"{shown} of the {len(rows)} completions of step {of_step}{different}", dim=True)
    rewards = {row["reward"] for row in rows if row["reward"] is not None}
    if len(rewards) == 1 and not evals:
        typer.secho(f"all completions of this step have reward {rewards.pop():g}: no training signal", dim=True)


def _distinct(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge rows with the same prompt, completion and reward; `count` is how many there were."""
    keys = [(row["prompt"], row["images"], row["completion"], row["reward"]) for row in rows]
    counts = Counter(keys)
    return [row | {"count": counts.pop(key)} for key, row in zip(keys, rows, strict=True) if key in counts]


def _marked(row: dict[str, Any]) -> str:
    """Return the completion with each reply of an environment as `[environment: reply]`."""
    text = str(row["completion"])
    for start, end in reversed(json.loads(row["observed"])):
        text = f"{text[:start]}[environment: {text[start:end]}]{text[end:]}"
    return text


def _headline(row: dict[str, Any]) -> str:
    reward = f"failed: {row['failure']}" if row["reward"] is None else f"reward {row['reward']:g}"
    advantage = "not trained" if row["advantage"] is None else f"advantage {row['advantage']:+.3f}"
    oldest, newest = row["version_oldest"], row["version_newest"]
    weights = f"weights {oldest}" if oldest == newest else f"weights {oldest} to {newest}"
    ended = f"{counted(row['num_tokens'], 'token')}, {row['finish_reason']}"
    times = f"  x{row['count']}" if row["count"] > 1 else ""
    return f"{row['prompt_id']}{times}  {reward}  {advantage}  lag {row['lag']} ({weights})  {ended}"


def _colour(row: dict[str, Any]) -> str:
    if row["reward"] is None:
        return "yellow"
    return "green" if (row["advantage"] or row["reward"]) > 0 else "red"


# -- verify a run ------------------------------------------------------------------------------------------------------


@app.command("audit", epilog=example("audit runs/demo"))
def audit(run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")], as_json: JsonOption = False) -> None:
    """Check that no group of a run was lost or trained twice.

    Check also that no prompt was skipped and that no group exceeded the maximum lag. Exits with 1 on a difference.
    """
    from asyncgrpo.tools.audit import audit as check

    found = check(run)
    if as_json:
        print_json(msgspec.to_builtins(found, str_keys=True))
    else:
        starts, prompts = counted(found.starts, "start"), counted(found.prompts_done, "prompt")
        typer.echo(f"{run}: {starts}, newest checkpoint at step {found.step}, {prompts} done")
        typer.echo(f"{'fate':<16}{'groups':>10}{'tokens':>14}")
        for fate, groups in found.groups.most_common():
            typer.echo(f"{fate:<16}{groups:>10,}{found.tokens[fate]:>14,}")
        typer.echo(f"{'delivered':<16}{found.groups.total():>10,}{found.tokens.total():>14,}")
        lags = ", ".join(f"{count} at {lag}" for lag, count in sorted(found.lags.items()))
        typer.echo(f"groups trained by lag: {lags or 'none'}")
        for difference in found.differences:
            typer.echo(f"difference: {difference}")
        typer.echo(counted(len(found.differences), "difference") if found.differences else "no difference")
    if found.differences:
        raise typer.Exit(1)


# -- replay ------------------------------------------------------------------------------------------------------------


@app.command("replay", epilog=example("replay runs/demo --with 'algorithm.corrections=[]'"))
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with buffer.keep_journal=true.")],
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="KEY=VALUE", help="Change a key of algorithm or learner; repeatable."),
    ] = None,
    algorithm: AlgorithmOption = None,
    from_step: Annotated[
        int, typer.Option("--from-step", min=0, help="Start from the checkpoint of this step; 0: from the model.")
    ] = 0,
    to_step: Annotated[int | None, typer.Option("--to-step", min=1, help="Last step. Default: the newest.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a run again from its journal and compare each step.

    Without a change, every number must be bitwise identical (on a CPU); otherwise the command exits with 1. With --with or
    --algorithm, print both objectives side by side on the same groups in the same order.
    """
    from asyncgrpo.recording.curves import plot
    from asyncgrpo.recording.events import read_events
    from asyncgrpo.tools.replay import Replay, read_timeline, replay_config

    timeline = read_timeline(run, from_step=from_step, to_step=to_step)
    configs = [replay_config(leg.config, with_ or (), algorithm=algorithm) for leg in timeline.legs]
    is_changed = configs != [leg.config for leg in timeline.legs]
    changes = [*([f"--algorithm {algorithm}"] if algorithm else []), *(with_ or [])] if is_changed else []
    folder = next(folder for n in count(1) if not (folder := run / "replays" / str(n)).exists())
    table = SideBySide() if is_changed else Equality()
    if not as_json:
        typer.echo(f"{_replayed(timeline, changes)}\n{table.head}")

    def show(pair: "Pair") -> None:
        if not as_json:
            typer.echo(table.row(pair))

    result = Replay(timeline, configs, folder, changes).run(show)
    events = folder / "metrics.jsonl"
    plot(read_events(events), folder / "curves.png")
    if as_json:
        print_json(_as_json(result, folder, changes))
    else:
        typer.echo(table.last_line(result))
        typer.echo(f"written: {events}")
    if not is_changed and not result.is_equal:
        raise typer.Exit(1)


def _replayed(timeline: "Timeline", changes: list[str]) -> str:
    steps = list(timeline.steps)
    groups = counted(sum(len(step.groups) for step in steps), "group")
    text = f"{timeline.run}: steps {steps[0].number} to {steps[-1].number} of {counted(len(timeline.legs), 'start')}, "
    text += f"{groups}, from {timeline.checkpoint or timeline.legs[0].config.model.path}"
    return f"{text}\nreplayed with {', '.join(changes)}" if changes else text


class Equality:
    """Table of a replay without changes: each step is bitwise identical or names its differences."""

    head = f"{'step':>6}  {'loss, recorded':<24}{'loss, replayed':<24}every field"

    def row(self, pair: "Pair") -> str:
        recorded, replayed = map(_exact, pair.values("loss"))
        verdict = "equal" if pair.recorded is not None else "not recorded"
        if pair.differences:
            more = f" and {len(pair.differences) - 3} more" if len(pair.differences) > 3 else ""
            verdict = f"DIFFERENT: {', '.join(pair.differences[:3])}{more}"
        return f"{pair.step:>6}  {recorded:<24}{replayed:<24}{verdict}"

    def last_line(self, result: "Replayed") -> str:
        different = [pair for pair in result.pairs if pair.differences]
        compared = result.num_compared
        if not compared:
            return "metrics.jsonl contains none of these steps: nothing was compared"
        if different:
            first, name = different[0], different[0].differences[0]
            recorded, replayed = map(_exact, first.values(name))
            steps = f"{len(different)} of {compared} steps differ, first at step {first.step}"
            return f"{steps}: {name} was {recorded} and is {replayed}"
        if result.other_weights:
            return f"all {compared} steps are equal, but the weights {', '.join(result.other_weights)} differ"
        weights = f"; so are the weights {', '.join(result.same_weights)}" if result.same_weights else ""
        return f"all {compared} steps are bitwise identical{weights}"


QUANTITIES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "clip_ratio": "clip share",
    "diagnostics.kl_k3": "KL to samplers",
    "diagnostics.ess_token": "ESS",
}
"""Fields of a step that are shown side by side, and their labels. ESS is a share of the tokens."""


class SideBySide:
    """Table of a replay with changes: two objectives on the same groups."""

    head = f"{'':20}" + "".join(f"{name:^20}" for name in QUANTITIES.values()).rstrip()
    head += f"\n{'step':>6}{'reward':>8}{'lag':>6}" + f"{'recorded':>10}{'replayed':>10}" * len(QUANTITIES)

    def row(self, pair: "Pair") -> str:
        from asyncgrpo.recording.progress import lags_of, mean_lag

        cells = "".join(f"{_short(value):>10}" for field in QUANTITIES for value in pair.values(field))
        return f"{pair.step:>6}{pair.replayed['reward_mean']:>8.3f}{mean_lag(lags_of(pair.replayed)):>6.2f}{cells}"

    def last_line(self, result: "Replayed") -> str:
        from asyncgrpo.tools.replay import means

        both = {name: map(_short, means(result.pairs, field)) for field, name in QUANTITIES.items()}
        parts = ", ".join(f"{name} {' -> '.join(sides)}" for name, sides in both.items())
        return f"means over {len(result.pairs)} steps, recorded -> replayed: {parts}"


def _exact(value: object) -> str:
    return "-" if value is None else repr(value)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _as_json(result: "Replayed", folder: Path, changes: list[str]) -> dict[str, object]:
    def side(pair: "Pair", which: int) -> dict[str, object]:
        return {name: pair.values(name)[which] for name in QUANTITIES}

    steps = [
        {"step": p.step, "recorded": side(p, 0), "replayed": side(p, 1), "differences": p.differences}
        for p in result.pairs
    ]
    weights = {"equal": result.same_weights, "different": result.other_weights}
    return {"folder": str(folder), "with": changes, "equal": result.is_equal, "weights": weights, "steps": steps}
