"""State of the publisher: its members, the publications under way, and the report of one that has ended."""

import math
from dataclasses import dataclass, field

from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.check import SyncGap


@dataclass
class Member:
    """A generator that has joined."""

    peer: str
    incarnation: str
    is_near: bool
    """True if it maps the learner's shared memory."""
    heard_s: float
    holds: PolicyVersion | None = None
    """The version that it proved to hold."""
    offered: PolicyVersion | None = None
    """The version on its way to it."""
    offered_s: float = 0.0
    is_staging: bool = False
    is_late: bool = False
    loaded: str = ""
    """Digest of the weights that its engine loaded last."""
    before: tuple[str, str] = "", ""
    """`loaded` and checksum at its last swap."""
    is_reported: bool = False
    """True if buffer and driver know that it is dropped."""
    failures: int = 0
    """Consecutive wrong digests or checksums."""


@dataclass
class Round:
    """A publication under way."""

    started_s: float
    digest: str
    waits_for: set[str] = field(default_factory=set)
    swapped: dict[str, str] = field(default_factory=dict)
    """Checksums by generator."""
    left_out: set[str] = field(default_factory=set)
    attempts: int = 1
    sent_bytes: int = 0
    ended_s: float = 0.0


@dataclass(frozen=True)
class Publication:
    """Proof that one version reached the generators."""

    version: PolicyVersion
    generators: tuple[str, ...]
    """Those that hold it, or a later one. One that was busy with another version is not among them."""
    seconds: float
    """From the offer until the last of them had swapped."""
    num_bytes: int
    """Of the weights."""
    digest: str
    checksums: dict[str, str] = field(default_factory=dict)
    attempts: int = 1
    dropped: tuple[str, ...] = ()
    """Generators that it did not reach: left out of this publication, or of an earlier one and not back."""
    gaps: dict[str, SyncGap] = field(default_factory=dict)
    """Distance of each engine's log-probs from the learner's, of those that were asked and replied."""
    gap_limit: float = math.inf
    """Nats; an engine whose mean gap is above it does not compute with these weights."""
    sent_bytes: int = 0
    """To all generators together, whole or as deltas, and again where it was offered again."""

    @property
    def gap(self) -> SyncGap | None:
        """The largest, by its mean."""
        return max(self.gaps.values(), key=lambda gap: gap.mean, default=None)

    @property
    def differing(self) -> tuple[str, ...]:
        """Generators whose engines compute something else than the learner."""
        return tuple(sorted(name for name, gap in self.gaps.items() if not gap.mean <= self.gap_limit))

    def describe_gap(self) -> str:
        """A sentence for engines that compute something else than the learner."""
        gap = self.gap
        assert gap is not None
        return (
            f"{', '.join(self.differing)}: under weights {self.version} the log-probs of the check sequences are "
            f"{gap.mean:.2g} nats from the learner's (limit {self.gap_limit:.2g}, largest {gap.max:.2g}); these engines "
            'do not sample from the weights that they were sent (docs/weights.md, "The sync gap")'
        )
