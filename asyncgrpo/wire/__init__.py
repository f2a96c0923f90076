"""What processes say to each other: frozen structs in two frames, over ZeroMQ.

Three conversations, each in one file: `rollouts.py` (generators, buffer and learner: leases out, groups in, batches on),
`weights.py` (learner and generators: a publication) and `supervision.py` (the driver and everyone). Add a field only at
the end and with a default, so that two releases can talk.
"""

from typing import ClassVar

import msgspec

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """Base of all messages; the struct's name is its tag.

    Each kind says how long it may be, so that nobody reads a longer one: `codec.decode` refuses it by its size.
    """

    max_header_bytes: ClassVar[int] = 2**16
    max_payload_bytes: ClassVar[int] = 0
