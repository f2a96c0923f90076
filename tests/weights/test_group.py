"""The weight group: bytes arrive, and whoever is late or gone costs a deadline and no process.

NCCL does not run without GPUs: its process group is a fake that keeps what it was told, and whose broadcasts can hang.
"""

import os
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from asyncgrpo.scratch import SHARED_MEMORY, mark
from asyncgrpo.weights import group as groups
from asyncgrpo.weights.group import NcclGroup, SharedMemoryGroup, form_group


def members(world: int, timeout_s: float = 5.0, number: int = 1) -> list[SharedMemoryGroup]:
    """A group in shared memory, all of whose members are in this process."""
    store, made = dist.HashStore(), {}

    def form(rank: int) -> None:
        made[rank] = form_group(
            store, number=number, rank=rank, world=world, backend="shared_memory", host="127.0.0.1", timeout_s=timeout_s
        )

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(world)]


def files() -> list[str]:
    return [file.name for file in SHARED_MEMORY.glob(f"*{mark()}-weights-*")]


def test_every_member_copies_what_rank_0_has():
    first, *others = members(3)
    for size in (1000, 10, 5000, 5000):  # smaller than before, larger, the same
        sent = torch.randint(0, 256, (size,), dtype=torch.uint8)
        received = [torch.zeros(size, dtype=torch.uint8) for _ in others]
        threads = [
            threading.Thread(target=member.broadcast, args=(flat,))
            for member, flat in zip(others, received, strict=True)
        ]
        for thread in threads:
            thread.start()
        first.broadcast(sent)
        for thread in threads:
            thread.join()
        for flat in received:
            assert torch.equal(flat, sent)
        assert len(files()) == 1
    for member in (first, *others):
        member.close()
    assert not files()


def test_rank_0_waits_for_a_member_that_is_gone_until_the_deadline_only():
    first, _ = members(2, timeout_s=0.5, number=2)
    with pytest.raises(RuntimeError):
        first.broadcast(torch.zeros(8, dtype=torch.uint8))
    first.close()
    assert not files()


def test_a_member_waits_for_a_rank_0_that_is_gone_until_the_deadline_only():
    _, second = members(2, timeout_s=0.5, number=3)
    with pytest.raises(RuntimeError):
        second.broadcast(torch.zeros(8, dtype=torch.uint8))


def test_a_member_that_does_not_come_costs_a_deadline():
    with pytest.raises(RuntimeError):
        form_group(
            dist.HashStore(), number=1, rank=0, world=2, backend="shared_memory", host="127.0.0.1", timeout_s=0.5
        )


def test_too_little_shared_memory_is_one_sentence(tmp_path, monkeypatch):
    def full(*ignored: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(groups.os, "posix_fallocate", full)
    first, _ = members(2, timeout_s=0.5, number=4)
    with pytest.raises(RuntimeError, match=r"16 MiB of weights do not fit into /dev/shm .*--shm-size"):
        first.broadcast(torch.zeros(2**24, dtype=torch.uint8))
    assert not files()


def test_a_broadcast_to_a_member_that_is_given_up_ends_at_once():
    """Without `cancel` it would last longer than a test may."""
    first, _ = members(2, timeout_s=1000.0, number=5)
    threading.Timer(0.1, first.cancel).start()
    with pytest.raises(RuntimeError, match="a member is gone"):
        first.broadcast(torch.zeros(8, dtype=torch.uint8))
    first.close()


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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Nccl, "made", [])
    return Nccl


def nccl_group(timeout_s: float = 0.3) -> NcclGroup:
    return form_group(
        dist.HashStore(), number=1, rank=0, world=2, backend="nccl", host="127.0.0.1", timeout_s=timeout_s
    )


def test_the_communicator_is_made_at_once_and_without_blocking(nccl):
    nccl_group()
    (group,) = nccl.made
    assert group.calls == ["connect cuda:0"]
    assert group.options.config.blocking == 0


def test_a_failed_communicator_ends_no_process(nccl, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # of the ranks' own group, whose errors must end them
    nccl_group()
    assert nccl.made[0].error_handling == "2"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_a_broadcast_whose_member_is_gone_is_given_up_at_the_deadline(nccl, monkeypatch):
    monkeypatch.setattr(nccl, "done_s", None)
    group = nccl_group()
    with pytest.raises(RuntimeError, match="within 0 s"):
        group.broadcast(torch.zeros(8, dtype=torch.uint8))
    assert nccl.made[0].calls[-1] == "abort"


def test_a_broadcast_whose_member_is_given_up_ends_before_the_deadline(nccl, monkeypatch):
    monkeypatch.setattr(nccl, "done_s", None)
    group = nccl_group(timeout_s=1000.0)
    threading.Timer(0.05, group.cancel).start()
    with pytest.raises(RuntimeError, match="a member is gone"):
        group.broadcast(torch.zeros(8, dtype=torch.uint8))
    assert nccl.made[0].calls[-1] == "abort"


def test_a_broadcast_returns_when_it_is_done(nccl, monkeypatch):
    monkeypatch.setattr(nccl, "done_s", 0.05)
    group = nccl_group()
    group.broadcast(torch.zeros(8, dtype=torch.uint8))
    group.close()
    assert nccl.made[0].calls == ["connect cuda:0", "broadcast", "abort"]
