"""The bound on off-policy lag, the policies that enforce it (`buffer.policy`), and admission just in time.

A group leased at version u under bound L must be trained at version u + L or earlier: its *deadline*. L is
`buffer.max_lag`. With `auto` L changes between steps (`AutoLag`), and each group keeps the L of its lease. Each step
trains P groups. With the learner at version v and the generator serving u,

    a group may begin      while fewer than (L + 1 - (v - u)) * P hold a slot, those in training included
    a batch may be taken   if for every k >= 0:   #{remaining groups with deadline <= v + k}  <=  k * P

This is earliest-deadline-first scheduling, and it drops nothing. Proof: let D(k) be the number of groups with a slot whose
deadline is at most v + k. With no slot in use, D(k) <= (k + 1) P for every k. A group that begins has deadline u + L, so
it counts only where k >= u + L - v. There D(k) is at most the number of slots in use, (u + L - v + 1) P, hence at most
(k + 1) P. The condition on a batch preserves the invariant at v + 1. Once every group is ready, the P earliest deadlines
may always be taken. So the learner waits only where training would break the bound, no group is dropped for its age, and
long completions are not filtered out. When L decreases, new groups wait until fewer slots are in use; existing deadlines
do not change.

A group that leaves untrained (dropped, or filtered for equal rewards) only lowers D, so its replacement endangers no
deadline.

`buffer.policy` decides about groups that are late, with L for `max_lag` and P for `prompts_per_step`:

    policy    a batch is                                    a group is too old when              the learner gets
    wait      the P oldest, if the others can be in time    (never: the learner waits for it)    all, lag at most L
    drop      the P oldest of the ready ones                its oldest token's lag is above L    fast groups, lag at most L
    train     the same                                      (never)                              all, at any lag
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping


def deadlines_are_kept(remaining: Mapping[int, int], version: int, groups_per_step: int) -> bool:
    """Return True if every group that a take at `version` leaves behind can still be trained in time.

    Args:
        remaining: number of remaining groups, in flight or ready, by deadline.
        version: the learner's policy version, optimizer steps.
        groups_per_step: P.
    """
    due = 0
    for deadline, count in sorted(remaining.items()):
        due += count
        if count and due > max(0, deadline - version) * groups_per_step:
            return False
    return True


# -- admission: how many groups are under way --------------------------------------------------------------------------


class JustInTime:
    """Begins a group just in time: the bound covers the tail, and the run operates well below it.

    The target of groups under way, leased or ready, is corrected by each step. By Little's law, P times the share of the step
    that the learner waited is the number of groups trained in that time: so many were missing. P times the share that it may
    wait is taken off, so the target falls until the learner waits for that share of its time. If more than P groups were
    ready when it asked, a part of the surplus is taken off, too, which ends a start in a few steps. The wait is wall-clock
    time, so an engine that delivers a batch all at once, slightly late, adds little. The rule needs no model of lengths.

    A learner *starves* while it waited for more than a quarter of the last steps' time. Then the target rises by P in each step,
    up to all slots. So it does where generators cannot keep up, and where single steps wait long for one completion: after such
    a step many groups are ready, and the steps that train them wait for nothing, so no single step shows it.

    Generators that are busy all the time finish a group no sooner if more groups run beside it. So if the learner waits in
    every step, a trial of a few steps takes a quarter off the target, or half a batch if that is more. If the learner then
    waits longer by `MAY_WAIT`, the old target returns, and the pause until the next trial doubles, as it does if the target
    grows back later. Otherwise the smaller one stays, and the learner may wait as long as before the trial. No trial begins
    while the learner starves: its waits then vary too much for a trial of a few steps.

    All slots are used in every start until its second request, the first one that follows a training step. The bound and its
    proof still hold, because this only begins fewer groups than the slots allow. It cannot deadlock: at least P groups are
    always under way.
    """

    MAY_WAIT = 0.05
    """Share of its time that the learner may wait."""
    SURPLUS = 1 / 8
    """Share of the surplus that a step takes off."""
    STARVES, STEPS = 0.25, 16
    """Share of its time from which a learner that waits starves; steps over which the share is taken."""
    TRIAL_STEPS, LONGEST_PAUSE = 4, 192
    """Steps of a trial, and of the first pause; of the longest one."""

    def __init__(self, per_step: int) -> None:
        """
        Args:
            per_step: P.
        """
        self._per_step = per_step
        self._target = math.inf
        self._may_wait = self.MAY_WAIT
        self._before: tuple[float, float] | None = None
        """Target and mean wait before the trial that goes on."""
        self._fewer_than = math.inf
        """Target before the last trial, if that was kept."""
        self._pause = self._steps_left = self.TRIAL_STEPS
        """Steps of a pause, and those left of the pause or trial that goes on."""
        self._waits: deque[float] = deque(maxlen=self.TRIAL_STEPS)
        """Shares of the last steps that the learner waited."""
        self._seconds: deque[tuple[float, float]] = deque(maxlen=self.STEPS)
        """Seconds that the learner waited, and of the whole step, of the last steps."""
        self._in_flight, self._ready, self._asked_s = 0, 0, 0.0
        self._taken_s: float | None = None
        """Time of the last `batch_taken`."""

    def wanted(self, slots: int) -> int:
        """Return the number of groups that should be under way, at most `slots`."""
        return math.ceil(min(self._target, slots))

    def batch_requested(self, in_flight: int, ready: int, now_s: float) -> None:
        """Note that the learner requested the batch of its next step.

        Args:
            in_flight: leased groups.
            ready: all other groups under way.
        """
        self._in_flight, self._ready, self._asked_s = in_flight, ready, now_s

    def batch_taken(self, now_s: float, slots: int) -> None:
        """Note that the learner received its batch.

        Args:
            slots: maximum number of groups under way or in training.
        """
        before_s, self._taken_s = self._taken_s, now_s
        if before_s is None:
            return
        if math.isinf(self._target):
            self._target = self._in_flight + self._ready
        waited_s, step_s = now_s - self._asked_s, max(now_s - before_s, 1e-9)
        self._seconds.append((waited_s, step_s))
        self._waits.append(waited_s / step_s)
        self._steps_left -= 1
        if self._before is not None:
            self._judge_trial(*self._before)
        elif self._starves():
            self._target += self._per_step
        else:
            self._correct(waited_s / step_s)
        self._target = min(max(self._target, self._per_step), slots)

    def _starves(self) -> bool:
        waited_s, elapsed_s = map(sum, zip(*self._seconds, strict=True))
        return waited_s > self.STARVES * elapsed_s

    def _correct(self, waited: float) -> None:
        surplus = max(0, self._ready - self._per_step)
        self._target += self._per_step * (waited - self._may_wait) - self.SURPLUS * surplus
        mean = statistics.fmean(self._waits)
        self._may_wait = max(self.MAY_WAIT, min(self._may_wait, mean))
        if self._steps_left > 0:
            return
        self._steps_left = self.TRIAL_STEPS
        if self._target >= self._fewer_than:  # it has grown back since the last trial
            self._lengthen_pause()
        elif min(self._waits) > self.MAY_WAIT / 2 and self._target > self._per_step:
            self._before = self._target, mean
            self._target -= max(self._target / 4, self._per_step / 2)
            self._waits.clear()

    def _judge_trial(self, target: float, waited: float) -> None:
        if sum(self._waits) > waited * len(self._waits) + self.MAY_WAIT * self.TRIAL_STEPS:
            self._target = target
            self._lengthen_pause()
        elif self._steps_left == 0:
            self._may_wait = max(self.MAY_WAIT, min(waited, statistics.fmean(self._waits)))
            self._before, self._fewer_than, self._steps_left = None, target, self.TRIAL_STEPS

    def _lengthen_pause(self) -> None:
        self._before, self._fewer_than = None, math.inf
        self._pause = self._steps_left = min(2 * self._pause, self.LONGEST_PAUSE)


# -- buffer.max_lag: auto ----------------------------------------------------------------------------------------------


class AutoLag:
    """Chooses the bound step by step, from the cost of staleness.

    A larger bound lets the learner wait less, and trains older tokens. What old tokens cost is measured in every step: the
    weights w = proximal / behaviour policy, whatever `algorithm.anchor` is, have the effective sample share (Σw)² / (n Σw²),
    which is 1 when the policies agree, and falls before training collapses (VCPO, arXiv:2602.17616). So the bound is

        lowered   when the share of a step is below the floor: to the largest lag within which it was not; where every
                  completion of the step is too old, to three quarters of the youngest one's lag
        raised    when the learner waited for the bound, and the share is well above the floor: by a quarter

    The groups in flight under an earlier bound do not measure the present one. So steps that train older groups than the bound
    in force would allow do not count, and the bound is raised again only after as many steps as it has. One step may have
    an outlier: the median of the last three shares decides.
    """

    FIRST = 4
    """Bound of a new run, unless `buffer.auto_lag.max` is smaller."""
    LEAST = 1
    """Smallest bound."""
    FLOOR = 0.5
    """Effective sample share of a step below which the bound is lowered."""
    WAITED = 0.02
    """Share of a step that the learner must have waited for the bound before it is raised."""
    CLEAR = 0.2
    """How far above the floor, of the way to 1, the share must be before the bound is raised."""
    STEPS = 3
    """Steps whose median decides."""

    def __init__(self, largest: int, max_lag: int | None = None) -> None:
        """
        Args:
            largest: `buffer.auto_lag.max`.
            max_lag: the bound in force when the run ended that this start goes on from; None: it is new.
        """
        self._largest = largest
        self.max_lag = min(max(self.FIRST if max_lag is None else max_lag, self.LEAST), largest)
        self._raised_at = -math.inf
        self._shares: deque[float] = deque(maxlen=self.STEPS)

    def step_ended(self, version: int, shares: Mapping[int, float], waited: float) -> int:
        """The bound from now on.

        Args:
            version: optimizer steps done.
            shares: of the step, by lag: the effective sample share of the tokens that were run, of completions of at most
                that lag (`algorithms.diagnostics.shares_within`); the largest lag is that of the oldest completion.
                Completions of advantage 0 are not run where they have no gradient.
            waited: share of the step that the learner waited for the bound.
        """
        oldest = max(shares, default=0)
        if not shares or oldest > self.max_lag:
            return self.max_lag
        self._shares.append(shares[oldest] if math.isfinite(shares[oldest]) else 0.0)
        share = statistics.median(self._shares)
        if share < self.FLOOR and shares[oldest] < self.FLOOR:
            within = max((lag for lag, one in shares.items() if one >= self.FLOOR), default=3 * min(shares) // 4)
            self._change(max(self.LEAST, min(within, self.max_lag - 1)))
        elif (
            share >= self.FLOOR + self.CLEAR * (1 - self.FLOOR)
            and waited > self.WAITED
            and version >= self._raised_at + self.max_lag
        ):
            self._raised_at = version
            self._change(min(self._largest, self.max_lag + max(1, self.max_lag // 4)))
        return self.max_lag

    def _change(self, max_lag: int) -> None:
        if max_lag != self.max_lag:
            self.max_lag = max_lag
            self._shares.clear()
