"""`asyncgrpo doctor`: what this machine can run, and how to mend what it cannot."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from asyncgrpo.cli.output import JsonOption, print_json

_SIGNS = {"ok": "✓", "note": "·", "warning": "!", "failed": "✗"}
_COLOURS = {"ok": "green", "note": "white", "warning": "yellow", "failed": "red"}


def register(app: typer.Typer) -> None:
    """Add `doctor`."""
    app.command("doctor", epilog="Example: asyncgrpo doctor --out /scratch/runs")(doctor)


def doctor(
    out: Annotated[Path, typer.Option("--out", help="Folder that is to hold the runs.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Try out what training needs: packages, engines, GPUs, memory.

    Exits with 0 when training is possible with at least one engine.
    """
    from asyncgrpo.cli.checks import all_findings, can_train, engines

    findings = []
    for finding in all_findings(out):
        findings.append(finding)
        if as_json:
            continue
        sign = typer.style(_SIGNS[finding.status], fg=_COLOURS[finding.status])
        typer.echo(f"{sign} {finding.name:14} {finding.detail}")
        if finding.fix:
            typer.echo(f"{'':17}mend it: {finding.fix}")
    possible, running = can_train(findings), engines(findings)
    if as_json:
        print_json({"can_train": possible, "engines": running, "findings": [asdict(finding) for finding in findings]})
    elif possible:
        typer.echo(f"\nTraining is possible here, with the engine {' or '.join(running)}.")
    else:
        broken = [f.name for f in findings if f.needed and f.status == "failed"] or ["an engine"]
        typer.echo(f"\nTraining is not possible yet; mend {', '.join(broken)} first.")
    raise typer.Exit(0 if possible else 1)
