"""How commands print: JSON for scripts, and text for people."""

import json
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print one JSON value; `indent=None` puts it on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=indent, default=str))


def wrapped(line: str, *, indent: int) -> str:
    """`line` wrapped to the terminal, indented from the second line on. Where stdout is a file it stays one line."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def command(*arguments: object) -> str:
    """A command of ours for a shell, such as `asyncgrpo samples 'my run'`."""
    return shlex.join(["asyncgrpo", *map(str, arguments)])


def same_command(out: Path | None = None) -> str:
    """The running command, to be typed again.

    Args:
        out: the run folder that was chosen, if `--out` was not typed.
    """
    name, *rest = sys.argv[1:]
    return command(name, *(["--out", out] if out is not None else []), *rest)


def shorten(text: str, length: int) -> str:
    """At most `length` characters of `text`, from both ends, with a count of those left out."""
    if len(text) <= length:
        return text
    head = length * 2 // 3
    return f"{text[:head]} … ({len(text) - length:,} characters left out) … {text[head - length :]}"


def size_in_words(num_bytes: float) -> str:
    """A size such as `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.{0 if unit == 'B' else 1}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
