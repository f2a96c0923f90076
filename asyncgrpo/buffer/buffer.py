"""Which groups may be generated, which are ready, and which are trained next. No sockets, no threads, no clock.

The buffer owns the prompt order. A prompt becomes a *lease* (permission to generate one group), comes back as a *group*,
is *taken* into a batch, and is *done* once the weights trained on it are published. Each transition is one method; every
way out is counted in `outcomes`, so that at any time

    leased + recovered = leased now + ready now + taken now + trained + filtered_zero_signal + dropped_* + requeued,

and what it keeps or drops is said to the journal at once. The tokens of all groups that came balance in the same way:

    generated + recovered = trained + filtered + stale + failed + aborted + duplicate + unusable + in flight.

Time enters as an argument, chance not at all: the same calls give the same answers.
"""

import enum
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from asyncgrpo.buffer.journal import InMemory, Ledger
from asyncgrpo.buffer.records import Dropped, Handed, delivered
from asyncgrpo.buffer.staleness import lag_is_kept
from asyncgrpo.config import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource, PromptState
from asyncgrpo.types import Lease, Prompt, Sampling, WeightVersion
from asyncgrpo.wire.messages import Deliver


class State(enum.Enum):
    """Where a group is. A group that is trained, filtered, dropped or requeued is forgotten."""

    LEASED = "leased"
    READY = "ready"
    TAKEN = "taken"


