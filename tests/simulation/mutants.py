"""Faulty variants of the product's classes, each a mistake that the field has made. The simulation must find every one.

A simulator that finds no planted bug proves nothing; so each promise has a mutant that breaks it. They are put in place
for as long as a `with` block, and name where the mistake was seen (docs/simulation.md has the table).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from asyncgrpo.buffer import admission
from asyncgrpo.buffer.admission import AutoLag, Mask, Policy, Wait, Window
from asyncgrpo.buffer.buffer import Buffer, GroupEntry, State
from asyncgrpo.buffer.group_health import IsolatedPrompts, Quarantine
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.data.order import Curriculum
from asyncgrpo.data.prompts import PromptSource, PromptState
from asyncgrpo.engines.base import PendingCompletion
from asyncgrpo.generators import service as generator_service
from asyncgrpo.generators.rollout import GroupInFlight, Launched
from asyncgrpo.generators.service import GeneratorService
from asyncgrpo.learner.service import LearnerService
from asyncgrpo.rewards.breaker import Breaker
from asyncgrpo.types import Lease, PolicyVersion
from asyncgrpo.wire import Message
from asyncgrpo.wire.rollouts import Deliver, Grant, Serving
from tests.simulation.disk_mutants import DISK_MUTANTS, Change
from tests.simulation.faults import Outage

MUTANTS: dict[str, Callable[[], list[Change]]] = dict(DISK_MUTANTS)
SHOWN_UNDER: dict[str, dict[str, Any]] = {
    "lag_from_newest_token": {"admission": "eager"},
    "raised_whatever_it_does": {"max_lag": "auto"},
    "window_counts_who_overtook": {"max_lag": "auto", "policy": "window"},
    "given_back_is_charged": {"outages": (Outage(0.0, 60.0, ""),)},
}
"""Settings of the run under which a mutant shows, where few seeds have them."""


def mutant(make: Callable[[], list[Change]]) -> Callable[[], list[Change]]:
    MUTANTS[make.__name__] = make
    return make


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The product with one mistake in it."""
    changes = MUTANTS[name]()
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in changes]
    for owner, attribute, value in changes:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)


# -- the buffer --------------------------------------------------------------------------------------------------------


@mutant
def ack_before_keep() -> list[Change]:
    """A group is acknowledged although the buffer does not keep it (its lease had ended)."""
    accept = Buffer.accept

    def lax(self: Buffer, message: Deliver, payload: bytes, *rest: Any) -> str | None:
        refusal = accept(self, message, payload, *rest)
        return None if refusal == "no_such_lease" else refusal

    return [(Buffer, "accept", lax)]


@mutant
def forget_dedup() -> list[Change]:
    """A group that comes twice is kept twice."""
    accept = Buffer.accept

    def greedy(self: Buffer, message: Deliver, payload: bytes, *rest: Any) -> str | None:
        refusal = accept(self, message, payload, *rest)
        if refusal != "duplicate" or message.group_id in self._entries:
            return refusal
        lease = Lease(
            lease_id=message.lease_id,
            group_id=message.group_id,
            attempt=message.attempt,
            prompt_index=message.prompt_index,
            purpose="train",
            prompt=message.prompt,
            num_completions=self._group_size,
            sampling=self._sampling,
            seed=0,
        )
        oldest = min(span.version for rollout in message.rollouts for span in rollout.spans)
        max_lag = self.max_lag
        entry = GroupEntry(message.prompt_index, message.prompt, message.attempt, lease, "", 0.0, oldest, max_lag)
        self._enter(entry)
        self._set_state(entry, State.READY)
        entry.arrived(message, payload)
        self.outcomes["leased"] += 1
        return None

    return [(Buffer, "accept", greedy)]


@mutant
def slot_leak_on_failure() -> list[Change]:
    """The slot of a lease that failed is never free again."""
    fail = Buffer.fail

    def leaky(self: Buffer, lease_id: str, reason: str) -> None:
        if self._leased(lease_id) is None or self.outcomes["requeued"] % 2:
            fail(self, lease_id, reason)

    return [(Buffer, "fail", leaky)]


@mutant
def lag_from_newest_token() -> list[Change]:
    """A group's age is counted from its last token."""
    accept = Buffer.accept

    def young(self: Buffer, message: Deliver, payload: bytes, *rest: Any) -> str | None:
        refusal = accept(self, message, payload, *rest)
        if refusal is None and (entry := self._entries.get(message.group_id)) is not None:
            entry.oldest = max(span.version for rollout in message.rollouts for span in rollout.spans)
        return refusal

    return [(Buffer, "accept", young)]


