"""`asyncgrpo tune`, `plan` and `simulate`: how many GPUs for each side."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from asyncgrpo.cli import options
from asyncgrpo.cli.output import JsonOption, command, print_json
from asyncgrpo.errors import ConfigError

if TYPE_CHECKING:
    from asyncgrpo.planner.from_run import RunPace
    from asyncgrpo.planner.plan import Option, Plan
    from asyncgrpo.planner.profile import Profile
    from asyncgrpo.recording.advice import Option as SplitOfRun
    from asyncgrpo.recording.pace import Pace

ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="Written by the command tune.", show_default=False)
]
FromOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="RUN", help="Run folder: its events are the profile.", show_default=False),
]

PresetOption = Annotated[
    str | None, typer.Option("--preset", help="An assumed profile: 7b-long-tail.", show_default=False)
]

WhatIfOption = Annotated[
    list[str] | None,
    typer.Option("--what-if", metavar="KEY=VALUE", help="A change, such as length=2x or gpus=16; repeatable."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("tune", epilog="Example: asyncgrpo tune configs/one_node_8gpu.yaml --out profile.json")(tune)
    app.command("plan", epilog="Example: asyncgrpo plan --gpus 64 --profile profile.json --what-if length=2x")(plan)
    app.command("simulate", epilog="Example: asyncgrpo simulate --preset 7b-long-tail --gpus 32 --gpus 128")(simulate)


def tune(
    config: options.ConfigArgument,
    overrides: options.SettingsArgument = None,
    out: Annotated[Path, typer.Option("--out", help="File of the profile.")] = Path("profile.json"),
    steps: Annotated[int, typer.Option("--steps", min=8, help="Steps of each of the two short runs.")] = 8,
) -> None:
    """Measure a configuration on its cluster for `plan`.

    Decoding, steps, publications and the reward are measured and written to a profile.

    It takes minutes: a decode sweep of one engine, and two short runs that leave nothing behind.
    """
    from asyncgrpo.cli.running import check_settings, session_of_checked
    from asyncgrpo.config.load import load_config
    from asyncgrpo.config.reach import find_model
    from asyncgrpo.planner.profile import write_profile

    resolved = load_config(config, ["run.epochs=null", *(overrides or [])], tell=typer.echo)
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    check_settings(resolved)
    find_model(resolved.model.path)
    with session_of_checked(resolved):  # of the sweep and of both runs
        from asyncgrpo.planner.tune import tune as measure

        profile = measure(resolved, typer.echo, steps=steps)
    write_profile(profile, out)
    typer.echo(_measured(profile))
    typer.echo(f"next: {command('plan', '--profile', out)}")


def _measured(profile: "Profile") -> str:
    """The table of what was measured."""
    decode, learner = profile.decode, profile.learner
    knee, spread = decode.knee, profile.lengths.spread(profile.group_size)
    rows = {
        "decode": f"{1e3 * decode.base_s:.2f} ms a token, {1e6 * decode.per_completion_s:.1f} µs more for each completion"
        + _error(decode.residual),
        "knee": f"{knee:,.0f} completions an engine: three quarters of the most it can",
        "learner": f"{learner.base_s:.2f} s a step, {1e6 * learner.rank_s_per_token:.1f} µs a token of one rank"
        + _error(learner.residual),
        "publish": f"{profile.publish_s:.2f} s of the learner, {profile.pause_s:.2f} s of an engine",
        "reward": f"{1e3 * profile.reward_s:.1f} ms",
        "lengths": f"mean {profile.lengths.mean:,.0f} tokens, the longest of a group {spread:.2f} times that",
        "prompts": f"mean {profile.prompt_tokens:,.0f} tokens",
    }
    return "\n".join(f"{name:<8} {text}" for name, text in rows.items())


def _error(residual: float) -> str:
    return f" (largest error {residual:.0%})" if residual else ""


def plan(
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", min=2, help="GPUs to share (without GPUs: processes). Default: those of the profile."),
    ] = None,
    profile: ProfileOption = None,
    from_run: FromOption = None,
    preset: PresetOption = None,
    what_if: WhatIfOption = None,
    max_lag: Annotated[
        int | None, typer.Option("--max-lag", min=0, help="The bound; none: the smallest that costs no time.")
    ] = None,
    simulated: Annotated[int, typer.Option("--simulate", min=0, help="Best splits to simulate; not with --from.")] = 10,
    save: Annotated[Path | None, typer.Option("--save", help="Write the profile that was used.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Rank ways to split GPUs between generators and learner.

    The settings of the best one are printed.

    From a profile, all splits are predicted in closed form, and the best ones are simulated with the product's own
    scheduler on a virtual clock.

    From a run, its steps under the present conditions are the measurement, and the advice of the run is printed with them:
    the model is the same. On a machine without GPUs a split needs free cores.
    """
    from asyncgrpo.planner.plan import make_plan
    from asyncgrpo.planner.profile import write_profile
    from asyncgrpo.planner.what_if import what_if as changed_by

    _check_one_source(profile, from_run, preset)
    if from_run is not None:
        if save is not None:
            write_profile(_profile(None, from_run, None), save)
        return _plan_of_run(from_run, gpus, max_lag, what_if or [], as_json)
    measured = _profile(profile, None, preset)
    if save is not None:
        write_profile(measured, save)
    made = make_plan(measured, gpus, max_lag, simulated=simulated, tell=_progress)
    if what_if:
        other, other_gpus = changed_by(measured, gpus, what_if)
        changed = make_plan(other, other_gpus, max_lag, simulated=simulated, tell=_progress)
    if as_json:
        print_json(_as_json(made) | ({"what_if": {"changes": what_if, **_as_json(changed)}} if what_if else {}))
        return
    _print(made)
    if what_if:
        typer.echo(f"\nwhat if {', '.join(what_if)}")
        _print(changed)
        typer.echo(_difference(made, changed))


