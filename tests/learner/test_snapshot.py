"""Several ranks write each their rows into the arenas of their machine: the bytes that one rank would have gathered."""

import time
from collections.abc import Iterable
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
from asyncgrpo.learner.publishing import fill_arena
from asyncgrpo.learner.snapshot import wait_until
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.arena import ALIGNMENT, Arenas, IsWritten, Layout, SharedTensors, stride
from asyncgrpo.weights.digest import add_digests, digest
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
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
    rate = 1e-6 if case == "small steps" else 1e-2
    settings = config(f"{folder}/{model}", model=model_settings, learner={"lr": rate})
    return Learner(settings, rank=rank, world=world, device="cpu")


def snapshots_on_a_rank(rank: int, world: int, folder: str) -> None:
    gathered: list[str] = []
    gather = publishing.gather

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        gathered.extend(["a shard"] * isinstance(tensor, DTensor))
        return gather(tensor)

    publishing.gather = counted
    for case in (case for case in CASES if case != "small steps"):
        learner = learner_of(case, folder, rank, world)
        layout = Layout(learner.layout())
        arenas = Arenas(layout) if rank == 0 else None
        file = [arenas.file if arenas else ""]
        dist.broadcast_object_list(file)
        for number in range(2):
            learner.step(GROUPS, PolicyVersion(1, number))
            gathered.clear()
            expected = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            if arenas is None:
                learner.snapshot.join(file[0], number % 2 * stride(layout))
            else:
                flat = arenas.slots[number % 2]
                assert flat.storage_offset() == number % 2 * stride(layout)
                wait_until(learner.snapshot.write(flat, file[0]))
            assert len(gathered) == (14 if case == "adapters" else 0), (
                "of each adapter the small matrix alone is gathered"
            )
            fill_arena(learner.weights(), layout, expected)
            if arenas is not None:
                assert torch.equal(arenas.slots[number % 2], expected), f"{case}, {number}"
        learner.snapshot.close()
        if arenas is not None:
            arenas.close()
    publishing.gather = gather
    if rank == 0:
        Path(folder, f"done-{world}").touch()


def test_ranks_write_what_one_would_have_gathered(tmp_path):
    for name, make in MAKE.items():
        make(tmp_path / name)
    run_on_ranks(snapshots_on_a_rank, str(tmp_path), 1, 3)
    assert all((tmp_path / f"done-{world}").exists() for world in (1, 3))


def test_a_rank_that_does_not_write_is_not_waited_for_forever(tmp_path, monkeypatch):
    learner = learner_of("qwen3", str(make_tiny_qwen3(tmp_path / "qwen3").parent), 0, 1)
    arenas = Arenas(Layout(learner.layout()))
    monkeypatch.setattr(learner.snapshot, "_mates", [1])
    monkeypatch.setattr(learner.snapshot, "_timeout_s", 0.1)
    is_written = learner.snapshot.write(arenas.slots[0], arenas.file)
    assert is_written is not None and not is_written()
    time.sleep(0.1)
    with pytest.raises(WeightsError, match="not every rank has written its weights within 0 s"):
        is_written()
    snapshot.MappedArenas(arenas.file).flags[1] = 1
    assert is_written()
    arenas.close()


# -- several machines --------------------------------------------------------------------------------------------------


def machines_publish(rank: int, world: int, folder: str) -> None:
    """Ranks 1 and 2 share a machine. Two generators receive from both machines what one rank would have gathered."""
    snapshot.same_machine = lambda: f"machine {min(rank, 1)}"
    for case in (case for case in CASES if case != "bfloat16"):
        publish(learner_of(case, folder, rank, world), case)
    if rank == 0:
        Path(folder, "done").touch()


def publish(learner: Learner, case: str) -> None:
    layout, is_first = Layout(learner.layout()), learner.rank == 0
    about, held, receivers = ["", ""], list[dict[PolicyVersion, Tensor]](), list[Receiver]()
    if is_first:
        config = WeightsConfig(bucket_mb=1)
        publisher = Publisher(config, maps=True, backend="gloo", bind="127.0.0.1", host="127.0.0.1", keys=None)
        publisher.start(learner.layout(), others=learner.snapshot.streams)
        about = [publisher.endpoint, publisher.file]
    dist.broadcast_object_list(about)
    endpoint, file = about
    learner.snapshot.connect(endpoint, "127.0.0.1", None)
    if is_first:
        held = [{}, {}]
        receivers = [receive_into(engine, endpoint, number) for number, engine in enumerate(held)]
        for receiver in receivers:
            receiver.start()
        publisher.wait_for(2, 30.0, lambda what, seconds: None)

    def fill(layout: Layout, flat: Tensor) -> IsWritten | None:
        dist.broadcast_object_list([int(flat.storage_offset())])
        return learner.snapshot.write(flat, file)

    for number in range(3):
        version = PolicyVersion(1, number)
        learner.step(GROUPS, version)
        if is_first:
            while not publisher.offer(version, fill):
                time.sleep(0.01)
        else:
            start = [0]
            dist.broadcast_object_list(start)
            learner.snapshot.join(file, start[0])
        expected = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        fill_arena(learner.weights(), layout, expected)
        for engine in held:
            deadline = time.monotonic() + 30.0
            while version not in engine:
                assert time.monotonic() < deadline, f"{case}: {version} did not arrive"
                time.sleep(0.01)
            assert torch.equal(engine[version], expected), f"{case}, {number}"
    if is_first:
        report, *_ = publisher.reports()
        assert report.attempts == 1 and report.sent_bytes == 2 * layout.num_bytes
    dist.barrier()
    for receiver in receivers:
        receiver.stop()
    learner.snapshot.close()
    if is_first:
        publisher.close()


def receive_into(held: dict[PolicyVersion, Tensor], endpoint: str, number: int) -> Receiver:
    def apply(tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> str:
        assert isinstance(tensors, SharedTensors)
        held[version] = tensors.memory[
            : sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for _, tensor in tensors)
        ].clone()
        return add_digests([digest(held[version])])

    name = f"generator-{number}"
    return Receiver(endpoint, generator_id=name, incarnation="0", host="127.0.0.1", apply=apply, keys=None)


def test_each_machine_sends_its_own_rows(tmp_path):
    for name, make in MAKE.items():
        make(tmp_path / name)
    run_on_ranks(machines_publish, str(tmp_path), 3)
    assert (tmp_path / "done").exists()
