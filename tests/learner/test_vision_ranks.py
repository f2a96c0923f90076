"""Two ranks, one of which has no image in its rows, step as one."""

import pickle
from pathlib import Path

import pytest
import torch

from asyncgrpo.data.images import Images
from asyncgrpo.learner.learner import Learner
from tests.learner.helpers import (
    assert_equal_but_for_rounding,
    config,
    make_group,
    replace,
    step_and_gradient,
    weights,
)
from tests.learner.ranks import run_on_ranks
from tests.learner.test_vision import groups_of, prompts_of
from tests.vision import make_tiny_vl

SECTIONS = {
    "all weights": {"learner": {"tokens_per_microbatch": 80}},
    "one row": {},
    "lora": {"model": {"lora": {"rank": 4}}, "algorithm": {"kl_coef": 0.1}},
}


def step(folder: Path, name: str, rank: int, world: int) -> dict:
    settings = config(folder / "model", **SECTIONS[name])
    images = Images.of(settings, folder)
    learner = Learner(settings, rank=rank, world=world, device="cpu", images=images)
    ids, seen = learner.model.language_model.config, []
    tower = learner.model.language_model.base_model.visual
    tower.register_forward_hook(lambda *_: seen.append(1))
    frozen = {name: p.full_tensor().clone() for name, p in tower.named_parameters()}
    groups = groups_of(prompts_of(images, ids.vision_start_token_id, ids.vision_end_token_id), images)
    if name == "one row":  # the other rank has no row, and no image
        groups = [replace(make_group(1, [1.0, 0.0], [[1, 2, 3], []]), prompt=groups[1].prompt)]
    report, gradient = step_and_gradient(learner, groups)
    same = all(torch.equal(p.full_tensor(), frozen[name]) for name, p in tower.named_parameters())
    return {"loss": report.loss, "gradient": gradient, "weights": weights(learner), "seen": len(seen), "same": same}


def on_a_rank(rank: int, world: int, folder: str) -> None:
    results = {name: step(Path(folder), name, rank, world) for name in SECTIONS}
    Path(folder, f"rank{rank}.pickle").write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    make_tiny_vl(folder / "model")
    run_on_ranks(on_a_rank, str(folder), 2)
    return folder


@pytest.mark.parametrize("name", SECTIONS)
def test_ranks_with_and_without_images_step_as_one_and_leave_the_tower_alone(folder, name):
    if name == "lora":
        pytest.importorskip("peft")
    one = step(folder, name, 0, 1)
    first, second = (pickle.loads((folder / f"rank{rank}.pickle").read_bytes())[name] for rank in (0, 1))
    assert {first["seen"], second["seen"]} == {1, 0} or name != "one row"
    assert first["loss"] == pytest.approx(one["loss"], rel=1e-4, abs=1e-6)
    assert_equal_but_for_rounding(first["gradient"], one["gradient"])
    assert not any(".visual." in key for key in one["gradient"])
    assert one["same"] and first["same"] and second["same"]
    for key, expected in one["weights"].items():
        torch.testing.assert_close(first["weights"][key], expected, rtol=0, atol=0.1 * 1e-3, msg=key)
