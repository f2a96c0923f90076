"""Two and three real ranks do exactly what one does. A few processes run every scenario; the tests read what they wrote."""

import pickle
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from asyncgrpo.learner.learner import Learner
from tests.learner import objectives
from tests.learner.helpers import (
    VERSION,
    assert_equal_but_for_rounding,
    config,
    disturb,
    load,
    make_group,
    random_groups,
    step_and_gradient,
    weights,
)
from tests.learner.ranks import run_on_ranks
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe

GROUPS = [*random_groups(5, 4), make_group(9, [1.0, 1.0], [[1, 2], [3]])]
FEW = [make_group(0, [1.0, 0.0], [[1, 2, 3], []])]
"""One trainable sequence: the other ranks have nothing to do but must keep step."""
UNEVEN = [make_group(n, [1.0, 0.5, 0.0], [[1, 2, 3 + n], [4], [5, 6] * (n + 1)]) for n in range(3)]
"""Nine sequences, an odd number for two ranks, and of unlike lengths for three."""
SCENARIOS = {
    "plain": ({}, GROUPS),
    "uneven shares": ({"learner": {"tokens_per_microbatch": 30}}, UNEVEN),
    "small microbatches": ({"learner": {"tokens_per_microbatch": 40}}, GROUPS),
    "less work than ranks": ({}, FEW),
    "less work than ranks, with a pass before": ({"algorithm": {"advantage": "gae", "kl_coef": 0.1}}, FEW),
    "no gradient": ({}, GROUPS[-1:]),
    "lora": ({"model": {"lora": {"rank": 4}}, "algorithm": {"kl_coef": 0.1, "kl_kind": "full"}}, GROUPS),
    "tied": ({}, GROUPS),
    "qwen3_moe": ({}, GROUPS),  # five experts: three on one rank, two on the other
    "deepseek_v3": ({}, FEW),
    "minibatches": ({"learner": {"minibatches": 3, "ppo_epochs": 2, "tokens_per_microbatch": 60}}, GROUPS),
    "no shared prompts": ({"learner": {"share_prompts": False, "tokens_per_microbatch": 60}}, GROUPS),
} | {
    case: ({"algorithm": objectives.CASES[case], "learner": {"tokens_per_microbatch": 50}}, objectives.groups())
    for case in objectives.STEP_WIDE
}
BASIC = [name for name in SCENARIOS if name not in objectives.STEP_WIDE]
WORLDS = {
    2: [*BASIC, "several", "pairwise, penalties", "prompt-mean, masked", "gae, kl in the reward"],
    3: [
        *("uneven shares", "less work than ranks, with a pass before", "several", "pairwise, all, per token"),
        *("kl k3 in the reward, rloo", "kl full, seq-mean-token-mean"),
    ],
}
"""Which scenarios are run on how many ranks."""
FIELDS = (
    "loss", "grad_norm", "entropy", "importance_mean", "logprob_gap_max", "tokens_trained",
    "zero_signal_groups", "zero_gradients", "value_loss", "kl_reference",
)  # fmt: skip


MAKERS: dict[str, Callable[[Path], Path]] = {
    "model": lambda path: make_tiny_qwen3(path, hidden=32),
    "tied": lambda path: make_tiny_qwen3(path, hidden=32, tie=True),
    "small": lambda path: make_tiny_qwen3(path, hidden=32, vocab=objectives.VOCAB),
    "qwen3_moe": make_tiny_qwen3_moe,
    "deepseek_v3": make_tiny_deepseek_v3,
}


def model_of(name: str) -> str:
    return "small" if name in objectives.STEP_WIDE else name if name in MAKERS else "model"


def run_scenario(name: str, folder: Path, rank: int, world: int):
    sections, groups = SCENARIOS[name]
    learner = Learner(config(folder / model_of(name), **sections), rank=rank, world=world, device="cpu")
    disturb(learner)
    report, gradient = step_and_gradient(learner, groups)
    sent = {info.name: tensor.clone() for info, tensor in learner.weights()}
    found = {"report": asdict(report), "gradient": gradient, "weights": weights(learner), "sent": sent}
    return learner, found | ({"scores": torch.tensor(learner.check.score())} if name == "plain" else {})


def on_a_rank(rank: int, world: int, folder: str) -> None:
    """What each rank does. All take part in gathering; only the first has to write everything."""
    results = {}
    for name in WORLDS[world]:
        learner, results[name] = run_scenario(name, Path(folder), rank, world)
        if name == "plain" and world == 2:
            learner.save(f"{folder}/checkpoint")
            learner.export(f"{folder}/export")
            learner.step(GROUPS, VERSION)
            results["second step"] = weights(learner)
        if rank != 0:
            results[name] = {"report": results[name]["report"]}
    Path(folder, f"world{world}rank{rank}.pickle").write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for name, make in MAKERS.items():
        make(folder / name)
    run_on_ranks(on_a_rank, str(folder), *WORLDS)
    return folder


def read(folder: Path, world: int, rank: int = 0):
    return pickle.loads((folder / f"world{world}rank{rank}.pickle").read_bytes())


@pytest.mark.parametrize("name", sorted({name for names in WORLDS.values() for name in names}))
def test_several_ranks_step_as_one(folder, name):
    if name == "lora":
        pytest.importorskip("peft")
    _, one = run_scenario(name, folder, 0, 1)
    for world in (world for world, names in WORLDS.items() if name in names):
        several = read(folder, world)[name]
        numbers, expected = ({f: r[f] for f in FIELDS if r[f] is not None} for r in (several["report"], one["report"]))
        assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert several["report"]["advantages"] == pytest.approx(one["report"]["advantages"], rel=1e-4, abs=1e-5)
        found, expected = (each["report"]["diagnostics"] for each in (several, one))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert_equal_but_for_rounding(several["gradient"], one["gradient"])
        assert several["sent"].keys() == one["sent"].keys()
        if name == "plain":
            torch.testing.assert_close(several["scores"], one["scores"], rtol=0, atol=1e-4)
        for what in ("weights", "sent"):
            for key, expected in one[what].items():  # AdamW makes steps of about lr of any gradient, be it rounding
                torch.testing.assert_close(several[what][key], expected, rtol=0, atol=0.1 * 1e-3, msg=key)


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_reports_the_same(folder, world):
    reports = [read(folder, world, rank) for rank in range(world)]
    for name in WORLDS[world]:
        first, *others = (report[name]["report"] | {"seconds": None} for report in reports)
        assert all(other == first for other in others), name


def test_a_checkpoint_of_two_ranks_goes_on_with_one(folder):
    learner = Learner(config(folder / "model"), rank=0, world=1, device="cpu")
    learner.load(str(folder / "checkpoint"))
    assert learner.steps == 1
    learner.step(GROUPS, VERSION)
    expected = read(folder, 2)["second step"]
    for name, tensor in weights(learner).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_an_export_of_two_ranks_is_their_weights(folder):
    expected = read(folder, 2)["plain"]["weights"]
    assert all(expected[name].equal(tensor) for name, tensor in load(folder / "export").state_dict().items())
