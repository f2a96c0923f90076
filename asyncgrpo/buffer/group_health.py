"""What the buffer learns from groups that fail: deadlines of leases, isolated prompts, the quarantine, and bias.

Each of the four sections below says first what it is for.
"""

import logging
import math
import os
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from asyncgrpo.errors import JournalError
from asyncgrpo.types import Frozen
from asyncgrpo.wire.rollouts import Deliver

log = logging.getLogger(__name__)

# -- deadlines of leases -----------------------------------------------------------------------------------------------


DEADLINE_WINDOW = 101
"""The median is taken over this many groups."""
MIN_GROUPS = 11
"""With fewer groups the median is not used."""
SHORTEST_S = 10.0
"""No deadline is shorter: below this a pause of the network or of a weight change would look like a straggler."""
CUT_AT = 0.9
"""The share of its deadline after which a generator does without missing completions, so that the others can be scored
and sent in time."""


class Deadlines:
    """The deadlines of all leases: a multiple of the running median of the time that groups take.

    A deadline at a multiple of the median follows the run, where one number for a whole run is too short for its end or
    too long for its beginning. If only groups that came counted, the median would be that of the quick ones: the
    deadline would shrink with it, cut more, and shrink again. So a lease that ran out counts too, with the time that it
    had. While the deadline is above the median, that is all the median needs; where more than half run out, the deadline
    grows.
    """

    def __init__(self, factor: float, longest_s: float) -> None:
        """
        Args:
            factor: a deadline is this many times the median; 0: it is always `longest_s`.
            longest_s: no deadline is longer.
        """
        self._factor = factor
        self._longest_s = longest_s
        self._recent_s: deque[float] = deque(maxlen=DEADLINE_WINDOW)
        self._ends_s: dict[str, float] = {}  # by lease that has not ended

    def seconds(self, *, is_last: bool) -> float:
        """The time that a lease gets if it is granted now.

        Args:
            is_last: the prompt's last lease gets `longest_s`, so that no prompt is dropped for being slower than others.
        """
        if is_last or not self._factor or len(self._recent_s) < MIN_GROUPS:
            return self._longest_s
        return min(self._longest_s, max(SHORTEST_S, self._factor * statistics.median(self._recent_s)))

    def took(self, seconds: float) -> None:
        """Count a group that came after `seconds`, or a lease that ran out after them. What is not a time is left out."""
        if 0 < seconds < math.inf:
            self._recent_s.append(seconds)

    def begin(self, lease_id: str, ends_s: float) -> None:
        """Note a lease that was granted until `ends_s`."""
        self._ends_s[lease_id] = ends_s

    def ended(self, lease_id: str) -> None:
        """Forget a lease."""
        self._ends_s.pop(lease_id, None)

    def passed(self, now_s: float) -> list[str]:
        """Leases whose deadline has come since the last call, earliest first."""
        found = sorted((ends_s, lease_id) for lease_id, ends_s in self._ends_s.items() if ends_s < now_s)
        for _, lease_id in found:
            self.ended(lease_id)
        return [lease_id for _, lease_id in found]


# -- isolated prompts --------------------------------------------------------------------------------------------------


ISOLATE_AFTER = 2
"""Ends of generators with a prompt in flight, since its last completion, after which the prompt is isolated."""
POISON = "poison"
"""The reason of a failed attempt of an isolated prompt whose generator ended."""
BLAMED = frozenset({POISON, "failed"})
"""Reasons for which the prompt is to blame. A prompt whose attempts all failed so is not leased in the next epoch."""


class EarlierFailures(NamedTuple):
    """What went wrong with prompts in earlier starts of the run, by prompt index."""

    attempts: Counter[int]
    """Leases that failed."""
    blamed: Counter[int]
    """Those of them that failed for a reason of `BLAMED`."""
    interruptions: Counter[int]
    """Ends of generators with the prompt in flight, since its last completion."""

    @staticmethod
    def none() -> "EarlierFailures":
        return EarlierFailures(Counter(), Counter(), Counter())


