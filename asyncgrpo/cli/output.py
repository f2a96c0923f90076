"""How commands print: JSON for scripts, text for people, and nothing a model wrote may move the cursor."""

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
    """One JSON value; `indent=None` puts it on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=indent, default=str))


def wrapped(line: str, *, indent: int) -> str:
    """`line` in as many lines as the terminal needs, from the second on indented; one line where it goes to a file."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def command(*arguments: object) -> str:
    """A command of ours as a shell takes it: `asyncgrpo samples 'my run'`."""
    return shlex.join(["asyncgrpo", *map(str, arguments)])


def same_command(out: Path | None = None) -> str:
    """The command that is running, to be typed again.

    Args:
        out: the run folder that was chosen, where `--out` was not typed.
    """
    name, *rest = sys.argv[1:]
    return command(name, *(["--out", out] if out is not None else []), *rest)


def shorten(text: str, length: int) -> str:
    """At most `length` characters, from both ends, with a count of what is left out."""
    if len(text) <= length:
        return text
    head = length * 2 // 3
    return f"{text[:head]} … ({len(text) - length:,} characters left out) … {text[head - length :]}"


def size_in_words(num_bytes: float) -> str:
    """`3.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.{0 if unit == 'B' else 1}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
