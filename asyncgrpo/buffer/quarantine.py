"""Prompts that are leased no more, in this run and after every resume of it: a file that people can read and mend.

`RUN/quarantine.jsonl` has one JSON object a line: the prompt's id, why, and where it was in the run. The file decides, so
who has mended a row of the training file deletes its line before the next start. A line that a crash tore is left out.
"""

import logging
import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from asyncgrpo.errors import JournalError
from asyncgrpo.types import Frozen

log = logging.getLogger(__name__)

FILE = "quarantine.jsonl"


class Case(Frozen, frozen=True):
    """One prompt in quarantine."""

    prompt_id: str
    reason: str
    """`poison`: generators ended with it; `failed`: no generator could answer it."""
    order: int
    """Its place in the run's prompt order when it was dropped."""
    attempts: int
    """Leases that came to nothing."""


class Quarantine:
    """Which prompts are in quarantine, and why."""

    def __init__(self, path: Path | None = None) -> None:
        """
        Args:
            path: the file, which may not be there yet; None: nothing is written down.
        Raises:
            JournalError: the file cannot be read.
        """
        self._path = path
        self.cases: dict[str, Case] = {}
        """By prompt id."""
        for text in _read(path) if path is not None else []:
            try:
                case = msgspec.json.decode(text, type=Case)
            except msgspec.MsgspecError as error:
                log.warning("%s: a line cannot be read (%s); its prompt is leased again", path, error)
            else:
                self.cases[case.prompt_id] = case

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self.cases

    def add(self, case: Case) -> None:
        """From now on this prompt is not leased. What cannot be written holds until the end of this process."""
        self.cases[case.prompt_id] = case
        log.error("prompt %s is in quarantine after %d leases: %s", case.prompt_id, case.attempts, case.reason)
        if self._path is None:
            return
        try:
            with open(self._path, "ab+") as file:
                file.write((b"\n" if _is_torn(file) else b"") + msgspec.json.encode(case) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            log.error("%s cannot be written: %s", self._path, error)


def _read(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().splitlines() if line.strip()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error


def _is_torn(file: BinaryIO) -> bool:
    """Whether the last line has no end."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
