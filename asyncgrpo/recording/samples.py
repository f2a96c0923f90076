"""Completions as Parquet files, one per step or evaluation: written, read and searched.

Each file, such as `samples/000/step_000017.parquet`, is written atomically. A row is one completion, and its columns are the
fields of `Sample`. Files beyond `run.keep_samples` are removed, the oldest first.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from asyncgrpo.errors import DataError
from asyncgrpo.types import Completion, Group, Prompt, Score, VersionSpan
from asyncgrpo.wire.rollouts import Deliver

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Sample:
    """One trained completion, or one of an evaluation."""

    step: int
    """Optimizer step that trained it, from 1; in an evaluation, the step after which it was requested."""
    version_oldest: str
    """Policy version that sampled its oldest token, as `lineage.version`; empty for a completion without tokens."""
    version_newest: str
    """Policy version that sampled its newest token."""
    lag: int
    """Optimizer steps between its group's oldest token and its training; 0 in an evaluation."""
    group_id: str
    prompt_id: str
    source: str
    prompt: str
    completion: str
    ground_truth: str
    """The task's ground-truth answer as JSON."""
    reward: float | None
    """The score; None exactly if `failure` is given."""
    advantage: float | None
    """None if the completion took no part in the loss."""
    failure: str | None
    finish_reason: str
    num_tokens: int
    """Sampled tokens."""
    parts: str
    """Named parts of the reward as JSON."""
    images: str = "[]"
    """Files of the prompt's images in the run folder, as JSON."""
    observed: str = "[]"
    """Observations from an environment: `[start, end]` of each in the characters of `completion`, as JSON. Empty in
    evaluations, where they are not recorded."""


@cache
def schema() -> "pa.Schema":
    import pyarrow as pa  # only here and below: the driver reads samples only on request

    types: dict[Any, pa.DataType] = {
        int: pa.int64(),
        str: pa.string(),
        float | None: pa.float64(),
        str | None: pa.string(),
    }
    small = ("lag", "num_tokens")
    return pa.schema([(f.name, pa.int32() if f.name in small else types[f.type]) for f in fields(Sample)])


def samples_of(
    group: Group, *, step: int, lag: int, advantages: Sequence[float | None], decode: Callable[[Sequence[int]], str]
) -> list[Sample]:
    """Return the rows of one trained group.

    Args:
        step: optimizer step that trained it.
        lag: lag of the group, optimizer steps.
        advantages: one per rollout, in order; None for a rollout that took no part in the loss.
        decode: converts token ids to text and keeps special tokens.
    """
    prompt, samples = decode(group.prompt.token_ids), []
    if group.prompt.images:  # an image is one of its tokens here
        prompt = re.sub(r"(<\|\w+\|>)\1+", r"\1", prompt)
    of_group = _of_group(group, prompt)
    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
        completion = rollout.completion
        text, observed = _text_of(completion, decode)
        samples.append(
            Sample(
                **of_group,
                **_of_rollout(completion.spans, rollout.score),
                step=step,
                lag=lag,
                completion=text,
                advantage=None if advantage is None else float(advantage),
                finish_reason=completion.finish_reason,
                num_tokens=len(completion.token_ids),
                observed=json.dumps(observed),
            )
        )
    return samples


def _of_group(group: Group | Deliver, prompt: str) -> dict[str, Any]:
    """Return the columns that all completions of a group have in common. An answer may be megabytes of test cases."""
    return {
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "source": group.prompt.source,
        "prompt": prompt,
        "ground_truth": json.dumps(group.prompt.answer, ensure_ascii=False),
        "images": json.dumps([f"images/{digest}" for digest in group.prompt.images]),
    }


def _of_rollout(spans: Sequence[VersionSpan], score: Score) -> dict[str, Any]:
    """Return the other columns that a trained completion and one of an evaluation have in common."""
    return {
        "version_oldest": str(spans[0].version) if spans else "",
        "version_newest": str(spans[-1].version) if spans else "",
        "reward": score.value,
        "failure": score.failure,
        "parts": json.dumps(score.parts, ensure_ascii=False),
    }


