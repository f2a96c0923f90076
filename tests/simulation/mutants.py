"""Faulty variants of the product's classes, each a mistake that the field has made. The simulation must find every one.

A simulator that finds no planted bug proves nothing; so each promise has a mutant that breaks it. A mutant stands in the
place of one function of the product for as long as a `with` block, and is given that function first.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec.structs import replace

from asyncgrpo.buffer import buffer as buffer_module
from asyncgrpo.buffer import recovery
from asyncgrpo.buffer.admission import AutoLag, JustInTime
from asyncgrpo.buffer.buffer import Buffer, GroupEntry, State
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.group_health import IsolatedPrompts, Quarantine
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.data.order import Curriculum
from asyncgrpo.data.prompts import PromptSource, PromptState
from asyncgrpo.engines.base import PendingCompletion
from asyncgrpo.generators import service as generator_service
from asyncgrpo.generators.rollout import GroupInFlight, Launched
from asyncgrpo.generators.service import GeneratorService
from asyncgrpo.journal import history
from asyncgrpo.journal import log as journal_module
from asyncgrpo.journal.history import BatchIssued, BoundChanged, Committed, JournalRecord
from asyncgrpo.journal.log import Journal
from asyncgrpo.learner.ranks import Inbox
from asyncgrpo.learner.service import LearnerService
from asyncgrpo.rewards.breaker import Breaker
from asyncgrpo.types import Lease, PolicyVersion
from asyncgrpo.wire import Message
from asyncgrpo.wire.rollouts import Deliver, Grant, Serving
from tests.simulation.faults import Outage

Change = tuple[Any, str, Callable[[Any], Any]]
"""Of what, which attribute, and a function that makes what it becomes of what it is."""
MUTANTS: dict[str, list[Change]] = {}
SHOWN_UNDER: dict[str, dict[str, Any]] = {
    "raised_whatever_it_does": {"max_lag": "auto"},
    "given_back_is_charged": {"outages": (Outage(0.0, 60.0, ""),)},
}
"""Settings of the run under which a mutant shows, where few seeds have them."""


def mutant(owner: Any, attribute: str) -> Callable[[Callable], Callable]:
    """Call the decorated function with the one that it replaces, and then with its arguments."""

    def plant(wrong: Callable) -> Callable:
        def made(right: Callable) -> Callable:
            return lambda *arguments, **named: wrong(right, *arguments, **named)

        MUTANTS.setdefault(wrong.__name__, []).append((owner, attribute, made))
        return wrong

    return plant


def answering(answer: Any, right: Any) -> Callable:
    return lambda *_, **__: answer


def during(what: str, other: Callable[[Any], Any], right: Callable) -> Callable:
    """A method that runs while an attribute below its object is what `other` makes of it."""
    holder, _, name = what.rpartition(".")

    def wrong(self: Any, *arguments: Any, **named: Any) -> Any:
        place = getattr(self, holder) if holder else self
        with mock.patch.object(place, name, other(getattr(place, name))):
            return right(self, *arguments, **named)

    return wrong


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The product with one mistake in it."""
    with ExitStack() as patches:
        for owner, attribute, make in MUTANTS[name]:
            patches.enter_context(mock.patch.object(owner, attribute, make(getattr(owner, attribute))))
        yield


# -- what does nothing, or always answers the same ---------------------------------------------------------------------

for name, owner, attribute, answer in (
    ("no_check_at_take", Buffer, "_evict_stale", True),  # only admission bounds the lag: a batch is taken as it comes
    ("no_check_at_take", buffer_module, "deadlines_are_kept", True),
    ("no_lease_expiry", Buffer, "expire", []),  # what was leased and never came is waited for
    ("aborted_in_silence", Buffer, "cancelled", []),  # a lease is given up, and its generator is not notified
    ("endless_poison", IsolatedPrompts, "interrupted", None),  # the end of a generator costs its prompts nothing
    ("quarantine_forgotten", Quarantine, "__contains__", False),  # what was dropped for what it does comes again
    ("torn_end_stays", recovery, "repair", None),  # the last write of a killed process is not cut off
    ("snapshot_before_sync", Journal, "sync", True),  # a checkpoint may hold a step whose manifest is not on the disk
    ("groups_of_lost_weights_kept", recovery, "is_on", True),  # a resume trains groups of weights that are gone
    ("taken_is_trained", history, "is_on", True),  # what was handed over before the crash, whatever the checkpoint says
    ("bound_starts_anew", recovery, "bound_in_force", None),  # a resume forgets the bound in force
):
    MUTANTS.setdefault(name, []).append((owner, attribute, partial(answering, answer)))


# -- what runs while something of its object is another ----------------------------------------------------------------


class _NeverBlocked:
    is_blocked = None

    def __init__(self, journal: Any) -> None:
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._journal, name)


