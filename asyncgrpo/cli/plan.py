"""`asyncgrpo tune` and `plan`: how many GPUs for each side."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from asyncgrpo.cli import options
from asyncgrpo.cli.options import JsonOption, command, example, print_json
from asyncgrpo.config.explain import counted
from asyncgrpo.errors import ConfigError

if TYPE_CHECKING:
    from asyncgrpo.planner.plan import Option, Plan

app = typer.Typer()

SHOWN = 10
"""Splits that are printed."""
PROFILE = Path("profile.json")


@app.command("tune", epilog=example("tune configs/one_node_8gpu.yaml --out profile.json"))
def tune(
    config: options.ConfigArgument,
    overrides: options.SettingsArgument = None,
    out: Annotated[Path, typer.Option("--out", help="File of the profile.")] = PROFILE,
    steps: Annotated[int, typer.Option("--steps", min=8, help="Steps of each of the two short runs.")] = 8,
) -> None:
    """Measure a configuration on its cluster for `plan`.

    Decoding, steps, publications and the reward are measured and written to a profile.

    It takes minutes: a decode sweep of one engine, and two short runs that leave nothing behind.
    """
    from asyncgrpo.cli.running import check_settings, session_of_checked
    from asyncgrpo.config.load import load_config
    from asyncgrpo.config.reach import find_model
    from asyncgrpo.planner.plan import write_profile

    resolved = load_config(config, ["run.epochs=null", *(overrides or [])])
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: folder {out.parent} does not exist")
    check_settings(resolved)
    find_model(resolved.model.path)
    with session_of_checked(resolved):  # of the sweep and of both runs
        from asyncgrpo.planner.tune import tune as measure

        profile = measure(resolved, typer.echo, steps=steps)
    write_profile(profile, out)
    typer.echo(f"next: {command('plan', '--profile', out)}")


@app.command("plan", epilog=example("plan --gpus 64 --profile profile.json"))
def plan(
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=2, help="GPUs to share (without GPUs: processes). Default: those of the profile."),
    ] = None,
    profile: Annotated[Path, typer.Option("--profile", help="Profile that `tune` wrote.")] = PROFILE,
    from_run: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Run folder: its steps replace the profile.", show_default=False),
    ] = None,
    max_lag: Annotated[
        int | None, typer.Option("--max-lag", min=0, help="The bound; none: the smallest that costs no time.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Rank ways to split GPUs between generators and learner.

    The settings of the best one are printed.

    From a profile, all splits are predicted by formulas.

    From a run, its steps under the present conditions are the measurement, and the advice of the run is printed with them:
    the model is the same. On a machine without GPUs a split needs free cores.
    """
    if from_run is not None:
        if profile != PROFILE:
            raise ConfigError("--profile and --from exclude each other; give one")
        return _plan_of_run(from_run, gpus, max_lag, as_json)
    from asyncgrpo.planner.plan import make_plan, read_profile

    made = make_plan(read_profile(profile), gpus, max_lag)
    if as_json:
        listed = [
            {"split": asdict(one.split), "fits": one.fits, "flags": one.flags, **asdict(one.expected)}
            for one in made.options
        ]
        return print_json({"gpus": made.gpus, "source": made.profile.source, "options": listed})
    typer.echo(_title(made))
    typer.echo(options.columns([_row(made, option) for option in made.options[:SHOWN]]))
    typer.echo(f"use: {' '.join(made.options[0].flags)}")
    for warning in _warnings(made):
        typer.echo(f"note: {warning}")


# -- of a run ----------------------------------------------------------------------------------------------------------


