"""Messages between processes: frozen structs in two frames, over ZeroMQ.

Each conversation has one file: `rollouts.py` (generators, buffer and learner: leases, groups and batches), `weights.py`
(learner and generators: publications) and `supervision.py` (the driver and all others). Add a field only at the end and
with a default, so that two releases stay compatible.
"""

from typing import ClassVar

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """Base of all messages. The struct's name is its tag.

    Each kind has size limits. `codec.decode` refuses a longer message before it decodes it.
    """

    max_header_bytes: ClassVar[int] = 2**16
    max_payload_bytes: ClassVar[int] = 0
