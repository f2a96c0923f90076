"""Ranks that divide rows (context) and experts step as one rank does. A few processes run every scenario, as in `test_ranks`."""

import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from asyncgrpo.config.load import algorithm_names, load_config
from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.model import check_language_model
from asyncgrpo.learner.parallel import Row
from asyncgrpo.learner.publishing import fill_parts
from asyncgrpo.weights.arena import Layout
from tests.learner import objectives
from tests.learner.helpers import (
    VERSION,
    assert_same_gradient,
    config,
    diagnostics_of,
    disturb,
    make_group,
    random_groups,
    watch_updates,
    weights,
    with_teacher,
)
from tests.learner.ranks import run_on_ranks
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe

LAYOUTS = [(2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 4, 1), (4, 4, 2), (4, 1, 4)]
"""(ranks, expert, context). With context 4 the models have fewer heads of keys and values than ranks."""
GROUPS = [*random_groups(5, 4), make_group(9, [1.0, 1.0], [[1, 2], [3]])]
FEW = [make_group(0, [1.0, 0.0], [[1, 2, 3], []])]
"""One completion to train: other rows, and ranks of its row, have none of its tokens."""
MIXED = {
    "qwen3_moe": ({}, GROUPS),
    "deepseek_v3": ({}, GROUPS),
    "few": ({}, FEW),
    "no shared prompts": ({"learner": {"share_prompts": False, "tokens_per_microbatch": 60}}, GROUPS),
    "served teacher": (
        {"algorithm": {"kl_coef": 1.0, "kl_kind": "full"}, "teacher": {"url": "http://unused", "top_k": 3}},
        with_teacher(GROUPS, top_k=3),
    ),
    "lora": ({"model": {"lora": {"rank": 4}}, "algorithm": {"kl_coef": 0.1, "kl_kind": "full"}}, GROUPS),
}
STEP_WIDE = {
    case: ({"algorithm": objectives.CASES[case], "learner": {"tokens_per_microbatch": 50}}, objectives.groups())
    for case in ("gspo", "several", "kl full, seq-mean-token-mean", "gae, kl in the reward")
}
PRESETS = [name for name in algorithm_names() if name not in STEP_WIDE]
SCENARIOS = MIXED | STEP_WIDE | {name: ({}, GROUPS) for name in PRESETS}
MODELS = {
    "qwen3_moe": lambda path: make_tiny_qwen3_moe(path, experts=8),
    "deepseek_v3": make_tiny_deepseek_v3,
    "small": lambda path: make_tiny_qwen3_moe(path, hidden=32, vocab=objectives.VOCAB, experts=4),
}


def model_of(name: str) -> str:
    return "small" if name in STEP_WIDE else name if name in MODELS else "qwen3_moe"


def scenarios(layout: tuple[int, int, int]) -> list[str]:
    """All on the layout that has both, the models on the others."""
    return list(SCENARIOS) if layout == (4, 2, 2) else ["qwen3_moe", "deepseek_v3", "few", "gspo"]


