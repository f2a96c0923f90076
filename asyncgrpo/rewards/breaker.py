"""The circuit breaker of a reward: while every call fails, completions wait for their score and only probes are made.

A circuit is *closed* while calls work. After a streak of failures a check makes two calls more; if both fail, the circuit
is *open*: a probe is made from time to time, and the first call that works closes it. `Tally`, below, decides when a failure
is reported: the first time, the tenth, the hundredth, and so on.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from asyncgrpo import metrics
from asyncgrpo.rewards.base import Reward, Sampled, is_training, kind_of
from asyncgrpo.types import Prompt, RewardHealth, Score

log = logging.getLogger(__name__)

STREAK = 8
"""Failures in a row after which a check is made."""
SLOW_STREAK, SLOW_S = 3, 15.0
"""A check is also made after this many failures over this time: a call that times out takes `reward.timeout_s`."""
TRIES = 2
"""Calls of a check that must fail before the circuit opens."""
FIRST_PROBE_S, LAST_PROBE_S = 1.0, 60.0
"""The interval between two probes doubles from the first to the last."""
HOLD_S = 60.0
"""Deadline of a completion that waits for its score."""
KEPT = 8
"""Prompts of which one call each is kept to probe with."""
OF_THE_PROMPT = frozenset({"unknown_source", "not_applicable", "aborted"})
"""Failures without information about the reward itself."""


class RewardsPaused(Exception):
    """No completion can be scored at present. No prompt or completion is the cause."""


@dataclass(frozen=True)
class News:
    """A kind of failure that was seen for the first time, or ten times as often as when it was reported last."""

    kind: str
    detail: str
    count: int


class _Call(NamedTuple):
    prompt: Prompt
    completions: Sequence[Sampled]


class Breaker(Reward):
    """Calls `reward` while it works, and probes it while it does not. Use it from one event loop."""

    def __init__(self, reward: Reward, *, at_once: int) -> None:
        """
        Args:
            at_once: calls made at the same time; the others wait here, so that no call is made while the circuit is open.
        """
        self._reward, self.takes_groups, self.teaches = reward, reward.takes_groups, reward.teaches
        self._turn = asyncio.Semaphore(at_once)
        self._closed = asyncio.Event()
        self._closed.set()
        self._check: asyncio.Task[None] | None = None
        self._check_began_s = 0.0
        self._opened_s: float | None = None
        self._num_opened = 0
        self._probe_at_s = 0.0
        self._worked = self._failed = self._streak = 0
        self._failing_since_s: float | None = None
        self._last = ""
        self._good: _Call | None = None  # the last that worked
        # Calls that failed, or wait since then, one for each prompt; the last one is tried next.
        self._probes: OrderedDict[str, _Call] = OrderedDict()
        self._tries_good = False
        self._tally = Tally()
        self._news: list[News] = []
        self.changed = asyncio.Event()
        """Set when `health` has changed or there is news."""

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        """Make one call, for these completions.

        Raises:
            RewardsPaused: no call has worked for `HOLD_S`.
        """
        call, asked_s = _Call(prompt, completions), asyncio.get_running_loop().time()
        while True:
            if not self._closed.is_set():
                self._keep(call)
                await self._until_closed()
            async with self._turn:
                if self._closed.is_set():
                    waited = asyncio.get_running_loop().time() - asked_s
                    scores = await self._make(call)
                    return [msgspec.structs.replace(score, waited=waited + score.waited) for score in scores]

    async def works(self) -> bool:
        """Return once a call has worked since the last failure: True if the circuit was never open meanwhile.

        Raises:
            RewardsPaused: no call has worked for `HOLD_S`.
        """
        was_closed, num_opened = self._opened_s is None, self._num_opened
        if self._streak:
            self._begin_check()
            await self._until_closed()
        return was_closed and num_opened == self._num_opened

    def played(self, scores: Sequence[Score], *, is_call: bool) -> None:
        """Note scores that the environment or agent of a group gave. No probe can be made: the circuit stays as it is.

        Args:
            is_call: failures alone count as a failed call.
        """
        failures = [score for score in scores if score.failure is not None]
        for score in failures:
            self._count(score)
        if len(failures) < len(scores):
            if not self.teaches:  # whose call is the one that counts
                self._worked += 1
                self._failing_since_s = None
        elif failures and is_call:
            self._note_failed(failures[-1])

    async def close(self) -> None:
        if self._check is not None:
            self._check.cancel()
        await self._reward.close()

    @property
    def is_paused(self) -> bool:
        """True if completions wait for their score now."""
        return not self._closed.is_set()

    @property
    def health(self) -> RewardHealth:
        """Counts of calls since this process began."""
        now_s = asyncio.get_running_loop().time()
        return RewardHealth(
            worked=self._worked,
            failed=self._failed,
            failing_s=0.0 if self._failing_since_s is None else now_s - self._failing_since_s,
            probe_in_s=None if self._opened_s is None else max(0.0, self._probe_at_s - now_s),
            last=self._last,
        )

    def news(self) -> list[News]:
        """The failures to report since the last call of this method."""
        news, self._news = self._news, []
        return news

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def _make(self, call: _Call) -> list[Score]:
        scores = await self._reward.score(*call)
        failures = [score for score in scores if score.failure is not None]
        for score in failures:
            self._report(call, score)
        if self.teaches and not is_training(call.prompt):
            return scores  # without its teacher a call proves nothing
        if len(failures) < len(scores):
            self._worked += 1
            self._good = call
            self._close_circuit()
        elif (last := next((s for s in reversed(failures) if s.failure not in OF_THE_PROMPT), None)) is not None:
            self._streak += 1
            failing_s = self._note_failed(last)
            self._keep(call)
            if self._streak >= STREAK or (self._streak >= SLOW_STREAK and failing_s >= SLOW_S):
                self._begin_check()
        return scores

    def _note_failed(self, last: Score) -> float:
        """Count a failed call. Returns the seconds since the first one after the last that worked."""
        now_s = asyncio.get_running_loop().time()
        self._failed += 1
        self._last = f"{last.failure}: {last.detail}"
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        return now_s - self._failing_since_s

    def _report(self, call: _Call, score: Score) -> None:
        metrics.reward_failures_total.labels(failure=score.failure).inc()
        if (count := self._count(score)) is not None:
            kind, prompt_id = kind_of(score), call.prompt.prompt_id
            log.warning("reward failed (%s, %d so far), prompt %s: %s", kind, count, prompt_id, score.detail)

    def _count(self, score: Score) -> int | None:
        """Count a failure. Returns their number if it is news, else None."""
        if (count := self._tally.add(kind := kind_of(score))) is not None:
            self._news.append(News(kind, score.detail, count))
            self.changed.set()
        return count

    def _keep(self, call: _Call) -> None:
        if self.teaches and not is_training(call.prompt):
            return
        self._probes.setdefault(call.prompt.prompt_id, call)
        if len(self._probes) > KEPT:
            self._probes.popitem(last=False)

    async def _until_closed(self) -> None:
        try:
            async with asyncio.timeout_at(self._check_began_s + HOLD_S):
                await self._closed.wait()
        except TimeoutError:
            raise RewardsPaused(f"no reward call has worked for {HOLD_S:.0f} s, the last: {self._last}") from None

    # -- the circuit ---------------------------------------------------------------------------------------------------

    def _begin_check(self) -> None:
        if self._check is None:
            self._closed.clear()
            self._check_began_s = asyncio.get_running_loop().time()
            self._check = asyncio.create_task(self._probe(), name="reward-check")

    def _close_circuit(self) -> None:
        if self._opened_s is not None:
            log.warning("rewards work again")
            metrics.rewards_paused.set(0)
            self.changed.set()
        self._check = self._opened_s = self._failing_since_s = None
        self._streak = 0
        self._probes.clear()
        self._closed.set()

    async def _probe(self) -> None:
        """Check, and if the check fails open the circuit and probe, until any call works."""
        for _ in range(TRIES):
            if await self._works_now():
                return
        self._opened_s = asyncio.get_running_loop().time()
        self._num_opened += 1
        log.warning("rewards are paused: every call fails, the last with %s", self._last)
        metrics.rewards_paused.set(1)
        interval_s = FIRST_PROBE_S
        with metrics.waiting("reward"):
            while not (await self._closes_within(interval_s) or await self._works_now()):
                interval_s = min(2 * interval_s, LAST_PROBE_S)

    async def _closes_within(self, interval_s: float) -> bool:
        self._probe_at_s = asyncio.get_running_loop().time() + interval_s
        self.changed.set()
        try:
            async with asyncio.timeout(interval_s):
                await self._closed.wait()
        except TimeoutError:
            return False
        return True

    async def _works_now(self) -> bool:
        """Make one probe. Returns whether the circuit is closed after it."""
        async with self._turn:
            if self._check is asyncio.current_task():
                call = self._next_probe()
                try:
                    await self._make(call)
                except Exception:
                    log.exception("a reward raised on prompt %s, which it never should", call.prompt.prompt_id)
        return self._check is not asyncio.current_task()

    def _next_probe(self) -> _Call:
        """Choose a call: in turn the one that worked last, and one of a prompt that failed or waits, the latest first."""
        self._tries_good = not self._tries_good
        if self._good is not None and (self._tries_good or not self._probes):
            return self._good
        prompt_id = next(reversed(self._probes))
        self._probes.move_to_end(prompt_id, last=False)
        return self._probes[prompt_id]


# -- when a failure is reported ----------------------------------------------------------------------------------------


MAX_KINDS = 32
"""The most kinds that are counted apart, so that kinds made of changing texts fill neither memory nor log."""
REST = "others"
"""The kind of all further kinds."""


class Tally:
    """Counts failures by kind, and decides which count is reported."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._reported: dict[str, int] = {}

    def add(self, kind: str, count: int = 1) -> int | None:
        """Count failures of a kind. Returns their number if it is to be reported, else None."""
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = REST
        total = self._counts[kind] = self._counts.get(kind, 0) + count
        if total < 10 * self._reported.get(kind, 0):
            return None
        self._reported[kind] = total
        return total
