"""Faulty variants of the product's classes, each a mistake that the field has made. The simulation must find every one.

A simulator that finds no planted bug proves nothing; so each promise has a mutant that breaks it. A mutant is a line of
the product that reads otherwise for as long as a `with` block, or stands in the place of one of its functions and is given
that function first.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from asyncgrpo.buffer.buffer import Buffer, GroupEntry
from asyncgrpo.generators.rollout import GroupInFlight, Launched
from asyncgrpo.journal.history import BatchIssued, Committed, JournalRecord
from asyncgrpo.journal.log import Journal
from asyncgrpo.types import Lease
from asyncgrpo.wire.rollouts import Deliver
from tests.mutants import Mutant
from tests.mutants import planted as planted_in_text
from tests.simulation.faults import Outage

Change = Mutant | tuple[Any, str, Callable[[Any], Any]]
"""A line that reads otherwise; or of what, which attribute, and a function that makes what it becomes of what it is."""
MUTANTS: dict[str, list[Change]] = {}
SHOWN_UNDER: dict[str, dict[str, Any]] = {
    "raised_whatever_it_does": {"max_lag": "auto"},
    "given_back_is_charged": {"outages": (Outage(0.0, 60.0, ""),)},
}
"""Settings of the run under which a mutant shows, where few seeds have them."""


FOUND_BY: dict[str, int] = {}
"""A seed that found each mutant when this was written. It is tried first: the product may have changed since."""


def mutant(owner: Any, attribute: str, found_by: int) -> Callable[[Callable], Callable]:
    """Call the decorated function with the one that it replaces, and then with its arguments."""

    def plant(wrong: Callable) -> Callable:
        def made(right: Callable) -> Callable:
            return lambda *arguments, **named: wrong(right, *arguments, **named)

        MUTANTS[wrong.__name__], FOUND_BY[wrong.__name__] = [(owner, attribute, made)], found_by
        return wrong

    return plant


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The product with one mistake in it."""
    with ExitStack() as patches:
        for change in MUTANTS[name]:
            if isinstance(change, Mutant):
                patches.enter_context(planted_in_text(change))
            else:
                owner, attribute, make = change
                patches.enter_context(mock.patch.object(owner, attribute, make(getattr(owner, attribute))))
        yield


# -- lines that read otherwise ------------------------------------------------------------------------------------------