def _plan_of_run(run: Path, gpus: int | None, max_lag: int | None, as_json: bool) -> None:
    from asyncgrpo.planner.plan import pace_of_run
    from asyncgrpo.recording.advice import splits

    pace, config, run_gpus, advice = pace_of_run(run)
    if gpus and not config.generators.gpus_each:
        raise ConfigError(f"{run} uses no GPU to share: its splits are those that its cores have room for")
    found = splits(pace, config, gpus or run_gpus, max_lag)
    if as_json:
        about = {"run": str(run), "steps": pace.steps, "step_s": pace.step_s, "limit": pace.limit}
        listed = [msgspec.to_builtins(one) | {"gain": 1 - one.step_s / pace.step_s} for one in found]
        return print_json(about | {"options": listed, "advice": msgspec.to_builtins(advice)})
    now = f"{counted(pace.generators, 'generator')}, {counted(pace.ranks, 'learner rank')}"
    cores = pace.learner_cores
    used = f"; {1 - cores.spare:.0%} of {cores.count:.0f} cores used" if cores is not None else ""
    typer.echo(f"{run}, steps {pace.steps[0]} to {pace.steps[1]}: {_seconds(pace.step_s)} s a step with {now}{used}")
    changes = [one.step_s / pace.step_s - 1 for one in found[:SHOWN]]
    rows = [
        {
            "generators:ranks": f"{one.generators}:{one.ranks}",
            "s/step": _seconds(one.step_s),
            "change": f"{change:+.0%}" if abs(change) >= 0.005 else "none",
            "limited by": one.limit,
        }
        for one, change in zip(found, changes, strict=False)
    ]
    typer.echo(options.columns(rows))
    for piece in advice:
        typer.echo(f"advice: {piece.sentence} ({piece.evidence})")


# -- of a profile ------------------------------------------------------------------------------------------------------


def _title(made: "Plan") -> str:
    profile = made.profile
    taught = f" beside {profile.config.teacher_gpus} of teachers" if profile.config.teacher_gpus else ""
    return (
        f"{made.gpus} {profile.units}{taught}, {profile.source} ({profile.hardware}); {profile.prompts_per_step} prompts x "
        f"{profile.group_size} completions of {profile.lengths.mean:,.0f} tokens (mean), "
        f"the longest of a group {profile.lengths.spread(profile.group_size):.1f} times that"
    )


def _row(made: "Plan", option: "Option") -> dict[str, str]:
    split, expected, each = option.split, option.expected, made.profile.gpus_of_engine
    engines = f"{split.generators}" if each == 1 else f"{split.generators}x{each}"
    hours = f"{made.gpus * expected.step_s / 3.6:,.{1 if expected.step_s < 10 else 0}f}"
    return {
        "split": f"{engines}:{split.ranks}",
        "s/step": _seconds(expected.step_s),
        "tokens/s": f"{expected.tokens_per_s:,.0f}",
        **({"GPU-h/1k": hours} if made.profile.config.generators.gpus_each else {}),
        "idle l": f"{expected.learner_idle:.0%}",
        "idle g": f"{expected.generator_idle:.0%}",
        "satur.": f"{expected.saturation:.2f}",
        "max_lag": str(split.max_lag),
        "lag": f"{expected.lag_mean:.1f}",
        "in flight": str(split.groups_in_flight),
        "limited by": expected.bottleneck if option.fits else "does not fit its GPUs",
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:.{2 if seconds < 10 else 1}f}"


def _warnings(made: "Plan") -> Iterator[str]:
    """Yield the limits of the profile that the best split meets."""
    decode, learner, running = made.profile.decode, made.profile.learner, made.options[0].expected.running
    loads = [load for load, _ in decode.measured]
    if not decode.is_near(running):
        measured = f"{min(loads):.0f} to {max(loads):.0f} completions an engine"
        yield f"decoding was measured at {measured}, and this split runs {running:.0f}"
    if decode.residual > 0.15:
        yield f"the decode curve misses a measured point by {decode.residual:.0%}"
    if learner.residual > 0.15:
        yield f"the learner's line misses a measured point by {learner.residual:.0%}"
    if made.profile.config.environment.is_on:
        yield "no time of the environment or agent is in the formulas; `plan --from RUN` is of measured steps"
