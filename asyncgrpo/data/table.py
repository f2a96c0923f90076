"""A compact table of prompts, in memory or in a file. Prompts are built on access.

A file is the digest of the rest, and the rest as msgpack.
"""

import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
import xxhash

from asyncgrpo.types import Frozen, Prompt


class About(Frozen):
    """Summary of the sources after tokenisation."""

    schema_name: str
    """Names of all schemas of the sources."""
    sizes: tuple[int, ...]
    """Prompts of each source."""
    num_rows: int
    longest: int
    """Tokens of the longest prompt, also if it was dropped; a lower bound for prompts that are far too long."""
    sources: tuple[str, ...]
    """All values of `data_source`, sorted."""
    fingerprint: str
    """Digest of the prompts' ids and tokens. It changes with the file, the tokenizer and the chat template."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens of the tokenizer, so that a start with cached prompts needs no tokenizer."""


def prompt_of(
    prompt_id: str,
    token_ids: tuple[int, ...],
    prompt: str | list[dict[str, Any]],
    answer: Any,
    source: str,
    info: dict[str, Any],
) -> Prompt:
    """Return the prompt of a row with this text or these chat turns."""
    text, turns = (prompt, ()) if isinstance(prompt, str) else ("", tuple(prompt))
    return Prompt(
        prompt_id=prompt_id, token_ids=token_ids, text=text, turns=turns, answer=answer, source=source, info=info
    )


class Prepared(Sequence[Prompt]):
    """The prompts of a split, which `_prompt` builds on access, with the summary of their sources."""

    about: About

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        if isinstance(index, slice):
            return tuple(self._prompt(at) for at in range(len(self))[index])
        return self._prompt(range(len(self))[index])  # raises IndexError

    def _prompt(self, at: int) -> Prompt:
        raise NotImplementedError

    @property
    def dropped_too_long(self) -> int:
        """Rows dropped because they have too many tokens."""
        return self.about.num_rows - len(self)


class Row(NamedTuple):
    """One prompt of a table."""

    number: int
    """Row of the data file."""
    token_ids: bytes
    """int32."""
    record: bytes
    """msgpack of (prompt, answer, source, info); prompt is text or a list of turns."""


class _Contents(Frozen):
    key: str
    split: str
    about: About
    rows: list[Row]


class PromptTable(Prepared):
    """The prompts of a file in order, without those that are too long."""

    def __init__(self, split: str, rows: list[Row], about: About) -> None:
        """
        Args:
            split: `train` or `eval`; row 17 becomes the prompt `train/17`.
        """
        self._split, self._rows, self.about = split, rows, about

    def __len__(self) -> int:
        return len(self._rows)

    def _prompt(self, at: int) -> Prompt:
        number, token_ids, record = self._rows[at]
        ids = tuple(np.frombuffer(token_ids, np.int32).tolist())
        return prompt_of(f"{self._split}/{number}", ids, *msgspec.msgpack.decode(record))

    def save(self, file: Path, key: str) -> None:
        """Write the table atomically. Raises OSError."""
        encoded = msgspec.msgpack.encode(_Contents(key=key, split=self._split, about=self.about, rows=self._rows))
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with open(descriptor, "wb") as out:
                out.write(xxhash.xxh3_128_digest(encoded) + encoded)
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, file: Path, key: str) -> "PromptTable | None":
        """Load the table saved under this key; None if it is missing, damaged, or writable by another user."""
        try:
            with open(file, "rb") as opened:
                there = os.fstat(opened.fileno())
                if there.st_uid != os.getuid() or stat.S_IMODE(there.st_mode) & 0o022:
                    return None
                digest, encoded = opened.read(16), opened.read()
        except OSError:
            return None
        if xxhash.xxh3_128_digest(encoded) != digest:
            return None
        found = msgspec.msgpack.decode(encoded, type=_Contents)
        return cls(found.split, found.rows, found.about) if found.key == key else None


class Fingerprint:
    """Incremental digest of prompts' ids and tokens."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, prompt_id: str, token_ids: Sequence[int]) -> None:
        self._digest.update(f"{prompt_id}\0{len(token_ids)}\0".encode())
        self._digest.update(np.asarray(token_ids, dtype=np.int64).tobytes())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def fingerprint_of(prompts: Sequence[Prompt]) -> str:
    """Return the fingerprint of prompts. A table stores its own."""
    if isinstance(prompts, Prepared):
        return prompts.about.fingerprint
    fingerprint = Fingerprint()
    for prompt in prompts:
        fingerprint.add(prompt.prompt_id, prompt.token_ids)
    return fingerprint.hexdigest()
