"""`python -m benchmarks.measure` counts code, not docstrings or comments, and finds what holds a group."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import ROOT, TRACE, TYPES, measure

SOURCE = '''"""A module
of two lines."""

import os  # a comment


class Group:
    """The buffer tells nobody."""


def _once(group):
    # Reasons do not count.
    return [group,
            os]


def run():
    """What it does."""
    return _once(Group())
'''


def planted(folder: Path) -> Path:
    for name in ("asyncgrpo", "tests", "benchmarks", "docs"):
        (folder / name).mkdir()
    (folder / "asyncgrpo" / "__init__.py").touch()
    (folder / "asyncgrpo" / "planted.py").write_text(SOURCE)
    return folder


def test_what_is_counted(tmp_path):
    report = "\n".join(measure(planted(tmp_path)))
    assert "lines of code    7 of 19" in report
    assert "named once       1 of 1 private functions, 3 lines" in report
    assert "dialect words    2, 105.3 in 1,000 lines" in report
    assert "question words   open 33% of docstrings" in report


def test_functions_that_a_group_passes_are_traced(tmp_path):
    folder = planted(tmp_path)
    program = (
        "import threading, time; from benchmarks.measure import trace_process; trace_process();"
        "from asyncgrpo.planted import run;"
        "thread = threading.Thread(target=run); thread.start(); thread.join(); time.sleep(2)"
    )
    environment = {TRACE: str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    (found,) = tmp_path.glob("*.json")
    passed = {tuple(key) for key in json.loads(found.read_text())}
    assert passed == {("planted.py", "_once", 11)}
    assert list(measure(folder, passed))[-1] == f"{'    planted.py':<16} 1 files, 1 functions, 3 lines of code in them"


def test_every_type_that_holds_a_group_is_in_the_package():
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "asyncgrpo").rglob("*.py"))
    assert [name for name in sorted(TYPES) if f"class {name}" not in source] == []
