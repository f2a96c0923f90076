"""What must hold whatever happens. The checker sees every process at once, and the tokens themselves; it trusts no label.

It follows the promises of the rollout plane (docs/simulation.md numbers them) and raises the first that is broken.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from asyncgrpo.buffer.buffer import Buffer, State, group_seed
from asyncgrpo.buffer.history import History
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.learner.checkpoints import RunState
from asyncgrpo.types import Group, WeightVersion
from asyncgrpo.wire.messages import Ack, Batch, Cancel, Grant, Message, Snapshot
from tests.simulation.promises import Kept, Promises, Weights


class Violation(Exception):
    """A promise is broken."""


ISSUED_AGAIN = {f"dropped_{why}" for why in ("stale", "superseded", "resume", "terms", "ahead", "damaged")}
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
    """Orders trained, step by step."""
    trained: set[int] = field(default_factory=set)
    kept: dict[str, Kept] = field(default_factory=dict)
    """Groups in the buffer's keeping that are not done, by lease id."""
    promised: dict[str, Kept | None] = field(default_factory=dict)
    """What an acknowledgement of a lease would promise; None: the group was dropped or filtered."""
    num_stale: int = 0
    ended: set[str] = field(default_factory=set)
    """Leases that were cancelled, or that failed."""
    proven: set[WeightVersion] = field(default_factory=set)
    """Versions that every generator in the weight group holds."""
    untrained: Counter[str] = field(default_factory=Counter)
    """Prompts done without training, by reason, when the buffer last gave a snapshot."""
    checkpointed: Counter[str] = field(default_factory=Counter)
    """The same, as far as checkpoints hold it."""