def _progress(done: int, of: int) -> None:
    """A line that replaces itself, where a person looks."""
    if sys.stderr.isatty():
        typer.echo(f"\rsimulated {done} of {of} splits", err=True, nl=done == of)


def _check_one_source(file: Path | None, run: Path | None, preset: str | None) -> None:
    given = [name for name, value in (("--profile", file), ("--from", run), ("--preset", preset)) if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} name two profiles; give one")


def _profile(file: Path | None, run: Path | None, preset: str | None) -> "Profile":
    """Return the one profile that was asked for."""
    from asyncgrpo.planner.from_run import profile_of_run
    from asyncgrpo.planner.presets import preset_profile
    from asyncgrpo.planner.profile import read_profile

    _check_one_source(file, run, preset)
    if run is not None:
        return profile_of_run(run)
    if preset is not None:
        return preset_profile(preset)
    if file is None and not Path("profile.json").exists():
        raise ConfigError(
            "there is no profile.json here; measure one with `asyncgrpo tune CONFIG`, or name a finished run with --from RUN"
        )
    return read_profile(file or Path("profile.json"))


# -- of a run ----------------------------------------------------------------------------------------------------------


def _plan_of_run(run: Path, gpus: int | None, max_lag: int | None, changes: list[str], as_json: bool) -> None:
    """Print the splits of a run, those of the changed task, and the advice."""
    from asyncgrpo.planner.from_run import pace_of_run
    from asyncgrpo.recording.advice import splits

    found = pace_of_run(run)
    pace, config = found.pace, found.config
    if not config.generators.gpus_each and (gpus or any(change.startswith("gpus=") for change in changes)):
        raise ConfigError(
            f"{run} uses no GPU, so there are none to share: its splits are those that its cores have room for"
        )
    options = splits(pace, config, gpus or found.gpus, max_lag)
    other = _changed_splits(run, found, gpus, max_lag, changes) if changes else []
    if as_json:
        of_run = {"run": str(run), "steps": pace.steps, "step_s": pace.step_s, "limit": pace.limit}
        what_if = {"what_if": {"changes": changes, "options": _plain(other, pace)}} if changes else {}
        advice = {"advice": [msgspec.to_builtins(piece) for piece in found.advice]}
        return print_json(of_run | {"options": _plain(options, pace)} | advice | what_if)
    now = f"{pace.generators} generator{'s' * (pace.generators > 1)}, {pace.ranks} learner rank{'s' * (pace.ranks > 1)}"
    cores = pace.learner_cores
    used = f"; {1 - cores.spare:.0%} of {cores.count:.0f} cores used" if cores is not None else ""
    typer.echo(f"{run}, steps {pace.steps[0]} to {pace.steps[1]}: {_seconds(pace.step_s)} s a step with {now}{used}")
    typer.echo(columns([_row_of_run(option, pace.step_s) for option in options[:SHOWN]]))
    for piece in found.advice:
        typer.echo(f"advice: {piece.sentence} ({piece.evidence})")
    if changes:
        typer.echo(f"\nwhat if {', '.join(changes)}")
        typer.echo(columns([_row_of_run(option, pace.step_s) for option in other[:SHOWN]]))


