"""The command line: one module for each family of commands, each with a function `register(app)`.

An `AsyncGRPOError` ends the command with `error: <one sentence>` and exit code 1, and so does a path that the operating
system refuses. Any other exception keeps its traceback.
Commands import heavy packages when they run, so that `asyncgrpo --help` is quick.
"""

import errno
import os
import sys
from typing import Annotated

import typer

from asyncgrpo import __version__
from asyncgrpo.cli import audit, checkpoints, config, control, data, demo, doctor, plan, replay, samples, train
from asyncgrpo.cli.output import shorten
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.logs import say_warnings, visible


def _dashes(name: str) -> str:
    return name.replace("_", "-")


app = typer.Typer(
    name="asyncgrpo",
    help="Asynchronous GRPO: generators stream completed groups into a buffer, an FSDP learner trains on them.",
    epilog="Example: asyncgrpo doctor",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: `[key=value ...]` is no markup
    # `--rollout_n` is `--rollout-n`: scripts of this field write either.
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _dashes},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asyncgrpo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for family in (doctor, demo, train, control, plan, data, samples, audit, replay, checkpoints, config):
    family.register(app)


def _keep_examples_whole(group: typer.Typer) -> None:
    """Keep the examples in the help on one line, so that they can be copied: `\\b` stops the wrapping."""
    for command in group.registered_commands:
        command.epilog = f"\b\n{command.epilog}"
    for child in group.registered_groups:
        if child.typer_instance is not None:
            _keep_examples_whole(child.typer_instance)


_keep_examples_whole(app)


_OF_THE_PATH = frozenset(
    {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
)
"""Errors of the operating system whose cause is a path of the user's, or the disk below it."""


def main() -> None:
    """Entry point of the `asyncgrpo` script. The exit code is 0 only for success, and 130 after Ctrl-C."""
    say_warnings()
    try:
        app(prog_name="asyncgrpo")
    except AsyncGRPOError as error:
        problem = str(error)
    except OSError as error:
        if error.filename is None or error.errno not in _OF_THE_PATH:
            raise
        problem = f"{shorten(os.fsdecode(error.filename), 200)}: {error.strerror}"
    else:
        return
    typer.echo(f"error: {visible(problem)}", err=True)
    sys.exit(1)
