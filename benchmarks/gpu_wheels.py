"""The packages that a machine with a card and without a network lacks: downloaded here, carried, installed there.

The machine has Python 3.12 with torch, transformers, peft and what they need (`benchmarks.gpu_day`), in its own versions. The
others are those of requirements/cpu.txt, as in the tests.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.measuring import ROOT

NAMES = (
    *("msgspec", "omegaconf", "pyzmq", "prometheus-client", "rich", "xxhash"),
    *("math-verify", "latex2sympy2_extended", "antlr4-python3-runtime"),
    *("typer", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("ray", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py"),
    "pytest-asyncio",
)
"""Packages that are carried, each line with what its first one needs."""
THERE = frozenset(
    {"aiohttp", "matplotlib", "numpy", "peft", "pillow", "psutil", "pyarrow", "safetensors", "torch", "transformers"}
)
"""What asyncgrpo needs and the machine has."""
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT_MIB = 56
"""A call carries 64 MiB, the working tree included."""
JAVA = "ray/jars/"
"""The part of Ray that only Java programs use, a third of its wheel. Without it everything goes into one call."""


def download(folder: Path) -> None:
    """Download the wheels into an empty `folder`. Exits with a sentence if they are too large to carry."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    platforms = [f"--platform={name}" for name in PLATFORMS]
    chosen = ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *platforms]
    _pip("download", "-q", *chosen, "-d", str(folder), *pins(NAMES))
    for wheel in folder.glob("ray-*.whl"):
        leave_out(wheel, JAVA)
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in folder.glob("*.whl")}
    print(f"{len(sizes)} wheels, {sum(sizes.values()):.1f} MiB")
    if sum(sizes.values()) > LIMIT_MIB:
        raise SystemExit(f"{folder} is larger than {LIMIT_MIB} MiB, which is what one call can carry: {sizes}")


def install(folder: Path, site: Path) -> None:
    """Install the wheels of `folder` into `site`, which is to be on PYTHONPATH. Asks no network. Once a machine."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise SystemExit(f"{folder} has no wheels; `python -m benchmarks.gpu_day wheels {folder}` downloads them")
    done = site / "installed"
    if not done.exists():
        _pip("install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site), *wheels)
        done.touch()
    print(f"{len(wheels)} wheels are in {site}")


def pins(names: tuple[str, ...]) -> list[str]:
    """`name==version` of each name, as requirements/cpu.txt has it."""
    text = (ROOT / "requirements" / "cpu.txt").read_text()
    pinned = {match[1].lower().replace("_", "-"): match[0] for match in re.finditer(r"^([\w.-]+)==[^\s;]+", text, re.M)}
    return [pinned[name.lower().replace("_", "-")] for name in names]


def leave_out(wheel: Path, folder: str) -> None:
    """Write the wheel again without the files below `folder`, in its list of files neither."""
    slim = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for entry in old.infolist():
            if entry.filename.startswith(folder):
                continue
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                kept = [row for row in data.decode().splitlines(keepends=True) if not row.startswith(folder)]
                data = "".join(kept).encode()
            new.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
    slim.replace(wheel)


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)
