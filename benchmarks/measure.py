"""The size of the code, its language, and the part of it that one group passes. No test fails on a number.

    python -m benchmarks.measure             files, lines of code, dialect words, functions named once
    python -m benchmarks.measure --trace     and what a group passes, in a run of the demo

The traced demo runs with `sys.setprofile` in the driver and in all its processes, forks included. A function is passed
if it is called while one of the functions below it on the stack, or itself, holds one of `TYPES` in a local variable.
"""

import argparse
import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
DIALECT = re.compile(r"\b(tells?|says?|told|said|whoever|nobody|somebody)\b|\bis no\b", re.IGNORECASE)
QUESTIONS = re.compile(r"\s*(What|Whether|How|Why|Where|Who|Which)\b")
TYPES = frozenset(
    {"Lease", "Completion", "Rollout", "Group", "Score", "Sampled", "Request"}
    | {"RolloutHeader", "Deliver", "Grant", "Batch", "Ack", "Trained"}
    | {"GroupEntry", "GroupInFlight", "Launched", "Unacknowledged", "Work"}
    | {"ScoredRollouts", "PackedBatch", "StepBatch", "StepReport"}
)
"""Names of the classes that hold a group or a part of it."""
TRACE = "ASYNCGRPO_TRACE"
"""Environment variable of a traced process: folder of the results."""
TRIES, DEPTH, LOCALS, EVERY_S = 300, 60, 24, 0.5
"""Calls of one function, frames of a stack and locals of a frame that are inspected; seconds between two results."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[str, str, int]
"""A function: file below the package, qualified name, first line."""


def docstrings(tree: ast.AST) -> list[ast.Expr]:
    """Return the strings that stand alone: of modules, classes, functions and attributes."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return [node for node in found if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]


