"""Which groups may be generated, which are ready, and which are trained next. No sockets, no threads, no clock.

The buffer owns the prompt order. A prompt becomes a *lease* (permission to generate one group), comes back as a *group*,
is *taken* into a batch, and is *done* once the weights trained on it are published. Each transition is one method; every
way out is counted in `outcomes`, whatever the policy (`policies.py`), so that at any time

    leased + recovered = leased now + ready now + taken now + trained + filtered_zero_signal + dropped_* + requeued,

and what it keeps or drops is said to the journal at once. (A prompt in quarantine counts as leased and dropped in one
move.) The tokens of all groups that came, those of completions left out of them included, balance in the same way:

    generated + recovered = trained + masked + filtered + stale + failed + aborted + duplicate + unusable + in flight.

Time enters as an argument, chance not at all: the same calls give the same completions.
"""

from collections import Counter
from collections.abc import Callable

from asyncgrpo.buffer.admission import POLICIES
from asyncgrpo.buffer.group_health import (
    BLAMED,
    CUT_AT,
    FILE,
    POISON,
    BiasMonitor,
    Case,
    Deadlines,
    IsolatedPrompts,
    Past,
    Quarantine,
)
from asyncgrpo.buffer.groups import Entry, State, WithoutSignal, group_seed, zero_signal
from asyncgrpo.config.schema import AlgorithmConfig, BufferConfig
from asyncgrpo.data.prompts import PromptSource, PromptState
from asyncgrpo.errors import DataError
from asyncgrpo.journal.format import BatchIssued, Dropped, Interrupted, delivered
from asyncgrpo.journal.log import InMemory, Ledger
from asyncgrpo.types import Lease, PolicyVersion, Prompt, Sampling
from asyncgrpo.wire.rollouts import Deliver


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
        quarantine: Quarantine | None = None,
    ) -> None:
        """
        Args:
            journal: told of every group that is kept, handed over or dropped; None: nothing is written down.
            quarantine: prompts not to be leased; None: none so far, and nothing is written down.
        """
        self.journal: Ledger = journal or InMemory()
        self._config = config
        self._policy = POLICIES[config.policy](config)
        self._group_size, self._with_greedy = algorithm.group_size, algorithm.advantage == "remax"
        self._min_completions = algorithm.min_completions or algorithm.group_size
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
        self._blamed: Counter[int] = Counter()  # those of them for which the prompt is to blame
        self._deadlines = Deadlines(config.straggler_factor, config.lease_timeout_s)
        self._isolated = IsolatedPrompts()
        self._quarantine = quarantine or Quarantine()
        self._ended: Counter[int] = Counter()  # leases that are over, failed or not: a name is granted once
        self.version: PolicyVersion | None = None
        self.draining = False
        self.outcomes: Counter[str] = Counter()
        self.filtered: Counter[str] = Counter()
        """What `filtered_zero_signal` is made of, by the names of `zero_signal`."""
        self.without_signal = WithoutSignal()
        self.tokens: Counter[str] = Counter()
        self.discarded: Counter[str] = Counter()
        """Completions that are in no group, by the names of `types.Discarded`."""
        self.bias = BiasMonitor(config.bias_threshold)
        self._cancelled: list[Entry] = []

    # -- leases ----------------------------------------------------------------------------------------------------

    def lease(self, holder: str, now_s: float) -> Lease | None:
        """A lease for `holder`, or None: no slot is free, no prompt left, nothing published, the disk refuses, or we drain."""
        if self.draining or self.version is None or len(self._entries) >= self._config.num_slots:
            return None
        issued = self._issue(holder)
        if issued is None:
            return None
        prompt_index, prompt = issued
        attempt = self._ended[prompt_index]
        group_id = f"{self._lineage}.{prompt_index}"
        limit_s = self._deadlines.seconds(is_last=self._attempts[prompt_index] + 1 >= self._config.max_attempts)
        lease = Lease(
            lease_id=f"{group_id}.{attempt}",
            group_id=group_id,
            attempt=attempt,
            prompt_index=prompt_index,
            purpose="train",
            prompt=prompt,
            num_completions=self._group_size,
            sampling=self._sampling,
            seed=group_seed(self._seed, prompt_index, attempt),
            with_greedy=self._with_greedy,
            min_completions=self._min_completions,
            cut_after_s=CUT_AT * limit_s,
        )
        self._enter(Entry(prompt_index, prompt, attempt, lease, holder, now_s, self.version, limit_s=limit_s))
        self._deadlines.begin(lease.lease_id, now_s + limit_s)
        self.outcomes["leased"] += 1
        return lease

    def lease_of(self, lease_id: str) -> Lease | None:
        """The lease of this name, if its group is under way."""
        entry = self._leased(lease_id)
        return entry.lease if entry is not None else None

    def _issue(self, holder: str) -> tuple[int, Prompt] | None:
        """What `holder` may work on: a prompt like any other, or a suspect alone.

        Raises:
            DataError: no prompt is left that may be leased, in this epoch or any other.
        """
        prompts, passed_over = self._prompts, 0
        may_join, may_be_alone = self._isolated.may_lease(holder, self._held[holder], is_waiting=prompts.has_isolated)
        while self.journal.is_blocked is None:  # else what would come of it could not be kept
            joins = may_join and self._policy.admit(len(self._entries), prompts.num_isolated)
            issued = prompts.next_isolated() if may_be_alone else prompts.next() if joins else None
            if issued is None:
                return None
            prompt_index, prompt = issued
            if prompt.prompt_id in self._quarantine:
                self.outcomes["leased"] += 1
                lease_id = f"{self._lineage}.{prompt_index}.{self._ended[prompt_index]}"
                self.journal.append(
                    Dropped(lease_id=lease_id, prompt_index=prompt_index, reason="quarantined", is_final=True)
                )
                self._finish(prompt_index, "dropped_quarantined")
                passed_over += 1
                if passed_over > prompts.num_prompts:
                    raise DataError(
                        f"every prompt of data.train is in quarantine ({FILE} in the run's folder says why)"
                    )
            elif may_be_alone:
                self._isolated.leased(prompt_index)
                return issued
            elif self._isolated.is_isolated(prompt_index):  # since an earlier start
                prompts.isolate(prompt_index)
            else:
                return issued
        return None

    def held_by(self, holder: str) -> int:
        """Leases that `holder` works on."""
        return self._held[holder]

    def fail(self, lease_id: str, reason: str) -> None:
        """A lease came to nothing: its prompt is issued again, before new ones, or dropped after `max_attempts`."""
        entry = self._leased(lease_id)
        if entry is None:
            return
        if reason == "lease_timeout":
            self._deadlines.took(entry.limit_s)
            assert self.version is not None
            self._settle(entry, self.version.number, masked=None)
        self._attempts[entry.prompt_index] += 1
        self._blamed[entry.prompt_index] += reason in BLAMED
        is_final = self._attempts[entry.prompt_index] >= self._config.max_attempts
        self._drop(entry, reason, is_final=is_final)
        if not is_final:
            self._requeue(entry)
            return
        if self._blamed[entry.prompt_index] >= self._config.max_attempts:
            attempts = self._attempts[entry.prompt_index]
            case = Case(
                prompt_id=entry.prompt.prompt_id, reason=reason, prompt_index=entry.prompt_index, attempts=attempts
            )
            self._quarantine.add(case)
        self._leave(entry)
        self._finish(entry.prompt_index, f"dropped_{reason}")

    def give_back(self, lease_id: str) -> None:
        """A lease came to nothing through no fault of its prompt, which is issued again at no cost."""
        entry = self._leased(lease_id)
        if entry is not None:
            self._requeue(entry)

    def release(self, holder: str) -> list[str]:
        """`holder` is gone: its prompts are issued again, under other leases. Returns the ids of those that are over.

        It costs the prompts nothing, but for one that was alone there because it is suspected of just this.

        What it was at may still arrive, older than the lease that is out by then: it would come too late for the rule
        of lag (`staleness.py`), which counted that lease by its own version. So it answers nothing any more.
        """
        lost = [e for e in self._entries.values() if e.state is State.LEASED and e.holder == holder]
        if lost:
            prompt_indices = tuple(e.prompt_index for e in lost)
            self._isolated.in_flight_at_an_end(prompt_indices)
            self.journal.append(Interrupted(generator_id=holder, prompt_indices=prompt_indices))
        for entry in lost:
            if self._isolated.is_alone(entry.prompt_index):
                self.fail(entry.lease.lease_id, POISON)
            else:
                self._requeue(entry)
        self._isolated.gone(holder)
        return [e.lease.lease_id for e in lost]

    def remember(self, past: Past) -> None:
        """What prompts have behind them from earlier starts. Before the first lease. One more is always granted."""
        for counts, ours in ((past.attempts, self._attempts), (past.blamed, self._blamed)):
            ours.update(
                {prompt_index: min(count, self._config.max_attempts - 1) for prompt_index, count in counts.items()}
            )
        self._ended.update(past.attempts)  # so that they are sampled with other seeds than those that failed
        self._isolated.remember(past.interruptions)

    def expire(self, now_s: float, is_excused: Callable[[str], bool] = lambda holder: False) -> list[Entry]:
        """Leases older than their deadline fail with `lease_timeout`. Returns them, so that they can be cancelled.

        Args:
            is_excused: whether a holder is late for no fault of its prompts, which are then given back.
        """
        late = [e for e in map(self._leased, self._deadlines.passed(now_s)) if e is not None and _is_over(e, now_s)]
        for entry in late:
            if is_excused(entry.holder):
                self.give_back(entry.lease.lease_id)
            else:
                self.fail(entry.lease.lease_id, "lease_timeout")
        return late

    def cancelled(self) -> list[Entry]:
        """Leases given up since the last call because what comes of them would be too old. Their slots are free."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    # -- groups ----------------------------------------------------------------------------------------------------

    def accept(self, message: Deliver, payload: bytes | memoryview) -> str | None:
        """Take in a delivered group, once. Returns None, or the reason why it is not wanted.

        With `filter_zero_signal` a group that would teach nothing is finished here and now: its prompt is done and its
        slot is free, so that the next lease replaces it by exactly one other prompt.
        """
        num_tokens = sum(r.num_tokens for r in message.rollouts)
        left_out = message.discarded.tokens
        self.tokens["generated"] += num_tokens + left_out
        entry = self._entries.get(message.group_id)
        if self._is_done(message) or (entry is not None and entry.state is not State.LEASED):
            self.outcomes["duplicate"] += 1
            self.tokens["duplicate"] += num_tokens + left_out
            return "duplicate"
        self.tokens["aborted"] += left_out
        if entry is None or entry.lease.lease_id != message.lease_id:
            self.outcomes["refused"] += 1
            self.tokens["aborted"] += num_tokens
            return "no_such_lease"
        num_completions = sum(r.index < self._group_size for r in message.rollouts)
        num_greedy = len(message.rollouts) - num_completions
        if not self._min_completions <= num_completions <= self._group_size or num_greedy != self._with_greedy:
            self._refuse(message, "incomplete")
            return "incomplete"
        versions = [span.version for r in message.rollouts for span in r.spans]
        if not versions or any(v.lineage != self._lineage for v in versions):
            self._refuse(message, "lineage")
            return "lineage"
        self._isolated.clear(entry.prompt_index)
        self._deadlines.took(sum(message.timings.values()))
        for name in ("retried", "failed", "spare", "censored"):
            self.discarded[name] += getattr(message.discarded, name)
        rewards = [r.score.value for r in message.rollouts if r.score.value is not None]
        if self._filters and (kind := zero_signal(rewards)) is not None:
            self._filter(entry, message, kind)
            self.without_signal.add(rewards)
            return None
        if len(rewards) < 2:
            self._refuse(message, "unscored")
            return "unscored"
        self._turn(entry, State.READY)
        self.without_signal.end()
        entry.message, entry.payload = message, payload
        entry.oldest, entry.newest = min(versions), max(versions)
        self.outcomes["accepted"] += 1
        self.journal.append_group(message, payload)
        self.outcomes["accepted_short"] += num_completions < self._group_size
        return None

    def count_aborted(self, num_tokens: int) -> None:
        """Sampled for a lease of which no group comes."""
        self.tokens["generated"] += num_tokens
        self.tokens["aborted"] += num_tokens

    def restore(self, message: Deliver, payload: bytes) -> None:
        """A group that an earlier start accepted and did not train is ready. Before the first lease."""
        self._prompts.claim(message.prompt_index)
        lease = Lease(
            lease_id=message.lease_id,
            group_id=message.group_id,
            attempt=message.attempt,
            prompt_index=message.prompt_index,
            purpose="train",
            prompt=message.prompt,
            num_completions=len(message.rollouts),
            sampling=self._sampling,
            seed=0,  # it is not sampled any more
        )
        versions = [span.version for r in message.rollouts for span in r.spans]
        entry = Entry(message.prompt_index, message.prompt, message.attempt, lease, "", 0.0, min(versions))
        entry.newest = max(versions)
        entry.message, entry.payload = message, payload
        self._enter(entry)
        self._turn(entry, State.READY)
        self.outcomes["recovered"] += 1
        self.tokens["recovered"] += entry.num_tokens

    def disown(self, lease_id: str, prompt_index: int, num_tokens: int, reason: str) -> None:
        """A group that an earlier start accepted is not to be trained; its prompt, unless it is done, is issued again."""
        self.outcomes["recovered"] += 1
        self.outcomes[f"dropped_{reason}"] += 1
        self.tokens["recovered"] += num_tokens
        self.tokens["unusable"] += num_tokens
        self.journal.append(Dropped(lease_id=lease_id, prompt_index=prompt_index, reason=reason, is_final=False))

    def take(self, version: PolicyVersion) -> list[Entry] | None:
        """The batch of the step that starts at `version`: P groups, as the policy chooses; None if it must wait.

        When no prompt is left, the last batch of the run may be smaller. Groups and leases that this step, or the one
        after it, would find too old are given up and counted; admission refills each with exactly one.
        """
        self._give_up_what_is_late_for(version)
        waiting = [e for e in self._entries.values() if e.state is not State.TAKEN]
        batch = self._policy.select(waiting, version.number, self._prompts.next_prompt_index)
        if batch is None:
            return None
        for entry in batch:
            assert entry.message is not None
            self._turn(entry, State.TAKEN)
            entry.masked = self._policy.masked_tokens(entry.message, version.number)
            self._settle(entry, version.number, masked=entry.masked)
        # In prompt order, so that the same groups make the same batch whoever finished first.
        batch.sort(key=lambda e: e.prompt_index)
        lease_ids = tuple(e.lease.lease_id for e in batch)
        self.journal.append(BatchIssued(step=version.number + 1, version=version, lease_ids=lease_ids))
        self._give_up_what_is_late_for(PolicyVersion(version.lineage, version.number + 1))
        return batch

    def published(self, version: PolicyVersion) -> None:
        """Every generator serves `version`: what was taken is trained, and its slots are free."""
        assert self.version is None or version > self.version, f"{version} after {self.version}"
        self.version = version
        for entry in [e for e in self._entries.values() if e.state is State.TAKEN]:
            self._leave(entry)
            self.tokens["trained"] += entry.num_tokens - entry.masked
            self.tokens["masked"] += entry.masked
            self._finish(entry.prompt_index, "trained")
        self._give_up_what_is_late_for(version)

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

    @property
    def deadline_s(self) -> float:
        """What a lease that is granted now is given, if it is not its prompt's last."""
        return self._deadlines.seconds(is_last=False)

    @property
    def num_quarantined(self) -> int:
        """Prompts of the file that are leased no more."""
        return len(self._quarantine.cases)

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
        return message.group_id == f"{self._lineage}.{message.prompt_index}" and self._prompts.is_done(
            message.prompt_index
        )

    def _enter(self, entry: Entry) -> None:
        self._entries[entry.lease.group_id] = entry
        self._in_state[entry.state] += 1
        self._held[entry.holder] += 1

    def _turn(self, entry: Entry, state: State) -> None:
        if entry.state is State.LEASED:
            self._end_lease(entry)
        self._in_state[entry.state] -= 1
        self._in_state[state] += 1
        entry.state = state

    def _leave(self, entry: Entry) -> None:
        del self._entries[entry.lease.group_id]
        self._ended[entry.prompt_index] = entry.attempt + 1
        self._in_state[entry.state] -= 1
        if entry.state is State.LEASED:
            self._end_lease(entry)

    def _end_lease(self, entry: Entry) -> None:
        self._held[entry.holder] -= 1
        self._isolated.ended(entry.prompt_index)

    def _filter(self, entry: Entry, message: Deliver, kind: str) -> None:
        self._leave(entry)
        self.filtered[kind] += 1
        self.tokens["filtered"] += sum(r.num_tokens for r in message.rollouts)
        self.journal.append(delivered(message, b"")[0])
        self._drop(entry, "zero_signal", is_final=True)
        self._finish(entry.prompt_index, "filtered_zero_signal")

    def _give_up_what_is_late_for(self, version: PolicyVersion) -> None:
        """No step to come starts at an older version than `version`."""
        waiting = [e for e in self._entries.values() if e.state is not State.TAKEN]
        for entry in self._policy.evict(waiting, version.number):
            self.tokens["stale"] += entry.num_tokens
            self._give_up(entry, version.number, "stale")
        for entry in waiting:
            if entry.state is State.LEASED and self._policy.should_abort(entry, version.number):
                self._cancelled.append(entry)
                self._give_up(entry, version.number, "cancelled")

    def _give_up(self, entry: Entry, version: int, reason: str) -> None:
        """For its age. Its prompt is issued again, before new ones; after `max_attempts` leases it is done, counted."""
        self._settle(entry, version, masked=None)
        self._leave(entry)
        self._attempts[entry.prompt_index] += 1
        if self._attempts[entry.prompt_index] >= self._config.max_attempts:
            self._drop(entry, "always_stale", is_final=True)
            self._finish(entry.prompt_index, "dropped_always_stale")
        else:
            self._drop(entry, reason, is_final=False)
            self.outcomes[f"dropped_{reason}"] += 1
            self._issue_again(entry.prompt_index)

    def _settle(self, entry: Entry, version: int, *, masked: int | None) -> None:
        self.bias.settle(entry.prompt.source, entry.message, age=version - entry.oldest.number, masked=masked)

    def _refuse(self, message: Deliver, reason: str) -> None:
        self.tokens["failed"] += sum(r.num_tokens for r in message.rollouts)
        self.fail(message.lease_id, reason)

    def _drop(self, entry: Entry, reason: str, *, is_final: bool) -> None:
        lease_id = entry.lease.lease_id
        self.journal.append(
            Dropped(lease_id=lease_id, prompt_index=entry.prompt_index, reason=reason, is_final=is_final)
        )

    def _requeue(self, entry: Entry) -> None:
        self._leave(entry)
        self.outcomes["requeued"] += 1
        self._issue_again(entry.prompt_index)

    def _issue_again(self, prompt_index: int) -> None:
        if self._isolated.is_isolated(prompt_index):
            self._prompts.isolate(prompt_index)
        else:
            self._prompts.give_back(prompt_index)

    def _finish(self, prompt_index: int, outcome: str) -> None:
        self.outcomes[outcome] += 1
        self._attempts.pop(prompt_index, None)
        self._blamed.pop(prompt_index, None)
        self._ended.pop(prompt_index, None)
        self._isolated.clear(prompt_index)
        self._prompts.done(prompt_index)


def _is_over(entry: Entry, now_s: float) -> bool:
    return entry.leased_at_s + entry.limit_s < now_s
