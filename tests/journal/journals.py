"""Groups, records and journals for tests."""

import random
from pathlib import Path
from typing import Any

from asyncgrpo.data.prompts import PromptState
from asyncgrpo.journal import history
from asyncgrpo.journal.history import Delivered, History, RunStarted, read_history, repair
from asyncgrpo.journal.log import Journal
from asyncgrpo.types import Lease, PolicyVersion, Prompt, Sampling
from asyncgrpo.wire.rollouts import Deliver
from tests.buffer.test_buffer import deliver
from tests.simulation.disk import SimulatedDisk


def prompts_at(frontier: int, *beyond: int) -> PromptState:
    return PromptState(frontier=frontier, done_beyond=beyond, seed=0, shuffle=True, num_prompts=1000, fingerprint="f")


def began(lineage: int = 1, parent: PolicyVersion | None = None, **fields: Any) -> RunStarted:
    same = {"compatibility_key": {"model": "m"}, "max_lag": 4, "prompts": prompts_at(0)}
    same |= {"config": {}, "policy": "wait"}
    return RunStarted(lineage=lineage, parent=parent, **same | fields)


def delivered(message: Deliver, payload: bytes, max_lag: int = 4) -> tuple[Delivered, list]:
    return history.delivered(message, payload, max_lag)


def group(
    prompt_index: int, *, lineage: int = 1, version: int = 0, tokens: int = 1, attempt: int = 0
) -> tuple[Deliver, bytes]:
    """Two completions of `tokens` tokens each, and a payload of the right size."""
    group_id, prompt = f"{lineage}.{prompt_index}", Prompt(prompt_id=f"train/{prompt_index}", token_ids=(prompt_index,))
    lease = Lease(
        lease_id=f"{group_id}.{attempt}",
        group_id=group_id,
        attempt=attempt,
        prompt_index=prompt_index,
        purpose="train",
        prompt=prompt,
        num_completions=2,
        sampling=Sampling(),
        seed=0,
    )
    return deliver(lease, version, lineage=lineage, tokens=tokens), bytes([prompt_index % 251]) * (16 * tokens)


def journal(
    folder: Path, lineage: int = 1, durability="fsync_each", of_start: dict[str, Any] | None = None, **arguments
) -> Journal:
    """The journal of a start; `of_start`: fields of the record that begins it."""
    history = read_history(folder)
    repair(history)
    return Journal(history, began(lineage, **of_start or {}), durability, **arguments)


def failing_disk(folder: Path, clock: "Clock") -> SimulatedDisk:
    """A disk that a test lets be full, or fail."""
    return SimulatedDisk(folder, random.Random(0), clock)


def groups_in(history: History) -> dict[int, bytes]:
    found = {}
    for item in history.found:
        if isinstance(item.record, Delivered) and (read := history.group(item)) is not None:
            assert read[0].prompt_index == item.record.prompt_index
            found[item.record.prompt_index] = read[1]
    return found


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


__all__ = ["Clock", "began", "delivered", "group", "groups_in", "journal"]
