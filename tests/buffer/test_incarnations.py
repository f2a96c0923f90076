"""The buffer's process keeps its promises about leases and words, whoever is late, lost, slow or there twice."""

from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.types import Lease, Prompt, Sampling
from asyncgrpo.wire import PROTOCOL, Message
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import (
    Cancel,
    Grant,
    LastEvals,
    Nack,
    Published,
    Register,
    RequestEval,
    Reregister,
    Serving,
    Shutdown,
    Snapshot,
    Take,
    TakeSnapshot,
    Waiting,
    Welcome,
)
from tests.buffer.test_buffer import deliver, make_buffer, prompts, v

PAYLOAD = bytes(16)
"""Two completions of one token."""


class Lines:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, peer: str, message: Message, payload: bytes = b"") -> bool:
        self.sent.append((peer, message))
        return True


class Served:
    """A buffer's process, turn by turn."""

    def __init__(self, *, held_out: tuple[Prompt, ...] = (), **settings) -> None:
        self.lines = Lines()
        self.buffer = make_buffer(**settings)
        evaluations = Evaluations(held_out, Sampling(), 0, 100.0)
        self.told: list[tuple[str, dict]] = []
        self.service = BufferService(
            self.lines,  # type: ignore[arg-type]
            self.buffer,
            evaluations,
            tell=lambda event, **fields: self.told.append((event, fields)),
        )
        self.now_s = 0.0

    def hear(self, peer: str, message: Message, payload: bytes = b"") -> list[tuple[str, str]]:
        """Who is sent what in completion."""
        self.lines.sent.clear()
        self.service.turn((peer, encode(message, payload)), self.now_s)
        return [(to, type(completion).__name__) for to, completion in self.lines.sent]

    def oldest_lease(self) -> Lease:
        entry = self.buffer.oldest_lease()
        assert entry is not None
        return entry.lease


def register(peer: str, window: int = 2) -> Register:
    return Register(protocol=PROTOCOL, generator_id="g", incarnation=peer, window=window)


def serving(version: int | None) -> Serving:
    return Serving(generator_id="g", version=None if version is None else v(version))


def test_a_late_word_of_an_incarnation_that_was_replaced_earns_its_successor_no_lease():
    served = Served()
    served.hear("learner", Published(version=v(0)))
    served.hear("g-old", register("g-old"))
    served.hear("g-new", register("g-new"))
    assert served.hear("g-old", serving(0)) == [("g-old", Shutdown.__name__)]
    assert served.buffer.held_by("g") == 0
    assert served.hear("g-new", serving(0)) == [("g-new", Grant.__name__)] * 2


def test_a_replaced_incarnation_cannot_come_back():
    served = Served()
    served.hear("g-old", register("g-old"))
    served.hear("g-new", register("g-new"))
    assert served.hear("g-old", register("g-old")) == [("g-old", Shutdown.__name__)]
    assert served.hear("g-new", serving(None)) == []


def test_who_works_on_a_lease_that_would_be_too_old_is_told_and_gets_exactly_one_other():
    served = Served(per_step=1, max_lag=0, policy="drop")
    served.hear("learner", Published(version=v(0)))
    served.hear("g-a", register("g-a"))
    served.hear("g-a", serving(0))
    lease = served.oldest_lease()
    served.hear("g-a", serving(1))
    said = served.hear("learner", Published(version=v(1)))
    assert said == [("g-a", Cancel.__name__), ("g-a", Grant.__name__)]
    (_, cancel), (_, grant) = served.lines.sent
    assert cancel.lease_ids == (lease.lease_id,) and cancel.reason == "stale"
    assert (grant.lease.prompt_index, grant.lease.attempt) == (lease.prompt_index, 1)
    assert served.hear("g-a", deliver(lease, 0), PAYLOAD) == [("g-a", Nack.__name__)]


def test_a_generator_whose_first_word_was_lost_is_asked_for_it():
    served = Served()
    served.hear("g-old", register("g-old"))
    assert served.hear("g-new", serving(None)) == [("g-new", Reregister.__name__)]
    assert served.hear("g-new", register("g-new")) == [("g-new", Welcome.__name__)]


def test_what_one_generator_was_too_slow_for_goes_to_another():
    served = Served(per_step=1, max_lag=0, lease_timeout_s=10.0)
    for name in ("quick", "slow"):
        served.hear(name, Register(protocol=PROTOCOL, generator_id=name, incarnation="0", window=1))
        served.hear(name, Serving(generator_id=name, version=v(0)))
    served.hear("learner", Published(version=v(0)))
    held = []
    for _ in range(3):
        served.now_s += 11.0
        for name in ("quick", "slow"):
            served.hear(name, Serving(generator_id=name, version=v(0)))
        held.append((served.buffer.held_by("quick"), served.buffer.held_by("slow")))
    assert held[0] == (0, 1) and held[1] == (1, 0), "first the one that was never late, then by turns"


def test_a_long_last_evaluation_is_no_silence():
    served = Served(held_out=prompts(1))
    served.hear("learner", Published(version=v(0)))
    served.hear("learner", RequestEval(step=0))
    served.hear("learner", LastEvals())
    told = []
    for _ in range(100):
        served.now_s += 1.0
        served.lines.sent.clear()
        served.service.turn(None, served.now_s)
        told += [message.what for _, message in served.lines.sent if isinstance(message, Waiting)]
    assert len(told) >= 90 and set(told) == {"the last evaluation"}


def test_a_lost_word_of_a_publication_is_made_good_by_the_next_one_of_the_learner():
    served = Served(per_step=1, max_lag=0)
    served.hear("learner", Published(version=v(0)))
    served.hear("g-1", register("g-1"))
    served.hear("g-1", serving(0))
    served.hear("learner", Take(step=0, version=v(0)))
    served.hear("g-1", deliver(served.oldest_lease(), 0), PAYLOAD)
    # Published(1) was lost.
    served.hear("learner", TakeSnapshot(published=v(1)))
    snapshot = next(message for _, message in served.lines.sent if isinstance(message, Snapshot))
    assert snapshot.state["frontier"] + len(snapshot.state["done_beyond"]) == 1
    assert served.buffer.outcomes["trained"] == 1
