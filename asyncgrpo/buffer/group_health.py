"""Health of groups: deadlines of leases, isolated prompts, quarantine, groups without signal, and bias."""

import logging
import math
import os
import statistics
from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from asyncgrpo.errors import JournalError
from asyncgrpo.types import Frozen
from asyncgrpo.wire.rollouts import Deliver

log = logging.getLogger(__name__)

# -- deadlines of leases -----------------------------------------------------------------------------------------------


DEADLINE_WINDOW = 101
"""Groups over which the median is taken."""
MIN_GROUPS = 11
"""Fewest groups with which the median is used."""
SHORTEST_S = 10.0
"""Minimum deadline. Below it, a stall of the network or a weight change would look like a straggler."""
CUT_AT = 0.9
"""Share of its deadline after which a generator drops missing completions, to score and send the others in time."""


class Deadlines:
    """Deadlines of leases: a multiple of the running median of the time that groups take.

    A multiple of the median follows the run, where a constant is too short at its end or too long at its beginning. With
    arrived groups alone, the median would be that of the fast ones: the deadline would shrink, cut off more groups, and
    shrink again. So an expired lease counts too, with its time limit. While the deadline is above the median this leaves
    the median exact, and if more than half of the leases expire, the deadline grows.
    """

    def __init__(self, factor: float, longest_s: float) -> None:
        """
        Args:
            factor: ratio of the deadline to the median; 0: every deadline is `longest_s`.
            longest_s: maximum deadline.
        """
        self._factor = factor
        self._longest_s = longest_s
        self._recent_s: deque[float] = deque(maxlen=DEADLINE_WINDOW)

    def seconds(self, *, is_last: bool) -> float:
        """Return the time limit of a lease that is granted now.

        Args:
            is_last: the last attempt of a prompt gets `longest_s`, so that no prompt is dropped for being slow.
        """
        if is_last or not self._factor or len(self._recent_s) < MIN_GROUPS:
            return self._longest_s
        return min(self._longest_s, max(SHORTEST_S, self._factor * statistics.median(self._recent_s)))

    def observe(self, seconds: float) -> None:
        """Add the time of an arrived group, or the time limit of an expired lease. Invalid times are ignored."""
        if 0 < seconds < math.inf:
            self._recent_s.append(seconds)


# -- isolated prompts --------------------------------------------------------------------------------------------------


ISOLATE_AFTER = 2
"""Ends of generators with a prompt in flight, since its last completion, after which the prompt is isolated."""
POISON = "poison"
"""Reason of a failed attempt of an isolated prompt whose generator ended."""
BLAMED = frozenset({POISON, "failed"})
"""Reasons that blame the prompt. If all its attempts failed for one of them, it is quarantined."""


@dataclass
class EarlierFailures:
    """Failures of prompts in earlier starts of the run, by prompt index."""

    attempts: Counter[int] = field(default_factory=Counter)
    """Failed leases."""
    blamed: Counter[int] = field(default_factory=Counter)
    """Failed leases with a reason in `BLAMED`."""
    interruptions: Counter[int] = field(default_factory=Counter)
    """Ends of generators with the prompt in flight, since its last completion."""


