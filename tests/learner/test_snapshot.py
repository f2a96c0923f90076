"""Several ranks write each their rows into the arenas of their machine: the bytes that one rank would have gathered."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.errors import WeightsError
from asyncgrpo.learner import publishing, snapshot
from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights import arena
from asyncgrpo.weights.arena import Arenas, IsWritten, Layout, Stream
from tests.learner.helpers import FAMILIES, config, learner, random_groups, weights
from tests.learner.ranks import run_on_ranks
from tests.models import make_tiny_qwen3, make_tiny_qwen3_moe
from tests.weights.changing import Fleet
from tests.weights.publishing import HOST, fill_arena, wait_until

GROUPS = random_groups(4, 4)
LORA = {"lora": {"rank": 4}}
CASES = {
    "qwen3": ("qwen3", {}),
    "tied": ("tied", {}),
    "small steps": ("qwen3", {"dtype": "bfloat16"}),
    "experts": ("qwen3_moe", {}),
    "latent attention, and buffers": ("deepseek_v3", {"dtype": "bfloat16"}),
    "adapters": ("qwen3", LORA),
}


def learner_of(case: str, folder: str, rank: int, world: int) -> Learner:
    model, model_settings = CASES[case]
    rate = 1e-6 if case == "small steps" else 1e-2
    settings = config(f"{folder}/{model}", model=model_settings, learner={"lr": rate})
    return Learner(settings, rank=rank, world=world, device="cpu")


def test_a_rank_that_does_not_write_is_not_waited_for_forever(tmp_path, monkeypatch):
    learner = learner_of("qwen3", str(make_tiny_qwen3(tmp_path / "qwen3").parent), 0, 1)
    layout = Layout(learner.layout())
    arenas = Arenas.create(layout)
    monkeypatch.setattr(learner.snapshot, "_world", 2)
    monkeypatch.setattr(learner.snapshot, "_mates", [0, 1])
    monkeypatch.setattr(learner.snapshot, "_timeout_s", 0.1)
    is_written = learner.snapshot.write(arenas, 0)
    assert is_written is not None and not is_written()
    time.sleep(0.1)
    with pytest.raises(WeightsError, match="not every rank has written its weights within 0 s"):
        is_written()
    Arenas(arenas.file).flags[1] = 1
    assert is_written()
    arenas.close()


@pytest.mark.parametrize(("alignment", "copies"), [(64, 2 * 2), (8192, 2 * 3 * 5)])
def test_the_experts_of_a_layer_are_one_copy_if_no_gaps_are_between_them(tmp_path, monkeypatch, alignment, copies):
    """One by one, 18,867 tensors took 20 times as long as their bytes."""
    monkeypatch.setattr("asyncgrpo.weights.arena.ALIGNMENT", alignment)
    mixture = learner(make_tiny_qwen3_moe(tmp_path), model={"dtype": "bfloat16"})
    parts, layout = list(mixture._published.parts(0)), Layout(mixture.layout())
    assert len([name for name, _, _ in parts if "experts" in name]) == copies
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    publishing.fill_parts(parts, layout, flat)
    assert {info.name: view.tolist() for info, view in layout.views(flat)} == {
        name: tensor.tolist() for name, tensor in weights(mixture).items()
    }


def machines_publish(rank: int, world: int, folder: str) -> None:
    """Of three ranks, 1 and 2 share a machine. Two generators receive what one rank would have gathered."""
    gathered: list[str] = []
    gather = publishing.gather

    def counted(tensor: Tensor) -> Tensor:
        gathered.extend(["a shard"] * isinstance(tensor, DTensor))
        return gather(tensor)

    publishing.gather = counted
    if world > 1:
        parts_of_one_machine(folder, rank, world)
    snapshot.same_machine = lambda: f"machine {min(rank, 1)}"
    for case in CASES if world > 1 else ("tied", "adapters"):
        publish(learner_of(case, folder, rank, world), case, gathered)
    if rank == 0:
        Path(folder, f"done-{world}").touch()


def parts_of_one_machine(folder: str, rank: int, world: int) -> None:
    """Each byte is sent by one rank, and each rank sends about as many."""
    block, arena.BLOCK = arena.BLOCK, 256
    sent = learner_of("qwen3", folder, rank, world).snapshot
    arena.BLOCK = block
    sizes = [sum(end - start for start, end in part.runs) for part in sent._parts_sent.values()]
    assert len(sizes) == world and sum(sizes) == sent._layout.num_bytes and max(sizes) - min(sizes) <= 256 * world
    assert not Stream(run for part in sent._parts_sent.values() for run in part.runs).rest(sum(sizes)).runs


def publish(learner: Learner, case: str, gathered: list[str]) -> None:
    layout, engines, about = Layout(learner.layout()), [], ["", ""]
    if learner.rank == 0:
        plane = Fleet(
            WeightsConfig(bucket_mb=1),
            maps=True,
            layout=layout,
            others=learner.snapshot.streams,
            is_whole=False,
        )
        about = [plane.publisher.endpoint, plane.publisher._arenas.file]
    dist.broadcast_object_list(about)
    endpoint, file = about
    learner.snapshot.connect(endpoint, HOST, None)
    if learner.rank == 0:
        engines = [plane.add(f"generator-{number}") for number in range(2)]

    def fill(arenas: Arenas, slot: int) -> IsWritten | None:
        dist.broadcast_object_list([slot])
        return learner.snapshot.write(arenas, slot)

    for number in range(3):
        version = PolicyVersion(1, number)
        learner.step(GROUPS, version)
        gathered.clear()
        if learner.rank == 0:
            wait_until(lambda version=version: plane.publisher.offer(version, fill), "an arena")
        else:
            slot = [0]
            dist.broadcast_object_list(slot)
            learner.snapshot.join(file, slot[0])
        assert len(gathered) == (14 if case == "adapters" else 0), "of each adapter the small matrix alone is gathered"
        expected = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        fill_arena(learner.weights(), layout, expected)
        for engine in engines:
            wait_until(lambda held=engine.held, version=version: version in held, f"{version} of {case}")
            assert torch.equal(engine.held[version], expected), f"{case}, {number}"
    if learner.rank == 0:
        report, *_ = plane.publisher.reports()
        assert not report.gaps, "each engine holds the tensors that were sent"
        # A learner of one machine may send deltas.
        assert dist.get_world_size() == 1 or (report.attempts == 1 and report.sent_bytes == layout.num_bytes)
    dist.barrier()
    learner.snapshot.close()
    if learner.rank == 0:
        plane.close()


def test_each_rank_writes_and_each_machine_sends_its_own_rows(tmp_path):
    for name in {model for model, _ in CASES.values()}:
        FAMILIES[name](tmp_path / name)
    run_on_ranks(machines_publish, str(tmp_path), 1, 3)
    assert all((tmp_path / f"done-{world}").exists() for world in (1, 3))
