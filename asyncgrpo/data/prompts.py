"""The prompts of a run: loaded from a file, and handed out in an order that survives a restart.

`PromptSource` promises that every prompt comes once an epoch, in an order that the seed decides, and that a restart at
any moment skips none: what was not done is issued again, what was done is not.
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
    """In the file's order, without the over-long."""
    schema_name: str
    dropped_too_long: int
    longest: int
    """Tokens of the longest prompt of the file, dropped ones included; of one far too long at least as many."""


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
    """What `load_prompts` would refuse, sooner: every row is read, but few are tokenised.

    One prompt of each sequence of roles is rendered, because that is what a template may refuse, and as many more as it
    takes to find one that fits.

    Args:
        vocabulary: size of the model's, if it is known.
        limit: rows of the file to use, from its start; None: all.
    Returns:
        Every `data_source` of the file.
    Raises:
        DataError: as `load_prompts`.
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
    """Where a `PromptSource` stands; goes into the checkpoint."""

    frontier: int
    """Every order below is done."""
    done_beyond: tuple[int, ...]
    """Orders above the frontier that are done, ascending."""
    seed: int
    shuffle: bool
    num_prompts: int
    fingerprint: str
    """Of the prompts' ids and tokens: another file, tokenizer or template gives another."""


class PromptSource:
    """The run's prompts in their order, and which of them are done.

    An order is a position in the run: order // num_prompts is its epoch. It is issued by `next`, then either `done`, or
    given back and issued again. Not safe for threads; one process owns it.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, epochs: int | None) -> None:
        """
        Args:
            prompts: at least one.
            seed: decides the order of every epoch, together with the epoch's number.
            shuffle: False keeps the given order in every epoch.
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
        """The next (order, prompt): the oldest given back, else a new one. None: there is nothing to issue now."""
        prompt_index = heapq.heappop(self._given_back) if self._given_back else self._new_prompt_index()
        if prompt_index is None:
            return None
        self._outstanding.add(prompt_index)
        return prompt_index, self.prompt(prompt_index)

    def done(self, prompt_index: int) -> None:
        """This order was trained, or is dropped for good: it is never issued again.

        It must be outstanding, or given back and not issued since (a completion that came after its lease had ended).
        """
        if prompt_index in self._outstanding:
            self._outstanding.remove(prompt_index)
        else:
            assert prompt_index in self._given_back, f"order {prompt_index} is not under way"
            self._given_back.remove(prompt_index)
            heapq.heapify(self._given_back)
        self._done_beyond.add(prompt_index)
        while self._frontier in self._done_beyond:
            self._done_beyond.remove(self._frontier)
            self._frontier += 1

    def give_back(self, prompt_index: int) -> None:
        """The lease of this outstanding order failed: it is issued again before any new one."""
        assert prompt_index in self._outstanding, f"order {prompt_index} is not outstanding"
        self._outstanding.remove(prompt_index)
        heapq.heappush(self._given_back, prompt_index)

    def isolate(self, prompt_index: int) -> None:
        """As `give_back`, but `next` leaves it: it is issued by `next_isolated`, to whoever knows how to handle it."""
        assert prompt_index in self._outstanding, f"order {prompt_index} is not outstanding"
        self._outstanding.remove(prompt_index)
        heapq.heappush(self._isolated, prompt_index)

    def next_isolated(self) -> tuple[int, Prompt] | None:
        """The oldest (order, prompt) that was set aside, or None."""
        if not self._isolated:
            return None
        prompt_index = heapq.heappop(self._isolated)
        self._outstanding.add(prompt_index)
        return prompt_index, self.prompt(prompt_index)

    def claim(self, prompt_index: int) -> None:
        """A completion to this order outlived a restart: it is outstanding, without having been issued."""
        assert self.is_wanted(prompt_index) and prompt_index >= self._next, f"order {prompt_index} cannot be claimed"
        self._claimed.add(prompt_index)
        self._outstanding.add(prompt_index)

    def prompt(self, prompt_index: int) -> Prompt:
        """Which prompt an order is; the same in every process with the same prompts and seed."""
        epoch, position = divmod(prompt_index, len(self._prompts))
        return self._prompts[int(self._permutation(epoch)[position])]

    def state(self) -> PromptState:
        """All that a restart needs; small, since only orders still under way lie between done ones."""
        return PromptState(
            frontier=self._frontier,
            done_beyond=tuple(sorted(self._done_beyond)),
            seed=self._seed,
            shuffle=self._shuffle,
            num_prompts=len(self._prompts),
            fingerprint=self._fingerprint,
        )

    def restore(self, state: PromptState) -> None:
        """Go on from `state`: every order not done then is issued again, once, in order. The epochs may have changed.

        Raises:
            CheckpointError: the state belongs to other prompts or to another order of them.
        """
        here = self.state()
        for field, knob in (
            ("num_prompts", "prompts in data.train"),
            ("fingerprint", "fingerprint of data.train as the model's tokenizer reads it"),
            ("seed", "run.seed"),
            ("shuffle", "data.shuffle"),
        ):
            then, now = getattr(state, field), getattr(here, field)
            if then != now:
                raise CheckpointError(
                    f"the checkpoint's prompt order cannot be continued: {knob} was {then} and is now {now}"
                )
        self._frontier = self._next = state.frontier
        self._done_beyond = set(state.done_beyond)
        self._outstanding.clear()
        self._given_back.clear()
        self._isolated.clear()
        self._claimed.clear()

    def is_done(self, prompt_index: int) -> bool:
        """Whether this order was trained or dropped."""
        return 0 <= prompt_index < self._frontier or prompt_index in self._done_beyond

    def is_wanted(self, prompt_index: int) -> bool:
        """Whether this order belongs to the run and is not done."""
        return not self.is_done(prompt_index) and prompt_index >= 0 and (self._end is None or prompt_index < self._end)

    @property
    def num_prompts(self) -> int:
        """Prompts of one epoch."""
        return len(self._prompts)

    @property
    def num_done(self) -> int:
        """Orders done since the run began, over all restarts."""
        return self._frontier + len(self._done_beyond)

    @property
    def remaining(self) -> int | None:
        """Orders not done yet, whether issued or not; None without an end."""
        return None if self._end is None else max(0, self._end - self.num_done)

    @property
    def epoch(self) -> int:
        """Whole epochs done; an epoch is done when its last order is."""
        return self._frontier // len(self._prompts)

    @property
    def next_prompt_index(self) -> int | None:
        """The smallest order that is left to issue, by `next` or by `next_isolated`; None: none is now."""
        new = self._peek_new()
        heads = self._given_back[:1] + self._isolated[:1] + ([new] if new is not None else [])
        return min(heads, default=None)

    @property
    def has_next(self) -> bool:
        """Whether a prompt is left to issue, by `next` or by `next_isolated`."""
        return self.next_prompt_index is not None

    @property
    def num_isolated(self) -> int:
        """Prompts that wait for `next_isolated`."""
        return len(self._isolated)

    @property
    def has_isolated(self) -> bool:
        """Whether `next_isolated` would give a prompt."""
        return bool(self._isolated)

    @property
    def is_exhausted(self) -> bool:
        """Nothing is left to issue and nothing is outstanding."""
        return not self._outstanding and not self.has_next

    def _new_prompt_index(self) -> int | None:
        prompt_index = self._peek_new()
        if prompt_index is not None:
            self._next = prompt_index + 1
        return prompt_index

    def _peek_new(self) -> int | None:
        prompt_index = max(self._next, self._frontier)
        # Only after a restore are there orders that are done, or claimed, and were not issued.
        while prompt_index in self._done_beyond or prompt_index in self._claimed:
            prompt_index += 1
        return None if self._end is not None and prompt_index >= self._end else prompt_index

    def _draw_permutation(self, epoch: int) -> np.ndarray:
        """[num_prompts] indices of the prompts in the order of `epoch`.

        Sorts raw bits of Philox, because numpy keeps those streams for ever, but not `Generator.permutation`.
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