for name, owner, attribute, what, other in (
    ("evicted_without_refill", Buffer, "_give_up", "prompts.give_back", lambda right: lambda prompt_index: None),
    ("stale_for_ever", Buffer, "_give_up", "max_attempts", lambda right: 10**6),
    ("pause_is_for_the_learner", BufferService, "_grant", "_steer", lambda steer: replace(steer, is_paused=False)),
    ("leases_while_blocked", BufferService, "_reply_to_take", "_journal", _NeverBlocked),
    ("evaluation_of_another_start", Evaluations, "_lease", "lineage", lambda lineage: 0),
    ("checkpoint_names_no_step", LearnerService, "_checkpoint", "version",
     lambda version: PolicyVersion(version.lineage, max(0, version.number - 1))),
    ("retired_too_early", Journal, "_retire", "_unsettled", lambda unsettled: {}),
    ("inherited_without_sync", Journal, "_begin_segment", "_inherited", lambda path: None),
):  # fmt: skip
    MUTANTS[name] = [(owner, attribute, partial(during, what, other))]


# -- the buffer --------------------------------------------------------------------------------------------------------


@mutant(Buffer, "accept")
def ack_before_keep(accept, self: Buffer, *delivery: Any) -> str | None:
    refusal = accept(self, *delivery)
    return None if refusal == "no_such_lease" else refusal


@mutant(Buffer, "accept")
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


@mutant(Buffer, "fail")
def slot_leak_on_failure(fail, self: Buffer, lease_id: str, reason: str) -> None:
    if self._leased(lease_id) is None or self.outcomes["requeued"] % 2:
        fail(self, lease_id, reason)


@mutant(Buffer, "accept")
def lag_from_newest_token(accept, self: Buffer, message: Deliver, *rest: Any) -> str | None:
    refusal = accept(self, message, *rest)
    if refusal is None and (entry := self._entries.get(message.group_id)) is not None:
        entry.oldest = max(span.version for rollout in message.rollouts for span in rollout.spans)
    return refusal


@mutant(Buffer, "accept")
def cancelled_lease_accepted(accept, self: Buffer, message: Deliver, *rest: Any) -> str | None:
    entry = self._entries.get(message.group_id)
    if entry is not None and entry.state is State.LEASED:
        entry.lease = replace(entry.lease, lease_id=message.lease_id, attempt=message.attempt)
    return accept(self, message, *rest)


@mutant(Buffer, "fail")
def requeue_forgets_attempt(fail, self: Buffer, lease_id: str, reason: str) -> None:
    if (entry := self._leased(lease_id)) is not None:
        self._requeue(entry)
        self._ended[entry.prompt_index] = entry.lease.attempt


@mutant(Buffer, "release")
def released_lease_delivers(release, self: Buffer, holder: str) -> list[str]:
    held = [e for e in self._entries.values() if e.state is State.LEASED and e.holder == holder]
    released = release(self, holder)
    self._ended.update({e.prompt_index: e.lease.attempt - self._ended[e.prompt_index] for e in held})
    return released


@mutant(Buffer, "free_leases_of")
def silent_one_delivers(free_leases_of, self: Buffer, holder: str, **why: bool) -> list[str]:
    freed = free_leases_of(self, holder, **why)
    self._ended.subtract(int(lease_id.split(".")[1]) for lease_id in freed)
    return freed


@mutant(Buffer, "_give_up")
def stale_dropped_in_silence(give_up, self: Buffer, entry: GroupEntry, reason: str) -> None:
    before = self.outcomes[f"dropped_{reason}"]
    give_up(self, entry, reason)
    self.outcomes[f"dropped_{reason}"] = before


class _Unsorted(list):
    def sort(self, **_: Any) -> None:
        """Stays as it is."""


@mutant(Buffer, "_choose")
def batch_by_age(choose, self: Buffer, version: PolicyVersion) -> list:
    return _Unsorted(choose(self, version))


@mutant(Buffer, "step_ended")
def bound_of_now(step_ended, self: Buffer, *arguments: Any) -> None:
    step_ended(self, *arguments)
    for entry in self._entries.values():
        entry.max_lag = self.max_lag


@mutant(Buffer, "_has_slot")
def slots_of_the_largest_bound(has_slot, self: Buffer, behind: int = 0) -> bool:
    return len(self._entries) < self.config.num_slots


@mutant(AutoLag, "step_ended")
def raised_whatever_it_does(step_ended, self: AutoLag, version: int, shares: Mapping[int, float], waited: float) -> int:
    return step_ended(self, version, dict.fromkeys(shares, 1.0), waited)


@mutant(Buffer, "trained")
def step_trains_all(trained, self: Buffer, version: PolicyVersion) -> None:
    for entry in self._entries.values():
        if entry.state is State.READY:
            self._set_state(entry, State.TAKEN)
    trained(self, version)


@mutant(PromptSource, "state")
def cursor_at_issue(state, self: PromptSource) -> PromptState:
    honest = state(self)
    return replace(honest, frontier=max(self._next, honest.frontier), done_beyond=())


@mutant(Curriculum, "_read")
def order_decided_anew(read, self: Curriculum, path: Path) -> None:
    self._must_be_there = False


