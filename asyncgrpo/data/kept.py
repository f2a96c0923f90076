"""The prepared prompts of a run, cached in a file that every later start maps within milliseconds.

The file name is a digest of everything that the prompts depend on: contents of the sources, tokenizer files, settings. A
change of any of them misses the cache, and the prompts are prepared again.

Large training files are checked row by row and tokenised lazily (`LazyPrompts`). Their cache file records the check and holds
no prompts.
"""

import bisect
import importlib.metadata
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import xxhash

from asyncgrpo.config.rules import local_model
from asyncgrpo.config.schema import Config, DataConfig, is_file
from asyncgrpo.data.prompts import check_prompts, load_prompts, open_source, token_ids_of
from asyncgrpo.data.sources import digest_of, digest_of_file
from asyncgrpo.data.table import About, Fingerprint, Prepared, PromptTable, prompt_of
from asyncgrpo.data.tokenizer import load_tokenizer, stop_token_ids, vocabulary_size
from asyncgrpo.errors import DataError
from asyncgrpo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SMALL_BYTES = 4 * 2**20
"""Largest data that is tokenised before the run starts, which takes a second or two."""
checked: dict[str, About] = {}
"""Results of `check` in this process, by key."""
_OF_A_TOKENIZER = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
"""Suffixes of files that affect tokenisation, chat rendering or stop tokens."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run, and the stop tokens of their completions."""

    train: Prepared
    held_out: Sequence[Prompt]
    """Prompts of all suites in order; their ids name the suite."""
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Split:
    """The training prompts, or the held-out ones."""

    name: str
    sources: tuple[str, ...]
    limit: int | None


def is_lazy(config: Config) -> bool:
    """Return True if the rows of the training files are tokenised lazily."""
    return _num_bytes(next(_splits(config))) > SMALL_BYTES


def prepare(config: Config, run_dir: Path) -> Prompts:
    """Load the prompts of a run from the cache, or tokenise and cache them.

    Raises:
        ConfigError, DataError: model or data cannot be used.
    """
    kept = load_cached(config, run_dir)
    missing = [split for split in _splits(config) if split.name not in kept]
    if missing or is_lazy(config):
        tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
        stops = stop_token_ids(tokenizer, config.model.path, config.sampling.stop)
    for split in missing:
        key = _key(config, split)
        if split.name == "train" and is_lazy(config):
            table = PromptTable(split.name, [], check(config, run_dir)["train"])
        else:
            table = load_prompts(split.sources, split.name, tokenizer, config.data, split.limit, stop_token_ids=stops)
        if key is not None and key == _key(config, split):  # else a file changed meanwhile
            _keep(table, _place(config, run_dir, split, key), key)
        kept[split.name] = table
    train = LazyPrompts(config.data, tokenizer, kept["train"].about) if is_lazy(config) else kept["train"]
    return Prompts(
        train, tuple(itertools.chain(*(kept[name] for name in config.data.suites))), train.about.stop_token_ids
    )


def prepare_if_small(config: Config, run_dir: Path, known: Mapping[str, About] = MappingProxyType({})) -> None:
    """Tokenise and cache the prompts of small files, so that the buffer need not import a tokenizer, which takes seconds.

    For large files, cache the result of the check, so that the buffer need not repeat it.

    Args:
        known: `checked` of another process.
    """
    checked.update(known)
    train, *others = _splits(config)
    if sum(map(_num_bytes, (train, *others))) <= SMALL_BYTES:
        prepare(config, run_dir)
    elif is_lazy(config) and (about := checked.get(key := _key(config, train) or "")) is not None:
        _keep(PromptTable(train.name, [], about), _place(config, run_dir, train, key), key)


def check(config: Config, run_dir: Path, on_progress: Callable[[str], object] = log.info) -> dict[str, About]:
    """Refuse what `prepare` would refuse, within seconds and without writing files.

    Args:
        on_progress: called with a line every few seconds.
    Returns:
        An `About` per split. Sizes count rows, and fingerprints are empty, unless the prompts are cached.
    Raises:
        ConfigError, DataError: model or data cannot be used.
    """
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
    stops = stop_token_ids(tokenizer, config.model.path, config.sampling.stop)
    size = vocabulary_size(config.model.path)
    kept, found = load_cached(config, run_dir), dict[str, About]()
    for split in _splits(config):
        key = _key(config, split)
        if split.name in kept:  # checked before they were cached
            found[split.name] = kept[split.name].about
        elif key is not None and key in checked:
            found[split.name] = checked[key]
        else:
            read = [
                check_prompts(
                    source, tokenizer, config.data, vocabulary=size, limit=split.limit, on_progress=on_progress
                )
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
            if key is not None and key == _key(config, split):  # else a file changed meanwhile
                checked[key] = about
    return found


def load_cached(config: Config, run_dir: Path) -> dict[str, PromptTable]:
    """Load the cached prompts of an earlier start, by split."""
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
    """Write prompts to the cache. The run continues if the disk refuses them."""
    try:
        table.save(place, key)
    except OSError as error:
        log.warning("the prompt cache was not written: %s: %s", place, error.strerror)


def _place(config: Config, run_dir: Path, split: _Split, key: str) -> Path:
    return run_dir / "prompts" / f"{split.name}-{key}.bin"


def _key(config: Config, split: _Split) -> str | None:
    """Return a digest of all dependencies of the prompts; None if the model is not downloaded or a file is missing."""
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


# -- lazy prompts of large sources -------------------------------------------------------------------------------------

PROBES = 64
"""Rows at equal distances whose tokens enter the fingerprint, beside the bytes of the sources."""


class LazyPrompts(Prepared):
    """The rows of `data.train`, each tokenised on access.

    Every row has a prompt index. A row that is too long has no token ids, and the buffer drops it permanently.
    """

    def __init__(self, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", about: About) -> None:
        """
        Args:
            about: result of the check of every row. Its fingerprint is replaced.
        """
        self._config, self._tokenizer = config, tokenizer
        self._sources = [(source, *open_source(source, config)) for source in config.sources]
        if tuple(len(rows) for _, _, rows in self._sources) != about.sizes:
            raise DataError("data.train changed while the run started; start it again")
        self._ends = list(itertools.accumulate(len(rows) for _, _, rows in self._sources))
        digest = Fingerprint()
        for source in config.sources:
            digest.add(digest_of(source), ())
        count = min(PROBES, len(self))
        for prompt in (self[probe * len(self) // count] for probe in range(count)):
            digest.add(prompt.prompt_id, prompt.token_ids)
        self.about = msgspec.structs.replace(about, fingerprint=digest.hexdigest())

    def __len__(self) -> int:
        return self._ends[-1]

    def _prompt(self, at: int) -> Prompt:
        place = bisect.bisect_right(self._ends, at)
        source, schema, rows = self._sources[place]
        row = at - (self._ends[place] - len(rows))
        record = schema.to_record(rows[row], row)
        token_ids = token_ids_of(source, row, record, self._tokenizer, self._config)
        if len(token_ids) > self._config.max_prompt_tokens:
            token_ids = ()
        return prompt_of(f"train/{at}", token_ids, record.prompt, record.answer, record.source, record.info)
