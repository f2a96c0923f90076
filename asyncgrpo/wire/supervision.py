"""The driver and everyone: heartbeats, who is lost, where others are found now, and when to end."""

from asyncgrpo.types import Name
from asyncgrpo.wire import Message

# -- any process -> driver ---------------------------------------------------------------------------------------------


class Heartbeat(Message):
    """This process lives. Sent every second by a thread of its own."""

    name: str
    """`buffer`, `learner-<rank>` or `generator-<index>`."""
    incarnation: str
    pid: int
    waits: dict[str, float]
    """What it waits for, by the names of `metrics.WAITS`: for how long, seconds."""
    loop_age_s: float | None
    """Since its main loop last went round; None: it has not begun to."""
    buffer_endpoint: str = ""
    """A generator: the buffer that it works for."""
    step: int | None = None
    """The learner: optimizer steps done."""
    missing: tuple[Name, ...] = ()
    """Generators that it has lost touch with, as `<name>-<incarnation>`: the buffer, and the learner's first rank."""


# -- driver -> any process ---------------------------------------------------------------------------------------------


class DumpStacks(Message):
    """Write the stack of every thread to your log."""

    reason: str


class EndpointsChanged(Message):
    """To a generator: buffer and learner were started again and are found here now."""

    buffer_endpoint: str
    weights_endpoint: str


# -- driver -> buffer --------------------------------------------------------------------------------------------------


class Drain(Message):
    """Grant no more leases and tell the learner to stop after its current step. The learner says it before its last
    checkpoint, where it cannot go on."""

    reason: str
    is_failure: bool = False
    """The run is given up."""


class GeneratorLost(Message):
    """This generator is of no use any more; its leases are free again.

    The driver says it of one whose process is gone, to the buffer and to the learner's first rank; that rank says it to the
    buffer of one that a publication left out, which may live and comes back with another Register.
    """

    generator_id: Name
    incarnation: Name = ""
    """Of the one that is meant; empty: whoever has the name."""
    reason: str = "its process ended"
