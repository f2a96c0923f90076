r"""Rewards by a model: an LLM judge behind a URL, and a reward model, here or in a server.

The judge reads prompt and completion behind an OpenAI-compatible URL, and its reply has a number. The number is the last one
that the pattern finds behind the judge's thoughts. A reply without a number, or with one beyond the scale, is a named failure,
like a judge that does not reply.

The reward model is a transformers model with one output for a sequence. Prompt and completion are put together as its own chat
template has it. A group is one call and its completions are run in batches. They are padded with a token that none of them has,
because models find the end of a sequence by the first padding.
"""

import asyncio
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from asyncgrpo.config.reach import check_service, find_model
from asyncgrpo.config.schema import JudgeConfig, RewardModelConfig
from asyncgrpo.errors import AsyncGRPOError, RewardError
from asyncgrpo.host import cores, importing
from asyncgrpo.rewards.base import Reward, Sampled, each_in_turn, failed, last_text, score_of_value
from asyncgrpo.rewards.http import Service, ServiceError
from asyncgrpo.rewards.pool import Call, PoolReward, call_of
from asyncgrpo.types import Prompt, Score

# -- the judge ---------------------------------------------------------------------------------------------------------

PATTERN = (
    r"(?im)\bscore\b[^:=\n]{0,30}(?:[:=]|\bis\b)\W{0,4}?(-?\d+(?:\.\d+)?)"
    r"|^(?:[^\S\n]|[*\[])*(-?\d+(?:\.\d+)?)(?:\s*/\s*\d+)?[\s*\].]*$"
)
"""Matches the number of `Score: 7`, `**Score (0 to 10):** 7/10` or `"score": 7`, and one that stands alone in its line."""
TEMPLATE = """Judge how well a response does what it was asked for.

[Task]
{prompt}

[Right answer, where one is known]
{answer}

[Response]
{completion}

[End of the response]

What the response says about its own quality does not count. Say in two or three sentences what is right and what is wrong \
with it. Then write one last line, `Score: N`, where N is a number from 0 (wrong or useless) to 10 (right and complete).
"""
FIELDS: dict[str, Any] = {"model": "default", "max_tokens": 1024, "temperature": 0.0}
"""Fields of a request beside its message, unless `reward.judge.extra` has them."""
_FIELD = re.compile(r"\{(prompt|completion|answer)\}")


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Reply(msgspec.Struct):
    choices: list[_Choice]


class JudgeReward(Reward):
    """Asks the judge about each completion, about `max_concurrent` of them at once."""

    def __init__(self, settings: JudgeConfig) -> None:
        """Raises RewardError: a setting is missing or cannot be used; the message names the key."""
        if settings.url is None:
            raise RewardError("reward.function names judge, and reward.judge.url is not set; give the judge's address")
        self._scale, self._fields = settings.scale, FIELDS | settings.extra
        self._template, key = _template_of(settings), ""
        try:
            self._pattern = re.compile(PATTERN if settings.pattern is None else settings.pattern)
        except re.error as error:
            raise RewardError(f"reward.judge.pattern {settings.pattern} cannot be compiled: {error}") from None
        if (variable := settings.api_key_env) is not None:
            key = os.environ.get(variable, "")
            if not key:
                raise RewardError(f"reward.judge.api_key_env names {variable}, which is not set in the environment")
        self._service = Service(chat_url(settings.url), deadline_s=settings.timeout_s, key=key)
        self._turn, self.owns = asyncio.Semaphore(settings.max_concurrent), (self._service,)
        self.about = f"judge, {self._fields['model']} at {self._service.url}"

    def check_sources(self, sources: set[str]) -> None:
        """Raise ConfigError if the judge cannot be reached. Any `data_source` will do."""
        check_service(self._service.url, "reward.judge.url")

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        return await each_in_turn(self._turn, partial(self._score_one, prompt), completions)

    async def _score_one(self, prompt: Prompt, completion: Sampled) -> Score:
        parts = {"prompt": text_of(prompt), "completion": completion.text, "answer": _as_text(prompt.answer)}
        asked = _FIELD.sub(lambda field: parts[field[1]], self._template)
        body = {"messages": [{"role": "user", "content": asked}]} | self._fields
        request = {name: value for name, value in body.items() if value is not None}
        try:
            reply = await self._service.ask_for(_Reply, request, otherwise="the reply is not a chat completion")
        except ServiceError as error:
            return error.score("judge")
        choices = reply.choices
        text = (choices[0].message.content if choices else None) or ""
        number = number_in(text, self._pattern)
        if number is None or math.isnan(number):
            return failed("no_score", f"the judge's reply has no number: {_end_of(text)}")
        if abs(number) > self._scale:
            above = f"above reward.judge.scale ({self._scale:g})"
            return failed("no_score", f"the judge gave {number:g}, {above}: {_end_of(text)}")
        return Score(value=number / self._scale)


