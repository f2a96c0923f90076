"""The scheduler reaches what an event model of its rule reaches, on any machine: the clock is virtual."""

import pytest

from tests.simulation.scheduler import Case, Product, model


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_the_product_makes_97_percent_of_the_rollouts_of_the_event_model(max_lag: int):
    case = Case(max_lag, steps=8, seed=1)
    product = Product(case).run()
    assert product.rollouts == case.num_groups * case.group_size
    assert product.largest_lag <= max_lag
    assert 0.97 <= product.rollouts_per_s / model(case) <= 1.03


def test_the_same_seed_is_the_same_run():
    case = Case(1, steps=4, seed=2)
    assert Product(case).run().trained_at == Product(case).run().trained_at
