"""What must hold whatever happens. The checker sees every process at once, and the tokens themselves; it trusts no label.

It follows the promises of the rollout plane (docs/simulation.md numbers them) and raises the first that is broken.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import xxhash

from asyncgrpo.buffer.admission import AutoLag
from asyncgrpo.buffer.buffer import MAX_ATTEMPTS, Buffer, State, group_seed
from asyncgrpo.buffer.group_health import ISOLATE_AFTER, Quarantine
from asyncgrpo.config.schema import Config
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.journal.history import History
from asyncgrpo.learner.checkpoints import RunState
from asyncgrpo.types import Group, Lease, PolicyVersion
from asyncgrpo.wire import Message
from asyncgrpo.wire.rollouts import REWARDS_PAUSED, Ack, Batch, Cancel, Grant, Snapshot
from tests.simulation.promises import Kept, Promises, Weights


class Violation(Exception):
    """A promise is broken."""


ISSUED_AGAIN = {f"dropped_{why}" for why in ("stale", "cancelled", "superseded", "incompatible", "ahead", "damaged")}
"""Ends of a group that are not the end of its prompt."""


@dataclass
class Life:
    """What happened since the last start of the run."""

    lineage: int
    first_step: int
    done_before: int
    buffer: Buffer
    source: PromptSource
    steps: list[tuple[int, ...]] = field(default_factory=list)
    issued: set[PolicyVersion] = field(default_factory=set)
    """Versions whose batch was sent. A reply that was lost is repeated, whatever the disk does since."""
    trained: set[int] = field(default_factory=set)
    kept: dict[str, Kept] = field(default_factory=dict)
    """Groups in the buffer's keeping that are not done, by lease id."""
    promised: dict[str, Kept | None] = field(default_factory=dict)
    """What an acknowledgement of a lease would promise; None: the group was dropped or filtered."""
    num_stale: int = 0
    num_told: int = 0
    """Leases that a generator was told to stop because they would be too old."""
    ended: set[str] = field(default_factory=set)
    untrained: Counter[str] = field(default_factory=Counter)
    """Prompts done without training, by reason, when the buffer last gave a snapshot."""
    checkpointed: Counter[str] = field(default_factory=Counter)
    """The same, as far as checkpoints hold it."""
    grants: Counter[int] = field(default_factory=Counter)
    losses: Counter[int] = field(default_factory=Counter)
    """Those of them that ended because their generator did, or was silent."""
    given_away: Counter[int] = field(default_factory=Counter)
    """Those of them that ended because their generator was silent: it may have ended, which nobody knows yet."""
    given_back: set[str] = field(default_factory=set)
    """Leases whose completions could not be scored because no reward worked."""
    bounds: list[int] = field(default_factory=list)
    """On lag, in the order in which they came into force; the first is that of the start."""
    shares: list[float] = field(default_factory=list)
    """Effective sample shares of the steps since the last change that say something of the bound in force."""


