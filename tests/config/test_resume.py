"""Every knob has a rule for a resume, and what is other now is found and named."""

import pytest

from asyncgrpo.config.explain import knobs
from asyncgrpo.config.load import load_config
from asyncgrpo.config.resume import APPLIED, NOT_COMPARED, REFUSED, Settings, Source, changes, values_of

NEEDED = ["model.path=/models/a", "data.train=/data/train.jsonl"]


def settings(*overrides: str, **digests: str) -> Settings:
    config = load_config(None, [*NEEDED, *overrides])
    paths = {"model.path": config.model.path, "data.train": config.data.train}
    names = {"model.path": "model", "data.train": "data"}
    sources = {key: Source(path=path, digest=digests.get(names[key], "same")) for key, path in paths.items()}
    return Settings(values=values_of(config), sources=sources)


def effects(before: Settings, now: Settings) -> dict[str, str]:
    return {change.key: change.effect for change in changes(before, now)}


def test_every_knob_has_exactly_one_rule():
    rules = [set(REFUSED), set(APPLIED), set(NOT_COMPARED)]
    assert set(knobs()) == set.union(*rules), "say in asyncgrpo/config/resume.py what a resume does with a new knob"
    assert sum(map(len, rules)) == len(knobs())


def test_nothing_changed_is_nothing_said():
    assert changes(settings(), settings("run.out=elsewhere")) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learner.lr=2e-6", "learner.lr 1e-06 -> 2e-06"),
        ("algorithm.group_size=4", "algorithm.group_size 8 -> 4"),
        ("run.epochs=null", "run.epochs 1 -> null"),
    ],
)
def test_what_may_change_is_applied_and_named(override, said):
    (change,) = changes(settings(), settings(override))
    assert (str(change), change.effect) == (said, "applied")


@pytest.mark.parametrize("override", ["run.seed=1", "model.lora.rank=8", "algorithm.loss=gspo", "data.shuffle=false"])
def test_what_the_run_is_made_of_is_refused_with_a_reason(override):
    (change,) = changes(settings(), settings(override))
    assert change.effect == "refused" and change.why


def test_a_model_is_known_by_what_it_holds():
    assert effects(settings(), settings(model="other")) == {"model.path": "refused"}
    assert effects(settings(), settings("model.path=/models/b", model="other")) == {"model.path": "refused"}
    assert effects(settings(), settings("model.path=/models/b")) == {"model.path": "applied"}, "it has only moved"
    assert effects(settings(model=""), settings("model.path=/models/b")) == {"model.path": "refused"}
    assert effects(settings(model="", data=""), settings()) == {}, "an older release did not look"


def test_a_coefficient_that_is_steered_goes_on_from_the_checkpoint():
    steered = "algorithm.kl_target=0.1"
    found = changes(settings(steered, "algorithm.kl_coef=0.01"), settings(steered, "algorithm.kl_coef=0.02"))
    assert [(change.key, change.effect) for change in found] == [("algorithm.kl_coef", "ignored")]
    assert "kl_target" in found[0].why
    assert effects(settings(), settings("algorithm.kl_coef=0.02")) == {"algorithm.kl_coef": "applied"}


def test_a_knob_that_an_older_release_did_not_know_had_its_default():
    before, now = settings(), settings("buffer.keep_journal=true")
    del before.values["buffer.keep_journal"]
    assert effects(before, now) == {"buffer.keep_journal": "applied"}
    assert effects(before, settings()) == {}
