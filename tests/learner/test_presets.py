"""Every preset of configs/algorithms is a whole algorithm: it loads over any file, is accepted, and trains."""

import math

import msgspec
import pytest

from asyncgrpo.config import AlgorithmConfig
from asyncgrpo.config_files import algorithm_file, algorithm_names, headline
from asyncgrpo.config_loading import load_config
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.settings import check_algorithm, loss_arguments
from tests.learner.helpers import random_groups, with_true_logprobs
from tests.models import make_tiny_qwen3

PAPERS = {
    "grpo", "dr_grpo", "rloo", "lite_ppo", "max_rl", "opo", "gpg", "pass_at_k", "reinforce_plus_plus", "remax", "dapo",
    "gspo", "cispo_scalerl", "decoupled", "a3po", "tis", "sequence_mis", "geometric_rs", "icepop", "opsm", "m2po", "dppo",
    "sapo", "gmpo", "vespo", "dro", "topr", "pairwise", "vcpo", "ppo",
}  # fmt: skip
EVERYWHERE = ("advantage", "loss", "loss_args", "anchor", "corrections", "aggregation")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


def test_the_presets_are_those_that_are_promised():
    assert set(algorithm_names()) == PAPERS


@pytest.mark.parametrize("name", algorithm_names())
def test_a_preset_takes_a_step(name, path):
    groups = random_groups(4, 4, answer=(2, 6))
    settings = [f"model.path={path}", "learner.tokens_per_microbatch=40", "learner.lr=1e-3"]
    settings += ["algorithm.group_size=3" if name == "remax" else "algorithm.group_size=4"]
    config = load_config("quickstart", settings, algorithm=name)
    check_algorithm(config)
    learner = Learner(config, rank=0, world=1, device="cpu")
    if name == "geometric_rs":  # made for answers that engine and learner agree about
        groups = with_true_logprobs(path, groups)
    before = {info.name: tensor.clone() for info, tensor in learner.weights()}
    report = learner.step(groups, groups[0].versions[0])
    assert math.isfinite(report.loss) and math.isfinite(report.grad_norm)
    assert report.skipped is None and report.grad_norm > 0
    assert any((tensor != before[info.name]).any() for info, tensor in learner.weights())


@pytest.mark.parametrize("name", algorithm_names())
def test_a_preset_is_the_same_over_any_file(name, tmp_path):
    odd = tmp_path / "odd.yaml"
    odd.write_text(
        "extends: quickstart\nalgorithm:\n  advantage: opo\n  loss: dppo_kl\n  loss_args: {low: 0.7, cap: 3.0}\n"
        "  anchor: interpolated\n  corrections: [{kind: importance, high: 9.0}, {kind: importance}]\n"
        "  aggregation: seq-mean-token-sum\n"
    )
    same = tmp_path / "same.yaml"
    loss = load_config("quickstart", algorithm=name).algorithm.loss
    optional = [n for n, p in loss_arguments(loss).items() if isinstance(p.default, float)]
    same.write_text(
        f"extends: odd.yaml\nalgorithm: {{loss: {loss}, loss_args: {{{', '.join(f'{n}: 9' for n in optional)}}}}}\n"
    )
    plain, over_odd, over_same = (load_config(file, algorithm=name).algorithm for file in ("quickstart", odd, same))
    assert [getattr(over_odd, field) for field in EVERYWHERE] == [getattr(plain, field) for field in EVERYWHERE]
    assert [getattr(over_same, field) for field in EVERYWHERE] == [getattr(plain, field) for field in EVERYWHERE]


@pytest.mark.parametrize("name", algorithm_names())
def test_a_preset_says_what_it_is(name):
    text = algorithm_file(name).read_text()
    assert headline(algorithm_file(name)).count(": ") == 1
    assert "# Use it" in text
    assert "arXiv:" in text or name in ("sequence_mis", "geometric_rs")


def test_our_defaults_are_the_preset_tis():
    tis = load_config("quickstart", ["algorithm.entropy_coef=0", "algorithm.group_size=8"], algorithm="tis").algorithm
    assert msgspec.structs.replace(tis, loss_args={}) == AlgorithmConfig()
    defaults = {name: parameter.default for name, parameter in loss_arguments("ppo_clip").items()}
    assert tis.loss_args == defaults
