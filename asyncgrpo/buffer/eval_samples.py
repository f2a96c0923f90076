"""The completions of every evaluation, kept as Parquet beside the run, so that two of its steps can be compared.

`evals/000/step_000040.parquet` has the columns of `recording.samples.Sample`. Nothing else needs it: a disk that refuses it
costs the file. It is written in a thread, because a large one takes seconds, in which the buffer must reply.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asyncgrpo.wire.rollouts import Deliver

log = logging.getLogger(__name__)


class EvalSamples:
    """Writes the samples of evaluations into a folder."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        """
        Args:
            keep: files to keep, the newest; None: all.
        """
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eval-samples")

    def keep(self, step: int, groups: list[Deliver]) -> None:
        """Write the groups of an evaluation that has ended, soon."""
        self._thread.submit(self._write, step, groups)

    def close(self) -> None:
        """Wait until all of them are written."""
        self._thread.shutdown()

    def _write(self, step: int, groups: list[Deliver]) -> None:
        try:
            from asyncgrpo.recording.samples import SampleWriter, held_out_samples  # pyarrow takes a while to import

            rows = [
                sample
                for group in sorted(groups, key=lambda g: g.prompt_index)
                for sample in held_out_samples(group, step)
            ]
            SampleWriter(self._folder, self._keep).write(step, rows)
        except Exception as error:
            log.warning("the samples of the evaluation of step %d cannot be written: %s", step, error)
