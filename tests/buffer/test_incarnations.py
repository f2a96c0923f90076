"""The buffer's process keeps its promises about leases and words, whoever is late, lost, slow or there twice."""

import msgspec
import pytest

from asyncgrpo.buffer.buffer import Buffer
from asyncgrpo.buffer.evaluation import Evaluations
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.types import Lease, Prompt, Sampling
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import encode
from asyncgrpo.wire.rollouts import (
    Ack,
    AwaitsScores,
    Cancel,
    Grant,
    LastEvals,
    LeaseFailed,
    Nack,
    Register,
    RequestEval,
    Reregister,
    Serving,
    Take,
    Trained,
    Waiting,
)
from asyncgrpo.wire.supervision import Drain, Steer
from tests.buffer.test_buffer import deliver, make_buffer, prompts, v
from tests.journal.journals import Clock

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

    def __init__(
        self, *, held_out: tuple[Prompt, ...] = (), clock: Clock | None = None, buffer: Buffer | None = None, **settings
    ) -> None:
        self.lines, self.clock = Lines(), clock or Clock()
        self.buffer = buffer or make_buffer(**settings)
        evaluations = Evaluations(held_out, Sampling(), 0, 100.0)
        self.events: list[tuple[str, dict]] = []
        self.service = BufferService(
            self.lines,  # type: ignore[arg-type]
            self.buffer,
            evaluations,
            emit=lambda event, **fields: self.events.append((event, fields)),
        )

    @property
    def now_s(self) -> float:
        return self.clock.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.clock.now_s = now_s

    def hear(self, peer: str, message: Message, payload: bytes = b"") -> list[tuple[str, str]]:
        """Who is sent what in completion."""
        self.lines.sent.clear()
        self.service.turn((peer, encode(message, payload)), self.now_s)
        return [(to, type(completion).__name__) for to, completion in self.lines.sent]

    def join(self, name: str, *, incarnation: str = "0", peer: str = "", window: int = 2, version: int = 0) -> None:
        """A generator registers and says which weights it serves."""
        said = Register(generator_id=name, incarnation=incarnation, window=window)
        for message in (said, Serving(generator_id=name, version=v(version))):
            self.hear(peer or name, message)

    def pass_time(self, seconds: float, *who_speaks: str) -> list[tuple[str, Message]]:
        """What is sent while time passes, a tenth of a second at a time."""
        sent = []
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            self.lines.sent.clear()
            self.service.turn(None, self.now_s)
            sent += self.lines.sent
            for name in who_speaks:
                self.hear(name, Serving(generator_id=name, version=v(0)))
                sent += self.lines.sent
        return sent

    def grants(self) -> dict[str, list[int]]:
        """Prompt indices of the leases that were just granted, by peer."""
        found: dict[str, list[int]] = {}
        for peer, message in self.lines.sent:
            if isinstance(message, Grant):
                found.setdefault(peer, []).append(message.lease.prompt_index)
        return found

    def oldest_lease(self) -> Lease:
        entry = self.buffer.oldest_lease()
        assert entry is not None
        return entry.lease


def register(peer: str, window: int = 2) -> Register:
    return Register(generator_id="g", incarnation=peer, window=window)


def serving(version: int | None) -> Serving:
    return Serving(generator_id="g", version=None if version is None else v(version))


def test_a_generator_that_was_asked_twice_for_its_first_word_keeps_its_leases():
    """Two heartbeats may come before the first one's request is heard: it registers for each."""
    served = Served()
    served.hear("learner", Trained(version=v(0)))
    for _ in range(2):
        assert served.hear("g-1", serving(0)) == [("g-1", Reregister.__name__)]
    assert served.hear("g-1", register("g-1")) == []
    assert granted(served.hear("g-1", serving(0))) == ["g-1"] * 2
    assert served.hear("g-1", register("g-1")) == []
    assert served.buffer.held_by("g") == 2 and not served.buffer.outcomes["requeued"]


def test_a_long_last_evaluation_is_no_silence():
    served = Served(held_out=prompts(1))
    served.hear("learner", Trained(version=v(0)))
    served.hear("learner", RequestEval(step=0))
    served.hear("learner", LastEvals())
    awaited = []
    for _ in range(100):
        served.now_s += 1.0
        served.lines.sent.clear()
        served.service.turn(None, served.now_s)
        awaited += [message.what for _, message in served.lines.sent if isinstance(message, Waiting)]
    assert len(awaited) >= 90 and set(awaited) == {"the last evaluation"}


def granted(sent: list[tuple[str, str]]) -> list[str]:
    return [peer for peer, kind in sent if kind == Grant.__name__]


def two_at_work() -> Served:
    """Two generators with a lease each, at 0 s; each may hold two."""
    served = Served(per_step=2, max_lag=0)
    served.join("g-1")
    served.join("g-2")
    served.hear("learner", Trained(version=v(0)))
    assert [served.buffer.held_by(name) for name in ("g-1", "g-2")] == [1, 1]
    return served


def test_what_a_silent_generator_works_on_goes_to_one_that_speaks_and_one_of_the_two_is_trained():
    served = two_at_work()
    lease = next(entry.lease for entry in served.buffer._entries.values() if entry.holder == "g-2")
    assert served.pass_time(4.9, "g-1") == []
    (to, cancel), (other, grant) = served.pass_time(0.3, "g-1")
    assert (to, other) == ("g-2", "g-1") and isinstance(cancel, Cancel) and isinstance(grant, Grant)
    assert (cancel.lease_ids, cancel.reason) == ((lease.lease_id,), "silent")
    assert (grant.lease.prompt_index, grant.lease.attempt) == (lease.prompt_index, 1)
    assert not served.buffer._attempts.total(), "it costs the prompt nothing"
    assert served.hear("g-2", deliver(lease, 0), PAYLOAD) == [("g-2", Nack.__name__)]
    assert served.hear("g-1", deliver(grant.lease, 0), PAYLOAD) == [("g-1", Ack.__name__)]
    assert served.buffer.tokens == {"generated": 4, "aborted": 2}


