"""The prompts of a run, issued in an order that survives restarts.

`PromptSource` issues every prompt once per epoch, in an order determined by the seed; with weights, once per round of its
source; with a curriculum, as often as it has places in the round (`order.py`). After a restart at any moment, prompts that
were not done are issued again, and done ones are not.
"""

import heapq
import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from asyncgrpo.data.loading import Prompts, fingerprint_of
from asyncgrpo.data.order import SOLVED_EVERY, Curriculum, Mixture
from asyncgrpo.errors import CheckpointError
from asyncgrpo.types import Frozen, Prompt

log = logging.getLogger(__name__)


class PromptState(Frozen):
    """State of a `PromptSource` in a checkpoint."""

    frontier: int
    """All prompt indices below it are done."""
    done_beyond: tuple[int, ...]
    """Done prompt indices above the frontier, ascending."""
    seed: int
    shuffle: bool
    num_prompts: int
    fingerprint: str
    """Digest of the prompts' ids and tokens. It changes with the file, the tokenizer and the chat template."""
    weights: tuple[float, ...] = ()
    """Weights of the sources; empty: all prompts have one order."""
    shares: bytes = b""
    """`Curriculum.state`; empty without a curriculum."""

    @property
    def order(self) -> tuple[int, bool, tuple[float, ...]]:
        """What the order of prompts depends on, beside the prompts."""
        return self.seed, self.shuffle, self.weights

    @property
    def without_shares(self) -> "PromptState":
        """The state without the shares, which are large."""
        return msgspec.structs.replace(self, shares=b"")


