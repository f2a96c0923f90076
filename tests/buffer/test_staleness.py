"""The lag bound holds for any arrival order, without dropping a group and without waiting for nothing."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo.buffer.admission import deadlines_are_kept


@settings(max_examples=300, deadline=None)
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
            if len(ready) >= per_step and deadlines_are_kept(remaining, version, per_step):
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
