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


CALLS = [(path.relative_to(PACKAGE), *call) for path, tree in TREES.items() for call in writes(tree)]


def test_every_event_in_the_code_is_declared_with_its_fields():
    assert len(CALLS) > 15
    for path, line, kind, fields, has_more in CALLS:
        where = f"{path}:{line}, {kind}"
        assert kind in KINDS and fields <= KINDS[kind].fields.keys(), f"{where}: not declared"
        assert has_more or KINDS[kind].needed <= fields, f"{where}: a field is missing"


def test_every_declared_event_and_field_is_written_somewhere():
    assert KINDS.keys() == {kind for _, _, kind, _, _ in CALLS}
    nodes = [node for path, tree in TREES.items() if path.stem != "events" for node in ast.walk(tree)]
    names = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names |= {node.arg for node in nodes if isinstance(node, ast.keyword)}
    assert {(kind, name) for kind, declared in KINDS.items() for name in declared.fields if name not in names} == set()
