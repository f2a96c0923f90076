"""Teachers behind URLs: the log-probs that a server of SGLang or vLLM gives the sampled tokens, beside their reward.

A teacher that does not reply fails the score of a completion, so that an outage pauses, retries and is reported as one of the
reward. Both servers give log-probs of given tokens at temperature 1, whatever a request asks for.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from asyncgrpo import metrics
from asyncgrpo.config.reach import check_service, find_model
from asyncgrpo.config.schema import Config, TeacherConfig
from asyncgrpo.errors import ConfigError
from asyncgrpo.host import importing
from asyncgrpo.rewards.base import Reward, Sampled, failed, is_training
from asyncgrpo.rewards.http import Service, ServiceError
from asyncgrpo.types import Completion, Prompt, Score, TeacherLogprobs

LONG_PROMPT = 64
"""Tokens from which a prompt is sent once before its completions. A shorter one costs less than the request."""
PROMPTS_KEPT = 256
"""Prompts that are known to have been sent."""


class TaughtScore(Score):  # type: ignore[misc]  # mypy does not see that it is frozen, too
    """Score of a completion, with its teacher's log-probs."""

    teacher: TeacherLogprobs | None = None

    @property
    def plain(self) -> Score:
        """The score alone, as it is sent."""
        return Score(**{name: getattr(self, name) for name in Score.__struct_fields__})


# -- replies of the servers --------------------------------------------------------------------------------------------


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""
    root: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: Annotated[list[_Card], msgspec.Meta(min_length=1)]


_Entry = tuple[float | None, int, Any]
"""Log-prob, token id and text."""


class _Meta(msgspec.Struct):
    input_token_logprobs: list[_Entry]
    input_top_logprobs: list[list[_Entry] | None] = []


class _OfSGLang(msgspec.Struct):
    meta_info: _Meta


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None]


