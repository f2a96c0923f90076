"""Prompts that are prepared once: kept in a file, which every later start of a run loads in a moment.

The file is named after all that the prompts depend on: what their sources hold, the tokenizer's files, and the settings.
So a change of any of them finds no file, and the prompts are made again.

Large training files are checked, row by row, and not tokenised (`lazy.py`): the file says that they were, and has no prompts.
"""

import bisect
import importlib.metadata
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import overload

import msgspec
import xxhash

from asyncgrpo.config.rules import local_model
from asyncgrpo.config.schema import Config, is_file
from asyncgrpo.data.lazy import LazyPrompts
from asyncgrpo.data.prompts import check_prompts, load_prompts
from asyncgrpo.data.sources import digest_of, digest_of_file
from asyncgrpo.data.table import About, Prepared, PromptTable
from asyncgrpo.data.tokenizer import load_tokenizer, stop_token_ids, vocabulary_size
from asyncgrpo.types import Prompt

log = logging.getLogger(__name__)

SMALL_BYTES = 4 * 2**20
"""Data of so many bytes are tokenised within a second or two, before the run starts."""
checked: dict[str, About] = {}
"""By key, what `check` found in this process."""
_OF_A_TOKENIZER = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
"""Ends of the names of files that can decide how text is tokenised or rendered, or what ends a completion."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run, and what ends their completions."""

    train: Prepared
    held_out: Sequence[Prompt]
    """Of all suites, one after the other; their ids name them."""
    stop_token_ids: tuple[int, ...]


