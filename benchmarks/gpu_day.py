"""Everything that must be seen on the first card, in parts that can be gone on with: one command, one state file.

    python -m benchmarks.gpu_day wheels .whl               here: packages that the machine with the card lacks
    python -m benchmarks.gpu_day install .whl SITE         there, without a network; then PYTHONPATH=SITE
    python -m benchmarks.gpu_day run --out .gpuday         there: every part that is not done yet
    python -m benchmarks.gpu_day run attention --again     there: this part, also if it is done
    python -m benchmarks.gpu_day table --out .gpuday       here: Markdown; --into docs/gpu.md writes it there
    python -m benchmarks.gpu_day run --device cpu --tiny   everything at tiny shapes, without a card

Rehearse first (`--device cpu --tiny`) with the torch and transformers of the machine and without the CPU shims: two of the
faults that the first card showed would have shown there. What was not run on a card yet: docs/status.md.

A part is a process of its own, prints JSON lines, and ends within its limit. `day.jsonl` in the `--out` folder keeps every
line; `log.txt` beside it, what else a part printed. A part that is done is not run again; one that failed is noted with its
error and the others go on; one that was cut off, or skipped for want of a package, begins again at the next `run`.

The calls, for a machine that is lent by the call: 15 minutes in all with its starts, 64 MiB carried with each, and bare again
30 seconds after the last call. Python is 3.12 there, with torch 2.11 and transformers 5.17. First, in the checkout that is
carried (51 MiB of wheels; Ray's Java part is left out of them, so that one call is enough; the start took 30 s):

    printf '/.whl/\\n/.gpuday/\\n' >>"$(git rev-parse --git-path info/exclude)"; mkdir -p .gpuday
    python -m benchmarks.gpu_day wheels .whl; git rev-parse --short HEAD      # put the commit in the place of COMMIT

Then this command twice, each with carry `.whl` and `.gpuday`, and a timeout of N + 60. The first call has N = 350 and runs facts,
tests, memory and demo, which show what is correct. Give the machine back and mend what failed. The second call has as N what the
loan has left, less 180 for the start of the machine and the files. It runs the parts that are left. To repeat a part there, put
`run PART --again` before it. A process took 14 s to import torch and transformers there; the third variable is to keep what
Python compiles:

    python3 -m benchmarks.gpu_day install .whl /root/site && export PYTHONPATH=/root/site:$PWD PYTHONUNBUFFERED=1 &&
    export PYTHONPYCACHEPREFIX=/root/pyc && python3 -m benchmarks.gpu_day run --commit COMMIT --seconds N; cp .gpuday/* $OUT/

After each call copy what came back into `.gpuday`: then a machine that is lost costs no part that was done. Should a part
hang, its limit ends it, and the next ones go on. Parts that found no time wait for another card. Last, here:

    python -m benchmarks.gpu_day table --into docs/gpu.md
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from benchmarks.measuring import ROOT

ON_CPU = "ASYNCGRPO_GPU_TESTS_ON"
"""Environment variable that lets the tests of the card run elsewhere (tests/gpu/conftest.py)."""
SKIPPED = "skipped: "
"""How the last words of a part begin that cannot run here."""


@dataclass(frozen=True)
class Part:
    """One process."""

    name: str
    module: str
    full: tuple[str, ...]
    """Its arguments."""
    tiny: tuple[str, ...] | None
    """Its arguments for `--tiny`; none: another part stands for it."""
    expected_s: float
    """A call that has less than this left does not begin it."""
    limit_s: float


def _own(name: str, command: str, expected_s: float, limit_s: float) -> Part:
    """A part whose module knows `--device` and `--tiny`."""
    module, *arguments = command.split()
    cuda, cpu = ("--device", "cuda"), ("--device", "cpu", "--tiny")
    return Part(name, f"benchmarks.{module}", (*arguments, *cuda), (*arguments, *cpu), expected_s, limit_s)


def _card(name: str, command: str, expected_s: float, limit_s: float, tiny: tuple[str, ...] | None = None) -> Part:
    """A part with the same arguments on every card, for which another one stands in `--tiny`."""
    module, *arguments = command.split()
    return Part(name, f"benchmarks.{module}", tuple(arguments), tiny, expected_s, limit_s)


_TINY = tuple(shlex.split("--device cpu --shapes tiny --budgets 256 --tokens 256 --runs 1 --parts steps"))
_TESTS = ("-m", "gpu", "tests/gpu", "-rs", "-p", "no:cacheprovider", "--timeout=60", "--timeout-method=thread")
"""A test that hangs in CUDA or NCCL ends by this method only, with the stacks of all threads."""

_LEARNER = "gpu_learner --seconds 500 --budgets 16384"
_8B = f"{_LEARNER} --tokens 65536 --runs 1 --parts steps --shapes 8b"

PARTS = [
    _own("facts", "gpu_facts", 10, 60),
    Part("tests", "pytest", _TESTS, _TESTS, 60, 150),
    _own("memory", "gpu_memory", 80, 160),
    _own("demo", "gpu_demo", 100, 200),
    _own("attention", "gpu_attention", 60, 150),
    _own("hand-over", "gpu_weights copies", 45, 100),
    _own("shared-memory", "gpu_weights shared-memory", 40, 100),
    _own("nccl", "gpu_weights nccl", 90, 240),
    _card("learner-0.6b", f"{_LEARNER} 32768 --runs 2 --shapes 0.6b", 220, 540, _TINY),
    _own("experts", "gpu_memory --experts", 25, 150),
    _card("demo-0.6b", "gpu_demo --shape 0.6b", 120, 300),
    _card("memory-1.7b", "gpu_memory --shape 1.7b", 100, 300),
    _card("learner-1.7b", f"{_LEARNER} 32768 --runs 2 --parts steps --shapes 1.7b", 110, 540),
    _card("learner-8b-lora", f"{_8B} --lora 16", 90, 540),
    _card("learner-8b-half", f"{_8B} --layers 18", 90, 540),
    _card("learner-8b", _8B, 120, 540),
]
"""The most wanted first."""


# -- the state ---------------------------------------------------------------------------------------------------------


class State:
    """`day.jsonl`: for each part a `begin`, its lines, and an `end`, of its last run alone when read."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.log = folder / "day.jsonl", folder / "log.txt"

    def write(self, part: str, kind: str, **fields: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"part": part, "kind": kind, **fields}) + "\n")

    def read(self) -> dict[str, list[dict[str, Any]]]:
        """The lines of each part's last run, in the order of `PARTS`. A line that was cut off is left out."""
        found: dict[str, list[dict[str, Any]]] = {}
        text = self.path.read_text() if self.path.exists() else ""
        for record in map(json.loads, text.split("\n")[:-1]):
            if record["kind"] == "begin":
                found[record["part"]] = []
            found[record["part"]].append(record)
        return {part.name: found[part.name] for part in PARTS if part.name in found}

    def is_over(self, part: str) -> bool:
        """Whether the part is done or has failed."""
        last = self.read().get(part, [{}])[-1]
        return last.get("kind") == "end" and last["outcome"] != "skipped"


