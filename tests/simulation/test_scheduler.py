"""On the virtual clock every group is trained within the bound, and a run is a function of its seed."""

from tests.simulation.scheduler import Case, Product


def test_every_group_is_trained_within_the_bound_and_a_larger_bound_takes_less_time():
    ended_s = []
    for max_lag in (0, 1, 4):
        case = Case(max_lag, steps=8, seed=1)
        product = Product(case).run()
        assert product.rollouts == case.num_groups * case.group_size
        assert product.largest_lag <= max_lag
        ended_s.append(product.trained_at[-1][0])
    assert ended_s == sorted(ended_s, reverse=True)


def test_the_same_seed_is_the_same_run():
    case = Case(1, steps=4, seed=2)
    assert Product(case).run().trained_at == Product(case).run().trained_at
