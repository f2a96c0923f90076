"""Reads the samples of a step: all of them for a command, or one page of a filtered search for a browser."""

from collections.abc import Iterator
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
"""Folders of a run: the completions of its steps, and those of its evaluations."""
Sort = Literal["file", "best", "worst", "longest", "oldest"]
Only = Literal["all", "failed", "truncated", "untrained", "better", "worse"]

_ORDER = {"best": ("reward", "descending"), "worst": ("reward", "ascending")}
_ORDER |= {"longest": ("num_tokens", "descending"), "oldest": ("lag", "descending")}
_SEARCHED = ("prompt", "completion", "ground_truth", "prompt_id", "source")


class Found(Struct, frozen=True, kw_only=True):
    """One page of a search in the completions of a step."""

    step: int
    total: int
    """Completions of the step in the file."""
    found: int
    """Completions that match the search."""
    rows: list[Row]
    """The requested page of the matches."""
    first_step: int
    last_step: int
    before: int | None
    """The previous step that has samples."""
    after: int | None
    """The next step that has samples."""


SHARD = 1_000
"""Number of steps per folder."""


def path_of(folder: Path, step: int) -> Path:
    """Return the path for the samples of a step, such as `samples/260/step_260017.parquet`."""
    return folder / f"{step // SHARD:03d}" / f"step_{step:06d}.parquet"


class SampleFiles:
    """The sample files in a folder, by optimizer step. Older releases wrote all of them into the folder itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._flat = _steps_in(folder)
        numbers = (int(shard.name) for shard in folder.glob("*") if shard.name.isdigit())
        self._shards = sorted({*numbers, *(step // SHARD for step in self._flat)})

    @property
    def is_of_training(self) -> bool:
        """True for trained completions, False for those of evaluations."""
        return self._folder.name == TRAINED

    def __iter__(self) -> Iterator[int]:
        """Yield every step that has samples, in order. Lists every folder."""
        for shard in self._shards:
            yield from self._in(shard)

    def first(self) -> int | None:
        """Return the first step that has samples."""
        return next(iter(self), None)

    def last(self) -> int | None:
        """Return the newest step that has samples."""
        return next((steps[-1] for shard in reversed(self._shards) if (steps := self._in(shard))), None)

    def before(self, step: int) -> int | None:
        """Return the last step before `step` that has samples."""
        shards = (shard for shard in reversed(self._shards) if shard <= step // SHARD)
        return next((one for shard in shards for one in reversed(self._in(shard)) if one < step), None)

    def after(self, step: int) -> int | None:
        """Return the first step after `step` that has samples."""
        shards = (shard for shard in self._shards if shard >= step // SHARD)
        return next((one for shard in shards for one in self._in(shard) if one > step), None)

    def find(self, step: int) -> Path | None:
        """Return the file of a step; None: it has no samples."""
        paths = path_of(self._folder, step), self._folder / f"step_{step:06d}.parquet"
        return next((path for path in paths if path.is_file()), None)

    def _in(self, shard: int) -> list[int]:
        flat = {step for step in self._flat if step // SHARD == shard}
        return sorted(flat | _steps_in(self._folder / f"{shard:03d}"))


def _steps_in(folder: Path) -> set[int]:
    return {int(file.stem[5:]) for file in folder.glob("step_*.parquet") if file.stem[5:].isdigit()}


def files_of(run: Path, folder: Folder = TRAINED) -> SampleFiles:
    """Return the sample files in a folder of the run. Raises DataError if there are none."""
    files = SampleFiles(run / folder)
    if files.last() is None:
        why = f"it writes them after its first {'step' if folder == TRAINED else 'evaluation of data.eval'}"
        raise DataError(f"{run} holds no {folder}/step_*.parquet: {why if run.is_dir() else 'no such folder'}")
    return files


def read_table(files: SampleFiles, run: Path, step: int | None = None) -> "tuple[int, pa.Table]":
    """Return a step and its samples, one row each; `step` None means the newest. Raises DataError."""
    step = files.last() if step is None else step
    assert step is not None, "files_of has raised"
    path = files.find(step)
    if path is None:
        every = "run.samples_every" if files.is_of_training else "run.eval_every"
        there = f"there are steps {files.first()} to {files.last()} (run.keep_samples, {every})"
        raise DataError(f"{run} has no samples of step {step}; {there}")

    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return step, pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from error


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
    """Search the completions of a step by text and outcome, and return one page.

    Args:
        step: None: the newest that has samples.
        folder: trained completions, or those of evaluations.
        text: text in prompt, completion, answer or source, ignoring case; empty: all.
        only: without a score, ended by length, outside the loss, or with an advantage above or below 0.
        sort: `file` is the order of the batch. Completions without a score come last.
        offset: number of matches to skip.
        limit: largest number of rows.
    Raises:
        DataError: the run has no samples, or none of this step.
    """
    files = files_of(run, folder)
    step, table = read_table(files, run, step)
    found = _matching(table, text, only)
    if sort != "file":
        import pyarrow.compute as pc

        column, order = _ORDER[sort]
        found = found.take(pc.sort_indices(found, [(column, order)]))  # nulls are last
    first, last = files.first(), files.last()
    assert first is not None and last is not None, "files_of has raised"
    return Found(
        step=step,
        total=table.num_rows,
        found=found.num_rows,
        rows=found.slice(offset, limit).to_pylist(),
        first_step=first,
        last_step=last,
        before=files.before(step),
        after=files.after(step),
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
