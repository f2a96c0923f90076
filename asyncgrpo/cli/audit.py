"""Verify a run from its files: `audit` compares them, `replay` trains again from the journal."""

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncgrpo.cli.options import AlgorithmOption, JsonOption, example, print_json

if TYPE_CHECKING:  # importing the learner imports torch
    from asyncgrpo.tools.replay import Pair, Replayed, Timeline

app = typer.Typer()


@app.command("audit", epilog=example("audit runs/demo"))
def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    as_json: JsonOption = False,
) -> None:
    """Check that no group of a run was lost or trained twice.

    Check also that no prompt was skipped and that no group exceeded the maximum lag. Exits with 1 on a difference.
    """
    from asyncgrpo.tools.audit import audit as check

    found = check(run)
    fates = [fate for fate, _ in found.groups.most_common()]
    if as_json:
        print_json(
            {
                "step": found.step,
                "starts": found.starts,
                "prompts_done": found.prompts_done,
                "groups": {fate: found.groups[fate] for fate in fates},
                "tokens": {fate: found.tokens[fate] for fate in fates},
                "lags": {str(lag): count for lag, count in sorted(found.lags.items())},
                "differences": found.differences,
            }
        )
    else:
        typer.echo(
            f"{run}: {found.starts} starts, newest checkpoint at step {found.step}, {found.prompts_done} prompts done"
        )
        typer.echo(f"{'fate':<16}{'groups':>10}{'tokens':>14}")
        for fate in fates:
            typer.echo(f"{fate:<16}{found.groups[fate]:>10,}{found.tokens[fate]:>14,}")
        typer.echo(f"{'delivered':<16}{found.groups.total():>10,}{found.tokens.total():>14,}")
        lags = ", ".join(f"{count} at {lag}" for lag, count in sorted(found.lags.items()))
        typer.echo(f"groups trained by lag: {lags or 'none'}")
        for difference in found.differences:
            typer.echo(f"difference: {difference}")
        typer.echo(f"{len(found.differences)} differences" if found.differences else "no difference")
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
    changes = [*([f"--algorithm {algorithm}"] if algorithm else []), *(with_ or [])]
    folder = next(folder for n in count(1) if not (folder := run / "replays" / str(n)).exists())
    table = SideBySide() if is_changed else Equality()
    if not as_json:
        typer.echo(_replayed(timeline, changes if is_changed else []))

    def show(pair: "Pair") -> None:
        if not as_json:
            typer.echo(f"{table.head}\n{table.row(pair)}" if pair.step == from_step + 1 else table.row(pair))

    result = Replay(timeline, configs, folder, changes).run(show)
    events = folder / "metrics.jsonl"
    plot(read_events(events), folder / "curves.png")
    if as_json:
        print_json(_as_json(result, folder, changes if is_changed else []))
    else:
        typer.echo(table.last_line(result))
        typer.echo(f"written: {events}")
    if not is_changed and not result.is_equal:
        raise typer.Exit(1)


def _replayed(timeline: "Timeline", changes: list[str]) -> str:
    """Describe the steps to replay, and the changes."""
    steps = list(timeline.steps)
    groups = sum(len(step.groups) for step in steps)
    starts = len(timeline.legs)
    text = f"{timeline.run}: steps {steps[0].number} to {steps[-1].number} of {starts} start{'s' * (starts > 1)}, "
    text += f"{groups:,} groups, from {timeline.checkpoint or timeline.legs[0].config.model.path}"
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


class SideBySide:
    """Table of a replay with changes: two objectives on the same groups."""

    def __init__(self) -> None:
        from asyncgrpo.tools.replay import QUANTITIES

        names = "".join(f"{name:^20}" for name in QUANTITIES.values())
        sides = f"{'recorded':>10}{'replayed':>10}" * len(QUANTITIES)
        self.head = f"{'':>6}{'':>8}{'':>6}{names}".rstrip() + f"\n{'step':>6}{'reward':>8}{'lag':>6}{sides}"

    def row(self, pair: "Pair") -> str:
        from asyncgrpo.recording.progress import lags_of, mean_lag
        from asyncgrpo.tools.replay import QUANTITIES

        cells = "".join(f"{_short(value):>10}" for field in QUANTITIES for value in pair.values(field))
        return f"{pair.step:>6}{pair.replayed['reward_mean']:>8.3f}{mean_lag(lags_of(pair.replayed)):>6.2f}{cells}"

    def last_line(self, result: "Replayed") -> str:
        from asyncgrpo.tools.replay import QUANTITIES, means

        both = {name: map(_short, means(result.pairs, field)) for field, name in QUANTITIES.items()}
        parts = ", ".join(f"{name} {' -> '.join(sides)}" for name, sides in both.items())
        return f"means over {len(result.pairs)} steps, recorded -> replayed: {parts}"


def _exact(value: object) -> str:
    return "-" if value is None else repr(value)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _as_json(result: "Replayed", folder: Path, changes: list[str]) -> dict[str, object]:
    from asyncgrpo.tools.replay import QUANTITIES

    def side(pair: "Pair", which: int) -> dict[str, object]:
        return {name: pair.values(name)[which] for name in QUANTITIES}

    steps = [
        {"step": p.step, "recorded": side(p, 0), "replayed": side(p, 1), "differences": p.differences}
        for p in result.pairs
    ]
    weights = {"equal": result.same_weights, "different": result.other_weights}
    return {"folder": str(folder), "with": changes, "equal": result.is_equal, "weights": weights, "steps": steps}