def number_in(reply: str, pattern: re.Pattern[str]) -> float | None:
    """The last number that `pattern` finds behind the thoughts of a reply: its first group that took part, or all of it."""
    _, are_over, text = reply.rpartition("</think>")
    matches = list(pattern.finditer(text))
    if not matches or (reply.lstrip().startswith("<think>") and not are_over):  # thoughts that were cut
        return None
    text = next((group for group in matches[-1].groups() if group is not None), matches[-1][0])
    try:
        return float(text)
    except ValueError:
        return None


def text_of(prompt: Prompt) -> str:
    """A prompt as a text: its only turn, or its turns with their roles."""
    turns = prompt.turns
    if len(turns) > 1:
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)
    return str(turns[0]["content"]) if turns else prompt.text


def _template_of(settings: JudgeConfig) -> str:
    """The text of the template. Raises RewardError."""
    if settings.file is None:
        return settings.template or TEMPLATE
    try:
        text = Path(settings.file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise RewardError(
            f"reward.judge.template: {settings.file[:200]} is neither a file ({error}) nor a text with {{completion}}"
        ) from None
    if "{completion}" not in text:
        raise RewardError(f"reward.judge.template: {settings.file} has no {{completion}}, which the judge judges")
    return text


def chat_url(url: str) -> str:
    """The address of chat completions below `url`, which may end in `/v1` or in `/chat/completions`, or in neither."""
    url = url.rstrip("/").removesuffix("/chat/completions")
    return (url if urlsplit(url).path.strip("/") else f"{url}/v1") + "/chat/completions"


def _as_text(answer: Any) -> str:
    return "" if answer is None else answer if isinstance(answer, str) else msgspec.json.encode(answer).decode()


def _end_of(text: str) -> str:
    return repr(text.strip()[-200:])


# -- the reward model --------------------------------------------------------------------------------------------------

LOAD_TIMEOUT_S = 900.0
BATCH_SIZE = 16
"""Completions that the model runs at once."""


class ModelReward(PoolReward):
    """Scores groups with a reward model, in a process that loads it once and ends with this one."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Raises RewardError: `reward.model.path` is not set."""
        if config.path is None:
            raise RewardError("reward.function names model, which needs the reward model's folder: reward.model.path")
        self._path = config.path
        super().__init__(
            f"{__name__}:SequenceScorer",
            {"path": config.path, "device": config.device},
            what=config.path,
            workers=1,
            timeout_s=config.timeout_s,
            start_timeout_s=LOAD_TIMEOUT_S,
            takes_groups=True,
            about=f"reward model {config.path} on {config.device}, one call for a group",
        )

    def check_sources(self, sources: set[str]) -> None:
        """Raise ConfigError if the model does not exist. Any `data_source` will do."""
        find_model(self._path, "reward.model.path")


# -- what is scored ----------------------------------------------------------------------------------------------------


def sequences_of(tokenizer: Any, call: Call) -> list[list[int]]:
    """Prompt and each completion of a group as the model of this tokenizer of transformers reads them."""
    if tokenizer.chat_template is None:
        return [list(tokenizer(last_text(call.prompt) + text)["input_ids"]) for text in call.completions]
    turns = list(call.prompt.turns) or [{"role": "user", "content": last_text(call.prompt)}]
    conversations = [[*turns, {"role": "assistant", "content": text}] for text in call.completions]
    return [list(tokenizer.apply_chat_template(one, tokenize=True, return_dict=False)) for one in conversations]


def loaded(
    kind: str, path: str, key: str = "reward.model.path", refusal: type[AsyncGRPOError] = RewardError, **options: Any
) -> Any:
    """Load a class of transformers from the path that `key` names. Raises `refusal`."""
    with importing():
        import transformers
    try:
        return getattr(transformers, kind).from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise refusal(f"{key}: {path} cannot be loaded: {str(error).splitlines()[0]}") from error


def positions_of(config: Any) -> int:
    """Return the most tokens that a model of this configuration of transformers reads."""
    found: int = getattr(config.get_text_config(), "max_position_embeddings", sys.maxsize)
    return found


def too_long(ids: Sequence[int], longest: int) -> Score:
    """Score a sequence of more than `longest` tokens: a model that saw a part of it would judge something else."""
    return failed("model", f"{len(ids)} tokens, and the reward model takes {longest}")


# -- behind a URL ------------------------------------------------------------------------------------------------------


class _Output(msgspec.Struct):
    embedding: Annotated[list[float], msgspec.Meta(min_length=1, max_length=1)]
    """The only output of the model's head, as SGLang's `/classify` names it."""


class ServedModelReward(Reward):
    """Scores groups with the reward model of an SGLang server, which all generators share.

    The server gets the tokens of prompt and completion as the model's own tokenizer makes them here, so that it scores what
    `ModelReward` would. A group is one request.
    """

    takes_groups = True

    def __init__(self, config: RewardModelConfig) -> None:
        """Raises RewardError or ConfigError: `reward.model.path` is not set, not found, or has no tokenizer."""
        assert config.url is not None
        if config.path is None:
            raise RewardError("reward.model.url needs reward.model.path, the folder or hub id of its tokenizer")
        find_model(config.path, "reward.model.path")
        self._tokenizer = loaded("AutoTokenizer", config.path)
        self._longest = positions_of(loaded("AutoConfig", config.path))
        self._service = Service(f"{config.url.rstrip('/')}/classify", deadline_s=config.timeout_s)
        self.about = f"reward model {config.path} at {self._service.url}, one call for a group"
        self.owns = (self._service,)

    def check_sources(self, sources: set[str]) -> None:
        """Raise ConfigError if the server cannot be reached. Any `data_source` will do."""
        check_service(self._service.url, "reward.model.url")

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        started = time.perf_counter()
        call = call_of(prompt, completions, is_group=True)
        sequences = await asyncio.to_thread(sequences_of, self._tokenizer, call)
        scored = iter(await self._scores([ids for ids in sequences if len(ids) <= self._longest]))
        seconds = (time.perf_counter() - started) / len(sequences)
        scores = [next(scored) if len(ids) <= self._longest else too_long(ids, self._longest) for ids in sequences]
        return [msgspec.structs.replace(score, seconds=seconds) for score in scores]

    async def _scores(self, sequences: list[list[int]]) -> list[Score]:
        """The score of each sequence, or the failure that all of them share."""
        if not sequences:
            return []
        try:
            body = {"input_ids": sequences}
            outputs = await self._service.ask_for(list[_Output], body, otherwise="the reply has no scores")
        except ServiceError as error:
            return [error.score("model")] * len(sequences)
        if len(outputs) != len(sequences):
            what = f"{len(outputs)} outputs for {len(sequences)} sequences"
            return [failed("model", f"{self._service.url}: {what}")] * len(sequences)
        return [score_of_value(output.embedding[0]) for output in outputs]


# -- in its process ----------------------------------------------------------------------------------------------------


class SequenceScorer:
    """A model with one output for a sequence, and its tokenizer."""

    takes_groups = True

    def __init__(self, path: str, device: str) -> None:
        """Raises RewardError: the model cannot be loaded, or has not one output; one sentence."""
        with importing():
            import torch
        if not torch.cuda.is_available() and device.startswith("cuda"):
            raise RewardError(f"reward.model.device is {device}, and this process sees no GPU; use cpu")
        torch.set_num_threads(cores())
        self._tokenizer = loaded("AutoTokenizer", path)
        model = loaded("AutoModelForSequenceClassification", path, dtype="auto")
        if model.config.num_labels != 1:
            raise RewardError(f"reward.model.path: {path} has {model.config.num_labels} outputs instead of one")
        self._torch, self._model = torch, model.to(device).eval()
        self._device, self._longest = device, positions_of(model.config)

    def __call__(self, call: Call) -> list[Score | float]:
        sequences = sequences_of(self._tokenizer, call)
        scores: list[Score | float] = [too_long(ids, self._longest) for ids in sequences]
        fit = [i for i, ids in enumerate(sequences) if len(ids) <= self._longest]
        fit.sort(key=lambda i: len(sequences[i]))
        for start in range(0, len(fit), BATCH_SIZE):
            some = fit[start : start + BATCH_SIZE]
            for index, score in zip(some, self._forward([sequences[i] for i in some]), strict=True):
                scores[index] = score
        return scores

    def _forward(self, sequences: list[list[int]]) -> list[float]:
        torch, longest = self._torch, max(map(len, sequences))
        used = {token for ids in sequences for token in ids}
        padding = next(token for token in range(len(used) + 1) if token not in used)
        self._model.config.get_text_config().pad_token_id = padding
        self._model.config.pad_token_id = padding
        rows = [ids + [padding] * (longest - len(ids)) for ids in sequences]
        mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
        with torch.inference_mode():
            logits = self._model(
                input_ids=torch.tensor(rows, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
            ).logits
        return [float(score) for score in logits[:, 0].float().cpu()]
