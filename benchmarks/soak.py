"""A soak test: the demo for many minutes under kills, freezes, partitions, full disks and outages of the reward.

    python -m benchmarks.soak --minutes 20 --engine torch --per-hour 120 --outages-per-hour 30
    python -m benchmarks.soak --minutes 22 --rounds 1 --outages-per-hour 0 --keep DIR   # 16 kill -9, 6 SIGSTOP, 1 partition

`asyncgrpo demo --chaos` injects the faults. For the outages the reward function raises while a file exists, like a remote
judge that is down. A real Prometheus scrapes the run, with our alerts. Memory, open files, threads, processes, series,
journal, shared memory and Ray's session are sampled every 10 s. The run is ended with SIGTERM. One JSON line at the end.
"""

import argparse
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from asyncgrpo.errors import JournalError
from asyncgrpo.journal.format import Dropped
from asyncgrpo.journal.history import read_run
from benchmarks.leaks import Sampler, bytes_below, read_samples, trends
from benchmarks.measuring import rounded, show, where
from benchmarks.prometheus import Prometheus, contradictions
from benchmarks.trials import Fence, audited, events, last_step, rewards

A_ROUND = (
    *["kill generator"] * 7,
    "kill generators",
    *["kill buffer"] * 4,
    *["kill learner"] * 4,
    *("freeze generator", "freeze buffer", "freeze learner", "pause generator", "pause buffer", "pause learner"),
    "partition network",
)
"""16 kill -9, 6 SIGSTOP, 1 partition."""
AFTER_THE_LAST_FAULT_S = 120.0
STAYS_S = 60.0
"""How long Prometheus watches after the end: a run that ended in order raises no alert."""
START_WITHIN_S = 300.0
END_WITHIN_S = 180.0
LOOK_EVERY_S = 0.1
SUMMED = ("tokens", "dropped", "undone", "lag ", "restarts", "weight syncs")
"""Rows of the summary that the JSON line has."""
AFTER_A_FAULT_S = 5.0
"""How long after the run has recovered a fault counts as over."""

JUDGE = """import os

from asyncgrpo.rewards.rules import demo_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if os.path.exists({path!r}):
        raise ConnectionError("the judge is down")
    return demo_score(solution_str, ground_truth)
"""


