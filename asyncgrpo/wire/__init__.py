"""The messages between processes: frozen structs in two frames, over ZeroMQ.

Each conversation has one file: `rollouts.py` (generators, buffer and learner: leases, groups and batches), `weights.py`
(learner and generators: a publication) and `supervision.py` (the driver and everyone). Add a field only at the end and
with a default, so that two releases can talk.
"""

from typing import ClassVar

import msgspec

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """Base of all messages; the struct's name is its tag.

    Each kind says how long it may be; `codec.decode` refuses a longer one by its size, before it reads it.
    """

    max_header_bytes: ClassVar[int] = 2**16
    max_payload_bytes: ClassVar[int] = 0
