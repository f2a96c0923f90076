"""The buffer: prompts, leases, ready groups and batches of a run. It uses no sockets, threads or clock.

The buffer owns the prompts in their order. A prompt becomes a *lease* (permission to generate one group), comes back as
a *group*, is *taken* into a batch, and is *done* once the learner has made the next version from it. Each transition is
one method. `outcomes` counts every exit, under every policy (`admission.py`), so that at any time

    leased + recovered = leased now + ready now + taken now + trained + filtered_zero_signal + dropped_* + requeued,

and each exit is appended to the journal. (A prompt that is quarantined or too long counts as leased and dropped in one
step.) The tokens of all arrived groups, discarded completions included, balance in the same way:

    generated + recovered = trained + filtered + stale + failed + aborted + duplicate + unusable + in flight.

Time is an argument and nothing is random: equal calls give equal replies.
"""

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import KW_ONLY, dataclass, field

from asyncgrpo.buffer.admission import AutoLag, JustInTime, deadlines_are_kept
from asyncgrpo.buffer.group_health import (
    BLAMED,
    CUT_AT,
    POISON,
    QUARANTINE_FILE,
    BiasMonitor,
    Case,
    Deadlines,
    EarlierFailures,
    IsolatedPrompts,
    Quarantine,
    rewards_of,
    zero_signal,
)
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.errors import DataError
from asyncgrpo.journal.history import BatchIssued, BoundChanged, Dropped, Interrupted, delivered
from asyncgrpo.journal.log import InMemory, Ledger
from asyncgrpo.types import Lease, PolicyVersion, Prompt, Sampling
from asyncgrpo.wire.codec import Buffer as Frame
from asyncgrpo.wire.rollouts import Deliver

MAX_ATTEMPTS = 3
"""Leases of one prompt before it is dropped, with a count."""


class State(enum.Enum):
    """State of a group that holds a slot. A trained, filtered, dropped or requeued group has no entry."""

    LEASED = "leased"
    READY = "ready"
    TAKEN = "taken"


@dataclass
class GroupEntry:
    """One group that holds a slot, from its lease until it is trained, filtered, dropped or requeued."""

    lease: Lease
    holder: str
    leased_at_s: float
    oldest: PolicyVersion
    """Oldest version that sampled in it; while leased, the version at the lease."""
    max_lag: int
    """Bound in force at the lease, optimizer steps."""
    state: State = State.LEASED
    is_sampled: bool = False
    """True if it is leased and only scores are missing."""
    message: Deliver | None = None
    payload: bytes | memoryview = b""
    limit_s: float = 0.0
    """The lease expires this many seconds after `leased_at_s`."""
    num_tokens: int = field(init=False, default=0)
    """Sampled tokens; 0 until the group arrives."""
    ready_at_s: float | None = None
    """Time of arrival; None: it has not arrived, or an earlier start left it."""

    @property
    def prompt_index(self) -> int:
        return self.lease.prompt_index

    @property
    def deadline(self) -> int:
        """Number of the last version at which a step may take it."""
        return self.oldest.number + self.max_lag