@dataclass
class Seen:
    """What was seen of the run from outside while it went on."""

    journal: list[tuple[float, int]] = field(default_factory=list)
    """Unix time and bytes of the journal, whenever they changed."""
    outages: list[tuple[float, float]] = field(default_factory=list)
    """Unix times of the outages."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="torch", choices=["torch", "fake"])
    parser.add_argument("--minutes", type=float, default=20.0, help="from its first step")
    parser.add_argument("--per-hour", type=float, default=120.0, help="faults, drawn")
    parser.add_argument("--rounds", type=int, help="instead: so often 16 kill -9, 6 SIGSTOP and 1 partition, shuffled")
    parser.add_argument("--outages-per-hour", type=float, default=30.0, help="of the reward, 5 to 25 s each")
    parser.add_argument("--max-lag", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for samples, metrics.jsonl, logs and Prometheus' data")
    parser.add_argument("overrides", nargs="*", help="key=value")
    options = parser.parse_args()
    with Fence() as fence:
        show(soak(fence, options))


def soak(fence: Fence, options: argparse.Namespace) -> dict[str, Any]:
    """Run the demo from start to end, and return what its files, its samples and Prometheus say."""
    run, down, kept = fence.work / "soak", fence.work / "down", (options.keep or fence.root / "kept").absolute()
    (fence.work / "judge.py").write_text(JUDGE.format(path=str(down)))
    command = ["demo", "--engine", options.engine, "--max-lag", str(options.max_lag), "--seed", str(options.seed)]
    command += ["--steps", "1000000", "--out", run.name, *faults(options)]
    settings = ["reward.function=judge.py", "buffer.keep_journal=false", "run.samples_every=100"]
    with Prometheus(fence.work, kept / "tsdb") as prometheus:
        process, began = fence.start(*command, *settings, *options.overrides), time.time()
        while last_step(run) < 1 and process.poll() is None and time.time() < began + START_WITHIN_S:
            time.sleep(0.5)
        with Sampler(kept / "samples.jsonl", fence.processes, besides(fence, run, prometheus)):
            seen = watch(process, run, down, options)
        ended_by_itself = process.poll()
        process.send_signal(signal.SIGTERM)
        try:
            exit_: int | None = process.wait(timeout=END_WITHIN_S)
        except subprocess.TimeoutExpired:
            exit_ = None
        time.sleep(STAYS_S)
        fired = prometheus.fired(run.name, began)
    keep(fence, run, kept)
    return {
        "benchmark": "soak",
        "engine": options.engine,
        "minutes": options.minutes,
        "exit": exit_,
        "ended_by_itself": ended_by_itself,
        "last_words": fence.output().strip().splitlines()[-1:],
        **of_the_files(fence, run, seen),
        "alerts": {name: [[round(at - began) for at in span] for span in spans] for name, spans in fired.items()},
        "contradictions": contradictions(fired),
        "trends": trends(read_samples(kept / "samples.jsonl")),
        "left": {what: names for what, names in fence.left().items() if names},
        "seed": options.seed,
        "unix": [round(began), round(time.time())],
    } | where()


def faults(options: argparse.Namespace) -> list[str]:
    """Options of the demo that ask for the faults."""
    if options.rounds is None:
        return ["--chaos", str(options.per_hour)]
    order = list(A_ROUND * options.rounds)
    random.Random(options.seed).shuffle(order)
    per_hour = 3600.0 * len(order) / (60.0 * options.minutes - AFTER_THE_LAST_FAULT_S)
    return ["--chaos", f"{per_hour:.1f}", "--faults", ",".join(order)]


def besides(fence: Fence, run: Path, prometheus: Prometheus) -> dict[str, Callable[[], float | None]]:
    """What is sampled beside the processes."""

    def series() -> float | None:
        """All that Prometheus holds, of targets that are gone too."""
        try:
            return prometheus.ask("status/tsdb")["headStats"]["numSeries"]
        except OSError:
            return None

    return {
        "series": series,
        "journal_mb": lambda: journal_bytes(run) / 1e6,
        "run_mb": lambda: bytes_below(run),
        "logs_mb": lambda: bytes_below(run / "logs"),
        "shm_mb": fence.shared_mb,
        "ray_session_mb": lambda: bytes_below(fence.root / "tmp"),
    }


def keep(fence: Fence, run: Path, kept: Path) -> None:
    """Keep what a look back needs."""
    shutil.copytree(run / "logs", kept / "logs", dirs_exist_ok=True)
    shutil.copy(run / "metrics.jsonl", kept)
    (kept / "said.txt").write_text(fence.output(), encoding="utf-8")


def watch(process: subprocess.Popen[bytes], run: Path, down: Path, options: argparse.Namespace) -> Seen:
    """Watch the journal until the time is over, and make outages now and then."""
    seen, rng = Seen(), random.Random(options.seed)
    until = time.time() + 60.0 * options.minutes

    def next_outage() -> float:
        mean_s = 3600.0 / options.outages_per_hour if options.outages_per_hour else float("inf")
        return time.time() + rng.uniform(0.5, 1.5) * mean_s

    goes_down, comes_back = next_outage(), 0.0
    while time.time() < until and process.poll() is None:
        now, size = time.time(), journal_bytes(run)
        if not seen.journal or seen.journal[-1][1] != size:
            seen.journal.append((now, size))
        if down.exists() and now >= comes_back:
            down.unlink()
            goes_down = next_outage()
        elif not down.exists() and now >= goes_down and comes_back + 30.0 < until:
            comes_back = now + rng.uniform(5.0, 25.0)
            down.touch()
            seen.outages.append((now, comes_back))
        time.sleep(LOOK_EVERY_S)
    down.unlink(missing_ok=True)
    return seen


def journal_bytes(run: Path) -> int:
    """Bytes of the journal on the disk now."""
    sizes = []
    for path in (run / "journal").glob("*"):
        try:
            sizes.append(os.stat(path).st_size)
        except FileNotFoundError:  # retired meanwhile
            continue
    return sum(sizes)


def of_the_files(fence: Fence, run: Path, seen: Seen) -> dict[str, Any]:
    told = events(run)
    faults = [event for event in told if event["event"] == "fault"]
    found = audited(fence, run)
    stops = stops_of(seen.journal)
    troubled = times_of_trouble(told, seen)
    calm = [stop for stop in stops if not any(a < stop[1] and stop[0] < b for a, b in troubled)]
    said = fence.output()
    return {
        "steps": last_step(run),
        "reward": rewards(run),
        "faults": dict(Counter(f"{event['fault']} {event['actor'].partition('-')[0]}" for event in faults)),
        "recovered": sum(event["event"] == "recovered" for event in told),
        "outages": len(seen.outages),
        "outage_s": round(sum(end - start for start, end in seen.outages)),
        "starts_of_the_core": sum(event["event"] == "start" for event in told),
        "restarts": sum(event["event"] == "restart" for event in told),
        "audit_differences": found["differences"],
        "groups": found.get("groups"),
        "prompts_done": found.get("prompts_done"),
        "prompts_dropped": prompts_dropped(run),
        "groups_dropped": dict(sum((Counter(event.get("dropped") or {}) for event in told), Counter())),
        "journal_mb": tenths(seen.journal),
        "worst_stop_s": longest(stops),
        "worst_stop_in_calm_s": longest(calm),
        "worst_checkpoint_s": rounded(max((e["seconds"] for e in told if e["event"] == "checkpoint"), default=0.0)),
        "summary": [row for row in said.splitlines() if row.startswith(SUMMED)],
        "tokens_balance": balance(said),
        "machine_load": round(psutil.getloadavg()[0], 1),
    }


def prompts_dropped(run: Path) -> dict[str, int]:
    """Prompts that are done without having been trained, by reason, as the journal says."""
    try:
        records = [found.record for found in read_run(run).found]
    except JournalError:
        return {}
    return dict(Counter(record.reason for record in records if isinstance(record, Dropped) and record.is_final))


def stops_of(journal: list[tuple[float, int]]) -> list[tuple[float, float]]:
    """Times in which the buffer wrote nothing: it stood still, or there was nothing to write."""
    return [(before, after) for (before, _), (after, _) in itertools.pairwise(journal)]


def times_of_trouble(told: list[dict], seen: Seen) -> list[tuple[float, float]]:
    """The times from a fault until the run had recovered, and the outages."""
    spans, open_ = list(seen.outages), {}
    for event in told:
        key = (event.get("fault"), event.get("actor"))
        if event["event"] == "fault":
            open_[key] = event["time"]
        elif event["event"] == "recovered" and key in open_:
            spans.append((open_.pop(key), event["time"]))
    spans += [(start, float("inf")) for start in open_.values()]
    return [(start, end + AFTER_A_FAULT_S) for start, end in spans]


def longest(stops: list[tuple[float, float]]) -> float:
    return rounded(max((after - before for before, after in stops), default=0.0), 3)


def tenths(journal: list[tuple[float, int]]) -> list[float]:
    """The largest size in each tenth of the time, 10⁶ bytes. A journal that is kept short stays flat."""
    if not journal:
        return []
    first, last = journal[0][0], journal[-1][0]
    most = [0] * 10
    for at, size in journal:
        place = min(9, int(10 * (at - first) / max(last - first, 1.0)))
        most[place] = max(most[place], size)
    return [round(size / 1e6, 3) for size in most]


def balance(said: str) -> str:
    """Whether the tokens of the summary add up: the first figure is the sum of the others, without those in parentheses."""
    row = next((row for row in reversed(said.splitlines()) if row.startswith("tokens")), "")
    figures = [int(text.replace(",", "")) for text in re.findall(r"\d[\d,]*", re.sub(r"\(.*?\)", "", row))]
    if len(figures) < 2:
        return "no line about tokens"
    return "yes" if figures[0] == sum(figures[1:]) else f"no: {figures[0]:,} is not {sum(figures[1:]):,}"


if __name__ == "__main__":
    main()
