"""Publications of several learner ranks: each broadcasts its part, and the publisher's digest is of all."""

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncgrpo import liveness
from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError, WireError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights import arena, lane
from asyncgrpo.weights.arena import BLOCK, Arenas, Bucket, Layout, Place, SharedTensors, Slot, Stream
from asyncgrpo.weights.group import WeightGroup, form_group
from asyncgrpo.weights.lane import Deltas, Sender, Written
from asyncgrpo.weights.publication import VERSIONS_KEPT, Checksum, SyncGap
from asyncgrpo.weights.receiver import _streams
from asyncgrpo.wire import Message
from asyncgrpo.wire.sockets import Client
from asyncgrpo.wire.weights import FormGroup, PartWritten, WeightsLayout
from tests.gpu_rehearsals.cluster import needs_namespaces
from tests.weights import links
from tests.weights.changing import LAYOUT, Engine, Fleet, change, checksum, drawn
from tests.weights.publishing import wait_until

SIZE = LAYOUT.num_bytes
OTHER = Stream([(4, 16), (64, SIZE // 3 // 4 * 4), (SIZE // 2 // 4 * 4, SIZE - 4)])
"""What the other machine sends, at odd places between elements."""


class Ranks(Fleet):
    """The publisher, a sender for each other rank, and generators that receive."""

    def __init__(self, *others: Stream, is_whole: bool) -> None:
        config = WeightsConfig(bucket_mb=1, timeout_s=5.0)
        super().__init__(config, maps=True, others=others, is_whole=is_whole)
        self.others = others
        self.arenas = [torch.zeros(2, SIZE, dtype=torch.uint8) for _ in others]
        self.writes: Counter[int] = Counter()
        endpoint = self.publisher.endpoint
        self.senders = [
            Sender(number, stream, endpoint=endpoint, host="127.0.0.1", keys=None, layout=LAYOUT)
            for number, stream in enumerate(others, 1)
        ]

    def publish(
        self, number: int, flat: Tensor | None = None, *, late: Callable[[int], bool] = lambda sender: False
    ) -> PolicyVersion:
        """Begin to publish these weights, else random ones. On several machines each arena has the bytes of its own rank only.

        Args:
            late: says which senders have not written yet.
        """
        version = PolicyVersion(1, number)
        flat = self.truth[version] = drawn(number) if flat is None else flat

        def fill(arenas: Arenas, slot: int) -> None:
            arena = arenas.arena(self.publisher._layout, slot)
            self.writes[slot] += 1
            arena.copy_(flat)
            for place, (stream, sender) in enumerate(zip(self.others, self.senders, strict=True)):
                into = self.arenas[place][slot]
                for start, end in stream.runs:
                    into[start:end] = flat[start:end]
                    if not self.publisher._maps:
                        arena[start:end] = 0
                is_complete = lambda number=place + 1: not late(number)  # noqa: E731
                sender.written(Written(slot, self.writes[slot], into, is_complete))

        wait_until(lambda: self.publisher.offer(version, fill), "an arena")
        return version

    def arrives(self, version: PolicyVersion, *engines: Engine) -> None:
        for engine in engines:
            wait_until(lambda engine=engine: version in engine.held, str(version))
        self.check(*engines)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        super().close()


@pytest.fixture
def machines() -> Iterator[Ranks]:
    """Two ranks on two machines."""
    made = Ranks(OTHER, is_whole=False)
    yield made
    made.close()


@pytest.fixture
def ranks(monkeypatch) -> Iterator[Ranks]:
    """Three ranks on one machine."""
    monkeypatch.setattr(arena, "BLOCK", 4096)
    made = Ranks(*Stream([(0, SIZE)]).split(3)[1:], is_whole=True)
    yield made
    made.close()


def test_generators_come_and_go_and_get_the_bytes_of_both_machines(machines):
    first = machines.add("a")
    for number in range(3):
        machines.arrives(machines.publish(number), first)
    second = machines.add("b")
    machines.arrives(machines.publish(3), first, second)
    machines.receivers[0].stop()
    machines.publisher.give_up("a", "0")
    machines.arrives(machines.publish(4), second)
    wait_until(lambda: machines.publisher.is_idle, "rest")
    reports = machines.publisher.reports()
    assert all(report.attempts == 1 and len(set(report.checksums.values())) == 1 for report in reports)


def test_bytes_that_change_on_the_way_from_another_machine_are_sent_again(machines, monkeypatch):
    engine = machines.add("a")
    altered_once(machines, [engine], monkeypatch, lambda start: start == OTHER.runs[0][0])


def altered_once(
    made: Ranks, engines: list[Engine], monkeypatch: pytest.MonkeyPatch, where: Callable[[int], bool]
) -> None:
    """A version of which a byte is altered, at the begin of a run, arrives at the second attempt."""
    made.arrives(made.publish(0), *engines)
    wait_until(lambda: made.publisher.is_idle, "rest")
    made.publisher.reports()
    receive, flips = lane.receive, [1]

    def altered(group: object, flat: Tensor, buckets: Iterable[Bucket]) -> Iterator[tuple[int, int]]:
        for run in receive(group, flat, buckets):
            if flips and where(run[0]):
                flat[run[0]] ^= flips.pop()
            yield run

    monkeypatch.setattr("asyncgrpo.weights.receiver.receive", altered)
    made.arrives(made.publish(1), *engines)
    wait_until(lambda: made.publisher.is_idle, "rest")
    (report,) = made.publisher.reports()
    assert report.attempts == 2 and not flips


def test_a_rank_that_does_not_write_is_named(machines):
    machines.add("a")
    machines.publisher._config = WeightsConfig(bucket_mb=1, timeout_s=0.2)
    machines.publish(0, late=lambda sender: True)
    with pytest.raises(WeightsError, match=r"learner senders \[1\] have not reported the digests of weights 1.0"):
        wait_until(machines.publisher.reports, "report")


def test_a_generator_is_not_dropped_while_it_waits_for_a_rank_that_has_not_written(machines, monkeypatch):
    monkeypatch.setattr(liveness, "SUSPECT_S", 1.0)
    engine, goes_on = machines.add("a"), threading.Event()
    machines.arrives(machines.publish(0), engine)
    version = machines.publish(1, late=lambda sender: not goes_on.is_set())
    wait_until(lambda: machines.publisher._members["a"].place.awaited, "the broadcast")
    time.sleep(2 * liveness.SUSPECT_S)
    goes_on.set()
    machines.arrives(version, engine)
    assert machines.publisher._lane.number == 1, "in the same group"


# -- several generators of a machine receive side by side --------------------------------------------------------------


def test_each_generator_of_a_machine_receives_from_other_ranks_into_one_file(ranks):
    near, *far = (ranks.add(name, machine=machine) for name, machine in (("h", ""), ("a", "m"), ("b", "m"), ("c", "n")))
    version = ranks.publish(0)
    ranks.arrives(version, near, *far)
    wait_until(lambda: ranks.publisher.is_idle, "rest")
    (report,) = ranks.publisher.reports()
    assert report.digest == checksum(ranks.truth[version]).digest, "as if one rank had sent all"
    assert report.sent_bytes == 3 * SIZE, "one engine has read them, and two machines received them once"
    _, first, second, third = ranks.receivers
    assert [list(receiver._groups) for receiver in (first, second, third)] == [[0, 2], [1], [0, 1, 2]]
    assert first._stagings.keys() == second._stagings.keys() != third._stagings.keys()


def test_a_generator_of_two_gpus_receives_over_both_links_at_once(ranks, monkeypatch):
    both = threading.Barrier(2)

    def on_a_gpu(store: Any, message: FormGroup, host: str, sender: int, number: int) -> WeightGroup:
        group = form_group(store, message, host, sender, number)
        group.device = torch.device("cpu", number % 2)
        return group

    def together(group: WeightGroup, flat: Tensor, buckets: Iterable[Bucket]) -> Iterator[tuple[int, int]]:
        if group is not alone._groups[2]:  # which takes turns with the first one
            both.wait(10.0)
        return lane.receive(group, flat, buckets)

    monkeypatch.setattr("asyncgrpo.weights.receiver.form_group", on_a_gpu)
    monkeypatch.setattr("asyncgrpo.weights.receiver.receive", together)
    engine = ranks.add("a", machine="m")
    (alone,) = ranks.receivers
    ranks.arrives(ranks.publish(0), engine)
    assert list(alone._groups) == [0, 1, 2] and not both.broken


def test_deltas_go_to_the_first_receiver_of_a_machine(ranks, monkeypatch):
    poll = Deltas.poll
    monkeypatch.setattr(Deltas, "poll", lambda deltas, broadcast_s: poll(deltas, math.inf))
    engines = [ranks.add(name, machine=machine) for name, machine in (("a", "m"), ("b", "m"), ("c", "n"))]
    flat, random = drawn(0), np.random.default_rng(0)
    for number in range(4):
        change(flat, 0.01, random, lambda below: 0)
        ranks.arrives(ranks.publish(number, flat.clone()), *engines)
        wait_until(lambda: ranks.publisher.is_idle and not ranks.publisher._deltas.is_busy, "rest")
    first, *rest = sorted(ranks.publisher.reports(), key=lambda report: report.version)
    assert first.sent_bytes == 2 * SIZE and len(rest) == 3
    assert all(report.sent_bytes < SIZE / 4 and report.attempts == 1 for report in rest)


def test_after_a_receiver_has_ended_the_others_of_its_machine_receive_into_another_file(ranks):
    engines = [ranks.add(name, machine="m") for name in "ab"]
    ranks.arrives(ranks.publish(0), *engines)
    (before,) = ranks.receivers[0]._stagings
    ranks.receivers[1].stop()
    ranks.publisher.give_up("b", "0")
    ranks.arrives(ranks.publish(1), engines[0])
    assert before not in ranks.receivers[0]._stagings, "what has ended could still write into it"
    again = ranks.add("b", incarnation="1", machine="m")
    ranks.arrives(PolicyVersion(1, 1), again)
    ranks.arrives(ranks.publish(2), engines[0], again)
    assert ranks.publisher._lane.names == {"a"}, "a newcomer receives once the others begin anew"


def test_after_a_receiver_that_may_still_write_no_deltas_come():
    place, version = Place(), PolicyVersion(1, 0)
    place.choose(["a", "b"], "mark")
    for late, keeps in ((("a", "b"), False), (("a",), True)):
        slot = place.newest = place.writable()
        slot.version = version
        place.slots.append(Slot())
        place.receive(place.slots[-1], version, late)
        place.abandon()
        assert (place.version is not None) == keeps


def test_a_part_that_was_altered_is_received_again_with_all_others(ranks, monkeypatch):
    engines = [ranks.add(name, machine="m") for name in "ab"]
    altered_once(ranks, engines, monkeypatch, lambda start: start > 0)


def test_a_rank_that_is_ahead_of_another_is_not_forgotten(ranks):
    """It reports the next version before the other one has reported this one."""
    engine, goes_on = ranks.add("a", machine="m"), threading.Event()
    ranks.publish(0, late=lambda sender: sender == 2 and not goes_on.is_set())
    wait_until(lambda: ranks.publisher._preparing, "the first version")
    last = ranks.publish(1)
    wait_until(lambda: len(ranks.publisher._parts) == 2, "a report of the next version")
    goes_on.set()
    ranks.arrives(last, engine)


def test_a_report_that_a_broken_connection_loses_is_made_up_for(ranks, monkeypatch):
    send, losses = Client.send, []

    def lossy(client: Client, message: Message, payload: bytes = b"") -> None:
        if isinstance(message, PartWritten) and len(losses) < 2:
            losses.append(message)
        else:
            send(client, message, payload)

    monkeypatch.setattr(liveness, "SUSPECT_S", 1.0)
    monkeypatch.setattr(Client, "send", lossy)
    engine = ranks.add("a", machine="m")
    ranks.arrives(ranks.publish(0), engine)
    assert len(losses) == 2


def test_an_engine_may_swap_before_the_digests_of_all_ranks_are_known(ranks):
    near, goes_on, started_s = ranks.add("h"), threading.Event(), time.monotonic()
    version = ranks.publish(0, late=lambda sender: not goes_on.is_set())
    ranks.arrives(version, near)
    wait_until(lambda: ranks.publisher._early, "the report of its swap")
    most_s = time.monotonic() - started_s
    goes_on.set()
    wait_until(lambda: ranks.publisher.is_idle, "rest")
    (report,) = ranks.publisher.reports()
    assert report.seconds <= most_s, "it had swapped"
    assert report.generators == ("h",) and report.digest == checksum(ranks.truth[version]).digest


def test_an_engine_that_swapped_early_does_not_load_again_while_a_digest_is_awaited(ranks, monkeypatch):
    monkeypatch.setattr(liveness, "SUSPECT_S", 1.0)
    near, goes_on = ranks.add("h"), threading.Event()
    loads, apply = [], near.apply
    near.apply = lambda tensors, version: loads.append(version) or apply(tensors, version)
    version = ranks.publish(0, late=lambda sender: sender == 1 and not goes_on.is_set())
    wait_until(lambda: ranks.publisher._early, "the report of its swap")
    time.sleep(2 * liveness.SUSPECT_S)
    goes_on.set()
    wait_until(lambda: ranks.publisher.is_idle, "rest")
    assert loads == [version]


def test_what_an_engine_reported_before_it_was_dropped_says_nothing_of_its_next_load(ranks, monkeypatch):
    """Else the learner would overwrite the arena that it reads."""
    monkeypatch.setattr(liveness, "SUSPECT_S", 1.0)
    engine, goes_on, send, is_silent = ranks.add("h"), threading.Event(), Client.send, threading.Event()

    def silent(client: Client, message: Message, payload: bytes = b"") -> None:
        if not (is_silent.is_set() and getattr(message, "generator_id", "") == "h"):
            send(client, message, payload)

    monkeypatch.setattr(Client, "send", silent)
    ranks.publish(0, late=lambda sender: not goes_on.is_set())
    wait_until(lambda: ranks.publisher._early, "the report of its swap")
    is_silent.set()
    wait_until(lambda: ranks.publisher._missing, "its absence")
    engine.may_go_on.clear()
    is_silent.clear()
    wait_until(lambda: ranks.receivers[0]._swapping is not None, "the next load")
    goes_on.set()
    wait_until(lambda: ranks.publisher._preparing is None, "the digests")
    assert any("h" in slot.readers for slot in ranks.publisher._home.slots)
    engine.may_go_on.set()
    wait_until(lambda: ranks.publisher.is_idle, "rest")


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_tensors_that_an_engine_holds_otherwise_than_they_were_sent_are_named(ranks, order, caplog):
    class Faulty(Engine):
        """Turns a bit of a layer of the second version."""

        def apply(self, tensors: SharedTensors, version: PolicyVersion) -> Checksum:
            held = [(name, tensor.clone()) for name, tensor in tensors]
            if version.number == 1:
                held[2][1].view(torch.int16)[3, 4] ^= 1
            return super().apply(held, version)

    engines = {"a": ranks.add("a", Faulty()), "b": ranks.add("b")}
    first, second = order
    for number, gaps in enumerate([{}, {"a": SyncGap(math.inf, math.inf)}, {}]):
        caplog.clear()
        engines[second].may_go_on.clear()
        version = ranks.publish(number)
        wait_until(lambda version=version: ranks.publisher._members[first].holds == version, "the first report")
        engines[second].may_go_on.set()
        wait_until(lambda: ranks.publisher.is_idle, "rest")
        (report,) = ranks.publisher.reports()
        assert report.gaps == gaps and report.attempts == 1, "the engines are not compared with each other"
        assert ("a: 1 tensors are not those of weights 1.1: layer" in caplog.text) == bool(gaps)


def test_a_broadcast_does_not_wait_for_the_digests_but_the_engine_does(ranks, monkeypatch):
    goes_on, digests = threading.Event(), Stream.digests

    def late(*given: Any) -> arena.Digests:
        assert goes_on.wait(30.0)
        return digests(*given)

    engine = ranks.add("a", machine="m")
    ranks.arrives(ranks.publish(0), engine)
    monkeypatch.setattr(Stream, "digests", late)
    version, place = ranks.publish(1), ranks.publisher._members["a"].place
    wait_until(lambda: place.receiving and not place.awaited, "all of its bytes")
    assert version not in engine.held and not ranks.publisher.is_idle
    goes_on.set()
    ranks.arrives(version, engine)
    wait_until(lambda: ranks.publisher.is_idle, "rest")
    assert not any(report.gaps for report in ranks.publisher.reports())


def test_a_rank_reads_no_weights_that_were_overwritten_while_it_was_busy(ranks, monkeypatch):
    """Else a learner whose steps are shorter than the digests of a version would leave it ever farther behind."""
    goes_on, digests, versions = threading.Event(), Stream.digests, Counter[tuple[int, int]]()

    def late(stream: Stream, layout: Layout, flat: Tensor) -> arena.Digests:
        versions[stream.runs[0]] += stream.runs[0] != (0, SIZE)  # of a delta's result
        assert goes_on.wait(30.0)
        return digests(stream, layout, flat)

    monkeypatch.setattr(Stream, "digests", late)
    engine = ranks.add("a", machine="m")
    for number in range(5):
        last = ranks.publish(number)
        wait_until(lambda: len(versions) == 3, "each rank")
    goes_on.set()
    ranks.arrives(last, engine)
    wait_until(lambda: ranks.publisher.is_idle, "rest")
    assert [count for count in versions.values() if count] == [2, 2, 2], "of the first version and of the last"


def test_an_engine_may_swap_to_a_version_after_many_newer_ones(ranks, monkeypatch):
    slow, quick = ranks.add("h"), ranks.add("i")
    slow.may_go_on.clear()
    for number in range(VERSIONS_KEPT + 3):
        ranks.arrives(ranks.publish(number), quick)
    slow.may_go_on.set()
    ranks.arrives(PolicyVersion(1, VERSIONS_KEPT + 2), slow)
    assert len(ranks.publisher._sent) <= VERSIONS_KEPT + 1


@needs_namespaces
@pytest.mark.timeout(600)
def test_each_link_of_a_machine_carries_its_part_of_the_weights():
    mb, count = 8, 2
    with links.network() as cluster:
        _, moved = links.publications(cluster, mb, senders=2, count=count)
    parts = Stream([(0, mb * 2**20)]).split(2)
    sizes = [count * sum(end - start for start, end in part.runs) for part in parts]
    receivers = sorted(links.GENERATORS, key=lambda node: -moved[node][1])  # the first part is the larger one
    for size, sender, receiver in zip(sizes, (links.LEARNER, links.OTHER_RANK), receivers, strict=True):
        (sent, back), (forth, received) = moved[sender], moved[receiver]
        assert size < sent < 1.1 * size and size < received < 1.1 * size  # headers are up to 4.6 %
        assert max(back, forth) < 0.05 * size


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_buckets_have_every_byte_once_and_are_cut_between_blocks(seed):
    drawn = random.Random(seed)
    edges = sorted(drawn.sample(range(9 * BLOCK), 2 * drawn.randrange(1, 9)))
    stream = Stream(zip(edges[::2], edges[1::2], strict=True))
    size = drawn.choice([1, 2, 5]) * BLOCK
    buckets = list(stream.buckets(size))
    assert all(sum(end - start for start, end in bucket) <= size for bucket in buckets)
    assert Stream(run for bucket in buckets for run in bucket).runs == stream.runs
    ends = {end for _, end in stream.runs}
    assert all(end in ends or end % BLOCK == 0 for bucket in buckets for _, end in bucket)
    assert Stream([*stream.runs, *stream.rest(9 * BLOCK).runs]).runs == [(0, 9 * BLOCK)]


@pytest.mark.parametrize(("size", "count"), [(5, 1), (BLOCK, 1), (5 * BLOCK + 7, 3), (41 * BLOCK, 4)])
def test_parts_of_a_stream_are_all_of_it_and_about_equal(size, count):
    parts = Stream([(0, 3), (4, size)]).split(4)
    assert Stream(run for part in parts for run in part.runs).runs == [(0, 3), (4, size)]
    sizes = [sum(end - start for start, end in part.runs) for part in parts]
    assert len(parts) == count and max(sizes) <= size // 4 + BLOCK
    assert all(start % BLOCK == 0 for part in parts[1:] for start, _ in part.runs)


@pytest.mark.filterwarnings("error")
def test_digests_of_tensors_are_the_same_however_these_are_cut(monkeypatch):
    flat = drawn(0)
    whole = Stream([(0, SIZE)]).digests(LAYOUT, flat)
    for name in ("BLOCK", "SHARE_BYTES"):
        monkeypatch.setattr(arena, name, 4096)
    other = Stream([(2, 16), (64, SIZE // 16 * 8), (SIZE // 64 * 48, SIZE - 64)])
    parts = [other, other.rest(SIZE)]
    assert (sum(part.digests(LAYOUT, flat) for part in parts) == whole).all()


def test_streams_that_miss_a_byte_are_refused():
    message = WeightsLayout(tensors=LAYOUT.tensors, streams=(1, 1))
    payload = torch.tensor([[0, 8], [9, SIZE]]).numpy().tobytes()
    with pytest.raises(ValueError, match="are not the whole"):
        _streams(message, payload, SIZE)


@pytest.mark.parametrize(("columns", "numbers"), [(1, [1, 2, 3]), (2, [4, 1]), (2, [0, 1, 2]), (1, [])])
def test_digests_that_are_not_of_these_tensors_are_refused(ranks, columns, numbers):
    with pytest.raises(WireError, match="are not"):
        ranks.publisher._digests(np.array(numbers, np.uint64).tobytes(), columns)