@mutant(BufferService, "_handle")
def no_fencing(handle, self: BufferService, peer: str, message: Message, *rest: Any) -> None:
    if isinstance(message, Serving) and message.generator_id in self._sessions:
        self._sessions[message.generator_id].version = message.version
    else:
        handle(self, peer, message, *rest)


@mutant(Buffer, "give_back")
def given_back_is_charged(give_back, self: Buffer, lease_id: str) -> None:
    self.fail(lease_id, "unscored")


@mutant(Buffer, "lease")
def behind_counts_as_current(lease, self: Buffer, holder: str, now_s: float, serves: Any = None) -> Lease | None:
    return lease(self, holder, now_s)


@mutant(Buffer, "_has_slot")
def slots_whatever_is_served(has_slot, self: Buffer, behind: int = 0) -> bool:
    return has_slot(self)


@mutant(JustInTime, "wanted")
def fewer_than_a_batch(wanted, self: JustInTime, slots: int) -> int:
    return self._per_step - 1


# -- the generator -----------------------------------------------------------------------------------------------------


@mutant(PendingCompletion, "complete")
def version_at_completion(complete, self: PendingCompletion, *arguments: Any) -> None:
    self._starts = [(self._starts[-1][0], 0)] if self._starts else []
    complete(self, *arguments)


@mutant(GroupInFlight, "_decided")
async def first_finished(decided, self: GroupInFlight) -> list[Launched]:
    whole = asyncio.ensure_future(decided(self))
    while not whole.done():
        done = [one for one in self._launched if one.score is not None and one.score.failure is None]
        if len(done) >= self._min_completions and all(one.score is not None for one in self._baseline):
            whole.cancel()
            return done
        await asyncio.sleep(0.01)
    return whole.result()


class _Overdue(generator_service.Unacknowledged):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, float("-inf") if name == "sent_s" else value)


@mutant(generator_service, "Unacknowledged")
def unbounded_resend(right, *arguments: Any, **named: Any) -> _Overdue:
    return _Overdue(*arguments, **named)


@mutant(GeneratorService, "_send_serving")
async def fire_and_forget(send, self: GeneratorService, *arguments: Any) -> None:
    self._unacknowledged.clear()
    await send(self, *arguments)


@mutant(GeneratorService, "_handle")
async def granted_twice_worked_twice(handle, self: GeneratorService, message: Message) -> None:
    if isinstance(message, Grant):
        self._working.pop(message.lease.lease_id, None)
    await handle(self, message)


async def _trust(self: Breaker) -> bool:
    return True


MUTANTS["outage_charges_prompts"] = [  # a group that no call of a reward could score is let go, also when none works
    (Breaker, "_begin_check", lambda right: lambda self: None),
    (Breaker, "works", lambda right: _trust),
]


# -- the learner -------------------------------------------------------------------------------------------------------


@mutant(LearnerService, "resume")
def version_restarts(resume, self: LearnerService, checkpoint: Any) -> None:
    resume(self, checkpoint)
    self.version = PolicyVersion(self.version.lineage, 0)


# -- the journal, and what reads it ------------------------------------------------------------------------------------


@mutant(BufferService, "_acknowledge")
def ack_before_durable(acknowledge, self: BufferService) -> None:
    for _, peer, ack in self._unacknowledged.values():
        self._server.send(peer, ack)
    self._unacknowledged.clear()


@mutant(Journal, "append")
def manifest_after_step(append, self: Journal, record: JournalRecord, body: Any = ()) -> None:
    held = self.__dict__.setdefault("held", [])
    if isinstance(record, BatchIssued):
        held.append(record)
        return
    while isinstance(record, Committed) and held:
        append(self, held.pop(0))
    append(self, record, body)


@mutant(journal_module, "_remove_bodies")
def retired_without_sync(remove_bodies, path: Path, disk: Any) -> None:
    sync = disk.sync
    disk.sync = lambda descriptor: None
    try:
        remove_bodies(path, disk)
    finally:
        disk.sync = sync


@mutant(Journal, "_begin_again")
def failed_sync_forgotten(begin_again, self: Journal) -> None:
    self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
    self._disk._paths[self._descriptor] = self.path  # type: ignore[attr-defined]
    self._num_written = len(self._waiting)
    self._sync()


@mutant(Journal, "append")
def bound_not_written(append, self: Journal, record: JournalRecord, body: Any = ()) -> None:
    if not isinstance(record, BoundChanged):
        append(self, record, body)


@mutant(recovery, "bound_of")
def recovered_under_the_bound_of_now(bound_of, lease_id: str, max_lag: Any, start: Any) -> int:
    return start.max_lag


@mutant(Buffer, "restore")
def recovered_is_issued_too(restore, self: Buffer, *group: Any) -> None:
    restore(self, *group)
    self.prompts._claimed.clear()


@mutant(Inbox, "request_eval")
def evaluation_asked_for_once(request_eval, self: Inbox, step: int) -> None:
    request_eval(self, step)
    self._evaluate = None