@dataclass(eq=False)
class Buffer:
    """Prompts and groups of a run: see the module's docstring."""

    config: BufferConfig
    algorithm: AlgorithmConfig
    prompts: PromptSource
    """Those that are done are part of a checkpoint. The journal has the groups in flight."""
    sampling: Sampling
    _: KW_ONLY
    seed: int
    lineage: int
    journal: Ledger = field(default_factory=InMemory)
    """Records every group that is kept, handed over or dropped."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Prompts that are not leased."""
    last_max_lag: int | None = None
    """With `buffer.max_lag: auto`, the bound in force when the run ended that this start goes on from; None: it is new."""
    max_attempts: int = MAX_ATTEMPTS

    def __post_init__(self) -> None:
        config, algorithm = self.config, self.algorithm
        self._admission = JustInTime(config.prompts_per_step)
        self._auto = AutoLag(config.auto_lag.max, self.last_max_lag) if config.max_lag == "auto" else None
        self._max_lag = config.largest_max_lag
        self.is_held_back = False
        """True if the bound on lag was why the last `take` returned None."""
        self._asked_at: PolicyVersion | None = None  # the version of the learner's last request
        self._asked_s = self._held_back_s = 0.0  # time of that request, and how long the bound then made it wait
        self._group_size, self._with_greedy = algorithm.group_size, algorithm.advantage == "remax"
        self._min_completions = algorithm.min_completions or algorithm.group_size
        self._filters = algorithm.filter_zero_signal
        self._entries: dict[str, GroupEntry] = {}  # by group id, in order of first lease
        # Aggregates over the entries, updated by `_enter`, `_arrive`, `_set_state` and `_leave`: no message scans all entries.
        self._due: dict[State, Counter[int]] = {state: Counter() for state in State}  # by deadline
        self._held: defaultdict[str, dict[str, GroupEntry]] = defaultdict(dict)  # leases by holder, then by group id
        self.tokens_in_flight = 0
        """Sampled tokens of the ready and taken groups."""
        self._scored: Counter[str] = Counter()  # the leases among them for which only scores are missing
        self._attempts: Counter[int] = Counter()  # failed attempts by prompt index
        self._blamed: Counter[int] = Counter()  # the failed attempts among them that the prompt caused
        self._ended: Counter[int] = Counter()  # finished leases by prompt index, so that no lease id is granted twice
        self.deadlines = Deadlines(config.straggler_factor, config.lease_timeout_s)
        self._isolated = IsolatedPrompts()
        self.version: PolicyVersion | None = None
        self.draining = False
        self.outcomes: Counter[str] = Counter()
        self.filtered: Counter[str] = Counter()
        """`filtered_zero_signal` by reason, as named by `zero_signal`."""
        self.tokens: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()
        """Completions left out of their groups, by the field names of `types.Discarded`."""
        self.bias = BiasMonitor()
        self._cancelled: list[GroupEntry] = []

    # -- leases --------------------------------------------------------------------------------------------------------

    def may_lease(self, serves: PolicyVersion | None = None) -> bool:
        """Return False if `lease` would return None for every generator that serves this version; None: any version."""
        if self.draining or self.version is None or self.journal.is_blocked is not None:
            return False
        is_wanted = self._is_wanted or self.prompts.next_isolated_index is not None
        return is_wanted and self._has_slot(self._behind(serves or self.version))

    def lease(self, holder: str, now_s: float, serves: PolicyVersion | None = None) -> Lease | None:
        """Lease a prompt to `holder`.

        Return None if no slot is free, enough groups are under way, the prompts are exhausted, the learner has not
        reported its version, the disk refuses writes, or the run drains.

        Args:
            serves: version that the engine samples with, or a lower bound of it; None: the learner's version.
        """
        if self.draining or self.version is None:
            return None
        serves = serves or self.version
        issued = self._issue(holder, self._behind(serves))
        if issued is None:
            return None
        prompt_index, prompt = issued
        attempt = self._ended[prompt_index]
        group_id = f"{self.lineage}.{prompt_index}"
        limit_s = self.deadlines.seconds(is_last=self._attempts[prompt_index] + 1 >= self.max_attempts)
        lease = Lease(
            lease_id=f"{group_id}.{attempt}",
            group_id=group_id,
            attempt=attempt,
            prompt_index=prompt_index,
            purpose="train",
            prompt=prompt,
            num_completions=self._group_size,
            sampling=self.sampling,
            seed=group_seed(self.seed, prompt_index, attempt),
            with_greedy=self._with_greedy,
            min_completions=self._min_completions,
            cut_after_s=CUT_AT * limit_s,
        )
        self._enter(GroupEntry(lease, holder, now_s, serves, self.max_lag, limit_s=limit_s))
        self.outcomes["leased"] += 1
        return lease

    def lease_of(self, lease_id: str) -> Lease | None:
        """Return the lease with this id if its group is in flight."""
        entry = self._leased(lease_id)
        return entry.lease if entry is not None else None

    def _issue(self, holder: str, behind: int) -> tuple[int, Prompt] | None:
        """Choose the prompt for a lease of `holder`: an ordinary one, or an isolated one alone.

        Args:
            behind: optimizer steps that the holder's weights are behind the learner's.
        Raises:
            DataError: every remaining prompt is in quarantine, in this epoch and in all later ones.
        """
        prompts, num_dropped = self.prompts, 0
        may_join, may_be_alone = self._isolated.may_lease(
            holder, self.held_by(holder), is_waiting=prompts.next_isolated_index is not None
        )
        while self.journal.is_blocked is None:  # a blocked journal could not record the outcome of a lease
            if not self._has_slot(behind) or not (may_be_alone or (may_join and self._is_wanted)):
                return None
            issued = prompts.next_isolated() if may_be_alone else prompts.next()
            if issued is None:
                return None
            prompt_index, prompt = issued
            unusable = "quarantined" if prompt.prompt_id in self.quarantine else "" if prompt.token_ids else "too_long"
            if unusable:
                self.outcomes["leased"] += 1
                lease_id = f"{self.lineage}.{prompt_index}.{self._ended[prompt_index]}"
                self._record_drop(lease_id, prompt_index, unusable, is_final=True)
                self._finish(prompt_index, f"dropped_{unusable}")
                num_dropped += 1
                if num_dropped > prompts.longest_gap:
                    raise DataError(f"every prompt of data.train is in quarantine (RUN/{QUARANTINE_FILE})")
            elif may_be_alone:
                self._isolated.leased(prompt_index)
                return issued
            elif self._isolated.is_isolated(prompt_index):  # by an earlier start
                prompts.isolate(prompt_index)
            else:
                return issued
        return None

    def set_eligible(self, holders: Container[str]) -> None:
        """Set the generators that may get a lease now. Only one of them is kept free for an isolated prompt."""
        self._isolated.set_eligible(holders)

    def held_by(self, holder: str) -> int:
        """Return the number of leases that `holder` works on."""
        return len(self._held[holder])

    def sampled_by(self, holder: str) -> int:
        """Return the number of leases of `holder` whose completions are still being sampled."""
        return len(self._held[holder]) - self._scored[holder]

    @property
    def num_sampled(self) -> int:
        """Number of groups whose completions are still being sampled."""
        return self.count(State.LEASED) - self._scored.total()

    def awaits_scores(self, holder: str, lease_id: str) -> None:
        """Note that only scores are missing for a lease of `holder`. The group keeps its slot."""
        entry = self._leased(lease_id)
        if entry is not None and entry.holder == holder and not entry.is_sampled:
            entry.is_sampled = True
            self._scored[entry.holder] += 1

    def fail(self, lease_id: str, reason: str) -> None:
        """End a lease that failed. Its prompt is issued again before new ones, or dropped after `MAX_ATTEMPTS` leases."""
        entry = self._leased(lease_id)
        if entry is None:
            return
        if reason == "lease_timeout":
            self.deadlines.observe(entry.limit_s)
            self.bias.settle(entry.message, is_trained=False)
        self._blamed[entry.prompt_index] += reason in BLAMED
        self._end_attempt(entry, reason, final_reason=reason, outcome="requeued")

    def give_back(self, lease_id: str) -> None:
        """End a lease that the prompt did not cause to fail. The prompt is issued again at no cost."""
        entry = self._leased(lease_id)
        if entry is not None:
            self._requeue(entry)

    def free_leases_of(self, holder: str, *, is_silent: bool) -> list[str]:
        """Free the leases of a silent or slow generator and return their ids. Their prompts are issued again.

        A silence counts as an end of the generator. An isolated prompt stays leased: it may be what stopped it.
        """
        return self._free(holder, list(self._held[holder].values()), is_interrupted=is_silent)

    def _free(self, holder: str, entries: list[GroupEntry], *, is_interrupted: bool) -> list[str]:
        freed = [e for e in entries if not self._isolated.is_alone(e.prompt_index)]
        if is_interrupted:
            self._interrupted(holder, freed)
        for entry in freed:
            self._requeue(entry)
        return [e.lease.lease_id for e in freed]

    def free_unknown(self, holder: str, known: Container[str], before_s: float) -> list[str]:
        """Free the leases that were granted before `before_s`, but that their generator does not know. Returns their ids.

        As in a silence, it may have ended meanwhile.
        """
        lost = [e for e in self._held[holder].values() if e.leased_at_s < before_s and e.lease.lease_id not in known]
        return self._free(holder, lost, is_interrupted=True)

    def release(self, holder: str) -> list[str]:
        """Free the leases of a lost generator and return their ids. Their prompts are issued again.

        The prompts are not charged, except an isolated prompt that was leased alone.

        A group of such a lease may still arrive, with older weights than the lease that replaced it. The bound on lag
        counted the old lease by its own version (`admission.py`), so the group is refused.
        """
        lost = list(self._held[holder].values())
        self._interrupted(holder, lost)
        for entry in lost:
            if self._isolated.is_alone(entry.prompt_index):
                self.fail(entry.lease.lease_id, POISON)
            else:
                self._requeue(entry)
        return [e.lease.lease_id for e in lost]

    def expire(self, now_s: float, is_excused: Callable[[str], bool] = lambda holder: False) -> list[GroupEntry]:
        """Fail the expired leases with `lease_timeout` and return them, so that they can be cancelled.

        Args:
            is_excused: True for a holder whose prompts are not why it is late. Its leases are given back.
        """
        late = [e for e in self._entries.values() if e.state is State.LEASED and e.leased_at_s + e.limit_s < now_s]
        for entry in late:
            if is_excused(entry.holder):
                self.give_back(entry.lease.lease_id)
            else:
                self.fail(entry.lease.lease_id, "lease_timeout")
        return late

    def cancelled(self) -> list[GroupEntry]:
        """Return the leases that were given up for their age since the last call. Their slots are free."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    # -- groups --------------------------------------------------------------------------------------------------------

    def accept(
        self, message: Deliver, payload: bytes | memoryview, now_s: float | None = None, head: Frame | None = None
    ) -> str | None:
        """Keep a delivered group, once. Return None, or the reason of the refusal.

        With `filter_zero_signal` a group without signal is finished here: its prompt is done and its slot is free, so
        that the next lease replaces it by exactly one other prompt.

        Args:
            head: the frame of the message, written to the journal as received; None: the journal encodes the message.
        """
        num_tokens, left_out = message.num_tokens, message.discarded.tokens
        self.tokens["generated"] += num_tokens + left_out
        entry = self._entries.get(message.group_id)
        is_ours = message.group_id == f"{self.lineage}.{message.prompt_index}"  # of this start
        is_done = is_ours and self.prompts.is_done(message.prompt_index)
        if is_done or (entry is not None and entry.state is not State.LEASED):
            self.outcomes["duplicate"] += 1
            self.tokens["duplicate"] += num_tokens + left_out
            return "duplicate"
        self.tokens["aborted"] += left_out
        if entry is None or entry.lease.lease_id != message.lease_id:
            self.outcomes["refused"] += 1
            self.tokens["aborted"] += num_tokens
            return "no_such_lease"
        if not self._is_complete(message):
            return self._refuse(message, "incomplete")
        if any(version.lineage != self.lineage for version in message.versions):
            return self._refuse(message, "lineage")
        if not message.versions:  # every completion failed before its first token
            return self._refuse(message, "unscored")
        self._isolated.clear(entry.prompt_index)
        self.deadlines.observe(sum(message.timings.values()))
        self.discarded["censored"] += message.discarded.censored
        rewards = rewards_of(message)
        if self._filters and (kind := zero_signal(rewards)) is not None:
            self._filter(entry, message, kind, head)
            return None
        if len(rewards) < 2:
            return self._refuse(message, "unscored")
        self._arrive(entry, message, payload, now_s)
        self.outcomes["accepted"] += 1
        self.outcomes["accepted_short"] += len(message.rollouts) < self._group_size + self._with_greedy
        self.journal.append(*delivered(message, payload, entry.max_lag, head))
        return None

    def count_aborted(self, num_tokens: int) -> None:
        """Count tokens sampled for a lease that failed or was cancelled."""
        self.tokens["generated"] += num_tokens
        self.tokens["aborted"] += num_tokens

    def take(self, version: PolicyVersion, now_s: float = 0.0) -> list[GroupEntry] | None:
        """Return the batch of the step that starts at `version`, P groups chosen by the policy; None: the learner waits.

        The last batch of a run may be smaller. Groups and leases that are too old for this step or the next one are
        given up and counted; admission replaces each by exactly one.
        """
        is_new = version != self._asked_at
        if is_new or not self._lacks_a_batch:
            self._evict_stale(version)
        if is_new:
            self._asked_at, self._asked_s, self._held_back_s, self.is_held_back = version, now_s, 0.0, False
            leased, ready = self.count(State.LEASED), self.count(State.READY)
            self._admission.batch_requested(leased, ready, now_s)
        batch = self._choose(version)
        if not batch:
            # A larger bound would give a batch sooner: by taking one, or by beginning more groups.
            self.is_held_back = self.count(State.READY) >= self.config.prompts_per_step or not self._has_slot()
            return None
        if self.is_held_back:
            self._held_back_s = now_s - self._asked_s
        self._admission.batch_taken(now_s, self.num_slots)
        for entry in batch:
            self._set_state(entry, State.TAKEN)
            self.bias.settle(entry.message, is_trained=True)
        # In prompt order, so that the same groups make the same batch in any order of arrival.
        batch.sort(key=lambda e: e.prompt_index)
        lease_ids = tuple(e.lease.lease_id for e in batch)
        self.journal.append(BatchIssued(step=version.number + 1, version=version, lease_ids=lease_ids))
        self._evict_stale(PolicyVersion(version.lineage, version.number + 1))
        return batch

    def forget_request(self, now_s: float) -> None:
        """Count the step from now on, and the learner's wait for its batch from the next `take` on."""
        self._asked_at, self._asked_s = None, now_s

    def trained(self, version: PolicyVersion) -> None:
        """Record that the learner has made `version`: the taken groups are trained, and their slots are free.

        Generators need not serve it yet: one that is behind may begin fewer groups.
        """
        assert self.version is None or version > self.version, f"{version} after {self.version}"
        self.version = version
        for entry in [e for e in self._entries.values() if e.state is State.TAKEN]:
            self._leave(entry)
            self.tokens["trained"] += entry.num_tokens
            self._finish(entry.prompt_index, "trained", entry.message)
        self._evict_stale(version)

    def step_ended(self, version: PolicyVersion, shares: Mapping[int, float], now_s: float) -> None:
        """Choose the bound in force from the step that made `version`, where it is `auto`.

        Args:
            shares: as in `AutoLag.step_ended`.
        """
        if self._auto is None:
            return
        waited = self._held_back_s / max(now_s - self._asked_s, 1e-9)
        before, after = self.max_lag, self._auto.step_ended(version.number, shares, waited)
        if after != before:
            self.journal.append(BoundChanged(version=version, max_lag=after))

    def change_max_lag(self, max_lag: int) -> None:
        """Set the bound for later leases, as requested by the operator. The learner has reported a version."""
        assert self._auto is None and self.version is not None
        if max_lag != self._max_lag:
            self._max_lag = max_lag
            self.journal.append(BoundChanged(version=self.version, max_lag=max_lag))

    # -- what earlier starts left: before the first lease --------------------------------------------------------------

    def restore_failures(self, earlier: EarlierFailures) -> None:
        """Charge prompts with what went wrong in earlier starts. Every prompt still gets at least one lease more."""
        for counts, ours in ((earlier.attempts, self._attempts), (earlier.blamed, self._blamed)):
            ours.update({index: min(count, self.max_attempts - 1) for index, count in counts.items()})
        self._ended.update(earlier.attempts)  # so that they are sampled with other seeds than those that failed
        self._isolated.interrupted(earlier.interruptions.elements())

    def restore(self, message: Deliver, payload: bytes, max_lag: int) -> None:
        """Restore a group that an earlier start accepted and did not train; `max_lag` was in force at its lease."""
        self.prompts.claim(message.prompt_index)
        lease = Lease(
            lease_id=message.lease_id,
            group_id=message.group_id,
            attempt=message.attempt,
            prompt_index=message.prompt_index,
            purpose="train",
            prompt=message.prompt,
            num_completions=len(message.rollouts),
            sampling=self.sampling,
            seed=0,  # unused: the group is complete
        )
        entry = GroupEntry(lease, "", 0.0, message.versions[0], max_lag)
        self._enter(entry)
        self._arrive(entry, message, payload)
        self.outcomes["recovered"] += 1
        self.tokens["recovered"] += entry.num_tokens

    def drop_recovered(self, lease_id: str, prompt_index: int, num_tokens: int, reason: str) -> None:
        """Drop a group that an earlier start accepted. Its prompt is issued again unless it is done."""
        self.outcomes["recovered"] += 1
        self.outcomes[f"dropped_{reason}"] += 1
        self.tokens["recovered"] += num_tokens
        self.tokens["unusable"] += num_tokens
        self._record_drop(lease_id, prompt_index, reason, is_final=False)

    # -- totals and state ----------------------------------------------------------------------------------------------

    @property
    def max_lag(self) -> int:
        """Bound in force for new leases, optimizer steps."""
        return self._max_lag if self._auto is None else self._auto.max_lag

    @property
    def num_slots(self) -> int:
        """Groups that may hold a slot under the bound in force."""
        return (self.max_lag + 1) * self.config.prompts_per_step

    @property
    def wanted(self) -> int:
        """Target of admission for groups under way (leased or ready)."""
        return self._admission.wanted(self.num_slots)

    @property
    def exhausted(self) -> bool:
        """True if every prompt of every epoch is trained, filtered or dropped."""
        return not self._entries and self.prompts.is_exhausted

    def count(self, state: State) -> int:
        """Return the number of groups in `state`."""
        return self._due[state].total()

    @property
    def blocked_by(self) -> str | None:
        """The file that cannot be written, so that nothing may be leased; a phrase for messages."""
        if self.journal.is_blocked is not None:
            return f"the journal: {self.journal.is_blocked}"
        return None if self.prompts.is_blocked is None else f"the order of an epoch: {self.prompts.is_blocked}"

    def oldest_lease(self) -> GroupEntry | None:
        """Return the group that has been in flight longest."""
        return next((e for e in self._entries.values() if e.state is State.LEASED), None)

    # -- private -------------------------------------------------------------------------------------------------------

    def _behind(self, serves: PolicyVersion) -> int:
        return max(0, self.version.number - serves.number) if self.version is not None else 0

    def _has_slot(self, behind: int = 0) -> bool:
        """Return True if a group may begin on weights `behind` steps behind the learner's (`admission.py`)."""
        return len(self._entries) < (self.max_lag - behind + 1) * self.config.prompts_per_step

    @property
    def _is_wanted(self) -> bool:
        """True if admission wants one more group under way."""
        return self.count(State.LEASED) + self.count(State.READY) < self.wanted

    @property
    def _lacks_a_batch(self) -> bool:
        """True if too few groups are ready. Most arrivals end here, without a scan over the entries."""
        is_last = not self.count(State.LEASED) and self.prompts.next_prompt_index is None
        return self.count(State.READY) < self.config.prompts_per_step and not is_last

    def _choose(self, version: PolicyVersion) -> list[GroupEntry]:
        """Return the ready groups with the earliest deadlines for the step that starts at `version`; empty: none yet.

        Only the last batch of a run is smaller than P: it contains all groups in flight when no prompt is left.
        """
        if self._lacks_a_batch:
            return []
        per_step = self.config.prompts_per_step
        if self.config.policy == "wait" and not deadlines_are_kept(self._left_behind(), version.number, per_step):
            return []
        ready = [e for e in self._entries.values() if e.state is State.READY]
        ready.sort(key=lambda e: (e.deadline, e.prompt_index))
        return ready[:per_step]

    def _left_behind(self) -> Counter[int]:
        """Return the number of groups, by deadline, that a batch of the ready groups with the earliest ones would leave."""
        remaining, places = self._due[State.LEASED] + self._due[State.READY], self.config.prompts_per_step
        for deadline, count in sorted(self._due[State.READY].items()):
            remaining[deadline] -= min(count, places)
            places -= min(count, places)
        return remaining

    def _leased(self, lease_id: str) -> GroupEntry | None:
        entry = self._entries.get(lease_id.rpartition(".")[0])
        if entry is None or entry.state is not State.LEASED or entry.lease.lease_id != lease_id:
            return None
        return entry

    def _is_complete(self, message: Deliver) -> bool:
        """Return True if a group has the number of completions that its lease asks for."""
        num_completions = sum(r.index < self._group_size for r in message.rollouts)
        num_greedy = len(message.rollouts) - num_completions
        return self._min_completions <= num_completions <= self._group_size and num_greedy == self._with_greedy

    def _enter(self, entry: GroupEntry) -> None:
        self._entries[entry.lease.group_id] = entry
        self._count(entry, 1)
        self._held[entry.holder][entry.lease.group_id] = entry

    def _arrive(
        self, entry: GroupEntry, message: Deliver, payload: bytes | memoryview, now_s: float | None = None
    ) -> None:
        """Make a lease a ready group, with the deadline of its oldest token. `message` has at least one version span."""
        self._end_lease(entry)
        self._count(entry, -1)
        entry.message, entry.payload, entry.ready_at_s = message, payload, now_s
        entry.num_tokens, entry.oldest, entry.state = message.num_tokens, message.versions[0], State.READY
        self._count(entry, 1)
        self.tokens_in_flight += entry.num_tokens

    def _count(self, entry: GroupEntry, by: int) -> None:
        due = self._due[entry.state]
        due[entry.deadline] += by
        if not due[entry.deadline]:
            del due[entry.deadline]

    def _set_state(self, entry: GroupEntry, state: State) -> None:
        """Set the state of a group that is not leased."""
        self._count(entry, -1)
        entry.state = state
        self._count(entry, 1)

    def _leave(self, entry: GroupEntry) -> None:
        del self._entries[entry.lease.group_id]
        self._ended[entry.prompt_index] = entry.lease.attempt + 1
        self.tokens_in_flight -= entry.num_tokens
        self._count(entry, -1)
        if entry.state is State.LEASED:
            self._end_lease(entry)

    def _end_lease(self, entry: GroupEntry) -> None:
        del self._held[entry.holder][entry.lease.group_id]
        self._scored[entry.holder] -= entry.is_sampled
        self._isolated.lease_ended(entry.prompt_index)

    def _filter(self, entry: GroupEntry, message: Deliver, kind: str, head: Frame | None) -> None:
        self._leave(entry)
        self.filtered[kind] += 1
        self.tokens["filtered"] += message.num_tokens
        self.journal.append(delivered(message, b"", entry.max_lag, head)[0])
        self._record_drop(entry.lease.lease_id, entry.prompt_index, "zero_signal", is_final=True)
        self._finish(entry.prompt_index, "filtered_zero_signal", message)

    def _evict_stale(self, version: PolicyVersion) -> None:
        """Give up the groups that are too old for a step that starts at `version` or later.

        Under `wait` no lease leads to one. It is a second check there, against a generator that sampled with older weights
        than it reported.
        """
        due = self._due[State.LEASED].keys() | self._due[State.READY].keys()
        if self.config.policy == "train" or min(due, default=version.number) >= version.number:
            return
        for entry in [e for e in self._entries.values() if e.state is not State.TAKEN and e.deadline < version.number]:
            if entry.state is State.READY:
                self.tokens["stale"] += entry.num_tokens
                self._give_up(entry, "stale")
            elif self.config.policy == "drop":
                self._cancelled.append(entry)
                self._give_up(entry, "cancelled")

    def _give_up(self, entry: GroupEntry, reason: str) -> None:
        """Give up a group for its age."""
        self.bias.settle(entry.message, is_trained=False)
        self._end_attempt(entry, reason, final_reason="always_stale", outcome=f"dropped_{reason}")

    def _end_attempt(self, entry: GroupEntry, reason: str, *, final_reason: str, outcome: str) -> None:
        """Charge a prompt with an attempt. It is issued again before new ones, or dropped after `MAX_ATTEMPTS` leases.

        Args:
            reason, outcome: if it is issued again.
            final_reason: if it is dropped.
        """
        prompt_index = entry.prompt_index
        self._attempts[prompt_index] += 1
        attempts = self._attempts[prompt_index]
        is_final = attempts >= self.max_attempts
        reason = final_reason if is_final else reason
        self._record_drop(entry.lease.lease_id, prompt_index, reason, is_final=is_final)
        self._leave(entry)
        if not is_final:
            self.outcomes[outcome] += 1
            self._issue_again(prompt_index)
            return
        if self._blamed[prompt_index] >= self.max_attempts:
            prompt_id = entry.lease.prompt.prompt_id
            self.quarantine.add(Case(prompt_id=prompt_id, reason=reason, prompt_index=prompt_index, attempts=attempts))
        self._finish(prompt_index, f"dropped_{reason}")

    def _refuse(self, message: Deliver, reason: str) -> str:
        self.tokens["failed"] += message.num_tokens
        self.fail(message.lease_id, reason)
        return reason

    def _interrupted(self, holder: str, entries: list[GroupEntry]) -> None:
        if prompt_indices := tuple(e.prompt_index for e in entries):
            self._isolated.interrupted(prompt_indices)
            self.journal.append(Interrupted(generator_id=holder, prompt_indices=prompt_indices))

    def _record_drop(self, lease_id: str, prompt_index: int, reason: str, *, is_final: bool) -> None:
        self.journal.append(Dropped(lease_id=lease_id, prompt_index=prompt_index, reason=reason, is_final=is_final))

    def _requeue(self, entry: GroupEntry) -> None:
        self._leave(entry)
        self.outcomes["requeued"] += 1
        self._issue_again(entry.prompt_index)

    def _issue_again(self, prompt_index: int) -> None:
        if self._isolated.is_isolated(prompt_index):
            self.prompts.isolate(prompt_index)
        else:
            self.prompts.give_back(prompt_index)

    def _finish(self, prompt_index: int, outcome: str, message: Deliver | None = None) -> None:
        self.outcomes[outcome] += 1
        for counts in (self._attempts, self._blamed, self._ended):
            counts.pop(prompt_index, None)
        self._isolated.clear(prompt_index)
        self.prompts.done(prompt_index, rewards_of(message) if message is not None else ())


def group_seed(seed: int, prompt_index: int, attempt: int) -> int:
    """Return the sampling seed of a group, below 2^48: a function of the run's seed, prompt index and attempt.

    It applies splitmix64's finalizer, so that neighbouring groups get unrelated streams.
    """
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + prompt_index * 0xD1B54A32D192ED03 + attempt * 0x8CB92BA72F3D8DD7 + 1) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) >> 16
