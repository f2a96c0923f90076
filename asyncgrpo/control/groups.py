"""Where the groups of a run are at this moment, from the metrics that its buffer exports: the driver holds no such count."""

import json
import re
from pathlib import Path

from msgspec import Struct

from asyncgrpo.control.fetch import fetch
from asyncgrpo.metrics import PREFIX, targets_path

BUFFER_S = 2.0
"""How long the buffer may take to reply."""

_LINE = re.compile(rf'^{PREFIX}(\w+)(?:{{state="(\w+)"}})? (\S+)$', re.MULTILINE)


class Groups(Struct, frozen=True, kw_only=True):
    """Groups by where they are now; None where the buffer did not tell."""

    leased: int | None = None
    """Being generated and scored."""
    ready: int | None = None
    """Waiting in the buffer."""
    taken: int | None = None
    """In the learner."""
    slots: int | None = None
    """That may be leased, ready or taken at once."""
    wanted: int | None = None
    """That admission wants under way."""
    places: int | None = None
    """That the generators may work on at once."""


_NAMES = {
    ("buffer_groups", "leased"): "leased",
    ("buffer_groups", "ready"): "ready",
    ("buffer_groups", "taken"): "taken",
    ("buffer_slots", ""): "slots",
    ("groups_wanted", ""): "wanted",
    ("generator_places", ""): "places",
}


def groups_now(run_dir: Path) -> Groups:
    """Ask the buffer's metrics. Nothing is known while it starts."""
    targets = targets_path(run_dir)
    try:
        entries = json.loads(targets.read_text(encoding="utf-8"))
        address = next(entry["targets"][0] for entry in entries if entry["labels"]["role"] == "buffer")
        token = targets.with_name("token")
        word = token.read_text(encoding="utf-8").strip() if token.exists() else None
        return groups_in(fetch(f"http://{address}/metrics", token=word, timeout_s=BUFFER_S).decode())
    except (OSError, ValueError, StopIteration):
        return Groups()


def groups_in(text: str) -> Groups:
    """The counts in what a buffer exports."""
    found = {_NAMES.get((name, state)): value for name, state, value in _LINE.findall(text)}
    return Groups(**{name: round(float(value)) for name, value in found.items() if name is not None})
