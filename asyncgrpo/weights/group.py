"""Weight groups: each broadcasts bytes of a publication from one sender, which is rank 0 in it, to the generators.

    nccl    between GPUs; refuses two ranks on one GPU
    gloo    between hosts without GPUs

A group is independent of torch's default group, which the learner's ranks use, and has no global state. Its members meet in
the learner's store. Every wait has a deadline. When a member dies, the group is dropped and the next one is formed without
it.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from asyncgrpo.wire.weights import FormGroup

Backend = Literal["nccl", "gloo"]

POLL_S = 0.0005
"""Polling interval of an NCCL broadcast, whose own wait has no deadline."""


# -- the store ---------------------------------------------------------------------------------------------------------


def serve_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Open the learner's store, in which the members of a group meet. Its port is `store.port`.

    It listens at `host` only. By default torch listens on every interface of the machine, without authentication.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=1024)
    port = listening.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )


def visit_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to the learner's store."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


# -- the groups --------------------------------------------------------------------------------------------------------


class WeightGroup:
    """Broadcasts from rank 0, each with a deadline. The base is one between host memories, whose copies are done at once."""

    device = torch.device("cpu")
    """Device of the tensors to broadcast."""
    _group: Any  # missing in torch's stubs

    def broadcast(self, flat: Tensor) -> None:
        """Send `flat` (rank 0) or receive into it (other ranks), [n] uint8.

        Raises:
            RuntimeError: a member was lost or missed the deadline. The group cannot be used again.
        """
        raise NotImplementedError

    def beside(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for one bucket, its broadcast and its copies to or from `device`.

        They wait neither for this process's computations there nor for the copies of the bucket before.
        """
        return contextlib.nullcontext()

    def copied(self) -> Callable[[], object]:
        """Return a function that waits for the copies that this context has queued so far."""
        return lambda: None

    def cancel(self) -> None:
        """Abort the broadcast in progress, because a member was lost. Thread-safe. Gloo ends it at its deadline only."""

    def close(self) -> None:
        """Drop the group without waiting for its members."""
        self._group.abort()
        del self._group


def form_group(store: dist.Store, message: FormGroup, host: str, sender: int = 0, number: int = 0) -> WeightGroup:
    """Form a weight group. Blocks until all members have joined.

    Args:
        message: for this member.
        host: address of this process's network interface, to which gloo binds.
        sender: of the group, equal at all members.
        number: of this group among those of this process, which take its GPUs in turns.
    Raises:
        RuntimeError: a member did not join within the timeout of the message.
    """
    timeout_s, rank, world = message.timeout_s, message.rank, message.world
    prefixed = dist.PrefixStore(f"weights/{message.group_number}/{sender}", store)
    prefixed.set_timeout(timedelta(seconds=timeout_s))
    if prefixed.check(["abandoned"]):  # gloo would wait for five times the timeout, and this generator would seem dead
        raise RuntimeError("the other members have given up")
    try:
        if message.backend == "gloo":
            return GlooGroup(prefixed, rank, world, host, timeout_s)
        prefixed.set(f"joined/{rank}", "")  # NCCL has no deadline of its own for members that are missing
        prefixed.wait([f"joined/{one}" for one in range(world)])
        return NcclGroup(prefixed, rank, world, timeout_s, number % torch.cuda.device_count())
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            prefixed.set("abandoned", "")
        raise


class GlooGroup(WeightGroup):
    """A broadcast over TCP, from host memory to host memory."""

    def __init__(self, store: dist.Store, rank: int, world: int, host: str, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        options = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self._timeout
        try:
            self._group = dist.ProcessGroupGloo(store, rank, world, options)
        except RuntimeError:
            # A member that connects late would crash this process: gloo's device calls into the connections of the failed
            # group, which are freed. The error's traceback would keep the device.
            del options
            raise

    def broadcast(self, flat: Tensor) -> None:
        self._group.broadcast([flat], _from_rank_0(self._timeout)).wait(self._timeout)


class NcclGroup(WeightGroup):
    """A broadcast from GPU to GPU.

    NCCL waits forever for a dead member, and by default torch's watchdog ends the process whose communicator failed. So the
    communicator is nonblocking and is created while all members are alive. Its errors do not end the process, and each
    broadcast is polled until its deadline. The digest detects the data of a broken broadcast.
    torch's own deadline for its connection is an environment variable (`cluster.wiring.prepare_environment`).
    """

    def __init__(self, store: dist.Store, rank: int, world: int, timeout_s: float, gpu: int) -> None:
        self.device = torch.device("cuda", gpu)
        self._streams = itertools.cycle([torch.cuda.Stream(self.device) for _ in range(2)])
        self._timeout_s = timeout_s
        self._is_cancelled = False
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0
        with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="2"):  # read once by this group: drop the communicator only
            self._group = dist.ProcessGroupNCCL(store, rank, world, options)
        self._group.eager_connect_single_device(self.device)

    def broadcast(self, flat: Tensor) -> None:
        deadline = time.monotonic() + self._timeout_s
        work = self._group.broadcast([flat], _from_rank_0(timedelta(seconds=self._timeout_s)))
        while not work.is_completed():
            if self._is_cancelled or time.monotonic() > deadline:
                self._group.abort()
                why = "a member was lost" if self._is_cancelled else f"timed out after {self._timeout_s:.0f} s"
                raise RuntimeError(f"an NCCL broadcast was aborted: {why}")
            time.sleep(POLL_S)

    def beside(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(next(self._streams))

    def copied(self) -> Callable[[], object]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def cancel(self) -> None:
        self._is_cancelled = True

    def close(self) -> None:
        # In a thread: NCCL waits in it for the members on this machine, which are told after this one.
        threading.Thread(target=self._group.abort, name="weights-abort", daemon=True).start()
        del self._group


def _from_rank_0(timeout: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timeout
    return options


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ |= values
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
