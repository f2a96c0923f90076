"""The health of groups: how long a lease may take, which prompts end generators, and whether quick groups are preferred.

A deadline at a multiple of the median follows the run, where one number for a whole run is too short for its end or too
long for its beginning. Only groups that came would make the median of the quick ones: the deadline would shrink with it,
cut more, and shrink again. So a lease that ran out counts too, with the time that it had. As long as the deadline is
above the median that is all the median needs to know of it, and where more than half run out, the deadline grows.

When a generator ends, every prompt in flight there may have ended it, or none: machines fail too. So this costs a prompt
nothing the first time. One that was in flight at `ISOLATE_AFTER` such ends since a completion of it last came is a suspect: it
is leased alone, to a generator that has finished everything else. If that generator ends as well, the prompt is charged
with a failed attempt, and nothing else is lost with it; if it answers, it is cleared.

One suspect is under way at a time, so that one prompt never ends two generators at once.

`RUN/quarantine.jsonl` has one JSON object a line: the prompt's id, why, and where it was in the run. The file decides, so
who has mended a row of the training file deletes its line before the next start. A line that a crash tore is left out.

A group is *settled* when a batch takes it, when it is given up for its age, or when its lease runs out. Each counts once
among the generated, and the trained ones also among the trained, so nothing that merely waits makes a difference, and
where nothing is given up the distance is exactly 0. Over the last groups that were settled it compares, of groups,

    length    mean sampled tokens of a completion; under `mask` the trained ones count without their masked tokens
    reward    mean reward of the scored completions: how difficult the prompt is
    age       lag in optimizer steps when it was settled
    source    `source` of the prompt

Numbers are compared by the two-sample Kolmogorov-Smirnov distance (the largest difference of the two distribution
functions), sources by total variation. Both are at most the share that was given up. A lease that was cancelled or ran
out has no length; it was outrun by all that came, so it counts as longer than any of them, and its reward is not known.

Left out on both sides is what leaves for another reason, which is counted by name: groups without a signal, where
the learner wants to see others than are made, and groups that failed.
"""

import heapq
import logging
import math
import os
import statistics
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from asyncgrpo.errors import JournalError
from asyncgrpo.types import Frozen
from asyncgrpo.wire.rollouts import Deliver

# -- deadlines of leases -----------------------------------------------------------------------------------------------


DEADLINE_WINDOW = 101
"""Groups that the median is of."""
KNOWN_AFTER = 11
"""Before so many groups nothing is known of the median."""
FLOOR_S = 10.0
"""No deadline is shorter: below this a pause of the network or of a weight change would look like a straggler."""
CUT_AT = 0.9
"""Where in its deadline a generator does without missing completions, so that what there is can be scored and sent in time."""


class Deadlines:
    """The deadlines of all leases, and the running median that new ones are made of."""

    def __init__(self, factor: float, longest_s: float) -> None:
        """
        Args:
            factor: a deadline is so many times the median of what groups took; 0: it is always `longest_s`.
            longest_s: no deadline is longer.
        """
        self._factor = factor
        self._longest_s = longest_s
        self._recent_s: deque[float] = deque(maxlen=DEADLINE_WINDOW)
        self._running: list[tuple[float, str]] = []  # a heap of when each ends; also of leases that are over

    def seconds(self, *, is_last: bool) -> float:
        """What a lease that is granted now is given.

        Args:
            is_last: the prompt's last lease has all the time there is. No prompt is dropped for being slower than others.
        """
        if is_last or not self._factor or len(self._recent_s) < KNOWN_AFTER:
            return self._longest_s
        return min(self._longest_s, max(FLOOR_S, self._factor * statistics.median(self._recent_s)))

    def took(self, seconds: float) -> None:
        """A group came after so long, or its lease ran out. What cannot be a time is left out."""
        if 0 < seconds < math.inf:
            self._recent_s.append(seconds)

    def begin(self, lease_id: str, ends_s: float) -> None:
        """A lease is granted that may run until `ends_s`."""
        heapq.heappush(self._running, (ends_s, lease_id))

    def passed(self, now_s: float) -> list[str]:
        """Leases whose end has come since the last call, the first first; some may be over for other reasons."""
        found = []
        while self._running and self._running[0][0] < now_s:
            found.append(heapq.heappop(self._running)[1])
        return found


