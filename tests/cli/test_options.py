"""The flags of `train`: the settings that they make, and which of them wins."""

import pytest

from asyncgrpo.cli.options import train_overrides
from asyncgrpo.config.foreign_rules import split_gpus
from asyncgrpo.config.load import load_config
from asyncgrpo.errors import ConfigError


def test_every_flag_reaches_its_knob():
    config = load_config(
        None,
        train_overrides(
            model="m", data="d.parquet", eval_data=["e.json"], reward_func=["r.py:score", "format"], rollout_n=4, epochs=3,
            lr=2e-6, kl_coef=0.01, steps=7, engine="torch", out="o", max_lag=1,
        ),
    )  # fmt: skip
    assert (config.model.path, config.data.train, config.data.eval) == ("m", "d.parquet", "e.json")
    assert config.reward.function == ("r.py:score", "format")
    assert (config.algorithm.group_size, config.algorithm.kl_coef) == (4, 0.01)
    assert (config.learner.lr, config.generators.engine, config.run.out) == (2e-6, "torch", "o")
    assert (config.run.steps, config.run.epochs, config.buffer.max_lag) == (7, 3, 1)


def test_a_flag_wins_over_the_file_and_a_key_wins_over_a_flag():
    assert train_overrides() == []
    overrides = train_overrides(rollout_n=4, lr=2e-6, explicit=["learner.lr=3e-6"])
    config = load_config("one_node_8gpu", overrides)
    assert (config.algorithm.group_size, config.learner.lr, config.run.epochs) == (4, 3e-6, 15)


def test_of_steps_and_epochs_the_one_given_alone_is_the_end():
    assert load_config("one_node_8gpu", train_overrides(steps=5)).run.epochs is None
    assert load_config("cluster_64gpu", train_overrides(epochs=2)).run.steps is None


@pytest.mark.parametrize(
    ("n_gpus", "gpus_each", "split"),
    [(2, 1, (1, 1)), (3, 1, (2, 1)), (8, 1, (4, 4)), (8, 2, (2, 4)), (8, 4, (1, 4)), (5, 4, (1, 1)), (12, 4, (1, 8))],
)
def test_gpus_are_split_by_the_rule(n_gpus, gpus_each, split):
    assert split_gpus(n_gpus, gpus_each) == split


def test_what_was_decided_by_hand_is_kept_and_the_rest_split():
    config = load_config(
        None, train_overrides(model="m", data="d", n_gpus=8, explicit=["learner.ranks=2", "generators.gpus_each=2"])
    )
    assert (config.generators.count, config.generators.gpus_each, config.learner.ranks) == (3, 2, 2)
    assert split_gpus(8, 1, count=6) == (6, 2)


def test_no_gpu_is_a_float32_run_on_the_cpu():
    config = load_config("one_node_8gpu", train_overrides(n_gpus=0))
    assert (config.generators.gpus_each, config.generators.count, config.learner.ranks) == (0, 1, 1)
    assert (config.learner.device, config.model.dtype) == ("cpu", "float32")


def test_a_split_that_leaves_one_side_without_is_refused():
    with pytest.raises(ConfigError, match="is too few to split"):
        split_gpus(1, 1)
    with pytest.raises(ConfigError, match="cannot hold"):
        split_gpus(4, 4)