class IsolatedPrompts:
    """Isolates prompts that may crash generators: each is leased alone, to one generator at a time.

    When a generator ends, any prompt in flight there may be the cause, or none, because machines fail too. So the first end
    costs a prompt nothing. A silence counts as an end. A prompt that was in flight at `ISOLATE_AFTER` ends since its last
    completion is isolated: it is leased alone, to a generator that has finished everything else. If that generator ends
    too, the prompt is charged with a failed attempt and no other group is lost; if the group arrives, the prompt is cleared.
    One isolated prompt is in flight at a time, so that one prompt never ends two generators at once.
    """

    def __init__(self) -> None:
        self._ends: Counter[int] = Counter()
        """Ends of generators with the prompt in flight, since its last completion."""
        self._holder: str | None = None
        """Generator that is kept free for an isolated prompt."""
        self._alone: int | None = None
        """Isolated prompt in flight there; None: the generator still works on others."""

    def interrupted(self, prompt_indices: Iterable[int]) -> None:
        """Count the end of a generator with these prompts in flight."""
        self._ends.update(prompt_indices)

    def is_isolated(self, prompt_index: int) -> bool:
        """Return True if this prompt may only be leased alone."""
        return self._ends[prompt_index] >= ISOLATE_AFTER

    def clear(self, prompt_index: int) -> None:
        """Forget the ends of a prompt that completed or was dropped."""
        self._ends.pop(prompt_index, None)

    def may_lease(self, holder: str, num_held: int, *, is_waiting: bool) -> tuple[bool, bool]:
        """Return whether `holder` may get an ordinary prompt, and whether it may get an isolated one.

        Args:
            num_held: leases that it holds.
            is_waiting: an isolated prompt waits for a generator.
        """
        if self._alone is None:
            self._holder = (self._holder or holder) if is_waiting else None
        if holder != self._holder:
            return True, False
        return False, is_waiting and self._alone is None and num_held == 0

    def set_eligible(self, holders: Container[str]) -> None:
        """Release the generator that is kept free if it may get no lease now, for example because it fell behind."""
        if self._alone is None and self._holder not in holders:
            self._holder = None

    def leased(self, prompt_index: int) -> None:
        """Note that this prompt is leased to the generator that was kept free."""
        self._alone = prompt_index

    def is_alone(self, prompt_index: int) -> bool:
        """Return True if this prompt is in flight as the only one of its generator."""
        return self._alone == prompt_index

    def lease_ended(self, prompt_index: int) -> None:
        """Release the generator if this prompt was alone there, for any outcome of the lease."""
        if self._alone == prompt_index:
            self._holder = self._alone = None


# -- quarantine --------------------------------------------------------------------------------------------------------


QUARANTINE_FILE = "quarantine.jsonl"


class Case(Frozen, frozen=True):
    """A quarantined prompt."""

    prompt_id: str
    reason: str
    """`poison`: it ended generators; `failed`: every generator failed to complete it."""
    prompt_index: int
    """Prompt index at which it was dropped."""
    attempts: int
    """Failed leases."""


