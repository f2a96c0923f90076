"""Loads a tokenizer, finds the stop tokens, and renders and tokenises chat turns.

A prompt is tokenised once, here. From then on only its token ids are used.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncgrpo.config.reach import find_model
from asyncgrpo.data.sources import one_line
from asyncgrpo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rendered(NamedTuple):
    """A rendered prompt."""

    text: str
    token_ids: tuple[int, ...]


def load_tokenizer(path: str, template: Mapping[str, Any] = MappingProxyType({})) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model folder or hub id (from the hub or its cache).

    Args:
        template: arguments of its chat template (`data.chat_template_kwargs`).
    Raises:
        ConfigError: the folder is missing or not a model folder, or neither cache nor hub has the tokenizer.
    """
    find_model(path)
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(f"model.path {path!r} is not a model folder: it holds none of {', '.join(_TOKENIZER_FILES)}")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # its warnings are checked here and reported with row or file
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if template:
            tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **template)  # type: ignore[method-assign]
        return tokenizer
    except Exception as error:  # of many kinds
        raise ConfigError(f"model.path {path!r}: its tokenizer cannot be loaded: {one_line(error)}") from error


def stop_token_ids(
    tokenizer: "PreTrainedTokenizerBase", model_path: str, extra_stops: Iterable[str] = ()
) -> tuple[int, ...]:
    """Return the sorted stop tokens: of the tokenizer, of generation_config.json, and `extra_stops`.

    Args:
        model_path: folder or hub id of the model. Chat models often set a second end token in generation_config.json.
        extra_stops: strings (`sampling.stop`) of exactly one token each.
    Raises:
        ConfigError: an extra stop is not a single token, generation_config.json is broken, or no stop token is defined.
    """
    of_model = _json_object(model_path, "generation_config.json").get("eos_token_id")
    ends = [tokenizer.eos_token_id, *(of_model if isinstance(of_model, list) else [of_model])]
    stops = {int(token) for token in ends if token is not None}
    for text in extra_stops:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) == 2 and not tokenizer.decode(ids[:1]):  # a space that the tokenizer puts before a text
            del ids[0]
        if len(ids) != 1:
            raise ConfigError(f"sampling.stop: {text!r} is {len(ids)} tokens of this tokenizer; a stop is one token")
        stops.add(ids[0])
    if not stops:
        raise ConfigError(
            f"model.path {model_path!r}: neither tokenizer nor generation_config.json has an eos_token; set sampling.stop"
        )
    return tuple(sorted(stops))


def render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[dict[str, Any]],
    system_prompt: str | None = None,
    *,
    where: str = "prompt",
) -> Rendered:
    """Render a prompt up to the start of the completion, and tokenise it.

    Uses the chat template of the tokenizer with the generation prompt. Without a template, contents are concatenated, with the
    special tokens that the tokenizer adds to text.

    Args:
        messages: chat turns with `role` and `content`.
        system_prompt: first turn, unless a system turn exists.
        where: name of the prompt in an error, for example `train.jsonl, row 3`.
    Raises:
        DataError: the chat template refuses these turns.
    """
    text = text_of(tokenizer, messages, system_prompt, where)
    return Rendered(text, _encode(tokenizer, text))


def text_of(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[dict[str, Any]],
    system_prompt: str | None,
    where: str,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Return the text of a prompt as `render`, with tools if its chat template takes them. Raises DataError."""
    turns = with_system(messages, system_prompt)
    if not tokenizer.chat_template:
        if tools is not None:
            raise DataError(f"{where}: the model has no chat template, which tools need")
        return "".join(turn["content"] for turn in turns)
    from jinja2 import TemplateError

    arguments: dict[str, Any] = {} if tools is None else {"tools": tools}
    try:
        templated = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **arguments)
    except (TemplateError, TypeError, ValueError) as error:  # the latter two from expressions in it, and from odd tools
        roles = ", ".join(turn["role"] for turn in turns)
        raise DataError(f"{where}: the model's chat template refuses the turns {roles}: {one_line(error)}") from error
    assert isinstance(templated, str)
    return templated


def with_system(messages: Sequence[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """Return the turns of a prompt, with a system turn first if there is a text for it and no such turn yet."""
    if system_prompt is None or any(turn["role"] == "system" for turn in messages):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[int, ...]:
    """Return the token ids of a text. A chat template has written special tokens already."""
    return tuple(tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template))


MARK = "\ue000"
"""Placeholder for a turn of the model while its context is rendered; a private-use character."""


def continuation(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, Any]], last: int | None
) -> tuple[int, ...]:
    """Return the token ids that follow a turn of the model, up to the start of the next one.

    The turn is never rendered again: the template renders its context, so sampled tokens stay as sampled. Without a
    template, contents are concatenated.

    Args:
        messages: after the turn.
        last: last token of the turn.
    Raises:
        DataError: the chat template refuses messages of these roles after a turn of the model, or leaves them out.
    """
    end = "" if last is None else str(tokenizer.decode([last]))
    if tokenizer.chat_template:
        text = _text_behind_turn(tokenizer, messages)
        at = text.find(end)
        if at >= 0 and not text[:at].strip():  # it repeats the end token that the model sampled, some after a space
            text = text[at + len(end) :]
    else:
        text = "".join(one["content"] for one in messages)
    # Behind the last token, because many tokenizers put a space before a text, and some drop the one after an end token.
    token_ids = tokenizer.encode(end + text, add_special_tokens=False)
    for start in (0, 1):
        if token_ids[start : start + 1] == [last]:
            return tuple(token_ids[start + 1 :])
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _text_behind_turn(tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, Any]]) -> str:
    def behind(*more: dict[str, Any]) -> str:
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}]
        return text_of(tokenizer, [*before, *more], None, "a reply of the environment").partition(MARK)[2]

    text = behind(*messages)
    if messages and not any(one["content"] in text for one in messages) and text == behind():
        roles = ", ".join(one["role"] for one in messages)
        raise DataError(f"the model's chat template leaves out what a reply has in the roles {roles}")
    return text


def opening(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[int, ...]:
    """Return the token ids of the first messages of a conversation with these tools.

    Raises:
        DataError: the chat template refuses these messages or tools.
    """
    return _encode(tokenizer, text_of(tokenizer, messages, None, "the first messages", tools))


def vocabulary_size(model_path: str) -> int | None:
    """Return the number of token ids of the model; None if config.json does not define it.

    It is often larger than the tokenizer's, because models round their vocabulary up.
    """
    config = _json_object(model_path, "config.json")
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if isinstance(size, int) else None


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def _json_object(model_path: str, name: str) -> dict[str, Any]:
    """Return the object in a file of a model; empty if there is no file. Raises ConfigError."""
    file = Path(model_path).expanduser() / name
    if not file.parent.is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        find_model(model_path)
        try:
            file = Path(hf_hub_download(model_path, name))
        except EntryNotFoundError:
            return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is broken: {one_line(error)}") from error


def decoder(tokenizer: "PreTrainedTokenizerBase", *, keep_special: bool) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to text. Logs and samples keep special tokens (`keep_special`), rewards do not."""
    if tokenizer.is_fast and not tokenizer.clean_up_tokenization_spaces:  # the same text in half the time
        backend = tokenizer.backend_tokenizer
        return lambda token_ids: str(backend.decode(list(token_ids), skip_special_tokens=not keep_special))
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special))
