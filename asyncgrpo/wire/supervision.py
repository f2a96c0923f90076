"""Messages between the driver and all other processes: heartbeats, lost generators, new endpoints, steering, draining."""

from asyncgrpo.types import Count, Name
from asyncgrpo.wire import Message

# -- any process -> driver ---------------------------------------------------------------------------------------------


class Heartbeat(Message):
    """Heartbeat of a process, sent every second by a thread of its own."""

    name: str
    """`buffer`, `learner-<rank>` or `generator-<index>`."""
    incarnation: str
    pid: int
    waits: dict[str, float]
    """Seconds spent waiting, by cause (`metrics.WAITS`)."""
    loop_age_s: float | None
    """Seconds since the last iteration of its main loop; None: the loop has not started."""
    buffer_endpoint: str = ""
    """Of a generator: the buffer that it works for."""
    step: int | None = None
    """Of the learner: optimizer steps done."""
    missing: tuple[Name, ...] = ()
    """Of the buffer and the learner's rank 0: generators they lost touch with, as `<name>-<incarnation>`."""
    steered: Count = 0
    """Of the buffer and the learner's rank 0: revision of the applied `Steer`."""


# -- driver -> any process ---------------------------------------------------------------------------------------------


class DumpStacks(Message):
    """Asks a process to write the stack of every thread to its log."""

    reason: str


class EndpointsChanged(Message):
    """Gives a generator the endpoints of a new buffer and learner."""

    buffer_endpoint: str
    weights_endpoint: str


# -- driver -> buffer and learner, rank 0 ------------------------------------------------------------------------------


class Steer(Message):
    """The operator's settings of the running run, always complete, so that a later one replaces an earlier one.

    The driver resends it until the heartbeats report its revision.
    """

    revision: Count = 0
    is_paused: bool = False
    """True: no more leases and batches."""
    max_lag: Count | None = None
    """Bound on the lag of later leases, optimizer steps; None: as configured."""
    groups_in_flight: Count | None = None
    """Groups in progress at once per generator; None: as configured."""
    lr: float | None = None
    """Peak learning rate; None: as configured."""
    checkpoints: Count = 0
    """Checkpoints requested from this learner so far."""
    evaluations: Count = 0
    """Evaluations requested from this learner so far."""
    leaving: tuple[Name, ...] = ()
    """Generators, as `<name>-<incarnation>`, that get no more leases and weights."""
    ending: tuple[Name, ...] = ()
    """Leaving generators that exit once they have delivered their groups: the learner has released them."""
    generators: Count | None = None
    """Number of generators; None: as configured. A learner that starts waits for no more."""


# -- driver -> buffer --------------------------------------------------------------------------------------------------


class Drain(Message):
    """Asks the buffer to stop granting leases and to make the learner stop after its current step.

    A failing learner also sends it, before its last checkpoint.
    """

    reason: str
    is_failure: bool = False


class GeneratorLost(Message):
    """Reports a generator whose process has ended, from the driver to the buffer, which frees its leases, and to rank 0."""

    generator_id: Name
    incarnation: Name = ""
    """The lost incarnation; empty: any."""


ToDriver = Heartbeat
ToEveryone = DumpStacks | EndpointsChanged | Steer
OfDriver = Drain | GeneratorLost
