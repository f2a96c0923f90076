"""The generator's side of a publication, in a thread of its own beside the engine.

Weights are received into host memory while the engine goes on sampling; the engine is paused only for the swap, and
only for bytes whose digest the learner has confirmed. Where adapters are received, they are merged into their base
before that pause. A learner that dies mid-broadcast costs this thread a deadline and the engine nothing.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from torch import Tensor

from asyncgrpo.errors import WireError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.adapters import AdapterMerger, content_digest
from asyncgrpo.weights.broadcast import BroadcastGroup, add_digests, digest, plan_buckets, visit_store
from asyncgrpo.wire import Message
from asyncgrpo.wire.sockets import Client, Keys
from asyncgrpo.wire.weights import FormGroup, Join, Offer, Ping, Pong, Staged, Swap, Swapped, SyncFailed

log = logging.getLogger(__name__)

Apply = Callable[[Iterable[tuple[str, Tensor]], PolicyVersion], str]
"""Swaps the engine to these weights and returns its checksum; called in the receiver's thread."""


class Receiver:
    """Receives, stages, verifies and swaps. `failure` is set when the engine must be replaced."""

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
            merger: for publications of adapters.
        """
        self._endpoint = endpoint
        self._generator_id = generator_id
        self._incarnation = incarnation
        self._host = host
        self._apply = apply
        self._keys = keys
        self._merger = merger
        self._group: BroadcastGroup | None = None
        self._epoch = 0
        self._staged: list[tuple[str, Tensor]] = []
        self._staged_version: PolicyVersion | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-receiver", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end. It does so between two messages of the learner."""
        self._stop.set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        client = Client(self._endpoint, f"weights-{self._generator_id}-{self._incarnation}", self._keys)
        try:
            self._join(client, "start")
            while not self._stop.is_set():
                try:
                    received = client.receive(0.2)
                except WireError as error:
                    log.warning("refused a message of the learner: %s", error)
                    continue
                if received is not None:
                    self._handle(client, received[0])
        except BaseException as error:
            self.failure = error
            log.exception("weights receiver ended")
        finally:
            self._leave()
            client.close()

    def _handle(self, client: Client, message: Message) -> None:
        if isinstance(message, FormGroup):
            self._form_group(client, message)
        elif isinstance(message, Ping):
            client.send(Pong(generator_id=self._generator_id, epoch=message.epoch))
        elif isinstance(message, Offer) and message.epoch == self._epoch and self._group is not None:
            self._stage(client, self._group, message)
        elif isinstance(message, Swap) and message.epoch == self._epoch and message.version == self._staged_version:
            self._swap(client, message)

    def _join(self, client: Client, cause: str) -> None:
        client.send(Join(generator_id=self._generator_id, incarnation=self._incarnation, cause=cause[:200]))

    def _form_group(self, client: Client, message: FormGroup) -> None:
        self._leave()
        try:
            store = visit_store(message.store_host, message.store_port, message.timeout_s)
            self._group = BroadcastGroup(
                store,
                epoch=message.epoch,
                rank=message.rank,
                world=message.world,
                backend=message.backend,
                host=self._host,
                timeout_s=message.timeout_s,
            )
        except RuntimeError as error:
            log.warning("weight group of epoch %d failed: %s", message.epoch, error)
            self._join(client, f"group failed: {error}")
            return
        self._epoch = message.epoch

    def _stage(self, client: Client, group: BroadcastGroup, message: Offer) -> None:
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
                received += bucket.views(flat if message.base else flat.to("cpu"))
        except RuntimeError as error:
            log.warning("broadcast of %s failed: %s", message.version, error)
            self._leave()
            self._join(client, f"broadcast failed: {error}")
            return
        self._staged = self._merge(client, message, received) if message.base else received
        self._staged_version = message.version
        client.send(
            Staged(
                generator_id=self._generator_id,
                epoch=message.epoch,
                version=message.version,
                digest=add_digests(digests),
                merged=content_digest(self._staged) if message.base else "",
            )
        )

    def _merge(self, client: Client, message: Offer, adapters: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Whole weights; or the end of this generator, which cannot make them of any publication."""
        try:
            assert self._merger is not None, "adapters were published, and whole weights expected"
            return self._merger.merge(adapters, message.base)
        except Exception as error:
            self._give_up(client, message.epoch, error)
            raise

    def _swap(self, client: Client, message: Swap) -> None:
        started = time.monotonic()
        try:
            checksum = self._apply(self._staged, message.version)
        except Exception as error:  # perhaps part old, part new: these weights must never sample
            self._give_up(client, message.epoch, error)
            raise
        self._staged, self._staged_version = [], None
        client.send(
            Swapped(
                generator_id=self._generator_id,
                epoch=message.epoch,
                version=message.version,
                checksum=checksum,
                seconds=time.monotonic() - started,
            )
        )

    def _give_up(self, client: Client, epoch: int, error: Exception) -> None:
        """Tell the learner to go on without this generator. The service ends on `failure`."""
        client.send(SyncFailed(generator_id=self._generator_id, epoch=epoch, reason=str(error)[:300], poisoned=True))

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._epoch = 0
        self._staged, self._staged_version = [], None