# -- prompts that may be what ends generators --------------------------------------------------------------------------


ISOLATE_AFTER = 2


POISON = "poison"
"""The reason of a failed attempt of a prompt that was alone on a generator when that ended."""
BLAMED = frozenset({POISON, "failed"})
"""Reasons that lie with the prompt. One that used up all its attempts for them is not tried again in the next epoch."""


class Past(NamedTuple):
    """What prompts have behind them, by their place in the prompt order."""

    attempts: Counter[int]
    """Leases that failed."""
    blamed: Counter[int]
    """Those of them that failed for a reason of `BLAMED`."""
    interruptions: Counter[int]
    """Ends of generators at which a prompt was in flight, since its last completion."""


NOTHING = Past(Counter(), Counter(), Counter())


class IsolatedPrompts:
    """What is held against prompts, by their place in the prompt order."""

    def __init__(self) -> None:
        self._ends: Counter[int] = Counter()
        """Ends of generators at which a prompt was in flight, since its last completion."""
        self._holder: str | None = None
        """The generator that is kept free of others for a suspect."""
        self._alone: int | None = None
        """The suspect that is leased there; None: the generator still works on others."""

    def remember(self, ends: Counter[int]) -> None:
        """Of earlier starts. Before the first lease."""
        self._ends.update(ends)

    def in_flight_at_an_end(self, prompt_indices: Iterable[int]) -> None:
        """A generator ended while it worked on these."""
        self._ends.update(prompt_indices)

    def is_isolated(self, prompt_index: int) -> bool:
        return self._ends[prompt_index] >= ISOLATE_AFTER

    def clear(self, prompt_index: int) -> None:
        """A completion came, or the prompt is dropped: nothing is held against it."""
        self._ends.pop(prompt_index, None)

    def may_lease(self, holder: str, num_held: int, *, is_waiting: bool) -> tuple[bool, bool]:
        """Whether `holder` may get an ordinary prompt, and whether it may get a suspect.

        Args:
            num_held: leases that it works on.
            is_waiting: a suspect waits for a generator.
        """
        if self._alone is None:
            self._holder = (self._holder or holder) if is_waiting else None
        if holder != self._holder:
            return True, False
        return False, is_waiting and self._alone is None and num_held == 0

    def leased(self, prompt_index: int) -> None:
        """This suspect goes to the generator that was kept free."""
        self._alone = prompt_index

    def is_alone(self, prompt_index: int) -> bool:
        """Whether this prompt is under way as the only one of its generator."""
        return self._alone == prompt_index

    def ended(self, prompt_index: int) -> None:
        """A lease of this prompt is over, however it ended."""
        if self._alone == prompt_index:
            self._holder = self._alone = None

    def gone(self, holder: str) -> None:
        """This generator will not work on anything any more."""
        if self._holder == holder:
            self._holder = self._alone = None


# -- quarantine --------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

FILE = "quarantine.jsonl"


class Case(Frozen, frozen=True):
    """One prompt in quarantine."""

    prompt_id: str
    reason: str
    """`poison`: generators ended with it; `failed`: no generator could answer it."""
    prompt_index: int
    """Its place in the run's prompt order when it was dropped."""
    attempts: int
    """Leases that came to nothing."""


