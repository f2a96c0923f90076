"""What the disk owes: which groups were promised, by what they were sampled, and which steps must have a manifest.

Weights are told apart by their history, not by their name: a step makes a child of the weights that it started from. So
"still there after a resume" is a question about ancestors, and no label of the product completions it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from asyncgrpo.buffer.buffer import Buffer, State
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.journal.history import BatchIssued, BoundChanged, Delivered, History, JournalRecord, RunStarted
from asyncgrpo.types import PolicyVersion


class Weights:
    """The weights that the run has made, and those that the present ones come from."""

    def __init__(self) -> None:
        self._made = 0
        self._ids: dict[PolicyVersion, int] = {}
        self._path = [0]  # ids by step: the present weights are the last
        self._saved = [0]

    def started(self, version: PolicyVersion) -> None:
        """A start goes on from the newest checkpoint and calls it `version`."""
        self._path = list(self._saved)
        self._ids[version] = self._path[-1]

    def stepped(self, version: PolicyVersion) -> None:
        self._made += 1
        self._ids[version] = self._made
        self._path.append(self._made)

    def saved(self, step: int) -> None:
        self._saved = self._path[: step + 1]

    def are_there(self, version: PolicyVersion) -> bool:
        made, path = self._ids.get(version), self._path
        return made is not None and version.number < len(path) and path[version.number] == made


@dataclass(frozen=True)
class Kept:
    lease_id: str
    prompt_index: int
    versions: tuple[PolicyVersion, ...]
    lineage: int
    """Of the start that took it in."""


class Promises:
    def __init__(self, *, durability: str) -> None:
        self._durability = durability
        self._kept: dict[str, Kept] = {}  # acknowledged, by lease id
        self._altered: set[str] = set()  # leases whose record on the disk is another
        self._distrusted = 0  # starts up to this lineage: the record that begins them was altered
        self._has_all_manifests = durability != "memory"
        self.may_be_damaged = False
        self.num_recovered = 0

    def acknowledged(self, group: Kept) -> None:
        if group.lease_id not in self._altered:
            self._kept[group.lease_id] = group

    def gave_up(self, lease_id: str) -> None:
        self._kept.pop(lease_id, None)

    # -- what the disk is excused from ---------------------------------------------------------------------------------

    def flipped(self, record: JournalRecord | None, lineage: int) -> None:
        """A bit in `record` is another; `lineage` is the newest start."""
        self.may_be_damaged = True
        match record:
            case Delivered(lease_id=lease_id):
                self._kept.pop(lease_id, None)
                self._altered.add(lease_id)
            case BatchIssued():
                self._has_all_manifests = False
            case RunStarted():
                self._distrusted, self._has_all_manifests = lineage, False

    def power_was_cut(self, *, has_holes: bool) -> None:
        self.may_be_damaged |= has_holes
        if self._durability == "written":
            self._kept.clear()

    def lost_what_was_synced(self) -> None:
        """A failed sync took what the system had been given, and it had not been on the disk."""
        if self._durability == "written":
            self._kept.clear()
            self.may_be_damaged, self._has_all_manifests = True, False

    # -- what must hold ------------------------------------------------------------------------------------------------

    def broken(
        self, buffer: Buffer, source: PromptSource, weights: Weights, history: History | None, steps: Iterable
    ) -> str | None:
        """After a resume: what is missing, by promise; None: nothing.

        Args:
            steps: the orders of each step that the checkpoint holds.
        """
        there = {entry.prompt_index for entry in buffer._entries.values() if entry.state is State.READY}
        kept, self._kept = self._kept, {}
        if self._durability == "memory":
            return None
        for group in kept.values():
            if (
                source.is_done(group.prompt_index)
                or group.lineage <= self._distrusted
                or not all(map(weights.are_there, group.versions))
            ):
                continue
            if group.prompt_index not in there:
                return f"P13 none lost in a crash: {group.lease_id} was acknowledged, and is not there"
            self._kept[group.lease_id] = group
            self.num_recovered += 1
        return self._wrong_on_disk(weights, history, list(steps))

    def bound_in_force(self, weights: Weights, history: History) -> int | None:
        """The last bound on lag that the journal has of the weights that are there; None: it cannot be trusted, or none."""
        if self.may_be_damaged or self._distrusted:
            return None
        bound, seen = None, set[int]()
        for found in history.found:
            match found.record:
                case RunStarted(lineage=lineage, parent=parent, max_lag=max_lag):
                    version = PolicyVersion(lineage, 0 if parent is None else parent.number)
                    if lineage not in seen and weights.are_there(version):
                        bound = max_lag
                    seen.add(lineage)  # every segment begins with the record of its start
                case BoundChanged(version=version, max_lag=max_lag) if weights.are_there(version):
                    bound = max_lag
        return bound

    def wrong_bounds(self, bounds: list[int], lineage: int, history: History | None) -> str | None:
        """At the end of a start: whether the journal has not every bound that came into force."""
        if self._durability == "memory" or self.may_be_damaged or not self._has_all_manifests or history is None:
            return None
        noted = [f.record.max_lag for f in history.found if isinstance(f.record, BoundChanged) and f.lineage == lineage]
        return None if noted == bounds[1:] else f"P26 the bound: it was {bounds}, and the journal says {noted}"

    def at_the_end(self, weights: Weights, history: History | None, steps: Iterable) -> str | None:
        return None if self._durability == "memory" else self._wrong_on_disk(weights, history, list(steps))

    def _wrong_on_disk(self, weights: Weights, history: History | None, steps: list[tuple[int, ...]]) -> str | None:
        assert history is not None
        if history.damage and not self.may_be_damaged:
            return f"P14 no damage: nobody altered the journal, and {history.damage[0]}"
        if not self._has_all_manifests:
            return None
        manifests: dict[int, tuple[int, ...]] = {}
        for found in history.found:
            if isinstance(record := found.record, BatchIssued):
                after = PolicyVersion(record.version.lineage, record.version.number + 1)
                if weights.are_there(record.version) and weights.are_there(after):
                    manifests[record.step] = tuple(int(lease_id.split(".")[1]) for lease_id in record.lease_ids)
        for step, prompt_indices in enumerate(steps, start=1):
            if manifests.get(step) != prompt_indices:
                return (
                    f"P15 manifests: step {step} trained {prompt_indices}, and the journal says {manifests.get(step)}"
                )
        return None
