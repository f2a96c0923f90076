"""Several ranks write each their rows into one arena: the same bytes as one rank that gathers, and nothing is gathered.

The last rank is on the same machine as the others, or, as far as it knows, on another one.
"""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from asyncgrpo.errors import WeightsError
from asyncgrpo.learner import publishing, snapshot
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.publishing import fill_arena
from asyncgrpo.learner.snapshot import wait_until
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.arena import Arenas, Layout
from tests.learner.helpers import config, random_groups
from tests.learner.ranks import run_on_ranks
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe

GROUPS = random_groups(4, 4)
LORA = {"lora": {"rank": 4}}
CASES = {
    "qwen3": ("qwen3", {}),
    "tied": ("tied", {}),
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}),
    "small steps": ("qwen3", {"dtype": "bfloat16"}),
    "experts": ("moe", {}),
    "latent attention, and buffers": ("deepseek", {"dtype": "bfloat16"}),
    "adapters": ("qwen3", LORA),
}
MAKE = {
    "qwen3": make_tiny_qwen3,
    "tied": lambda path: make_tiny_qwen3(path, tie=True),
    "moe": make_tiny_qwen3_moe,
    "deepseek": make_tiny_deepseek_v3,
}


def learner_of(case: str, folder: str, rank: int, world: int) -> Learner:
    model, model_settings = CASES[case]
    path = f"{folder}/{model}"
    settings = config(
        path,
        model={"path": path, "dtype": "float32"} | model_settings,
        learner={"device": "cpu", "lr": 1e-6 if case == "small steps" else 1e-2},
    )
    return Learner(settings, rank=rank, world=world, device="cpu")


def snapshots_on_a_rank(rank: int, world: int, argument: str) -> None:
    folder, where = argument.split()
    is_away = where == "apart" and rank == world - 1
    gathered: list[str] = []
    gather = publishing.gather

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        gathered.extend(["a shard"] * isinstance(tensor, DTensor))
        return gather(tensor)

    publishing.gather = counted
    snapshot.same_machine = lambda: f"machine {is_away:d}"
    for case in CASES:
        learner = learner_of(case, folder, rank, world)
        layout = Layout(learner.layout())
        arenas = Arenas(layout) if rank == 0 else None
        file = [arenas.file if arenas else ""]
        dist.broadcast_object_list(file)
        came: list[int] = []
        for number in range(3):
            learner.step(GROUPS, PolicyVersion(1, number))
            gathered.clear()
            expected = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            if arenas is None:
                learner.snapshot.join(file[0], number % 2 * arenas_stride(layout))
            else:
                flat = arenas.slots[number % 2]
                assert flat.storage_offset() == number % 2 * arenas_stride(layout)
                wait_until(learner.snapshot.write(flat, file[0]))
                came += [receiver.came_bytes for receiver in learner.snapshot._receivers]
            assert len(gathered) == (14 if case == "adapters" else 0), (
                "of each adapter the small matrix alone is gathered"
            )
            fill_arena(learner.weights(), layout, expected)
            if arenas is not None:
                assert torch.equal(arenas.slots[number % 2], expected), f"{case}, {number}"
        if came:
            assert (came[-1] < came[0] / 4) == (case == "small steps"), f"{case}: {came}"
        assert not (is_away and learner.snapshot._arenas), "an arena was mapped that is on another machine"
        learner.snapshot.close()
        if arenas is not None:
            arenas.close()
    publishing.gather = gather
    if rank == 0:
        Path(folder, f"done-{world}-{where}.json").write_text(json.dumps(list(CASES)))


def arenas_stride(layout: Layout) -> int:
    return -(-layout.num_bytes // 4096) * 4096


@pytest.mark.parametrize(("where", "worlds"), [("together", (1, 2, 3)), ("apart", (3,))])
def test_ranks_write_what_one_would_have_gathered(tmp_path, where: str, worlds: tuple[int, ...]):
    for name, make in MAKE.items():
        make(tmp_path / name)
    run_on_ranks(snapshots_on_a_rank, f"{tmp_path} {where}", *worlds)
    assert all((tmp_path / f"done-{world}-{where}.json").exists() for world in worlds)


def snapshots_in_a_row(rank: int, world: int, folder: str) -> None:
    """Rank 1, elsewhere, makes three snapshots and does not send: nobody waits for it until it does."""
    snapshot.same_machine = lambda: f"machine {rank}"
    learner = learner_of("qwen3", folder, rank, world)
    layout = Layout(learner.layout())
    stride, may_send = arenas_stride(layout), threading.Event()
    if rank == 1:
        assert learner.snapshot._sender is not None
        learner.snapshot._sender._thread.submit(may_send.wait)
    arenas, wanted = Arenas(layout), []
    for number in range(2):
        learner.step(GROUPS, PolicyVersion(1, number))
        wanted.append(torch.zeros(layout.num_bytes, dtype=torch.uint8))
        fill_arena(learner.weights(), layout, wanted[-1])
        assert not learner.snapshot.is_behind
        if rank == 1:
            learner.snapshot.join("there", number * stride)
        else:
            is_written = learner.snapshot.write(arenas.slots[number], arenas.file)
            assert is_written is not None and not is_written()
    dist.barrier()
    if rank == 0:
        assert learner.snapshot.is_behind
    dist.barrier()
    may_send.set()
    learner.snapshot.close()
    if rank == 0:
        assert is_written() and not learner.snapshot.is_behind
        assert all(torch.equal(slot, expected) for slot, expected in zip(arenas.slots, wanted, strict=True))
    arenas.close()


def test_what_comes_from_another_machine_holds_up_no_rank(tmp_path):
    make_tiny_qwen3(tmp_path / "qwen3")
    run_on_ranks(snapshots_in_a_row, str(tmp_path), 2)


def test_a_rank_that_does_not_write_is_not_waited_for_forever(tmp_path, monkeypatch):
    learner = learner_of("qwen3", str(make_tiny_qwen3(tmp_path / "qwen3").parent), 0, 1)
    arenas = Arenas(Layout(learner.layout()))
    monkeypatch.setattr(learner.snapshot, "_near", [1])
    monkeypatch.setattr(learner.snapshot, "_timeout_s", 0.1)
    is_written = learner.snapshot.write(arenas.slots[0], arenas.file)
    assert is_written is not None and not is_written()
    time.sleep(0.1)
    with pytest.raises(WeightsError, match="not every rank has written its weights within 0 s"):
        is_written()
    snapshot.MappedArenas(arenas.file).flags[1] = 1
    assert is_written()
    arenas.close()
