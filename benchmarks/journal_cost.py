"""What the journal costs a run: the records of a finished run are written again and compared with the time of its steps.

    asyncgrpo demo --engine torch --out runs/measured
    python -m benchmarks.journal_cost runs/measured --runs 9

Appends are timed one by one; a sync is due every half second of the run's own time, as in the run (`fsync_interval`), so
its cost a step is the time of one sync x the seconds of a step / 0.5. Both happen in the buffer's process, while the
learner trains: the share says how much of a step that process is busy with the journal, not by how much a step is longer.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from asyncgrpo.journal.format import BatchIssued, JournalRecord, RunStarted, Whole, scan
from asyncgrpo.journal.history import History, read_history
from asyncgrpo.journal.log import SYNC_EVERY_S, Journal
from asyncgrpo.wire.codec import Buffer
from benchmarks.measuring import line, show

Written = list[tuple[JournalRecord, list[Buffer]]]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run that kept a journal")
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args(argv)
    began, written = records(arguments.run)
    steps = sum(isinstance(record, BatchIssued) for record, _ in written)
    step_s = statistics.median(step_seconds(arguments.run))
    appends, syncs = [], []
    with tempfile.TemporaryDirectory(dir=arguments.run) as folder:
        for number in range(-1, arguments.runs):
            append_s, sync_s = write_again(Path(folder) / str(number), began, written, steps)
            if number >= 0:
                appends.append(append_s / step_s)
                syncs.append(sync_s * max(1.0, step_s / SYNC_EVERY_S) / step_s)
    size = sum(len(part) for _, body in written for part in body)
    about = {"steps": steps, "step_s": round(step_s, 3), "body_bytes_a_step": size // max(1, steps)}
    show(line("journal: appends of a step / step", appends, "share", seed=0, **about))
    show(line("journal: syncs of a step / step", syncs, "share", seed=0, **about))
    both = [append + sync for append, sync in zip(appends, syncs, strict=True)]
    show(line("journal / step", both, "share", seed=0, **about))


def records(run: Path) -> tuple[RunStarted, Written]:
    """The first record of the journal, and the others with their bodies."""
    written: Written = []
    began: RunStarted | None = None
    for segment in read_history(run / "journal").segments:
        for item in scan(segment.path.read_bytes()):
            if isinstance(item, Whole) and isinstance(item.record, RunStarted):
                began = began or item.record
            elif isinstance(item, Whole):
                written.append((item.record, [bytes(item.body)] if len(item.body) else []))
    assert began is not None, f"{run} has no journal"
    return began, written


def step_seconds(run: Path) -> list[float]:
    """Seconds of the steps after the first, which includes work that is done once."""
    events = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    return [sum(event["seconds"].values()) for event in events if event["event"] == "step"][1:]


def write_again(folder: Path, began: RunStarted, written: Written, steps: int) -> tuple[float, float]:
    """Seconds of the appends of one step, and of one sync after them."""
    journal = Journal(History(folder, []), began, "fsync_interval", clock=lambda: 0.0)  # syncs only when told
    appending, syncing = 0.0, []
    for record, body in written:
        started = time.perf_counter()
        journal.append(record, body)
        appending += time.perf_counter() - started
        if isinstance(record, BatchIssued):
            started = time.perf_counter()
            journal.sync()
            syncing.append(time.perf_counter() - started)
    journal.close()
    return appending / max(1, steps), statistics.median(syncing)


if __name__ == "__main__":
    main()
