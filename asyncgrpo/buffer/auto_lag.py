"""`buffer.max_lag: auto`: the bound on staleness, from what staleness does. No clock, no sockets.

A larger bound lets the learner wait less, and trains older tokens. What old tokens cost is measured in every step: the
weights w = proximal / behaviour policy, whatever `algorithm.anchor` is, have the effective sample share (Σw)² / (n Σw²),
which is 1 when the policies agree, and falls before training collapses (VCPO, arXiv:2602.17616). So the bound is

    lowered   when the share of a step is below the floor: to the largest lag within which it was not; where every
              completion of the step is too old, to three quarters of the youngest one's lag
    raised    when the learner waited for the bound, and the share is well above the floor: by a quarter

Groups in flight under an earlier bound are no measure of the present one. So steps that train older groups than the bound
in force would allow do not count, and the bound is raised again only after as many steps as it has. One step may have
an outlier: the median of the last three shares decides.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping

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


class AutoLag:
    """Chooses the bound, step by step."""

    def __init__(self, largest: int, max_lag: int | None = None) -> None:
        """
        Args:
            largest: `buffer.auto_lag.max`.
            max_lag: the bound in force when the run ended that this start goes on from; None: it is new.
        """
        self._largest = largest
        self.max_lag = min(max(FIRST if max_lag is None else max_lag, LEAST), largest)
        self._raised_at = -math.inf
        self._shares: deque[float] = deque(maxlen=STEPS)

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
        if share < FLOOR and shares[oldest] < FLOOR:
            within = max((lag for lag, one in shares.items() if one >= FLOOR), default=3 * min(shares) // 4)
            self._change(max(LEAST, min(within, self.max_lag - 1)))
        elif share >= FLOOR + CLEAR * (1 - FLOOR) and waited > WAITED and version >= self._raised_at + self.max_lag:
            self._raised_at = version
            self._change(min(self._largest, self.max_lag + max(1, self.max_lag // 4)))
        return self.max_lag

    def _change(self, max_lag: int) -> None:
        if max_lag != self.max_lag:
            self.max_lag = max_lag
            self._shares.clear()
