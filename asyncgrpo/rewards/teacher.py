"""Teachers behind servers: the log-probs that a server of SGLang or vLLM gives the sampled tokens, beside their reward.

A teacher that does not reply fails the score of a completion, so that an outage pauses, retries and is reported as one of the
reward. Both servers give log-probs of given tokens at temperature 1, whatever a request asks for.
"""

import asyncio
import base64
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from asyncgrpo import metrics
from asyncgrpo.config.reach import check_service, find_model
from asyncgrpo.config.schema import Config, TeacherConfig
from asyncgrpo.errors import AsyncGRPOError, ConfigError
from asyncgrpo.rewards.base import Reward, Sampled, failed, is_training
from asyncgrpo.rewards.http import Service, ServiceError
from asyncgrpo.rewards.model import loaded
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


# -- one server --------------------------------------------------------------------------------------------------------


class _Model(msgspec.Struct):
    """The model of a server, of its reply to `/v1/models`."""

    id: str
    owned_by: str
    max_model_len: int | None = None
    root: str | None = None


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


_Found = tuple[np.ndarray, np.ndarray, np.ndarray]
"""As `TeacherLogprobs` of consecutive tokens, in any types of numbers; NaN for what is missing."""
_FLAT = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
"""Asks SGLang for arrays instead of a list for each of the most likely tokens, of which 8,000 times 64 take 0.7 s to read."""


