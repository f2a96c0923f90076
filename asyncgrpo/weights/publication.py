"""Publications: the sync check that proves one, the publisher's members, and the state and report of each.

The sync check compares log-probs of learner and engine on the same tokens, to prove that the engine uses its new weights.
Digests prove that an engine holds the published tensors. They cannot detect adapters that were merged wrongly, or an engine
that keeps keys and values of older weights. So under each published version the learner and every engine score the same few
sequences. The difference of their log-probs is the sync gap, in nats. It is never 0, because their arithmetic differs.

Its size depends on the dtype, the kernels and the model. The first gap of a run calibrates the limit, because both sides
then hold the weights of the model's folder. A later gap may be `TIMES_THE_FIRST` as large, within the bounds of its dtype.
Rounding grows with the log-probs, which training sharpens, so the lower bound does, too.
"""

import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncgrpo.types import PolicyVersion

if TYPE_CHECKING:  # the driver does not import torch
    from asyncgrpo.weights.arena import Place

# -- the sync check ----------------------------------------------------------------------------------------------------

NUM_SEQUENCES = 4
LENGTH = 32
"""Tokens of a sequence; fewer if the longest context is shorter."""
VERSIONS_KEPT = 64
CHECK_WITHIN_S = 10.0
"""Deadline after a swap for an engine's scores; later ones do not count for the version."""
FIRST_CHECK_WITHIN_S = 120.0
"""The deadline before the first gap of a run, when an engine may still compile its kernels."""
TIMES_THE_FIRST = 4.0
BOUNDS = {"float32": (5e-6, 1e-3), "bfloat16": (2e-3, 1e-1), "float16": (5e-4, 3e-2)}
"""By the dtype of the weights: smallest limit of the mean gap as a share of the mean log-prob, and largest limit, nats.
Measurements: docs/weights.md."""


