"""`asyncgrpo replay`: trains a run again from its journal, bitwise identical or with another correction."""

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncgrpo.cli.options import AlgorithmOption
from asyncgrpo.cli.output import JsonOption, print_json

if TYPE_CHECKING:  # importing the learner imports torch
    from asyncgrpo.tools.replay import Pair, Replayed, Timeline


def register(app: typer.Typer) -> None:
    """Add `replay`."""
    app.command("replay", epilog="Example: asyncgrpo replay runs/demo --with 'algorithm.corrections=[]'")(replay)


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, of a run with buffer.keep_journal=true.")],
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="KEY=VALUE", help="Change a key of algorithm or learner; repeatable."),
    ] = None,
    algorithm: AlgorithmOption = None,
    from_step: Annotated[
        int, typer.Option("--from-step", min=0, help="Begin with the checkpoint of this step; 0: the model's folder.")
    ] = 0,
    to_step: Annotated[int | None, typer.Option("--to-step", min=1, help="Last step; none: all there are.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Of the folder in RUN/replays; none: the next number.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a run again from its journal, and compare every step.

    Without a change every number must be bitwise identical (on a CPU); the command exits with 1 if one is not. With --with
    or --algorithm both trainings are shown side by side: the same groups in the same order, and another objective.
    """
    from asyncgrpo.recording.curves import plot
    from asyncgrpo.recording.progress import progress_of
    from asyncgrpo.tools.replay import Replay, read_timeline, replay_config

    timeline = read_timeline(run, from_step=from_step, to_step=to_step)
    configs = [replay_config(leg.config, with_ or (), algorithm=algorithm) for leg in timeline.legs]
    is_changed = configs != [leg.config for leg in timeline.legs]
    changes = [*([f"--algorithm {algorithm}"] if algorithm else []), *(with_ or [])]
    folder = _folder(run, name)
    table = None if as_json else _SideBySide() if is_changed else _Equality()
    if table is not None:
        typer.echo(_what(timeline, changes if is_changed else []))

    def show(pair: "Pair") -> None:
        if table is not None:
            typer.echo(f"{table.head}\n{table.row(pair)}" if pair.step == from_step + 1 else table.row(pair))

    result = Replay(timeline, configs, folder, changes).run(show)
    events = folder / "metrics.jsonl"
    plot(progress_of(events), folder / "curves.png")
    if table is None:
        print_json(_as_json(result, folder, changes if is_changed else []))
    else:
        typer.echo(table.last_line(result))
        typer.echo(f"written: {events}")
    if not is_changed and not result.is_equal:
        raise typer.Exit(1)


def _folder(run: Path, name: str | None) -> Path:
    from asyncgrpo.errors import ConfigError

    below = run / "replays"
    if name is None:
        return next(folder for number in count(1) if not (folder := below / str(number)).exists())
    if Path(name).name != name:
        raise ConfigError(f"--name {name} is not the name of a folder")
    if (below / name).exists():
        raise ConfigError(f"--name {name}: {below / name} exists; give another name")
    return below / name


def _what(timeline: "Timeline", changes: list[str]) -> str:
    steps = list(timeline.steps)
    groups = sum(len(step.groups) for step in steps)
    starts = len(timeline.legs)
    text = f"{timeline.run}: steps {steps[0].number} to {steps[-1].number} of {starts} start{'s' * (starts > 1)}, "
    text += f"{groups:,} groups, from {timeline.checkpoint or timeline.legs[0].config.model.path}"
    return f"{text}\nreplayed with {', '.join(changes)}" if changes else text


class _Equality:
    """The table of a replay without changes: whether each step is bitwise identical."""

    head = f"{'step':>6}  {'loss, recorded':<24}{'loss, replayed':<24}every field"

    def row(self, pair: "Pair") -> str:
        recorded, replayed = pair.values("loss")
        if pair.recorded is None:
            verdict = "not recorded"
        elif pair.differences:
            more = f" and {len(pair.differences) - 3} more" if len(pair.differences) > 3 else ""
            verdict = f"DIFFERENT: {', '.join(pair.differences[:3])}{more}"
        else:
            verdict = "equal"
        return f"{pair.step:>6}  {_exact(recorded):<24}{_exact(replayed):<24}{verdict}"

    def last_line(self, result: "Replayed") -> str:
        different = [pair for pair in result.pairs if pair.differences]
        compared = result.num_compared
        if not compared:
            return "metrics.jsonl has none of these steps: nothing was compared"
        if different:
            first = different[0]
            recorded, replayed = first.values(first.differences[0])
            return (
                f"{len(different)} of {compared} steps differ, the first is step {first.step}: {first.differences[0]} was "
                f"{_exact(recorded)} and is {_exact(replayed)}"
            )
        if result.other_weights:
            return f"all {compared} steps are equal, but the weights {', '.join(result.other_weights)} differ"
        weights = f"; so are the weights {', '.join(result.same_weights)}" if result.same_weights else ""
        return f"all {compared} steps are bitwise identical{weights}"


class _SideBySide:
    """The table of a replay with changes: two objectives on the same groups."""

    def __init__(self) -> None:
        from asyncgrpo.tools.replay import QUANTITIES

        self._quantities = QUANTITIES
        names = "".join(f"{name:^20}" for name in QUANTITIES.values())
        sides = f"{'recorded':>10}{'replayed':>10}" * len(QUANTITIES)
        self.head = f"{'':>6}{'':>8}{'':>6}{names}".rstrip() + f"\n{'step':>6}{'reward':>8}{'lag':>6}{sides}"

    def row(self, pair: "Pair") -> str:
        cells = "".join(f"{_short(v):>10}" for field in self._quantities for v in pair.values(field))
        return f"{pair.step:>6}{pair.replayed['reward_mean']:>8.3f}{_mean_lag(pair):>6.2f}{cells}"

    def last_line(self, result: "Replayed") -> str:
        from asyncgrpo.tools.replay import means

        parts = []
        for field, name in self._quantities.items():
            recorded, replayed = means(result.pairs, field)
            parts.append(f"{name} {_short(recorded)} -> {_short(replayed)}")
        return f"means over {len(result.pairs)} steps, recorded -> replayed: {', '.join(parts)}"


def _mean_lag(pair: "Pair") -> float:
    from asyncgrpo.recording.progress import mean_lag

    return mean_lag({int(lag): count for lag, count in pair.replayed["lags"].items()})


def _exact(value: object) -> str:
    return "-" if value is None else repr(value)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _as_json(result: "Replayed", folder: Path, changes: list[str]) -> dict[str, object]:
    from asyncgrpo.tools.replay import QUANTITIES

    steps = []
    for pair in result.pairs:
        sides = {name: pair.values(name) for name in QUANTITIES}
        steps.append(
            {
                "step": pair.step,
                "recorded": {name: recorded for name, (recorded, _) in sides.items()},
                "replayed": {name: replayed for name, (_, replayed) in sides.items()},
                "differences": pair.differences,
            }
        )
    return {
        "folder": str(folder),
        "with": changes,
        "equal": result.is_equal,
        "weights": {"equal": result.same_weights, "different": result.other_weights},
        "steps": steps,
    }
