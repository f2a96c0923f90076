"""The lag bound holds for any arrival order, without dropping a group and without waiting for nothing."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo.buffer.admission import deadlines_are_kept
from tests.buffer.test_buffer import begun, deliver, lease_all, v


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 4), st.booleans(), st.integers(1, 5), st.floats(0, 0.9), st.integers(0, 2**32))
def test_any_order_of_arrival_keeps_the_bound_and_never_stands_still(max_lag, changes, per_step, filtered, seed):
    """A model of the whole loop: slots are filled at once, groups finish at random, the earliest deadlines are taken.

    A share of `filtered` groups is replaced, as it finishes, by one that begins now. The bound may change at every step;
    a group keeps that of its lease.
    """
    under_way, ready, rng = [], [], random.Random(seed)  # Hypothesis's own draws each number of it, which takes long
    bound = max_lag
    for version in range(40):
        bound = rng.randint(0, max_lag) if changes else max_lag
        under_way += [version + bound] * ((bound + 1) * per_step - len(under_way) - len(ready))
        while True:
            ready.sort()
            remaining = ready[per_step:] + under_way
            if len(ready) >= per_step and deadlines_are_kept(Counter(remaining), version, per_step):
                break
            assert under_way, "everything is ready and still nothing may be taken"
            rng.shuffle(under_way)
            deadline = under_way.pop()
            if rng.random() >= filtered:
                ready.append(deadline)
            elif len(under_way) + len(ready) < (bound + 1) * per_step:
                under_way.append(version + bound)
        taken, ready = ready[:per_step], ready[per_step:]
        assert all(deadline >= version for deadline in taken)


class Unread(dict):
    def values(self):
        raise AssertionError("all groups are read")


def test_a_message_while_the_bound_holds_the_learner_back_reads_no_group():
    """With 16,384 of them each message took 10 ms."""
    buffer = begun(per_step=2, max_lag=1)
    first, late = (leases := lease_all(buffer))[:2], leases[2:]
    for lease in first:
        assert buffer.accept(deliver(lease, 0), b"") is None
    assert buffer.take(v(0))
    buffer.trained(v(1))
    for lease in lease_all(buffer):
        assert buffer.accept(deliver(lease, 1), b"") is None
    buffer._entries = Unread(buffer._entries)
    for _ in range(2):
        assert buffer.take(v(1)) is None and buffer.is_held_back
    buffer._entries = dict(buffer._entries)
    for lease in late:
        assert buffer.accept(deliver(lease, 0), b"") is None
    assert [entry.lease for entry in buffer.take(v(1)) or ()] == late