class IsolatedPrompts:
    """Which prompts may be what ends generators, and the one generator on which such a prompt is leased alone.

    When a generator ends, any prompt in flight there may be the cause, or none: machines fail too. So the first end costs
    a prompt nothing. A prompt that was in flight at `ISOLATE_AFTER` such ends, with no completion since, is isolated: it
    is leased alone, to a generator that has finished everything else. If that generator ends as well, the prompt is
    charged with a failed attempt, and no other group is lost with it; if the group comes, the prompt is cleared. One
    isolated prompt is leased at a time, so that one prompt never ends two generators at once.
    """

    def __init__(self) -> None:
        self._ends: Counter[int] = Counter()
        """Ends of generators with the prompt in flight, since its last completion."""
        self._left: defaultdict[str, set[int]] = defaultdict(set)
        """Prompts that were in flight at a generator when its silence gave them to others; none has completed since."""
        self._holder: str | None = None
        """The generator that is kept free of others for an isolated prompt."""
        self._alone: int | None = None
        """The isolated prompt that is leased there; None: the generator still works on others."""

    def restore(self, ends: Counter[int]) -> None:
        """Add the ends of earlier starts. Call it before the first lease."""
        self._ends.update(ends)

    def left_behind(self, holder: str, prompt_indices: Iterable[int]) -> None:
        """Note that others go on with these prompts of a generator that is silent: it may have ended."""
        self._left[holder].update(prompt_indices)

    def is_back(self, holder: str) -> None:
        """Note that a generator that was silent had not ended."""
        self._left.pop(holder, None)

    def interrupted(self, holder: str, prompt_indices: Iterable[int]) -> tuple[int, ...]:
        """Count the end of a generator that worked on these prompts. Returns them, with those that it left behind."""
        in_flight = (*prompt_indices, *sorted(self._left.pop(holder, ())))
        self._ends.update(in_flight)
        return in_flight

    def is_isolated(self, prompt_index: int) -> bool:
        """Whether this prompt may only be leased alone."""
        return self._ends[prompt_index] >= ISOLATE_AFTER

    def clear(self, prompt_index: int) -> None:
        """Forget the ends of a prompt: a completion came, or the prompt is dropped."""
        self._ends.pop(prompt_index, None)
        for prompt_indices in self._left.values():
            prompt_indices.discard(prompt_index)

    def may_lease(self, holder: str, num_held: int, *, is_waiting: bool) -> tuple[bool, bool]:
        """Whether `holder` may get an ordinary prompt, and whether it may get an isolated one.

        Args:
            num_held: leases that it works on.
            is_waiting: an isolated prompt waits for a generator.
        """
        if self._alone is None:
            self._holder = (self._holder or holder) if is_waiting else None
        if holder != self._holder:
            return True, False
        return False, is_waiting and self._alone is None and num_held == 0

    def choose_among(self, holders: Container[str]) -> None:
        """Choose another generator next time, if the one that is kept free may get no lease now: it fell behind, for example."""
        if self._alone is None and self._holder not in holders:
            self._holder = None

    def leased(self, prompt_index: int) -> None:
        """Note that this prompt is leased to the generator that was kept free."""
        self._alone = prompt_index

    def is_alone(self, prompt_index: int) -> bool:
        """Whether this prompt is in flight as the only one of its generator."""
        return self._alone == prompt_index

    def lease_ended(self, prompt_index: int) -> None:
        """Free the generator if this prompt was alone there, however its lease ended."""
        if self._alone == prompt_index:
            self._holder = self._alone = None

    def generator_lost(self, holder: str) -> None:
        """Choose another generator next time, if this one was kept free."""
        if self._holder == holder:
            self._holder = self._alone = None


# -- quarantine --------------------------------------------------------------------------------------------------------


QUARANTINE_FILE = "quarantine.jsonl"


class Case(Frozen, frozen=True):
    """One prompt in quarantine."""

    prompt_id: str
    reason: str
    """`poison`: generators ended with it; `failed`: no generator could complete it."""
    prompt_index: int
    """The prompt index at which it was dropped."""
    attempts: int
    """Leases that failed."""


class Quarantine:
    """Which prompts are in quarantine, and why.

    The file has one JSON object a line: the prompt's id, why, and where it was in the run. The file decides: whoever has
    repaired a row of the training file deletes its line before the next start. A line that a crash tore is left out.
    """

    def __init__(self, path: Path | None = None) -> None:
        """
        Args:
            path: the file, which need not exist yet; None: the quarantine is kept in memory only.
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
        """Lease this prompt no more. If the file cannot be written, this holds until the end of the process."""
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
    """Whether the last line of the file has no newline."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


# -- bias --------------------------------------------------------------------------------------------------------------


BIAS_WINDOW = 1024
"""Distributions are taken over this many groups."""
MIN_SETTLED = 64
"""With fewer groups the distances would show chance only."""
WARNED_OF = ("length", "reward", "source")
"""Distances that a warning is given for. `age` is left out: that old groups are given up for their age is expected."""


@dataclass(frozen=True)
class Settled:
    """What the monitor keeps of one group."""

    source: str
    age: int
    """Lag in optimizer steps."""
    length: float
    """Mean tokens of a completion; infinite where the group never came."""
    reward: float
    """Mean reward; NaN where it is not known."""
    trained_length: float | None
    """Mean tokens of a completion that have a weight; None: the group is not trained."""