class Checker:
    def __init__(
        self,
        *,
        config: Config,
        rewards_fail: bool,
        killers: set[tuple[int, ...]],
        quarantine: Quarantine,
        vocab_size: int,
        num_prompts: int,
        windows: int,
        promises: Promises,
        brief_outages: Callable[[], int],
    ) -> None:
        """
        Args:
            brief_outages: outages so far that failed fewer calls at a generator than tell one from a failure.
            rewards_fail: completions may be without a reward for another reason than an outage of all rewards.
            killers: token ids of the prompts that end every generator.
            windows: leases that one generator may hold.
        """
        self._seed = config.run.seed
        self._algorithm = config.algorithm
        self._rewards_fail, self._brief_outages = rewards_fail, brief_outages
        self._killers = killers
        self._killer_leases = ISOLATE_AFTER + MAX_ATTEMPTS
        self._quarantine = quarantine
        self._cut_after_s: dict[str, float] = {}  # by lease, over all lives
        self._vocab_size = vocab_size
        self._num_prompts = num_prompts
        buffer = config.buffer
        self._policy = buffer.policy
        self._largest = buffer.auto_lag.max if buffer.max_lag == "auto" else None
        self._bounds: dict[str, int] = {}  # on lag, by lease, over all lives
        self._per_step, self._slots = buffer.prompts_per_step, buffer.num_slots
        self._asked_max_lags: set[int] = set()  # told at any time after they were asked for
        self._window = windows
        self._prompt_of: dict[int, str] = {}  # by index, over all lives
        self._history: list[tuple[int, ...]] = []  # steps that a checkpoint holds
        self._dropped: Counter[str] = Counter()  # by reason, in checkpoints
        self._weights = Weights()
        self.promises = promises
        self.life: Life | None = None
        self.lags: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()

    # -- starts and ends -----------------------------------------------------------------------------------------------

    def started(
        self, lineage: int, step: int, buffer: Buffer, source: PromptSource, history: History | None = None
    ) -> None:
        """The run starts, or goes on from a checkpoint of `step`; the buffer has what the journal brought back."""
        self._require(step == len(self._history), "resume", f"goes on at step {step} of {len(self._history)}")
        self._weights.started(PolicyVersion(lineage, step))
        self.life = life = Life(lineage, step, source.num_done, buffer, source, bounds=[buffer.max_lag])
        life.num_stale = buffer.outcomes["dropped_stale"]
        if (broken := self.promises.broken(buffer, source, self._weights, history, self._history)) is not None:
            raise Violation(broken)
        for entry in buffer._entries.values():
            self._keep(entry.lease.lease_id, entry.lease.group_id)
        if self._largest is not None and history is not None:
            known = self.promises.bound_in_force(self._weights, history)
            self._require(known in (None, buffer.max_lag), "P26 the bound", f"{buffer.max_lag}, and it was {known}")

    def checkpointed(self, state: RunState) -> None:
        """A checkpoint is durable: what it says is done must be what its steps trained, and what was dropped."""
        life = self._life
        so_far = state.step - life.first_step
        self._require(0 <= so_far <= len(life.steps), "checkpoint", f"of step {state.step}, which was not trained")
        trained = {
            prompt_index
            for prompt_indices in [*self._history[: life.first_step], *life.steps[:so_far]]
            for prompt_index in prompt_indices
        }
        frontier, beyond = state.prompts["frontier"], set(state.prompts["done_beyond"])
        done = set(range(frontier)) | beyond
        missing = sorted(trained - done)
        self._require(not missing, "P6 no prompt twice", f"the checkpoint forgets that {missing} were trained")
        counts = life.untrained - life.checkpointed
        untrained = len(done - trained)
        total = sum(counts.values()) + sum(self._dropped.values())
        if untrained != total:
            raise Violation(
                f"P5 no prompt skipped: {untrained} prompts are done and were not trained, {total} are counted"
            )
        self._history = [*self._history[: life.first_step], *life.steps[:so_far]]
        self._weights.saved(state.step)
        # What a resume finds in this checkpoint; the life goes on with its own counts.
        life.first_step, life.steps = state.step, life.steps[so_far:]
        self._dropped += counts
        life.checkpointed = life.untrained

    def finished(self, history: History | None = None) -> None:
        """The run is done: every prompt of every epoch was trained once, or is counted by name."""
        if (broken := self.promises.at_the_end(self._weights, history, self._history)) is not None:
            raise Violation(broken)
        is_blocked = self._life.buffer.journal.is_blocked is not None  # then nothing was leased under the last bound
        wrong = None if is_blocked else self.promises.wrong_bounds(self._life.bounds, self._life.lineage, history)
        if wrong is not None:
            raise Violation(wrong)
        trained = [prompt_index for prompt_indices in self._history for prompt_index in prompt_indices]
        self._require(len(trained) == len(set(trained)), "P6 no prompt twice", "an order was trained twice")
        skipped = self._num_prompts - len(trained) - sum(self._dropped.values())
        self._require(skipped == 0, "P5 no prompt skipped", f"{skipped} prompts neither trained nor counted")
        self.counts["trained"] += len(trained)

    # -- events --------------------------------------------------------------------------------------------------------

    def trained(self, groups: list[Group], version: PolicyVersion) -> None:
        """The learner makes a step of `groups` that starts at `version`."""
        life = self._life
        self._require(version.lineage == life.lineage, "lineage", f"a step at {version} in lineage {life.lineage}")
        step = life.first_step + len(life.steps)
        self._require(version.number == step, "resume", f"step {step} starts at version {version}")
        prompt_indices = [group.prompt_index for group in groups]
        if prompt_indices != sorted(prompt_indices):
            raise Violation(f"P25 order of a batch: {version} trains {prompt_indices}")
        before = {prompt_index for prompt_indices in self._history for prompt_index in prompt_indices}
        for group in groups:
            if group.prompt_index in life.trained or group.prompt_index in before:
                raise Violation(f"P2 none twice: order {group.prompt_index} is trained twice in {version}")
            life.trained.add(group.prompt_index)
            self._completions_are_in_order_of_launch(group)
            versions = self._true_versions(group, life.source)
            self._lag_is_bounded(group, versions, version)
            self.lags[version.number - versions[0].number] += 1
        if len(groups) < self._per_step:
            is_next = life.source.next_prompt_index is not None
            rest = life.buffer.count(State.LEASED) + life.buffer.count(State.READY) + is_next
            self._require(not rest, "P7 full batches", f"{len(groups)} groups of {self._per_step}, and {rest} are left")
        life.steps.append(tuple(g.prompt_index for g in groups))
        self._weights.stepped(PolicyVersion(life.lineage, step + 1))
        tokens = life.buffer.tokens
        came, left = tokens["generated"] + tokens["recovered"], life.buffer.tokens_in_flight
        fates = tokens.total() - came
        self._require(came == fates + left, "P3 balance", f"{came} tokens came, {fates} and {left} are accounted for")

    def sent_by_buffer(self, message: Message) -> None:
        """The buffer says `message`, and has just done what it says."""
        life = self._life
        is_new_batch = isinstance(message, Batch) and message.version not in life.issued
        if is_new_batch or (isinstance(message, Grant) and message.lease.purpose == "train"):
            blocked = life.buffer.journal.is_blocked
            self._require(blocked is None, "P17 blocked", f"{type(message).__name__} in spite of {blocked}")
        if isinstance(message, Batch):
            life.issued.add(message.version)
        if isinstance(message, Cancel):
            life.ended.update(message.lease_ids)
            life.num_told += len(message.lease_ids) * (message.reason == "stale")
            if message.reason == REWARDS_PAUSED:
                for lease_id in message.lease_ids:
                    self.given_back(lease_id)
            if message.reason in ("lost", "silent", "slow"):
                prompt_indices = [int(lease_id.split(".")[1]) for lease_id in message.lease_ids]
                life.losses.update(prompt_indices)
                if message.reason in ("silent", "slow"):
                    life.given_away.update(prompt_indices)
                    self.counts["given_away"] += len(prompt_indices)
        elif isinstance(message, Ack) and not message.lease_id.startswith("eval."):
            if message.lease_id in life.ended:
                raise Violation(f"P8 ended leases: {message.lease_id} had ended and is accepted")
            self._keep(message.lease_id, message.lease_id.rpartition(".")[0])
            if (group := life.promised[message.lease_id]) is not None:
                self.promises.acknowledged(group)
        elif isinstance(message, Snapshot):
            life.untrained = Counter({name: n for name, n in life.buffer.outcomes.items() if _is_untrained_end(name)})
        for result in getattr(message, "evals", ()):
            if not all(v is None or v.lineage == life.lineage for v in (result.oldest, result.newest)):
                raise Violation(
                    f"P16 evaluations: step {result.step} is judged by {result.oldest} to {result.newest} in {life.lineage}"
                )

    def ended_in_a_turn(self) -> None:
        """The disk ended the buffer while it handled an event: what it had filtered or dropped by then is promised no more."""
        life = self._life
        for lease_id, group in life.kept.items():
            gone = lease_id.rpartition(".")[0] not in life.buffer._entries
            if gone and life.source.is_done(group.prompt_index) and group.prompt_index not in life.trained:
                self._gave_up(life, lease_id)

    def reported(self, shares: Mapping[int, float]) -> None:
        """The learner says of its last step which effective sample shares it had, by lag."""
        if max(shares) <= self._life.bounds[-1]:
            self._life.shares.append(shares[max(shares)])

    def given_back(self, lease_id: str) -> None:
        life = self._life
        if lease_id not in life.given_back and not lease_id.startswith("eval."):
            life.given_back.add(lease_id)
            life.losses[int(lease_id.split(".")[1])] += 1

    def turned(self, unacknowledged: Iterable[str] = ()) -> None:
        """The buffer handled one event; of some groups it has not said yet that it keeps them."""
        life = self._life
        buffer, source = life.buffer, life.source
        for lease_id in unacknowledged:
            if not lease_id.startswith("eval."):
                self._keep(lease_id, lease_id.rpartition(".")[0])
        entries, outcomes = buffer._entries, buffer.outcomes
        held: dict[str, int] = {}
        sampled: dict[str, int] = {}
        leased = ready = 0
        for entry in entries.values():
            if entry.state is State.LEASED:
                leased += 1
                held[entry.holder] = held.get(entry.holder, 0) + 1
                sampled[entry.holder] = sampled.get(entry.holder, 0) + (not entry.is_sampled)
            elif entry.state is State.READY:
                ready += 1
        ends = finished = 0
        for name, n in outcomes.items():
            if name == "trained" or name == "filtered_zero_signal" or name.startswith("dropped_"):
                ends += n
                finished += 0 if name in ISSUED_AGAIN else n
        balance = len(entries) + ends + outcomes["requeued"]
        came = outcomes["leased"] + outcomes["recovered"]
        if came != balance:
            raise Violation(f"P3 balance: {came} leased or recovered, accounted for {balance}")
        if len(entries) > self._slots:
            raise Violation(f"P9 slots: {len(entries)} groups in {self._slots} slots")
        counted = [buffer.count(state) for state in State]
        if counted != [leased, ready, len(entries) - leased - ready]:
            raise Violation(f"P3 balance: {leased} leased and {ready} ready, counted {counted}")
        for holder, count in held.items():
            if sampled[holder] > self._window or sampled[holder] != buffer.sampled_by(holder):
                raise Violation(f"P9 slots: {holder} samples for {sampled[holder]} leases")
            if count != buffer.held_by(holder):
                raise Violation(f"P9 slots: {holder} holds {count} leases")
        if life.kept or life.num_stale != outcomes["dropped_stale"] or outcomes["trained"] > len(life.trained):
            self._all_are_kept(life)
        given_up = outcomes["dropped_cancelled"]
        if life.num_told < given_up:
            raise Violation(f"P23 told: {given_up} leases given up, {life.num_told} told")
        done = source.num_done - life.done_before
        if done != finished:
            raise Violation(f"P3 balance: {done} prompts done, {finished} counted")
        burned = outcomes["dropped_unscored"] + buffer.filtered["unscored"]
        if burned > self._brief_outages() and not self._rewards_fail:
            raise Violation(f"P24 outages: {burned} prompts done without a reward, though none fails but in an outage")
        if buffer.max_lag != life.bounds[-1]:
            self._bound_changed(life, buffer.max_lag)

    def granted(self, peer: str, lease: Lease, serves: PolicyVersion | None) -> None:
        """A lease goes to a generator whose engine now samples with `serves` (None: it has ended)."""
        life, lease_id = self._life, lease.lease_id
        counts_from, current = life.buffer._entries[lease.group_id].oldest, life.buffer.version
        if serves is not None and serves < counts_from:
            raise Violation(
                f"P10 served: {lease_id} counts from {counts_from} and goes to {peer}, which serves {serves}"
            )
        self._require(lease_id not in life.ended, "P8 ended leases", f"{lease_id} failed and is granted again")
        prompt_index, prompt = lease.prompt_index, lease.prompt
        self._bounds[lease_id] = bound = life.buffer.max_lag
        held = len(life.buffer._entries)
        behind = max(0, current.number - counts_from.number) if current is not None else 0
        if held > (bound - behind + 1) * self._per_step:
            raise Violation(
                f"P9 slots: {lease_id} begins as one of {held} where the bound is {bound}, {behind} versions behind"
            )
        life.grants[prompt_index] += 1
        self._cut_after_s[lease_id] = lease.cut_after_s or 0.0
        meant = self._prompt_of.setdefault(prompt_index, prompt.prompt_id)
        self._require(meant == prompt.prompt_id, "P28 one prompt", f"{prompt_index} was {meant}, is {prompt.prompt_id}")
        if prompt.prompt_id in self._quarantine.cases:
            raise Violation(f"P19 poison: {prompt.prompt_id} is in quarantine and is leased")
        free = sum(int(given_back.split(".")[1]) == prompt_index for given_back in life.given_back)
        free += life.given_away[prompt_index]
        if not (prompt.token_ids not in self._killers or life.grants[prompt_index] - free <= self._killer_leases):
            raise Violation(
                f"P19 poison: {prompt.prompt_id} ends generators and is leased {life.grants[prompt_index]} times"
            )
        charged = life.grants[prompt_index] - life.losses[prompt_index]
        self._require(charged <= MAX_ATTEMPTS, "P22 attempts", f"{lease_id} is the {charged}th of {MAX_ATTEMPTS}")

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _life(self) -> Life:
        assert self.life is not None
        return self.life

    def _keep(self, lease_id: str, group_id: str) -> None:
        life = self._life
        if lease_id not in life.promised:
            entry, versions = life.buffer._entries.get(group_id), set()
            if entry is not None and entry.message is not None and entry.lease.lease_id == lease_id:
                versions = {span.version for rollout in entry.message.rollouts for span in rollout.spans}
            group = Kept(lease_id, int(group_id.split(".")[1]), tuple(versions), life.lineage)
            life.kept[lease_id] = life.promised[lease_id] = group

    def _gave_up(self, life: Life, lease_id: str) -> None:
        life.promised[lease_id] = None
        self.promises.gave_up(lease_id)

    def _all_are_kept(self, life: Life) -> None:
        gone = 0
        for lease_id, group in list(life.kept.items()):
            entry = life.buffer._entries.get(lease_id.rpartition(".")[0])
            if entry is not None and entry.state is not State.LEASED:
                continue
            del life.kept[lease_id]
            if not life.source.is_done(group.prompt_index):
                gone += 1
                self._gave_up(life, lease_id)
            elif group.prompt_index not in life.trained:
                self._gave_up(life, lease_id)
        life.num_stale += gone
        stale = life.buffer.outcomes["dropped_stale"]
        if self._policy == "wait":
            self._require(not gone, "P18 none for its age", f"{gone} groups were dropped as too old, and issued again")
        if life.num_stale != stale:
            raise Violation(f"P1 none lost: {life.num_stale} acknowledged groups gone, {stale} as stale")
        finished = life.buffer.outcomes["trained"]
        if finished > len(life.trained):
            raise Violation(f"P1 none lost: {finished} count as trained, {len(life.trained)} were")

    def _completions_are_in_order_of_launch(self, group: Group) -> None:
        """By their seeds, which the tokens prove: each of one completion's tries, and none was left out for being long."""
        size = self._algorithm.group_size
        sampled = [rollout for rollout in group.rollouts if rollout.completion.index < size]
        least = self._algorithm.min_completions or size
        fits = least <= len(sampled) <= size
        num_greedy = len(group.rollouts) - len(sampled)
        if not (fits and num_greedy == (self._algorithm.advantage == "remax")):
            raise Violation(
                f"P20 completions: {group.group_id} has {len(sampled)} completions and {num_greedy} greedy ones"
            )
        num_censored = group.discarded.censored
        base = group_seed(self._seed, group.prompt_index, group.attempt)
        launched = [rollout.seed - base for rollout in sampled]
        if not (
            len(set(launched)) == len(sampled) == size - num_censored and all(0 <= index < size for index in launched)
        ):
            raise Violation(
                f"P20 completions: {group.group_id} has the completions {launched}, and says that {num_censored} were cut"
            )
        took_s = sum(group.timings.values())
        if num_censored and took_s < self._cut_after_s.get(group.lease_id, 0.0) - 1e-6:
            raise Violation(f"P20 completions: {group.group_id} was cut after {took_s:.1f} s, before its time")

    def asked_for(self, max_lag: int) -> None:
        self._asked_max_lags.add(max_lag)
        self._slots = max(self._slots, (max_lag + 1) * self._per_step)

    def _bound_changed(self, life: Life, bound: int) -> None:
        if bound in self._asked_max_lags:
            life.bounds.append(bound)
            self.counts["bound_asked_for"] += 1
            return
        largest = self._largest
        self._require(largest is not None and AutoLag.LEAST <= bound <= largest, "P26 the bound", f"it becomes {bound}")
        if bound > life.bounds[-1]:
            share = statistics.median(life.shares[-3:])
            self._require(share >= AutoLag.FLOOR, "P26 the bound", f"raised to {bound} at a sample share of {share}")
        life.bounds.append(bound)
        life.shares.clear()
        self.counts["bound_raised" if bound > life.bounds[-2] else "bound_lowered"] += 1

    def _lag_is_bounded(self, group: Group, versions: list[PolicyVersion], at: PolicyVersion) -> None:
        """As the policy promises, by the bound of the lease, whatever has come into force since."""
        if self._policy == "train":
            return
        lag, bound = at.number - versions[0].number, self._bounds[group.lease_id]
        self._require(0 <= lag <= bound, "P4 lag", f"{group.group_id} is trained with lag {lag} of {bound} at {at}")

    def _true_versions(self, group: Group, source: PromptSource) -> list[PolicyVersion]:
        """The versions that sampled in `group`, oldest first, after every token proved which one sampled it."""
        prompt = source.prompt(group.prompt_index)
        if prompt != group.prompt:
            raise Violation(f"P5 no prompt skipped: order {group.prompt_index} came with another prompt")
        versions = []
        for rollout in group.rollouts:
            completion = rollout.completion
            seed = "greedy" if completion.index == self._algorithm.group_size else rollout.seed
            for span in completion.spans:
                versions.append(span.version)
                for position in range(span.start, span.end):
                    key = f"{prompt.token_ids} {seed} {position} {span.version}"
                    token = xxhash.xxh3_64_intdigest(key.encode()) % self._vocab_size
                    if token != completion.token_ids[position]:
                        raise Violation(
                            f"P4 lag: token {position} of {group.group_id} was not sampled by {span.version}"
                        )
        gone = [str(version) for version in versions if not self._weights.are_there(version)]
        self._require(not gone, "P4 lag", f"{group.group_id} is of weights that are gone: {gone}")
        return sorted(versions, key=lambda version: version.number)

    def _require(self, holds: bool, promise: str, problem: str) -> None:
        if not holds:
            raise Violation(f"{promise}: {problem}")


def _is_untrained_end(outcome: str) -> bool:
    return outcome == "filtered_zero_signal" or (outcome.startswith("dropped_") and outcome not in ISSUED_AGAIN)
