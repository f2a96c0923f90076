"""Groups, records and journals for tests."""

from pathlib import Path

from asyncgrpo.data.prompts import PromptState
from asyncgrpo.journal.format import FORMAT, Began, Delivered, delivered
from asyncgrpo.journal.history import History, mend, read_history
from asyncgrpo.journal.log import Disk, Journal
from asyncgrpo.types import Prompt, Score, VersionSpan, WeightVersion
from asyncgrpo.wire.rollouts import Deliver, RolloutHeader

TERMS = {"model": "m"}


def began(lineage: int = 1, parent: WeightVersion | None = None, max_lag: int = 4, policy: str = "wait") -> Began:
    prompts = PromptState(frontier=0, done_beyond=(), seed=0, shuffle=True, num_prompts=1000, fingerprint="f")
    return Began(
        format=FORMAT, lineage=lineage, parent=parent, terms=TERMS, max_lag=max_lag, prompts=prompts, policy=policy
    )


def group(
    order: int, *, lineage: int = 1, version: int = 0, tokens: int = 1, attempt: int = 0
) -> tuple[Deliver, bytes]:
    """Two answers of `tokens` tokens each, and a payload of the right size."""
    span = (VersionSpan(WeightVersion(lineage, version), 0, tokens),)
    message = Deliver(
        group_id=f"{lineage}.{order}",
        lease_id=f"{lineage}.{order}.{attempt}",
        attempt=attempt,
        order=order,
        purpose="train",
        prompt=Prompt(prompt_id=f"train/{order}", token_ids=(order,)),
        rollouts=tuple(
            RolloutHeader(index=i, num_tokens=tokens, spans=span, finish_reason="stop", score=Score(value=float(i)))
            for i in range(2)
        ),
        generator_id="g",
        timings={},
    )
    return message, bytes([order % 251]) * (16 * tokens)


def journal(
    folder: Path, lineage: int = 1, durability="fsync_each", parent=None, policy="wait", **arguments
) -> Journal:
    """Another start's journal in `folder`."""
    history = read_history(folder)
    mend(history)
    return Journal(history, began(lineage, parent, policy=policy), durability, **arguments)


def groups_in(history: History) -> dict[int, bytes]:
    """Payload by order, of the groups that can be read."""
    found = {}
    for item in history.found:
        if isinstance(item.record, Delivered) and (read := history.group(item)) is not None:
            assert read[0].order == item.record.order
            found[item.record.order] = read[1]
    return found


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FailingDisk(Disk):
    """A disk with room for so many bytes, which takes what fits of a write that does not."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.syncs = True

    def write(self, descriptor, parts):
        num_bytes = sum(map(len, parts))
        if self.room is None or num_bytes <= self.room:
            super().write(descriptor, parts)
            self.room = None if self.room is None else self.room - num_bytes
            return
        super().write(descriptor, [b"".join(map(bytes, parts))[: self.room]])
        self.room = 0
        raise OSError(28, "No space left on device")

    def sync(self, descriptor):
        if not self.syncs:
            raise OSError(5, "Input/output error")
        super().sync(descriptor)


__all__ = ["Clock", "FailingDisk", "began", "delivered", "group", "groups_in", "journal"]
