"""The prompts of a run: rows of data files become records, are checked before the run, and are rendered and tokenised when due.

The rows of verl, SkyRL, TRL, verifiers and plain files are converted. The first row determines the schema of a file.
`data.columns` maps the columns of other files. A `DataError` names the file, the row and the expected form.
"""

import bisect
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import xxhash

from asyncgrpo.config.rules import refuse_images
from asyncgrpo.config.schema import Config, DataConfig, is_file
from asyncgrpo.data.images import PLACEHOLDER, Images, in_parts, taken_from
from asyncgrpo.data.sources import DataRow, DataRows, Misfit, digest_of, kind, read_source
from asyncgrpo.data.tokenizer import Rendered, load_tokenizer, render, stop_token_ids, text_of, vocabulary_size
from asyncgrpo.errors import ConfigError, DataError
from asyncgrpo.types import Prompt
from asyncgrpo.wire.rollouts import PROMPT_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# -- the schemas of data files -----------------------------------------------------------------------------------------

Message = dict[str, Any]

PROMPT_SPELLINGS = ("prompt", "question")
ANSWER_SPELLINGS = ("reward_model.ground_truth", "reward_spec.ground_truth", "ground_truth", "answer", "solution")

_ANSWER_IS = f"an answer is named {', '.join(ANSWER_SPELLINGS)}, or mapped by data.columns"

_MOST_BYTES = PROMPT_BYTES - 2**16
"""Limit on answer and info of a row. The rest of a message is for the prompt."""
_encoder = msgspec.msgpack.Encoder()


