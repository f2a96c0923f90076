"""Trained completions as Parquet files, one per step, for inspection of prompts, completions and rewards.

Each file, such as `samples/000/step_000017.parquet`, is written atomically. A row is one completion, and its columns are the
fields of `Sample`. Files beyond `run.keep_samples` are removed, the oldest first.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncgrpo.recording.sample_search import SampleFiles, path_of
from asyncgrpo.types import Completion, Group, Prompt
from asyncgrpo.wire.rollouts import Deliver

log = logging.getLogger(__name__)


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
    observed: str = "[]"
    """Observations from an environment: `[start, end]` of each in the characters of `completion`, as JSON. Empty in
    evaluations, where they are not recorded."""


_INT32 = ("lag", "num_tokens")
_ARROW_TYPES: dict[Any, pa.DataType] = {
    int: pa.int64(),
    str: pa.string(),
    float | None: pa.float64(),
    str | None: pa.string(),
}
SCHEMA = pa.schema([(f.name, pa.int32() if f.name in _INT32 else _ARROW_TYPES[f.type]) for f in fields(Sample)])


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
    prompt = decode(group.prompt.token_ids)
    truth = json.dumps(group.prompt.answer, ensure_ascii=False)
    samples = []
    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
        completion, score = rollout.completion, rollout.score
        text, observed = _text_of(completion, decode)
        spans = completion.spans
        samples.append(
            Sample(
                step=step,
                version_oldest=str(spans[0].version) if spans else "",
                version_newest=str(spans[-1].version) if spans else "",
                lag=lag,
                group_id=group.group_id,
                prompt_id=group.prompt.prompt_id,
                source=group.prompt.source,
                prompt=prompt,
                completion=text,
                ground_truth=truth,
                reward=score.value,
                advantage=None if advantage is None else float(advantage),
                failure=score.failure,
                finish_reason=completion.finish_reason,
                num_tokens=len(completion.token_ids),
                parts=json.dumps(score.parts, ensure_ascii=False),
                observed=json.dumps(observed),
            )
        )
    return samples


def _text_of(completion: Completion, decode: Callable[[Sequence[int]], str]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a completion, and the character ranges of its observations."""
    if not completion.observations:
        return decode(completion.token_ids.tolist()), []
    first, *turns = np.split(completion.token_ids, [one.at for one in completion.observations])
    text, observed = decode(first.tolist()), []
    for one, turn in zip(completion.observations, turns, strict=True):
        reply = decode(one.token_ids.tolist())
        observed.append((len(text), len(text) + len(reply)))
        text += reply + decode(turn.tolist())
    return text, observed


def held_out_samples(group: Deliver, step: int) -> list[Sample]:
    """Return the rows of one held-out prompt, whose completions are text. None of them is trained."""
    prompt, truth = text_of(group.prompt), json.dumps(group.prompt.answer, ensure_ascii=False)
    return [
        Sample(
            step=step,
            version_oldest=str(rollout.spans[0].version) if rollout.spans else "",
            version_newest=str(rollout.spans[-1].version) if rollout.spans else "",
            lag=0,
            group_id=group.group_id,
            prompt_id=group.prompt.prompt_id,
            source=group.prompt.source,
            prompt=prompt,
            completion=rollout.text,
            ground_truth=truth,
            reward=rollout.score.value,
            advantage=None,
            failure=rollout.score.failure,
            finish_reason=rollout.finish_reason,
            num_tokens=rollout.num_tokens,
            parts=json.dumps(rollout.score.parts, ensure_ascii=False),
        )
        for rollout in group.rollouts
    ]


def text_of(prompt: Prompt) -> str:
    """Return the prompt of a data row: its text, or its turns with their roles."""
    return prompt.text or "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt.turns)


class SampleWriter:
    """Writes the samples of each step into a folder, and replaces those of an earlier attempt at the same step."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        """Create the folder, and remove partial files that a crash left in it.

        Args:
            keep: number of newest files to keep; None: all (`run.keep_samples`).
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in (*self.folder.glob(".step_*.tmp"), *self.folder.glob("*/.step_*.tmp")):
            left_over.unlink()
        self._keep = keep
        self._files = SampleFiles(self.folder)
        self._steps: dict[int, None] = {}
        """Steps with a file, in the order of writing; empty without a limit."""
        if keep is not None:
            written = {
                step: path.stat().st_mtime for step in self._files if (path := self._files.find(step)) is not None
            }
            self._steps = dict.fromkeys(sorted(written, key=lambda step: (written[step], step)))
        self._has_removed = False

    def write(self, step: int, samples: Iterable[Sample]) -> Path:
        """Write the samples of a step (zstd), remove files over the limit, and return the path. Raises OSError."""
        table = pa.Table.from_pylist([vars(sample) for sample in samples], schema=SCHEMA)
        path = path_of(self.folder, step)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            pq.write_table(table, temporary, compression="zstd")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        (self.folder / path.name).unlink(missing_ok=True)  # an older release wrote this step here
        if self._keep is not None:
            self._steps.pop(step, None)
            self._steps[step] = None
            while len(self._steps) > self._keep:
                self._remove_oldest()
        return path

    def _remove_oldest(self) -> None:
        oldest = next(iter(self._steps))
        del self._steps[oldest]
        path = self._files.find(oldest)
        if path is None:
            return
        if not self._has_removed:
            self._has_removed = True
            log.info("run.keep_samples is %d: from now on the oldest file is removed, first %s", self._keep, path.name)
        path.unlink(missing_ok=True)
        if path.parent != self.folder:
            with contextlib.suppress(OSError):  # the folder has other files
                path.parent.rmdir()
