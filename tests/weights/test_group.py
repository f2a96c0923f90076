"""The weight group: bytes arrive, and whoever is late or gone costs a deadline and no process.

NCCL does not run without GPUs: its process group is a fake that keeps what it was told, and whose broadcasts can hang.
"""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from msgspec import structs

from asyncgrpo.errors import WireError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.arena import Place
from asyncgrpo.weights.group import NcclGroup, form_group, serve_store, visit_store
from asyncgrpo.weights.lane import GroupLane, receive, send
from asyncgrpo.weights.publication import Checksum
from asyncgrpo.weights.receiver import Receiver
from asyncgrpo.wire import Message
from asyncgrpo.wire.weights import FormGroup, Offer
from tests.weights.publishing import HOST, of_nccl, wait_until

# -- a generator that is behind ----------------------------------------------------------------------------------------


def test_of_several_groups_a_late_generator_forms_only_the_newest(monkeypatch):
    """One after the other, each until its deadline, it would never catch up with a learner that tries anew."""

    def form(number: int) -> FormGroup:
        return FormGroup(
            group_number=number, rank=1, world=2, store_host="h", store_port=1, backend="gloo", timeout_s=1.0
        )

    offers = [Offer(version=PolicyVersion(1, number), group_number=number) for number in (1, 3)]
    arrived = [form(1), offers[0], form(2), WireError("malformed"), form(3), offers[1]]
    late = Receiver(
        "tcp://127.0.0.1:9", generator_id="g", incarnation="0", host="h", apply=lambda *_: Checksum(""), keys=None
    )

    def receive(timeout_s: float) -> tuple[Message, bytes] | None:
        if arrived and isinstance(arrived[0], WireError):
            raise arrived.pop(0)
        return (arrived.pop(0), b"") if arrived else None

    handled: list[Message] = []
    late._client = SimpleNamespace(receive=receive)
    monkeypatch.setattr(late, "_handle", lambda message, payload: handled.append(message))
    late._handle_arrived(0.0)
    late._handle_arrived(0.0)
    assert handled == [form(2), form(3), offers[1]], "the malformed message ended the first look"


# -- members that are late or gone -------------------------------------------------------------------------------------


def test_a_group_that_failed_listens_to_nobody():
    """A member that connected to it later crashed this process, as long as the error was kept."""
    store, mine = serve_store(HOST, 5.0), str(ip_address("127.0.0.2") + os.getpid())  # nobody else's
    message = FormGroup(
        group_number=1, rank=0, world=2, store_host=HOST, store_port=store.port, backend="gloo", timeout_s=1.0
    )
    forming = ThreadPoolExecutor(1).submit(form_group, visit_store(HOST, store.port, 5.0), message, mine)
    wait_until(lambda: listens_at(mine), "a member that listens")
    error = forming.exception()
    assert isinstance(error, RuntimeError) and error.__traceback__ is not None
    assert not listens_at(mine)


def test_a_member_that_comes_after_the_others_gave_up_does_not_wait_for_them():
    store = serve_store(HOST, 5.0)

    def member(rank: int, timeout_s: float) -> FormGroup:
        place = {"store_host": HOST, "store_port": store.port, "backend": "gloo"}
        return FormGroup(group_number=1, rank=rank, world=2, timeout_s=timeout_s, **place)

    with pytest.raises(RuntimeError):
        form_group(visit_store(HOST, store.port, 5.0), member(0, 0.5), HOST)
    with pytest.raises(RuntimeError, match="given up"):
        form_group(visit_store(HOST, store.port, 5.0), member(1, 60.0), HOST)


def listens_at(host: str) -> bool:
    """True if a socket of this machine listens at an IPv4 address."""
    address = socket.inet_aton(host)[::-1].hex().upper()
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(local.startswith(address) and state == "0A" for _, local, _, state, *_ in sockets)


def test_a_group_does_not_wait_for_the_abandoned_one_before_it():
    """Both used one connection to the store, which serves one call at a time."""
    lane = GroupLane("gloo", HOST, timeout_s=10.0, piece_bytes=1)
    sent: list[Message] = []
    lane.form_with([Place(receivers=("gone",))], lambda peer, message: None)
    time.sleep(0.5)  # it waits in the store
    lane.drop()
    lane.form_with([Place(receivers=("here",))], lambda peer, message: sent.append(message))
    (message,) = sent
    assert isinstance(message, FormGroup)
    here = form_group(visit_store(HOST, message.store_port, 10.0), structs.replace(message, timeout_s=5.0), HOST)
    wait_until(lambda: lane.poll() or lane.state == "ready", "the second group")
    here.close()
    lane.close()


# -- NCCL --------------------------------------------------------------------------------------------------------------


class Nccl:
    """Stands for torch's process group of NCCL. A work is done after `done_s`; None: never, as when a member is gone."""

    made: ClassVar["list[Nccl]"] = []
    done_s: ClassVar[float | None] = 0.0

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)

    def __init__(self, store: dist.Store, rank: int, world: int, options: "Nccl.Options") -> None:
        self.options = options
        self.error_handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        self.calls: list[str] = []
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(f"connect {device}")

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> SimpleNamespace:
        self.calls.append("broadcast")
        started, done_s = time.monotonic(), self.done_s
        return SimpleNamespace(is_completed=lambda: done_s is not None and time.monotonic() - started >= done_s)

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(Nccl, "made", [])
    return Nccl


