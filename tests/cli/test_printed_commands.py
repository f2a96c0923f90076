"""Every command that we print can be typed as it stands: the real command line takes it."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from asyncgrpo import cli
from asyncgrpo.cli.options import command, same_command

PACKAGE = Path(cli.__file__).parent.parent
_COMMAND = re.compile(r"asyncgrpo [a-z]+ ?[^`]*")


def take(line: str) -> list[str]:
    """Let the command line parse `asyncgrpo ...`, and run nothing. Returns the names of the commands on the way.

    Raises what the command line raises for what it does not take.
    """
    *rest, found = [*reversed(shlex.split(line)[1:]), typer.main.get_command(cli.app)]
    path = ["asyncgrpo"]
    while hasattr(found, "commands"):
        path.append(rest.pop())
        found = found.commands[path[-1]]
    found.make_context(path[-1], rest[::-1])
    return path


def text_of(node: ast.AST) -> str | None:
    """The text of a string. Each value in an f-string becomes `run`, the name of a run folder."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) or "run" for value in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def strings(tree: ast.AST, above: ast.AST | None = None) -> Iterator[str]:
    """All strings but docstrings and descriptions of settings, which mention commands and do not tell anybody to type them."""
    for node in ast.iter_child_nodes(tree):
        text = text_of(node)
        if text is None:
            yield from () if isinstance(node, ast.keyword) and node.arg == "description" else strings(node, tree)
        elif not isinstance(tree, ast.Expr):
            yield text


def printed() -> list[str]:
    """Commands in the strings of the package: in backticks, or to the end of the string."""
    files = sorted(PACKAGE.rglob("*.py"))
    texts = [text for file in files for text in strings(ast.parse(file.read_text(encoding="utf-8")))]
    names = typer.main.get_command(cli.app).commands
    found = [match[0] for text in texts for match in _COMMAND.finditer(text)]
    return sorted({line for line in found if line.split()[1] in names})


def test_a_command_in_a_message_can_be_typed_and_one_that_cannot_is_found():
    lines = printed()
    assert "asyncgrpo config explain" in lines
    assert {take(line)[0] for line in lines} == {"asyncgrpo"}
    for wrong in ("asyncgrpo audit", "asyncgrpo samples my run", "asyncgrpo demo --step 3", "asyncgrpo config show"):
        with pytest.raises(Exception, match=r"Missing parameter|Got unexpected|No such option"):
            take(wrong)


def test_paths_are_quoted_and_the_same_command_is_what_was_typed(monkeypatch: pytest.MonkeyPatch):
    assert command("samples", Path("my runs/a"), "--best") == "asyncgrpo samples 'my runs/a' --best"
    typed = ["demo", "--steps", "9", "algorithm.corrections=[{high_ratio: 2.0}]"]
    monkeypatch.setattr("sys.argv", ["/somewhere/asyncgrpo", *typed])
    assert shlex.split(same_command()) == ["asyncgrpo", *typed]
    assert shlex.split(same_command(Path("a run"))) == ["asyncgrpo", "demo", "--out", "a run", *typed[1:]]
    assert take(same_command(Path("a run"))) == ["asyncgrpo", "demo"]
