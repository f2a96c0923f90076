"""Several ranks step as one does, whether they divide completions, rows (context) or experts.

A few processes run every scenario; the tests read what they wrote.
"""

import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from asyncgrpo.data.demo import _byte_tokenizer
from asyncgrpo.data.images import Images
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.publishing import fill_parts
from asyncgrpo.weights.arena import Layout
from tests.gpu_rehearsals.step_memory import peak_bytes
from tests.learner import objectives
from tests.learner.helpers import (
    VERSION,
    assert_same_gradient,
    config,
    disturb,
    load,
    make_group,
    random_groups,
    watch_updates,
    weights,
    with_teacher,
)
from tests.learner.ranks import run_on_ranks
from tests.learner.test_vision import groups_of, prompts_of
from tests.models import make_tiny_deepseek_v3, make_tiny_glm4_moe, make_tiny_qwen3, make_tiny_qwen3_moe
from tests.vision import make_tiny_vl

pytestmark = pytest.mark.timeout(600)  # the first test waits for six groups of ranks

MODELS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda path: make_tiny_qwen3(path, hidden=32),
    "tied": lambda path: make_tiny_qwen3(path, hidden=32, tie=True),
    "five experts": make_tiny_qwen3_moe,
    "qwen3_moe": lambda path: make_tiny_qwen3_moe(path, experts=8),
    "deepseek_v3": make_tiny_deepseek_v3,
    "glm4_moe": make_tiny_glm4_moe,
    "small": lambda path: make_tiny_qwen3_moe(path, hidden=32, vocab=objectives.VOCAB, experts=4),
    "vision": make_tiny_vl,
}
GROUPS = [*random_groups(5, 4), make_group(9, [1.0, 1.0], [[1, 2], [3]])]
FEW = [make_group(0, [1.0, 0.0], [[1, 2, 3], []])]
"""One completion to train: other rows, and ranks of its row, have none of its tokens, but must keep step."""
UNEVEN = [make_group(n, [1.0, 0.5, 0.0], [[1, 2, 3 + n], [4], [5, 6] * (n + 1)]) for n in range(3)]
"""Nine sequences, an odd number for two ranks, and of unlike lengths for three."""


def routed(groups: list, route: list[int]) -> list:
    """All tokens go to these two of eight experts, in both layers."""

    def changed(group, rollout):
        length = len(group.prompt.token_ids) + len(rollout.completion.token_ids) - 1
        routes = np.tile(np.array(route, np.int16), (length, 2, 1))
        return replace(rollout, completion=replace(rollout.completion, routes=routes))

    return [replace(group, rollouts=tuple(changed(group, rollout) for rollout in group.rollouts)) for group in groups]


def pictured(learner: Learner) -> list:
    ids, images = learner.model.language_model.config, learner.model.vision._images
    return groups_of(prompts_of(images, ids.vision_start_token_id, ids.vision_end_token_id), images)


KL = {"kl_coef": 0.1, "kl_kind": "full"}
SHORT_ROWS = {"tokens_per_microbatch": 50}
SERVED = {"algorithm": KL | {"kl_coef": 1.0}, "teacher": {"url": "http://unused", "top_k": 3}}
SCENARIOS: dict[str, tuple[str, dict, list | Callable[[Learner], list]]] = {
    "plain": ("dense", {}, GROUPS),
    "uneven shares": ("dense", {"learner": {"tokens_per_microbatch": 30}}, UNEVEN),
    "tied, small microbatches": ("tied", {"learner": {"tokens_per_microbatch": 40}}, GROUPS),
    "few": ("qwen3_moe", {}, FEW),
    "few, deepseek_v3": ("deepseek_v3", {}, FEW),
    "few, with a pass before": ("dense", {"algorithm": {"advantage": "gae", "kl_coef": 0.1}}, FEW),
    "no gradient": ("dense", {}, GROUPS[-1:]),
    "five experts": ("five experts", {}, GROUPS),  # three on one rank, two on the other
    "qwen3_moe": ("qwen3_moe", {"algorithm": {"router_aux_coef": 0.1}}, GROUPS),
    "deepseek_v3": ("deepseek_v3", {"algorithm": {"router_bias_rate": 0.01}}, GROUPS),
    "glm4_moe": ("glm4_moe", {}, GROUPS),
    # all tokens go to experts of one rank
    "skewed": ("qwen3_moe", {"algorithm": {"router_aux_coef": 0.1}}, routed(GROUPS, [0, 1])),
    "no shared prompts": ("qwen3_moe", {"learner": {"share_prompts": False, "tokens_per_microbatch": 60}}, GROUPS),
    "served teacher": ("qwen3_moe", SERVED, with_teacher(GROUPS, top_k=3)),
    "dense teacher": ("qwen3_moe", {"algorithm": {"kl_coef": 1.0, "kl_kind": "k1+", "teacher": "dense"}}, GROUPS),
    "lora": ("qwen3_moe", {"model": {"lora": {"rank": 4}}, "algorithm": KL}, GROUPS),
    "rate by the sample share": ("qwen3_moe", {"learner": {"ess_lr": True}}, GROUPS),
    "minibatches": ("dense", {"learner": {"minibatches": 3, "ppo_epochs": 2, "tokens_per_microbatch": 60}}, GROUPS),
    "images": ("vision", {"learner": {"tokens_per_microbatch": 80}}, pictured),
    # the other rank has no row, and no image
    "images, one row": ("vision", {}, lambda learner: [replace(FEW[0], prompt=pictured(learner)[1].prompt)]),
    "images, lora": ("vision", {"model": {"lora": {"rank": 4}}, "algorithm": {"kl_coef": 0.1}}, pictured),
} | {
    case: ("small", {"algorithm": objectives.CASES[case], "learner": SHORT_ROWS}, objectives.groups())
    for case in objectives.STEP_WIDE
}

