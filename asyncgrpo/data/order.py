"""The order in which prompts are issued: a mixture of sources, and a curriculum. Pure functions of counts, seeds and rewards.

Mixture. An epoch issues as many prompts as all sources have together. Each source has the same number of places in every
epoch, by its weight. The places are spread evenly, so any stretch of the order, also one batch, has each source by its share.
Each source goes through rounds of its own: all of its prompts once, in its own order, then all of them again. A round that
an epoch cuts off continues in the next one.

Curriculum. A round has as many places as its source has prompts, as without a curriculum, so epochs, prompt indices, steps
and the shares of sources keep their meaning. The share of right completions in a prompt's last group decides its places:

    solved     all right: a place in every second round
    hopeless   none right, equal rewards: one place in every round
    mixed      some right, or different rewards: one place in every round, and a second one as far as solved prompts leave it
    unknown    no group trained or filtered yet: one place in every round

The rounds of a solved prompt are fixed, so any two rounds in a row have a place for every prompt.

The order of a round is decided once, from the shares at the moment when the first prompt of its epoch is about to be issued.
It is written to a file, durably, before that prompt is issued. From then on the file decides, so a prompt index means the same
prompt after every restart. The files take four bytes per prompt and round and are kept.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from asyncgrpo import metrics
from asyncgrpo.errors import CheckpointError
from asyncgrpo.host import replace_file, sync
from asyncgrpo.types import Frozen

# -- mixture -----------------------------------------------------------------------------------------------------------

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

RoundOrder = Callable[[int, int, int], Indices]
"""`(source, number of the round, size of the source)` to [size] indices within the source, in the order of the round."""


class Mixture:
    """The order of a mixture. A pure function of sizes, weights and the orders of rounds."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        """
        Args:
            sizes: prompts of each source, at least one each. Sources are consecutive in the list of all prompts.
            weights: of each source, above 0. Only their ratios matter.
        """
        self._sizes, self.places = tuple(sizes), places(sum(sizes), weights)
        self.begins = tuple(accumulate(sizes, initial=0))[:-1]
        """Start of each source in the list of all prompts."""

    @property
    def longest_round(self) -> int:
        """Places of all sources in which every source completes a round."""
        return max(-(-sum(self._sizes) * size // count) for size, count in zip(self._sizes, self.places, strict=True))

    def order(self, epoch: int, round_order: RoundOrder) -> Indices:
        """Return [sum of sizes] indices into the list of all prompts, in the order of `epoch`."""
        # Equal distances between the places of one source.
        at = np.concatenate([(np.arange(count) + 0.5) / count for count in self.places])
        source_at = np.repeat(np.arange(len(self.places)), self.places)[np.argsort(at, kind="stable")]
        found = np.empty(len(source_at), np.int64)
        for source, (begin, size, count) in enumerate(zip(self.begins, self._sizes, self.places, strict=True)):
            first, offset = divmod(epoch * count, size)
            rounds = range(first, first + -(-(offset + count) // size))
            issued = np.concatenate([round_order(source, number, size) for number in rounds])
            found[source_at == source] = begin + issued[offset : offset + count]
        return found


def places(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide `total` places by weight: shares rounded to add up, and at least one each."""
    whole = sum(map(Fraction, weights))
    exact = [total * Fraction(weight) / whole for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    while (missing := total - sum(counts)) != 0:
        behind = [(share - count, -i) for i, (share, count) in enumerate(zip(exact, counts, strict=True))]
        if missing > 0:
            counts[-max(behind)[1]] += 1
        else:
            counts[-min(one for one in behind if counts[-one[1]] > 1)[1]] -= 1
    return tuple(counts)


# -- curriculum --------------------------------------------------------------------------------------------------------

SOLVED_EVERY = 2
"""Period of a solved prompt, rounds."""
MOST = 2
"""Maximum places of a prompt in one round."""
KINDS = "unknown", "hopeless", "mixed", "solved"

NONE_RIGHT, ALL_RIGHT, UNKNOWN = 0, 254, 255
Shares = np.ndarray[tuple[int], np.dtype[np.uint8]]
"""[prompts] share of right completions in steps of 1/254, or UNKNOWN. 0 means none right and equal rewards, 254 all right."""

Draw = Callable[[int], Indices]
"""`(number of a round)` to the order of the source's prompts without a curriculum."""


def kinds_of(shares: Shares) -> Indices:
    """Return [prompts] the kind of each prompt, as an index into `KINDS`."""
    return np.select([shares == UNKNOWN, shares == NONE_RIGHT, shares < ALL_RIGHT], [0, 1, 2], 3)


def places_of(shares: Shares, number: int, order: Indices, first: Indices) -> Indices:
    """Return [prompts] the number of places of each prompt in round `number`. They sum to the number of prompts.

    Places left after every mixed prompt has `MOST` go to solved prompts outside their period.

    Args:
        order, first: [prompts] orders of this round and of round 0 without a curriculum. The first breaks ties, the second
            fixes the rounds of solved prompts.
    """
    size, kinds = len(shares), kinds_of(shares)
    turn = np.empty(size, np.int64)
    turn[first] = np.arange(size)
    counts = np.ones(size, np.int64)
    counts[(kinds == KINDS.index("solved")) & ((turn + number) % SOLVED_EVERY != 0)] = 0
    left = size - int(counts.sum())
    mixed = order[kinds[order] == KINDS.index("mixed")]
    mixed = mixed[np.argsort(np.abs(shares[mixed].astype(int) - ALL_RIGHT // 2), kind="stable")]  # closest to 1/2 first
    for _ in range(MOST - 1):
        counts[mixed[:left]] += 1
        left -= min(left, len(mixed))
    others = order[counts[order] == 0]
    counts[others[:left]] += 1
    return counts


def order_of(counts: Indices, order: Indices) -> Indices:
    """Return [sum of counts] prompts, each in its number of places at equal distances. Equals `order` if all have one."""
    times = counts[order]
    prompt_at = np.repeat(np.arange(len(order)), times)
    nth = np.arange(len(prompt_at)) - np.repeat(np.cumsum(times) - times, times)
    at = (nth + prompt_at / len(order)) / times[prompt_at]
    return order[prompt_at[np.argsort(at, kind="stable")]]


def share_of(rewards: Sequence[float], success: float) -> int:
    """Return the entry of `Shares` for a group with these rewards, at least one."""
    right = sum(reward >= success for reward in rewards)
    if right == len(rewards):
        return ALL_RIGHT
    if right == 0 and min(rewards) == max(rewards):
        return NONE_RIGHT
    return min(max(round(ALL_RIGHT * right / len(rewards)), NONE_RIGHT + 1), ALL_RIGHT - 1)


# -- the rounds of a run -----------------------------------------------------------------------------------------------


class Round(Frozen):
    """Contents of a round's file, after a digest."""

    key: str
    """Inputs of the order beside the shares: prompts, seed, shuffling, weights."""
    source: int
    number: int
    prompts: dict[str, int]
    """Number of prompts by kind."""
    places: dict[str, int]
    """Number of places by kind."""
    order: bytes
    """[places] int32 prompts within the source."""


class Curriculum:
    """The shares of a run's prompts and the files of its rounds. Owned by one process."""

    def __init__(self, folder: Path, *, is_on: bool, success: float = 1.0, names: Sequence[str] = ("",)) -> None:
        """
        Args:
            folder: of the files; created with the first one.
            is_on: False only keeps the rounds that were decided while it was on.
            success: reward from which a completion is right.
            names: of the sources with rounds of their own.
        """
        self._folder, self.is_on, self._success, self._names = folder, is_on, success, tuple(names)
        self._shares: Shares = np.empty(0, np.uint8)
        self._rounds: dict[int, Round] = {}  # the newest of each source
        self._begun: list[dict[str, str | int | dict[str, int]]] = []
        self._unwritten: dict[Path, Round] = {}
        self._must_be_there = False
        self._key = ""

    def begin(self, key: str, num_prompts: int) -> None:
        """Initialize for an order, with all shares unknown. Call first."""
        self._key, self._shares = key, np.full(num_prompts, UNKNOWN, np.uint8)

    def note(self, prompt: int, rewards: Sequence[float]) -> None:
        """Note the rewards, at least one, of a trained or filtered group of this prompt. Call it only if `is_on`."""
        self._shares[prompt] = share_of(rewards, self._success)

    def state(self) -> bytes:
        """Return the shares for a checkpoint, at most a byte per prompt; empty if not on."""
        return zlib.compress(self._shares.tobytes(), 1) if self.is_on else b""

    def restore(self, state: bytes, rounds_under_way: Callable[[], object]) -> None:
        """Restore the `state` of a checkpoint, right after `begin`.

        Args:
            rounds_under_way: calls `order` for all rounds that the checkpoint had begun. Without shares in the state they
                began without a curriculum, and with all prompts unknown the order is the same.
        Raises:
            CheckpointError: the file of such a round is missing or belongs to other prompts.
        """
        self._must_be_there = bool(state)
        rounds_under_way()
        self._must_be_there = False
        if state:
            self._shares[:] = np.frombuffer(zlib.decompress(state), np.uint8)

    def order(self, source: int, number: int, begin: int, size: int, draw: Draw) -> Indices:
        """Return [size] the order of round `number` of the source whose prompts begin at `begin`, within the source.

        Raises:
            OSError: the file can be neither read nor written; the order stays undecided.
            CheckpointError: the file is damaged, or missing although prompts of the round were issued.
        """
        path = self._folder / f"source_{source}_round_{number + 1:06d}"
        decided = self._unwritten.get(path) or self._read(path)
        if decided is None and self._must_be_there:
            raise CheckpointError(f"{path} is missing: it holds the order of prompts of the checkpoint")
        if decided is None and not self.is_on:
            return draw(number)
        if decided is None:
            shares, plain = self._shares[begin : begin + size], draw(number)
            counts, kinds = places_of(shares, number, plain, draw(0)), kinds_of(shares)
            decided = self._unwritten[path] = Round(
                key=self._key,
                source=source,
                number=number,
                prompts={kind: int((kinds == i).sum()) for i, kind in enumerate(KINDS)},
                places={kind: int(counts[kinds == i].sum()) for i, kind in enumerate(KINDS)},
                order=order_of(counts, plain).astype(np.int32).tobytes(),
            )
        if path in self._unwritten:
            data = msgspec.msgpack.encode(decided)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, xxhash.xxh3_64_digest(data) + data, is_durable=True)
            for folder in (path.parent, path.parent.parent):
                sync(folder)
            del self._unwritten[path]
        self._show(decided)
        return np.frombuffer(decided.order, np.int32)

    def rounds_begun(self) -> list[dict[str, str | int | dict[str, int]]]:
        """Return the event fields of each round that began in this process since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def _read(self, path: Path) -> Round | None:
        """Read the round of a file; None if it is missing or of other prompts."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
            raise CheckpointError(f"{path} is damaged: the order of prompts in it cannot be continued")
        decided = msgspec.msgpack.decode(data[8:], type=Round)
        return decided if decided.key == self._key else None

    def _show(self, decided: Round) -> None:
        newest = self._rounds.get(decided.source)
        if newest is not None and newest.number >= decided.number:
            return
        self._rounds[decided.source] = msgspec.structs.replace(decided, order=b"")
        about = {"prompts": decided.prompts, "places": decided.places}
        self._begun.append({"round": decided.number + 1, "source": self._names[decided.source], **about})
        for metric, name in ((metrics.curriculum_prompts, "prompts"), (metrics.curriculum_places, "places")):
            totals = sum((Counter(getattr(one, name)) for one in self._rounds.values()), Counter[str]())
            for kind in KINDS:
                metric.labels(kind=kind).set(totals[kind])
