"""The prompts of a run: its rows are checked before the run, and each is rendered and tokenised when it is due."""

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from asyncgrpo.config.schema import Config, DataConfig
from asyncgrpo.data.rows import Record, Schema, recognise
from asyncgrpo.data.sources import DataRows, digest_of, read_source
from asyncgrpo.data.tokenizer import load_tokenizer, render, stop_token_ids, vocabulary_size
from asyncgrpo.errors import ConfigError, DataError
from asyncgrpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

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
    ) -> None:
        """
        Args:
            sources: files or other sources of `data/sources.py`.
            limit: rows of each source to use, from its start; None: all.
        Raises:
            ConfigError, DataError: a source cannot be read.
        """
        self._split, self._tokenizer, self._config = split, tokenizer, config
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
        token_ids = token_ids_of(source, row, record, self._tokenizer, self._config)
        return prompt_of(f"{self._split}/{at}", record, token_ids * (len(token_ids) <= self._config.max_prompt_tokens))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the sources, and of the tokens of some rows: it changes with the tokenizer and the chat template too."""
        count = min(PROBES, len(self))
        probes = (self[probe * len(self) // count] for probe in range(count))
        return fingerprint_of(probes, "".join(digest_of(source) for source, _, _ in self._sources))


def open_source(source: str | Path, config: DataConfig) -> tuple[Schema, DataRows]:
    """Return the schema of a source and its rows. Raises ConfigError, DataError."""
    rows, columns = read_source(str(source), config.columns)
    return recognise(rows, columns, str(source)), rows


def token_ids_of(
    source: str | Path, index: int, record: Record, tokenizer: "PreTrainedTokenizerBase", config: DataConfig
) -> tuple[int, ...]:
    """Return the token ids of a row."""
    return render(tokenizer, record.messages, config.system_prompt, where=f"{source}, row {index}").token_ids


def prompt_of(prompt_id: str, record: Record, token_ids: tuple[int, ...] = ()) -> Prompt:
    """Return the prompt of a row."""
    text, turns = (record.prompt, ()) if isinstance(record.prompt, str) else ("", tuple(record.prompt))
    return Prompt(
        prompt_id=prompt_id,
        token_ids=token_ids,
        text=text,
        turns=turns,
        answer=record.answer,
        source=record.source,
        info=record.info,
    )


def fingerprint_of(prompts: Iterable[Prompt], of_sources: str = "") -> str:
    """Return a digest of the prompts' ids and tokens."""
    digest = xxhash.xxh3_128(of_sources.encode())
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id} {prompt.token_ids}".encode())
    return digest.hexdigest()


# -- before a run ------------------------------------------------------------------------------------------------------


class Checked(NamedTuple):
    """Result of a check of some rows."""

    rows: int
    sources: set[str]
    """All values of `data_source`."""


def check(config: Config, on_progress: Callable[[str], object] = log.info) -> dict[str, Checked]:
    """Check all rows of a run: those of `train`, and those of each held-out suite.

    Args:
        on_progress: called with a line every few seconds.
    Raises:
        ConfigError, DataError: model or data cannot be used.
    """
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
    stop_token_ids(tokenizer, config.model.path, config.sampling.stop)
    vocabulary, found = vocabulary_size(config.model.path), dict[str, Checked]()
    for name, sources, limit in [
        ("train", config.data.sources, None),
        *((name, (source,), config.data.eval_rows) for name, source in config.data.suites.items()),
    ]:
        read = [check_source(one, tokenizer, config.data, vocabulary, limit, on_progress) for one in sources]
        found[name] = Checked(sum(one.rows for one in read), set().union(*(one.sources for one in read)))
    return found


def check_source(
    source: str,
    tokenizer: "PreTrainedTokenizerBase",
    config: DataConfig,
    vocabulary: int | None = None,
    limit: int | None = None,
    on_progress: Callable[[str], object] = log.info,
) -> Checked:
    """Check the rows of one source. All are read, and few are tokenised.

    Renders one prompt per sequence of roles, because a chat template may refuse a sequence, and more until one is not too
    long. Logs a warning if only some rows lack an answer.

    Args:
        vocabulary: size of the model's vocabulary, if known.
        limit: rows to use, from the start; None: all.
    Raises:
        DataError: a row cannot be used, or all are longer than `config.max_prompt_tokens`.
        ConfigError: the tokenizer produces tokens that the model does not have.
    """
    schema, rows = open_source(source, config)
    rendered, sources = set[str | tuple[str, ...]](), set[str]()
    longest, fits, index, unanswered = 0, False, -1, list[int]()
    reported_s = time.monotonic()
    for index, row in enumerate(itertools.islice(rows, limit)):
        if time.monotonic() > reported_s + PROGRESS_EVERY_S:
            reported_s = time.monotonic()
            on_progress(f"{source}: checked {index:,} of {len(rows):,} rows")
        record = schema.to_record(row, index)
        sources.add(record.source)
        if record.answer in (None, ""):
            unanswered.append(index)
        roles = "user" if isinstance(record.prompt, str) else tuple(turn["role"] for turn in record.prompt)
        if fits and roles in rendered:
            continue
        rendered.add(roles)
        token_ids = token_ids_of(source, index, record, tokenizer, config)
        if vocabulary is not None and max(token_ids, default=0) >= vocabulary:
            raise ConfigError(
                f"{source}, row {index}: the tokenizer of model.path produces token {max(token_ids)}, but the vocabulary of "
                f"the model has {vocabulary} tokens; use the model's own tokenizer"
            )
        longest = max(longest, len(token_ids))
        fits = fits or len(token_ids) <= config.max_prompt_tokens
    if not fits:
        raise all_too_long(source, index + 1, longest, config)
    if 0 < len(unanswered) <= index:
        which = ", ".join(map(str, unanswered[:10])) + ", ..." * (len(unanswered) > 10)
        log.warning("%s: %d of %d rows have no answer: %s", source, len(unanswered), index + 1, which)
    return Checked(index + 1, sources)


def all_too_long(source: str | Path, count: int, longest: int, config: DataConfig) -> DataError:
    """Return the error for a source whose `count` prompts are all too long."""
    return DataError(
        f"{source}: all {count} prompts are longer than data.max_prompt_tokens ({config.max_prompt_tokens}); "
        f"the longest has {longest}"
    )


# -- for a run ---------------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """The prompts of a run, and the stop tokens of their completions."""

    train: Prompts
    held_out: list[Prompt]
    """Prompts of all suites in order; their ids name the suite."""
    stop_token_ids: tuple[int, ...]


def prepare(config: Config) -> Prepared:
    """Open the prompts of a run, and tokenise the held-out ones. Raises ConfigError, DataError."""
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
    return Prepared(
        Prompts(config.data.sources, "train", tokenizer, config.data),
        [prompt for suite in held_out(config, tokenizer).values() for prompt in suite],
        stop_token_ids(tokenizer, config.model.path, config.sampling.stop),
    )


def held_out(config: Config, tokenizer: "PreTrainedTokenizerBase") -> dict[str, list[Prompt]]:
    """Return the prompts of each held-out suite that are not too long."""
    return {
        name: [p for p in Prompts((source,), name, tokenizer, config.data, config.data.eval_rows) if p.token_ids]
        for name, source in config.data.suites.items()
    }
