"""The tables of a GPU day as Markdown, out of the lines of its state file."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import rounded

BEGIN, END = "<!-- gpu day: tables begin -->", "<!-- gpu day: tables end -->"

CELL = ("shape", "layers", "budget", "share", "compile", "kernel", "recompute", "offload", "lora")
"""Fields of a learner's cell that its row begins with."""

Record = dict[str, Any]
Line = dict[str, Any]


def tables(state: dict[str, list[Record]]) -> str:
    """All tables.

    Args:
        state: records of each part's last run, as `State.read` gives them.
    """
    lines = {
        part: [record["line"] for record in records if record["kind"] == "line"] for part, records in state.items()
    }
    text = [_heading(state, lines), _parts(state)]
    learner = [one for part, found in lines.items() if part.startswith("learner-") for one in found]
    for part, found in lines.items():
        if part in MAKERS and found:
            text += [f"**{part}**", MAKERS[part](found)]
    if learner:
        text += ["**learner**", learner_table(learner)]
    return "\n\n".join(text) + "\n"


def replace_tables(page: Path, text: str) -> None:
    """Put `text` between the two markers of a page. Raises SystemExit where the page has none."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page} lacks the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def _heading(state: dict[str, list[Record]], lines: dict[str, list[Line]]) -> str:
    begun = [record for records in state.values() for record in records if record["kind"] == "begin"]
    facts = {one["name"]: one["value"] for one in lines.get("facts", []) if one["what"] == "fact"}
    measured = [one for found in lines.values() for one in found]
    dates = " and ".join(sorted({record["date"] for record in begun}))
    commits = {record["commit"] for record in begun if record.get("commit")} or {
        str(one["commit"]) for one in measured if one.get("commit")
    }
    torch = next(
        (name for name in str(facts.get("packages")).split(", ") if name.startswith("torch ")), "torch unknown"
    )
    return f"{dates}, {facts.get('card', 'no card')}, {torch}, commit {', '.join(sorted(commits)) or 'unknown'}."


def _parts(state: dict[str, list[Record]]) -> str:
    rows = []
    for part, records in state.items():
        last = records[-1]
        is_over = last["kind"] == "end"
        rows.append([part, *((last["outcome"], last["seconds"], last["said"]) if is_over else ("cut off", "", ""))])
    return markdown(["part", "outcome", "s", "last words"], rows)


def markdown(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; None is an empty cell."""
    shown = [headers, *([_cell(cell) for cell in row] for row in rows)]
    first, *others = (f"| {' | '.join(row)} |" for row in shown)
    return "\n".join([first, "|" + "---|" * len(headers), *others])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


# -- one table a part --------------------------------------------------------------------------------------------------


def _facts(lines: list[Line]) -> str:
    return "; ".join(f"{one['name']}: {_cell(one['value'])}" for one in lines) + "."


def _attention(lines: list[Line]) -> str:
    errors = [one for one in lines if one["what"] == "attention error"]
    times = {_key(one): one for one in lines if one["what"] == "attention forward"}
    both = [one for one in lines if one["what"] == "attention forward and backward"]
    names = ("output", "dQ", "dK", "dV")
    exact = ([*_key(one), *(one[name] for name in names)] for one in errors)
    timed = ([*_key(one), *_ms(times[_key(one)]), *_ms(one), one["peak_gib"]] for one in both)
    text = [
        markdown(["heads", "kernel", "row", *(f"error of {name}" for name in names)], exact),
        markdown(
            ["heads", "kernel", "row", "forward ms", "TFLOP/s", "forward and backward ms", "TFLOP/s", "peak GiB"], timed
        ),
        "\n".join(
            f"- {one['heads']}, {one['kernel']}: {one['error']}" for one in lines if one["what"] == "attention failed"
        ),
    ]
    return "\n\n".join(filter(None, text))


def _ms(one: Line) -> tuple[float, float]:
    return rounded(1000 * one["value"]), one["tflops"]


def _key(one: Line) -> tuple[str, str, str]:
    return one["heads"], one["kernel"], one["row"]


