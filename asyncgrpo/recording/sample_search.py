"""The samples of a step, found and read again: whole for a command, or searched, filtered and cut to a page for a browser."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from asyncgrpo.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
"""One completion, with the fields of `samples.Sample`."""
Folder = Literal["samples", "evals"]
TRAINED: Folder = "samples"
EVALS: Folder = "evals"
"""Of a run: where the completions of its steps are, and those of its evaluations."""
Sort = Literal["file", "best", "worst", "longest", "oldest"]
Only = Literal["all", "failed", "truncated", "untrained", "better", "worse"]

_ORDER = {"best": ("reward", "descending"), "worst": ("reward", "ascending")}
_ORDER |= {"longest": ("num_tokens", "descending"), "oldest": ("lag", "descending")}
_SEARCHED = ("prompt", "completion", "ground_truth", "prompt_id", "source")


class Found(Struct, frozen=True, kw_only=True):
    """Some of the completions of a step."""

    step: int
    total: int
    """Completions of the step in the file."""
    found: int
    """Those that were searched for."""
    rows: list[Row]
    """Of these, the page that was asked for."""
    first_step: int
    last_step: int
    before: int | None
    """The step before this one that has samples."""
    after: int | None
    """The step after it."""


def files_of(run: Path, folder: Folder = TRAINED) -> dict[int, Path]:
    """The files of samples in a folder of the run by optimizer step, in order. Raises DataError where there is none."""
    files = {int(file.stem[5:]): file for file in (run / folder).glob("step_*.parquet") if file.stem[5:].isdigit()}
    if not files:
        why = f"it writes them after its first {'step' if folder == TRAINED else 'evaluation of data.eval'}"
        raise DataError(f"{run} holds no {folder}/step_*.parquet: {why if run.is_dir() else 'there is no such folder'}")
    return dict(sorted(files.items()))


def read_table(files: dict[int, Path], run: Path, step: int | None = None) -> "tuple[int, pa.Table]":
    """The step and its samples, a row each; without `step` those of the newest. Raises DataError."""
    if step is not None and step not in files:
        every = "run.samples_every" if next(iter(files.values())).parent.name == TRAINED else "run.eval_every"
        there = f"there are steps {min(files)} to {max(files)} (run.keep_samples, {every})"
        raise DataError(f"{run} has no samples of step {step}; {there}")
    step = max(files) if step is None else step

    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return step, pq.read_table(files[step])
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{files[step]} cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from error


def search(
    run: Path,
    step: int | None = None,
    *,
    folder: Folder = TRAINED,
    text: str = "",
    only: Only = "all",
    sort: Sort = "file",
    offset: int = 0,
    limit: int = 20,
) -> Found:
    """Completions of a step, by their text and by what became of them.

    Args:
        step: None: the newest that has samples.
        folder: trained completions, or those of evaluations.
        text: in prompt, completion, answer or source, whatever the case; empty: all.
        only: without a score, ended by length, outside the loss, or with an advantage above or below 0.
        sort: `file` is the order of the batch. Completions without a score come last.
        offset: those before it are left out.
        limit: rows, at most.
    Raises:
        DataError: there are no samples, or none of this step.
    """
    files = files_of(run, folder)
    step, table = read_table(files, run, step)
    found = _matching(table, text, only)
    if sort != "file":
        import pyarrow.compute as pc

        column, order = _ORDER[sort]
        found = found.take(pc.sort_indices(found, [(column, order)], null_placement="at_end"))
    steps = list(files)
    place = steps.index(step)
    return Found(
        step=step,
        total=table.num_rows,
        found=found.num_rows,
        rows=found.slice(offset, limit).to_pylist(),
        first_step=steps[0],
        last_step=steps[-1],
        before=steps[place - 1] if place else None,
        after=steps[place + 1] if place + 1 < len(steps) else None,
    )


def _matching(table: "pa.Table", text: str, only: Only) -> "pa.Table":
    import pyarrow.compute as pc

    kept = {
        "failed": lambda: pc.is_valid(table["failure"]),
        "truncated": lambda: pc.equal(table["finish_reason"], "length"),
        "untrained": lambda: pc.is_null(table["advantage"]),
        "better": lambda: pc.greater(table["advantage"], 0.0),
        "worse": lambda: pc.less(table["advantage"], 0.0),
    }
    if only != "all":
        table = table.filter(kept[only]())
    if text:
        hits = [pc.match_substring(table[column], text, ignore_case=True) for column in _SEARCHED]
        found = hits[0]
        for hit in hits[1:]:
            found = pc.or_(found, hit)
        table = table.filter(found)
    return table
