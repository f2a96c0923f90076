"""Several ranks write each their rows into one arena: the same bytes as one rank that gathers, and nothing is gathered.

The last rank is on the same machine as the others, or, as far as it knows, on another one.
"""

import random
import threading
import time
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncgrpo.errors import WeightsError
from asyncgrpo.learner import publishing, snapshot
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.publishing import fill_arena
from asyncgrpo.learner.snapshot import RowReceiver, RowSender, wait_until
from asyncgrpo.types import PolicyVersion, TensorInfo
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


def arenas_stride(layout: Layout) -> int:
    return -(-layout.num_bytes // 4096) * 4096


@pytest.mark.parametrize(("where", "worlds"), [("together", (1, 2, 3)), ("apart", (3,))])
def test_ranks_write_what_one_would_have_gathered(tmp_path, where: str, worlds: tuple[int, ...]):
    for name, make in MAKE.items():
        make(tmp_path / name)
    run_on_ranks(snapshots_on_a_rank, f"{tmp_path} {where}", *worlds)


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


# -- ranks on other machines -------------------------------------------------------------------------------------------

LAYOUT = Layout(
    [
        TensorInfo("odd", (7, 3), "bfloat16"),
        TensorInfo("large", (400, 300), "bfloat16"),
        TensorInfo("none of it", (5, 5), "float32"),
        TensorInfo("float", (301,), "float32"),
        TensorInfo("bytes", (1001,), "uint8"),
    ]
)
FIRST = {"odd": 3, "large": 60_000, "float": 7, "bytes": 500}
"""The first element of each tensor that is sent; all from there to its end are."""
SPECIAL = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(0, 256, (LAYOUT.num_bytes,), dtype=torch.uint8, generator=generator)
    return {info.name: view.flatten() for info, view in LAYOUT.views(flat)}


def change(values: dict[str, Tensor], share: float, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for tensor in values.values():
        where = torch.rand(len(tensor), generator=generator) < share
        new = torch.randint(0, 256, (int(where.sum()) * tensor.itemsize,), dtype=torch.uint8, generator=generator)
        tensor[where] = new.view(tensor.dtype)
        if tensor.is_floating_point():
            tensor[rng.randrange(len(tensor))] = SPECIAL[rng.randrange(4)].to(tensor.dtype)


def parts(values: dict[str, Tensor]) -> list[tuple[str, int, Tensor]]:
    return [(name, first, values[name][first:]) for name, first in FIRST.items()]


def expected(values: dict[str, Tensor]) -> Tensor:
    flat = torch.full((LAYOUT.num_bytes,), 77, dtype=torch.uint8)
    for info, view in LAYOUT.views(flat):
        if info.name in FIRST:
            view.flatten()[FIRST[info.name] :] = values[info.name][FIRST[info.name] :]
    return flat


Ends = tuple[RowSender | None, RowReceiver, list[Tensor]]


def ends(rank: int, deltas: bool = True) -> Ends:
    """A sender on rank 1, a receiver from it, and two arenas."""
    pair = dist.new_group([0, 1], backend="gloo")
    sender = RowSender(LAYOUT, pair, pins=False, deltas=deltas) if rank else None
    return sender, RowReceiver(1, pair), [torch.full((LAYOUT.num_bytes,), 77, dtype=torch.uint8) for _ in range(2)]


def sequences(rank: int, world: int, folder: str) -> None:
    """Rank 1 sends what both draw alike; rank 0 compares every byte of its arena."""
    for seed in range(12):
        rng, values = random.Random(seed), tensors(seed)
        sender, receiver, arenas = ends(rank, deltas=seed % 4 != 3)
        came = []
        for number in range(12):
            change(values, rng.choice([0.0, 1e-4, 0.01, 0.01, 1.0 if seed % 2 else 0.01]), rng)
            arena = rng.randrange(2) if seed % 3 else number % 2
            if sender is not None:
                sender.send(iter(parts(values)), arena)
            else:
                receiver.receive(arenas[arena]).result()
                came.append(receiver.came_bytes)
                assert torch.equal(arenas[arena], expected(values)), (seed, number)
            dist.barrier()
        whole = sum(tensor.nbytes for _, _, tensor in parts(values))
        if rank == 0:
            assert came[0] == whole
            if seed % 4 == 3:
                assert set(came) == {whole}
            elif seed % 2 == 0:
                assert max(came[1:]) < whole / 4
        (receiver if sender is None else sender).close()


def written_over(rank: int, world: int, folder: str) -> None:
    """Rows are written over while they wait to be sent: what counts is what came last, and nothing is out of step."""
    values, rng = tensors(0), random.Random(0)
    sender, receiver, arenas = ends(rank)
    for _ in range(5):
        may_send, jobs = threading.Event(), list[Future[None]]()
        if sender is not None:
            sender._thread.submit(may_send.wait)
        for arena in (0, 1, 1):  # the second has not been sent when the third comes
            change(values, 0.01, rng)
            if sender is not None:
                sender.send(iter(parts(values)), arena)
            else:
                jobs.append(receiver.receive(arenas[arena]))
        may_send.set()
        if sender is None:
            assert [job.result() for job in jobs] == 3 * [None] and receiver.came_bytes
            assert torch.equal(arenas[1], expected(values))
        dist.barrier()
    change(values, 1.0, rng)
    if sender is None:
        receiver.receive(arenas[0]).result()
        assert receiver.came_bytes and torch.equal(arenas[0], expected(values))
    else:
        send = sender._send

        def late(tensor: Tensor) -> None:
            sender._memory[0].zero_()  # as the next step would
            send(tensor)

        sender._send = late  # type: ignore[method-assign]
        sender.send(iter(parts(values)), 0)
    (receiver if sender is None else sender).close()


def altered(rank: int, world: int, folder: str) -> None:
    """A byte changes on the way, of all rows and of a delta."""
    for at in (0, 2):
        values, rng = tensors(0), random.Random(0)
        sender, receiver, arenas = ends(rank)
        for number in range(at + 1):
            change(values, 0.01, rng)
            if sender is not None:
                send = sender._send

                def wrong(tensor: Tensor, send=send) -> None:
                    if tensor.dtype == torch.uint8:
                        tensor = tensor.clone()
                        tensor[-8] ^= 1  # of a value: behind a delta are up to seven zeros
                    send(tensor)

                sender._send = wrong if number == at else send  # type: ignore[method-assign]
                sender.send(iter(parts(values)), number % 2)
            else:
                job = receiver.receive(arenas[number % 2])
                if number == at:
                    with pytest.raises(WeightsError, match="digest mismatch: rank 1 sent "):
                        job.result()
                else:
                    assert job.result() is None and receiver.came_bytes
            dist.barrier()
        (receiver if sender is None else sender).close()


def sends_nothing(rank: int, world: int, folder: str) -> None:
    """As where a model has fewer rows than there are ranks."""
    pair = dist.new_group([0, 1], backend="gloo")
    flat = torch.ones(64, dtype=torch.uint8)
    for _ in range(2):
        if rank == 1:
            sender = RowSender(Layout([]), pair, pins=False, deltas=True)
            sender.send(iter([("none", 0, torch.empty(0))]), 0)
            sender.send(iter([]), 64)
            sender.close()
        else:
            receiver = RowReceiver(1, pair)
            assert [receiver.receive(flat).result() for _ in range(2)] == [None, None] and flat.sum() == 64
            assert receiver.came_bytes == 0


@pytest.mark.parametrize("story", [sequences, written_over, altered, sends_nothing], ids=lambda story: story.__name__)
def test_rows_of_a_rank_on_another_machine(tmp_path, story):
    run_on_ranks(story, str(tmp_path), 2)