@mutant
def no_check_at_take() -> list[Change]:
    """Only admission bounds the lag: a batch is taken as it comes."""
    return [
        (Policy, "evict", lambda self, waiting, version: []),
        (admission, "deadlines_are_kept", lambda *arguments: True),
    ]


@mutant
def cancelled_lease_accepted() -> list[Change]:
    """A result is kept although its lease was cancelled, because another of the same group is out."""
    accept = Buffer.accept

    def forgiving(self: Buffer, message: Deliver, payload: bytes, *rest: Any) -> str | None:
        entry = self._entries.get(message.group_id)
        if entry is not None and entry.state is State.LEASED:
            entry.lease = type(entry.lease)(**{f: getattr(entry.lease, f) for f in entry.lease.__struct_fields__
                                               if f not in ("lease_id", "attempt")},
                                            lease_id=message.lease_id, attempt=message.attempt)  # fmt: skip
        return accept(self, message, payload, *rest)

    return [(Buffer, "accept", forgiving)]


@mutant
def requeue_forgets_attempt() -> list[Change]:
    """A lease that failed is granted again under the same name, and for ever."""

    def forgetful(self: Buffer, lease_id: str, reason: str) -> None:
        if (entry := self._leased(lease_id)) is not None:
            self._requeue(entry)
            self._ended[entry.prompt_index] = entry.attempt

    return [(Buffer, "fail", forgetful)]


@mutant
def released_lease_delivers() -> list[Change]:
    """A lease that was taken from a silent generator is granted to another under the same name."""
    release = Buffer.release

    def trusting(self: Buffer, holder: str) -> list[str]:
        attempts = {
            e.prompt_index: e.attempt for e in self._entries.values() if e.state is State.LEASED and e.holder == holder
        }
        released = release(self, holder)
        self._ended.update(
            {prompt_index: attempt - self._ended[prompt_index] for prompt_index, attempt in attempts.items()}
        )
        return released

    return [(Buffer, "release", trusting)]


@mutant
def silent_one_delivers() -> list[Change]:
    """A lease that others go on with is granted under the name that the silent generator delivers it by."""
    free_leases_of = Buffer.free_leases_of

    def trusting(self: Buffer, holder: str) -> list[str]:
        freed = free_leases_of(self, holder)
        self._ended.subtract(int(lease_id.split(".")[1]) for lease_id in freed)
        return freed

    return [(Buffer, "free_leases_of", trusting)]


@mutant
def no_lease_expiry() -> list[Change]:
    """What was leased and never came is waited for."""
    return [(Buffer, "expire", lambda self, now_s, is_excused: [])]


@mutant
def stale_dropped_in_silence() -> list[Change]:
    """What is too old disappears without a count."""
    give_up = Buffer._give_up

    def silent(self: Buffer, entry: GroupEntry, version: int, reason: str) -> None:
        before = self.outcomes[f"dropped_{reason}"]
        give_up(self, entry, version, reason)
        self.outcomes[f"dropped_{reason}"] = before

    return [(Buffer, "_give_up", silent)]


@mutant
def evicted_without_refill() -> list[Change]:
    """What is too old is dropped and counted, and its prompt is never issued again."""
    give_up = Buffer._give_up

    def wasteful(self: Buffer, entry: GroupEntry, version: int, reason: str) -> None:
        give_back, self._prompts.give_back = self._prompts.give_back, lambda prompt_index: None  # type: ignore[method-assign]
        try:
            give_up(self, entry, version, reason)
        finally:
            self._prompts.give_back = give_back  # type: ignore[method-assign]

    return [(Buffer, "_give_up", wasteful)]


@mutant
def stale_for_ever() -> list[Change]:
    """A prompt whose groups are always too old is generated again and again."""
    give_up = Buffer._give_up

    def patient(self: Buffer, entry: GroupEntry, version: int, reason: str) -> None:
        self._max_attempts, limit = 10**6, self._max_attempts
        try:
            give_up(self, entry, version, reason)
        finally:
            self._max_attempts = limit

    return [(Buffer, "_give_up", patient)]


@mutant
def window_by_completion() -> list[Change]:
    """A window closes over whatever is here first."""
    return [(Window, "select", Policy.select)]


@mutant
def batch_by_age() -> list[Change]:
    """A batch is in the order in which its groups were chosen, which depends on who finished first."""

    class Chosen(list):
        def sort(self, **_: Any) -> None:
            """Stays as it is."""

    select = Wait.select

    def chosen(self: Wait, *arguments: Any) -> list | None:
        batch = select(self, *arguments)
        return None if batch is None else Chosen(batch)

    return [(Wait, "select", chosen)]


