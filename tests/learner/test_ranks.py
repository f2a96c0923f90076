"""Two real ranks do exactly what one does. One pair of processes runs every scenario; the tests read what it wrote."""

import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from asyncgrpo.learner.learner import Learner
from tests.learner.helpers import VERSION, config, load, make_group, random_groups, weights
from tests.learner.ranks import run_on_ranks
from tests.models import make_tiny_qwen3

GROUPS = [*random_groups(5, 4), make_group(9, [1.0, 1.0], [[1, 2], [3]])]
FEW = [make_group(0, [1.0, 0.0], [[1, 2, 3], []])]
"""One trainable sequence: the second rank has nothing to do but must keep step."""
SCENARIOS = {
    "plain": ({}, GROUPS),
    "small microbatches": ({"learner": {"tokens_per_microbatch": 40, "lr": 1e-3}}, GROUPS),
    "kl and entropy": ({"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}}, GROUPS),
    "less work than ranks": ({}, FEW),
    "lora": ({"model": {"lora": {"rank": 4}}, "algorithm": {"kl_coef": 0.1}}, GROUPS),
    "tied": ({}, GROUPS),
}
FIELDS = (
    "loss",
    "grad_norm",
    "entropy",
    "importance_mean",
    "logprob_gap_max",
    "effective_sample_share",
    "tokens_trained",
)


def run_scenario(name: str, folder: Path, rank: int, world: int):
    sections, groups = SCENARIOS[name]
    path = str(folder / ("tied" if name == "tied" else "model"))
    sections = sections | {"model": sections.get("model", {}) | {"path": path, "dtype": "float32"}}
    learner = Learner(config(path, **sections), rank=rank, world=world, device="cpu")
    gradients: dict[str, torch.Tensor] = {}
    update = learner._update

    def keep_gradients(lr):
        for parameter, (key, p) in zip(learner.parameters, trainable(learner), strict=True):
            assert parameter is p
            gradients[key] = p.grad.full_tensor().clone()
        return update(lr)

    learner._update = keep_gradients
    if name == "lora":  # at its first step only half of an adapter has a gradient
        learner.step(groups, VERSION)
    report = asdict(learner.step(groups, VERSION))
    learner._update = update
    return learner, {"report": report, "gradients": gradients, "weights": weights(learner)}


def trainable(learner):
    return [(n, p) for n, p in learner.model.language_model.named_parameters() if p.requires_grad]


def two_ranks(rank: int, world: int, folder: str) -> None:
    """What each of the two ranks does."""
    results = {}
    for name in SCENARIOS:
        learner, results[name] = run_scenario(name, Path(folder), rank, world)
        if name == "plain":
            learner.save(f"{folder}/checkpoint")
            learner.export(f"{folder}/export")
            learner.step(GROUPS, VERSION)
            results["second step"] = weights(learner)
    Path(folder, f"rank{rank}.pickle").write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    make_tiny_qwen3(folder / "model")
    make_tiny_qwen3(folder / "tied", tie=True)
    run_on_ranks(2, two_ranks, str(folder))
    return folder


def read(folder: Path, rank: int = 0):
    return pickle.loads((folder / f"rank{rank}.pickle").read_bytes())


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_step_as_one(folder, name):
    if name == "lora":
        pytest.importorskip("peft")
    _, one = run_scenario(name, folder, 0, 1)
    two = read(folder)[name]
    for field in FIELDS:
        assert two["report"][field] == pytest.approx(one["report"][field], rel=1e-4, abs=1e-6), field
    assert two["report"]["advantages"] == one["report"]["advantages"]
    tolerance = 1e-3 if name == "lora" else 2e-6  # its first step has already made the weights differ by rounding
    for key, expected in one["gradients"].items():
        assert (two["gradients"][key] - expected).norm() < tolerance * expected.norm(), key
    for key, expected in one["weights"].items():  # AdamW makes steps of about lr of any gradient, be it rounding
        torch.testing.assert_close(two["weights"][key], expected, rtol=0, atol=0.05 * 1e-3, msg=key)


def test_every_rank_reports_the_same(folder):
    for name in SCENARIOS:
        reports = [read(folder, rank)[name]["report"] | {"seconds": None} for rank in range(2)]
        assert reports[0] == reports[1]


def test_a_checkpoint_of_two_ranks_goes_on_with_one(folder):
    learner = Learner(config(folder / "model"), rank=0, world=1, device="cpu")
    learner.load(str(folder / "checkpoint"))
    assert learner.steps == 1
    learner.step(GROUPS, VERSION)
    expected = read(folder)["second step"]
    for name, tensor in weights(learner).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_an_export_of_two_ranks_is_their_weights(folder):
    expected = read(folder)["plain"]["weights"]
    assert all(expected[name].equal(tensor) for name, tensor in load(folder / "export").state_dict().items())
