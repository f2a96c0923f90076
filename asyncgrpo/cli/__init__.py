"""The command line: one module per family of commands, each with its own `app`.

An `AsyncGRPOError` ends the command with `error: <one sentence>` and exit code 1. So does a path that the operating system
refuses. A usage error is one such line with exit code 2. Any other exception keeps its traceback.
Commands import heavy packages when they run, so that `asyncgrpo --help` is fast.
"""

import errno
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from asyncgrpo import __version__
from asyncgrpo.cli import config, doctor, look, models, plan, train
from asyncgrpo.cli.options import shorten
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.logs import say_warnings, visible

app = typer.Typer(
    name="asyncgrpo",
    help="Train language models with asynchronous GRPO: generators fill a buffer, an FSDP learner trains on it.",
    epilog="Example: asyncgrpo doctor",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # `[key=value ...]` in a help text is not markup
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # verl's scripts write `--rollout_n`
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asyncgrpo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


for family in (doctor, train, look, plan, models, config):
    app.add_typer(family.app)

_UsageError: Any = typer.BadParameter.__mro__[1]  # typer does not export it
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PATH_ERRORS = _FULL | {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS}
"""Errors of the operating system that are caused by a path of the user or its disk."""


def main() -> NoReturn:
    """Run the `asyncgrpo` script. Exits with 0 on success, 1 on an error, 2 on a usage error and 130 on Ctrl-C."""
    _open_standard_files()
    say_warnings()
    code = 1
    try:
        sys.exit(app(prog_name="asyncgrpo", standalone_mode=False))
    except AsyncGRPOError as error:
        problem = str(error)
    except _UsageError as error:
        code, problem = 2, _usage_problem(error)
    except OSError as error:
        if error.errno not in _PATH_ERRORS or (error.filename is None and error.errno not in _FULL):
            raise
        what = "the output cannot be written" if error.filename is None else shorten(os.fsdecode(error.filename), 200)
        problem = f"{what}: {error.strerror}"
    typer.echo(f"error: {visible(problem)}", err=True)
    sys.exit(code)


def _open_standard_files() -> None:
    """Open `/dev/null` in place of the standard files that a shell has closed, as with `2>&-`, for Ray's processes, too."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _usage_problem(error: Any) -> str:
    """Return a usage error as one line that names the parameter, the value and the help."""
    message, ctx = error.format_message(), error.ctx
    if message.startswith("Usage:"):  # the help, of a group without a command
        typer.echo(message, err=True)
        sys.exit(2)
    if hasattr(error.__cause__, "errors"):  # pydantic, with which typer converts values
        message = message.replace("Value error, ", "").partition(", unable to parse")[0]
        value = f"{error.__cause__.errors()[0]['input']!r}"
        message += f", not {value}" if value not in message else ""
    return f"{' '.join(message.split()).rstrip('.')}; see `{'asyncgrpo' if ctx is None else ctx.command_path} --help`"
