"""The prompts of a run: loaded from a file, and issued in an order that survives a restart.

`PromptSource` issues every prompt once in each epoch, in an order that the seed decides. A restart at any moment skips
none: a prompt that was not done is issued again, one that was done is not.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from asyncgrpo.config.schema import DataConfig
from asyncgrpo.data.rows import Record, read_rows, recognise
from asyncgrpo.data.tokenizer import render
from asyncgrpo.errors import CheckpointError, ConfigError, DataError
from asyncgrpo.types import Frozen, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Loaded:
    """The prompts of one file."""

    prompts: tuple[Prompt, ...]
    """In the file's order, without those that are too long."""
    schema_name: str
    dropped_too_long: int
    longest: int
    """Tokens of the longest prompt of the file, dropped ones included. A prompt that is far too long has even more."""


def load_prompts(
    path: str | Path, split: str, tokenizer: "PreTrainedTokenizerBase", config: DataConfig, limit: int | None = None
) -> Loaded:
    """Read, recognise, render and tokenise a file.

    Args:
        split: `train` or `eval`; row 17 becomes the prompt `train/17`.
        limit: rows of the file to use, from its start; None: all.
    Raises:
        DataError: the file cannot be used, or every prompt is longer than `config.max_prompt_tokens`.
    """
    schema_name, records = _records(path, config, limit)
    prompts: list[Prompt] = []
    longest = 0
    for index, record in enumerate(records):
        token_ids = _token_ids(path, index, record, tokenizer, config)
        longest = max(longest, len(token_ids))
        if len(token_ids) <= config.max_prompt_tokens:
            prompts.append(
                Prompt(
                    prompt_id=f"{split}/{index}",
                    token_ids=token_ids,
                    text=record.messages[-1]["content"],
                    answer=record.answer,
                    source=record.source,
                    info=record.info,
                )
            )
    if not prompts:
        raise _all_too_long(path, len(records), longest, config)
    return Loaded(tuple(prompts), schema_name, len(records) - len(prompts), longest)


def check_prompts(
    path: str | Path,
    tokenizer: "PreTrainedTokenizerBase",
    config: DataConfig,
    *,
    vocabulary: int | None,
    limit: int | None = None,
) -> set[str]:
    """Refuse what `load_prompts` would refuse, but faster: every row is read, and few are tokenised.

    One prompt of each sequence of roles is rendered, because a chat template may refuse a sequence, and as many more as it
    takes to find one that is not too long.

    Args:
        vocabulary: size of the model's vocabulary, if it is known.
        limit: rows of the file to use, from its start; None: all.
    Returns:
        Every `data_source` of the file.
    Raises:
        DataError: where `load_prompts` would raise it.
        ConfigError: the tokenizer gives tokens that the model does not have.
    """
    _, records = _records(path, config, limit)
    rendered: set[tuple[str, ...]] = set()
    longest, fits = 0, False
    for index, record in enumerate(records):
        roles = tuple(turn["role"] for turn in record.messages)
        if fits and roles in rendered:
            continue
        rendered.add(roles)
        token_ids = _token_ids(path, index, record, tokenizer, config)
        if vocabulary is not None and max(token_ids, default=0) >= vocabulary:
            raise ConfigError(
                f"{path}, row {index}: the tokenizer of model.path gives token {max(token_ids)}, but the vocabulary of "
                f"the model has {vocabulary} tokens; give the model its own tokenizer"
            )
        longest = max(longest, len(token_ids))
        fits = fits or len(token_ids) <= config.max_prompt_tokens
    if not fits:
        raise _all_too_long(path, len(records), longest, config)
    return {record.source for record in records}


def _records(path: str | Path, config: DataConfig, limit: int | None) -> tuple[str, list[Record]]:
    """The name of the file's schema, and what its rows hold."""
    rows = read_rows(path)[:limit]
    schema = recognise(rows, config.columns, str(path))
    return schema.name, [schema.to_record(row, index) for index, row in enumerate(rows)]


def _token_ids(
    path: str | Path, index: int, record: Record, tokenizer: "PreTrainedTokenizerBase", config: DataConfig
) -> tuple[int, ...]:
    where = f"{path}, row {index}"
    longest = config.max_prompt_tokens
    return render(tokenizer, record.messages, config.system_prompt, where=where, longest=longest).token_ids


