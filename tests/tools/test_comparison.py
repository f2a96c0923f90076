"""Steps are compared bitwise, without the fields that a replay cannot know."""

import math
from typing import Any

import pytest

from asyncgrpo.cli.look import Equality
from asyncgrpo.recording.events import as_written
from asyncgrpo.tools.replay import Pair, Replayed, means

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


def test_means_are_over_the_steps_that_have_the_field():
    pairs = [Pair(1, None, STEP | {"loss": 1.0}), Pair(2, STEP | {"loss": 4.0}, STEP | {"loss": 3.0})]
    assert means(pairs, "loss") == (4.0, 2.0)
    assert means(pairs, "kl_reference") == (None, None)


def test_the_verdict_names_the_first_step_that_differs():
    pairs = [Pair(step, as_written(STEP), as_written(STEP | {"loss": loss})) for step, loss in ((6, 0.1), (7, 0.2))]
    verdict = Equality().last_line(Replayed(pairs))
    assert all(words in verdict for words in ("1 of 2 steps", "step 7", "loss was 0.1 and is 0.2"))
