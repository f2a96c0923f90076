"""The reward model: a transformers model with one output for a sequence scores prompt and completion, here or in a server.

Both are put together as the model's own chat template has it. A group is one call and its completions are run in batches. They
are padded with a token that none of them has, because models find the end of a sequence by the first padding.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from asyncgrpo.config.reach import check_service, find_model
from asyncgrpo.config.schema import RewardModelConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.host import cores
from asyncgrpo.importing import importing
from asyncgrpo.rewards.base import Reward, Sampled, failed, score_of_value
from asyncgrpo.rewards.http import Service, ServiceError
from asyncgrpo.rewards.pool import Call, Pool, PoolReward, call_of
from asyncgrpo.types import Prompt, Score

LOAD_TIMEOUT_S = 900.0
"""Deadline of loading the model."""
BATCH_SIZE = 16
"""Completions that the model runs at once."""


class ModelReward(PoolReward):
    """Scores groups with a reward model, in a process that loads it once and ends with this one."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Raises RewardError: `reward.model.path` is not set."""
        if config.path is None:
            raise RewardError(
                "reward.function names model, and reward.model.path is not set; give the reward model's folder"
            )
        self._path = config.path
        pool = Pool(
            f"{__name__}:load_model",
            json.dumps({"path": config.path, "device": config.device}),
            what=config.path,
            workers=1,
            timeout_s=config.timeout_s,
            start_timeout_s=LOAD_TIMEOUT_S,
        )
        about = f"reward model {config.path} on {config.device}, one call for a group"
        super().__init__(pool, about, takes_groups=True)

    def check_sources(self, sources: set[str]) -> None:
        """Raise ConfigError if the model does not exist. Any `data_source` will do."""
        find_model(self._path, "reward.model.path")


# -- what is scored ----------------------------------------------------------------------------------------------------


def sequences_of(tokenizer: Any, call: Call) -> list[list[int]]:
    """Prompt and each completion of a group as the model of this tokenizer of transformers reads them."""
    if tokenizer.chat_template is None:
        return [list(tokenizer(call.prompt_text + text)["input_ids"]) for text in call.completions]
    turns = list(call.turns) or [{"role": "user", "content": call.prompt_text}]
    conversations = [[*turns, {"role": "assistant", "content": text}] for text in call.completions]
    return [list(tokenizer.apply_chat_template(one, tokenize=True, return_dict=False)) for one in conversations]


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
            raise RewardError(
                "reward.model.url is set, and reward.model.path is not; give the folder or hub id of the model that is "
                "served, for its tokenizer"
            )
        find_model(config.path, "reward.model.path")
        with importing():
            from transformers import AutoConfig, AutoTokenizer
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(config.path)
            self._longest = positions_of(AutoConfig.from_pretrained(config.path))
        except (OSError, ValueError) as error:
            raise RewardError(
                f"reward.model.path: {config.path} has no tokenizer that can be loaded: {str(error).splitlines()[0]}"
            ) from error
        self._service = Service(f"{config.url.rstrip('/')}/classify", deadline_s=config.timeout_s)
        self.about = f"reward model {config.path} at {self._service.url}, one call for a group"

    def check_sources(self, sources: set[str]) -> None:
        """Raise ConfigError if the server cannot be reached. Any `data_source` will do."""
        check_service(self._service.url, "reward.model.url")

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        """Score completions. See `rewards.base.Reward`."""
        started = time.perf_counter()
        call = call_of(prompt, completions, is_group=True)
        sequences = await asyncio.to_thread(sequences_of, self._tokenizer, call)
        scored = iter(await self._scores([ids for ids in sequences if len(ids) <= self._longest]))
        seconds = (time.perf_counter() - started) / len(sequences)
        scores = [next(scored) if len(ids) <= self._longest else too_long(ids, self._longest) for ids in sequences]
        return [msgspec.structs.replace(score, seconds=seconds) for score in scores]

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    async def _scores(self, sequences: list[list[int]]) -> list[Score]:
        """The score of each sequence, or the failure that all of them share."""
        if not sequences:
            return []
        try:
            reply = await self._service.post(msgspec.json.encode({"input_ids": sequences}))
            outputs = msgspec.json.decode(reply, type=list[_Output])
        except ServiceError as error:
            return [failed("timeout" if error.is_late else "model", str(error))] * len(sequences)
        except msgspec.MsgspecError as error:
            return [failed("model", f"{self._service.url}: the reply has no scores: {error}")] * len(sequences)
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
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        if not torch.cuda.is_available() and device.startswith("cuda"):
            raise RewardError(f"reward.model.device is {device}, and this process sees no GPU; use cpu")
        torch.set_num_threads(cores())
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForSequenceClassification.from_pretrained(path, dtype="auto")
        except (OSError, ValueError) as error:
            raise RewardError(f"reward.model.path: {path} cannot be loaded: {str(error).splitlines()[0]}") from error
        if model.config.num_labels != 1:
            raise RewardError(
                f"reward.model.path: {path} has {model.config.num_labels} outputs; a reward model has one"
            )
        self._torch, self._model = torch, model.to(device).eval()
        self._device, self._longest = device, positions_of(model.config)

    def __call__(self, call: Call) -> list[Score | float]:
        """The score of each completion of a group."""
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


def load_model(arguments: str) -> SequenceScorer:
    """Load the scorer of a worker. Raises RewardError."""
    return SequenceScorer(**json.loads(arguments))