BIAS_THRESHOLD = 0.1
"""Distance of trained from generated groups, 0 to 1, above which `BiasMonitor.news` warns."""


class BiasMonitor:
    """Compares the trained groups with all generated ones, over the last groups that were settled.

    A group is *settled* when a batch takes it, when it is given up for its age, or when its lease runs out. Each settled
    group counts once among the generated ones, and a trained one also among the trained ones. So a group that merely
    waits makes no difference, and where no group is given up the distance is exactly 0. What is compared, of groups:

        length    mean sampled tokens of a completion; under `mask` the trained ones count without their masked tokens
        reward    mean reward of the scored completions: how difficult the prompt is
        age       lag in optimizer steps when it was settled
        source    `source` of the prompt

    Numbers are compared by the two-sample Kolmogorov-Smirnov distance (the largest difference of the two distribution
    functions), sources by total variation. Both are at most the share that was given up. A lease that was cancelled or
    ran out has no length: it took longer than every group that came, so it counts as longer than any of them, and its
    reward is not known. Groups that leave for other reasons are left out on both sides and counted by name: groups
    without signal, which the learner is not to see, and groups that failed.
    """

    def __init__(self) -> None:
        self._settled: deque[Settled] = deque(maxlen=BIAS_WINDOW)
        self._distances: dict[str, float] | None = None  # None: a group was settled since
        self._above: set[str] = set()

    def settle(self, source: str, message: Deliver | None, *, age: int, masked: int | None) -> None:
        """Count a group that was settled.

        Args:
            message: the group; None: it never came.
            age: lag, optimizer steps.
            masked: sampled tokens without weight in the step that trains it; None: it is not trained.
        """
        length, reward, trained_length = math.inf, math.nan, None
        if message is not None:
            completions = max(len(message.rollouts), 1)
            rewards = [r.score.value for r in message.rollouts if r.score.value is not None]
            length = message.num_tokens / completions
            reward = sum(rewards) / len(rewards) if rewards else math.nan
            trained_length = None if masked is None else length - masked / completions
        self._settled.append(Settled(source, age, length, reward, trained_length))
        self._distances = None

    def distances(self) -> dict[str, float]:
        """The distances by name, each from 0 to 1; empty before `MIN_SETTLED` groups are settled."""
        if len(self._settled) < MIN_SETTLED:
            return {}
        if self._distances is None:
            made = self._settled
            trained = [(group, group.trained_length) for group in made if group.trained_length is not None]
            self._distances = {
                "length": ks_distance([length for _, length in trained], [g.length for g in made]),
                "reward": ks_distance(_known(g.reward for g, _ in trained), _known(g.reward for g in made)),
                "source": total_variation([g.source for g, _ in trained], [g.source for g in made]),
                "age": ks_distance([g.age for g, _ in trained], [g.age for g in made]),
            }
        return self._distances

    def news(self) -> list[str]:
        """A warning for each distance that rose above the threshold since the last call."""
        distances = self.distances()
        above = {name for name in WARNED_OF if distances.get(name, 0.0) > BIAS_THRESHOLD}
        new, self._above = above - self._above, above
        if not new:
            return []
        given_up = sum(g.trained_length is None for g in self._settled)
        return [
            f"trained groups differ from generated ones in {name}: distance {distances[name]:.2f}, "
            f"{given_up} of the last {len(self._settled)} were given up for being slow or old"
            for name in sorted(new)
        ]


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def ks_distance(some: Sequence[float], others: Sequence[float]) -> float:
    """The two-sample Kolmogorov-Smirnov distance: the largest difference of the empirical distribution functions, 0 to 1.

    Values may be infinite. Two empty samples differ by 0, an empty one and another by 1.
    """
    if not some or not others:
        return float(bool(some) != bool(others))
    a, b = np.sort(np.asarray(some, np.float64)), np.sort(np.asarray(others, np.float64))
    grid = np.concatenate([a, b])
    below_a = np.searchsorted(a, grid, side="right") / len(a)
    below_b = np.searchsorted(b, grid, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())


def total_variation(some: Sequence[Hashable], others: Sequence[Hashable]) -> float:
    """Half the sum of the differences of the shares of each name, 0 to 1. An empty sample and another differ by 1."""
    if not some or not others:
        return float(bool(some) != bool(others))
    a, b = Counter(some), Counter(others)
    return sum(abs(a[name] / len(some) - b[name] / len(others)) for name in a | b) / 2
