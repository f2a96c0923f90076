"""The house keeps its floors: imports go down, neighbours do not meet, and each third-party library has one owner.

Read from the syntax tree, so nothing is imported. The same rules are run over a small planted house, to prove that
each of them can fail.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "asyncgrpo"

FLOORS = {
    "cli": 6,
    "__main__": 7,
    "cluster": 5,
    "generators": 4,
    "buffer": 4,
    "learner": 4,
    "data": 3,
    "rewards": 3,
    "weights": 3,
    "recording": 3,
    "algorithms": 2,
    "wire": 2,
    "config": 1,
    "metrics": 1,
    "logs": 1,
    "liveness": 1,
    "scratch": 1,
    "types": 0,
    "errors": 0,
}

# library -> modules that may import it, as the start of a dotted name below `asyncgrpo`.
OWNERS = {
    "ray": ("cluster",),
    "zmq": ("wire",),
    "sglang": (
        "generators.sglang",  # sglang_engine.py and its helpers sglang_*.py
    ),
    "prometheus_client": ("metrics",),
    "omegaconf": ("config",),
}

# Rooms that start without torch, which takes seconds and hundreds of MiB to import.
WITHOUT_TORCH = {"buffer", "wire", "rewards", "config", "types", "cli"}


class Import(NamedTuple):
    """One import statement."""

    module: str
    """Where it stands, dotted, without `asyncgrpo.`."""
    target: str
    """What it imports, dotted and absolute."""
    line: int
    at_start: bool
    """Runs when the module is imported: not inside a function, not under TYPE_CHECKING."""


def room(module: str) -> str:
    """The first name below `asyncgrpo`; the modules config_*.py are one room."""
    first = module.split(".")[0]
    return "config" if first.startswith("config_") else first


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
    """True in an owner, below it, and in `config_loading` for the owner `config`."""
    return any(module == owner or module.startswith((f"{owner}.", f"{owner}_")) for owner in owners)


def violations(package: Path) -> list[str]:
    found = []
    for where, target, line, at_start in imports_below(package):
        here, place = room(where), f"{where or '__init__'}:{line}"
        library, _, rest = target.partition(".")
        if library == "asyncgrpo":
            there = room(rest)
            if there not in FLOORS:
                continue  # a name of the package itself, such as __version__
            if here and here not in FLOORS:
                found.append(f"{place}: {here} has no floor; give it one in this test")
            elif there != here and FLOORS[there] >= FLOORS.get(here, -1):
                found.append(f"{place}: {here or 'the package'} imports {there}, which is not below it")
        elif library in OWNERS and not is_owned(where, OWNERS[library]):
            found.append(f"{place}: {library} belongs to {', '.join(OWNERS[library])}")
        elif library == "torch" and here in WITHOUT_TORCH and at_start:
            found.append(f"{place}: {here} must start without torch")
    return found


def test_the_house_keeps_its_floors():
    assert violations(PACKAGE) == []


def test_every_room_has_a_floor():
    rooms = {room(path.stem) for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert rooms - {"__init__"} <= set(FLOORS)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        (
            "buffer/buffer.py",
            "from asyncgrpo.learner.step import Step",
            "buffer imports learner, which is not below it",
        ),
        ("buffer/buffer.py", "from asyncgrpo import learner", "buffer imports learner, which is not below it"),
        ("buffer/buffer.py", "from ..learner import step", "buffer imports learner, which is not below it"),
        ("buffer/buffer.py", "def f():\n    import asyncgrpo.learner", "buffer imports learner, which is not below it"),
        ("wire/codec.py", "from asyncgrpo.algorithms import losses", "wire imports algorithms, which is not below it"),
        ("types.py", "from asyncgrpo.config_help import explain", "types imports config, which is not below it"),
        ("__init__.py", "from asyncgrpo.types import Group", "the package imports types, which is not below it"),
        ("attic/box.py", "from asyncgrpo.types import Group", "attic has no floor"),
        ("learner/step.py", "import ray", "ray belongs to cluster"),
        ("cli/doctor.py", "def f():\n    from ray import init", "ray belongs to cluster"),
        ("buffer/service.py", "import zmq.asyncio", "zmq belongs to wire"),
        ("generators/service.py", "import sglang as sgl", "sglang belongs to generators.sglang"),
        ("buffer/buffer.py", "from prometheus_client import Counter", "prometheus_client belongs to metrics"),
        ("cli/config.py", "from omegaconf import OmegaConf", "omegaconf belongs to config"),
        ("rewards/pool.py", "import torch", "rewards must start without torch"),
        ("config_loading.py", "from torch.nn import Module", "config must start without torch"),
        ("buffer/buffer.py", "try:\n    import torch\nexcept ImportError: ...", "buffer must start without torch"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, source, complaint):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source)
    found = violations(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cluster/serve.py", "import ray\nfrom asyncgrpo.learner import step\nfrom asyncgrpo.cluster import place"),
        ("config_loading.py", "from omegaconf import OmegaConf\nfrom asyncgrpo.config import Config"),
        ("generators/sglang_engine.py", "import sglang\nimport torch"),
        ("cli/doctor.py", "def check():\n    import torch"),
        ("buffer/buffer.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("cli/run.py", "from asyncgrpo import __version__"),
    ],
)
def test_what_is_allowed_is_not_complained_about(tmp_path, file, source):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []
