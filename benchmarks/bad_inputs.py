"""Bad inputs of every command: how the command reports each, how soon, and what it leaves behind.

    python -m benchmarks.bad_inputs                    all, a JSON line each and a summary
    python -m benchmarks.bad_inputs --only "reward"    those with this in their name
    python -m benchmarks.bad_inputs --part 1/4         the first quarter, for a machine that is shared

A report is good if it is one sentence on stderr (`error: ...`, or a line for each of several mistakes), without a traceback,
with an exit code other than 0, within ten seconds (`--soon-s` for a busy machine), and if the command leaves nothing
behind. A warning may come first; then its time counts, and `seconds` is the time to the end. Where a run works all the same,
a line that warns is good.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from asyncgrpo.data.demo import make_demo_model
from benchmarks.bad_input_cases import CASES, GOOD, HEAD, Case, let_go, rows, write
from benchmarks.measuring import show, where
from benchmarks.trials import Ended, Fence

KEPT = ("buffer.keep_journal=true", "run.checkpoint_every=2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--part", default="1/1", help="which of how many equal parts of the cases")
    parser.add_argument("--limit-s", type=float, default=120.0, help="a command still going is killed")
    parser.add_argument("--soon-s", type=float, default=10.0, help="the longest good completion")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    chosen = [case for case in CASES if options.only in case.name]
    found = []
    with Fence() as fence:
        good = fence.work / "good"
        make(good)
        if any(case.needs_run for case in chosen):
            made = fence.run("train", *GOOD, "--steps", "4", "--out", "run", *KEPT, cwd=good)
            assert made.exit == 0, made.text
            fence.left()
        for number, case in enumerate(chosen):
            if number * parts // len(chosen) == part - 1:
                found.append(trial(fence, good, case, options))
                show(found[-1])
    show(summary(found))


def make(folder: Path) -> None:
    """Make the files that are right."""
    folder.mkdir()
    make_demo_model(folder / "model", seed=0)
    rows(count=40)(folder)
    rows(name="eval.json", count=8)(folder)
    write("reward.py", HEAD + "return sum(a == b for a, b in zip(solution_str, ground_truth)) / 3\n")(folder)


def trial(fence: Fence, good: Path, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Try one case in a folder of its own."""
    folder = fence.work / "case"
    shutil.copytree(good, folder, ignore=None if case.needs_run else shutil.ignore_patterns("run"))
    case.make(folder)
    ended = fence.run(*case.arguments, cwd=folder, limit_s=options.limit_s, extra=dict(case.environment))
    let_go()
    left = {what: names for what, names in fence.left(within_s=5.0).items() if names}
    lines = [line for line in ended.err.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.lower().startswith("error")), lines[-1] if lines else "")
    shutil.rmtree(folder)
    return {
        "case": case.name,
        "exit": ended.exit,
        "said_s": round(ended.said_s, 1),
        "seconds": round(ended.seconds, 1),
        "cpu_s": round(ended.cpu_s, 1),
        "stderr_lines": len(lines),
        "said": said[:400],
        "left": left,
        "bad": why_bad(case, ended, lines, options.soon_s) or ("something is left" if left else ""),
    }


def why_bad(case: Case, ended: Ended, lines: list[str], soon_s: float) -> str:
    """Return what is wrong with the reply to a bad input; empty if nothing is."""
    if ended.exit is None:
        return "it has no end"
    if ended.has_traceback:
        return "a traceback"
    if ended.exit == 0:
        return "" if case.may_work or (case.warns and case.warns in ended.text) else "it is taken"
    if ended.said_s > soon_s:
        return "late"
    errors = [line for line in lines if not line.startswith("warning: ")]
    is_sentence = bool(errors) and errors[0].startswith("error: ") and (case.is_table or len(errors) == 1)
    return (
        "" if ended.exit in (1, 2) and (is_sentence or (case.is_report and ended.out.strip())) else "not one sentence"
    )


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    bad = {one["case"]: one["bad"] for one in found if one["bad"]}
    slowest_s = max((one["said_s"] for one in found), default=0.0)
    return {"benchmark": "bad inputs", "cases": len(found), "slowest_s": slowest_s, "bad": bad} | where()


if __name__ == "__main__":
    main()