LAYOUTS = [(2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 4, 1), (4, 4, 2), (4, 1, 4)]
"""(ranks, expert, context). With context 4 the models have fewer heads of keys and values than ranks."""
BOTH = (4, 2, 2)
"""The layout on which most scenarios are run."""
ROUNDED = {
    (2, 1, 1): [
        *("plain", "uneven shares", "tied, small microbatches", "few, deepseek_v3", "few, with a pass before"),
        *("no gradient", "five experts", "minibatches", "images", "images, one row", "images, lora"),
    ],
    (3, 1, 1): ["uneven shares", "few, with a pass before"],
    BOTH: [
        *("glm4_moe", "no shared prompts", "served teacher", "dense teacher", "lora", "rate by the sample share"),
        *objectives.STEP_WIDE,
    ],
}
"""Scenarios in float32, of each layout, of one step."""
EXACT = {
    "qwen3_moe": LAYOUTS,
    "deepseek_v3": [(2, 2, 1), (4, 2, 2), (4, 1, 4)],
    "few": [(2, 1, 2), (4, 1, 4)],
    "skewed": [(2, 2, 1), (4, 4, 2)],
    "gspo": [(2, 1, 2), (4, 4, 2)],
}
"""Layouts on which a scenario is run in float64, for two steps."""