# -- running -----------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    """Run the parts that are wanted and not over, one after the other, while there is time."""
    state, deadline = State(arguments.out), time.monotonic() + arguments.seconds
    for part in PARTS:
        own = part.tiny if arguments.tiny else part.full
        is_wanted = part.name in arguments.parts if arguments.parts else True
        if own is None or not is_wanted or (state.is_over(part.name) and not arguments.again):
            continue
        left = deadline - time.monotonic()
        if left < part.expected_s and not arguments.tiny:
            print(f"{part.name}: for the next call ({left:.0f} s left, {part.expected_s:.0f} s expected)", flush=True)
            continue
        state.write(part.name, "begin", date=time.strftime("%Y-%m-%d"), commit=arguments.commit)
        started = time.monotonic()
        outcome = _attempt(part, own, state, min(part.limit_s, left), is_on_cpu=arguments.device == "cpu")
        seconds = round(time.monotonic() - started, 1)
        if outcome["outcome"] == "stopped" and left < part.limit_s:
            print(f"{part.name}: cut off by the end of the call, and begins again", flush=True)
            continue
        state.write(part.name, "end", seconds=seconds, **outcome)
        print(f"{part.name}: {outcome['outcome']}, {seconds:.0f} s. {outcome['said']}", flush=True)


def _attempt(part: Part, own: tuple[str, ...], state: State, limit_s: float, *, is_on_cpu: bool) -> dict[str, str]:
    """Run a part's process, keep its lines, and say how it ended and what it said last."""
    command = [sys.executable, "-m", part.module, *own]
    environment = os.environ | ({ON_CPU: "cpu", "OMP_NUM_THREADS": "1"} if is_on_cpu else {})
    said, was_stopped = "", False
    with state.log.open("a") as log:
        print(f"\n== {part.name}: {' '.join(command)}", file=log, flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )

        def stop() -> None:
            nonlocal was_stopped
            was_stopped = True
            os.killpg(process.pid, signal.SIGKILL)

        timer = Timer(limit_s, stop)
        timer.start()
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):
                state.write(part.name, "line", line=json.loads(text))
                print(text[:2000], end="", flush=True)
            elif text.strip():
                said = text.strip()[:300]
                print(text, end="", file=log, flush=True)
        process.wait()
        timer.cancel()
    if was_stopped:
        return {"outcome": "stopped", "said": f"not over after {limit_s:.0f} s"}
    if process.returncode == 0:
        return {"outcome": "done", "said": said}
    last = next(reversed(state.log.read_text().strip().splitlines()))[:300]
    return {"outcome": "skipped" if last.startswith(SKIPPED) else "failed", "said": last}


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    wheels = verbs.add_parser("wheels", help="download what the machine with the card lacks")
    wheels.add_argument("folder", type=Path)
    install = verbs.add_parser("install", help="install what `wheels` downloaded, without a network")
    install.add_argument("folder", type=Path)
    install.add_argument("site", type=Path, help="folder for PYTHONPATH")
    running = verbs.add_parser("run", help="run the parts that are not done")
    running.add_argument("parts", nargs="*", choices=[[], *(part.name for part in PARTS)], help="none: all")
    running.add_argument("--out", type=Path, default=Path(".gpuday"))
    running.add_argument(
        "--seconds", type=float, default=1e6, help="of this call; what does not fit is left for the next"
    )
    running.add_argument("--commit", help="for the tables: a copy without history does not know it")
    running.add_argument("--again", action="store_true", help="also what is done")
    running.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    running.add_argument("--tiny", action="store_true", help="tiny shapes")
    table = verbs.add_parser("table", help="the tables as Markdown")
    table.add_argument("--out", type=Path, default=Path(".gpuday"))
    table.add_argument("--into", type=Path, help="page whose tables are replaced, between its two markers")
    arguments = parser.parse_args(argv)
    if arguments.verb == "run":
        if arguments.tiny != (arguments.device == "cpu"):
            parser.error("--tiny and --device cpu go together")
        run(arguments)
    elif arguments.verb == "table":
        from benchmarks.gpu_tables import replace_tables, tables

        text = tables(State(arguments.out).read())
        replace_tables(arguments.into, text) if arguments.into else print(text)
    else:
        from benchmarks import gpu_wheels

        if arguments.verb == "wheels":
            gpu_wheels.download(arguments.folder)
        else:
            gpu_wheels.install(arguments.folder, arguments.site)


if __name__ == "__main__":
    main()