def learner_of(name: str, folder: Path, rank: int, layout: tuple[int, int, int]) -> Learner:
    world, expert, context = layout
    sections, _ = SCENARIOS[name]
    path = str(folder / model_of(name))
    if name in PRESETS:
        settings = [f"model.path={path}", "learner.device=cpu", f"algorithm.group_size={3 if name == 'remax' else 4}"]
        settings += [
            f"learner.ranks={world}",
            f"learner.parallel.expert={expert}",
            f"learner.parallel.context={context}",
        ]
        settings += ["model.dtype=float32"]
        settings += [f"algorithm.teacher={path}"] if name.startswith("distill") else []
        return Learner(load_config("quickstart", settings, algorithm=name), rank=rank, world=world, device="cpu")
    sections = sections | {
        "model": {"path": path, "dtype": "float32"} | sections.get("model", {}),
        "learner": {"device": "cpu", "lr": 1e-3, "tokens_per_microbatch": 4096 // context}
        | sections.get("learner", {})
        | {"parallel": {"expert": expert, "context": context}},
    }
    return Learner(config(path, **sections), rank=rank, world=world, device="cpu")


def run_scenario(name: str, folder: Path, rank: int, layout: tuple[int, int, int]) -> dict:
    """Three steps, of a preset one: report of the first, gradients of the first and last update."""
    learner = learner_of(name, folder, rank, layout)
    disturb(learner)
    updates = watch_updates(learner)
    first, *_ = [learner.step(SCENARIOS[name][1], VERSION) for _ in range(1 if name in PRESETS else 3)]
    updates = [updates[0], updates[-1]]
    return {
        "report": asdict(first),
        "gradients": [update.gradient for update in updates],
        "scores": learner.check.score(),
    }


def on_a_rank(rank: int, world: int, folder: str) -> None:
    results = {}
    for layout in (layout for layout in LAYOUTS if layout[0] == world):
        for name in scenarios(layout):
            results[layout, name] = run_scenario(name, Path(folder), rank, layout)
    if world == 4:
        check_publication_and_checkpoint(rank, Path(folder))
    if rank == 0:
        Path(folder, f"world{world}.pickle").write_bytes(pickle.dumps(results))


def check_publication_and_checkpoint(rank: int, folder: Path) -> None:
    """Ranks write every byte of a publication once, from what they own; a checkpoint is read on other layouts."""
    learner = learner_of("deepseek_v3", folder, rank, (4, 2, 2))
    learner.step(GROUPS, VERSION)
    layout = Layout(learner.layout())
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    fill_parts(learner._published.parts(rank), layout, flat)
    total = flat.long()
    torch.distributed.all_reduce(total)
    whole = weights(learner)
    assert all(view.equal(whole[info.name]) for info, view in layout.views(total.to(torch.uint8)))
    learner.save(f"{folder}/checkpoint")
    if rank == 0:
        Path(folder, "saved.pickle").write_bytes(pickle.dumps(whole))
    for other in [(4, 4, 1), (4, 1, 4)]:
        again = learner_of("deepseek_v3", folder, rank, other)
        again.load(f"{folder}/checkpoint")
        assert all(whole[name].equal(tensor) for name, tensor in weights(again).items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    for name, make in MODELS.items():
        make(folder / name)
    run_on_ranks(on_a_rank, str(folder), 2, 4)
    return folder


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_layout_steps_as_one_rank(folder, name):
    if name == "lora":
        pytest.importorskip("peft")
    one = run_scenario(name, folder, 0, (1, 1, 1))
    for layout in (layout for layout in LAYOUTS if name in scenarios(layout)):
        several = pickle.loads((folder / f"world{layout[0]}.pickle").read_bytes())[layout, name]
        for found, expected, tolerance in zip(several["gradients"], one["gradients"], (3e-6, 2e-5), strict=True):
            assert_same_gradient(found, expected, tolerance)  # AdamW makes full steps of rounding, too
        skipped = {"seconds", "microbatches", "tokens_run"}
        found, expected = (
            {k: v for k, v in each["report"].items() if isinstance(v, float | int) and k not in skipped}
            for each in (several, one)
        )
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), layout
        found, expected = (diagnostics_of(each["report"]) for each in (several, one))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert several["scores"] == pytest.approx(one["scores"], abs=1e-4)


def test_a_checkpoint_of_four_ranks_is_read_by_one(folder):
    learner = learner_of("deepseek_v3", folder, 0, (1, 1, 1))
    learner.load(str(folder / "checkpoint"))
    saved = pickle.loads((folder / "saved.pickle").read_bytes())
    assert all(saved[name].equal(tensor) for name, tensor in weights(learner).items())


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ("qwen3_moe", {"context": 3}, "learner.parallel.context is 3, which does not divide the 4 attention heads"),
        ("qwen3_moe", {"expert": 3}, "learner.parallel.expert is 3, which does not divide the 8 experts"),
        ("dense", {"expert": 2}, "is a qwen3, which has no experts"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(tmp_path, model, sizes, message):
    path = (MODELS | {"dense": make_tiny_qwen3})[model](tmp_path / model)
    settings = config(path, learner={"ranks": 6, "parallel": sizes})
    with pytest.raises(ConfigError, match=message):
        check_language_model(str(path), settings, torch.device("cpu"))


def test_shares_of_a_row_are_those_of_chunk():
    for size in (1, 2, 3, 4):
        rows = [Row() for _ in range(size)]
        for rank, row in enumerate(rows):
            row.rank, row.size = rank, size
        for length in range(9):
            shares = [torch.arange(length)[row.own(length)].tolist() for row in rows]
            chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(size)] if length else []
            assert shares == chunks + [[]] * (size - len(chunks))