IN_TEXT = """
# the buffer, and the order of its prompts
ack_before_keep 12 buffer.buffer:Buffer.accept
    return "no_such_lease" -> return None
slot_leak_on_failure 5 buffer.buffer:Buffer.fail
    if entry is None: -> if entry is None or not self.outcomes["requeued"] % 2:
lag_from_newest_token 243 buffer.buffer:Buffer._arrive
    message.versions[0] -> message.versions[-1]
cancelled_lease_accepted 12 buffer.buffer:Buffer.accept
    if entry is None or entry.lease.lease_id != message.lease_id: -> if entry is None:
requeue_forgets_attempt 5 buffer.buffer:Buffer._leave
    entry.lease.attempt + 1 -> entry.lease.attempt
released_lease_delivers 4 buffer.buffer:Buffer.release
    self._requeue(entry) -> self._requeue(entry); self._ended[entry.prompt_index] -= 1
silent_one_delivers 0 buffer.buffer:Buffer._free
    self._requeue(entry) -> self._requeue(entry); self._ended[entry.prompt_index] -= 1
stale_dropped_in_silence 4 buffer.buffer:Buffer._give_up
    f"dropped_{reason}" -> "silence"
batch_by_age 46 buffer.buffer:Buffer.take
    batch.sort(key=lambda e: e.prompt_index) -> pass
slots_of_the_largest_bound 1 buffer.buffer:Buffer._has_slot
    (self.max_lag - behind + 1) * self.config.prompts_per_step -> self.config.num_slots
slots_whatever_is_served 1 buffer.buffer:Buffer._has_slot
    self.max_lag - behind + 1 -> self.max_lag + 1
raised_whatever_it_does 7 buffer.admission:AutoLag.step_ended
    self._shares.append(shares[oldest] if math.isfinite(shares[oldest]) else 0.0) -> self._shares.append(1.0)
step_trains_all 0 buffer.buffer:Buffer.trained
    if e.state is State.TAKEN -> if e.state is not State.LEASED
no_fencing 6 buffer.service:BufferService._note_serving
    session is not None and session.peer == peer -> session is not None
given_back_is_charged 8 buffer.buffer:Buffer.give_back
    self._requeue(entry) -> self.fail(lease_id, "unscored")
behind_counts_as_current 1 buffer.buffer:Buffer.lease
    serves = serves or self.version -> serves = self.version
fewer_than_a_batch 15 buffer.admission:JustInTime.wanted
    math.ceil(min(self._target, slots)) -> self._per_step - 1
order_decided_anew 175 data.order:Curriculum._read
    data = path.read_bytes() -> self._must_be_there = False; return
recovered_is_issued_too 9 buffer.buffer:Buffer.restore
    self.prompts.claim(message.prompt_index) -> pass
recovered_under_the_bound_of_now 10 buffer.recovery:bound_of
    return max_lag if start.max_lag_is_auto or is_its_own else min(max_lag, start.max_lag) -> return start.max_lag
bound_not_written 10 buffer.buffer:Buffer.step_ended
    self.journal.append(BoundChanged(version=version, max_lag=after)) -> pass
ack_before_durable 10 buffer.service:BufferService._acknowledge
    not self._journal.is_durable(position) -> False
cursor_at_issue 1 data.prompts:PromptSource.state
    frontier=self._frontier -> frontier=max(self._next, self._frontier)
no_check_at_take 49 buffer.buffer:Buffer._evict_stale
    self.config.policy == "train" or -> True or
no_check_at_take 49 buffer.admission:deadlines_are_kept
    return False -> return True
no_lease_expiry 7 buffer.buffer:Buffer.expire
    e.leased_at_s + e.limit_s < now_s -> False
aborted_in_silence 4 buffer.buffer:Buffer.cancelled
    return cancelled -> return []
endless_poison 7 buffer.group_health:IsolatedPrompts.interrupted
    self._ends.update(prompt_indices) -> pass
quarantine_forgotten 6 buffer.group_health:Quarantine.__contains__
    prompt_id in self.cases -> False
groups_of_lost_weights_kept 0 buffer.recovery:judge
    not all(is_on(path, version) for version in one.record.versions) -> False
bound_starts_anew 48 buffer.recovery:reopen
    bound_in_force(history, run_started.parent) -> None
evicted_without_refill 4 buffer.buffer:Buffer._end_attempt
    self._issue_again(prompt_index) -> pass
stale_for_ever 310 buffer.buffer:Buffer._end_attempt
    attempts >= self.max_attempts -> attempts >= self.max_attempts and final_reason != "always_stale"
pause_is_for_the_learner 9 buffer.service:BufferService._grant
    current is None or self._steer.is_paused -> current is None
leases_while_blocked 13 buffer.service:BufferService._reply_to_take
    self._batch is not None and self._journal.is_blocked is None -> self._batch is not None
evaluation_of_another_start 155 buffer.evaluation:Evaluations._lease
    f"eval.{self.lineage}.{step}.{index}" -> f"eval.0.{step}.{index}"
bound_of_now 10 buffer.buffer:Buffer._arrive
    entry.ready_at_s = message, payload, now_s -> entry.max_lag = message, payload, self.max_lag
# generators and the learner
version_at_completion 4 engines.base:PendingCompletion.complete
    zip(self._starts, ends, strict=False) -> [((version, 0), length) for version, _ in self._starts[-1:]]
unbounded_resend 1 generators.service:GeneratorService._send_heartbeats
    started - held.sent_s > liveness.RESEND_AFTER_S -> True
granted_twice_worked_twice 3 generators.service:GeneratorService._handle
    lease.lease_id not in self._working and lease.lease_id not in self._unacknowledged -> True
version_restarts 1 learner.service:LearnerService.resume
    PolicyVersion(self.version.lineage, state.step) -> PolicyVersion(self.version.lineage, 0)
evaluation_asked_for_once 0 learner.ranks:Inbox.request_eval
    self._evaluate = step -> pass
fire_and_forget 1 generators.service:GeneratorService._send_serving
    await self._client.send(message) -> self._unacknowledged.clear(); await self._client.send(message)
checkpoint_names_no_step 0 learner.service:LearnerService._checkpoint
    step=self.step -> step=max(0, self.step - 1)
outage_charges_prompts 3 rewards.breaker:Breaker._begin_check
    self._check is None -> False
outage_charges_prompts 3 rewards.breaker:Breaker.works
    if self._streak: -> if False:
# the journal
torn_end_stays 0 journal.history:repair
    segment.torn is not None -> False
snapshot_before_sync 46 journal.log:Journal.sync
    self.is_blocked is None and self._is_dirty -> False
taken_is_trained 12 journal.history:read_rest
    is_on(path, PolicyVersion(version.lineage, record.step)) -> True
retired_too_early 9 journal.log:Journal._note_settled
    self._with_bodies - set(self._unsettled.values()) - {self._number} -> self._with_bodies - {self._number}
inherited_without_sync 56 journal.log:Journal._begin_segment
    self._disk.sync_file(self._inherited) -> pass
retired_without_sync 1 journal.log:_remove_bodies
    disk.sync(descriptor) -> pass
"""
"""Under each mistake, its seed and its place what reads otherwise there: `tests/mutants.py`."""