def learner_of(name: str, folder: Path, rank: int, layout: tuple[int, int, int]) -> Learner:
    world, expert, context = layout
    model, sections, _ = SCENARIOS[name]
    ours = {"tokens_per_microbatch": 4096 // context} | sections.get("learner", {})
    ours |= {"parallel": {"expert": expert, "context": context}}
    algorithm = dict(sections.get("algorithm", {}))
    if "teacher" in algorithm:
        algorithm["teacher"] = str(folder / algorithm["teacher"])
    settings = config(folder / model, **sections | {"learner": ours, "algorithm": algorithm})
    return Learner(settings, rank=rank, world=world, device="cpu", images=Images.of(settings, folder))


def run_scenario(name: str, folder: Path, rank: int, layout: tuple[int, int, int], *, steps: int = 1) -> dict:
    """Report and weights of the first step, gradients of the first and last update, and scores of the end."""
    learner, groups = learner_of(name, folder, rank, layout), SCENARIOS[name][2]
    disturb(learner)
    updates = watch_updates(learner)
    if callable(groups):
        groups = groups(learner)
    report, sent = learner.step(groups, VERSION), weights(learner)
    for _ in range(steps - 1):
        learner.step(groups, VERSION)
    gradients = [updates[0].gradient, updates[-1].gradient]
    return {"report": asdict(report), "sent": sent, "gradients": gradients, "scores": learner.check.score()}


def on_a_rank(rank: int, world: int, folder: str) -> None:
    """All ranks take part in gathering, and report the same."""
    (layout,) = (layout for layout in ROUNDED if layout[0] == world)
    results = {}
    for name in ROUNDED[layout]:
        results[name] = run_scenario(name, Path(folder), rank, layout)
        reports = [{}] * world
        dist.all_gather_object(reports, results[name]["report"] | {"seconds": None})
        assert all(report == reports[0] for report in reports), name
    if world == 4:
        results["peaks"] = [peak_of_experts(Path(folder), rank, route) for route in ([0, 1], [0, 4])]
        check_publication_and_checkpoint(rank, Path(folder))
    if rank == 0:
        Path(folder, f"float32_{world}.pickle").write_bytes(pickle.dumps(results))


def peak_of_experts(folder: Path, rank: int, route: list[int]) -> int:
    """Bytes that a step of 300 tokens a rank holds beyond one of a few, with all of them on two experts."""
    learner = learner_of("qwen3_moe", folder, rank, (4, 4, 1))
    few, many = (
        routed(random_groups(4, 2, answer=(length, length), prompt=(4, 4), seed=1), route) for length in (2, 150)
    )
    learner.step(few, VERSION)
    least, most = (peak_bytes(learner, lambda groups=groups: learner.step(groups, VERSION)) for groups in (few, many))
    return most - least


def in_float64(rank: int, world: int, folder: str) -> None:
    """In a process in which float32 is float64, and in which transformers runs one expert after the other."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    ALL_EXPERTS_FUNCTIONS.register(
        "grouped_mm", lambda experts, *args: type(experts).forward.__wrapped__(experts, *args)
    )
    results = {}
    for name, layouts in EXACT.items():
        for layout in (layout for layout in [(1, 1, 1), *layouts] if layout[0] == world):
            found = run_scenario(name, Path(folder, "float64"), rank, layout, steps=2)
            gradients = [{n: x.numpy() for n, x in one.items()} for one in found["gradients"]]
            results[layout, name] = found | {"gradients": gradients, "sent": None}
    if rank == 0:
        Path(folder, f"float64_{world}.pickle").write_bytes(pickle.dumps(results))


def check_publication_and_checkpoint(rank: int, folder: Path) -> None:
    """Ranks write every byte of a publication once, from what they own; a checkpoint is read on other layouts."""
    learner = learner_of("deepseek_v3", folder, rank, BOTH)
    learner.step(GROUPS, VERSION)
    layout = Layout(learner.layout())
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    fill_parts(learner._published.parts(rank), layout, flat)
    total = flat.long()
    dist.all_reduce(total)
    whole = weights(learner)
    assert all(view.equal(whole[info.name]) for info, view in layout.views(total.to(torch.uint8)))
    learner.save(f"{folder}/checkpoint")
    learner.export(f"{folder}/export")
    learner.step(GROUPS, VERSION)
    later = weights(learner)
    if rank == 0:
        Path(folder, "saved.pickle").write_bytes(pickle.dumps((whole, later)))
    for other in [(4, 4, 1), (4, 1, 4)]:
        again = learner_of("deepseek_v3", folder, rank, other)
        again.load(f"{folder}/checkpoint")
        assert all(whole[name].equal(tensor) for name, tensor in weights(again).items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for name, make in MODELS.items():
        make(folder / name)
        _byte_tokenizer().save_pretrained(folder / name)  # a teacher must have that of its student
    for name in {SCENARIOS[case][0] for case in EXACT}:
        load(folder / name).double().save_pretrained(folder / "float64" / name)
    run_on_ranks(on_a_rank, str(folder), 2, 3, 4)
    run_on_ranks(in_float64, str(folder), 1, 2, 4)
    return folder


@pytest.fixture(scope="module")
def read(folder) -> Callable[[str], dict]:
    return cache(lambda name: pickle.loads((folder / f"{name}.pickle").read_bytes()))


@pytest.fixture(scope="module")
def by_one(folder) -> Callable[[str], dict]:
    return cache(lambda name: run_scenario(name, folder, 0, (1, 1, 1)))


def assert_same_reports(several: dict, one: dict) -> None:
    found, expected = (
        {k: v for k, v in each["report"].items() if isinstance(v, float | int)} for each in (several, one)
    )
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for what in ("diagnostics", "advantages"):
        assert several["report"][what] == pytest.approx(one["report"][what], rel=1e-4, abs=1e-5)
    assert several["scores"] == pytest.approx(one["scores"], abs=1e-4)


@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout, names in ROUNDED.items() for name in names], ids=str
)
def test_several_ranks_step_as_one(read, by_one, layout, name):
    if "lora" in name:
        pytest.importorskip("peft")
    several, one = read(f"float32_{layout[0]}")[name], by_one(name)
    assert_same_gradient(several["gradients"][0], one["gradients"][0], 3e-6)
    assert several["sent"].keys() == one["sent"].keys()
    for key, expected in one["sent"].items():  # AdamW makes steps of about lr of any gradient, be it rounding
        torch.testing.assert_close(several["sent"][key], expected, rtol=0, atol=0.1 * 1e-3, msg=key)
    assert_same_reports(several, one)


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, layouts in EXACT.items() for layout in layouts])
def test_every_layout_steps_as_one_rank_in_float64(read, name, layout):
    several, one = (read(f"float64_{each[0]}")[each, name] for each in (layout, (1, 1, 1)))
    for gradients in zip(several["gradients"], one["gradients"], strict=True):
        found, expected = ({n: torch.from_numpy(x) for n, x in each.items()} for each in gradients)
        assert all(gradient.dtype == torch.float64 for gradient in found.values())
        assert_same_gradient(found, expected, 1e-9)  # 3e-14 was seen
    assert_same_reports(several, one)


def test_a_rank_that_gets_all_tokens_holds_little_more_than_one_that_gets_half(read):
    """Their inputs and outputs are twice as many, and of what the experts compute no more is held."""
    one_rank, two_ranks = read("float32_4")["peaks"]
    assert one_rank < 1.15 * two_ranks


def test_a_checkpoint_of_four_ranks_goes_on_with_one_and_their_export_is_their_weights(folder, read):
    saved, later = read("saved")
    exported = load_file(folder / "export" / "model.safetensors")
    assert exported.keys() == saved.keys() and all(exported[name].equal(tensor) for name, tensor in saved.items())
    learner = learner_of("deepseek_v3", folder, 0, (1, 1, 1))
    learner.load(str(folder / "checkpoint"))
    assert learner.steps == 1 and all(saved[name].equal(tensor) for name, tensor in weights(learner).items())
    learner.step(GROUPS, VERSION)
    for name, tensor in weights(learner).items():
        torch.testing.assert_close(tensor, later[name], rtol=1e-5, atol=1e-4)