def _changed_splits(
    run: Path, found: "RunPace", gpus: int | None, max_lag: int | None, changes: list[str]
) -> "list[SplitOfRun]":
    """The splits of the changed task, best first: each step is as much longer as the closed form makes it."""
    from asyncgrpo.planner.from_run import profile_of_run
    from asyncgrpo.planner.model import Split, predict
    from asyncgrpo.planner.what_if import what_if
    from asyncgrpo.recording.advice import splits

    profile = profile_of_run(run)
    changed, gpus = what_if(profile, gpus, changes)
    options = []
    for option in splits(found.pace, found.config, gpus or found.gpus, max_lag):
        bound = found.pace.max_lag if max_lag is None else max_lag
        split = Split(
            option.generators, option.ranks, profile.groups_in_flight, bound, profile.admission, profile.policy
        )
        after = predict(changed, split)
        step_s = option.step_s * after.step_s / predict(profile, split).step_s
        options.append(msgspec.structs.replace(option, step_s=step_s, limit=after.bottleneck))
    return sorted(options, key=lambda option: option.step_s)


def _plain(options: "list[SplitOfRun]", pace: "Pace") -> list[dict[str, Any]]:
    """The options as plain fields, each with the share by which its step is shorter."""
    return [msgspec.to_builtins(option) | {"gain": 1 - option.step_s / pace.step_s} for option in options]


def _row_of_run(option: "SplitOfRun", now_s: float) -> dict[str, str]:
    change = option.step_s / now_s - 1
    return {
        "generators:ranks": f"{option.generators}:{option.ranks}",
        "s/step": _seconds(option.step_s),
        "change": f"{change:+.0%}" if abs(change) >= 0.005 else "none",
        "limited by": option.limit,
    }


# -- simulate ----------------------------------------------------------------------------------------------------------

POLICIES = ("asyncgrpo", "drop", "synchronous", "split", "one-step-off", "drained")