@dataclass(frozen=True)
class CheckSequences:
    """The sequences of a run, determined by vocabulary and context length."""

    tokens: tuple[tuple[int, ...], ...]
    start: int
    """Index of the first scored token. Earlier tokens are a prefix that a prefix cache would keep."""

    @classmethod
    def draw(cls, vocab_size: int, max_context: int) -> "CheckSequences":
        """Draw random tokens, which exercise every part of a model, whatever its training data."""
        drawn = random.Random(f"{vocab_size} {max_context}")
        length = max(2, min(LENGTH, max_context - 1))
        tokens = (tuple(drawn.randrange(vocab_size) for _ in range(length)) for _ in range(NUM_SEQUENCES))
        return cls(tuple(tokens), max(1, length // 2))


@dataclass(frozen=True)
class SyncGap:
    """Distance of an engine's log-probs from the learner's under one version, nats."""

    mean: float
    """Mean over the scored tokens of all sequences but the farthest one; it is compared with the limit. In bfloat16 a token
    may be routed to another expert than in the learner, and then the rest of its sequence differs. A faulty engine differs
    in every sequence."""
    max: float
    """Largest distance of one token of any sequence."""

    @classmethod
    def between(cls, learner: Sequence[float], engine: Sequence[float]) -> "SyncGap":
        """Compare the log-probs of learner and engine. The gap is infinite if their lengths differ or one is not finite.

        Args:
            learner, engine: log-probs of `NUM_SEQUENCES` sequences of equal length, concatenated.
        """
        if len(learner) != len(engine) or not all(map(math.isfinite, engine)):
            return cls(math.inf, math.inf)
        gaps = [abs(a - b) for a, b in zip(learner, engine, strict=True)]
        length = len(gaps) // NUM_SEQUENCES
        *rest, _ = sorted(sum(gaps[start : start + length]) for start in range(0, len(gaps), length))
        return cls(sum(rest) / (len(rest) * length), max(gaps))


class GapLimit:
    """Largest mean gap that counts as rounding."""

    def __init__(self, dtype: str) -> None:
        """
        Args:
            dtype: dtype of the published weights.
        """
        self._least, self._most = BOUNDS.get(dtype, BOUNDS["bfloat16"])
        self._first: float | None = None
        self.nats = self._most

    @property
    def is_found(self) -> bool:
        """True after the first gap of the run."""
        return self._first is not None

    def update(self, gap: SyncGap, logprobs: Sequence[float]) -> None:
        """Set the limit for the version of `gap`, the largest of its engines.

        Args:
            logprobs: of the learner under this version, nats.
        """
        if self._first is None:
            self._first = gap.mean
        rounding = self._least * sum(map(abs, logprobs)) / len(logprobs)
        self.nats = min(max(TIMES_THE_FIRST * self._first, rounding), self._most)


class SyncCheck:
    """Gaps of the publications in progress. The learner's loop calls `expect`, the publisher's thread the rest."""

    def __init__(self, sequences: CheckSequences, limit: GapLimit) -> None:
        self.sequences, self.limit = sequences, limit
        self._expected: dict[PolicyVersion, list[float]] = {}
        self._scored: dict[PolicyVersion, dict[str, Sequence[float]]] = {}

    @classmethod
    def none(cls) -> "SyncCheck":
        """Return a check without sequences, which accepts every engine."""
        return cls(CheckSequences((), 1), GapLimit("float32"))

    def expect(self, version: PolicyVersion, scores: list[float]) -> None:
        """Record the learner's scores under `version`. The last `VERSIONS_KEPT` are kept for slow or later generators."""
        self._expected[version] = scores
        for oldest in list(self._expected)[:-VERSIONS_KEPT]:
            del self._expected[oldest]
            self._scored.pop(oldest, None)

    def scored(self, version: PolicyVersion, generator_id: str, scores: Sequence[float]) -> None:
        """Record an engine's scores; empty: scoring failed."""
        self._scored.setdefault(version, {})[generator_id] = scores

    def awaits(self, version: PolicyVersion, generators: Iterable[str], since_s: float) -> bool:
        """Return True if a score from the learner or one of `generators` is pending and the deadline has not passed.

        Args:
            since_s: time of the last swap among `generators`, `time.monotonic`.
        """
        within_s = CHECK_WITHIN_S if self.limit.is_found else FIRST_CHECK_WITHIN_S
        if not self.sequences.tokens or time.monotonic() - since_s > within_s:
            return False
        return version not in self._expected or not self._scored.get(version, {}).keys() >= set(generators)

    def conclude(self, version: PolicyVersion) -> dict[str, SyncGap]:
        """Return the gaps under `version` by generator, for the scores since the last call."""
        expected, scored = self._expected.get(version), self._scored.pop(version, {})
        gaps = {name: SyncGap.between(expected, scores) for name, scores in scored.items() if scores and expected}
        if gaps and expected:
            self.limit.update(max(gaps.values(), key=lambda gap: gap.mean), expected)
        return gaps


# -- log lines ---------------------------------------------------------------------------------------------------------

MAX_NAMES = 20
"""Names in a log line."""


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"


# -- members and publications ------------------------------------------------------------------------------------------


@dataclass
class Member:
    """A generator that has joined."""

    peer: str
    incarnation: str
    machine: str
    mark: str
    """Of its process, for names of files."""
    place: "Place"
    """Where it loads weights from."""
    joined_s: float
    heard_s: float
    holds: PolicyVersion | None = None
    """The version that it proved to hold."""
    offered: PolicyVersion | None = None
    """The version that its engine swaps to."""
    offered_s: float = 0.0
    is_late: bool = False
    loaded: str = ""
    """Digest of the weights that its engine loaded last."""
    before: tuple[str, str] = "", ""
    """`loaded` and checksum at its last swap."""
    failures: int = 0
    """Consecutive loads that failed or had the wrong checksum."""


class Checksum(NamedTuple):
    """What shows which weights an engine holds."""

    digest: str
    """Equal on two engines of one kind exactly if their weights are equal."""
    tensors: bytes = b""
    """Digests of published tensors, as in `wire.weights.Swapped`."""

    @classmethod
    def of(cls, digests: Sequence[int]) -> "Checksum":
        """Return that of an engine whose weights are the published tensors alone.

        Args:
            digests: of all these tensors, in the order of the publication.
        """
        numbered = np.array([*enumerate(digests)], np.uint64)
        return cls(digest_of(np.array(digests, np.uint64)), numbered.tobytes())


def digest_of(digests: NDArray[np.uint64]) -> str:
    """Return the digest of a publication from those of its tensors, 16 hex digits."""
    return f"{int(digests.sum()):016x}"


@dataclass
class Round:
    """A publication under way."""

    started_s: float
    waits_for: set[str] = field(default_factory=set)
    swapped: dict[str, str] = field(default_factory=dict)
    """Checksums by generator."""
    differing: set[str] = field(default_factory=set)
    """Generators whose engines hold other tensors than were sent."""
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
    """Sent to machines, whole or as deltas, or read by engines beside the learner; retries included."""

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
