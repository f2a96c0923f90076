"""Whether an engine computes with the weights that it was sent: learner and engine score the same tokens, and are compared.

A digest proves that bytes arrived. It does not see an engine that ignores a tensor, merges adapters wrongly or keeps keys and
values of older weights. So under each published version the learner and every engine score the same few sequences: the
difference of their log-probs is the sync gap, in nats. It is never 0, because their arithmetic differs.

How much it differs depends on the dtype, the kernels and the model. The first gap of a run says it: its weights are those
of the model's folder on both sides. A later one may be `TIMES_THE_FIRST` as large, within the bounds of its dtype.
"""

import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncgrpo.types import PolicyVersion

NUM_SEQUENCES = 4
LENGTH = 32
"""Tokens of a sequence; fewer where the longest context is shorter."""
VERSIONS_KEPT = 64
CHECK_WITHIN_S = 10.0
"""An engine that has not scored the sequences so long after its swap says nothing of this version."""
FIRST_CHECK_WITHIN_S = 120.0
"""The same before the first gap of a run: the first sequences may wait until an engine's kernels are compiled."""
TIMES_THE_FIRST = 4.0
BOUNDS = {"float32": (3e-5, 1e-3), "bfloat16": (1e-2, 1e-1), "float16": (3e-3, 3e-2)}
"""Least and largest limit of the mean gap by the dtype of the weights, nats. docs/weights.md has what was measured."""


@dataclass(frozen=True)
class CheckSequences:
    """The sequences of a run: the same for every process that knows vocabulary and context."""

    tokens: tuple[tuple[int, ...], ...]
    start: int
    """The tokens from here on are scored. Those before are what a prefix cache would keep."""

    @classmethod
    def draw(cls, vocab_size: int, max_context: int) -> "CheckSequences":
        """Random tokens: they read every part of a model, whatever it was trained on."""
        drawn = random.Random(f"{vocab_size} {max_context}")
        length = max(2, min(LENGTH, max_context - 1))
        tokens = (tuple(drawn.randrange(vocab_size) for _ in range(length)) for _ in range(NUM_SEQUENCES))
        return cls(tuple(tokens), max(1, length // 2))


@dataclass(frozen=True)
class SyncGap:
    """How far an engine's log-probs are from the learner's, under one version; nats."""

    mean: float
    """Over the scored tokens of all sequences but the one that is farthest off; it is compared with the limit. In bfloat16 a
    token may go to another expert of a mixture than in the learner, and then the rest of its sequence differs. What is wrong
    with an engine shows in every sequence."""
    max: float
    """Of one token of any sequence."""

    @classmethod
    def between(cls, learner: Sequence[float], engine: Sequence[float]) -> "SyncGap":
        """Infinite where the engine gave other numbers of tokens, or numbers that are none.

        Args:
            learner, engine: log-probs of `NUM_SEQUENCES` sequences of one length, one after the other.
        """
        if len(learner) != len(engine) or not all(map(math.isfinite, engine)):
            return cls(math.inf, math.inf)
        gaps = [abs(a - b) for a, b in zip(learner, engine, strict=True)]
        length = len(gaps) // NUM_SEQUENCES
        *rest, _ = sorted(sum(gaps[start : start + length]) for start in range(0, len(gaps), length))
        return cls(sum(rest) / (len(rest) * length), max(gaps))


class GapLimit:
    """The largest mean gap that is rounding."""

    def __init__(self, dtype: str) -> None:
        """
        Args:
            dtype: of the weights sent.
        """
        self._least, self._most = BOUNDS.get(dtype, BOUNDS["bfloat16"])
        self.nats, self.is_found = self._most, False

    def find(self, first: SyncGap) -> None:
        """Set the limit by the first gap of the run; later calls change nothing."""
        if not self.is_found:
            self.nats = min(max(TIMES_THE_FIRST * first.mean, self._least), self._most)
            self.is_found = True


class SyncCheck:
    """The gaps of the publications that are under way. The learner's loop calls `expect`, the publisher's thread the rest."""

    def __init__(self, sequences: CheckSequences, limit: GapLimit) -> None:
        self.sequences, self.limit = sequences, limit
        self._expected: dict[PolicyVersion, list[float]] = {}
        self._scored: dict[PolicyVersion, dict[str, Sequence[float]]] = {}

    @classmethod
    def none(cls) -> "SyncCheck":
        """Nothing is checked."""
        return cls(CheckSequences((), 1), GapLimit("float32"))

    def asked(self) -> dict[str, Any]:
        """What generators are told, as fields of `WeightsLayout`."""
        return {"check": self.sequences.tokens, "check_start": self.sequences.start}

    def expect(self, version: PolicyVersion, scores: list[float]) -> None:
        """What the learner finds under `version`. It is kept for a while: a generator may be slow, or come later."""
        self._expected[version] = scores
        for oldest in list(self._expected)[:-VERSIONS_KEPT]:
            del self._expected[oldest]
            self._scored.pop(oldest, None)

    def scored(self, version: PolicyVersion, generator_id: str, scores: Sequence[float]) -> None:
        """What an engine found; empty: it could not say."""
        self._scored.setdefault(version, {})[generator_id] = scores

    def awaits(self, version: PolicyVersion, generators: Iterable[str], since_s: float) -> bool:
        """Whether a score is still to come from the learner or from one of these, which swapped at `since_s` the latest."""
        within_s = CHECK_WITHIN_S if self.limit.is_found else FIRST_CHECK_WITHIN_S
        if not self.sequences.tokens or time.monotonic() - since_s > within_s:
            return False
        return version not in self._expected or not self._scored.get(version, {}).keys() >= set(generators)

    def conclude(self, version: PolicyVersion) -> dict[str, SyncGap]:
        """The gaps under `version` by generator, of those that could say since the last call."""
        expected, scored = self._expected.get(version), self._scored.pop(version, {})
        gaps = {name: SyncGap.between(expected, scores) for name, scores in scored.items() if scores and expected}
        if gaps:
            self.limit.find(max(gaps.values(), key=lambda gap: gap.mean))
        return gaps
