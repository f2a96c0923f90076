"""Held-out prompts answered beside training: leases that hold no slot and results that name the versions that answered.

Generation does not stop for an evaluation, so the weights may change in the middle; the result says from which version
to which. No sockets, no clock of its own.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncgrpo.types import Lease, PolicyVersion, Prompt, Sampling
from asyncgrpo.wire.rollouts import Deliver, EvalResult

MAX_ATTEMPTS = 3
FREE_LOSSES = 2
"""Generators that may end while they work on a held-out prompt before each further one costs it an attempt: one that ends
them all must not do so for ever."""


@dataclass
class _Round:
    """One evaluation under way."""

    step: int
    started_s: float
    missing: int
    values: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    versions: set[PolicyVersion] = field(default_factory=set)


class Evaluations:
    """Evaluations of one fixed list of prompts, any number of them under way at once."""

    def __init__(
        self,
        prompts: tuple[Prompt, ...],
        sampling: Sampling,
        seed: int,
        lease_timeout_s: float,
        *,
        lineage: int = 1,
    ) -> None:
        """
        Args:
            lineage: of this start; a late completion to a lease of an earlier one answers none of ours.
        """
        self._prompts = prompts
        self._sampling = sampling
        self._seed = seed
        self._lease_timeout_s = lease_timeout_s
        self._lineage = lineage
        self._rounds: dict[int, _Round] = {}
        self._queue: deque[Lease] = deque()
        self._losses: Counter[str] = Counter()  # generators that ended, by group id
        self._leased: dict[str, tuple[Lease, str, float]] = {}  # with holder and time, by lease id

    @property
    def under_way(self) -> bool:
        return bool(self._rounds)

    def request(self, step: int, now_s: float) -> None:
        """Queue every prompt for the evaluation of `step`; a step is evaluated once."""
        if not self._prompts or step in self._rounds:
            return
        self._rounds[step] = _Round(step, now_s, len(self._prompts))
        self._queue.extend(self._lease(step, index, 0) for index in range(len(self._prompts)))

    def lease(self, holder: str, now_s: float) -> Lease | None:
        """The next prompt to answer, or None."""
        if not self._queue:
            return None
        lease = self._queue.popleft()
        self._leased[lease.lease_id] = (lease, holder, now_s)
        return lease

    def lease_of(self, lease_id: str) -> Lease | None:
        """The lease of this name, if its prompt is being answered."""
        held = self._leased.get(lease_id)
        return held[0] if held is not None else None

    def held_by(self, holder: str) -> int:
        return sum(h == holder for _, h, _ in self._leased.values())

    def release(self, holder: str, now_s: float) -> list[EvalResult]:
        """`holder` is gone: its leases come first again, or fail if it is not the first. Returns what that ended."""
        results = []
        for lease_id, lease in [(i, lease) for i, (lease, h, _) in self._leased.items() if h == holder]:
            self._losses[lease.group_id] += 1
            if self._losses[lease.group_id] > FREE_LOSSES:
                results.append(self.fail(lease_id, "generator_lost", now_s))
            else:
                self._queue.appendleft(self._leased.pop(lease_id)[0])
        return [result for result in results if result is not None]

    def fail(self, lease_id: str, reason: str, now_s: float) -> EvalResult | None:
        """Try again before anything else, or count the completion as failed. Returns the result if that ends an evaluation."""
        held = self._leased.pop(lease_id, None)
        if held is None:
            return None
        lease = held[0]
        if lease.attempt + 1 < MAX_ATTEMPTS:
            self._queue.appendleft(self._lease(_step_of(lease), lease.prompt_index, lease.attempt + 1))
            return None
        self._losses.pop(lease.group_id, None)
        round_ = self._rounds[_step_of(lease)]
        round_.failures[reason] += 1
        return self._count_down(round_, now_s)

    def give_back(self, lease_id: str) -> None:
        """A lease came to nothing through no fault of its prompt, which is issued again at no cost."""
        held = self._leased.pop(lease_id, None)
        if held is not None:
            self._queue.appendleft(held[0])

    def expire(
        self, now_s: float, is_excused: Callable[[str], bool] = lambda holder: False
    ) -> tuple[list[tuple[Lease, str]], list[EvalResult]]:
        """Leases older than their deadline fail. Returns them with their holders, and the evaluations that ended so.

        Args:
            is_excused: whether a holder is late for no fault of its prompts, which are then given back.
        """
        limit = now_s - self._lease_timeout_s
        late = [(lease, holder) for lease, holder, since in self._leased.values() if since < limit]
        results = []
        for lease, holder in late:
            if is_excused(holder):
                self.give_back(lease.lease_id)
            else:
                results.append(self.fail(lease.lease_id, "lease_timeout", now_s))
        return late, [result for result in results if result is not None]

    def accept(self, message: Deliver, now_s: float) -> EvalResult | None:
        """Take in an answered prompt. Returns the result if that ends an evaluation."""
        held = self._leased.pop(message.lease_id, None)
        if held is None:
            return None
        self._losses.pop(message.group_id, None)
        round_ = self._rounds[_step_of(held[0])]
        for rollout in message.rollouts:
            round_.lengths.append(rollout.num_tokens)
            round_.versions.update(span.version for span in rollout.spans)
            if rollout.score.value is None:
                round_.failures[rollout.score.failure or "unknown"] += 1
            else:
                round_.values.append(rollout.score.value)
        return self._count_down(round_, now_s)

    def _count_down(self, round_: _Round, now_s: float) -> EvalResult | None:
        round_.missing -= 1
        if round_.missing:
            return None
        del self._rounds[round_.step]
        return EvalResult(
            step=round_.step,
            oldest=min(round_.versions, default=None),
            newest=max(round_.versions, default=None),
            completions=len(round_.lengths),
            reward_mean=sum(round_.values) / len(round_.values) if round_.values else None,
            failures=dict(round_.failures),
            completion_length_mean=sum(round_.lengths) / len(round_.lengths) if round_.lengths else None,
            seconds=now_s - round_.started_s,
        )

    def _lease(self, step: int, index: int, attempt: int) -> Lease:
        group_id = f"eval.{self._lineage}.{step}.{index}"
        return Lease(
            lease_id=f"{group_id}.{attempt}",
            group_id=group_id,
            attempt=attempt,
            prompt_index=index,
            purpose="eval",
            prompt=self._prompts[index],
            num_completions=1,
            sampling=self._sampling,
            seed=self._seed + index,
        )


def _step_of(lease: Lease) -> int:
    return int(lease.group_id.split(".")[2])
