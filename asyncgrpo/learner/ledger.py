"""What became of every sampled token of a run, over all its starts.

    generated = trained + masked + filtered + dropped (stale, failed, aborted, duplicate, unusable) + waiting + undone

A start counts from its checkpoint on. What the start before it had counted then is known, and so is what the journal
brought back; the difference was generated and is gone, because a crash undid what had become of it: `undone`.
"""

from collections import defaultdict
from collections.abc import Mapping

KEPT = ("trained", "masked", "filtered")
DROPPED = ("stale", "failed", "aborted", "duplicate", "unusable")
_PREFIX = "tokens_"
_OF_NOW = ("tokens_in_flight", "tokens_recovered", "prompts_done")
"""Counters that are not of the run so far, or that the buffer counts over all starts by itself."""


class Ledger:
    """The counters of a run, from those of this start's buffer."""

    def __init__(self, before: Mapping[str, float] | None = None, seen: float = 0.0) -> None:
        """
        Args:
            before: `totals` in the checkpoint that this start goes on from.
            seen: tokens generated as the start before it said last, after that checkpoint.
        """
        self._before: Mapping[str, float] = defaultdict(float, before or {})
        self._seen = max(seen, self._before["tokens_generated"])

    def totals(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Of the run so far; for the next checkpoint.

        Args:
            counters: of the buffer of this start (`buffer/numbers.py`).
        """
        before = self._before
        totals: dict[str, float] = defaultdict(float, before)
        for name, count in counters.items():
            if name not in _OF_NOW and not name.startswith("bias_"):
                totals[name] += count
        left = sum(before[_PREFIX + fate] for fate in (*KEPT, *DROPPED, "undone"))
        waited = before["tokens_generated"] - left
        gone = self._seen - before["tokens_generated"] + waited - counters.get("tokens_recovered", 0.0)
        # What came back and nobody had said was generated after the last event, by a start that was killed.
        totals["tokens_generated"] = self._seen + max(0.0, -gone) + counters.get("tokens_generated", 0.0)
        totals["tokens_undone"] = before["tokens_undone"] + max(0.0, gone)
        return totals

    def tokens(self, counters: Mapping[str, float]) -> dict[str, int]:
        """The sum at the top of this file: `generated`, and what it is made of."""
        totals = self.totals(counters)
        fates = {fate: int(totals[_PREFIX + fate]) for fate in ("generated", *KEPT, *DROPPED, "undone")}
        return fates | {"waiting": int(counters.get("tokens_in_flight", 0.0))}