class Quarantine:
    """Which prompts are in quarantine, and why."""

    def __init__(self, path: Path | None = None) -> None:
        """
        Args:
            path: the file, which may not be there yet; None: nothing is written down.
        Raises:
            JournalError: the file cannot be read.
        """
        self._path = path
        self.cases: dict[str, Case] = {}
        """By prompt id."""
        for text in _read(path) if path is not None else []:
            try:
                case = msgspec.json.decode(text, type=Case)
            except msgspec.MsgspecError as error:
                log.warning("%s: a line cannot be read (%s); its prompt is leased again", path, error)
            else:
                self.cases[case.prompt_id] = case

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self.cases

    def add(self, case: Case) -> None:
        """From now on this prompt is not leased. What cannot be written holds until the end of this process."""
        self.cases[case.prompt_id] = case
        log.error("prompt %s is in quarantine after %d leases: %s", case.prompt_id, case.attempts, case.reason)
        if self._path is None:
            return
        try:
            with open(self._path, "ab+") as file:
                file.write((b"\n" if _is_torn(file) else b"") + msgspec.json.encode(case) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            log.error("%s cannot be written: %s", self._path, error)


def _read(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().splitlines() if line.strip()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error


def _is_torn(file: BinaryIO) -> bool:
    """Whether the last line has no end."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


# -- bias --------------------------------------------------------------------------------------------------------------


BIAS_WINDOW = 1024
"""Groups over which distributions are taken."""
LEAST = 64
"""With fewer, chance is all there is to see."""
JUDGED = ("length", "reward", "source")
"""Of which a large distance is warned. That old groups are given up for their age is no news."""


@dataclass(frozen=True)
class Settled:
    """What the monitor keeps of a group."""

    source: str
    age: int
    """Optimizer steps."""
    length: float
    """Tokens of a completion; infinite where the group never came."""
    reward: float
    """NaN where it is not known."""
    trained_length: float | None
    """Tokens of a completion that have a weight; None: the group is not trained."""


class BiasMonitor:
    """Keeps the last settled groups and compares the trained ones with all."""

    def __init__(self, threshold: float) -> None:
        """
        Args:
            threshold: a distance above which `news` speaks.
        """
        self._threshold = threshold
        self._settled: deque[Settled] = deque(maxlen=BIAS_WINDOW)
        self._distances: dict[str, float] | None = None  # None: something was settled since
        self._above: set[str] = set()

    def settle(self, source: str, message: Deliver | None, *, age: int, masked: int | None) -> None:
        """A group's fate is known.

        Args:
            message: the group; None: it never came.
            age: lag, optimizer steps.
            masked: sampled tokens without weight in the step that trains it; None: it is not trained.
        """
        length, reward, trained_length = math.inf, math.nan, None
        if message is not None:
            completions = max(len(message.rollouts), 1)
            rewards = [r.score.value for r in message.rollouts if r.score.value is not None]
            length = sum(r.num_tokens for r in message.rollouts) / completions
            reward = sum(rewards) / len(rewards) if rewards else math.nan
            trained_length = None if masked is None else length - masked / completions
        self._settled.append(Settled(source, age, length, reward, trained_length))
        self._distances = None

    def distances(self) -> dict[str, float]:
        """The distances by name, each from 0 to 1; none before `LEAST` groups are settled."""
        if len(self._settled) < LEAST:
            return {}
        if self._distances is None:
            made = list(self._settled)
            trained = [(group, group.trained_length) for group in made if group.trained_length is not None]
            self._distances = {
                "length": ks_distance([length for _, length in trained], [g.length for g in made]),
                "reward": ks_distance(_known(g.reward for g, _ in trained), _known(g.reward for g in made)),
                "source": total_variation([g.source for g, _ in trained], [g.source for g in made]),
                "age": ks_distance([g.age for g, _ in trained], [g.age for g in made]),
            }
        return self._distances

    def news(self) -> list[str]:
        """A sentence for each distance that has risen above the threshold, once, until it was below again."""
        distances = self.distances()
        above = {name for name in JUDGED if distances.get(name, 0.0) > self._threshold}
        new, self._above = above - self._above, above
        given_up = sum(g.trained_length is None for g in self._settled)
        return [
            f"trained groups differ from generated ones in {name}: distance {distances[name]:.2f}, "
            f"{given_up} of the last {len(self._settled)} were given up for being slow or old"
            for name in sorted(new)
        ]


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def ks_distance(some: Sequence[float], others: Sequence[float]) -> float:
    """Two-sample Kolmogorov-Smirnov: the largest difference of the empirical distribution functions, 0 to 1.

    Values may be infinite. Nothing differs from nothing by 0, and from something by 1.
    """
    if not some or not others:
        return float(bool(some) != bool(others))
    a, b = np.sort(np.asarray(some, np.float64)), np.sort(np.asarray(others, np.float64))
    grid = np.concatenate([a, b])
    below_a = np.searchsorted(a, grid, side="right") / len(a)
    below_b = np.searchsorted(b, grid, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def total_variation(some: Sequence[Hashable], others: Sequence[Hashable]) -> float:
    """Half the sum of the differences of the shares of each name, 0 to 1. Nothing against something is 1."""
    if not some or not others:
        return float(bool(some) != bool(others))
    a, b = Counter(some), Counter(others)
    return sum(abs(a[name] / len(some) - b[name] / len(others)) for name in a | b) / 2
