"""A compact table of prompts: flat arrays in memory or in a file. Prompts are built on access.

    header    msgpack: key, summary, and digest of the rest
    rows      [N] int64, row of the data file of each prompt
    ends      [N + 1] int64, bounds of the token ids of each prompt
    places    [N + 1] int64, bounds of the record of each prompt
    token_ids int32
    records   msgpack of (prompt, answer, source, info) in order; prompt is text or a list of turns

A loaded table is memory-mapped, so a start reads only the prompts that it uses.
"""

import os
import stat
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import msgspec
import numpy as np
import xxhash

from asyncgrpo.types import Frozen, Prompt

MAGIC = b"asyncgrpo prompts 2\n"
_ALIGN = 8
_CHUNK = 1 << 20

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]
Int32s = np.ndarray[tuple[int], np.dtype[np.int32]]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Columns:
    """The arrays of a table, in the order of the file."""

    rows: Int64s
    ends: Int64s
    places: Int64s
    token_ids: Int32s
    records: Bytes


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


class _Header(Frozen):
    key: str
    split: str
    about: About
    sizes: tuple[int, ...]
    """Elements of each column."""
    digest: str


class PromptSequence(Sequence[Prompt]):
    """Prompts that `_prompt` builds on access."""

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


class Prepared(PromptSequence):
    """The prompts of a split, with the summary of their sources."""

    about: About

    @property
    def dropped_too_long(self) -> int:
        """Rows dropped because they have too many tokens."""
        return self.about.num_rows - len(self)


class PromptTable(Prepared):
    """The prompts of a file in order, without those that are too long."""

    def __init__(self, split: str, columns: Columns, about: About) -> None:
        """
        Args:
            split: `train` or `eval`; row 17 becomes the prompt `train/17`.
        """
        self._split, self._columns, self.about = split, columns, about

    @classmethod
    def without_prompts(cls, split: str, about: About) -> "PromptTable":
        """Return an empty table that only has the summary."""
        return cls(split, Columns(*(np.zeros(0, dtype) for dtype in _DTYPES.values())), about)

    def __len__(self) -> int:
        return len(self._columns.rows)

    def _prompt(self, at: int) -> Prompt:
        columns = self._columns
        prompt, answer, source, info = msgspec.msgpack.decode(
            columns.records[columns.places[at] : columns.places[at + 1]].data
        )
        token_ids = tuple(columns.token_ids[columns.ends[at] : columns.ends[at + 1]].tolist())
        return prompt_of(f"{self._split}/{columns.rows[at]}", token_ids, prompt, answer, source, info)

    # -- in a file -----------------------------------------------------------------------------------------------------

    def save(self, file: Path, key: str) -> None:
        """Write the table atomically. Raises OSError."""
        columns = [np.ascontiguousarray(column) for column in vars(self._columns).values()]
        digest = xxhash.xxh3_128()
        for column in columns:
            digest.update(column.data)
        header = _Header(
            key=key,
            split=self._split,
            about=self.about,
            sizes=tuple(len(column) for column in columns),
            digest=digest.hexdigest(),
        )
        encoded = msgspec.msgpack.encode(header)
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with open(descriptor, "wb") as out:
                out.write(MAGIC + len(encoded).to_bytes(8, "little") + xxhash.xxh3_64_digest(encoded) + encoded)
                for column in columns:
                    out.write(bytes(-out.tell() % _ALIGN))
                    out.write(column.data)
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
                header = _read_header(opened)
                if header is None or header.key != key:
                    return None
                places = list(_places(opened.tell(), header.sizes))
                if not places or places[-1][1] != there.st_size or _digest_of(opened, places) != header.digest:
                    return None
                mapped = np.asarray(np.memmap(opened, np.uint8, "r"))
        except (OSError, msgspec.MsgspecError):
            return None
        arrays = [mapped[begin:end].view(dtype) for (begin, end), dtype in zip(places, _DTYPES.values(), strict=True)]
        return cls(header.split, Columns(*arrays), header.about)


_DTYPES: dict[str, Any] = {
    "rows": np.int64,
    "ends": np.int64,
    "places": np.int64,
    "token_ids": np.int32,
    "records": np.uint8,
}