def _text_of(completion: Completion, decode: Callable[[Sequence[int]], str]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a completion, and the character ranges of its observations."""
    if not completion.observations:
        return decode(completion.token_ids.tolist()), []
    ends = [0, *(one.at for one in completion.observations), len(completion.token_ids)]
    first, *turns = (completion.token_ids[start:end] for start, end in pairwise(ends))
    text, observed = decode(first.tolist()), []
    for one, turn in zip(completion.observations, turns, strict=True):
        reply = decode(one.token_ids.tolist())
        observed.append((len(text), len(text) + len(reply)))
        text += reply + decode(turn.tolist())
    return text, observed


def held_out_samples(group: Deliver, step: int) -> list[Sample]:
    """Return the rows of one held-out prompt, whose completions are text. None of them is trained."""
    of_group = _of_group(group, text_of(group.prompt))
    return [
        Sample(
            **of_group,
            **_of_rollout(rollout.spans, rollout.score),
            step=step,
            lag=0,
            completion=rollout.text,
            advantage=None,
            finish_reason=rollout.finish_reason,
            num_tokens=rollout.num_tokens,
        )
        for rollout in group.rollouts
    ]


def text_of(prompt: Prompt) -> str:
    """Return the prompt of a data row: its text, or its turns with their roles."""
    return prompt.text or "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt.turns)


AT_ONCE = 64
"""Number of completions that are converted in one call, which keeps other threads of the process waiting."""


class SampleWriter:
    """Writes the samples of each step into a folder, and replaces those of an earlier attempt at the same step."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        """Create the folder, and remove partial files that a crash left in it.

        Args:
            keep: number of newest files to keep; None: all (`run.keep_samples`).
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.rglob(".step_*.tmp"):
            left_over.unlink()
        self._keep = keep
        files = paths_in(self.folder) if keep is not None else {}
        self._steps = dict.fromkeys(sorted(files, key=lambda step: (files[step].stat().st_mtime, step)))
        """Steps with a file, in the order of writing."""

    def write(self, step: int, samples: Sequence[Sample]) -> Path:
        """Write the samples of a step (zstd), remove files over the limit, and return the path. Raises OSError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = path_of(self.folder, step)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with pq.ParquetWriter(temporary, schema(), compression="zstd") as writer:
                for at in range(0, len(samples), AT_ONCE):
                    rows = [vars(sample) for sample in samples[at : at + AT_ONCE]]
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema()))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._steps.pop(step, None)
        self._steps[step] = None
        while self._keep is not None and len(self._steps) > self._keep:
            oldest = path_of(self.folder, next(iter(self._steps)))
            del self._steps[next(iter(self._steps))]
            oldest.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folder has other files
                oldest.parent.rmdir()
        return path


# -- reading -----------------------------------------------------------------------------------------------------------

Row = dict[str, Any]
"""One completion, with the fields of `Sample`."""
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


SHARD = 1_000
"""Number of steps per folder."""


def path_of(folder: Path, step: int) -> Path:
    """Return the path for the samples of a step, such as `samples/260/step_260017.parquet`."""
    return folder / f"{step // SHARD:03d}" / f"step_{step:06d}.parquet"


def paths_in(folder: Path) -> dict[int, Path]:
    """Return the files in a folder by step, in order."""
    files = {file.stem[5:]: file for file in folder.rglob("step_*.parquet") if file.is_file()}
    return {int(step): files[step] for step in sorted(filter(str.isdigit, files), key=int)}


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
    Raises:
        DataError: the run has no samples, or none of this step.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = paths_in(run / folder)
    if not files:
        why = f"it writes them after its first {'step' if folder == TRAINED else 'evaluation of data.eval'}"
        raise DataError(f"{run} holds no {folder}/step_*.parquet: {why if run.is_dir() else 'no such folder'}")
    steps = list(files)
    step = steps[-1] if step is None else step
    if step not in files:
        there = f"there are steps {steps[0]} to {steps[-1]} (run.keep_samples, run.samples_every, run.eval_every)"
        raise DataError(f"{run} has no samples of step {step}; {there}")
    try:
        table = pq.read_table(files[step])
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{files[step]} cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from error
    found = _matching(table, text, only)
    if sort != "file":
        import pyarrow.compute as pc

        column, order = _ORDER[sort]
        found = found.take(pc.sort_indices(found, [(column, order)]))  # nulls are last
    return Found(
        step=step,
        total=table.num_rows,
        found=found.num_rows,
        rows=found.slice(offset, limit).to_pylist(),
        first_step=steps[0],
        last_step=steps[-1],
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
        hits = (pc.match_substring(table[column], text, ignore_case=True) for column in _SEARCHED)
        table = table.filter(reduce(pc.or_, hits))
    return table