def _rates(lines: list[Line]) -> str:
    rows = []
    for one in lines:
        spread = " to ".join(map(str, one.get("spread", ())))
        rows.append([one["what"], one.get("value", one.get("error")), spread])
    return markdown(["what", "GB/s, median", "least to largest"], rows)


def _nccl(lines: list[Line]) -> str:
    rows = [
        [one["case"], member, one["seconds"], _words(said)] for one in lines for member, said in enumerate(one["said"])
    ]
    return markdown(["case", "member", "s", "what it said"], rows)


def _words(said: Any) -> str:
    return ", ".join(f"{name}: {value}" for name, value in said.items()) if isinstance(said, dict) else said


def _memory(lines: list[Line]) -> str:
    rows = []
    for one in lines:
        predicted = one.get("predicted_gib")
        counted = rounded(sum(size for name, size in predicted.items() if name != "rest")) if predicted else None
        phases = ", ".join(f"{name} {seconds}" for name, seconds in one.get("phases", {}).items())
        figures = [counted, one.get("measured_gib"), one.get("reserved_gib"), one.get("used_gib"), phases]
        rows.append([one["shape"], one["budget"], one["way"], *figures, one.get("error")])
    headers = ["shape", "row budget", "way", "predicted GiB", "measured GiB", "reserved GiB", "used on the card GiB"]
    return markdown([*headers, "phases, s", "error"], rows)


def _demo(lines: list[Line]) -> str:
    rows = []
    for one in lines:
        rewards, proved = f"{one['reward_first']} to {one['reward_last']}", f"{one['proved']} of {one['publications']}"
        phases = ", ".join(f"{name} {seconds}" for name, seconds in one["phases"].items())
        branch = f"{one.get('dtype')}, {one.get('kernel')}"
        about = [one["shape"], branch, one["steps"], one["ended"], rewards, proved]
        about += [one["publication_ms"], one["publication_bytes"], one["logprob_gap_mean"], one["step_s"], phases]
        rows.append([*about, one["peak_card_gib"], one["restarts"], one["audit_exit"] == 0])
    headers = ["model", "dtype, kernel", "steps", "ended", "reward, first to last tenth", "versions proved"]
    headers += [
        "publication ms",
        "bytes",
        "log-prob gap",
        "step s",
        "phases, s",
        "card GiB, both",
        "restarts",
        "audit clean",
    ]
    return markdown(headers, rows)


def learner_table(lines: list[Line]) -> str:
    """The lines of `benchmarks.gpu_learner`."""
    named = {(one["what"], str(one["cell"])): one for one in lines}
    steps = [one for one in lines if one["what"] == "rl step"]
    products = [one["matmul_tflops"] for one in steps] or [0.0]
    rows = []
    for step in steps:
        cell = step["cell"]
        floor, ratio = (named[what, str(cell)] for what in ("supervised step", "rl speed of supervised"))
        shown = [cell[name] for name in CELL] + [step["rows"], step["value"], floor["value"]]
        shares = ratio["value"], step["mfu"], step["mfu_computed"], step["mfu_fwd_bwd"], floor["mfu"]
        rows.append([*shown, *(f"{share:.1%}" for share in shares), step["peak_gib"]])
    headers = [
        *CELL,
        "rows",
        "RL step s",
        "supervised s",
        "RL speed of supervised",
        "MFU",
        "MFU computed",
        "MFU fwd+bwd",
    ]
    text = [
        f"A large product reached {min(products)} to {max(products)} TFLOP/s.",
        markdown([*headers, "MFU supervised", "peak GiB"], rows),
    ]
    text.append("\n".join(f"- {json.dumps(one['cell'])}: {one['error']}" for one in lines if one["what"] == "failed"))
    return "\n\n".join(filter(None, text))


MAKERS: dict[str, Callable[[list[Line]], str]] = {
    "facts": _facts,
    "attention": _attention,
    "hand-over": _rates,
    "shared-memory": _rates,
    "nccl": _nccl,
    "memory": _memory,
    "memory-1.7b": _memory,
    "experts": _memory,
    "demo": _demo,
    "demo-0.6b": _demo,
}
