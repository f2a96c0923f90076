"""The generator's side of a publication, in a thread of its own beside the engine.

Weights are received into host memory while the engine goes on sampling. The engine pauses only for the swap, and only
loads bytes whose digest the learner has confirmed. Adapters are merged into their base before that pause. If the learner
dies in the middle of a broadcast, this thread waits for a deadline and the engine notices nothing.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from asyncgrpo.errors import WireError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.adapters import AdapterMerger, content_digest
from asyncgrpo.weights.broadcast import add_digests, digest, plan_buckets
from asyncgrpo.weights.group import WeightGroup, form_group, visit_store
from asyncgrpo.wire import Message
from asyncgrpo.wire.sockets import Client, Keys
from asyncgrpo.wire.weights import FormGroup, Join, Offer, Ping, Pong, Staged, Swap, Swapped, SyncFailed

log = logging.getLogger(__name__)

Apply = Callable[[Iterable[tuple[str, Tensor]], PolicyVersion], str]
"""Swaps the engine to these weights and returns its checksum. It is called in the receiver's thread."""


class Receiver:
    """Receives weights, stages them and swaps the engine to them. `failure` is set when the engine must be replaced."""

    def __init__(
        self,
        endpoint: str,
        *,
        generator_id: str,
        incarnation: str,
        host: str,
        apply: Apply,
        keys: Keys | None,
        merger: AdapterMerger | None = None,
    ) -> None:
        """
        Args:
            merger: makes whole weights of published adapters; None: whole weights are published.
        """
        self._endpoint, self._keys = endpoint, keys
        self._generator_id, self._incarnation = generator_id, incarnation
        self._host = host
        self._apply = apply
        self._merger = merger
        self._group: WeightGroup | None = None
        self._group_number = 0
        self._staged: list[tuple[str, Tensor]] = []
        self._staged_version: PolicyVersion | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-receiver", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it ends between two messages of the learner."""
        self._stop.set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        self._client = client = Client(self._endpoint, f"weights-{self._generator_id}-{self._incarnation}", self._keys)
        try:
            self._join("start")
            while not self._stop.is_set():
                try:
                    received = client.receive(0.2)
                except WireError as error:
                    log.warning("refused a message of the learner: %s", error)
                    continue
                if received is not None:
                    self._handle(received[0])
        except BaseException as error:
            self.failure = error
            log.exception("weights receiver ended")
        finally:
            self._drop_group()
            client.close()

    def _handle(self, message: Message) -> None:
        is_current = getattr(message, "group_number", None) == self._group_number
        if isinstance(message, FormGroup):
            self._form_group(message)
        elif isinstance(message, Ping):
            self._reply(Pong, message.group_number)
        elif isinstance(message, Offer) and is_current and self._group is not None:
            self._stage(self._group, message)
        elif isinstance(message, Swap) and is_current and message.version == self._staged_version:
            self._swap(message)

    def _join(self, cause: str) -> None:
        self._client.send(Join(generator_id=self._generator_id, incarnation=self._incarnation, cause=cause[:200]))

    def _form_group(self, message: FormGroup) -> None:
        self._drop_group()
        try:
            store = visit_store(message.store_host, message.store_port, message.timeout_s)
            self._group = form_group(
                store,
                number=message.group_number,
                rank=message.rank,
                world=message.world,
                backend=message.backend,
                host=self._host,
                timeout_s=message.timeout_s,
            )
        except RuntimeError as error:
            log.warning("weight group %d cannot be formed: %s", message.group_number, error)
            self._join(f"group failed: {error}")
            return
        self._group_number = message.group_number

    def _stage(self, group: WeightGroup, message: Offer) -> None:
        """Receive every bucket, put what is to be loaded into host memory, and report the digest."""
        self._staged, self._staged_version = [], None
        received: list[tuple[str, Tensor]] = []
        digests, start = [], 0
        try:
            for bucket in plan_buckets(message.tensors, message.bucket_bytes):
                flat = bucket.empty(group.device)
                group.broadcast(flat)
                digests.append(digest(flat, start))
                start += bucket.num_bytes // 4
                received += bucket.views(flat if message.base else _to_host(flat))
        except RuntimeError as error:
            log.warning("broadcast of %s failed: %s", message.version, error)
            self._drop_group()
            self._join(f"broadcast failed: {error}")
            return
        self._staged = self._merge(message, received) if message.base else received
        self._staged_version = message.version
        merged = content_digest(self._staged) if message.base else ""
        self._reply(Staged, message.group_number, version=message.version, digest=add_digests(digests), merged=merged)

    def _merge(self, message: Offer, adapters: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Make whole weights of adapters. A failure ends this generator: it would fail at every publication."""
        try:
            assert self._merger is not None, "adapters were published, and whole weights expected"
            return self._merger.merge(adapters, message.base)
        except Exception as error:
            self._give_up(message.group_number, error)
            raise

    def _swap(self, message: Swap) -> None:
        started = time.monotonic()
        try:
            checksum = self._apply(self._staged, message.version)
        except Exception as error:  # the weights may be part old, part new, and must never sample
            self._give_up(message.group_number, error)
            raise
        self._staged, self._staged_version = [], None
        seconds = time.monotonic() - started
        self._reply(Swapped, message.group_number, version=message.version, checksum=checksum, seconds=seconds)

    def _give_up(self, group_number: int, error: Exception) -> None:
        """Tell the learner to go on without this generator. The service ends when it sees `failure`."""
        self._reply(SyncFailed, group_number, reason=str(error)[:300], poisoned=True)

    def _reply(self, kind: type[Message], group_number: int, **fields: Any) -> None:
        self._client.send(kind(generator_id=self._generator_id, group_number=group_number, **fields))

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._group_number = 0
        self._staged, self._staged_version = [], None


def _to_host(flat: Tensor) -> Tensor:
    """Copy to host memory, page-locked if the bytes come from a GPU: that copy is several times as fast."""
    if flat.device.type == "cpu":
        return flat
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)
