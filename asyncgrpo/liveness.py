"""Periods and deadlines of heartbeats and restarts: who is silent, since when, and what follows. Seconds, if not named otherwise.

    process ────── 1 s ──▶ driver        cluster.silent_timeout_s: replaced; 5 s if buffer or learner have lost it, too
    generator ──── 1 s ──▶ buffer        2 s: no lease; 5 s: others take over its leases; 60 s: its session ends
    receiver ─── 0.5 s ──▶ publisher     5 s: left out of publications
    buffer ─────── 1 s ──▶ rank 0        15 s: rank 0 repeats its request; 60 s: the learner ends
    rank 0 ────── 30 s ──▶ other ranks   cluster.stall_timeout_s and 60 s more: the learner ends

Each receiver keeps its own times: the driver and the buffer exclude those in which they were stopped themselves, and the
publisher adds the time of a transfer.
"""

# -- heartbeats --------------------------------------------------------------------------------------------------------

HEARTBEAT_S = 1.0
"""Interval of heartbeats of each process to the driver, and of each generator to the buffer."""
WAITING_EVERY_S = HEARTBEAT_S
"""Interval of `Waiting` from the buffer to rank 0 while a request is open."""
RECEIVER_HEARTBEAT_S = HEARTBEAT_S / 2
"""Interval of heartbeats of a weight receiver to the publisher."""
RANK_HEARTBEAT_S = 30 * HEARTBEAT_S
"""Interval of heartbeats of rank 0 to the other ranks."""
SOCKET_HEARTBEAT_MS = int(2000 * HEARTBEAT_S)
"""Interval of ZeroMQ's pings on every connection, milliseconds."""
PROBE_EVERY_S = 5 * HEARTBEAT_S
"""Interval of a generator's probes of its engine, which must reply within `cluster.silent_timeout_s`."""

# -- silences ----------------------------------------------------------------------------------------------------------

QUIET_S = 2 * HEARTBEAT_S
"""Silence after which a generator gets no lease. A longer gap in the listening of the driver is its own stop."""
SUSPECT_S = 5 * HEARTBEAT_S
"""Silence after which the publisher drops a receiver, the buffer reassigns a generator's leases, and the driver drops a
generator that buffer or learner have lost, too."""
SOCKET_TIMEOUT_MS = int(4000 * SUSPECT_S)
"""Time without an answer to ZeroMQ's pings after which a connection is closed, milliseconds."""
SESSION_S = 12 * SUSPECT_S
"""Silence after which the buffer ends a generator's session."""
BUFFER_TIMEOUT_S = SESSION_S
"""Silence after which rank 0 gives up the buffer."""
STALL_MARGIN_S = 2 * RANK_HEARTBEAT_S
"""Extra timeout on ranks other than 0, so that rank 0 reports a stall first."""

# -- replies -----------------------------------------------------------------------------------------------------------

RESEND_AFTER_S = 15 * HEARTBEAT_S
"""Silence of the buffer after which a generator sends its group again, and rank 0 its request."""
READ_BYTES_PER_S = 100e6
"""Minimum rate of every copy of weights."""


def copy_s(num_bytes: int) -> float:
    """Return the time allowed for a copy of weights, beside the deadline of a wait, seconds."""
    return num_bytes / READ_BYTES_PER_S


# -- restarts ----------------------------------------------------------------------------------------------------------

BACKOFF_S = (0.0, 1.0, 5.0)
"""Backoff before a generator's restart, by the number of consecutive failed starts."""
FAILED_STARTS = len(BACKOFF_S)
"""Consecutive starts of a generator that never served, or of a core that trained no step, that end the run."""
RESTART_WINDOW_S = 3600.0
"""Window in which restarts count for `generators.restarts`."""