@dataclass(eq=False)
class PromptSource:
    """Issues the prompts of a run in order and tracks which are done.

    A prompt index is a position in the run; `prompt_index // num_prompts` is its epoch. After `next` it is either `done`, or
    given back and issued again. Not thread-safe; owned by one process.
    """

    prompts: Sequence[Prompt]
    """At least one."""
    _: KW_ONLY
    seed: int
    """Determines the order of each epoch, with the number of the epoch."""
    shuffle: bool
    """False keeps the given order in each epoch."""
    epochs: int | None
    """Number of epochs; None: unlimited."""
    weights: Sequence[float] = ()
    """Of the sources; empty: all prompts have one order."""
    sizes: Sequence[int] = ()
    """Prompts of each source; required with weights."""
    curriculum: Curriculum | None = None
    """Of this run; None: the run never had one."""

    def __post_init__(self) -> None:
        assert self.prompts, "a prompt source needs prompts"
        self._end = None if self.epochs is None else self.epochs * len(self.prompts)
        given = self.prompts
        self._fingerprint = given.fingerprint if isinstance(given, Prompts) else fingerprint_of(given)
        self._frontier = 0
        self._next = 0
        self._done_beyond: set[int] = set()
        self._outstanding: set[int] = set()
        self._given_back: list[int] = []  # a heap
        self._isolated: list[int] = []  # a heap
        self._claimed: set[int] = set()
        self._weights = tuple(self.weights)
        self._mixture = Mixture(self.sizes, self.weights) if self.weights else None
        self._permutation = lru_cache(maxsize=2)(self._order_of)
        if self.curriculum is not None:
            self.curriculum.begin(f"{self._fingerprint} {self.seed} {self.shuffle} {self._weights}", len(self.prompts))
        self.is_blocked: str | None = None
        """Reason if the order of the next prompt's epoch cannot be written; else None."""

    def next(self) -> tuple[int, Prompt] | None:
        """Issue the next (prompt_index, prompt): the oldest given back, else a new one. None: no prompt to issue now."""
        if not self._is_ordered(self._next_ordinary_index):
            return None
        if self._given_back or (new := self._peek_new()) is None:
            return self._issued(self._given_back)
        self._next = new + 1
        return self._issued([new])

    def done(self, prompt_index: int, rewards: Sequence[float] = ()) -> None:
        """Mark a prompt as trained or permanently dropped. It is never issued again.

        It must be outstanding, or given back and not issued since (its group arrived after its lease ended).

        Args:
            rewards: of its completions, if it was trained or filtered.
        """
        if self.curriculum is not None and self.curriculum.is_on and rewards:
            self.curriculum.note(self._row(prompt_index), rewards)
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
        """Take back an outstanding prompt whose lease failed. It is issued again before any new one."""
        self._take_back(prompt_index, self._given_back)

    def isolate(self, prompt_index: int) -> None:
        """Take back an outstanding prompt that only `next_isolated` issues again."""
        self._take_back(prompt_index, self._isolated)

    def _take_back(self, prompt_index: int, heap: list[int]) -> None:
        assert prompt_index in self._outstanding, f"prompt {prompt_index} is not outstanding"
        self._outstanding.remove(prompt_index)
        heapq.heappush(heap, prompt_index)

    def next_isolated(self) -> tuple[int, Prompt] | None:
        """Issue the oldest isolated (prompt_index, prompt); None if no prompt is isolated."""
        return self._issued(self._isolated)

    def _issued(self, heap: list[int]) -> tuple[int, Prompt] | None:
        """Issue the smallest prompt index of a heap; None if it is empty."""
        if not heap:
            return None
        prompt_index = heapq.heappop(heap)
        self._outstanding.add(prompt_index)
        return prompt_index, self.prompt(prompt_index)

    def claim(self, prompt_index: int) -> None:
        """Make a prompt outstanding without issuing it, because a restart recovered a group of it."""
        assert self.is_wanted(prompt_index) and prompt_index >= self._next, f"prompt {prompt_index} cannot be claimed"
        self._claimed.add(prompt_index)
        self._outstanding.add(prompt_index)

    def prompt(self, prompt_index: int) -> Prompt:
        """Return the prompt of an index, which is equal in all processes with these prompts and seed."""
        return self.prompts[self._row(prompt_index)]

    def state(self) -> PromptState:
        """Return the state for a restart. It is small, because only outstanding prompts lie between done ones."""
        return PromptState(
            frontier=self._frontier,
            done_beyond=tuple(sorted(self._done_beyond)),
            seed=self.seed,
            shuffle=self.shuffle,
            num_prompts=len(self.prompts),
            fingerprint=self._fingerprint,
            weights=self._weights,
            shares=self.curriculum.state() if self.curriculum is not None else b"",
        )

    def restore(self, state: PromptState) -> None:
        """Restore a state: every prompt that was not done is issued again, once, in order. Call before any is issued.

        The number of epochs may change.

        Raises:
            CheckpointError: the state is of other prompts or of another order, or the order is lost.
        """
        here = self.state()
        for field, name in (
            ("num_prompts", "prompts in data.train"),
            ("fingerprint", "fingerprint of data.train as the model's tokenizer reads it"),
            ("seed", "run.seed"),
            ("shuffle", "data.shuffle"),
            ("weights", "data.weights"),
        ):
            then, now = getattr(state, field), getattr(here, field)
            if then != now:
                raise CheckpointError(
                    f"the checkpoint has another order of prompts: {name} was {then} and is now {now}"
                )
        if self.curriculum is not None:
            first = state.frontier // len(self.prompts)
            begun = {index // len(self.prompts) for index in (state.frontier - 1, *state.done_beyond)}
            under_way = [epoch for epoch in sorted(begun) if epoch >= first]
            self.curriculum.restore(state.shares, lambda: [self._permutation(epoch) for epoch in under_way])
        self._frontier = self._next = state.frontier
        self._done_beyond = set(state.done_beyond)

    def is_done(self, prompt_index: int) -> bool:
        """Return True if the prompt was trained or permanently dropped."""
        return 0 <= prompt_index < self._frontier or prompt_index in self._done_beyond

    def is_wanted(self, prompt_index: int) -> bool:
        """Return True if the prompt belongs to the run and is not done."""
        return not self.is_done(prompt_index) and prompt_index >= 0 and (self._end is None or prompt_index < self._end)

    @property
    def num_done(self) -> int:
        """Prompts done over all epochs and restarts."""
        return self._frontier + len(self._done_beyond)

    @property
    def epoch(self) -> int:
        """Complete epochs."""
        return self._frontier // len(self.prompts)

    @property
    def next_prompt_index(self) -> int | None:
        """Smallest prompt index that `next` or `next_isolated` would issue; None: no prompt to issue now."""
        return _least(self._isolated[:1], self._next_ordinary_index)

    @property
    def _next_ordinary_index(self) -> int | None:
        """Prompt index that `next` would issue; None: no prompt to issue now."""
        return _least(self._given_back[:1], self._peek_new())

    @property
    def next_isolated_index(self) -> int | None:
        """Prompt index that `next_isolated` would issue; None if no prompt is isolated."""
        return self._isolated[0] if self._isolated else None

    @property
    def longest_gap(self) -> int:
        """Maximum distance between two prompt indices of one prompt."""
        rounds = 1 + (SOLVED_EVERY if self.curriculum is not None else 1)
        return rounds * (len(self.prompts) if self._mixture is None else self._mixture.longest_round)

    def rounds_begun(self) -> list[dict[str, Any]]:
        """Return the rounds that began since the last call, as `Curriculum.rounds_begun`."""
        return self.curriculum.rounds_begun() if self.curriculum is not None else []

    @property
    def is_exhausted(self) -> bool:
        """True if no prompt is left to issue and no prompt is outstanding."""
        return not self._outstanding and self.next_prompt_index is None

    def _peek_new(self) -> int | None:
        prompt_index = max(self._next, self._frontier)
        # After a restore, prompts may be done or claimed without having been issued.
        while prompt_index in self._done_beyond or prompt_index in self._claimed:
            prompt_index += 1
        return None if self._end is not None and prompt_index >= self._end else prompt_index

    def _is_ordered(self, prompt_index: int | None) -> bool:
        """Return True if the order of the prompt's epoch is decided and, if required, written."""
        if prompt_index is not None:
            try:
                self._permutation(prompt_index // len(self.prompts))
            except OSError as error:
                if self.is_blocked is None:
                    log.error("prompts are not leased until the order of their epoch is written: %s", error)
                self.is_blocked = str(error)
                return False
        self.is_blocked = None
        return True

    def _row(self, prompt_index: int) -> int:
        epoch, position = divmod(prompt_index, len(self.prompts))
        return int(self._permutation(epoch)[position])

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return [num_prompts] indices of the prompts in the order of `epoch`."""
        if self._mixture is None:
            return self._round(0, epoch, len(self.prompts))
        return self._mixture.order(epoch, self._round)

    def _round(self, source: int, number: int, size: int) -> np.ndarray:
        """Return [size] the order of a round of this source. Without weights all prompts are one source.

        Sorts raw bits of Philox, which are stable across numpy releases, unlike `Generator.permutation`.
        """

        def draw(number: int) -> np.ndarray:
            if not self.shuffle:
                return np.arange(size)
            key = [self.seed, number] if self._mixture is None else [self.seed, number, source]
            return np.argsort(np.random.Philox(np.random.SeedSequence(key)).random_raw(size), kind="stable")

        if self.curriculum is None:
            return draw(number)
        begin = 0 if self._mixture is None else self._mixture.begins[source]
        return self.curriculum.order(source, number, begin, size, draw)


def _least(heads: list[int], other: int | None) -> int | None:
    return min(heads + ([other] if other is not None else []), default=None)
