"""Output of the commands: JSON for scripts, text for the terminal."""

import json
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def example(arguments: str) -> str:
    """Return the epilog of a command. It stays on one line, for copying: `\\b` turns off wrapping."""
    return f"\b\nExample: asyncgrpo {arguments}"


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print one JSON value. `indent=None` prints it on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=indent, default=str))


def wrapped(line: str, *, indent: int) -> str:
    """Wrap `line` to the terminal, indented from the second line on. Return it as it is if stdout is not a terminal."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def command(*arguments: object) -> str:
    """Return an asyncgrpo command quoted for a shell, such as `asyncgrpo samples 'my run'`."""
    return shlex.join(["asyncgrpo", *map(str, arguments)])


def same_command(out: Path | None = None) -> str:
    """Return the running command, quoted for a shell.

    Args:
        out: run folder to add as `--out`, if the command line has none.
    """
    name, *rest = sys.argv[1:]
    return command(name, *(["--out", out] if out is not None else []), *rest)


def shorten(text: str, length: int) -> str:
    """Keep `length` characters of `text` from both ends, and count the others."""
    if len(text) <= length:
        return text
    head = length * 2 // 3
    return f"{text[:head]} … ({len(text) - length:,} characters left out) … {text[head - length :]}"


def size_in_words(num_bytes: float) -> str:
    """Format a size, such as `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.{0 if unit == 'B' else 1}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
