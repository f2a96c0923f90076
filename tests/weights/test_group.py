"""The weight group: bytes arrive, and whoever is late or gone costs a deadline and no process.

NCCL does not run without GPUs: its process group is a fake that keeps what it was told, and whose broadcasts can hang.
"""

import os
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from asyncgrpo.weights.group import NcclGroup, form_group

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
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
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


def test_copies_for_a_broadcast_have_a_stream_of_their_own(nccl, monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(stream))
    with nccl_group().beside() as stream:
        assert stream == "a stream of cuda:0"


def test_a_failed_communicator_ends_no_process(nccl, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")  # of the ranks' own group, whose errors must end them
    nccl_group()
    assert nccl.made[0].error_handling == "2"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_a_broadcast_whose_member_is_gone_is_given_up_at_the_deadline(nccl, monkeypatch):
    monkeypatch.setattr(nccl, "done_s", None)
    group = nccl_group()
    with pytest.raises(RuntimeError, match="timed out after 0 s"):
        group.broadcast(torch.zeros(8, dtype=torch.uint8))
    assert nccl.made[0].calls[-1] == "abort"


def test_a_broadcast_whose_member_is_given_up_ends_before_the_deadline(nccl, monkeypatch):
    monkeypatch.setattr(nccl, "done_s", None)
    group = nccl_group(timeout_s=1000.0)
    threading.Timer(0.05, group.cancel).start()
    with pytest.raises(RuntimeError, match="a member was lost"):
        group.broadcast(torch.zeros(8, dtype=torch.uint8))
    assert nccl.made[0].calls[-1] == "abort"


def test_a_broadcast_returns_when_it_is_done(nccl, monkeypatch):
    monkeypatch.setattr(nccl, "done_s", 0.05)
    group = nccl_group()
    group.broadcast(torch.zeros(8, dtype=torch.uint8))
    group.close()
    assert nccl.made[0].calls == ["connect cuda:0", "broadcast", "abort"]