@mutant
def window_forgets_isolated() -> list[Change]:
    """The slots of a window go to prompts behind one that waits for a generator of its own."""
    return [(PromptSource, "waiting_before", lambda self, prompt_index: 0)]


@mutant
def window_counts_who_overtook() -> list[Change]:
    """A prompt that was given back waits for a slot behind those that wait for it, once the bound is smaller."""

    def by_slots(self: Buffer, prompt_index: int | None, behind: int) -> bool:
        waiting = 0 if prompt_index is None else self._prompts.waiting_before(prompt_index)
        return self._policy.admit(len(self._entries) + waiting, self.max_lag - behind)

    return [(Buffer, "_has_slot", by_slots)]


@mutant
def pause_is_for_the_learner() -> list[Change]:
    """A pause stops batches, and leases go on."""
    grant = BufferService._grant

    def paused(self: BufferService, now_s: float) -> None:
        steer, self._steer = self._steer, msgspec.structs.replace(self._steer, is_paused=False)
        grant(self, now_s)
        self._steer = steer

    return [(BufferService, "_grant", paused)]


@mutant
def bound_of_now() -> list[Change]:
    """Another bound applies to groups that were leased before it as well."""
    step_ended = Buffer.step_ended

    def sweeping(self: Buffer, *arguments: Any) -> None:
        step_ended(self, *arguments)
        for entry in self._entries.values():
            entry.max_lag = self.max_lag

    return [(Buffer, "step_ended", sweeping)]


@mutant
def slots_of_the_largest_bound() -> list[Change]:
    """A smaller bound takes no slots away."""
    return [(Policy, "admit", lambda self, held, max_lag: held < self._config.num_slots)]


@mutant
def raised_whatever_it_does() -> list[Change]:
    """The bound is raised because the learner waits, though old tokens already do harm."""
    step_ended = AutoLag.step_ended

    def hopeful(self: AutoLag, version: int, shares: Mapping[int, float], waited: float) -> int:
        return step_ended(self, version, dict.fromkeys(shares, 1.0), waited)

    return [(AutoLag, "step_ended", hopeful)]


@mutant
def mask_keeps_the_wholly_masked() -> list[Change]:
    """A group of which no token has a weight fills a place in the batch."""
    return [(Mask, "evict", lambda self, waiting, version: [])]


@mutant
def aborted_in_silence() -> list[Change]:
    """A lease is given up and leased again, and who works on it is not told."""
    return [(Buffer, "cancelled", lambda self: [])]


@mutant
def step_trains_all() -> list[Change]:
    """A step counts every group in the buffer as trained, ready ones too."""
    trained = Buffer.trained

    def sweeping(self: Buffer, version: PolicyVersion) -> None:
        for entry in self._entries.values():
            if entry.state is State.READY:
                self._set_state(entry, State.TAKEN)
        trained(self, version)

    return [(Buffer, "trained", sweeping)]


@mutant
def cursor_at_issue() -> list[Change]:
    """A checkpoint holds which prompts were handed out, not which were trained."""
    state = PromptSource.state

    def ahead(self: PromptSource) -> PromptState:
        honest = state(self)
        return PromptState(**{f: getattr(honest, f) for f in honest.__struct_fields__ if f not in ("frontier", "done_beyond")},
                           frontier=max(self._next, honest.frontier), done_beyond=())  # fmt: skip

    return [(PromptSource, "state", ahead)]


@mutant
def order_decided_anew() -> list[Change]:
    """A restart asks the shares of its checkpoint how often prompts come, not the file of the round."""

    def forgetful(self: Curriculum, path: Path) -> None:
        self._must_be_there = False

    return [(Curriculum, "_read", forgetful)]


@mutant
def no_fencing() -> list[Change]:
    """A late word of an incarnation that was replaced counts as its successor's."""
    handle = BufferService._handle

    def trusting(self: BufferService, peer: str, message: Message, *rest: Any) -> None:
        if isinstance(message, Serving) and message.generator_id in self._sessions:
            self._sessions[message.generator_id].version = message.version
        else:
            handle(self, peer, message, *rest)

    return [(BufferService, "_handle", trusting)]


@mutant
def endless_poison() -> list[Change]:
    """The end of a generator costs the prompts in flight nothing, however often."""
    return [(IsolatedPrompts, "interrupted", lambda self, holder, prompt_indices: ())]