class Teacher:
    """The model of one server. Use it from one event loop."""

    def __init__(self, url: str, path: str | None, settings: TeacherConfig, key: str = "") -> None:
        """
        Args:
            path: folder or hub id of the model; None: as the server names it.
            key: bearer token that the server requires; empty: none.
        """
        self.url = url.strip().rstrip("/").removesuffix("/v1")
        self._path, self._top_k = path, settings.top_k
        self._service = Service(self.url, deadline_s=settings.timeout_s, key=key)
        self.close = self._service.close
        self._turn = asyncio.Semaphore(settings.max_concurrent)
        self._model: _Model | None = None
        self._vocabulary = 0
        self._sent: OrderedDict[tuple[int, ...], asyncio.Future[bytes]] = OrderedDict()

    async def check(self, config: Config) -> None:
        """Raise ConfigError if the server cannot score completions of this run."""
        try:
            model = await self._ask()
        except ServiceError as error:
            raise ConfigError(f"teacher.url: {error}") from error
        _check_context(config, f"teacher.url: the context of {self.url}", model.max_model_len)
        _check_tokens(config, self._path or model.root or model.id, self._vocabulary)

    async def score(self, prompt: tuple[int, ...], completion: Completion) -> TeacherLogprobs:
        """Return the log-probs of the sampled tokens. Raises ServiceError, or ConfigError if its model is not found."""
        row, asked_s = [*prompt, *completion.all_token_ids.tolist()], time.perf_counter()
        model = self._model or await self._ask()
        if max(row) >= self._vocabulary:
            raise ServiceError(f"{self.url}: token id {max(row)} is not in a vocabulary of {self._vocabulary}")
        is_sglang = model.owned_by == "sglang"
        if is_sglang and len(prompt) >= LONG_PROMPT:
            await self._send_once(prompt)
        try:
            async with self._turn:
                found = await (self._by_sglang if is_sglang else self._by_vllm)(row, len(prompt), model)
            sampled, ids, values = (part[completion.sampled_at] for part in found)
            if not all(np.isfinite(part).all() for part in (sampled, ids, values)):
                raise ValueError("a log-prob is not finite")
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServiceError(f"{self.url}: the reply has no log-probs of the request: {error!r}") from error
        metrics.teacher_seconds.observe(time.perf_counter() - asked_s)
        return TeacherLogprobs(sampled, ids.astype(np.int32), values.astype(np.float32))

    async def _ask(self) -> _Model:
        """Ask the server for its model, and look up the size of the vocabulary. Raises ServiceError or ConfigError."""
        neither = "the server is neither SGLang's nor vLLM's"
        model = (await self._service.ask_for(_Models, at="/v1/models", otherwise=neither)).data[0]
        config = await asyncio.to_thread(_load, "AutoConfig", self._path or model.root or model.id)
        self._vocabulary, self._model = config.get_text_config().vocab_size, model
        return model

    async def _send_once(self, prompt: tuple[int, ...]) -> None:
        """Have the server compute a prompt before the first of its completions, which then find it in the prefix cache."""
        sent = self._sent.get(prompt)
        if sent is None or (sent.done() and (sent.cancelled() or sent.exception() is not None)):
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}}
            sent = self._sent[prompt] = asyncio.ensure_future(self._service.ask(body, at="/generate"))
            if len(self._sent) > PROMPTS_KEPT:
                self._sent.popitem(last=False)
        await asyncio.shield(sent)

    async def _by_sglang(self, row: list[int], start: int, model: _Model) -> _Found:
        body: dict[str, Any] = {
            "input_ids": row,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the prefix cache is read up to here; the first entry has no log-prob
            "top_logprobs_num": self._top_k,
            **(_FLAT if self._top_k else {}),
        }
        meta = msgspec.json.decode(await self._service.ask(body, at="/generate"))["meta_info"]
        entries = meta["input_token_logprobs"][1:]
        last = self._vocabulary - 1  # written as 0
        if [token for _, token, _ in entries] != [0 if token == last else token for token in row[start:]]:
            raise ValueError("it is for other tokens")
        values = [value for value, *_ in entries]
        if "input_top_logprobs_shape" not in meta:  # nothing was asked for, or the server does not know `_FLAT`
            return self._logprobs(values, meta["input_top_logprobs"][1:] if self._top_k else [[]] * len(entries))
        shape, flat = (len(entries), self._top_k), {"idx": "<i4", "val": "<f4"}
        encoded = ((meta[f"input_top_logprobs_{name}_flat_b64"], dtype) for name, dtype in flat.items())
        ids, likely = (np.frombuffer(base64.b64decode(text), dtype).reshape(shape) for text, dtype in encoded)
        return np.array(values, np.float32), ids, likely

    async def _by_vllm(self, row: list[int], start: int, model: _Model) -> _Found:
        body = {"model": model.id, "prompt": row, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": self._top_k}
        reply = msgspec.json.decode(await self._service.ask(body, at="/v1/completions"))
        entries = reply["choices"][0]["prompt_logprobs"][start:]
        values = [given[str(token)]["logprob"] for token, given in zip(row[start:], entries, strict=True)]
        tops = [sorted(((one["logprob"], int(name)) for name, one in given.items()), reverse=True) for given in entries]
        return self._logprobs(values, [top[: self._top_k] for top in tops])

    def _logprobs(self, values: Sequence[float | None], tops: Sequence[Sequence[Sequence[Any]]]) -> _Found:
        """Return the log-probs of tokens, and the log-prob and id of each of the most likely ones, with which `tops` begin."""
        pairs = [[other[:2] for other in top] for top in tops]
        likely = np.array(pairs, np.float64).reshape(len(values), self._top_k, 2)
        return np.array(values, np.float32), likely[..., 1], likely[..., 0]


def _check_own(config: Config, path: str) -> None:
    """Raise ConfigError if a model that the run would serve cannot score its completions."""
    text = _load("AutoConfig", path).get_text_config()
    _check_context(config, f"teacher.path: the context of {path}", getattr(text, "max_position_embeddings", None))
    heads, gpus = text.num_attention_heads, config.teacher_gpus_each
    if gpus and heads % gpus:
        raise ConfigError(f"teacher.gpus_each is {gpus}, which does not divide the {heads} attention heads of {path}")
    _check_tokens(config, path, text.vocab_size)


def _check_context(config: Config, what: str, context: int | None) -> None:
    """Raise ConfigError if a completion and its prompt could be longer than the context of a teacher, in tokens."""
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    if context is not None and longest >= context:  # servers keep room for a token
        raise ConfigError(
            f"{what} is {context} tokens; data.max_prompt_tokens + sampling.max_tokens need {longest + 1}"
        )


def _check_tokens(config: Config, path: str, vocabulary: int) -> None:
    """Raise ConfigError if the teacher at `path` has other tokens than the model, or fewer rows than tokens."""
    own, theirs = (_load("AutoTokenizer", one).get_vocab() for one in (config.model.path, path))
    if differing := own.items() ^ theirs.items():
        differs = f"token {min(differing)[0]!r} differs"
        raise ConfigError(f"teacher.path ({path}) needs the vocabulary of model.path ({config.model.path}): {differs}")
    if max(own.values()) >= vocabulary:
        raise ConfigError(f"teacher.path ({path}) has {vocabulary} rows for {max(own.values()) + 1} tokens; too few")


def _load(kind: str, path: str) -> Any:
    """Load a class of transformers. Raises ConfigError."""
    find_model(path, "teacher.path")
    return loaded(kind, path, "teacher.path", ConfigError)


# -- beside a reward ---------------------------------------------------------------------------------------------------


def build_teachers(config: Config, started: Mapping[str, str] | None = None, key: str = "") -> dict[str, Teacher]:
    """Return the teachers by data_source; one for all sources is under "".

    Args:
        started: URLs by data_source of the servers that the run has started, if it starts any.
        key: bearer token of these.
    """
    paths, settings = config.teacher.path, config.teacher
    return {
        source: Teacher(url, paths.get(source) if isinstance(paths, dict) else paths, settings, key)
        for source, url in (started or settings.urls).items()
    }


def check_teachers(config: Config, sources: set[str]) -> None:
    """Raise ConfigError if training rows of one of these sources have no teacher, or a teacher cannot be used."""
    teachers, own = build_teachers(config), config.teacher.own
    there = teachers.keys() | own.keys()
    if missing := sorted(source for source in sources if there and not {"", source} & there):
        key, what = ("teacher.path", "model") if own else ("teacher.url", "URL")
        raise ConfigError(f"{key} has no {what} for data_source {', '.join(map(repr, missing))}; give one for each")
    for path in own.values():
        _check_own(config, path)

    async def check(teacher: Teacher) -> None:
        try:
            await teacher.check(config)
        finally:
            await teacher.close()

    for teacher in teachers.values():
        check_service(teacher.url, "teacher.url")
        asyncio.run(check(teacher))


class TaughtReward(Reward):
    """A reward that adds the teacher's log-probs to the scores of training prompts.

    A completion with a score of its environment is taught only.
    """

    teaches = True

    def __init__(self, reward: Reward, teachers: dict[str, Teacher], group_size: int) -> None:
        """
        Args:
            group_size: completions from this index on are greedy baselines, which are not taught.
        """
        self._reward, self._teachers, self.takes_groups = reward, teachers, reward.takes_groups
        self._group_size, self.owns = group_size, (reward, *teachers.values())

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        given: list[Score | None] = [getattr(one.completion, "score", None) for one in completions]
        rest = [one for one, score in zip(completions, given, strict=True) if score is None]
        found, *taught = await asyncio.gather(
            self._reward.score(prompt, rest) if rest else asyncio.sleep(0, result=[]),
            *(self._teach(prompt, one.completion) for one in completions if is_training(prompt)),
        )
        left = iter(found)
        scores = [score or next(left) for score in given]
        for index, (score, teacher) in enumerate(zip(scores, taught, strict=False)):
            if isinstance(teacher, Score):
                scores[index] = teacher if score.failure is None else score
            elif score.failure is None:
                scores[index] = TaughtScore(**msgspec.structs.asdict(score), teacher=teacher)
        return scores

    async def _teach(self, prompt: Prompt, completion: Completion | None) -> TeacherLogprobs | Score | None:
        """Return the teacher's log-probs, or a failure; None for a greedy baseline."""
        assert completion is not None
        if completion.index >= self._group_size:
            return None
        teacher = self._teachers.get(prompt.source) or self._teachers[""]
        opening = getattr(completion, "opening", ()) or prompt.token_ids
        found: TeacherLogprobs | Score
        try:
            found = await teacher.score(opening, completion)
        except AsyncGRPOError as error:
            found = failed("timeout" if getattr(error, "is_late", False) else "teacher", str(error))
        outcome = "failed" if isinstance(found, Score) else "scored"
        metrics.teacher_tokens_total.labels(outcome=outcome).inc(len(completion.token_ids))
        return found
