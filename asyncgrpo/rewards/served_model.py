"""A reward model that all generators share: an SGLang server has it, on GPUs of its own.

The server gets the tokens of prompt and completion as the model's own tokenizer makes them here, so that it scores just what
a model beside the generator would (`model.py`). A group is one request.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from asyncgrpo.config.reach import check_service, find_model
from asyncgrpo.errors import RewardError
from asyncgrpo.importing import importing
from asyncgrpo.rewards.base import Sampled, failed, score_of_value
from asyncgrpo.rewards.http import Service, ServiceError
from asyncgrpo.rewards.model import sequences_of, too_long
from asyncgrpo.rewards.user import call_of
from asyncgrpo.types import Prompt, Score

if TYPE_CHECKING:
    from asyncgrpo.config.schema import RewardModelConfig

MAX_REPLY = 1 << 24
"""Bytes of a reply that are read."""


class _Output(msgspec.Struct):
    embedding: list[float]
    """What SGLang's `/classify` calls the outputs of the model's head."""


class ServedModelReward:
    """Scores groups with the reward model of a server."""

    takes_groups = True

    def __init__(self, config: "RewardModelConfig") -> None:
        """Raises RewardError or ConfigError: `reward.model.path` is not set, not found, or has no tokenizer."""
        assert config.url is not None
        if config.path is None:
            raise RewardError(
                "reward.model.url is set, and reward.model.path is not; give the folder or hub id of the model that is "
                "served, for its tokenizer"
            )
        find_model(config.path, "reward.model.path")
        with importing():
            from transformers import AutoTokenizer
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(config.path)
        except (OSError, ValueError) as error:
            raise RewardError(
                f"reward.model.path: {config.path} has no tokenizer that can be loaded: {str(error).splitlines()[0]}"
            ) from error
        self._longest = sys.maxsize if config.max_tokens is None else config.max_tokens
        self._service = Service(f"{config.url.rstrip('/')}/classify", deadline_s=config.timeout_s, max_reply=MAX_REPLY)
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

    def withdraw(self) -> None:
        """No call waits for a worker."""

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
            return [failed("model", f"{self._service.url}: what came are no scores: {error}")] * len(sequences)
        sizes = {len(output.embedding) for output in outputs}
        if len(outputs) != len(sequences) or sizes != {1}:
            what = f"{len(outputs)} outputs of {sorted(sizes)} numbers for {len(sequences)} sequences"
            return [failed("model", f"{self._service.url}: {what}; a reward model has one for each")] * len(sequences)
        return [score_of_value(output.embedding[0]) for output in outputs]
