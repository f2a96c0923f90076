"""The learner's side of a publication: offer, broadcast, compare digests, swap.

A version counts as published when every member of the weight group has received it whole, has reported the digest that
was sent, and has swapped its engine to it, and when all engines of one kind report the same checksum of the weights they
hold. Every wait has a deadline. A member that misses one, or that was given up, is left out, and the group is formed again
without it. It may join again.

    Join* -> Ping -> Pong -> FormGroup -> [ Offer -> broadcasts -> Staged -> Swap -> Swapped ]*
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar, cast

from torch import Tensor

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import GeneratorsGone, WeightsError, WireError
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.broadcast import Bucket, add_digests, digest, plan_buckets
from asyncgrpo.weights.group import Backend, WeightGroup, form_group, serve_store
from asyncgrpo.wire import Message
from asyncgrpo.wire.codec import Kinds, decode
from asyncgrpo.wire.sockets import Keys, Server
from asyncgrpo.wire.weights import FormGroup, Join, Offer, Ping, Pong, Staged, Swap, Swapped, SyncFailed, ToPublisher

log = logging.getLogger(__name__)

READ = Kinds(ToPublisher)

ATTEMPTS = 3
"""How often one version is offered before the learner gives up; members that failed are left out in between."""
LOOK_EVERY_S = 1.0
"""A wait looks this often whether the member that it waits for was given up."""


Reply = TypeVar("Reply", Staged, Swapped)


class _Refused(WeightsError):
    """A member cannot make whole weights of what was sent. A generator started in its place could not either."""


@dataclass
class Member:
    """A generator in touch with the publisher."""

    peer: str
    incarnation: str
    in_group: bool = False


@dataclass(frozen=True)
class Publication:
    """Proof that one version reached the generators."""

    version: PolicyVersion
    generators: tuple[str, ...]
    seconds: float
    num_bytes: int
    digest: str
    checksums: dict[str, str] = field(default_factory=dict)
    attempts: int = 1
    dropped: tuple[str, ...] = ()
    """Generators that it did not reach: left out of this publication, or of an earlier one and not back."""


class Publisher:
    """Rank 0 of the weight group. One thread uses it."""

    def __init__(self, config: WeightsConfig, *, backend: Backend, bind: str, host: str, keys: Keys | None) -> None:
        """Bind the control socket and the store.

        Args:
            backend: of the weight group.
            host: address at which the generators reach this process.
        """
        self._config = config
        self._layout: tuple[TensorInfo, ...] = ()
        self._base = ""
        self._buckets: list[Bucket] = []
        self._backend = backend
        self._host = host
        self._server = Server(bind, keys, advertise=host)
        self._store = serve_store(host, config.timeout_s)
        self._members: dict[str, Member] = {}
        self._group: WeightGroup | None = None
        self._group_number = 0
        self._last: tuple[str, dict[str, str]] = "", {}
        self._given_up: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._missing: dict[str, Member] = {}
        self.on_left_out: Callable[[str, str, str], None] = lambda name, incarnation, why: None
        """Called at once with each member that did not reply: name, incarnation, and what it did not do."""
        self.endpoint = self._server.endpoint

    def describe(self, layout: list[TensorInfo], base: str = "") -> None:
        """Fix the layout of all publications.

        Args:
            layout: names, shapes and dtypes, in the order in which `publish` sends them.
            base: fingerprint of the weights to which these adapters belong; empty: they are whole weights.
        """
        self._layout = tuple(layout)
        self._base = base
        self._buckets = plan_buckets(layout, self._config.bucket_mb * 2**20)

    @property
    def generators(self) -> list[str]:
        """Generators in touch, in the group or waiting to be."""
        return sorted(self._members)

    def newcomers(self) -> bool:
        """Read what has arrived. Returns whether a generator waits for weights."""
        while self._receive(0.0) is not None:
            pass
        return any(not m.in_group for m in self._members.values())

    @property
    def missing(self) -> tuple[str, ...]:
        """Generators that were left out and are not back, by name and incarnation. May be read from any thread."""
        return tuple(f"{name}-{member.incarnation}" for name, member in tuple(self._missing.items()))

    def give_up(self, generator_id: str, incarnation: str) -> None:
        """Wait for this generator no more: it is gone. May be called from any thread."""
        self._given_up.put((generator_id, incarnation))
        group, member = self._group, self._members.get(generator_id)
        if group is not None and member is not None and member.in_group and member.incarnation == incarnation:
            group.cancel()  # a broadcast to it would last until its deadline

    def forget(self, generator_id: str) -> None:
        """Forget a generator that is gone; the group is formed again without it."""
        if self._members.pop(generator_id, None) is not None:
            self._drop_group()

    def wait_for(self, count: int, timeout_s: float, tell: Callable[[str, float], None]) -> None:
        """Wait until `count` generators are in touch, at most for `timeout_s`; then go on with those there are.

        Args:
            tell: called about once a second with what is awaited and since how many seconds. What it raises ends the wait.
        Raises:
            WeightsError: no generator came.
        """
        started = time.monotonic()
        while len(self._members) < count and (waited := time.monotonic() - started) < timeout_s:
            self._receive(1.0)
            tell(f"generators to start, {len(self._members)} of {count} have", waited)
        if not self._members:
            raise WeightsError(f"no generator asked for weights within {timeout_s:.0f} s; their logs say why")

    def publish(
        self, version: PolicyVersion, tensors: Callable[[], Iterable[tuple[TensorInfo, Tensor]]]
    ) -> Publication:
        """Publish `version` to every generator, with proof.

        Args:
            tensors: gives every tensor of the layout, in its order. It is called once an attempt.
        Raises:
            GeneratorsGone: all generators died or fell silent.
            WeightsError: no generator holds `version` after all attempts.
        """
        started = time.monotonic()
        before = set(self._members)
        first_failure: WeightsError | None = None
        for attempt in range(1, ATTEMPTS + 1):
            try:
                sent, loaded, checksums = self._publish_once(version, tensors)
            except WeightsError as error:
                log.warning("publication of %s, attempt %d: %s", version, attempt, error)
                first_failure = first_failure or error
                self._drop_group()
                if not self._members and not isinstance(first_failure, _Refused):
                    raise GeneratorsGone(f"weights {version} reached no generator: all of them are gone") from error
                continue
            self._check_engines(version, loaded, checksums)
            return Publication(
                version=version,
                generators=tuple(sorted(checksums)),
                seconds=time.monotonic() - started,
                num_bytes=sum(b.num_bytes for b in self._buckets),
                digest=sent,
                checksums=checksums,
                attempts=attempt,
                dropped=tuple(sorted((before | self._missing.keys()) - set(checksums))),
            )
        raise WeightsError(
            f"weights {version} reached no generator in {ATTEMPTS} attempts; first failure: {first_failure}"
        ) from first_failure

    def close(self) -> None:
        self._drop_group()
        self._server.close()

    # -- one attempt -----------------------------------------------------------------------------------------------

    def _publish_once(
        self, version: PolicyVersion, tensors: Callable[[], Iterable[tuple[TensorInfo, Tensor]]]
    ) -> tuple[str, str, dict[str, str]]:
        """One attempt: the digest of what was sent, that of what the engines loaded, and their checksums by generator."""
        self.newcomers()
        if self._group is None or any(not m.in_group for m in self._members.values()):
            self._form_group()
        assert self._group is not None
        offer = Offer(
            group_number=self._group_number,
            version=version,
            tensors=self._layout,
            bucket_bytes=self._config.bucket_mb * 2**20,
            base=self._base,
        )
        self._send_to_group(offer)
        sent = self._broadcast(self._group, tensors())
        staged = self._gather(Staged, "stage", version)
        wrong = sorted(name for name, message in staged.items() if message.digest != sent)
        if wrong:
            raise WeightsError(f"digest mismatch: sent {sent}, {wrong[0]} received {staged[wrong[0]].digest}")
        merged = {name: message.merged for name, message in staged.items()}
        if len(set(merged.values())) > 1:
            raise WeightsError(f"the same adapters were merged into different weights: {merged}")
        self._send_to_group(Swap(group_number=self._group_number, version=version))
        swapped = self._gather(Swapped, "swap to", version)
        loaded = next(iter(merged.values())) or sent
        return sent, loaded, {name: message.checksum for name, message in swapped.items()}

    def _broadcast(self, group: WeightGroup, tensors: Iterable[tuple[TensorInfo, Tensor]]) -> str:
        """Send all buckets. Returns the digest of what was sent. Consumes `tensors` to the end, also on failure."""
        source = iter(tensors)
        digests, start = [], 0
        failure: RuntimeError | None = None
        for bucket in self._buckets:
            flat = bucket.fill(source, group.device)
            if failure is None:
                try:
                    group.broadcast(flat)
                    digests.append(digest(flat, start))
                except RuntimeError as error:
                    failure = error  # other ranks still gather: they must not be left waiting in a collective
            start += bucket.num_bytes // 4
        if failure is not None:
            raise WeightsError(f"broadcast failed: {str(failure).splitlines()[0][:200]}") from failure
        return add_digests(digests)

    def _check_engines(self, version: PolicyVersion, loaded: str, checksums: dict[str, str]) -> None:
        """Check that the checksums of the engines agree, and that they changed if the weights did.

        Raises:
            WeightsError: an engine holds other weights than were published, whatever it reported before.
        """
        if len(set(checksums.values())) > 1:
            raise WeightsError(f"engines hold different weights after {version} was published: {checksums}")
        last_loaded, last_checksums = self._last
        stuck = sorted(n for n, c in checksums.items() if loaded != last_loaded and last_checksums.get(n) == c)
        if stuck:
            raise WeightsError(f"{stuck[0]} swapped to {version} and still holds the weights before it")
        self._last = loaded, checksums

    # -- members ---------------------------------------------------------------------------------------------------

    def _form_group(self) -> None:
        """Form the next weight group of all generators that are there. Raises WeightsError."""
        self._drop_group()
        self._group_number += 1
        self._ping()
        names = sorted(self._members)
        if not names:
            raise WeightsError("no generator is in touch")
        for rank, name in enumerate(names, start=1):
            message = FormGroup(
                group_number=self._group_number,
                rank=rank,
                world=len(names) + 1,
                store_host=self._host,
                store_port=self._store.port,
                backend=self._backend,
                timeout_s=self._config.timeout_s,
            )
            self._server.send(self._members[name].peer, message)
        try:
            self._group = form_group(
                self._store,
                number=self._group_number,
                rank=0,
                world=len(names) + 1,
                backend=self._backend,
                host=self._host,
                timeout_s=self._config.timeout_s,
            )
        except RuntimeError as error:
            raise WeightsError(
                f"weight group {self._group_number} cannot be formed: {str(error).splitlines()[0][:200]}"
            ) from error
        for member in self._members.values():
            member.in_group = True

    def _ping(self) -> None:
        """Leave out every member that is not there any more."""
        for name, member in list(self._members.items()):
            if not self._server.send(member.peer, Ping(group_number=self._group_number)):
                self._leave_out(name, "it is not connected any more")
        asked = set(self._members)
        missing = set(asked)
        deadline = time.monotonic() + self._config.timeout_s
        while (missing := missing & self._members.keys()) and time.monotonic() < deadline:
            message = self._receive(deadline - time.monotonic())
            if isinstance(message, Pong) and message.group_number == self._group_number:
                missing.discard(message.generator_id)
            elif message is not None and (
                isinstance(message, Join) or message.generator_id in self._members.keys() - asked
            ):  # it joined, or came back, after the pings were sent
                name = message.generator_id
                self._server.send(self._members[name].peer, Ping(group_number=self._group_number))
                asked.add(name)
                missing.add(name)
        for name in missing:
            self._leave_out(name, f"it did not reply to a publication within {self._config.timeout_s:.0f} s")

    def _leave_out(self, name: str, why: str) -> None:
        """Leave a member out of the group. It may be alive, and join again."""
        log.warning("%s is left out: %s", name, why)
        self._missing[name] = member = self._members.pop(name)
        self.on_left_out(name, member.incarnation, why)

    def _send_to_group(self, message: Message) -> None:
        for member in self._members.values():
            if member.in_group:
                self._server.send(member.peer, message)

    def _gather(self, kind: type[Reply], verb: str, version: PolicyVersion) -> dict[str, Reply]:
        """One message of `kind` for this group from every member. A member that is late is left out.

        Raises:
            WeightsError: a member failed or was late.
        """
        deadline = time.monotonic() + self._config.timeout_s
        replies: dict[str, Reply] = {}
        failed: WeightsError | None = None
        while expected := [n for n, m in self._members.items() if m.in_group and n not in replies]:
            message = self._receive(deadline - time.monotonic())
            if (
                isinstance(message, kind)
                and message.group_number == self._group_number
                and message.generator_id in expected
            ):
                replies[message.generator_id] = message
            elif isinstance(message, SyncFailed) and message.group_number == self._group_number:
                error = _Refused if kind is Staged else WeightsError
                failed = error(f"{message.generator_id} could not {verb} {version}: {message.reason}")
                if message.poisoned:
                    self.forget(message.generator_id)
                break
            elif isinstance(message, Join):
                failed = WeightsError(f"{message.generator_id} joined again in the middle ({message.cause})")
                break
            elif message is None and time.monotonic() >= deadline:
                late = ", ".join(expected)
                failed = WeightsError(f"{late} did not {verb} {version} within {self._config.timeout_s:.0f} s")
                for name in expected:
                    self._leave_out(name, f"it did not {verb} {version} within {self._config.timeout_s:.0f} s")
                break
        if failed is None and self._group is None:
            failed = WeightsError(f"a generator was lost before it could {verb} {version}")
        if failed is not None:
            raise failed
        return replies

    def _receive(self, timeout_s: float) -> ToPublisher | None:
        """The next message, or None after `LOOK_EVERY_S` at most. Notes a Join, and forgets members that were given up."""
        received = self._server.receive(min(max(0.0, timeout_s), LOOK_EVERY_S))
        self._forget_given_up()
        if received is None:
            return None
        peer, frames = received
        try:
            message = cast(ToPublisher, decode(frames, READ)[0])
        except WireError as error:
            log.warning("refused a message of %s: %s", peer, error)
            return None
        if isinstance(message, Join):
            if any(m.peer == peer and name != message.generator_id for name, m in self._members.items()):
                log.warning("refused a Join of %s from %s, who has joined as another", message.generator_id, peer)
                return None
            self._members[message.generator_id] = Member(peer, message.incarnation)
            self._missing.pop(message.generator_id, None)
        elif not isinstance(message, SyncFailed):
            self._readmit(message.generator_id, peer)
        return message

    def _readmit(self, name: str, peer: str) -> None:
        """Readmit a member that was late and lives. Outside a broadcast it did not see the group break, and will not join."""
        if (member := self._missing.get(name)) is not None and member.peer == peer:
            self._members[name] = Member(peer, member.incarnation)
            del self._missing[name]

    def _forget_given_up(self) -> None:
        while not self._given_up.empty():
            name, incarnation = self._given_up.get()
            self._missing.pop(name, None)
            if name in self._members and self._members[name].incarnation == incarnation:
                log.warning("%s is gone", name)
                self.forget(name)

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        for member in self._members.values():
            member.in_group = False
