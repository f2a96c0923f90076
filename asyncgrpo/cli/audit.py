"""`asyncgrpo audit`: checks that journal, checkpoints and events of a run agree, and exits with 1 if they do not."""

from pathlib import Path
from typing import Annotated

import typer

from asyncgrpo.cli.output import JsonOption, print_json


def register(app: typer.Typer) -> None:
    """Add `audit`."""
    app.command("audit", epilog="Example: asyncgrpo audit runs/demo")(audit)


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    as_json: JsonOption = False,
) -> None:
    """Check that no group of a run was lost or trained twice.

    It also checks that no prompt was skipped and no group was trained too late. Exits with 1 if there is a difference.
    """
    report(run, as_json)


def report(run: Path, as_json: bool = False) -> None:
    """Print what the audit found. Raises typer.Exit with 1 if there is a difference."""
    from asyncgrpo.tools.audit import audit as check

    found = check(run)
    fates = sorted(found.groups, key=lambda fate: -found.groups[fate])
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
