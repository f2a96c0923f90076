"""A process group of the learner and some generators, built and torn down while both live on.

It stands beside torch's default group, which the learner's ranks use among themselves, and holds no global state: when a
member dies the group is dropped and a new one, of the next epoch, is built from those that are left.
"""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def serve_store(host: str, timeout_s: float) -> dist.TCPStore:
    """The meeting place, owned by the learner; its port is `store.port`.

    It listens at `host` alone: left to itself, torch listens on every interface of the machine, and asks nobody who he is.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, backlog=1024)
    port = listening.getsockname()[1]
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening.detach()
    )


def visit_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The same, as a guest."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class BroadcastGroup:
    """Broadcasts from rank 0, each with a deadline."""

    def __init__(
        self, store: dist.Store, *, epoch: int, rank: int, world: int, backend: str, host: str, timeout_s: float
    ) -> None:
        """Meet the others. Blocks until all are there.

        Args:
            host: address of this process's network interface; gloo binds to it.
        Raises:
            RuntimeError: not everyone came within `timeout_s`.
        """
        timeout = timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore(f"weights/{epoch}", store)
        prefixed.set_timeout(timeout)
        self.device = torch.device("cpu")
        self._group: Any  # torch's stubs know neither of the two
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(prefixed, rank, world, options)
        else:
            options = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timeout
            self._group = dist.ProcessGroupGloo(prefixed, rank, world, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0
        self._options.timeout = timeout
        self._timeout = timeout

    def broadcast(self, flat: Tensor) -> None:
        """Send (rank 0) or fill (others) `flat`. Raises RuntimeError when a peer is gone or late."""
        self._group.broadcast([flat], self._options).wait(self._timeout)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Drop the group without waiting for anyone."""
        abort = getattr(self._group, "abort", None)
        if abort is not None:
            abort()
        del self._group