def test_a_lease_that_expired_is_cancelled_at_its_holder():
    """Each was cancelled at every generator: a million messages where 1,024 leases expired together."""
    served = two_at_work()
    entry = next(entry for entry in served.buffer._entries.values() if entry.holder == "g-2")
    entry.limit_s = 1.0
    sent = served.pass_time(1.5, "g-1", "g-2")
    assert [(to, m.lease_ids) for to, m in sent if isinstance(m, Cancel)] == [("g-2", (entry.lease.lease_id,))]


@pytest.mark.parametrize("why", ["nobody speaks", "paused", "failing"])
def test_a_silent_generator_keeps_its_leases_where_nobody_speaks_or_may_lease(why: str):
    served = two_at_work()
    if why == "paused":
        served.service.steer(Steer(revision=1, is_paused=True))
    elif why == "failing":
        served.hear("driver", Drain(reason=why))
    served.pass_time(30.0, *(["g-1"] if why != "nobody speaks" else []))
    assert served.buffer.held_by("g-2") == 1


def test_what_was_not_read_while_the_buffer_stood_still_is_no_silence():
    served = two_at_work()
    served.now_s += 10.0
    served.pass_time(4.5, "g-1")
    assert served.buffer.held_by("g-2") == 1
    served.pass_time(1.0, "g-1")
    assert served.buffer.held_by("g-2") == 0


def test_a_group_that_only_awaits_its_scores_takes_a_slot_and_no_place():
    served = Served(per_step=2, max_lag=1)
    for name in ("g", "other"):
        served.hear(name, Register(generator_id=name, incarnation="0", window=1))
    served.hear("g", serving(0))
    assert served.hear("learner", Trained(version=v(0))) == [("g", "Grant")]
    served.now_s += 1.0
    lease_id = served.oldest_lease().lease_id
    assert served.hear("other", AwaitsScores(generator_id="other", lease_id=lease_id)) == [], "it is not its own"
    assert served.hear("g", AwaitsScores(generator_id="g", lease_id=lease_id)) == [("g", "Grant")]
    assert served.hear("g", AwaitsScores(generator_id="g", lease_id=lease_id)) == [], "that was said before"
    assert (served.buffer.held_by("g"), served.buffer.sampled_by("g"), served.buffer.num_sampled) == (2, 1, 1)
    for index in (1, 2):
        assert served.hear("g", AwaitsScores(generator_id="g", lease_id=f"1.{index}.0")) == [("g", "Grant")]
    assert served.hear("g", AwaitsScores(generator_id="g", lease_id="1.3.0")) == [], "all four slots are full"
    assert served.hear("g", deliver(served.oldest_lease(), 0), PAYLOAD) == [("g", "Ack")]
    assert (served.buffer.held_by("g"), served.buffer.sampled_by("g")) == (3, 0)


def test_of_generators_that_sample_as_little_the_one_with_fewer_groups_to_score_gets_a_lease():
    served = Served(per_step=2, max_lag=1)
    served.join("a")
    served.join("b")
    served.hear("learner", Trained(version=v(0)))
    leases = {name: [e.lease for e in served.buffer._entries.values() if e.holder == name] for name in "ab"}
    for name in "ab":
        for lease in leases[name]:
            assert served.hear(name, AwaitsScores(generator_id=name, lease_id=lease.lease_id)) == []
    failed = LeaseFailed(generator_id="b", lease_id=leases["b"][0].lease_id, reason="failed")
    assert served.hear("b", failed) == [("b", "Grant")]


def test_what_awaits_its_scores_counts_for_the_share_of_a_version_s_first_half_second():
    served = Served(per_step=2, max_lag=1)
    served.join("a")
    served.join("b")
    served.hear("learner", Trained(version=v(0)))
    for entry in list(served.buffer._entries.values()):
        if entry.holder == "a":
            served.hear("a", AwaitsScores(generator_id="a", lease_id=entry.lease.lease_id))
        else:
            served.hear("b", msgspec.structs.replace(deliver(entry.lease, 0), generator_id="b"), PAYLOAD)
    served.hear("learner", Take(version=v(0)))
    served.hear("learner", Trained(version=v(1)))
    assert served.hear("a", Serving(generator_id="a", version=v(1))) == [], "it holds half of the four slots"
    assert served.hear("b", Serving(generator_id="b", version=v(1))) == [("b", "Grant")] * 2


def test_the_first_generator_of_a_version_gets_no_more_than_its_part_of_what_is_not_ready():
    served = Served(per_step=2, max_lag=3)
    served.join("a", window=4)
    served.join("b", window=4)
    served.hear("learner", Trained(version=v(0)))
    leases = {name: [e.lease for e in served.buffer._entries.values() if e.holder == name] for name in "ab"}
    for name, lease in [*(("b", lease) for lease in leases["b"]), *(("a", lease) for lease in leases["a"][:2])]:
        served.hear(name, msgspec.structs.replace(deliver(lease, 0), generator_id=name), PAYLOAD)
    served.hear("learner", Take(version=v(0)))
    served.hear("learner", Trained(version=v(1)))
    assert served.hear("a", Serving(generator_id="a", version=v(1))) == [], "four of eight are ready, and it holds two"
    assert served.hear("b", Serving(generator_id="b", version=v(1))) == [("b", "Grant")] * 2
