"""A month of `serve`: what a resume costs after 260,000 steps, beside one at step 100.

python -m benchmarks.month

A run of 100 steps is swollen: its events are repeated with later steps and times, its journal begins with segments as a
checkpoint leaves them (`--groups` delivered groups without bodies), `samples/` is full. One JSON line each.
"""

import argparse
import contextlib
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from asyncgrpo.data.prompts import PromptState
from asyncgrpo.journal.format import BatchIssued, Committed, Delivered, RunStarted, pack
from asyncgrpo.journal.history import SUMMARY, read_history, read_rest, segment_path
from asyncgrpo.learner.checkpoints import read_state
from asyncgrpo.recording.progress import Following
from asyncgrpo.recording.samples import path_of
from asyncgrpo.types import PolicyVersion
from benchmarks.measuring import PeakMemory, rounded, show, where
from benchmarks.trials import Fence, last_step

BASE = 100
"""Steps of the run that is swollen."""
SHIFTED = ("tokens_generated", "tokens_dropped", "tokens_filtered", "prompts_done")
"""Fields of a step that are totals of the run."""
GROUPS_PER_STEP, STEPS_PER_SEGMENT = 64, 20
SMALL = ("buffer.prompts_per_step=16", "algorithm.group_size=4")
WITHIN_S = 1800.0
NAMES = {"-m asyncgrpo": "driver", "ray::BufferActor": "buffer", "ray::LearnerActor": "learner"}
"""Processes, by a part of their command line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=260_000)
    parser.add_argument("--groups", type=int, default=16_600_000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with Fence() as fence:
        for line in resumes(fence, options):
            show(line | {"seed": options.seed, **where()})


# -- a resume ----------------------------------------------------------------------------------------------------------


def resumes(fence: Fence, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Resume the short run and the long one, and read the long one's journal without its summary."""
    steps = options.steps // BASE * BASE
    checkpoints = f"run.checkpoint_every={BASE // 5}"
    demo = ["demo", "--engine", "fake", "--seed", str(options.seed), *SMALL, checkpoints]
    ended = fence.run(*demo, "--steps", str(BASE), "--out", "short")
    assert ended.exit == 0, ended.text
    short, long = fence.work / "short", fence.work / "long"
    shutil.copytree(short, long, symlinks=True)
    journal = swell(long, steps, options.groups)
    yield {"benchmark": "journal without a summary"} | journal
    for run, at in ((short, BASE), (long, steps)):
        found = [resume(fence, [*demo, "--steps", str(at + 5 * (n + 1)), "--out", run.name], run, at + 5 * n)
                 for n in range(options.repeats)]  # fmt: skip
        yield {
            "benchmark": "resume",
            "step": at,
            "groups": journal["groups"] if run == long else BASE * 16,
            "events_mb": rounded((run / "metrics.jsonl").stat().st_size / 1e6),
            **{name: [rounded(one[name]) for one in found] for name in found[0]},
        }


def resume(fence: Fence, command: list[str], run: Path, at: int) -> dict[str, float]:
    """Seconds from the command to the first step after `at`, and the largest memory of each process until its end."""
    began, first_s, most = time.monotonic(), None, defaultdict[str, float](float)
    process = fence.start(*command)
    while process.poll() is None and time.monotonic() < began + WITHIN_S:
        for name, mb in memory_now(fence).items():
            most[f"{name}_mb"] = max(most[f"{name}_mb"], mb)
        if first_s is None and last_step(run) > at:
            first_s = time.monotonic() - began
        time.sleep(0.2)
    assert first_s is not None and process.poll() == 0, fence.output()
    return {"first_step_s": first_s, "whole_s": time.monotonic() - began, **most}


def memory_now(fence: Fence) -> dict[str, float]:
    """10⁶ bytes that driver, buffer and learner hold and share with no other."""
    found = defaultdict[str, float](float)
    for process in fence.processes():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            for name in (name for part, name in NAMES.items() if part in command):
                found[name] = max(found[name], process.memory_info().rss / 1e6)
    return found


def done_in(prompts: dict[str, Any]) -> Callable[[int], bool]:
    """Whether a prompt index is done in the state of a checkpoint."""
    state = msgspec.convert(prompts, PromptState)
    return lambda index: index < state.frontier or index in state.done_beyond


# -- the long run ------------------------------------------------------------------------------------------------------


