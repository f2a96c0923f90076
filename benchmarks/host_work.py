"""Where the CPU time of learner, generators and buffer goes over one demo.

python -m benchmarks.host_work --engine torch --steps 40 --skip 10

Every 20 ms a thread in each process reads how much CPU time each of its Python threads has used since the last time, and counts
it for the innermost function of ours that the thread is in, or else the innermost of all. What no Python thread has used
belongs to threads of libraries. The output has one JSON line for each kind of process, with the shares of the files and of the
functions that have most.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY_S, SWITCH_S, WRITE_EVERY_S = 0.02, 1e-4, 1.0
FOLDER = "ASYNCGRPO_HOST_WORK"
SHOWN = 14
KINDS = {"LearnerActor": "learner", "GeneratorActor": "generator", "BufferActor": "buffer"}


def main() -> None:
    from benchmarks.measuring import show, where  # not in the processes of the run
    from benchmarks.trials import Fence

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["torch", "sglang"], default="torch")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skip", type=int, default=10, help="steps that are not counted: imports and compiling")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text("import benchmarks.host_work as it\nit.begin()\n")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        with Fence({FOLDER: folder}) as fence:
            run = fence.work / "run"
            command = fence.start(
                *("demo", "--engine", arguments.engine, "--seed", str(arguments.seed)),
                *("--out", str(run), "--steps", str(arguments.steps)),
            )
            while command.poll() is None:
                time.sleep(0.1)
                events = run / "metrics.jsonl"
                if events.exists() and events.read_text().count('"event":"step"') >= arguments.skip:
                    (Path(folder) / "count").touch()
            if command.returncode:
                raise SystemExit(fence.output())
            if '"version":"2.' in events.read_text():
                raise SystemExit("a process was lost and started again, so imports were counted: measure again")
        found: dict[str, Counter[str]] = {}
        for file in Path(folder).glob("*.json"):
            kind, seconds = json.loads(file.read_text())
            found.setdefault(kind, Counter()).update(seconds)
    for kind, seconds in sorted(found.items()):
        total, files = seconds.total(), Counter[str]()
        for name, spent in seconds.items():
            files[name.partition(":")[0] if ":" in name else "libraries"] += spent
        shares = {
            what: {name: round(spent / total, 3) for name, spent in of.most_common(SHOWN)}
            for what, of in (("files", files), ("functions", seconds))
        }
        about = {"engine": arguments.engine, "steps": arguments.steps - arguments.skip, "seed": arguments.seed}
        show({"what": f"CPU of {kind}", "value": round(total, 2), "unit": "s", **shares, **about, **where()})


# -- in the processes of the run ---------------------------------------------------------------------------------------


def begin() -> None:
    """Count this process's CPU time until it ends."""
    if folder := os.environ.get(FOLDER):
        # With the usual 5 ms the counting thread runs only where a library gives the interpreter up, and all counts for that.
        sys.setswitchinterval(SWITCH_S)
        threading.Thread(target=_count, args=(Path(folder),), name="host-work", daemon=True).start()


def _count(folder: Path) -> None:
    seconds: Counter[str] = Counter()
    before: dict[int, float] = {}
    process_s, written_s, is_counted = time.process_time(), time.monotonic(), False
    while True:
        time.sleep(EVERY_S)
        frames, own = sys._current_frames(), 0.0
        for thread in threading.enumerate():
            used = _cpu_seconds(thread.native_id)
            spent = used - before.get(thread.ident or 0, used)
            before[thread.ident or 0] = used
            own += spent
            if thread.name != "host-work" and (frame := frames.get(thread.ident or 0)) is not None and is_counted:
                seconds[_name(frame)] += spent
        now_s, process_s = time.process_time() - process_s, time.process_time()
        seconds["threads of libraries"] += max(0.0, now_s - own) if is_counted else 0.0
        is_counted = is_counted or (folder / "count").exists()
        if time.monotonic() > written_s + WRITE_EVERY_S and is_counted:
            written_s = time.monotonic()
            if (kind := _kind()) is not None:
                (folder / f"{os.getpid()}.tmp").write_text(json.dumps([kind, seconds]))
                (folder / f"{os.getpid()}.tmp").rename(folder / f"{os.getpid()}.json")


def _kind() -> str | None:
    command = Path("/proc/self/cmdline").read_bytes().decode(errors="replace")
    return next((kind for actor, kind in KINDS.items() if actor in command), None)


def _cpu_seconds(thread: int | None) -> float:
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def _name(innermost: FrameType) -> str:
    """The innermost function of ours in the stack, or else the innermost of all."""
    frame: FrameType | None = innermost
    while frame is not None and "/asyncgrpo/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return Path(innermost.f_code.co_filename).stem + "." + innermost.f_code.co_qualname
    file = frame.f_code.co_filename.rpartition("/asyncgrpo/")[2].removesuffix(".py")
    return f"{file}:{frame.f_code.co_qualname}"


if __name__ == "__main__":
    main()