def _all_too_long(path: str | Path, count: int, longest: int, config: DataConfig) -> DataError:
    return DataError(
        f"{path}: all {count} prompts are longer than data.max_prompt_tokens ({config.max_prompt_tokens}); "
        f"the longest has at least {longest}"
    )


class PromptState(Frozen):
    """The state of a `PromptSource`, as the checkpoint has it."""

    frontier: int
    """Every prompt index below it is done."""
    done_beyond: tuple[int, ...]
    """Prompt indices above the frontier that are done, ascending."""
    seed: int
    shuffle: bool
    num_prompts: int
    fingerprint: str
    """Digest of the prompts' ids and tokens. It differs for another file, tokenizer or chat template."""


class PromptSource:
    """Issues the run's prompts in their order, and knows which of them are done.

    A prompt index is a position in the run; `prompt_index // num_prompts` is its epoch. `next` issues it, and then it is
    either `done`, or given back and issued again. Not safe for threads; one process owns it.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, epochs: int | None) -> None:
        """
        Args:
            prompts: at least one.
            seed: decides the order of each epoch, together with the epoch's number.
            shuffle: False keeps the given order in each epoch.
            epochs: passes over the prompts; None: without an end.
        """
        assert prompts, "a prompt source needs prompts"
        self._prompts = tuple(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if epochs is None else epochs * len(self._prompts)
        self._fingerprint = _fingerprint(self._prompts)
        self._frontier = 0
        self._next = 0
        self._done_beyond: set[int] = set()
        self._outstanding: set[int] = set()
        self._given_back: list[int] = []  # a heap
        self._isolated: list[int] = []  # a heap
        self._claimed: set[int] = set()
        self._permutation = lru_cache(maxsize=2)(self._draw_permutation)

    def next(self) -> tuple[int, Prompt] | None:
        """Issue the next (prompt_index, prompt): the oldest given back, else a new one. None: nothing to issue now."""
        prompt_index = heapq.heappop(self._given_back) if self._given_back else self._new_prompt_index()
        if prompt_index is None:
            return None
        self._outstanding.add(prompt_index)
        return prompt_index, self.prompt(prompt_index)

    def done(self, prompt_index: int) -> None:
        """Note that a prompt was trained, or dropped for good: it is never issued again.

        It must be outstanding, or given back and not issued since (its group arrived after the lease had ended).
        """
        if prompt_index in self._outstanding:
            self._outstanding.remove(prompt_index)
        else:
            assert prompt_index in self._given_back, f"prompt {prompt_index} is neither outstanding nor given back"
            self._given_back.remove(prompt_index)
            heapq.heapify(self._given_back)
        self._done_beyond.add(prompt_index)
        while self._frontier in self._done_beyond:
            self._done_beyond.remove(self._frontier)
            self._frontier += 1

    def give_back(self, prompt_index: int) -> None:
        """Take back an outstanding prompt whose lease failed: it is issued again before any new one."""
        self._end_lease(prompt_index, self._given_back)

    def isolate(self, prompt_index: int) -> None:
        """Take back an outstanding prompt that only `next_isolated` issues again."""
        self._end_lease(prompt_index, self._isolated)

    def _end_lease(self, prompt_index: int, heap: list[int]) -> None:
        assert prompt_index in self._outstanding, f"prompt {prompt_index} is not outstanding"
        self._outstanding.remove(prompt_index)
        heapq.heappush(heap, prompt_index)

    def next_isolated(self) -> tuple[int, Prompt] | None:
        """Issue the oldest isolated (prompt_index, prompt). None: there is none."""
        if not self._isolated:
            return None
        prompt_index = heapq.heappop(self._isolated)
        self._outstanding.add(prompt_index)
        return prompt_index, self.prompt(prompt_index)

    def claim(self, prompt_index: int) -> None:
        """Make a prompt outstanding that was not issued: a group of it is left from before a restart."""
        assert self.is_wanted(prompt_index) and prompt_index >= self._next, f"prompt {prompt_index} cannot be claimed"
        self._claimed.add(prompt_index)
        self._outstanding.add(prompt_index)

    def prompt(self, prompt_index: int) -> Prompt:
        """The prompt of an index. It is the same in every process with the same prompts and seed."""
        epoch, position = divmod(prompt_index, len(self._prompts))
        return self._prompts[int(self._permutation(epoch)[position])]

    def state(self) -> PromptState:
        """What a restart needs. It is small, because only outstanding prompts lie between done ones."""
        return PromptState(
            frontier=self._frontier,
            done_beyond=tuple(sorted(self._done_beyond)),
            seed=self._seed,
            shuffle=self._shuffle,
            num_prompts=len(self._prompts),
            fingerprint=self._fingerprint,
        )

    def restore(self, state: PromptState) -> None:
        """Go on from `state`: every prompt that was not done is issued again, once, in order. The epochs may differ.

        Raises:
            CheckpointError: the state belongs to other prompts, or to another order of them.
        """
        here = self.state()
        for field, name in (
            ("num_prompts", "prompts in data.train"),
            ("fingerprint", "fingerprint of data.train as the model's tokenizer reads it"),
            ("seed", "run.seed"),
            ("shuffle", "data.shuffle"),
        ):
            then, now = getattr(state, field), getattr(here, field)
            if then != now:
                raise CheckpointError(
                    f"the checkpoint's prompt order cannot be continued: {name} was {then} and is now {now}"
                )
        self._frontier = self._next = state.frontier
        self._done_beyond = set(state.done_beyond)
        self._outstanding.clear()
        self._given_back.clear()
        self._isolated.clear()
        self._claimed.clear()

    def is_done(self, prompt_index: int) -> bool:
        """Whether this prompt was trained, or dropped for good."""
        return 0 <= prompt_index < self._frontier or prompt_index in self._done_beyond

    def is_wanted(self, prompt_index: int) -> bool:
        """Whether this prompt belongs to the run and is not done."""
        return not self.is_done(prompt_index) and prompt_index >= 0 and (self._end is None or prompt_index < self._end)

    @property
    def num_prompts(self) -> int:
        """Prompts of one epoch."""
        return len(self._prompts)

    @property
    def num_done(self) -> int:
        """Prompts done since the run began, over all epochs and restarts."""
        return self._frontier + len(self._done_beyond)

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._frontier // len(self._prompts)

    @property
    def next_prompt_index(self) -> int | None:
        """The smallest prompt index that `next` or `next_isolated` would issue; None: nothing to issue now."""
        ordinary = self.next_ordinary_index
        return min(self._isolated[:1] + ([ordinary] if ordinary is not None else []), default=None)

    @property
    def next_ordinary_index(self) -> int | None:
        """The prompt index that `next` would issue; None: nothing to issue now."""
        new = self._peek_new()
        return min(self._given_back[:1] + ([new] if new is not None else []), default=None)

    @property
    def has_next(self) -> bool:
        """Whether `next` or `next_isolated` would issue a prompt."""
        return self.next_prompt_index is not None

    @property
    def next_isolated_index(self) -> int | None:
        """The prompt index that `next_isolated` would issue; None: none waits for it."""
        return self._isolated[0] if self._isolated else None

    def isolated_before(self, prompt_index: int) -> int:
        """How many prompts with a smaller index wait for `next_isolated`."""
        return sum(index < prompt_index for index in self._isolated)

    @property
    def has_isolated(self) -> bool:
        """Whether `next_isolated` would issue a prompt."""
        return bool(self._isolated)

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing is left to issue and nothing is outstanding."""
        return not self._outstanding and not self.has_next

    def _new_prompt_index(self) -> int | None:
        prompt_index = self._peek_new()
        if prompt_index is not None:
            self._next = prompt_index + 1
        return prompt_index

    def _peek_new(self) -> int | None:
        prompt_index = max(self._next, self._frontier)
        # Only after a restore there are prompts that are done or claimed without having been issued.
        while prompt_index in self._done_beyond or prompt_index in self._claimed:
            prompt_index += 1
        return None if self._end is not None and prompt_index >= self._end else prompt_index

    def _draw_permutation(self, epoch: int) -> np.ndarray:
        """[num_prompts] indices of the prompts in the order of `epoch`.

        It sorts raw bits of Philox: numpy keeps these the same in every release, but not `Generator.permutation`.
        """
        num_prompts = len(self._prompts)
        if not self._shuffle:
            return np.arange(num_prompts)
        bits = np.random.Philox(np.random.SeedSequence([self._seed, epoch])).random_raw(num_prompts)
        return np.argsort(bits, kind="stable")


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(f"{prompt.prompt_id}\0{len(prompt.token_ids)}\0".encode())
        digest.update(np.asarray(prompt.token_ids, dtype=np.int64).tobytes())
    return digest.hexdigest()
