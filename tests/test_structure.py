"""The shape of the package: few files, short functions, a core that is read in an afternoon.

`python -m tests.test_structure` prints the figures.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asyncgrpo"
FILES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def on_the_way() -> list[Path]:
    """Files that one group passes: those of the stops in `docs/architecture.md`."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    flow = page.partition("## How a group flows")[2].partition("\n## ")[0]
    stops = re.findall(r"^\| \d+ \|.*$", flow, re.MULTILINE)
    assert len(stops) == 14
    return _files("\n".join(stops))


def core() -> list[Path]:
    """Files of the afternoon's reading in `docs/develop.md`."""
    page = (ROOT / "docs" / "develop.md").read_text(encoding="utf-8")
    return _files(page.partition("## An afternoon's reading")[2].partition("For an evening")[0])


def _files(text: str) -> list[Path]:
    named = dict.fromkeys(re.findall(r"`(asyncgrpo/[\w/]+(?:\.py)?)/?`", text))
    paths = [ROOT / name for name in named]
    return list(dict.fromkeys(f for p in paths for f in ([p] if p.suffix else sorted(p.glob("[!_]*.py")))))


def lines(paths: list[Path]) -> int:
    return sum(FILES[path].count("\n") for path in paths)


def functions() -> list[tuple[int, str]]:
    """Lines and name of every function, the longest first."""
    return sorted(
        (
            (node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
            for path, source in FILES.items()
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        ),
        reverse=True,
    )


def importers() -> dict[str, set[str]]:
    """Module -> modules that import it or from it."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES}
    found: dict[str, set[str]] = defaultdict(set)
    for path, source in FILES.items():
        here = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(source)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if name in modules and name != here:
                    found[name].add(here)
    return {module: found[module] for module in modules}


def test_there_are_few_files():
    assert len(FILES) <= 237


def test_one_group_passes_few_files():
    assert all(path in FILES for path in on_the_way())
    assert len(on_the_way()) <= 25


def test_a_function_fits_a_screen():
    assert [name for length, name in functions() if length > 60] == []


def test_the_core_is_an_afternoon():
    assert all(path in FILES for path in core())
    assert lines(core()) <= 4_450


if __name__ == "__main__":
    lengths = [length for length, _ in functions()]
    single = [module for module, by in importers().items() if len(by) == 1]
    print(f"files                    {len(FILES)}")
    print(f"lines                    {lines(list(FILES)):,}")
    print(f"the core                 {len(core())} files, {lines(core()):,} lines")
    print(f"one group's way          {len(on_the_way())} files, {lines(on_the_way()):,} lines")
    print(f"modules with 1 importer  {len(single)}")
    print(
        f"functions                {len(lengths)}, median {lengths[len(lengths) // 2]} lines, longest {functions()[0]}"
    )
