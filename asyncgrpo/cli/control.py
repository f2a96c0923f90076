"""Commands to runs that are going on: `status`, `top`, `page`, and what steers them: `pause`, `resume`, `drain`, `checkpoint`,
`evaluate`, `scale`, `set`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from asyncgrpo.cli.output import JsonOption, print_json
from asyncgrpo.errors import ConfigError, RunNotAlive
from asyncgrpo.logs import visible

if TYPE_CHECKING:
    from asyncgrpo.control.client import Look
    from asyncgrpo.control.operator import Command

RUNS = Path("runs")
"""Where runs are looked for that are not named: below the working directory."""

RunArgument = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="Run folder; may be left out if only one in runs/ is going on.")
]
RunsArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN", help="Run folders; without one all in runs/ that are going on."),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status", epilog="Example: asyncgrpo status runs/demo --json")(status)
    app.command("top", epilog="Example: asyncgrpo top")(top)
    app.command("page", epilog="Example: asyncgrpo page runs/demo")(page)
    for name, does in _PLAIN.items():
        app.command(name, epilog=f"Example: asyncgrpo {name} runs/demo")(_plain(name, does))
    app.command("scale", epilog="Example: asyncgrpo scale generators 4 runs/demo")(scale)
    app.command("set", epilog="Example: asyncgrpo set learner.lr=1e-6 buffer.max_lag=2 runs/demo")(change)


# -- looking -----------------------------------------------------------------------------------------------------------


def status(runs: RunsArgument = None, as_json: JsonOption = False) -> None:
    """Tell how runs are that are going on.

    Figures, processes, settings, advice with the command that follows it, and problems with their pages.
    """
    looks = [_looked(run) for run in _several(runs)]
    if as_json:
        print_json([_as_plain(look) for look in looks])
        return
    typer.echo("\n\n".join(visible("\n".join(_lines(look))) for look in looks))


def _looked(run: Path) -> "Look":
    from asyncgrpo.control.client import Look

    look = Look(run)
    look.refresh()
    if look.status is None:
        raise RunNotAlive(look.silence)
    return look


def _as_plain(look: "Look") -> dict[str, object]:
    return {
        "status": msgspec.to_builtins(look.status),
        "problems": msgspec.to_builtins(look.problems),
        "last_step": look.progress.last,
    }


def _lines(look: "Look") -> list[str]:
    now = look.status
    assert now is not None
    rows = [("step", f"{look.position}, start number {now.lineage}"), *look.rows()]
    rows.append(("settings", ", ".join(f"{key}={value}" for key, value in now.settings.items())))
    odd = [p for p in now.processes if p.state != "working" and now.state != "starting"]
    rows += [("process", f"{p.name} is {p.state}, {p.restarts} restarts") for p in odd]
    rows += [("advice", text) for text in look.advice()]
    rows += [("problem", text) for text in look.warnings()]
    return [f"{now.run}: {now.state}", *(f"  {name:<11}{text}" for name, text in rows)]


def top(runs: RunsArgument = None) -> None:
    """Watch runs on the terminal. Keys: q quits, p pauses, r resumes (both ask first), tab goes to the next run."""
    from asyncgrpo.control.top import watch

    watch(_several(runs))


def page(run: RunArgument = None) -> None:
    """Print the address of a run's page.

    It holds the token of the run: whoever has it may look at the run and steer it.
    """
    from asyncgrpo.control.client import RunClient

    typer.echo(RunClient(_one(run)).page)


# -- steering ----------------------------------------------------------------------------------------------------------


_PLAIN = {
    "pause": "Pause a run.\n\nNo leases and no steps until `resume`; what is in flight is finished and kept.",
    "resume": "Let a run go on after `asyncgrpo pause`.",
    "drain": "End a run in order.\n\nThe step in flight, a checkpoint, exit code 0: the same as SIGTERM.",
    "checkpoint": "Have a run write a checkpoint, after the step in flight.",
    "evaluate": "Have a run evaluate itself on data.eval.\n\nAfter the step in flight. The command eval evaluates a checkpoint.",
}


def _plain(name: str, does: str) -> Callable[[Path | None], None]:
    """The command that needs nothing but a run."""

    def tell(run: RunArgument = None) -> None:
        from asyncgrpo.control.operator import Command

        _tell(run, msgspec.convert({"command": name}, type=Command))

    tell.__doc__ = does
    return tell


def scale(
    what: Annotated[
        Literal["generators"], typer.Argument(metavar="generators", help="What there are to be more or fewer of.")
    ],
    count: Annotated[int, typer.Argument(metavar="N", min=1, max=4096, help="How many.")],
    run: RunArgument = None,
) -> None:
    """Give a run more generators, or fewer.

    Within generators.min and generators.max; the others go on meanwhile.
    """
    from asyncgrpo.control.operator import Scale

    _tell(run, Scale(generators=count))


def change(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE... [RUN]", help="New values, and the run folder as in other commands."),
    ],
) -> None:
    """Change settings of a run that is going on.

    All of them change, or none. The next start of the run begins with its configuration again.
    """
    from asyncgrpo.control.operator import ChangeSettings

    settings = dict(_setting(text) for text in arguments if "=" in text)
    runs = [Path(text) for text in arguments if "=" not in text]
    if not settings or len(runs) > 1:
        raise typer.BadParameter("give one or more KEY=VALUE, and one run folder at most")
    try:
        command = ChangeSettings(settings=settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _tell(runs[0] if runs else None, command)


def _setting(text: str) -> tuple[str, float | int]:
    key, _, value = text.partition("=")
    try:
        return key, msgspec.convert(value, type=int | float, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{text}: {value!r} is no number") from None


def _tell(run: Path | None, command: "Command") -> None:
    from asyncgrpo.control.client import RunClient

    typer.echo(visible(RunClient(_one(run)).tell(command)))


# -- which runs --------------------------------------------------------------------------------------------------------


def _one(run: Path | None) -> Path:
    from asyncgrpo.control.client import one_run

    return one_run(run, RUNS)


def _several(runs: Sequence[Path] | None) -> Sequence[Path]:
    from asyncgrpo.control.client import alive_in

    found = runs or alive_in(RUNS)
    if not found:
        raise RunNotAlive(f"no run in {RUNS}/ is going on; give the folder of one")
    return found