lines = [line.strip() for line in IN_TEXT.strip().splitlines() if not line.startswith("#")]
for head, change in zip(lines[::2], lines[1::2], strict=True):
    name, seed, place = head.split()
    FOUND_BY[name] = int(seed)
    MUTANTS.setdefault(name, []).append(Mutant(place, *change.split(" -> "), tests=""))

# -- functions in the place of others ------------------------------------------------------------------------------------


@mutant(Buffer, "accept", found_by=4)
def forget_dedup(accept, self: Buffer, message: Deliver, payload: bytes, *rest: Any) -> str | None:
    refusal = accept(self, message, payload, *rest)
    if refusal != "duplicate" or message.group_id in self._entries:
        return refusal
    same = {name: getattr(message, name) for name in ("lease_id", "group_id", "attempt", "prompt_index", "prompt")}
    size, sampling = self._group_size, self.sampling
    lease = Lease(**same, purpose="train", num_completions=size, sampling=sampling, seed=0)
    oldest = min(span.version for rollout in message.rollouts for span in rollout.spans)
    entry = GroupEntry(lease, "", 0.0, oldest, self.max_lag)
    self._enter(entry)
    self._arrive(entry, message, payload)
    self.outcomes["leased"] += 1
    return None


@mutant(GroupInFlight, "_decided", found_by=8)
async def first_finished(decided, self: GroupInFlight) -> list[Launched]:
    whole = asyncio.ensure_future(decided(self))
    while not whole.done():
        done = [one for one in self._launched if one.score is not None and one.score.failure is None]
        if len(done) >= self._min_completions and all(one.score is not None for one in self._baseline):
            whole.cancel()
            return done
        await asyncio.sleep(0.01)
    return whole.result()


@mutant(Journal, "append", found_by=17)
def manifest_after_step(append, self: Journal, record: JournalRecord, body: Any = ()) -> None:
    held = self.__dict__.setdefault("held", [])
    if isinstance(record, BatchIssued):
        held.append(record)
        return
    while isinstance(record, Committed) and held:
        append(self, held.pop(0))
    append(self, record, body)


@mutant(Journal, "_begin_again", found_by=10)
def failed_sync_forgotten(begin_again, self: Journal) -> None:
    self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
    self._disk._paths[self._descriptor] = self.path  # type: ignore[attr-defined]
    self._num_written = len(self._waiting)
    self._sync()