def code_lines(text: str, tree: ast.AST) -> set[int]:
    """Return the numbers of the lines without blanks, comments and docstrings."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for doc in docstrings(tree):
        lines.difference_update(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return lines


def measure(root: Path, passed: set[Key] | None = None) -> Iterator[str]:
    """Yield the lines of the report.

    Args:
        root: a checkout.
        passed: functions that a group passed, of the same checkout.
    """
    named, private, lengths, docs = Counter[str](), [], [], []
    lines: dict[str, set[int]] = {}
    spans: dict[tuple[str, int], range] = {}
    raw = words = 0
    for path in sorted((root / "asyncgrpo").rglob("*.py")):
        text, file = path.read_text(encoding="utf-8"), path.relative_to(root / "asyncgrpo").as_posix()
        tree = ast.parse(text)
        lines[file] = code_lines(text, tree)
        raw, words = raw + text.count("\n"), words + len(DIALECT.findall(text))
        docs += [doc.value.value for doc in docstrings(tree)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                named[node.id if isinstance(node, ast.Name) else node.attr] += 1
            elif isinstance(node, Function):
                first = min((one.lineno for one in node.decorator_list), default=node.lineno)
                spans[file, first] = span = range(first, node.end_lineno + 1)
                lengths.append(size := len(lines[file] & set(span)))
                if node.name.startswith("_") and not node.name.startswith("__") and not node.decorator_list:
                    private.append((node.name, size))
    once = [size for name, size in private if named[name] == 1]
    questions = sum(bool(QUESTIONS.match(doc)) for doc in docs) / len(docs)
    yield f"files            {len(lines)}"
    yield f"lines of code    {sum(map(len, lines.values())):,} of {raw:,}"
    yield f"functions        {len(lengths):,}, median {sorted(lengths)[len(lengths) // 2]} lines of code, longest {max(lengths)}"
    yield f"named once       {len(once)} of {len(private):,} private functions, {sum(once):,} lines"
    yield f"dialect words    {words}, {1000 * words / raw:.1f} in 1,000 lines"
    yield f"question words   open {questions:.0%} of docstrings"
    for folder, pattern in (("tests", "*.py"), ("benchmarks", "*.py"), ("docs", "*.md")):
        files = [path.read_text(encoding="utf-8").count("\n") for path in (root / folder).rglob(pattern)]
        yield f"{folder:<16} {len(files)} files, {sum(files):,} lines"
    if passed is not None:
        yield from _of_group({key: lines[key[0]].intersection(spans.get((key[0], key[2]), ())) for key in passed})


def _of_group(passed: dict[Key, set[int]]) -> Iterator[str]:
    """Yield the lines about functions that a group passed, given with their lines of code: of all, and by package."""
    parts = {"a group passes": passed}
    for package in sorted({key[0].partition("/")[0] for key in passed}):
        parts[f"    {package}"] = {key: found for key, found in passed.items() if key[0].partition("/")[0] == package}
    for name, part in parts.items():
        num_lines = len({(key[0], line) for key, found in part.items() for line in found})
        yield f"{name:<16} {len({key[0] for key in part})} files, {len(part)} functions, {num_lines:,} lines of code in them"


# -- the trace ---------------------------------------------------------------------------------------------------------


def trace_demo(root: Path, engine: str, steps: int) -> set[Key]:
    """Run the demo under `trace_process`. Returns the functions that a group passed."""
    with tempfile.TemporaryDirectory(prefix="asyncgrpo-trace-") as name:
        folder = Path(name)
        (folder / "found").mkdir()
        shutil.copy(__file__, folder / "asyncgrpo_trace.py")  # an older checkout lacks this module
        (folder / "sitecustomize.py").write_text("import asyncgrpo_trace\n\nasyncgrpo_trace.trace_process()\n")
        path = os.pathsep.join([name, str(root)])
        environment = os.environ | {TRACE: str(folder / "found"), "PYTHONPATH": path}
        command = [sys.executable, "-m", "asyncgrpo", "demo", "--engine", engine, "--steps", str(steps)]
        subprocess.run([*command, "--out", str(folder / "run")], cwd=root, env=environment, check=True)
        passed = {tuple(key) for file in (folder / "found").glob("*.json") for key in json.loads(file.read_text())}
        return passed or sys.exit("no process of the demo was traced")


def trace_process() -> None:
    """Trace this process, its threads and its forks. Called by the `sitecustomize` of a traced demo."""
    passed: set[Key] = set()
    tries = Counter[Key]()
    holds: dict[type, bool] = {}

    def holds_group(value: object) -> bool:
        if isinstance(value, list | tuple | dict) and value:
            value = next(iter(value.values() if isinstance(value, dict) else value))
        kind = type(value)
        if kind not in holds:
            holds[kind] = any(base.__name__ in TYPES for base in kind.__mro__)
        return holds[kind]

    def has_group(frame: FrameType | None) -> bool:
        for _ in range(DEPTH):
            if frame is None:
                return False
            if "/asyncgrpo/" in frame.f_code.co_filename and any(
                holds_group(value) for value in list(frame.f_locals.values())[:LOCALS]
            ):
                return True
            frame = frame.f_back
        return False

    def on_call(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or "/asyncgrpo/" not in code.co_filename or code.co_name[0] == "<":
            return
        key = code.co_filename.rpartition("/asyncgrpo/")[2], code.co_qualname, code.co_firstlineno
        if key not in passed and tries[key] < TRIES:
            tries[key] += 1
            if has_group(frame):
                passed.add(key)

    def write() -> None:
        sys.setprofile(None)
        file, written = Path(os.environ[TRACE]) / f"{os.getpid()}.json", 0
        while True:
            time.sleep(EVERY_S)
            if len(passed) > written:
                written = len(passed)
                file.with_suffix(".new").write_text(json.dumps(list(passed)))
                file.with_suffix(".new").replace(file)

    def start() -> None:
        threading.Thread(target=write, daemon=True).start()

    threading.setprofile(on_call)
    sys.setprofile(on_call)
    start()
    os.register_at_fork(after_in_child=start)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout; this one without it")
    parser.add_argument("--trace", action="store_true", help="run the demo, and report what a group passes")
    parser.add_argument("--engine", default="torch", choices=["fake", "torch", "sglang"])
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    traced = trace_demo(arguments.root, arguments.engine, arguments.steps) if arguments.trace else None
    print("\n".join(measure(arguments.root, traced)))
