"""What a run takes of the machine, looked at every few seconds, and whether that grows."""

import contextlib
import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

EVERY_S = 10.0
WARM_UP_S = 120.0
"""Left out of the fits: engines load."""
BINS = 20
"""Means of so many equal times are fitted: looks that follow each other are not independent."""
T_95 = 2.101
"""Student's t for 95 % and BINS - 2 degrees of freedom."""
_SCRIPTS = ("python", "python3")

Sample = dict[str, Any]


class Sampler:
    """Samples a tree of processes into a file of JSON lines, for the length of a `with` block."""

    def __init__(
        self,
        path: Path,
        processes: Callable[[], Iterable[psutil.Process]],
        others: dict[str, Callable[[], float | None]],
    ) -> None:
        """
        Args:
            others: what is counted besides, by name.
        """
        self._path, self._processes, self._others = path, processes, others
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with open(self._path, "w", encoding="utf-8") as file:
            while not self._over.wait(EVERY_S):
                sample = sample_of(self._processes()) | {name: count() for name, count in self._others.items()}
                file.write(json.dumps(sample) + "\n")
                file.flush()


def sample_of(processes: Iterable[psutil.Process]) -> Sample:
    """Time, processes, resident memory, open files and threads, in all and by what the processes are."""
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0, 0])
    for process in processes:
        with contextlib.suppress(psutil.Error):
            with process.oneshot():
                counts = 1, process.memory_info().rss / 1e6, process.num_fds(), process.num_threads()
                kind = by_kind[kind_of(process.cmdline())]
            kind[:] = [a + b for a, b in zip(kind, counts, strict=True)]
    number, rss, files, threads = (round(sum(kind[i] for kind in by_kind.values()), 1) for i in range(4))
    by = {name: [round(count, 1) for count in kind] for name, kind in sorted(by_kind.items())}
    return {"time": time.time(), "processes": number, "rss_mb": rss, "fds": files, "threads": threads, "by": by}


def kind_of(command: Sequence[str]) -> str:
    """What a process is, by its command line: `ray::BufferActor`, `raylet`, `agent.py`."""
    words = [word for word in " ".join(command).split() if word]
    if not words:
        return "?"
    first = os.path.basename(words[0])
    if first.startswith("ray::"):
        return first.partition(".")[0]
    if first.startswith(_SCRIPTS):
        return next((os.path.basename(word) for word in words[1:] if not word.startswith("-")), first)
    return first


def read_samples(path: Path) -> list[Sample]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def bytes_below(folder: Path) -> float:
    """10⁶ bytes of the files below a folder that disappear from it while it is read, or do not."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(top, name)).st_blocks * 512
    return round(total / 1e6, 3)


def trends(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """For each count: its growth in an hour with half of its 95 % interval, and the means of the first and last quarter."""
    began = samples[0]["time"] + WARM_UP_S if samples else 0.0
    kept = [sample for sample in samples if sample["time"] >= began]
    names = [name for name in (kept[0] if kept else {}) if name not in ("time", "by")]
    columns = {name: [(sample["time"], sample[name]) for sample in kept if sample[name] is not None] for name in names}
    for kind in {kind for sample in kept for kind in sample["by"]}:
        for i, what in enumerate(("processes", "rss_mb", "fds", "threads")):
            columns[f"{what} {kind}"] = [(s["time"], s["by"].get(kind, [0] * 4)[i]) for s in kept]
    return {name: trend(column) for name, column in columns.items() if len(column) >= 2 * BINS}


def trend(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Least squares through the means of BINS equal parts of (Unix time, value)."""
    hours, values = (np.array(column) for column in zip(*points, strict=True))
    hours = (hours - hours[0]) / 3600.0
    x, y = (np.array([part.mean() for part in np.array_split(column, BINS)]) for column in (hours, values))
    spread = ((x - x.mean()) ** 2).sum()
    growth = ((x - x.mean()) * (y - y.mean())).sum() / spread
    rest = y - y.mean() - growth * (x - x.mean())
    error = math.sqrt((rest**2).sum() / (BINS - 2) / spread)
    quarter = len(values) // 4
    return {
        "per_hour": round(float(growth), 3),
        "plus_minus": round(T_95 * error, 3),
        "first_quarter": round(float(values[:quarter].mean()), 2),
        "last_quarter": round(float(values[-quarter:].mean()), 2),
    }
