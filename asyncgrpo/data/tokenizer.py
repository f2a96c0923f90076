"""Loads a tokenizer, finds the tokens that end a completion, and turns chat turns into the token ids of a prompt.

A prompt is tokenised once, here; the ids travel from then on and are never made from text again.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncgrpo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rendered(NamedTuple):
    """A prompt as the model sees it."""

    text: str
    token_ids: tuple[int, ...]


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder, or of a hub id where the hub or its cache can be reached.

    Raises:
        ConfigError: one sentence saying whether the folder is missing, is no model folder, or the hub is out of reach.
    """
    folder = Path(path)
    if not folder.is_dir() and _is_local(path):
        raise ConfigError(f"model.path {path!r}: no such folder")
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"model.path {path!r} is no model folder: it holds none of {', '.join(_TOKENIZER_FILES)}")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises whatever the broken file leads to
        if folder.is_dir():
            raise ConfigError(f"model.path {path!r}: its tokenizer cannot be loaded: {_one_line(error)}") from error
        raise ConfigError(
            f"model.path {path!r} is no folder, and as a hub id it can be neither found in the cache nor downloaded; "
            "give the folder of a downloaded model"
        ) from error


def stop_token_ids(
    tokenizer: "PreTrainedTokenizerBase", model_path: str, extra_stops: Iterable[str] = ()
) -> tuple[int, ...]:
    """Ids that end a completion, sorted: the tokenizer's, those of generation_config.json, and `extra_stops`.

    Args:
        model_path: folder of the model; chat models often name a second end token in its generation_config.json.
        extra_stops: strings (`sampling.stop`), each of which must be one token.
    Raises:
        ConfigError: an extra stop is not a single token, or generation_config.json is broken.
    """
    stops = set(_generation_config_stops(Path(model_path)))
    if tokenizer.eos_token_id is not None:
        stops.add(int(tokenizer.eos_token_id))
    for text in extra_stops:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"sampling.stop: {text!r} is {len(ids)} tokens of this tokenizer; a stop must be one token"
            )
        stops.add(ids[0])
    return tuple(sorted(stops))


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[dict[str, Any]],
    system_prompt: str | None = None,
    *,
    where: str = "prompt",
    longest: int | None = None,
) -> Rendered:
    """The prompt up to where the completion begins.

    Through the tokenizer's chat template, with the generation prompt added; without a template, the contents one after
    the other, with the special tokens that the tokenizer itself puts around text.

    Args:
        messages: turns with `role` and `content`.
        system_prompt: put first, unless there is a system turn already.
        where: names the prompt in an error, for example `train.jsonl, row 3`.
        longest: tokens. A longer prompt may come back with only its first token ids, which are more than this.
    Raises:
        DataError: the chat template refuses these turns.
    """
    turns = list(messages)
    if system_prompt is not None and all(turn["role"] != "system" for turn in turns):
        turns.insert(0, {"role": "system", "content": system_prompt})
    if not tokenizer.chat_template:
        text = "".join(turn["content"] for turn in turns)
        return Rendered(text, _encode(tokenizer, text, longest))
    from jinja2 import TemplateError

    try:
        templated = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise DataError(f"{where}: the model's chat template refuses the turns {roles}: {_one_line(error)}") from error
    assert isinstance(templated, str)
    # The template has written the special tokens already.
    return Rendered(templated, _encode(tokenizer, templated, longest, add_special_tokens=False))


_CERTAINLY = 256
"""Tokens in which a text and its beginning may differ where the text was cut, in the middle of a word."""


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str, longest: int | None, **how: bool) -> tuple[int, ...]:
    """The token ids of a text; of one that certainly has more than `longest`, perhaps those of its beginning only.

    To tokenise megabytes takes longer than to read a whole file. How many characters a token may stand for is each
    tokenizer's own affair, so a growing beginning is tokenised, until its tokens are more than twice too many.
    """
    size = 16 * (longest + _CERTAINLY) if longest is not None else len(text)
    while longest is not None and size < len(text):
        token_ids = tokenizer.encode(text[:size], **how)
        if len(token_ids) > 2 * longest + _CERTAINLY:
            return tuple(token_ids)
        size *= 4
    return tuple(tokenizer.encode(text, **how))


def vocabulary_size(model_path: str) -> int | None:
    """Token ids that the model can give are below it; None where its config.json does not say so.

    That is often more than the tokenizer knows: models round their vocabulary up.
    """
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is broken: {_one_line(error)}") from error
    return size if isinstance(size, int) else None


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def _is_local(path: str) -> bool:
    """Whether a missing folder was meant as one: a hub id is `name` or `owner/name`."""
    has_parent = "/" in path and Path(path).parent.is_dir()
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or has_parent


def _generation_config_stops(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    try:
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is broken: {_one_line(error)}") from error
    if eos is None:
        return []
    return [int(token) for token in (eos if isinstance(eos, list) else [eos])]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def decoder(tokenizer: "PreTrainedTokenizerBase", *, keep_special: bool) -> Callable[[Sequence[int]], str]:
    """Token ids to text. Special tokens are kept for people who look for what went wrong, and not for rewards."""

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special))

    return decode