def _read_header(opened: Any) -> _Header | None:
    """Read the header of a file; None if it is not a table."""
    begins = opened.read(len(MAGIC) + 16)
    if len(begins) < len(MAGIC) + 16 or not begins.startswith(MAGIC):
        return None
    size = int.from_bytes(begins[len(MAGIC) : len(MAGIC) + 8], "little")
    if size > os.fstat(opened.fileno()).st_size:
        return None
    encoded = opened.read(size)
    if xxhash.xxh3_64_digest(encoded) != begins[len(MAGIC) + 8 :]:
        return None
    return msgspec.msgpack.decode(encoded, type=_Header)


def _places(begin: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each column, bytes from the start of the file."""
    for size, dtype in zip(sizes, _DTYPES.values(), strict=True):
        begin += -begin % _ALIGN
        end = begin + size * np.dtype(dtype).itemsize
        yield begin, end
        begin = end


def _digest_of(opened: Any, places: Sequence[tuple[int, int]]) -> str:
    """Return the digest of the columns. Reads without mapping, because touched mapped pages count as memory in use."""
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    for begin, end in places:
        opened.seek(begin)
        while (left := end - opened.tell()) > 0 and (count := opened.readinto(chunk[:left])):
            digest.update(chunk[:count])
    return digest.hexdigest()


# -- building ----------------------------------------------------------------------------------------------------------


class TableBuilder:
    """Builds a table from the rows of one or several sources."""

    def __init__(self, split: str, max_prompt_tokens: int) -> None:
        self._split, self._limit = split, max_prompt_tokens
        self._schemas: list[str] = []
        self._sizes: list[int] = []
        self.longest_of_source = 0
        """Tokens of the longest prompt so far of the current source, also if too long."""
        self._rows, self._token_ids, self._records = array("q"), array("i"), bytearray()
        self._ends, self._places = array("q", [0]), array("q", [0])
        self._sources: set[str] = set()
        self._fingerprint = Fingerprint()
        self._num_rows = self._longest = 0

    def begin_source(self, schema_name: str) -> None:
        """Begin another source."""
        self._schemas.append(schema_name)
        self._sizes.append(0)
        self.longest_of_source = 0

    @property
    def prompts_of_source(self) -> int:
        """Prompts so far of the current source."""
        return self._sizes[-1]

    def add(
        self,
        token_ids: Sequence[int],
        prompt: str | list[dict[str, Any]],
        answer: Any,
        source: str,
        info: dict[str, Any],
    ) -> None:
        """Add the next row of the current source. A prompt that is too long is only counted."""
        row = self._num_rows
        self._num_rows += 1
        self._longest = max(self._longest, len(token_ids))
        self.longest_of_source = max(self.longest_of_source, len(token_ids))
        self._sources.add(source)
        if len(token_ids) > self._limit:
            return
        self._sizes[-1] += 1
        ids = np.asarray(token_ids, np.int32)
        self._rows.append(row)
        self._token_ids.frombytes(ids.tobytes())
        self._ends.append(len(self._token_ids))
        self._records += msgspec.msgpack.encode((prompt, answer, source, info))
        self._places.append(len(self._records))
        self._fingerprint.add(f"{self._split}/{row}", ids)

    def table(self, stop_token_ids: tuple[int, ...] = ()) -> PromptTable:
        """Return the table of the rows so far, which may be empty."""
        columns = Columns(
            np.frombuffer(self._rows, np.int64),
            np.frombuffer(self._ends, np.int64),
            np.frombuffer(self._places, np.int64),
            np.frombuffer(self._token_ids, np.int32),
            np.frombuffer(self._records, np.uint8),
        )
        about = About(
            schema_name=", ".join(dict.fromkeys(self._schemas)),
            sizes=tuple(self._sizes),
            num_rows=self._num_rows,
            longest=self._longest,
            sources=tuple(sorted(self._sources)),
            fingerprint=self._fingerprint.hexdigest(),
            stop_token_ids=stop_token_ids,
        )
        return PromptTable(self._split, columns, about)


class Fingerprint:
    """Incremental digest of prompts' ids and tokens."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, prompt_id: str, token_ids: Sequence[int] | Int32s) -> None:
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