def simulate(
    profile: ProfileOption = None,
    from_run: FromOption = None,
    preset: PresetOption = None,
    gpus: Annotated[
        list[int] | None, typer.Option("--gpus", min=2, help="GPUs to share; repeatable. None: those of the profile.")
    ] = None,
    policies: Annotated[
        list[str] | None, typer.Option("--policy", help=f"One of {', '.join(POLICIES)}; repeatable. None: all.")
    ] = None,
    what_if: WhatIfOption = None,
    max_lag: Annotated[
        int | None, typer.Option("--max-lag", min=0, help="The bound; none: the smallest that costs no time.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare our scheduler with models of others.

    All meet the same lengths, ours on a virtual clock.

    `asyncgrpo` is the default policy, `drop` ours with buffer.policy=drop. `synchronous` shares all GPUs and takes turns; `split`
    takes turns on GPUs of its own; `one-step-off` trains one batch while the next is generated; `drained` streams groups and
    empties the engines before each publication. Each gets the split that is best for it.
    """
    from asyncgrpo.planner.compare import compare
    from asyncgrpo.planner.what_if import what_if as changed_by

    measured, other_gpus = changed_by(_profile(profile, from_run, preset), None, what_if or ())
    for policy in policies or ():
        if policy not in POLICIES:
            raise ConfigError(f"--policy {policy}: there is no such schedule; expected {', '.join(POLICIES)}")
    rows = [
        row
        for count in gpus or [other_gpus or measured.gpus]
        for row in compare(measured, count, policies or POLICIES, max_lag)
    ]
    if as_json:
        return print_json(rows)
    typer.echo(f"{measured.source} ({measured.hardware}); {_task(measured)}")
    typer.echo(columns([{name: _cell(value) for name, value in row.items()} for row in rows]))


def _cell(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


# -- how a plan is printed ---------------------------------------------------------------------------------------------

SHOWN = 10


def _print(made: "Plan") -> None:
    profile, best = made.profile, made.options[0]
    typer.echo(f"{made.gpus} {profile.units}, {profile.source} ({profile.hardware}); {_task(profile)}")
    typer.echo(columns([_row(made, option) for option in made.options[:SHOWN]]))
    typer.echo(f"use: {' '.join(best.flags)}")
    typer.echo(_valid(made))
    for warning in _warnings(made, best):
        typer.echo(f"note: {warning}")


def columns(rows: list[dict[str, str]]) -> str:
    """The rows as text under their names: the first and the last column to the left, the others to the right."""
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [{name: name for name in names}, *rows]
    ends = (names[0], names[-1])
    return "\n".join(
        "  ".join(line[n].ljust(widths[n]) if n in ends else line[n].rjust(widths[n]) for n in names).rstrip()
        for line in lines
    )


def _task(profile: "Profile") -> str:
    return (
        f"{profile.prompts_per_step} prompts x {profile.group_size} completions of {profile.lengths.mean:,.0f} tokens (mean), "
        f"the longest of a group {profile.lengths.spread(profile.group_size):.1f} times that"
    )


def _row(made: "Plan", option: "Option") -> dict[str, str]:
    split, best = option.split, option.best
    each = made.profile.gpus_of_engine
    return {
        "split": _split(option, each),
        "s/step": _seconds(best.step_s),
        "formula": _seconds(option.expected.step_s),
        "tokens/s": f"{best.tokens_per_s:,.0f}",
        **(
            {"GPU-h/1k": f"{made.gpus * best.step_s / 3.6:,.{1 if best.step_s < 10 else 0}f}"}
            if made.profile.gpus_each
            else {}
        ),
        "idle l": f"{best.learner_idle:.0%}",
        "idle g": f"{best.generator_idle:.0%}",
        "satur.": f"{best.saturation:.2f}",
        "sync": f"{best.publish_share:.0%}",
        "max_lag": str(split.max_lag),
        "lag": f"{best.lag_mean:.1f}",
        "p99": f"{best.lag_p99:.0f}",
        "in flight": str(split.groups_in_flight),
        "limited by": best.bottleneck if option.fits else "does not fit its GPUs",
    }


def _split(option: "Option", gpus_each: int) -> str:
    engines = f"{option.split.generators}" if gpus_each == 1 else f"{option.split.generators}x{gpus_each}"
    return f"{engines}:{option.split.ranks}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.{2 if seconds < 10 else 1}f}"


def _valid(made: "Plan") -> str:
    text = f"valid for a mean length of {made.shortest:,.0f} to {made.longest:,.0f} tokens"
    if made.beyond is None:
        return text
    return f"{text}; above that use {made.beyond.generators}:{made.beyond.ranks}"


def _warnings(made: "Plan", best: "Option") -> list[str]:
    """What a reader of this plan should know of its profile."""
    decode, found = made.profile.decode, []
    loads = [load for load, _ in decode.measured]
    if loads and not decode.is_near(best.best.running):
        found.append(
            f"decoding was measured at {min(loads):.0f} to {max(loads):.0f} completions an engine, and this split runs "
            f"{best.best.running:.0f}; `asyncgrpo tune CONFIG` measures more"
        )
    if decode.residual > 0.15:
        found.append(f"the decode curve misses a measured point by {decode.residual:.0%}")
    if made.profile.learner.residual > 0.15:
        found.append(f"the learner's line misses a measured point by {made.profile.learner.residual:.0%}")
    return found


def _difference(made: "Plan", changed: "Plan") -> str:
    before, after = made.options[0].best, changed.options[0].best
    more = after.step_s / before.step_s - 1
    return f"a step takes {abs(more):.0%} {'longer' if more > 0 else 'less'}, at {after.tokens_per_s:,.0f} tokens/s"


def _as_json(made: "Plan") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "gpus": made.gpus,
        "source": made.profile.source,
        "options": [
            {
                "split": asdict(one.split),
                "fits": one.fits,
                "flags": one.flags,
                **asdict(one.best),
                "formula": asdict(one.expected),
            }
            for one in made.options
        ],
        "valid": {"shortest": made.shortest, "longest": made.longest},
        "beyond": None if made.beyond is None else asdict(made.beyond),
    }
