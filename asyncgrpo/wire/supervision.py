"""Messages between the driver and all other processes: heartbeats, lost generators, new endpoints, what a person asks for,
the end of a run."""

from asyncgrpo.types import Count, Name
from asyncgrpo.wire import Message

# -- any process -> driver ---------------------------------------------------------------------------------------------


class Heartbeat(Message):
    """A process says that it lives. A thread of its own sends this every second."""

    name: str
    """`buffer`, `learner-<rank>` or `generator-<index>`."""
    incarnation: str
    pid: int
    waits: dict[str, float]
    """Seconds that it has waited, by what it waits for (`metrics.WAITS`)."""
    loop_age_s: float | None
    """Seconds since its main loop last came round; None: the loop has not begun."""
    buffer_endpoint: str = ""
    """Set by a generator: the buffer that it works for."""
    step: int | None = None
    """Set by the learner: optimizer steps done."""
    missing: tuple[Name, ...] = ()
    """Set by the buffer and the learner's rank 0: generators they lost touch with, as `<name>-<incarnation>`."""
    steered: Count = 0
    """Set by the same two: the revision of the last `Steer` that is in effect."""


# -- driver -> any process ---------------------------------------------------------------------------------------------


class DumpStacks(Message):
    """Asks a process to write the stack of every thread to its log."""

    reason: str


class EndpointsChanged(Message):
    """Tells a generator that buffer and learner were started again, and where they are."""

    buffer_endpoint: str
    weights_endpoint: str


# -- driver -> buffer and learner, rank 0 ------------------------------------------------------------------------------


class Steer(Message):
    """Tells what a person asked for while the run goes on: always all of it, so that a later one replaces an earlier one.

    The driver sends it until the heartbeats name its revision.
    """

    revision: Count = 0
    is_paused: bool = False
    """No more leases and no more batches."""
    max_lag: Count | None = None
    """Bound on the lag for leases from now on; None: as configured."""
    groups_in_flight: Count | None = None
    """Groups that a generator works on at once; None: as configured."""
    lr: float | None = None
    """Peak learning rate; None: as configured."""
    checkpoints: Count = 0
    """Checkpoints that were asked of this learner so far."""
    evaluations: Count = 0
    """Evaluations that were asked of this learner so far."""
    leaving: tuple[Name, ...] = ()
    """Generators, as `<name>-<incarnation>`, that get no more leases and no more weights."""
    ending: tuple[Name, ...] = ()
    """Those of them that end once they have delivered what they hold: the learner has let them go."""


# -- driver -> buffer --------------------------------------------------------------------------------------------------


class Drain(Message):
    """Asks the buffer to grant no more leases and to tell the learner to stop after its current step.

    A learner that cannot go on sends it as well, before its last checkpoint.
    """

    reason: str
    is_failure: bool = False
    """The run is given up."""


class GeneratorLost(Message):
    """Tells that a generator is lost: its leases are free again.

    The driver sends it to the buffer and to the learner's rank 0 when a process is gone. Rank 0 sends it to the buffer
    when a publication left a generator out; that one may live, and comes back with another Register.
    """

    generator_id: Name
    incarnation: Name = ""
    """The incarnation that is meant; empty: whichever has the name."""
    reason: str = "its process ended"


ToDriver = Heartbeat
ToEveryone = DumpStacks | EndpointsChanged | Steer
OfDriver = Drain | GeneratorLost
