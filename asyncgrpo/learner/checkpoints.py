"""Checkpoints of a run: a folder appears whole or not at all, and the newest whole one is where a run goes on.

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

log = logging.getLogger(__name__)


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What a run needs beside model and optimizer to go on."""

    step: int
    """Optimizer steps done; also the policy version."""
    lineage: int
    prompts: dict[str, Any]
    """`PromptState` of the buffer."""
    totals: dict[str, float] = {}
    """Counters of the run so far."""
    record: dict[str, Any] | None = None
    """`Recorded` of the learner; None in a checkpoint of an older release, or while the disk refused events."""


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._folder = run_dir / "checkpoints"
        self._keep = keep

    def write(self, state: RunState, fill: Callable[[Path], Callable[[], None]]) -> Path:
        """Write one checkpoint. Raises CheckpointError: the disk refused."""
        return self.begin(state, fill)()

    def begin(self, state: RunState, fill: Callable[[Path], Callable[[], None]]) -> Callable[[], Path]:
        """Make the folder of a checkpoint.

        Args:
            fill: begins to write into the folder that it is given, and returns a function that ends it.
        Returns:
            A function that ends it, from any thread, and gives the folder its name.
        Raises:
            CheckpointError: the disk refused. What is returned raises it too.
        """
        temporary = self._folder / f".step_{state.step:06d}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot write checkpoint {temporary}: {error}") from error
        return partial(self._finish, state, temporary, fill(temporary))

    def _finish(self, state: RunState, temporary: Path, wait: Callable[[], None]) -> Path:
        final = self._folder / f"step_{state.step:06d}"
        try:
            wait()
            (temporary / "state.json").write_bytes(msgspec.json.encode(state))
            _sync_tree(temporary)
            check_owner(self._folder.parent, state.lineage)
            shutil.rmtree(final, ignore_errors=True)  # an earlier attempt at the same step
            os.rename(temporary, final)
            _sync(self._folder)
        except OSError as error:
            raise CheckpointError(f"cannot write checkpoint {final}: {error}") from error
        for old in self._whole()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        whole = self._whole()
        return whole[-1] if whole else None

    def _whole(self) -> list[Path]:
        return sorted(path.parent for path in self._folder.glob("step_*/state.json"))


def check_owner(run_dir: Path, lineage: int) -> None:
    """Raises CheckpointError when a later start of the run owns its folder: whoever was taken for dead must not write."""
    path = run_dir / "lineage"
    newest = int(path.read_text()) if path.exists() else lineage
    if newest > lineage:
        raise CheckpointError(f"{run_dir} belongs to start {newest} of the run by now; this is start {lineage}")


def read_state(checkpoint: Path) -> RunState:
    """Raises CheckpointError when there is none to read."""
    path = checkpoint / "state.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is not the state of a checkpoint: {error}") from error


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
