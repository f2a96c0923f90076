"""`python -m benchmarks.measure` counts code, not docstrings or comments, and finds what holds a group."""

from pathlib import Path

from benchmarks.measure import ROOT, TYPES, measure

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
    passed = {("planted.py", "_once", 11)}  # as `--trace` finds them
    assert list(measure(tmp_path, passed))[-1].endswith("1 files, 1 functions, 3 lines of code in them")


def test_every_type_that_holds_a_group_is_in_the_package():
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "asyncgrpo").rglob("*.py"))
    assert [name for name in sorted(TYPES) if f"class {name}" not in source] == []