@mutant
def quarantine_forgotten() -> list[Change]:
    """A prompt that was dropped for what it does is leased again in the next epoch, or after a resume."""
    return [(Quarantine, "__contains__", lambda self, prompt_id: False)]


# -- the generator -----------------------------------------------------------------------------------------------------


@mutant
def version_at_completion() -> list[Change]:
    """A completion is labelled with the version that ended it."""
    complete = PendingCompletion.complete

    def relabelled(self: PendingCompletion, token_ids: Any, logprobs: Any, reason: Any) -> None:
        self._starts = [(self._starts[-1][0], 0)] if self._starts else []
        complete(self, token_ids, logprobs, reason)

    return [(PendingCompletion, "complete", relabelled)]


@mutant
def first_finished() -> list[Change]:
    """A group is complete as soon as it may be trained: with the short completions."""
    decided = GroupInFlight._decided

    async def quick(self: GroupInFlight) -> list[Launched]:
        whole = asyncio.ensure_future(decided(self))
        while not whole.done():
            done = [one for one in self._launched if one.is_good]
            if len(done) >= self._min_completions and all(one.score is not None for one in self._baseline):
                whole.cancel()
                return done
            await asyncio.sleep(0.01)
        return whole.result()

    return [(GroupInFlight, "_decided", quick)]


@mutant
def unbounded_resend() -> list[Change]:
    """What is not acknowledged is sent again at every heartbeat."""

    class Overdue(generator_service.Unacknowledged):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, float("-inf") if name == "sent_s" else value)

    return [(generator_service, "Unacknowledged", Overdue)]


@mutant
def fire_and_forget() -> list[Change]:
    """A group is forgotten once it is sent."""

    async def heartbeat_forgets(self: GeneratorService, message: Message) -> None:
        if isinstance(message, Serving):
            self._unacknowledged.clear()
        await self._client.send(message)

    return [(GeneratorService, "_send", heartbeat_forgets)]


@mutant
def granted_twice_worked_twice() -> list[Change]:
    """A lease that comes again while it is worked on is begun again."""
    handle = GeneratorService._handle

    async def eager(self: GeneratorService, message: Message) -> None:
        if isinstance(message, Grant):
            self._working.pop(message.lease.lease_id, None)
        await handle(self, message)

    return [(GeneratorService, "_handle", eager)]


@mutant
def fewer_than_a_batch() -> list[Change]:
    """So few groups are wanted under way that a batch is never complete, and the learner waits for ever."""
    return [(admission.Fresh, "wanted", property(lambda self: self._per_step - 1))]


@mutant
def outage_charges_prompts() -> list[Change]:
    """A group that no call of a reward could score is let go as it is, also when none works."""

    async def trusts(self: Breaker) -> bool:
        """As if it worked."""
        return True

    return [(Breaker, "_begin_check", lambda self: None), (Breaker, "works", trusts)]


@mutant
def given_back_is_charged() -> list[Change]:
    """What is given back because all rewards are down costs its prompt an attempt."""
    return [(Buffer, "give_back", lambda self, lease_id: self.fail(lease_id, "unscored"))]


# -- the learner -------------------------------------------------------------------------------------------------------


@mutant
def behind_counts_as_current() -> list[Change]:
    """A lease to a generator whose weights are behind counts from the learner's version."""
    lease = Buffer.lease
    return [(Buffer, "lease", lambda self, holder, now_s, serves=None: lease(self, holder, now_s))]


@mutant
def slots_whatever_is_served() -> list[Change]:
    """A generator whose weights are behind may begin as many groups as any other."""
    return [(Buffer, "_has_slot", lambda self, index, behind, has_slot=Buffer._has_slot: has_slot(self, index, 0))]


@mutant
def version_restarts() -> list[Change]:
    """After a resume the version counter begins at 0 again."""
    resume = LearnerService.resume

    def from_zero(self: LearnerService, checkpoint: Any) -> None:
        resume(self, checkpoint)
        self.version = PolicyVersion(self.version.lineage, 0)

    return [(LearnerService, "resume", from_zero)]


@mutant
def checkpoint_names_no_step() -> list[Change]:
    """A checkpoint calls itself of the step before: what that step trained is trained again."""
    checkpoint = LearnerService._checkpoint

    def behind(self: LearnerService) -> Any:
        after = self.version
        self.version = PolicyVersion(after.lineage, max(0, after.number - 1))
        try:
            return checkpoint(self)
        finally:
            self.version = after

    return [(LearnerService, "_checkpoint", behind)]
