"""The JSON line of a measurement: its figures, the machine, the commit, the versions, and how often it was repeated.

A benchmark prints one JSON line for each measurement, warms up, repeats, and asserts nothing. Its figures are medians,
with the least and the largest beside them: one figure alone cannot be told from an accident.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


def device_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser for a benchmark on a card, described by the docstring of its module."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    return parser


def line(what: str, values: Sequence[float], unit: str, *, seed: int, digits: int = 4, **fields: object) -> dict:
    """The JSON line of one measurement.

    Args:
        what: what is measured.
        values: the values of the repetitions, in `unit`; `value` is their median.
        seed: seed of weights and data.
        digits: significant digits.
        fields: sizes, settings, and other figures of the same repetitions.
    """
    return {
        "what": what,
        "value": rounded(statistics.median(values), digits),
        "unit": unit,
        "spread": [rounded(min(values), digits), rounded(max(values), digits)],
        "runs": len(values),
        **fields,
        "seed": seed,
        **where(),
    }


def show(measured: dict) -> None:
    print(json.dumps(measured), flush=True)


def rounded(value: float, digits: int = 4) -> float:
    """`value` with that many significant digits."""
    return float(f"{value:.{digits}g}")


class PeakMemory:
    """How much the resident memory of this process has grown at most since this was made. Linux only."""

    def __init__(self) -> None:
        self._base = _kibibytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # 5: VmHWM begins anew

    def mb(self) -> float:
        """Bytes as 10⁶ bytes."""
        return (_kibibytes("VmHWM") - self._base) * 1024 / 1e6


def where() -> dict[str, object]:
    """Date, machine and how busy it is, commit, versions."""
    load = f"{os.getloadavg()[0]:.1f}"
    return {"date": time.strftime("%Y-%m-%d"), "machine": _machine(), "load": load, **_code()}


@cache
def _machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        named = [row for row in cpuinfo.read_text().splitlines() if row.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    return f"{model}, {os.cpu_count()} cores"


@cache
def _code() -> dict[str, object]:
    """The commit, with a + where files differ from it, and versions of what the learner runs on."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
    try:
        commit, changed = (_git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain"))
        return {"commit": commit + ("+" if changed else ""), "versions": versions}
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        return {"commit": None, "versions": versions}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _kibibytes(field: str) -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(field))
