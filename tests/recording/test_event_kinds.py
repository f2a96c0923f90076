"""`metrics.jsonl` holds what is declared, and what is declared is written."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import asyncgrpo
from asyncgrpo.recording.events import KINDS

PACKAGE = Path(asyncgrpo.__file__).parent
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def writes(tree: ast.AST) -> Iterator[tuple[int, str, set[str], bool]]:
    """Each `...events.write("kind", field=...)`, which the buffer calls `_emit`.

    Its line, kind, fields, and whether there are more behind `**`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.search(r"(events\.write|\._emit)$", ast.unparse(node.func)):
            assert isinstance(node.args[0], ast.Constant), f"line {node.lineno}: which event?"
            names = {keyword.arg for keyword in node.keywords}
            yield node.lineno, str(node.args[0].value), {name for name in names if name}, None in names


def calls() -> list[tuple[str, str, set[str], bool]]:
    return [
        (f"{path.relative_to(PACKAGE)}:{line}", kind, fields, more)
        for path, tree in TREES.items()
        for line, kind, fields, more in writes(tree)
    ]


def wrong(kind: str, fields: set[str], more: bool) -> str | None:
    if kind not in KINDS:
        return f"event {kind!r} is not declared"
    if undeclared := fields - KINDS[kind].fields.keys():
        return f"event {kind!r}: {sorted(undeclared)} are not declared"
    missing = KINDS[kind].needed - fields
    return f"event {kind!r} lacks {sorted(missing)}" if missing and not more else None


def test_every_event_in_the_code_is_declared_with_its_fields():
    found = calls()
    assert len(found) > 15
    assert [f"{where}: {problem}" for where, *call in found if (problem := wrong(*call))] == []


def test_every_declared_event_and_field_is_written_somewhere():
    written = {kind for _, kind, _, _ in calls()}
    assert KINDS.keys() - written == set()
    texts = {
        node.value
        for path, tree in TREES.items()
        if path.stem != "event_kinds"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = texts | {name for _, _, fields, _ in calls() for name in fields}
    assert {(kind, name) for kind, declared in KINDS.items() for name in declared.fields if name not in names} == set()