def nccl_group(timeout_s: float = 0.3, number: int = 0) -> NcclGroup:
    store = dist.HashStore()
    store.set("weights/1/0/joined/1", "")
    return form_group(store, of_nccl(0, 2, timeout_s), "127.0.0.1", number=number)


def test_the_communicator_is_made_at_once_and_without_blocking(nccl):
    nccl_group()
    (group,) = nccl.made
    assert group.calls == ["connect cuda:0"]
    assert group.options.config.blocking == 0


def test_the_groups_of_a_process_take_its_gpus_in_turns(nccl):
    assert [str(nccl_group(number=number).device) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_a_member_that_never_comes_costs_the_deadline_and_no_communicator(nccl):
    """On a GPU NCCL waited for it for more than 200 s."""
    with pytest.raises(RuntimeError):
        form_group(dist.HashStore(), of_nccl(0, 2, 0.3), "127.0.0.1")
    assert nccl.made == []


def test_copies_for_a_broadcast_have_two_streams_in_turns(nccl, monkeypatch):
    made = itertools.count()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream {next(made)} of {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
    group, used = nccl_group(), []
    for _ in range(3):
        with group.beside() as stream:
            used.append(stream)
    assert used == ["stream 0 of cuda:0", "stream 1 of cuda:0", "stream 0 of cuda:0"]


class Traced:
    """A group on a device whose order of work is kept: contexts, broadcasts and waits by number of their bucket."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.order: list[str] = []
        self.inside = -1
        self.sent: list[torch.Tensor] = []
        self._counts = itertools.count()

    def beside(self) -> "Context":
        return Context(self, next(self._counts))

    def broadcast(self, flat: torch.Tensor) -> None:
        self.order.append(f"broadcast {self.inside}")
        if self.sent:
            flat.copy_(self.sent.pop(0))

    def copied(self) -> Callable[[], None]:
        number = self.inside
        return lambda: self.order.append(f"wait {number}")


class Context(AbstractContextManager):
    """A context that can be entered again, as that of a CUDA stream."""

    def __init__(self, group: Traced, number: int) -> None:
        self._group, self._number = group, number

    def __enter__(self) -> None:
        self._group.inside = self._number
        self._group.order.append(f"copies {self._number}")

    def __exit__(self, *error: object) -> None:
        self._group.inside = -1


BUCKETS = [[(0, 3), (5, 6)], [(6, 7), (8, 16)], [(16, 17), (20, 24)]]


def test_a_bucket_is_copied_to_the_device_while_the_one_before_is_sent():
    group = Traced()
    send(group, torch.arange(24, dtype=torch.uint8), BUCKETS)
    broadcasts = [at for at in group.order if at.startswith("broadcast")]
    assert broadcasts == ["broadcast 0", "broadcast 1", "broadcast 2"], "each in the context of its copies"
    assert group.order.index("copies 1") < group.order.index("broadcast 0")
    assert group.order.index("broadcast 0") < group.order.index("copies 2"), "and only one ahead"


def test_a_bucket_is_copied_to_the_host_while_the_next_one_arrives():
    group, flat, got = Traced(), torch.zeros(24, dtype=torch.uint8), []
    group.sent = [torch.full((sum(end - start for start, end in bucket),), 7, dtype=torch.uint8) for bucket in BUCKETS]
    for run in receive(group, flat, BUCKETS):
        got.append(run)
        group.order.append(f"run {run}")
    assert got == [run for bucket in BUCKETS for run in bucket] and int(flat.sum()) == 7 * 18
    order = group.order
    assert order.index("broadcast 1") < order.index("wait 0") < order.index("run (0, 3)") < order.index("broadcast 2")
    assert order.index("wait 2") < order.index("run (16, 17)"), "a run is complete when it is yielded"


def test_a_failed_communicator_ends_no_process(nccl, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # of the ranks' own group, whose errors must end them
    nccl_group()
    assert nccl.made[0].error_handling == "2"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


@pytest.mark.parametrize(
    ("timeout_s", "lost_after_s", "why"), [(0.3, None, "timed out after 0 s"), (1000.0, 0.05, "a member was lost")]
)
def test_a_broadcast_whose_member_is_gone_ends_at_the_deadline_or_once_it_is_given_up(
    nccl, monkeypatch, timeout_s, lost_after_s, why
):
    monkeypatch.setattr(nccl, "done_s", None)
    group = nccl_group(timeout_s)
    if lost_after_s is not None:
        threading.Timer(lost_after_s, group.cancel).start()
    with pytest.raises(RuntimeError, match=why):
        group.broadcast(torch.zeros(8, dtype=torch.uint8))
    assert nccl.made[0].calls[-1] == "abort"


def test_a_broadcast_returns_when_it_is_done(nccl, monkeypatch):
    monkeypatch.setattr(nccl, "done_s", 0.05)
    group = nccl_group()
    group.broadcast(torch.zeros(8, dtype=torch.uint8))
    group.close()
    wait_until(lambda: nccl.made[0].calls == ["connect cuda:0", "broadcast", "abort"], "the end of the communicator")


def test_the_end_of_a_group_does_not_wait_for_a_member_on_this_machine(nccl, monkeypatch):
    """NCCL ends a communicator when all members of a machine do. The publisher tells the others after it has ended its own."""
    others_have_ended, waited = threading.Event(), list[bool]()
    monkeypatch.setattr(nccl, "abort", lambda group: waited.append(others_have_ended.wait(10.0)))
    nccl_group().close()
    assert not waited, "it would have been in vain"
    others_have_ended.set()
    wait_until(lambda: waited == [True], "the end of the communicator")