class Checker:
    """Checks one simulated run from its first start to its end."""

    def __init__(
        self,
        *,
        seed: int,
        vocab_size: int,
        num_orders: int,
        max_lag: int,
        per_step: int,
        slots: int,
        windows: int,
        promises: Promises,
    ) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._num_orders = num_orders
        self._max_lag = max_lag
        self._per_step = per_step
        self._slots = slots
        self._window = windows
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
        self._weights.started(WeightVersion(lineage, step))
        self.life = life = Life(lineage, step, source.num_done, buffer, source)
        life.num_stale = buffer.outcomes["dropped_stale"]
        if (broken := self.promises.broken(buffer, source, self._weights, history, self._history)) is not None:
            raise Violation(broken)
        for entry in buffer._entries.values():
            self._keep(entry.lease.lease_id, entry.lease.group_id)
        self.counts["recovered"] += len(buffer._entries)

    def checkpointed(self, state: RunState) -> None:
        """A checkpoint is durable: what it says is done must be what its steps trained, and what was dropped."""
        life = self._life
        so_far = state.step - life.first_step
        self._require(0 <= so_far <= len(life.steps), "checkpoint", f"of step {state.step}, which was not trained")
        trained = {order for orders in [*self._history[: life.first_step], *life.steps[:so_far]] for order in orders}
        frontier, beyond = state.prompts["frontier"], set(state.prompts["done_beyond"])
        done = set(range(frontier)) | beyond
        missing = sorted(trained - done)
        self._require(not missing, "P6 no prompt twice", f"the checkpoint forgets that {missing} were trained")
        counts = life.untrained - life.checkpointed
        untrained = len(done - trained)
        total = sum(counts.values()) + sum(self._dropped.values())
        self._require(
            untrained == total,
            "P5 no prompt skipped",
            f"the checkpoint calls {untrained} prompts done that were not trained, and {total} are counted",
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
        trained = [order for orders in self._history for order in orders]
        self._require(len(trained) == len(set(trained)), "P6 no prompt twice", "an order was trained twice")
        skipped = self._num_orders - len(trained) - sum(self._dropped.values())
        self._require(skipped == 0, "P5 no prompt skipped", f"{skipped} prompts neither trained nor counted")
        self.counts["trained"] += len(trained)
        self.counts["untrained_counted"] += sum(self._dropped.values())

    # -- events --------------------------------------------------------------------------------------------------------

    def trained(self, groups: list[Group], version: WeightVersion) -> None:
        """The learner makes a step of `groups` that starts at `version`."""
        life = self._life
        self._require(version.lineage == life.lineage, "lineage", f"a step at {version} in lineage {life.lineage}")
        step = life.first_step + len(life.steps)
        self._require(version.version == step, "resume", f"step {step} starts at version {version}")
        before = {order for orders in self._history for order in orders}
        for group in groups:
            self._require(
                group.order not in life.trained and group.order not in before,
                "P2 none twice",
                f"order {group.order} is trained twice in {version}",
            )
            life.trained.add(group.order)
            oldest = self._true_oldest(group, life.source)
            lag = version.version - oldest.version
            self._require(
                0 <= lag <= self._max_lag, "P4 lag", f"{group.group_id} is trained with lag {lag} at {version}"
            )
            self.lags[lag] += 1
        if len(groups) < self._per_step:
            rest = life.buffer.count(State.LEASED) + life.buffer.count(State.READY) + life.source.has_next
            self._require(not rest, "P7 full batches", f"{len(groups)} groups of {self._per_step}, and {rest} are left")
        life.steps.append(tuple(g.order for g in groups))
        self._weights.stepped(WeightVersion(life.lineage, step + 1))
        tokens = life.buffer.tokens
        came, left = tokens["generated"] + tokens["recovered"], life.buffer.tokens_in_flight
        fates = tokens.total() - came
        self._require(came == fates + left, "P3 balance", f"{came} tokens came, {fates} and {left} are accounted for")

    def sent_by_buffer(self, message: Message) -> None:
        """The buffer says `message`, and has just done what it says."""
        life = self._life
        if isinstance(message, Batch) or (isinstance(message, Grant) and message.lease.purpose == "train"):
            blocked = life.buffer.journal.is_blocked
            self._require(blocked is None, "P17 blocked", f"{type(message).__name__} in spite of {blocked}")
        if isinstance(message, Cancel):
            life.ended.update(message.lease_ids)
        elif isinstance(message, Ack) and not message.group_id.startswith("eval."):
            self.counts["acknowledged"] += 1
            self._require(
                message.lease_id not in life.ended, "P8 ended leases", f"{message.lease_id} had ended and is accepted"
            )
            self._keep(message.lease_id, message.group_id)
            if (group := life.promised[message.lease_id]) is not None:
                self.promises.acknowledged(group)
        elif isinstance(message, Snapshot):
            life.untrained = Counter({name: n for name, n in life.buffer.outcomes.items() if _is_untrained_end(name)})
        for result in getattr(message, "evals", ()):
            self._require(
                result.oldest.lineage == result.newest.lineage == life.lineage,
                "P16 evaluations",
                f"step {result.step} is judged by {result.oldest} to {result.newest} in lineage {life.lineage}",
            )

    def turned(self, unacknowledged: Iterable[str] = ()) -> None:
        """The buffer handled one event; of some groups it has not said yet that it keeps them."""
        life = self._life
        buffer, source = life.buffer, life.source
        for lease_id in unacknowledged:
            if not lease_id.startswith("eval."):
                self._keep(lease_id, lease_id.rpartition(".")[0])
        entries, outcomes = buffer._entries, buffer.outcomes
        held: dict[str, int] = {}
        leased = ready = 0
        for entry in entries.values():
            if entry.state is State.LEASED:
                leased += 1
                held[entry.holder] = held.get(entry.holder, 0) + 1
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
            if count > self._window or count != buffer.held_by(holder):
                raise Violation(f"P9 slots: {holder} holds {count} leases")
        if life.kept or life.num_stale != outcomes["dropped_stale"] or outcomes["trained"] > len(life.trained):
            self._all_are_kept(life)
        done = source.num_done - life.done_before
        if done != finished:
            raise Violation(f"P3 balance: {done} prompts done, {finished} counted")
        if buffer.version is not None and buffer.version not in life.proven:
            raise Violation(f"P10 proof: {buffer.version} counts, unproven")

    def granted(self, peer: str, lease_id: str, serves: WeightVersion | None) -> None:
        """A lease goes to a generator whose engine now samples with `serves` (None: it has ended)."""
        life = self._life
        current = life.buffer.version
        if serves is not None and current is not None and serves < current:
            raise Violation(f"P10 proof: {lease_id} goes to {peer}, which serves {serves}; published is {current}")
        self._require(lease_id not in life.ended, "P8 ended leases", f"{lease_id} failed and is granted again")

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _life(self) -> Life:
        assert self.life is not None
        return self.life

    def _keep(self, lease_id: str, group_id: str) -> None:
        """The buffer has taken in this group."""
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
            if not life.source.is_done(group.order):
                gone += 1
                self._gave_up(life, lease_id)
            elif group.order not in life.trained:
                self.counts["filtered_or_dropped"] += 1
                self._gave_up(life, lease_id)
        life.num_stale += gone
        stale = life.buffer.outcomes["dropped_stale"]
        self._require(not gone, "P18 none for its age", f"{gone} groups were dropped as too old, and issued again")
        self._require(
            life.num_stale == stale, "P1 none lost", f"{life.num_stale} acknowledged groups gone, {stale} as stale"
        )
        finished = life.buffer.outcomes["trained"]
        self._require(
            finished <= len(life.trained), "P1 none lost", f"{finished} count as trained, {len(life.trained)} were"
        )

    def _true_oldest(self, group: Group, source: PromptSource) -> WeightVersion:
        """The oldest version that sampled in `group`, after every token proved which one sampled it."""
        prompt = source.prompt(group.order)
        self._require(prompt == group.prompt, "P5 no prompt skipped", f"order {group.order} came with another prompt")
        versions = []
        for rollout in group.rollouts:
            completion = rollout.completion
            seed = group_seed(self._seed, group.order, group.attempt) + completion.index
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
        return min(versions, key=lambda version: version.version)

    def _require(self, holds: bool, promise: str, problem: str) -> None:
        if not holds:
            raise Violation(f"{promise}: {problem}")


def _is_untrained_end(outcome: str) -> bool:
    return outcome == "filtered_zero_signal" or (outcome.startswith("dropped_") and outcome not in ISSUED_AGAIN)
