"""Other systems' schedules as event models: what they do with the same lengths, engines and learner as ours.

Each is written after its system's documentation as read in November 2026, and is only its schedule: engines decode with the
same curve, all rewards are instant, and publications cost the same. What is kinder to it than the system is said.

    synchronous      all GPUs generate a batch, then all train it: verl, TRL, OpenRLHF with shared GPUs. Resharding is free
    split            generators and learner on GPUs of their own, in turns
    one-step-off     they work at the same time, batch by batch: the batch of weights v is trained while that of v + 1 is
                     generated, and whoever is first waits (verl one_step_off_policy). Completions are never interrupted
    drained          groups stream into a queue, (1 + staleness) batches ahead; but weights change only in empty engines: before
                     each publication what runs is finished (verl fully_async without partial rollout)
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from asyncgrpo.planner.profile import Profile

STEPS, LEFT_OUT = 24, 4
"""Steps that are simulated, and those of the start that do not count."""
TRIED = 12
"""Splits that are tried at once."""


@dataclass(frozen=True)
class Gpus:
    """How GPUs are shared."""

    generators: int
    ranks: int


@dataclass(frozen=True)
class Outcome:
    """Means over steps: seconds and optimizer steps."""

    step_s: float
    lag_mean: float


class _Decoder:
    """One engine: of b completions that run, each gets a token each τ(b) seconds; what does not fit waits in order."""

    def __init__(self, profile: Profile) -> None:
        self._token_seconds, self._most = profile.decode.token_seconds, profile.kv_completions or math.inf
        self._now_s = self._tokens = 0.0
        self._running: list[tuple[float, int]] = []  # end in `_tokens`, group; a heap
        self._queued: deque[tuple[float, int]] = deque()  # tokens, group
        self.end_s = math.inf
        """When the next completion ends."""

    @property
    def held(self) -> int:
        return len(self._running) + len(self._queued)

    def add(self, now_s: float, group: int, lengths: np.ndarray) -> None:
        """Begin the completions of a group."""
        self._pass(now_s)
        self._queued += ((float(length), group) for length in lengths)
        self._admit()

    def complete(self) -> list[int]:
        """Go on to `end_s`. Returns the group of each completion that ends then."""
        self._pass(self.end_s)
        ended = []
        while self._running and self._running[0][0] <= self._tokens * (1 + 1e-9):
            ended.append(heapq.heappop(self._running)[1])
        self._admit()
        return ended

    def _pass(self, now_s: float) -> None:
        if self._running:
            self._tokens += (now_s - self._now_s) / self._token_seconds(len(self._running))
        self._now_s = now_s

    def _admit(self) -> None:
        while self._queued and len(self._running) < self._most:
            length, group = self._queued.popleft()
            heapq.heappush(self._running, (self._tokens + length, group))
        if self._running:
            left = max(0.0, self._running[0][0] - self._tokens)
            self.end_s = self._now_s + left * self._token_seconds(len(self._running))
        else:
            self.end_s = math.inf


class _Engines:
    """All engines of a system."""

    def __init__(self, profile: Profile, count: int) -> None:
        self._each = [_Decoder(profile) for _ in range(count)]
        self._missing: dict[int, int] = {}

    def add(self, now_s: float, group: int, lengths: np.ndarray) -> None:
        """Begin a group in the engine that holds the fewest completions."""
        self._missing[group] = len(lengths)
        min(self._each, key=lambda engine: engine.held).add(now_s, group, lengths)

    @property
    def num_groups(self) -> int:
        return len(self._missing)

    @property
    def end_s(self) -> float:
        """When the next completion ends; infinite where none runs."""
        return min(engine.end_s for engine in self._each)

    def complete(self) -> list[int]:
        """Go on to `end_s`. Returns the groups that are complete then."""
        complete = []
        for group in min(self._each, key=lambda engine: engine.end_s).complete():
            self._missing[group] -= 1
            if not self._missing[group]:
                del self._missing[group]
                complete.append(group)
        return complete


Peer = Callable[[Profile, Gpus, np.ndarray], Outcome]
"""[steps, prompts, completions] tokens are the lengths of the prompts in their order."""


def synchronous(profile: Profile, gpus: Gpus, lengths: np.ndarray) -> Outcome:
    """Generate on all GPUs, then train on all GPUs: `gpus` counts each of them twice."""
    return split(profile, gpus, lengths)


def split(profile: Profile, gpus: Gpus, lengths: np.ndarray) -> Outcome:
    """Generate, train and publish in turns."""
    seconds = [_generate(profile, gpus, batch) + _train(profile, gpus, batch) + profile.publish_s for batch in lengths]
    return Outcome(float(np.mean(seconds[LEFT_OUT:])), 0.0)


def one_step_off(profile: Profile, gpus: Gpus, lengths: np.ndarray) -> Outcome:
    """Generate the next batch while this one is trained, then publish."""
    pairs = pairwise(lengths)
    seconds = [
        max(_train(profile, gpus, now), _generate(profile, gpus, after)) + profile.publish_s for now, after in pairs
    ]
    return Outcome(float(np.mean(seconds[LEFT_OUT:])), 1.0)


def drained(profile: Profile, gpus: Gpus, lengths: np.ndarray, staleness: float = 1.0) -> Outcome:
    """Stream groups, up to (1 + `staleness`) batches beyond those trained; finish all that runs before each publication."""
    batch, engines = profile.prompts_per_step, _Engines(profile, gpus.generators)
    flat = lengths.reshape(-1, lengths.shape[-1])
    places = gpus.generators * profile.groups_in_flight
    born: list[int] = []
    ready: list[int] = []
    now_s, trained_s, version, lags, times = 0.0, math.inf, 0, [], []  # trained_s: when the step under way is done
    while version < len(lengths) - 1 - math.ceil(staleness):
        is_draining = trained_s <= now_s
        allowed = min(len(flat), round((version + 1 + (trained_s < math.inf) + staleness) * batch))
        while not is_draining and len(born) < allowed and engines.num_groups < places:
            engines.add(now_s, len(born), flat[len(born)])
            born.append(version)
        if is_draining and not engines.num_groups:  # publish
            now_s, trained_s, version = now_s + profile.publish_s, math.inf, version + 1
            times.append(now_s)
        elif trained_s == math.inf and len(ready) >= batch:
            taken, ready = ready[:batch], ready[batch:]
            trained_s = now_s + _train(profile, gpus, flat[taken])
            lags += [version - born[group] for group in taken if version >= LEFT_OUT]
        elif not is_draining and trained_s <= engines.end_s:
            now_s = trained_s
        else:
            now_s = engines.end_s
            ready += engines.complete()
    return Outcome(float(np.mean(np.diff(times)[LEFT_OUT:])), float(np.mean(lags)))


def _generate(profile: Profile, gpus: Gpus, batch: np.ndarray) -> float:
    """Seconds to generate [prompts, completions] lengths that begin together."""
    slowest_s = 0.0
    for part in (batch[number :: gpus.generators] for number in range(min(gpus.generators, len(batch)))):
        engine = _Decoder(profile)
        for group, lengths in enumerate(part):
            engine.add(0.0, group, lengths)
        ended_s = 0.0
        while engine.end_s < math.inf:
            ended_s = engine.end_s
            engine.complete()
        slowest_s = max(slowest_s, ended_s)
    return slowest_s


def _train(profile: Profile, gpus: Gpus, batch: np.ndarray) -> float:
    return profile.learner.seconds(profile.learner_tokens(float(batch.mean())), gpus.ranks)


PEERS: dict[str, Peer] = {"synchronous": synchronous, "split": split, "one-step-off": one_step_off, "drained": drained}


def lengths_of(profile: Profile, steps: int = STEPS, seed: int = 0) -> np.ndarray:
    """[steps, prompts, completions] tokens, which every peer trains."""
    sampled = profile.lengths.sample(steps * profile.prompts_per_step, profile.group_size, [seed, 0])
    return np.maximum(sampled, 1.0).reshape(steps, profile.prompts_per_step, profile.group_size)


def best_split(profile: Profile, peer: Peer, gpus: int, lengths: np.ndarray) -> tuple[Gpus, Outcome]:
    """The split with the shortest step: of at most twelve that are evenly spread, and then of as many around the best."""
    each = profile.gpus_of_engine
    if peer is synchronous:  # it has no split
        return (twice := Gpus(gpus // each, gpus)), peer(profile, twice, lengths)
    found: dict[Gpus, Outcome] = {}
    low, high = 1, (gpus - 1) // each
    for _ in range(2):
        grid = sorted({round(count) for count in np.linspace(low, high, TRIED)})
        for count in grid:
            at = Gpus(count, gpus - count * each)
            found[at] = found.get(at) or peer(profile, at, lengths)
        best = min(found, key=lambda at: found[at].step_s)
        place = grid.index(best.generators)
        low, high = grid[max(0, place - 1)], grid[min(len(grid) - 1, place + 1)]
    return best, found[best]
