"""Does every extra of pyproject.toml install? Resolves each for each Python, without downloading a package.

    python packaging/check_extras.py

uv reads only the metadata that a package index serves beside its files: some seconds, some 50 MB in its cache. Where uv is
not installed, it is fetched into a temporary folder. The platform is Linux on x86-64 with glibc 2.34, which is what SGLang's
wheel asks for.

What must hold: there is a solution of wheels alone (`FROM_SOURCE` apart) for all extras together, and so for each of them; and `[sglang]`, whose
kernels are built against one torch, brings that torch on every Python, other extras beside it or not.

Exit code: 0 it holds, 1 it does not, 3 no package index is reachable.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12")
PLATFORM = "x86_64-manylinux_2_34"
SHOWN = ("torch", "transformers", "ray", "numpy")
UNREACHABLE = 3
AT_ONCE = 6
ALL = "all"
FROM_SOURCE = ("cellpylib", "pycosat", "zss")
"""Published without wheels; `[gym]` brings them, pip builds them, and pycosat needs a C compiler."""

Resolved = dict[str, str]
"""Package to version."""


class Unreachable(Exception):
    """The index does not answer."""


class Unsolvable(Exception):
    """There is no set of versions. The text says why."""


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = sorted(project["optional-dependencies"])
    with tempfile.TemporaryDirectory() as folder:
        try:
            uv = find_uv(Path(folder))
            found, problems = resolve_all(uv, {"": [], "sglang": ["sglang"], ALL: extras})
            if problems:  # which of them is it?
                problems += resolve_all(uv, {extra: [extra] for extra in extras if extra != "sglang"})[1]
        except Unreachable as error:
            print(f"no package index is reachable: {error}")
            return UNREACHABLE
    for (python, name), resolved in found.items():
        shown = ", ".join(f"{package} {resolved[package]}" for package in SHOWN if package in resolved)
        print(f"Python {python}  [{name}]  {len(resolved)} packages: {shown}")
    problems += several_torches(found)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def resolve_all(uv: str, choices: dict[str, list[str]]) -> tuple[dict[tuple[str, str], Resolved], list[str]]:
    """Resolve each choice of extras for each Python: what was found, and a sentence for each without a solution."""
    found, problems = {}, []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        cells = [(python, name) for name in choices for python in PYTHONS]
        tasks = [pool.submit(resolve, uv, python, choices[name]) for python, name in cells]
        for (python, name), task in zip(cells, tasks, strict=True):
            try:
                found[python, name] = task.result()
            except Unsolvable as error:
                problems.append(f"Python {python}, [{name}]: {error}")
    return found, problems


def find_uv(folder: Path) -> str:
    """The program, which is fetched into `folder` where it is not installed. Raises Unreachable."""
    here = shutil.which("uv")
    if here:
        return here
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), "uv"]
    fetched = subprocess.run(command, capture_output=True, text=True)
    if fetched.returncode:
        raise Unreachable(f"uv is not installed and cannot be fetched: {_last(fetched.stderr)}")
    return str(folder / "bin" / "uv")


def resolve(uv: str, python: str, extras: list[str]) -> Resolved:
    """The versions that an installation with these extras gets. Raises Unreachable or Unsolvable."""
    chosen = [argument for extra in extras for argument in ("--extra", extra)]
    quiet = ["-q", "--no-header", "--no-annotate", "--color", "never", "--only-binary", ":all:"]
    quiet += [argument for name in FROM_SOURCE for argument in ("--no-binary", name)]
    command = [uv, "pip", "compile", *quiet, "--python-version", python, "--python-platform", PLATFORM, *chosen]
    said = subprocess.run([*command, "pyproject.toml"], cwd=ROOT, capture_output=True, text=True)
    if said.returncode:
        error = " ".join(said.stderr.split())
        raise (Unsolvable if "No solution found" in error else Unreachable)(error[:600])
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", said.stdout, re.MULTILINE))


def several_torches(found: dict[tuple[str, str], Resolved]) -> list[str]:
    """A sentence if the solutions with SGLang differ in torch."""
    versions = {(python, name): got["torch"] for (python, name), got in found.items() if name in ("sglang", ALL)}
    if len(set(versions.values())) <= 1:
        return []
    told = ", ".join(f"{version} on Python {python} with [{name}]" for (python, name), version in versions.items())
    return [f"SGLang's kernels are built against one torch, and there are several: {told}"]


def _last(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "")[:300]


if __name__ == "__main__":
    sys.exit(main())
