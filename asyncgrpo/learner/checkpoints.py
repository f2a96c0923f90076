"""Checkpoints of a run. A folder appears complete or not at all; a run resumes from the newest one.

<run>/checkpoints/step_000020/
    state.json     step, version, the buffer's prompt ledger, totals
    resume/        torch distributed checkpoint: model, optimizer, schedule
    hf/            Hugging Face folder, for use
"""

import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncgrpo.errors import CheckpointError
from asyncgrpo.host import entries, refused_as, sync

log = logging.getLogger(__name__)


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run beside model and optimizer."""

    step: int
    """Optimizer steps done; also the policy version."""
    lineage: int
    prompts: dict[str, Any]
    """`PromptState` of the buffer, as built-in types."""
    totals: dict[str, float] = {}
    """Counters of the run so far."""
    record: dict[str, Any] | None = None
    """`Recorded` of the learner; None: a resume reads every event."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._folder = run_dir / "checkpoints"
        self._keep = keep

    def begin(self, state: RunState, fill: Callable[[Path], Callable[[], None]]) -> Callable[[], Path]:
        """Create the temporary folder of a checkpoint and begin to fill it. The write before it must be over.

        Args:
            fill: begins to write into the given folder and returns a function that waits for the write.
        Returns:
            A function that waits for the write and renames the folder. Runs in any thread. Raises CheckpointError.
        Raises:
            CheckpointError: the disk refused.
        """
        temporary = self._folder / f".step_{state.step:06d}.tmp"
        with refused_as(CheckpointError, f"cannot write checkpoint {temporary}"):
            for left_over in self._folder.glob(".step_*"):  # of a start that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            temporary.mkdir(parents=True)
        return partial(self._finish, state, temporary, fill(temporary))

    def _finish(self, state: RunState, temporary: Path, wait: Callable[[], None]) -> Path:
        final, replaced = self._folder / f"step_{state.step:06d}", temporary.with_suffix(".old")
        with refused_as(CheckpointError, f"cannot write checkpoint {final}"):
            _complete(temporary, state, wait)
            check_owner(self._folder.parent, state.lineage)
            if final.exists():  # an earlier attempt at the same step
                os.rename(final, replaced)
            os.rename(temporary, final)
            sync(self._folder)
            shutil.rmtree(replaced, ignore_errors=True)
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def latest(self) -> Path | None:
        """Return the newest checkpoint. If a file of it is gone, reading it fails: an earlier one would undo steps silently."""
        return next(reversed(self.all()), None)

    def all(self) -> list[Path]:
        """Return all checkpoints, the newest last. Raises CheckpointError."""
        with refused_as(CheckpointError, f"{self._folder} cannot be read"):
            found = {path.name[5:]: path for path in entries(self._folder) if path.match("step_*") and path.is_dir()}
        return [found[step] for step in sorted(filter(str.isdecimal, found), key=int)]


def _complete(folder: Path, state: RunState, wait: Callable[[], None]) -> None:
    """Wait for the write, add the state and sync all files. If the disk refuses, remove the folder, which may have filled it."""
    try:
        wait()
        (folder / "state.json").write_bytes(msgspec.json.encode(state))
        for parent, _, files in os.walk(folder):
            for path in (*(Path(parent) / name for name in files), Path(parent)):
                sync(path)
    except (OSError, CheckpointError):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def check_owner(run_dir: Path, lineage: int) -> None:
    """Raise CheckpointError if a later start of the run owns the folder. An evicted start must not write."""
    path = run_dir / "lineage"
    newest = int(path.read_text()) if path.exists() else lineage
    if newest > lineage:
        raise CheckpointError(f"{run_dir} is owned by start {newest} of the run; this is start {lineage}")


def step_of(checkpoint: Path | None) -> int:
    """Return the step of a checkpoint, 0 without one. Raises CheckpointError."""
    return read_state(checkpoint).step if checkpoint is not None else 0


def read_state(checkpoint: Path) -> RunState:
    """Read the state of a checkpoint. Raises CheckpointError if it is missing or broken."""
    path = checkpoint / "state.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunState)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a readable checkpoint state: {error}; remove {checkpoint} to resume from the one before it"
        ) from error
