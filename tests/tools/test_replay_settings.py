"""A replay may change how the groups are trained, and nothing that decided which groups there are."""

import pytest

from asyncgrpo.config.load import load_config, with_overrides
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import ConfigError
from asyncgrpo.tools.replay import replay_config


@pytest.fixture
def recorded() -> Config:
    return load_config("quickstart", ["algorithm.loss_args.clip_low=0.1", r"data.system_prompt=\${plain}"])


def test_objective_and_learner_can_be_changed(recorded: Config):
    assert replay_config(recorded, ()) == replay_config(recorded, ["sampling.max_tokens=4"]) == recorded
    config = replay_config(recorded, ["algorithm.corrections=[]", "learner.lr=1e-4", "algorithm.loss=gspo"])
    assert config.algorithm.corrections == () and config.learner.lr == 1e-4
    assert config.algorithm.loss == "gspo" and config.algorithm.loss_args == {}, "PPO's bounds are not GSPO's"
    assert config.data.system_prompt == "${plain}"


@pytest.mark.parametrize("is_filtered", [True, False])
def test_a_preset_leaves_alone_which_groups_were_trained(recorded: Config, is_filtered: bool):
    recorded = with_overrides(recorded, [f"algorithm.filter_zero_signal={is_filtered}"])
    assert replay_config(recorded, (), algorithm="gspo").algorithm.loss == "gspo"
    for name in ("grpo", "dapo"):
        assert replay_config(recorded, (), algorithm=name).algorithm.filter_zero_signal == is_filtered


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.group_size=4",
        "algorithm.filter_zero_signal=true",
        "sampling.temperature=0.5",
    ],
)
def test_a_setting_that_made_the_groups_is_refused(recorded: Config, override: str):
    with pytest.raises(ConfigError, match=f"a replay cannot change {override.partition('=')[0]}: the groups"):
        replay_config(recorded, [override])


def test_an_objective_that_the_groups_do_not_allow_is_refused(recorded: Config):
    with pytest.raises(ConfigError, match="greedy completion"):
        replay_config(recorded, ["algorithm.advantage=remax"])
