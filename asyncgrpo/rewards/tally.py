"""How often each thing happened, and when that is news: the first time, the tenth, the hundredth, and so on."""

MAX_KINDS = 32
"""A kind made of a message that is never the same must not fill the memory, nor the log."""
REST = "others"


class Tally:
    """Counts by kind."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def add(self, kind: str, count: int = 1) -> int | None:
        """Count; returns how many there are by now if that should be told, else None."""
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = REST
        total = self._counts[kind] = self._counts.get(kind, 0) + count
        if total < 10 * self._told.get(kind, 0):
            return None
        self._told[kind] = total
        return total