class Record(msgspec.Struct, frozen=True):
    """One row, independent of its schema."""

    prompt: str | list[Message]
    """Text, or at least one chat turn with `role` and `content`."""
    answer: Any
    """Ground truth as in the file; None without one."""
    source: str
    """Origin of the row, which selects the rule of rule-based rewards; empty without one."""
    info: dict[str, Any]
    """Other columns, for the reward."""
    images: tuple[bytes, ...] = ()
    """Contents of its images, in the order of their placeholders in the prompt."""

    @property
    def messages(self) -> list[Message]:
        """Chat turns. A text prompt is one user turn."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt


@dataclass(frozen=True)
class Schema:
    """Converter for the rows of one file."""

    name: str
    file: str
    convert: Callable[[DataRow], Record]
    image_column: str | None = None
    image_root: Path = Path()

    def to_record(self, row: DataRow, index: int) -> Record:
        """Convert row `index` (from 0). Raises DataError, which names file, row and the accepted names."""
        try:
            without, images = taken_from(row, self.image_column, self.image_root)
            record = self.convert(without)
            _check(record)
            if images or self.image_column in row:
                places = sum(turn["content"].count(PLACEHOLDER) for turn in record.messages)
                if places != len(images):
                    raise Misfit(f"{len(images)} images, but {places} {PLACEHOLDER} in its prompt")
            return msgspec.structs.replace(record, images=images) if images else record
        except Misfit as misfit:
            raise DataError(f"{self.file}, row {index}: {misfit} (schema {self.name}, from row 0)") from None


def _check(record: Record) -> None:
    """Raise Misfit for a prompt without text, an answer that is not finite, or more than a message to a generator holds."""
    if not any(turn["content"].strip() for turn in record.messages):
        raise Misfit("its prompt is empty")
    if isinstance(record.answer, float) and not math.isfinite(record.answer):
        raise Misfit(f"its answer is {record.answer}; write null for a row without one")
    try:
        _encoder.encode((record.prompt, record.source))
        size = len(_encoder.encode((record.answer, record.info)))
    except (UnicodeEncodeError, OverflowError, TypeError) as error:  # half a surrogate pair, over 64 bits, a sound
        raise Misfit(f"it cannot be encoded: {error}") from None
    if size > _MOST_BYTES:
        raise Misfit(f"its answer and info have {size:,} bytes; the limit of a message is {_MOST_BYTES:,}")


_COLUMNS = {"prompt": "prompt", "answer": "ground_truth", "source": "data_source"}
"""Column of the schema `plain` for each field of `data.columns`."""


def recognise(rows: Sequence[DataRow], columns: Mapping[str, str], file: str = "data", **of_images: Any) -> Schema:
    """Return the schema of a file, determined by its first row.

    Args:
        rows: of the file, at least one.
        columns: maps fields (`prompt`, `answer`, `source`) to columns of the file, which are renamed before a schema is
            recognised. With `answer` it is `plain`.
        file: name for error messages.
        of_images: further fields of the schema.
    Raises:
        ConfigError: `columns` has an unknown field.
        DataError: the first row matches no schema, or a mapped column does not exist.
    """
    there = ", ".join(rows[0]) or "(none)"
    for field, column in columns.items():
        if field not in _COLUMNS:
            raise ConfigError(f"data.columns.{field}: unknown field; expected {', '.join(_COLUMNS)}")
        if column not in rows[0]:
            raise DataError(f"{file}, row 0: no column {column!r} for data.columns.{field}; the columns are {there}")

    def renamed(row: DataRow) -> DataRow:
        others = {name: value for name, value in row.items() if name != columns.get("prompt")}
        return others | {_COLUMNS[field]: row[column] for field, column in columns.items() if column in row}

    first = renamed(rows[0])
    for name, (fits, convert) in _SCHEMAS.items():
        if name == "plain" if "answer" in columns else fits(first):
            if not columns:
                return Schema(name, file, convert, **of_images)
            mapped = f"{name}, with data.columns"
            return Schema(mapped, file, lambda row, convert=convert: convert(renamed(row)), **of_images)
    spelt = " or ".join(PROMPT_SPELLINGS)
    raise DataError(f"{file}, row 0: no {spelt} among the columns {there}; name one by data.columns.prompt=COLUMN")


def _verl(row: DataRow, column: str = "reward_model", also: str = "") -> Record:
    """Convert a row whose answer is the `ground_truth` of the object in a column. `also` names a column for the reward."""
    graded = row.get(column)
    if graded is None:
        raise Misfit(f"no {column}; {_ANSWER_IS}")
    if not isinstance(graded, dict):
        raise Misfit(f"{column} is {kind(graded)}; expected an object with ground_truth")
    return Record(
        prompt=_prompt(row, "prompt"),
        answer=_required(graded, "ground_truth", shown=f"{column}.ground_truth"),
        source=_source(row, "data_source"),
        info=({also: row[also]} if row.get(also) else {}) | _info(row, "extra_info"),
    )


def _plain(row: DataRow) -> Record:
    return Record(
        prompt=_prompt(row, "prompt"),
        answer=_required(row, "ground_truth"),
        source=_source(row, "data_source"),
        info=_others(row, "prompt", "ground_truth", "data_source", "extra_info") | _info(row, "extra_info"),
    )


def _verifiers(row: DataRow) -> Record:
    prompt = "prompt" if row.get("prompt") is not None else "question"
    source = "data_source" if row.get("data_source") else "task"
    return Record(
        prompt=_prompt(row, prompt),
        answer=None if "info" in row and "answer" not in row else _required(row, "answer"),
        source=_source(row, source),
        info=_others(row, prompt, "answer", source, "info") | _info(row, "info"),
    )


def _trl(row: DataRow) -> Record:
    # TRL passes every column to the reward by name, so `solution`, its usual ground truth, stays in `info` as well.
    return Record(
        prompt=_prompt(row, "prompt"),
        answer=row.get("solution"),
        source=_source(row, "data_source"),
        info=_others(row, "prompt", "data_source"),
    )


# In order of precedence: schemas with a distinctive column first, the one with only a prompt last.
_SCHEMAS: dict[str, tuple[Callable[[DataRow], bool], Callable[[DataRow], Record]]] = {
    "verl": (lambda row: "prompt" in row and "reward_model" in row, _verl),
    "skyrl": (
        lambda row: "prompt" in row and "reward_spec" in row,
        partial(_verl, column="reward_spec", also="env_class"),
    ),
    "plain": (lambda row: "prompt" in row and "ground_truth" in row, _plain),
    "trl, answer": (lambda row: {"prompt", "answer"} <= row.keys() and not row.keys() & {"info", "task"}, _verifiers),
    "verifiers": (
        lambda row: "question" in row or ("prompt" in row and ("answer" in row or "info" in row)),
        _verifiers,
    ),
    "trl": (lambda row: "prompt" in row, _trl),
}


def _prompt(row: DataRow, column: str) -> str | list[Message]:
    value = row.get(column)
    if value is None:
        raise Misfit(f"no {column}; a prompt is named {' or '.join(PROMPT_SPELLINGS)}, or mapped by data.columns")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        what = "an empty list" if value == [] else kind(value)
        raise Misfit(f"{column} is {what}; expected text or a list of chat turns, {{role: user, content: ...}}")
    for turn, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Misfit(f"turn {turn} of {column} is not an object with role and content")
        if not isinstance(message.get("content"), str):
            raise Misfit(f"the content of turn {turn} of {column} is neither text nor a list of parts")
    # Parquet fills every turn with every key, so remove keys without a value.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _required(row: DataRow, key: str, *, shown: str = "") -> Any:
    """Return the value of `key`, which may be null (counted by `asyncgrpo data check`) but not absent."""
    if key not in row:
        raise Misfit(f"no {shown or key}; {_ANSWER_IS}")
    return row[key]


def _source(row: DataRow, key: str) -> str:
    value = row.get(key)
    if isinstance(value, dict | list):
        raise Misfit(f"{key} is {kind(value)}; expected text, which selects the rule of a reward")
    return "" if value is None else str(value)


def _info(row: DataRow, key: str) -> dict[str, Any]:
    """Return the object at `key`, decoded if it is JSON text; empty if missing."""
    value = row.get(key)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Misfit(f"{key} is text but not JSON: {error}") from error
    if not value:
        return {}
    if not isinstance(value, dict):
        raise Misfit(f"{key} is {kind(value)}; expected an object, or the JSON text of one")
    return value


def _others(row: DataRow, *used: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in used}


# -- the prompts of a run ----------------------------------------------------------------------------------------------

PROBES = 64
"""Rows at equal distances whose tokens enter the fingerprint, beside the bytes of the sources."""
PROGRESS_EVERY_S = 2.0


class Prompts(Sequence[Prompt]):
    """The rows of some sources, in order, tokenised on access. Row 17 of all sources of `train` is the prompt `train/17`.

    A row that is too long has no token ids. The buffer drops such a prompt when it is due.
    """

    def __init__(
        self,
        sources: Sequence[str],
        split: str,
        tokenizer: "PreTrainedTokenizerBase",
        config: DataConfig,
        limit: int | None = None,
        images: Images | None = None,
    ) -> None:
        """
        Args:
            sources: files or other sources of `data/sources.py`.
            images: of the run; None: the model reads none.
            limit: rows of each source to use, from its start; None: all.
        Raises:
            ConfigError, DataError: a source cannot be read.
        """
        self._split, self._tokenizer, self._config, self._images = split, tokenizer, config, images
        self._sources = [(source, *open_source(source, config)) for source in sources]
        self.sizes = tuple(min(len(rows), limit or len(rows)) for _, _, rows in self._sources)
        """Prompts of each source."""
        self._ends = list(itertools.accumulate(self.sizes))
        self.schema = ", ".join(dict.fromkeys(schema.name for _, schema, _ in self._sources))
        """Names of the schemas of the sources."""

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        """Return one prompt. Slices are not supported."""
        at = range(len(self))[index]  # raises IndexError
        place = bisect.bisect_right(self._ends, at)
        source, schema, rows = self._sources[place]
        row = at - (self._ends[place] - self.sizes[place])
        record = schema.to_record(rows[row], row)
        token_ids = rendered(source, row, record, self._tokenizer, self._config, self._images).token_ids
        if len(token_ids) > self._config.max_prompt_tokens:
            return prompt_of(f"{self._split}/{at}", record)
        images = () if self._images is None else tuple(map(self._images.keep, record.images))
        return prompt_of(f"{self._split}/{at}", record, token_ids, images)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the sources, and of the tokens of some rows: it changes with the tokenizer and the chat template too."""
        count = min(PROBES, len(self))
        probes = (self[probe * len(self) // count] for probe in range(count))
        return fingerprint_of(probes, "".join(digest_of(source) for source, _, _ in self._sources))


def open_source(source: str | Path, config: DataConfig) -> tuple[Schema, DataRows]:
    """Return the schema of a source and its rows. Raises ConfigError, DataError."""
    rows, columns = read_source(str(source), config.columns)
    beside = Path(source).parent if is_file(str(source)) else Path()
    root = beside if config.image_root is None else Path(config.image_root)
    return recognise(rows, columns, str(source), image_column=config.image_column, image_root=root), rows


def rendered(
    source: str | Path,
    index: int,
    record: Record,
    tokenizer: "PreTrainedTokenizerBase",
    config: DataConfig,
    images: Images | None,
) -> Rendered:
    """Return the text and the token ids of a row. Raises ConfigError, DataError: its images cannot be used."""
    where, messages = f"{source}, row {index}", record.messages
    if record.images:
        if images is None:
            raise ConfigError(f"{where}: images need a Qwen3-VL or Qwen2.5-VL; data.image_column=null takes the text")
        messages = [turn | {"content": in_parts(turn["content"])} for turn in messages]
    text, token_ids = render(tokenizer, messages, config.system_prompt, where=where)
    try:
        return Rendered(text, token_ids if images is None else images.expanded(token_ids, record.images))
    except Misfit as error:
        raise DataError(f"{where}: {error}") from None


def prompt_of(prompt_id: str, record: Record, token_ids: tuple[int, ...] = (), images: tuple[str, ...] = ()) -> Prompt:
    text, turns = (record.prompt, ()) if isinstance(record.prompt, str) else ("", tuple(record.prompt))
    return Prompt(
        prompt_id=prompt_id,
        token_ids=token_ids,
        text=text,
        turns=turns,
        answer=record.answer,
        source=record.source,
        info=record.info,
        images=images,
    )


def fingerprint_of(prompts: Iterable[Prompt], of_sources: str = "") -> str:
    """Return a digest of the prompts' ids and tokens."""
    digest = xxhash.xxh3_128(of_sources.encode())
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id} {prompt.token_ids}{''.join(prompt.images)}".encode())
    return digest.hexdigest()


# -- before a run ------------------------------------------------------------------------------------------------------


class Checked(NamedTuple):
    """Result of a check of some rows."""

    rows: int
    sources: set[str]
    """All values of `data_source`."""


def check(config: Config, on_progress: Callable[[str], object] = log.info) -> dict[str, Checked]:
    """Check all rows of a run: those of `train`, and those of each held-out suite. All are rendered, and few are tokenised.

    Tokenises prompts with images, those whose text has an image token, and others until one is not too long. Logs a warning
    if only some rows of a source lack an answer.

    Args:
        on_progress: called with a line every few seconds.
    Raises:
        DataError: a row cannot be used, or all of a source are longer than `data.max_prompt_tokens`.
        ConfigError: the model cannot be used, the tokenizer produces tokens that it does not have, or a setting does not fit
            images.
    """
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
    stop_token_ids(tokenizer, config.model.path, config.sampling.stop)
    vocabulary, images = vocabulary_size(config.model.path), Images.of(config)
    image = None if images is None else str(tokenizer.decode([images.token_id]))

    def check_source(source: str, limit: int | None) -> Checked:
        schema, rows = open_source(source, config.data)
        sources, unanswered = set[str](), list[int]()
        longest, fits, index = 0, False, -1
        reported_s = time.monotonic()
        for index, row in enumerate(itertools.islice(rows, limit)):
            if time.monotonic() > reported_s + PROGRESS_EVERY_S:
                reported_s = time.monotonic()
                on_progress(f"{source}: checked {index:,} of {len(rows):,} rows")
            record = schema.to_record(row, index)
            sources.add(record.source)
            if record.answer in (None, ""):
                unanswered.append(index)
            if record.images:
                refuse_images(config)
            elif fits:
                text = text_of(tokenizer, record.messages, config.data.system_prompt, f"{source}, row {index}")
                if image is None or image not in text:
                    continue
            token_ids = rendered(source, index, record, tokenizer, config.data, images).token_ids
            if vocabulary is not None and (token := max(token_ids, default=0)) >= vocabulary:
                raise ConfigError(f"{source}, row {index}: the model has no token {token}; use its own tokenizer")
            longest = max(longest, len(token_ids))
            fits = fits or len(token_ids) <= config.data.max_prompt_tokens
        if not fits:
            raise all_too_long(source, index + 1, longest, config.data)
        if 0 < len(unanswered) <= index:
            which = ", ".join(map(str, unanswered[:10])) + ", ..." * (len(unanswered) > 10)
            log.warning("%s: %d of %d rows have no answer: %s", source, len(unanswered), index + 1, which)
        return Checked(index + 1, sources)

    found = dict[str, Checked]()
    for name, chosen, limit in [
        ("train", config.data.sources, None),
        *((name, (source,), config.data.eval_rows) for name, source in config.data.suites.items()),
    ]:
        read = [check_source(one, limit) for one in chosen]
        found[name] = Checked(sum(one.rows for one in read), set().union(*(one.sources for one in read)))
    return found


def all_too_long(source: str | Path, count: int, longest: int, config: DataConfig) -> DataError:
    limit = f"data.max_prompt_tokens ({config.max_prompt_tokens})"
    return DataError(f"{source}: all {count} prompts are longer than {limit}; the longest has {longest}")


# -- for a run ---------------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """The prompts of a run, and the stop tokens of their completions."""

    train: Prompts
    held_out: list[Prompt]
    """Prompts of all suites in order; their ids name the suite."""
    stop_token_ids: tuple[int, ...]
    images: Images | None
    """None: the model reads none."""


def prepare(config: Config, run_dir: Path | None = None) -> Prepared:
    """Open the prompts of a run, and tokenise the held-out ones. Images are written into `run_dir` if it is given.

    Raises ConfigError, DataError.
    """
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
    images = Images.of(config, run_dir)
    return Prepared(
        Prompts(config.data.sources, "train", tokenizer, config.data, images=images),
        [prompt for suite in held_out(config, tokenizer, images).values() for prompt in suite],
        stop_token_ids(tokenizer, config.model.path, config.sampling.stop),
        images,
    )


def held_out(
    config: Config, tokenizer: "PreTrainedTokenizerBase", images: Images | None = None
) -> dict[str, list[Prompt]]:
    """Return the prompts of each held-out suite that are not too long."""
    limit = config.data.eval_rows
    return {
        name: [p for p in Prompts((source,), name, tokenizer, config.data, limit, images) if p.token_ids]
        for name, source in config.data.suites.items()
    }
