"""Every preset of configs/algorithms is a whole algorithm: it loads over any file, is accepted, and trains."""

import json
import math

import msgspec
import pytest

from asyncgrpo.config import load
from asyncgrpo.config.load import algorithm_file, algorithm_names, headline, is_part_of_a_preset, load_config
from asyncgrpo.config.rules import loss_arguments
from asyncgrpo.config.schema import AlgorithmConfig, Config
from asyncgrpo.learner.learner import Learner
from tests.learner.helpers import random_groups, with_true_logprobs
from tests.models import make_tiny_qwen3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("name", algorithm_names())
def test_a_preset_takes_a_step(name, path):
    groups = random_groups(4, 4, seed=1, answer=(2, 6))  # in some group one completion is the best: pass_at_k
    settings = [f"model.path={path}", "learner.tokens_per_microbatch=40", "learner.lr=1e-3"]
    settings += ["algorithm.group_size=3" if name == "remax" else "algorithm.group_size=4"]
    config = load_config("quickstart", settings, algorithm=name)
    learner = Learner(config, rank=0, world=1, device="cpu")
    if name == "geometric_rs":  # made for completions that engine and learner agree about
        groups = with_true_logprobs(path, groups)
    before = {info.name: tensor.clone() for info, tensor in learner.weights()}
    report = learner.step(groups, groups[0].versions[0])
    assert math.isfinite(report.loss) and math.isfinite(report.grad_norm)
    assert report.skipped is None and report.grad_norm > 0
    assert any((tensor != before[info.name]).any() for info, tensor in learner.weights())


NEEDED = "model: {path: m}\ndata: {train: t}\n"


def recipe(config: Config) -> tuple[AlgorithmConfig, int, bool]:
    """What a preset decides."""
    objective = msgspec.structs.replace(
        config.algorithm, group_size=8, min_completions=None, teacher=None, router_aux_coef=None, router_bias_rate=0.0
    )
    return objective, config.learner.minibatches, config.learner.ppo_epochs, config.learner.ess_lr


@pytest.mark.parametrize("name", algorithm_names())
def test_a_preset_is_the_same_over_a_file_that_sets_every_key(name, tmp_path):
    every = {
        "filter_zero_signal": True, "advantage": "opo", "loss": "dppo_kl", "loss_args": {"low_nats": 0.7, "max_ratio": 3.0},
        "anchor": "interpolated", "corrections": [{"high_ratio": 9.0}, {}], "aggregation": "seq-mean-token-sum",
        "kl_coef": 0.5, "kl_kind": "k2", "kl_in": "reward", "behaviour_kl_coef": 0.3,
        "entropy_coef": 0.2, "truncated": "mask", "overlong_buffer": 3, "overlong_factor": 2.0,
        "critic": {"lam": 0.5, "gamma": 0.9, "value_coef": 2.0, "value_clip": None, "lr_scale": 3.0},
        "group_size": 5, "min_completions": 3, "teacher": "t", "router_aux_coef": 0.1, "router_bias_rate": 0.01,
    }  # fmt: skip
    assert every.keys() == set(AlgorithmConfig.__struct_fields__), "a new key: is it part of a recipe?"
    odd = tmp_path / "odd.yaml"
    odd.write_text(
        f"{NEEDED}algorithm: {json.dumps(every)}\nlearner: {{minibatches: 7, ppo_epochs: 2, ess_lr: true, lr: 0.5}}\n"
    )
    config = load_config(odd, algorithm=name, is_complete=False)
    assert recipe(config) == recipe(load_config(None, ["model.path=m", "data.train=t"], algorithm=name))
    algorithm = config.algorithm
    kept = (algorithm.group_size, algorithm.min_completions, algorithm.teacher, algorithm.router_aux_coef)
    assert (*kept, config.learner.lr) == (5, 3, "t", 0.1, 0.5), "what is no part of a recipe is the file's"


@pytest.mark.parametrize("name", algorithm_names())
def test_a_preset_says_what_it_is_and_sets_nothing_but_its_recipe(name):
    (layer,) = load.read(algorithm_file(name))
    assert [key for key in layer.values if not is_part_of_a_preset(key)] == []
    text = algorithm_file(name).read_text()
    assert headline(algorithm_file(name)).count(": ") == 1 and "# Use it" in text
    assert "arXiv:" in text or name in ("sequence_mis", "geometric_rs")


def test_our_defaults_are_the_preset_tis_with_the_clip_of_ppo():
    tis = load_config("quickstart", ["algorithm.group_size=8"], algorithm="tis").algorithm
    assert msgspec.structs.replace(tis, loss_args={}) == AlgorithmConfig()
    defaults = {name: parameter.default for name, parameter in loss_arguments("ppo_clip").items()}
    assert defaults["clip_high"] == 0.2 and tis.loss_args == defaults | {"clip_high": 0.28}