def swell(run: Path, steps: int, groups: int) -> dict[str, float]:
    """Make a run of `BASE` steps one of `steps`. Returns what `swell_journal` does."""
    times = steps // BASE
    checkpoint = run / "checkpoints" / f"step_{BASE:06d}"
    state = read_state(checkpoint)
    num_bytes = swell_events(run / "metrics.jsonl", times, state.record["num_bytes"])
    frontier = state.prompts["frontier"]
    assert not state.prompts["done_beyond"], "the run was done"
    state = msgspec.structs.replace(
        state,
        step=steps,
        prompts=state.prompts | {"frontier": times * frontier},
        totals={name: times * count for name, count in state.totals.items()},
        record=state.record | {"num_bytes": num_bytes, "told": {k: times * n for k, n in state.record["told"].items()}},
    )
    (checkpoint / "state.json").write_bytes(msgspec.json.encode(state))
    for other in checkpoint.parent.iterdir():
        if other != checkpoint:
            shutil.rmtree(other)
    checkpoint.rename(checkpoint.with_name(f"step_{steps:06d}"))
    (run / "progress.json").unlink(missing_ok=True)
    following = Following(run / "metrics.jsonl")
    for event in following.poll():
        if event["event"] == "checkpoint" and event["step"] == steps:
            following.keep()
    samples = path_of(run / "samples", BASE).read_bytes()
    for step in range(max(1, steps - 10_000), steps + 1):
        path = path_of(run / "samples", step)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(samples)
    return swell_journal(run / "journal", steps, groups, state.prompts)


def swell_events(path: Path, times: int, num_bytes: int) -> int:
    """Repeat the events of all steps. Returns the bytes before the last checkpoint."""
    data = path.read_bytes()
    before, after = (data[:num_bytes].splitlines(), data[num_bytes:].splitlines())
    first = next(i for i, line in enumerate(before) if line.startswith(b'{"event":"step"'))
    head, block = before[:first], [msgspec.json.decode(line) for line in before[first:]]
    period_s = block[-1]["time"] - block[0]["time"] + 1.0
    totals = next(event for event in reversed(block) if event["event"] == "step")
    with open(path, "wb") as file:
        file.writelines(line + b"\n" for line in head)
        for n in range(times):
            file.writelines(msgspec.json.encode(later(event, n, period_s, totals)) + b"\n" for event in block)
        place = file.tell()
        for line in after:
            event = msgspec.json.decode(line)
            if event["event"] != "end":
                file.write(msgspec.json.encode(later(event, times - 1, period_s, totals)) + b"\n")
    return place


def later(event: dict[str, Any], n: int, period_s: float, totals: dict[str, Any]) -> dict[str, Any]:
    """The event as it is after `n` times as many steps more."""
    event = event | {"time": event["time"] + n * period_s}
    if "step" in event:
        event["step"] += n * BASE
    if "version" in event:
        lineage, _, number = str(event["version"]).partition(".")
        event["version"] = f"{lineage}.{int(number) + n * BASE}"
    for name in SHIFTED:
        if name in event:
            event[name] += n * totals[name]
    if "tokens" in event:
        event["tokens"] = {fate: count + n * totals["tokens"].get(fate, 0) for fate, count in event["tokens"].items()}
    return event


def swell_journal(folder: Path, steps: int, groups: int, prompts: dict[str, Any]) -> dict[str, float]:
    """Write segments whose groups are all trained, as many as hold `groups`, and their summary.

    Returns what it took to read them without a summary, as the first start after an update does.
    """
    start = next(f.record for f in read_history(folder).found if isinstance(f.record, RunStarted))
    shutil.rmtree(folder)
    folder.mkdir()
    data = b"".join(map(bytes, segment_of(start)))
    number = max(1, groups // (GROUPS_PER_STEP * STEPS_PER_SEGMENT))
    for n in range(1, number + 1):
        segment_path(folder, n).write_bytes(data)
    state = msgspec.structs.replace(msgspec.convert(prompts, PromptState), shares=b"")
    last = [*pack(start), *pack(Committed(step=steps, prompts=state))]
    segment_path(folder, number + 1).write_bytes(b"".join(map(bytes, last)))
    at = PolicyVersion(start.lineage, steps)
    peak, began = PeakMemory(), time.process_time()
    rest = read_rest(folder, at, done_in(prompts))
    spent = {"cpu_s": rounded(time.process_time() - began), "peak_mb": rounded(peak.mb())}
    (folder / SUMMARY).write_bytes(b"".join(map(bytes, rest.past.packed(at))))
    return {"groups": number * GROUPS_PER_STEP * STEPS_PER_SEGMENT, "segments": number + 1} | spent


def segment_of(start: RunStarted) -> Iterator[Any]:
    """The parts of a segment without bodies: groups, and the steps that were trained on them."""
    yield from pack(start)
    for step in range(1, STEPS_PER_SEGMENT + 1):
        version = PolicyVersion(start.lineage, step - 1)
        indices = range((step - 1) * GROUPS_PER_STEP, step * GROUPS_PER_STEP)
        lease_ids = tuple(f"{start.lineage}.{index}.0" for index in indices)
        for index, lease_id in zip(indices, lease_ids, strict=True):
            yield from pack(
                Delivered(lease_id=lease_id, prompt_index=index, tokens=9_000, versions=(version,), head_bytes=600,
                          max_lag=start.max_lag)
            )  # fmt: skip
        yield from pack(BatchIssued(step=step, version=version, lease_ids=lease_ids))


if __name__ == "__main__":
    main()