class _OfVLLM(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


T = TypeVar("T")
Position = tuple[int, float | None, list[tuple[int, Any]]]
"""Token id and its log-prob, and the most likely tokens with theirs."""


# -- one server --------------------------------------------------------------------------------------------------------


class Teacher:
    """The model of one server. Use it from one event loop."""

    def __init__(self, url: str, path: str | None, settings: TeacherConfig) -> None:
        """
        Args:
            path: folder or hub id of the model; None: as the server names it.
        """
        self.url = url.strip().rstrip("/").removesuffix("/v1")
        self._path, self._top_k, deadline_s = path, settings.top_k, settings.timeout_s
        self._cards, self._sglang, self._vllm = (
            Service(f"{self.url}/{one}", deadline_s=deadline_s) for one in ("v1/models", "generate", "v1/completions")
        )
        self._turn = asyncio.Semaphore(settings.max_concurrent)
        self._card: _Card | None = None
        self._vocabulary = 0
        self._sent: OrderedDict[tuple[int, ...], asyncio.Future[bytes]] = OrderedDict()

    def check(self, config: Config) -> None:
        """Raise ConfigError if the server cannot be reached, or cannot score completions of this run."""
        check_service(self.url, "teacher.url")

        async def ask() -> _Card:
            try:
                return await self._ask()
            finally:
                await self.close()

        try:
            card = asyncio.run(ask())
        except ServiceError as error:
            raise ConfigError(f"teacher.url: {error}") from error
        longest = config.data.max_prompt_tokens + config.sampling.max_tokens
        if card.max_model_len is not None and longest >= card.max_model_len:  # servers keep room for a token
            raise ConfigError(
                f"teacher.url: the context of {self.url} is {card.max_model_len} tokens, too short for data.max_prompt_tokens + "
                f"sampling.max_tokens = {longest} and one more; lower one of the two, or start the server with a longer context"
            )
        with importing():
            from transformers import AutoTokenizer

        path = self._path or card.root or card.id
        own, theirs = (_load(AutoTokenizer, one).get_vocab() for one in (config.model.path, path))
        if differing := own.items() ^ theirs.items():
            raise ConfigError(
                f"teacher.path ({path}) has other tokens than model.path ({config.model.path}): token "
                f"{min(differing)[0]!r} differs; a teacher must have the same vocabulary"
            )
        if max(own.values()) >= self._vocabulary:
            raise ConfigError(
                f"teacher.path ({path}) has {self._vocabulary} rows for {max(own.values()) + 1} tokens; its server would end "
                "at the first id above them"
            )

    async def score(self, prompt: Sequence[int], completion: Completion) -> TeacherLogprobs:
        """Return the log-probs of the sampled tokens. Raises ServiceError."""
        row = [*prompt, *completion.all_token_ids.tolist()]
        card, asked_s = self._card or await self._ask(), time.perf_counter()
        if max(row) >= self._vocabulary:
            raise ServiceError(f"{self.url}: token id {max(row)} is not in a vocabulary of {self._vocabulary}")
        is_sglang = card.owned_by == "sglang"
        if is_sglang and len(prompt) >= LONG_PROMPT:
            await self._send_once(tuple(prompt))
        async with self._turn:
            found = await (self._by_sglang(row, len(prompt)) if is_sglang else self._by_vllm(row, len(prompt), card))
        metrics.teacher_seconds.observe(time.perf_counter() - asked_s)
        wanted = row[len(prompt) :]
        if is_sglang:  # it writes 0 for the last id of the vocabulary
            wanted = [0 if token == self._vocabulary - 1 else token for token in wanted]
        if [token for token, *_ in found] != wanted:
            raise ServiceError(f"{self.url}: the reply has other tokens than the request")
        return self._logprobs([found[place] for place in completion.sampled_at.tolist()])

    async def close(self) -> None:
        """Close the connections."""
        for one in (self._cards, self._sglang, self._vllm):
            await one.close()

    async def _ask(self) -> _Card:
        """Ask the server for its model, and look up the size of the vocabulary. Raises ServiceError."""
        card = _decoded(await self._cards.get(), _Cards, self.url).data[0]
        with importing():
            from transformers import AutoConfig

        model = await asyncio.to_thread(_load, AutoConfig, self._path or card.root or card.id)
        self._vocabulary = model.get_text_config().vocab_size
        self._card = card
        return card

    async def _send_once(self, prompt: tuple[int, ...]) -> None:
        """Have the server compute a prompt before the first of its completions, which then find it in the prefix cache."""
        sent = self._sent.get(prompt)
        if sent is None or (sent.done() and (sent.cancelled() or sent.exception() is not None)):
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}}
            sent = self._sent[prompt] = asyncio.ensure_future(self._sglang.post(msgspec.json.encode(body)))
            if len(self._sent) > PROMPTS_KEPT:
                self._sent.popitem(last=False)
        await asyncio.shield(sent)

    async def _by_sglang(self, row: list[int], start: int) -> list[Position]:
        body = {
            "input_ids": row,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the prefix cache is read up to here; the first entry has no log-prob
            "top_logprobs_num": self._top_k,
        }
        meta = _decoded(await self._sglang.post(msgspec.json.encode(body)), _OfSGLang, self.url).meta_info
        top = meta.input_top_logprobs or [None] * len(meta.input_token_logprobs)
        pairs = zip(meta.input_token_logprobs, top, strict=False)
        return [(token, value, [(id, x) for x, id, _ in likely or ()]) for (value, token, _), likely in pairs][1:]

    async def _by_vllm(self, row: list[int], start: int, card: _Card) -> list[Position]:
        body = {"model": card.id, "prompt": row, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": self._top_k}
        reply = _decoded(await self._vllm.post(msgspec.json.encode(body)), _OfVLLM, self.url)
        found: list[Position] = []
        for token, given in zip(row[start:], reply.choices[0].prompt_logprobs[start:], strict=False):
            values = {id: one.logprob for id, one in (given or {}).items()}
            likely = sorted(values.items(), key=lambda one: -one[1])[: self._top_k]
            found.append((token, values.get(token), likely))
        return found

    def _logprobs(self, found: list[Position]) -> TeacherLogprobs:
        likely = [one for *_, one in found]
        if any(len(one) < self._top_k for one in likely):
            raise ServiceError(f"{self.url}: the reply has fewer than teacher.top_k ({self._top_k}) tokens")
        shape = len(found), self._top_k
        made = TeacherLogprobs(
            np.array([value for _, value, _ in found], np.float32),  # NaN for null
            np.array([[id for id, _ in one] for one in likely], np.int32).reshape(shape),
            np.array([[value for _, value in one] for one in likely], np.float32).reshape(shape),
        )
        if not (np.isfinite(made.sampled).all() and np.isfinite(made.values).all()):
            raise ServiceError(f"{self.url}: a log-prob is not finite")
        return made


def _decoded(reply: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(reply, type=kind)
    except msgspec.MsgspecError as error:
        raise ServiceError(f"{url}: the reply is neither SGLang's nor vLLM's: {error}") from error


def _load(kind: Any, path: str) -> Any:
    """Load a tokenizer or a configuration of transformers. Raises ConfigError."""
    find_model(path, "teacher.path")
    try:
        return kind.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"teacher.path: {path} cannot be loaded: {str(error).splitlines()[0]}") from error


# -- beside a reward ---------------------------------------------------------------------------------------------------


def build_teachers(config: Config) -> dict[str, Teacher]:
    """Return the teachers by data_source; one for all sources is under ""."""
    paths, settings = config.teacher.path, config.teacher
    return {
        source: Teacher(url, paths.get(source) if isinstance(paths, dict) else paths, settings)
        for source, url in settings.urls.items()
    }


def check_teachers(config: Config, sources: set[str]) -> None:
    """Raise ConfigError if training rows of one of these sources have no teacher, or a teacher cannot be used."""
    teachers = build_teachers(config)
    if missing := sorted(source for source in sources if teachers and not {"", source} & teachers.keys()):
        raise ConfigError(f"teacher.url has no URL for data_source {', '.join(map(repr, missing))}; give one for each")
    for teacher in teachers.values():
        teacher.check(config)


class TaughtReward(Reward):
    """A reward that adds the teacher's log-probs to the scores of training prompts.

    A completion with a score of its environment is taught only.
    """

    teaches = True

    def __init__(self, reward: Reward, teachers: dict[str, Teacher]) -> None:
        self._reward, self._teachers, self.takes_groups = reward, teachers, reward.takes_groups
        self.about = reward.about

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        """Score completions. See `rewards.base.Reward`."""
        scores: list[Score | None] = [getattr(one.completion, "score", None) for one in completions]
        rest = [one for one, score in zip(completions, scores, strict=True) if score is None]
        teaching = completions if is_training(prompt) else []
        found, *taught = await asyncio.gather(
            self._reward.score(prompt, rest) if rest else _nothing(),
            *(self._teach(prompt, one.completion) for one in teaching),
        )
        left = iter(found)
        whole = [score or next(left) for score in scores]
        return [_joined(*pair) for pair in zip(whole, taught, strict=True)] if taught else whole

    async def close(self) -> None:
        """End every worker process, and close the connections."""
        await self._reward.close()
        for teacher in self._teachers.values():
            await teacher.close()

    async def _teach(self, prompt: Prompt, completion: Completion | None) -> TeacherLogprobs | Score:
        """Return the teacher's log-probs, or a failure."""
        assert completion is not None
        teacher = self._teachers.get(prompt.source) or self._teachers[""]
        opening = getattr(completion, "opening", ()) or prompt.token_ids
        outcome = "failed"
        try:
            found = await teacher.score(opening, completion)
            outcome = "scored"
            return found
        except ServiceError as error:
            return failed("timeout" if error.is_late else "teacher", str(error))
        except ConfigError as error:
            return failed("teacher", str(error))
        finally:
            metrics.teacher_tokens_total.labels(outcome=outcome).inc(len(completion.token_ids))


async def _nothing() -> list[Score]:
    return []


def _joined(score: Score, taught: TeacherLogprobs | Score) -> Score:
    if score.failure is not None:
        return score
    if isinstance(taught, Score):
        return msgspec.structs.replace(taught, seconds=score.seconds, waited=score.waited)
    return TaughtScore(**{name: getattr(score, name) for name in Score.__struct_fields__}, teacher=taught)