class Quarantine:
    """Quarantined prompts, with reasons, kept in a file.

    The file has one JSON object per line: prompt id, reason and position in the run. It is authoritative: after you repair
    a row of the training file, delete its line before the next start. A torn line is ignored.
    """

    def __init__(self, path: Path | None = None) -> None:
        """
        Args:
            path: of the file, which need not exist; None: the quarantine is kept in memory only.
        Raises:
            JournalError: the file cannot be read.
        """
        self._path = path
        self.cases: dict[str, Case] = {}
        """Cases by prompt id."""
        try:
            content = path.read_bytes() if path is not None else b""
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise JournalError(f"{path} cannot be read: {error.strerror}") from error
        for text in filter(bytes.strip, content.splitlines()):
            try:
                case = msgspec.json.decode(text, type=Case)
            except ValueError as error:
                log.warning("%s: a line cannot be read (%s); its prompt is leased again", path, error)
            else:
                self.cases[case.prompt_id] = case

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self.cases

    def add(self, case: Case) -> None:
        """Quarantine a prompt. If the file cannot be written, this holds until the process ends."""
        self.cases[case.prompt_id] = case
        log.error("prompt %s is in quarantine after %d leases: %s", case.prompt_id, case.attempts, case.reason)
        if self._path is None:
            return
        try:
            with open(self._path, "ab+") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                is_torn = file.read(1) not in (b"", b"\n")  # the last line lacks its newline
                file.write(b"\n" * is_torn + msgspec.json.encode(case) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            log.error("%s cannot be written: %s", self._path, error)


# -- groups without signal ---------------------------------------------------------------------------------------------


def rewards_of(message: Deliver) -> list[float]:
    """Return the rewards of the scored completions, a greedy one included."""
    return [r.score.value for r in message.rollouts if r.score.value is not None]


def zero_signal(rewards: Sequence[float]) -> str | None:
    """Return the reason why a group has no signal; None if its rewards differ.

    The comparison is exact, in float64: the standard deviation of equal rewards may be nonzero.

    Args:
        rewards: of the scored completions, a greedy one included, before the learner shapes them.
    Returns:
        `all_equal_high` (above 0), `all_equal_low` or `unscored` (fewer than two rewards).
    """
    if len(rewards) < 2:
        return "unscored"
    if max(rewards) > min(rewards):
        return None
    return "all_equal_high" if rewards[0] > 0 else "all_equal_low"


# -- bias --------------------------------------------------------------------------------------------------------------


BIAS_WINDOW = 1024
"""Distributions are taken over this many groups."""
MIN_SETTLED = 64
"""With fewer groups the distances would show chance only."""
BIAS_THRESHOLD = 0.1
"""Distance of trained from generated groups, 0 to 1, above which an alert fires."""


class BiasMonitor:
    """Compares the trained groups with all generated ones, over the last groups that were settled.

    A group is *settled* when a batch takes it, when it is given up for its age, or when its lease runs out. Each settled
    group counts once among the generated ones, and a trained one also among the trained ones. So a group that merely
    waits makes no difference, and if no group is given up the distance is exactly 0. Compared are

        length    mean sampled tokens of a completion
        reward    mean reward of the scored completions: the difficulty of the prompt

    by the two-sample Kolmogorov-Smirnov distance, which is at most the share that was given up. A lease that was cancelled
    or ran out has no length: it took longer than every group that came, so it counts as longer than any of them, and its
    reward is unknown. Groups that leave for other reasons are left out on both sides and counted by name: groups without
    signal, which the learner is not to see, and groups that failed.
    """

    def __init__(self) -> None:
        self._settled: deque[tuple[float, float, bool]] = deque(maxlen=BIAS_WINDOW)
        """Of each group, mean tokens of a completion (infinite if it never came), mean reward (NaN if it is unknown), and
        True if it was trained."""
        self._distances: dict[str, float] | None = None  # None: a group was settled since

    def settle(self, message: Deliver | None, *, is_trained: bool) -> None:
        """Count a group that was settled.

        Args:
            message: the group; None: it never came.
        """
        length, reward = math.inf, math.nan
        if message is not None:
            rewards = rewards_of(message)
            length = message.num_tokens / max(len(message.rollouts), 1)
            reward = sum(rewards) / len(rewards) if rewards else math.nan
        self._settled.append((length, reward, is_trained))
        self._distances = None

    def distances(self) -> dict[str, float]:
        """Return the distances by name, each from 0 to 1; empty before `MIN_SETTLED` groups are settled."""
        if len(self._settled) < MIN_SETTLED:
            return {}
        if self._distances is None:
            made = np.array(self._settled)
            trained = made[made[:, 2] > 0]
            self._distances = {
                name: ks_distance(*(values[~np.isnan(values)] for values in (trained[:, column], made[:, column])))
                for column, name in enumerate(("length", "reward"))
            }
        return self._distances


def ks_distance(some: ArrayLike, others: ArrayLike) -> float:
    """Return the two-sample Kolmogorov-Smirnov distance: the largest difference of the distribution functions, 0 to 1.

    Values may be infinite. Two empty samples differ by 0, an empty one and another by 1.
    """
    a, b = np.sort(np.asarray(some, np.float64)), np.sort(np.asarray(others, np.float64))
    if not len(a) or not len(b):
        return float(len(a) != len(b))
    grid = np.concatenate([a, b])
    below_a = np.searchsorted(a, grid, side="right") / len(a)
    below_b = np.searchsorted(b, grid, side="right") / len(b)
    return float(np.abs(below_a - below_b).max())
