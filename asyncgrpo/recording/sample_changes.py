"""Compares two evaluations on the same held-out prompts: the prompts that became right, and those that became wrong."""

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from msgspec import Struct

from asyncgrpo.errors import ConfigError, DataError
from asyncgrpo.recording.sample_search import EVALS, Row, files_of, read_table

Way = Literal["fixed", "broken"]


class Side(Struct, frozen=True, kw_only=True):
    """Result of a prompt in one of the two evaluations."""

    right: float
    """Share of right completions, 0 to 1."""
    reward_mean: float | None
    completion: str
    """A completion that shows the change: the best one where the prompt is right, else the worst."""
    reward: float | None
    failure: str | None
    version: str


class Changed(Struct, frozen=True, kw_only=True):
    """A prompt that is right in exactly one of the two evaluations. It is right if at least half of its completions are."""

    prompt_id: str
    way: Way
    prompt: str
    ground_truth: str
    before: Side
    after: Side


class Changes(Struct, frozen=True, kw_only=True):
    """Comparison of two evaluations."""

    from_step: int
    to_step: int
    prompts: int
    """Number of prompts in both evaluations."""
    right_before: int
    right_after: int
    fixed: int
    broken: int
    changed: list[Changed]
    """The fixed prompts, then the broken ones, each in the order of the file."""
    steps: list[int]
    """Steps whose evaluations are kept."""


def changes(run: Path, from_step: int | None = None, to_step: int | None = None) -> Changes:
    """Compare two evaluations of a run.

    Args:
        from_step, to_step: None: the first and the last kept evaluation.
    Raises:
        DataError: an evaluation is missing, or both are the same.
    """
    files = files_of(run, EVALS)
    steps = list(files)
    first, last = steps[0] if from_step is None else from_step, steps[-1] if to_step is None else to_step
    if first == last:
        raise DataError(
            f"{run}: a comparison needs two evaluations, not step {first} twice; kept are: {', '.join(map(str, steps))}"
        )
    before, after = (_by_prompt(read_table(files, run, step)[1].to_pylist()) for step in (first, last))
    success, both = _success(run), [prompt_id for prompt_id in before if prompt_id in after]
    was, is_now = (
        {p: fmean(_is_right(row, success) for row in rows[p]) >= 0.5 for p in both} for rows in (before, after)
    )
    found: dict[Way, list[str]] = {
        "fixed": [p for p in both if is_now[p] and not was[p]],
        "broken": [p for p in both if was[p] and not is_now[p]],
    }
    return Changes(
        from_step=first,
        to_step=last,
        prompts=len(both),
        right_before=sum(was.values()),
        right_after=sum(is_now.values()),
        fixed=len(found["fixed"]),
        broken=len(found["broken"]),
        changed=[
            Changed(
                prompt_id=prompt_id,
                way=way,
                prompt=after[prompt_id][0]["prompt"],
                ground_truth=after[prompt_id][0]["ground_truth"],
                before=_side(before[prompt_id], success, shows_best=way == "broken"),
                after=_side(after[prompt_id], success, shows_best=way == "fixed"),
            )
            for way, ids in found.items()
            for prompt_id in ids
        ],
        steps=steps,
    )


def _by_prompt(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["prompt_id"]].append(row)
    return found


def _is_right(row: Row, success: float) -> bool:
    return row["reward"] is not None and row["reward"] >= success


def _side(rows: list[Row], success: float, *, shows_best: bool) -> Side:
    scored = sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["reward"])
    shown = (scored[-1] if shows_best else scored[0]) if scored else rows[0]
    return Side(
        right=fmean(_is_right(row, success) for row in rows),
        reward_mean=fmean(row["reward"] for row in scored) if scored else None,
        completion=shown["completion"],
        reward=shown["reward"],
        failure=shown["failure"],
        version=shown["version_newest"],
    )


def _success(run: Path) -> float:
    """Return `reward.success` of the run; 1 if its configuration lacks it."""
    try:
        from asyncgrpo.config.load import read_plain

        settings: Any = read_plain(run / "config.yaml")
        return float(settings["reward"]["success"])
    except (ConfigError, KeyError, TypeError):
        return 1.0
