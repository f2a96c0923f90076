"""The reward model: a transformers model with one output for a sequence scores prompt and completion.

Both are put together as the model's own chat template has it. A group is one call and its completions are run in batches. They
are padded with a token that none of them has, because models find the end of a sequence by the first padding. A model that all
generators share is in `served_model.py`.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from asyncgrpo.cores import cores
from asyncgrpo.errors import RewardError
from asyncgrpo.importing import importing
from asyncgrpo.rewards.base import Sampled, failed
from asyncgrpo.rewards.pool import Pool
from asyncgrpo.rewards.user import call_of
from asyncgrpo.rewards.worker import Call
from asyncgrpo.types import Prompt, Score

if TYPE_CHECKING:
    from asyncgrpo.config.schema import RewardModelConfig

LOAD_TIMEOUT_S = 900.0
"""How long the model may take to load."""


class ModelReward:
    """Scores groups with a reward model, in a process that loads it once and ends with this one."""

    takes_groups = True

    def __init__(self, config: "RewardModelConfig") -> None:
        """Raises RewardError: `reward.model.path` is not set."""
        if config.path is None:
            raise RewardError(
                "reward.function names model, and reward.model.path is not set; give the reward model's folder"
            )
        self._path = config.path
        self._pool = Pool(
            f"{__name__}:load_model",
            json.dumps(msgspec.to_builtins(config)),
            what=config.path,
            workers=1,
            timeout_s=config.timeout_s,
            start_timeout_s=LOAD_TIMEOUT_S,
        )
        self.about = f"reward model {config.path} on {config.device}, one call for a group"

    def check_sources(self, sources: set[str]) -> None:
        """Raise ConfigError if there is no such model. Any `data_source` will do."""
        from asyncgrpo.config.reach import find_model

        find_model(self._path, "reward.model.path")

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        """Score completions. See `rewards.base.Reward`."""
        return await self._pool.call(call_of(prompt, completions, is_group=True))

    def withdraw(self) -> None:
        """See `rewards.base.ConfiguredReward`."""
        self._pool.withdraw()

    async def close(self) -> None:
        """End the process of the model."""
        await self._pool.close()


# -- what is scored ----------------------------------------------------------------------------------------------------


def sequences_of(tokenizer: Any, call: Call) -> list[list[int]]:
    """Prompt and each completion of a group as the model of this tokenizer of transformers reads them."""
    if tokenizer.chat_template is None:
        return [list(tokenizer(call.prompt_text + text)["input_ids"]) for text in call.completions]
    turns = list(call.turns) or [{"role": "user", "content": call.prompt_text}]
    conversations = [[*turns, {"role": "assistant", "content": text}] for text in call.completions]
    return [list(tokenizer.apply_chat_template(one, tokenize=True, return_dict=False)) for one in conversations]


def too_long(ids: Sequence[int], longest: int) -> Score:
    """What a sequence of more than `longest` tokens gets: a model that saw a part of it would judge something else."""
    return failed("model", f"{len(ids)} tokens, and the reward model takes {longest} (reward.model.max_tokens)")


# -- in its process ----------------------------------------------------------------------------------------------------


class SequenceScorer:
    """A model with one output for a sequence, and its tokenizer."""

    takes_groups = True

    def __init__(self, path: str, *, device: str, dtype: str, max_tokens: int | None, batch_size: int) -> None:
        """
        Args:
            max_tokens: of prompt and completion; None: as many as the model has positions.
        Raises:
            RewardError: the model cannot be loaded, or has not one output; one sentence.
        """
        with importing():
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        if not torch.cuda.is_available() and device.startswith("cuda"):
            raise RewardError(f"reward.model.device is {device}, and this process sees no GPU; use cpu")
        torch.set_num_threads(cores())
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype)
        except (OSError, ValueError) as error:
            raise RewardError(f"reward.model.path: {path} cannot be loaded: {str(error).splitlines()[0]}") from error
        if model.config.num_labels != 1:
            raise RewardError(
                f"reward.model.path: {path} has {model.config.num_labels} outputs; a reward model has one"
            )
        self._torch, self._model = torch, model.to(device).eval()
        self._device, self._batch_size = device, batch_size
        positions: int = getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30)
        self._max_tokens = positions if max_tokens is None else max_tokens

    def __call__(self, call: Call) -> list[Score | float]:
        """The score of each completion of a group."""
        sequences = sequences_of(self._tokenizer, call)
        scores: list[Score | float] = [too_long(ids, self._max_tokens) for ids in sequences]
        fit = sorted(
            (i for i, ids in enumerate(sequences) if len(ids) <= self._max_tokens), key=lambda i: len(sequences[i])
        )
        for start in range(0, len(fit), self._batch_size):
            some = fit[start : start + self._batch_size]
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


def load_model(config_json: str) -> SequenceScorer:
    """The scorer of a worker. Raises RewardError."""
    config = json.loads(config_json)
    return SequenceScorer(**{name: config[name] for name in ("path", "device", "dtype", "max_tokens", "batch_size")})
