"""A learner machine other than the publisher's: it broadcasts its own rows of each publication to the generators.

One process of the machine, the sender, has arenas like the publisher's, with the rows of this machine's ranks alone. It reports
the digest of what was written. On an offer it broadcasts its stream, in a thread beside the training step. The publisher adds up
the digests and decides which version is sent.
"""

import logging
import threading
from functools import partial
from queue import SimpleQueue

from asyncgrpo.weights.arena import Arenas, IsWritten, Stream
from asyncgrpo.weights.group import visit_store
from asyncgrpo.weights.lane import Broadcaster
from asyncgrpo.wire.sockets import Client, Keys
from asyncgrpo.wire.weights import FormGroup, GroupFormed, JoinSender, Offer, RowsWritten

log = logging.getLogger(__name__)

POLL_S = 0.02


class Sender:
    """Sends the rows of one machine. The learner's loop calls `written`, a thread does the rest."""

    def __init__(
        self, number: int, arenas: Arenas, stream: Stream, *, endpoint: str, host: str, keys: Keys | None
    ) -> None:
        """
        Args:
            number: of this sender, from 1.
            endpoint: of the publisher.
            host: address of this process for the generators.
        """
        self._number, self._arenas, self._stream = number, arenas, stream
        self._endpoint, self._keys = endpoint, keys
        self._broadcaster = Broadcaster(number, stream, host)
        self._writes: SimpleQueue[tuple[int, int, IsWritten]] = SimpleQueue()
        self._pending: tuple[int, int, IsWritten] | None = None
        self._offer: Offer | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights-sender", daemon=True)
        self._thread.start()

    def written(self, slot: int, writes: int, is_written: IsWritten) -> None:
        """Note a write of an arena that is complete once `is_written` returns True."""
        self._writes.put((slot, writes, is_written))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10.0)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._client = Client(self._endpoint, f"weights-sender-{self._number}", self._keys)
        self._client.send(JoinSender(sender=self._number))
        try:
            while not self._stop.is_set():
                received = self._client.receive(POLL_S)
                if received is not None:
                    self._handle(received[0])
                self._report_writes()
                self._broadcast()
        except Exception:  # the publisher waits for this sender and times out
            log.exception("the weights of this machine cannot be sent")
        finally:
            self._broadcaster.close()
            self._client.close()

    def _handle(self, message: object) -> None:
        if isinstance(message, FormGroup):
            store = partial(visit_store, message.store_host, message.store_port, message.timeout_s)
            self._broadcaster.drop()
            self._broadcaster.form(message, store)
            self._offer = None
        elif isinstance(message, Offer) and message.group_number == self._broadcaster.number:
            self._offer = message

    def _report_writes(self) -> None:
        if self._pending is None and not self._writes.empty():
            self._pending = self._writes.get()
        if self._pending is None or not self._pending[2]():
            return
        (slot, writes, _), self._pending = self._pending, None
        digest = self._stream.digest(self._arenas.slots[slot])
        self._client.send(RowsWritten(sender=self._number, slot=slot, writes=writes, digest=digest))

    def _broadcast(self) -> None:
        """Start an offered broadcast. The publisher may offer before this sender's group is formed."""
        trouble = self._broadcaster.poll()
        if trouble is not None:
            log.warning("%s", trouble)
            name, number = f"sender-{self._number}", self._broadcaster.number
            self._client.send(GroupFormed(generator_id=name, group_number=number, problem=trouble))
        if self._offer is not None and self._broadcaster.state == "ready":
            offer, self._offer = self._offer, None
            self._broadcaster.broadcast(self._arenas.slots[offer.slot], offer.piece_bytes)