class Several(Sequence[Prompt]):
    """Tables of prompts, one after the other."""

    def __init__(self, tables: Sequence[PromptTable]) -> None:
        self._tables = tables
        self._ends = list(itertools.accumulate(map(len, tables)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        """One prompt, or some of them as a list."""
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        index = range(len(self))[index]  # raises IndexError
        place = bisect.bisect_right(self._ends, index)
        return self._tables[place][index - self._ends[place]]


@dataclass(frozen=True)
class _Split:
    """The training prompts, or the held-out ones."""

    name: str
    sources: tuple[str, ...]
    limit: int | None


def is_lazy(config: Config) -> bool:
    """True if the rows of the training files are tokenised when they are due."""
    return _num_bytes(next(_splits(config))) > SMALL_BYTES


def prepare(config: Config, run_dir: Path) -> Prompts:
    """The prompts of a run: loaded where an earlier start has kept them, and else tokenised and kept.

    Raises:
        ConfigError, DataError: model or data cannot be used.
    """
    kept = look(config, run_dir)
    missing = [split for split in _splits(config) if split.name not in kept]
    if missing or is_lazy(config):
        tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
        stops = stop_token_ids(tokenizer, config.model.path, config.sampling.stop)
    for split in missing:
        key = _key(config, split)
        if split.name == "train" and is_lazy(config):
            table = PromptTable.without_prompts(split.name, check(config, run_dir)["train"])
        else:
            table = load_prompts(split.sources, split.name, tokenizer, config.data, split.limit, stop_token_ids=stops)
        if key is not None and key == _key(config, split):  # else a file was changed meanwhile
            _keep(table, _place(config, run_dir, split, key), key)
        kept[split.name] = table
    train = LazyPrompts(config.data, tokenizer, kept["train"].about) if is_lazy(config) else kept["train"]
    return Prompts(train, Several([kept[name] for name in config.data.suites]), train.about.stop_token_ids)


def prepare_if_small(config: Config, run_dir: Path, known: Mapping[str, About] = MappingProxyType({})) -> None:
    """Tokenise and keep the prompts of small files, so that the buffer needs no tokenizer, which takes seconds to import.

    Of large files it keeps that they were checked, so that the buffer need not check them.

    Args:
        known: what was `checked` in another process, if it was not this one.
    """
    checked.update(known)
    train, *others = _splits(config)
    if sum(map(_num_bytes, (train, *others))) <= SMALL_BYTES:
        prepare(config, run_dir)
    elif is_lazy(config) and (about := checked.get(key := _key(config, train) or "")) is not None:
        _keep(PromptTable.without_prompts(train.name, about), _place(config, run_dir, train, key), key)


def check(config: Config, run_dir: Path, tell: Callable[[str], object] = log.info) -> dict[str, About]:
    """Refuse what `prepare` would refuse, within seconds and without writing anything.

    Args:
        tell: is given a line about the progress every few seconds.
    Returns:
        What is known of each split. Sizes and fingerprints are those of prompts only where an earlier start has kept them.
    Raises:
        ConfigError, DataError: model or data cannot be used.
    """
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
    stops = stop_token_ids(tokenizer, config.model.path, config.sampling.stop)
    size = vocabulary_size(config.model.path)
    kept, found = look(config, run_dir), dict[str, About]()
    for split in _splits(config):
        key = _key(config, split)
        if split.name in kept:  # they passed this check before they were kept
            found[split.name] = kept[split.name].about
        elif key is not None and key in checked:
            found[split.name] = checked[key]
        else:
            read = [
                check_prompts(source, tokenizer, config.data, vocabulary=size, limit=split.limit, tell=tell)
                for source in split.sources
            ]
            found[split.name] = about = About(
                schema_name=", ".join(dict.fromkeys(one.schema_name for one in read)),
                sizes=tuple(one.rows for one in read),
                num_rows=sum(one.rows for one in read),
                longest=0,
                sources=tuple(sorted(set().union(*(one.sources for one in read)))),
                fingerprint="",
                stop_token_ids=stops,
            )
            if key is not None and key == _key(config, split):  # else a file was changed meanwhile
                checked[key] = about
    return found


def look(config: Config, run_dir: Path) -> dict[str, PromptTable]:
    """The prompts that an earlier start has kept, by split."""
    found: dict[str, PromptTable] = {}
    for split in _splits(config):
        key = _key(config, split)
        if key is not None and (table := PromptTable.load(_place(config, run_dir, split, key), key)) is not None:
            found[split.name] = table
    return found


def _splits(config: Config) -> Iterator[_Split]:
    yield _Split("train", config.data.sources, None)
    for name, source in config.data.suites.items():
        yield _Split(name, (source,), config.data.eval_rows)


def _num_bytes(split: _Split) -> int:
    files = [Path(source) for source in split.sources if is_file(source)]
    return sum(file.stat().st_size for file in files if file.is_file())


def _keep(table: PromptTable, place: Path, key: str) -> None:
    """Keep these prompts for later starts. Without room for them the run goes on."""
    try:
        table.save(place, key)
    except OSError as error:
        log.warning("prompts are not kept for a later start: %s: %s", place, error.strerror)


def _place(config: Config, run_dir: Path, split: _Split, key: str) -> Path:
    return run_dir / "prompts" / f"{split.name}-{key}.bin"


def _key(config: Config, split: _Split) -> str | None:
    """A digest of all that these prompts depend on. None: the model is still to be downloaded, or a file is missing."""
    model = local_model(config.model.path)
    if model is None or not all(Path(source).is_file() for source in split.sources if is_file(source)):
        return None
    data = config.data
    depends_on = (
        {name: importlib.metadata.version(name) for name in ("transformers", "tokenizers")},
        [digest_of_file(path) for path in sorted(Path(__file__).parent.glob("*.py"))],  # this code
        {name: digest_of_file(path) for name, path in _tokenizer_files(model)},
        (split.name, [digest_of(source) for source in split.sources], split.limit),
        (data.columns, data.max_prompt_tokens, data.system_prompt, data.chat_template_kwargs, config.sampling.stop),
    )
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(depends_on, order="deterministic"))


def _tokenizer_files(model: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted([*model.iterdir(), *model.glob("additional_chat_templates/*")]):
        if path.suffix in _OF_A_TOKENIZER and path.is_file():
            yield str(path.relative_to(model)), path