@dataclass
class Entry:
    """One group on its way."""

    order: int
    prompt: Prompt
    attempt: int
    lease: Lease
    holder: str
    leased_at_s: float
    oldest: WeightVersion
    """While leased: the version at the lease. Then: the oldest version that sampled in it."""
    state: State = State.LEASED
    message: Deliver | None = None
    payload: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, once the group is here."""
        return sum(r.num_tokens for r in self.message.rollouts) if self.message is not None else 0


class Buffer:
    """The training side of the rollout plane. See the module's text."""

    def __init__(
        self,
        config: BufferConfig,
        algorithm: AlgorithmConfig,
        prompts: PromptSource,
        sampling: Sampling,
        *,
        seed: int,
        lineage: int,
        journal: Ledger | None = None,
    ) -> None:
        """
        Args:
            journal: told of every group that is kept, handed over or dropped; None: nothing is written down.
        """
        self.journal: Ledger = journal or InMemory()
        self._config = config
        self._group_size, self._with_greedy = algorithm.group_size, algorithm.advantage == "remax"
        self._filters = algorithm.filter_zero_signal
        self._prompts = prompts
        self._sampling = sampling
        self._seed = seed
        self._lineage = lineage
        self._entries: dict[str, Entry] = {}  # by group id, in order of first lease
        # What would otherwise be counted anew at every message; `_enter`, `_turn` and `_leave` keep them.
        self._in_state: Counter[State] = Counter()
        self._held: Counter[str] = Counter()  # leases by holder
        self._attempts: Counter[int] = Counter()  # failed attempts by prompt order
        self._ended: Counter[int] = Counter()  # leases that are over, failed or not: a name is granted once
        self.version: WeightVersion | None = None
        self.draining = False
        self.outcomes: Counter[str] = Counter()
        self.filtered: Counter[str] = Counter()
        """What `filtered_zero_signal` is made of, by the names of `zero_signal`."""
        self.tokens: Counter[str] = Counter()

    # -- leases ----------------------------------------------------------------------------------------------------

    def lease(self, holder: str, now_s: float) -> Lease | None:
        """A lease for `holder`, or None if no slot is free, no prompt is left, nothing is published, or we drain."""
        if self.draining or self.version is None or len(self._entries) >= self._config.num_slots:
            return None
        issued = self._prompts.next()
        if issued is None:
            return None
        order, prompt = issued
        attempt = self._ended[order]
        group_id = f"{self._lineage}.{order}"
        lease = Lease(
            lease_id=f"{group_id}.{attempt}",
            group_id=group_id,
            attempt=attempt,
            order=order,
            purpose="train",
            prompt=prompt,
            num_answers=self._group_size,
            sampling=self._sampling,
            seed=group_seed(self._seed, order, attempt),
            with_greedy=self._with_greedy,
        )
        self._enter(Entry(order, prompt, attempt, lease, holder, now_s, self.version))
        self.outcomes["leased"] += 1
        return lease

    def held_by(self, holder: str) -> int:
        """Leases that `holder` works on."""
        return self._held[holder]

    def fail(self, lease_id: str, reason: str) -> None:
        """A lease came to nothing: its prompt is issued again, before new ones, or dropped after `max_attempts`."""
        entry = self._leased(lease_id)
        if entry is None:
            return
        self._leave(entry)
        self._attempts[entry.order] += 1
        if self._attempts[entry.order] >= self._config.max_attempts:
            self._drop(entry, reason, is_final=True)
            self._finish(entry, f"dropped_{reason}")
        else:
            self.outcomes["requeued"] += 1
            self._prompts.give_back(entry.order)

    def release(self, holder: str) -> list[str]:
        """`holder` is gone: its prompts are issued again, under other leases, at no cost to them. Returns the lease ids.

        What it was at may still arrive, older than the lease that is out by then: it would come too late for the rule
        of lag (`staleness.py`), which counted that lease by its own version. So it answers nothing any more.
        """
        lost = [e for e in self._entries.values() if e.state is State.LEASED and e.holder == holder]
        for entry in lost:
            self._requeue(entry)
        return [e.lease.lease_id for e in lost]

    def expire(self, now_s: float) -> list[Entry]:
        """Leases older than their deadline fail with `lease_timeout`. Returns them, so that they can be cancelled."""
        limit = now_s - self._config.lease_timeout_s
        # In order of their leases, so the first that is in time ends the search.
        leased = (e for e in self._entries.values() if e.state is State.LEASED)
        late = list(itertools.takewhile(lambda e: e.leased_at_s < limit, leased))
        for entry in late:
            self.fail(entry.lease.lease_id, "lease_timeout")
        return late

    # -- groups ----------------------------------------------------------------------------------------------------

    def accept(self, message: Deliver, payload: bytes) -> str | None:
        """Take in a delivered group, once. Returns None, or the reason why it is not wanted.

        With `filter_zero_signal` a group that would teach nothing is finished here and now: its prompt is done and its
        slot is free, so that the next lease replaces it by exactly one other prompt.
        """
        num_tokens = sum(r.num_tokens for r in message.rollouts)
        self.tokens["generated"] += num_tokens
        entry = self._entries.get(message.group_id)
        if self._is_done(message) or (entry is not None and entry.state is not State.LEASED):
            self.outcomes["duplicate"] += 1
            self.tokens["duplicate"] += num_tokens
            return "duplicate"
        if entry is None or entry.lease.lease_id != message.lease_id:
            self.outcomes["refused"] += 1
            self.tokens["aborted"] += num_tokens
            return "no_such_lease"
        if len(message.rollouts) != self._group_size + self._with_greedy:
            self._refuse(message, "incomplete")
            return "incomplete"
        versions = [span.version for r in message.rollouts for span in r.spans]
        if not versions or any(v.lineage != self._lineage for v in versions):
            self._refuse(message, "lineage")
            return "lineage"
        rewards = [r.score.value for r in message.rollouts if r.score.value is not None]
        if self._filters and (kind := zero_signal(rewards)) is not None:
            self._filter(entry, message, kind)
            return None
        if len(rewards) < 2:
            self._refuse(message, "unscored")
            return "unscored"
        self._turn(entry, State.READY)
        entry.message, entry.payload = message, payload
        entry.oldest = min(versions)
        self.outcomes["accepted"] += 1
        self.journal.append(*delivered(message, payload))
        return None

    def restore(self, message: Deliver, payload: bytes) -> None:
        """A group that an earlier start accepted and did not train is ready. Before the first lease."""
        self._prompts.claim(message.order)
        lease = Lease(
            lease_id=message.lease_id,
            group_id=message.group_id,
            attempt=message.attempt,
            order=message.order,
            purpose="train",
            prompt=message.prompt,
            num_answers=len(message.rollouts),
            sampling=self._sampling,
            seed=0,  # it is not sampled any more
        )
        oldest = min(span.version for r in message.rollouts for span in r.spans)
        entry = Entry(message.order, message.prompt, message.attempt, lease, "", 0.0, oldest)
        entry.message, entry.payload = message, payload
        self._enter(entry)
        self._turn(entry, State.READY)
        self.outcomes["recovered"] += 1
        self.tokens["recovered"] += entry.num_tokens

    def disown(self, lease_id: str, order: int, num_tokens: int, reason: str) -> None:
        """A group that an earlier start accepted is not to be trained; its prompt, unless it is done, is issued again."""
        self.outcomes["recovered"] += 1
        self.outcomes[f"dropped_{reason}"] += 1
        self.tokens["recovered"] += num_tokens
        self.tokens["unusable"] += num_tokens
        self.journal.append(Dropped(lease_id=lease_id, order=order, reason=reason, is_final=False))

    def take(self, version: WeightVersion) -> list[Entry] | None:
        """The batch of the step that starts at `version`: P groups, oldest first; None if it must wait.

        When no prompt is left, the last batch of the run may be smaller. Groups already older than `max_lag`, which
        only a generator that missed a publication can deliver, are dropped here and counted; admission refills each
        with exactly one.
        """
        for entry in [e for e in self._entries.values() if e.state is State.READY]:
            if version.version - entry.oldest.version > self._config.max_lag:
                self._leave(entry)
                self._attempts[entry.order] += 1
                self.outcomes["dropped_stale"] += 1
                self.tokens["stale"] += entry.num_tokens
                self._drop(entry, "stale", is_final=False)
                self._prompts.give_back(entry.order)
        waiting = [e for e in self._entries.values() if e.state is not State.TAKEN]
        ready = sorted((e for e in waiting if e.state is State.READY), key=lambda e: (e.oldest, e.order))
        wanted = self._config.prompts_per_step
        if len(ready) < wanted and not (ready and len(ready) == len(waiting) and not self._prompts.has_next):
            return None
        batch = ready[:wanted]
        chosen = {e.lease.group_id for e in batch}
        remaining = [e.oldest.version for e in waiting if e.lease.group_id not in chosen]
        if not lag_is_kept(remaining, version.version, self._config.max_lag, wanted):
            return None
        for entry in batch:
            self._turn(entry, State.TAKEN)
        # In prompt order, so that the same groups make the same batch whoever finished first.
        batch.sort(key=lambda e: e.order)
        lease_ids = tuple(e.lease.lease_id for e in batch)
        self.journal.append(Handed(step=version.version + 1, version=version, lease_ids=lease_ids))
        return batch

    def published(self, version: WeightVersion) -> None:
        """Every generator serves `version`: what was taken is trained, and its slots are free."""
        assert self.version is None or version > self.version, f"{version} after {self.version}"
        self.version = version
        for entry in [e for e in self._entries.values() if e.state is State.TAKEN]:
            self._leave(entry)
            self.tokens["trained"] += entry.num_tokens
            self._finish(entry, "trained")

    # -- what others ask -------------------------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """Every prompt of every epoch is trained, filtered or dropped."""
        return not self._entries and self._prompts.is_exhausted

    @property
    def epoch(self) -> int:
        return self._prompts.epoch

    @property
    def prompts_done(self) -> int:
        """Prompts trained, filtered or dropped for good, over all epochs and restarts."""
        return self._prompts.num_done

    def count(self, state: State) -> int:
        """Groups in `state`."""
        return self._in_state[state]

    @property
    def tokens_in_flight(self) -> int:
        """Sampled tokens of the groups that are ready or taken."""
        return sum(e.num_tokens for e in self._entries.values())

    def oldest_lease(self) -> Entry | None:
        """The group that has been under way for longest."""
        return next((e for e in self._entries.values() if e.state is State.LEASED), None)

    def snapshot(self) -> PromptState:
        """What a checkpoint must hold: which prompts are trained. Of what is under way, the journal knows."""
        return self._prompts.state()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _leased(self, lease_id: str) -> Entry | None:
        entry = self._entries.get(lease_id.rpartition(".")[0])
        if entry is None or entry.state is not State.LEASED or entry.lease.lease_id != lease_id:
            return None
        return entry

    def _is_done(self, message: Deliver) -> bool:
        """Whether this group was trained, filtered or dropped already, in this lineage."""
        return message.group_id == f"{self._lineage}.{message.order}" and self._prompts.is_done(message.order)

    def _enter(self, entry: Entry) -> None:
        self._entries[entry.lease.group_id] = entry
        self._in_state[entry.state] += 1
        self._held[entry.holder] += 1

    def _turn(self, entry: Entry, state: State) -> None:
        if entry.state is State.LEASED:
            self._held[entry.holder] -= 1
        self._in_state[entry.state] -= 1
        self._in_state[state] += 1
        entry.state = state

    def _leave(self, entry: Entry) -> None:
        del self._entries[entry.lease.group_id]
        self._ended[entry.order] = entry.attempt + 1
        self._in_state[entry.state] -= 1
        if entry.state is State.LEASED:
            self._held[entry.holder] -= 1

    def _filter(self, entry: Entry, message: Deliver, kind: str) -> None:
        self._leave(entry)
        self.filtered[kind] += 1
        self.tokens["filtered"] += sum(r.num_tokens for r in message.rollouts)
        self.journal.append(delivered(message, b"")[0])
        self._drop(entry, "zero_signal", is_final=True)
        self._finish(entry, "filtered_zero_signal")

    def _refuse(self, message: Deliver, reason: str) -> None:
        self.tokens["failed"] += sum(r.num_tokens for r in message.rollouts)
        self.fail(message.lease_id, reason)

    def _drop(self, entry: Entry, reason: str, *, is_final: bool) -> None:
        lease_id = entry.lease.lease_id
        self.journal.append(Dropped(lease_id=lease_id, order=entry.order, reason=reason, is_final=is_final))

    def _requeue(self, entry: Entry) -> None:
        self._leave(entry)
        self.outcomes["requeued"] += 1
        self._prompts.give_back(entry.order)

    def _finish(self, entry: Entry, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._attempts.pop(entry.order, None)
        self._ended.pop(entry.order, None)
        self._prompts.done(entry.order)


def zero_signal(rewards: Sequence[float]) -> str | None:
    """Why no answer of a group is better than another; None if one is.

    Compares exactly, in float64: a standard deviation of equal rewards need not be 0.

    Args:
        rewards: of the scored answers, a greedy one included, as they were scored: the learner shapes them later.
    Returns:
        `all_equal_high` (above 0), `all_equal_low` or `unscored` (fewer than two rewards).
    """
    if len(rewards) < 2:
        return "unscored"
    if max(rewards) > min(rewards):
        return None
    return "all_equal_high" if rewards[0] > 0 else "all_equal_low"


def group_seed(seed: int, order: int, attempt: int) -> int:
    """The sampling seed of a group: a fixed function of the run's seed and the group's place, below 2^48.

    splitmix64's finaliser, so that neighbouring groups get unrelated streams.
    """
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + order * 0xD1B54A32D192ED03 + attempt * 0x8CB92BA72F3D8DD7 + 1) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) >> 16
