"""Imports only go down the layers, packages of one layer do not import each other, and each library has one owner.

Read from the syntax trees, so nothing is imported. The same rules are run over a small planted package, to prove that
each of them can fail.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "asyncgrpo"

_NAMES = {
    9: "__main__",
    8: "cli",
    7: "tools planner",
    6: "cluster",
    5: "generators buffer learner",
    4: "journal engines control environments",
    3: "data rewards weights recording",
    2: "config metrics logs scratch",
    1: "algorithms wire warm guests",
    0: "types host isolation errors liveness",
}
LAYERS = {name: layer for layer, names in _NAMES.items() for name in names.split()}

# library -> modules that may import it, as the start of a dotted name below `asyncgrpo`.
OWNERS = {
    "ray": ("cluster",),
    "zmq": ("wire",),
    "sglang": ("engines.sglang",),
    "prometheus_client": ("metrics",),
    "omegaconf": ("config",),
    "aiohttp": ("control", "rewards.http", "environments.chat", "environments.openenv"),
    "datasets": ("data.sources",),
    "PIL": ("data.images",),
    "reasoning_gym": ("data.sources", "rewards.maths"),
}

# Packages that start without torch, which takes seconds and hundreds of MiB to import.
WITHOUT_TORCH = {"buffer", "wire", "rewards", "config", "types", "cli", "control", "recording", "environments"}


class Import(NamedTuple):
    module: str
    """Where it stands, dotted, without `asyncgrpo.`."""
    target: str
    """What it imports, dotted and absolute."""
    line: int
    at_start: bool
    """Runs when the module is imported: not inside a function, not under TYPE_CHECKING."""


def package_of(module: str) -> str:
    """The first name below `asyncgrpo`: a package, or a module beside the packages."""
    return module.split(".")[0]


def imports_below(package: Path) -> Iterator[Import]:
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        parents = ("asyncgrpo", *parts[:-1])

        def walk(node: ast.AST, at_start: bool, module: str = module, parents: tuple[str, ...] = parents):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.Import):
                    for alias in child.names:
                        yield Import(module, alias.name, child.lineno, at_start)
                elif isinstance(child, ast.ImportFrom):
                    up = parents[: len(parents) - child.level + 1] if child.level else ()
                    base = ".".join((*up, *(child.module or "").split("."))).strip(".")
                    for alias in child.names:  # `from asyncgrpo import buffer` imports the room, not a name
                        yield Import(module, f"{base}.{alias.name}", child.lineno, at_start)
                in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from walk(child, at_start and not in_function and not for_types)

        yield from walk(ast.parse(file.read_text(encoding="utf-8")), at_start=True)


def is_owned(module: str, owners: tuple[str, ...]) -> bool:
    return any(module == owner or module.startswith(f"{owner}.") for owner in owners)


def violations(package: Path) -> list[str]:
    found = []
    for where, target, line, at_start in imports_below(package):
        here, place = package_of(where), f"{where or '__init__'}:{line}"
        library, _, rest = target.partition(".")
        if library == "asyncgrpo":
            there = package_of(rest)
            if there not in LAYERS:
                continue  # a name of the package itself, such as __version__
            if here and here not in LAYERS:
                found.append(f"{place}: {here} has no layer; give it one in this test")
            elif there != here and LAYERS[there] >= LAYERS.get(here, -1):
                found.append(f"{place}: {here or 'the package'} imports {there}, which is not below it")
        elif library in OWNERS and not is_owned(where, OWNERS[library]):
            found.append(f"{place}: {library} belongs to {', '.join(OWNERS[library])}")
        elif library == "torch" and here in WITHOUT_TORCH and at_start:
            found.append(f"{place}: {here} must start without torch")
    return found


def test_imports_only_go_down_the_layers():
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("buffer/buffer.py", "from ..learner import step", "buffer imports learner, which is not below it"),
        ("buffer/buffer.py", "def f():\n    from asyncgrpo import learner", "imports learner, which is not below it"),
        ("wire/codec.py", "from asyncgrpo.algorithms import losses", "wire imports algorithms, which is not below it"),
        ("__init__.py", "from asyncgrpo.types import Group", "the package imports types, which is not below it"),
        ("attic/box.py", "from asyncgrpo.types import Group", "attic has no layer"),
        ("learner/step.py", "import ray", "ray belongs to cluster"),
        ("generators/service.py", "import sglang as sgl", "sglang belongs to engines.sglang"),
        ("rewards/pool.py", "import torch", "rewards must start without torch"),
        ("buffer/buffer.py", "try:\n    import torch\nexcept ImportError: ...", "buffer must start without torch"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, source, complaint):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(source)
    (found,) = violations(tmp_path)
    assert complaint in found
