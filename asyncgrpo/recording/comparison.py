"""The same step twice: as the run recorded it and as a replay made it. Equal means equal in every bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from asyncgrpo.recording.events import Event
from asyncgrpo.recording.loggers import flatten

COUNTED = (
    *("tokens", "tokens_generated", "tokens_dropped", "tokens_filtered", "prompts_done"),
    *("dropped", "filtered", "discarded"),
)
"""What the buffer counted while the run was going; no replay can make it again."""
_NOT_OF_THE_STEP = {"event", "time", "seconds", *COUNTED}

QUANTITIES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "clip_ratio": "clip share",
    "diagnostics.kl_k3": "KL to samplers",
    "diagnostics.ess_token": "ESS",
}
"""What is shown of two corrections side by side: field of a step, and its name. ESS is a share of the tokens."""


@dataclass(frozen=True)
class Pair:
    """One step, twice."""

    step: int
    recorded: Event | None
    """None: the run was ended in it."""
    replayed: Event

    @cached_property
    def differences(self) -> list[str]:
        """Names of the fields that are not equal, in the order of the event; those that only one side has are none."""
        if self.recorded is None:
            return []
        ours, theirs = _fields(self.replayed), _fields(self.recorded)
        encode = msgspec.json.encode  # shortest text that reads back to the same bits
        return [name for name in ours if name in theirs and encode(ours[name]) != encode(theirs[name])]

    def values(self, field: str) -> tuple[Any, Any]:
        """A field of both, with None where it is not known."""
        recorded = _fields(self.recorded).get(field) if self.recorded is not None else None
        return recorded, _fields(self.replayed).get(field)


def _fields(event: Event) -> dict[str, Any]:
    return flatten({name: value for name, value in event.items() if name not in _NOT_OF_THE_STEP}, ".")


def means(pairs: Sequence[Pair], field: str) -> tuple[float | None, float | None]:
    """Of a field over the steps, on both sides, each over those that have it."""
    sides = zip(*(pair.values(field) for pair in pairs), strict=True)
    recorded, replayed = ([value for value in side if value is not None] for side in sides)
    return (sum(recorded) / len(recorded) if recorded else None), (sum(replayed) / len(replayed) if replayed else None)
