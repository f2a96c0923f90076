"""The lag bound holds for any arrival order, without dropping a group and without waiting for nothing."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo.buffer.admission import lag_is_kept


def test_what_remains_must_fit_into_the_steps_that_are_left():
    # At version 10 with max_lag 2 and 3 groups a step: a group of version 8 must be trained now, of 9 in the next step.
    assert lag_is_kept([], 10, 2, 3)
    assert not lag_is_kept([8], 10, 2, 3)
    assert lag_is_kept([9, 9, 9], 10, 2, 3)
    assert not lag_is_kept([9, 9, 9, 9], 10, 2, 3)
    assert lag_is_kept([9, 9, 9, 10, 10, 10], 10, 2, 3)
    assert not lag_is_kept([9, 9, 9, 10, 10, 10, 10], 10, 2, 3)


def test_at_lag_zero_nothing_may_remain():
    assert lag_is_kept([], 4, 0, 8)
    assert not lag_is_kept([4], 4, 0, 8)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 4), st.integers(1, 5), st.floats(0, 0.9), st.integers(0, 2**32))
def test_any_order_of_arrival_keeps_the_bound_and_never_stands_still(max_lag, per_step, filtered, seed):
    """A model of the whole loop: slots are filled at once, groups finish at random, the oldest ready are taken.

    A share of `filtered` groups is replaced, as it finishes, by one that begins now.
    """
    under_way, ready, rng = [], [], random.Random(seed)  # Hypothesis's own draws each number of it, which takes long
    for version in range(40):
        under_way += [version] * ((max_lag + 1) * per_step - len(under_way) - len(ready))
        while True:
            ready.sort()
            remaining = ready[per_step:] + under_way
            if len(ready) >= per_step and lag_is_kept(remaining, version, max_lag, per_step):
                break
            assert under_way, "everything is ready and still nothing may be taken"
            rng.shuffle(under_way)
            group = under_way.pop()
            if rng.random() < filtered:
                under_way.append(version)
            else:
                ready.append(group)
        taken, ready = ready[:per_step], ready[per_step:]
        assert all(version - oldest <= max_lag for oldest in taken)
