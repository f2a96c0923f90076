"""A replay may change how the groups are trained and nothing else, and its steps are compared bitwise."""

import math
from typing import Any

import pytest

from asyncgrpo.cli.look import Equality
from asyncgrpo.config.load import load_config, with_overrides
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import ConfigError
from asyncgrpo.recording.events import as_written
from asyncgrpo.tools.replay import Pair, Replayed, lr_at, replay_config
from asyncgrpo.types import PolicyVersion


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
    ("key", "value", "why"),
    [
        ("algorithm.group_size", "4", ": the groups"),
        ("algorithm.filter_zero_signal", "true", ": the groups"),
        ("sampling.temperature", "0.5", ": the groups"),
        ("algorithm.advantage", "remax", " to remax: it needs a greedy completion"),
    ],
)
def test_what_the_groups_do_not_allow_is_refused(recorded: Config, key: str, value: str, why: str):
    with pytest.raises(ConfigError, match=f"a replay cannot change {key}{why}"):
        replay_config(recorded, [f"{key}={value}"])


STEP: dict[str, Any] = {
    "event": "step", "time": 1.0, "step": 3, "version": "1.3", "loss": 0.1, "grad_norm": 2.0, "lags": {"0": 4},
    "diagnostics": {"kl_k3": 0.5, "ess_token": 0.9}, "kl_reference": None, "seconds": {"optimizer": 1.0},
    "tokens_generated": 100,
}  # fmt: skip


def differences(**changes: Any) -> list[str]:
    return Pair(3, as_written(STEP), as_written(STEP | changes)).differences


def test_the_same_numbers_are_equal_whatever_time_it_took():
    assert differences(time=9.0, seconds={"optimizer": 7.0}, tokens_generated=0) == []
    assert differences(entropy=0.3) == [], "a field that another release added"
    broken = as_written(STEP | {"loss": math.nan})
    assert Pair(3, broken, broken).differences == []
    pair = Pair(3, None, STEP)
    assert pair.differences == [] and pair.values("loss") == (None, 0.1), "it was not recorded"
    assert not Replayed([pair]).is_equal, "nothing was compared"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss": math.nextafter(0.1, 1.0)}, ["loss"]),
        ({"loss": math.nan, "grad_norm": 2.5}, ["loss", "grad_norm"]),
        ({"diagnostics": {"kl_k3": 0.5, "ess_token": 0.8}}, ["diagnostics.ess_token"]),
        ({"kl_reference": 0.0}, ["kl_reference"]),
    ],
)
def test_one_bit_is_a_difference_and_is_named(changes: dict[str, Any], named: list[str]):
    assert differences(**changes) == named
    assert Pair(3, STEP | {"loss": 0.0}, STEP | {"loss": -0.0}).differences == ["loss"], "a zero has a sign"


def test_the_verdict_names_the_first_step_that_differs():
    pairs = [Pair(step, as_written(STEP), as_written(STEP | {"loss": loss})) for step, loss in ((6, 0.1), (7, 0.2))]
    verdict = Equality().last_line(Replayed(pairs))
    assert all(words in verdict for words in ("1 of 2 steps", "step 7", "loss was 0.1 and is 0.2"))


def test_a_step_has_the_learning_rate_that_was_set_before_it_in_its_start():
    changes = [{"event": "lr_changed", "version": version, "lr": lr} for version, lr in (("1.4", 0.5), ("1.6", 0.2))]
    rates = [lr_at(PolicyVersion(*version), changes, 1.0) for version in ((1, 3), (1, 4), (1, 5), (1, 6), (2, 6))]
    assert rates == [1.0, 0.5, 0.5, 0.2, 1.0]
