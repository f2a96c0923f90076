"""The rows of a rank on another machine: whatever changes, and whenever it is written over, they come as they were sent."""

import random
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from asyncgrpo.errors import WeightsError
from asyncgrpo.learner.rows import RowReceiver, RowSender
from asyncgrpo.types import TensorInfo
from asyncgrpo.weights.arena import Layout
from tests.learner.ranks import run_on_ranks

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


def sequences(rank: int, world: int, folder: str) -> None:
    """Rank 1 sends what both draw alike; rank 0 compares every byte of its arena."""
    for seed in range(12):
        rng, values = random.Random(seed), tensors(seed)
        pair = dist.new_group([0, 1], backend="gloo")
        sender = RowSender(LAYOUT, pair, pins=False, deltas=seed % 4 != 3) if rank else None
        receiver = RowReceiver(1, pair)
        arenas = [torch.full((LAYOUT.num_bytes,), 77, dtype=torch.uint8) for _ in range(2)]
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
    if rank == 0:
        Path(folder, "done").touch()


def test_rows_come_bit_by_bit_whatever_changes(tmp_path):
    run_on_ranks(sequences, str(tmp_path), 2)
    assert (tmp_path / "done").exists()


def written_over(rank: int, world: int, folder: str) -> None:
    """Rows are written over while they wait to be sent: what counts is what came last, and nothing is out of step."""
    pair = dist.new_group([0, 1], backend="gloo")
    values, rng = tensors(0), random.Random(0)
    arenas = [torch.full((LAYOUT.num_bytes,), 77, dtype=torch.uint8) for _ in range(2)]
    sender = RowSender(LAYOUT, pair, pins=False, deltas=True) if rank else None
    receiver = RowReceiver(1, pair)
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


def test_rows_that_are_written_over_do_no_harm(tmp_path):
    run_on_ranks(written_over, str(tmp_path), 2)


def altered(rank: int, world: int, folder: str) -> None:
    """A byte changes on the way, of all rows and of a delta."""
    for at in (0, 2):
        pair = dist.new_group([0, 1], backend="gloo")
        values, rng = tensors(0), random.Random(0)
        arenas = [torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8) for _ in range(2)]
        sender = RowSender(LAYOUT, pair, pins=False, deltas=True) if rank else None
        receiver = RowReceiver(1, pair)
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


def test_rows_that_are_altered_on_the_way_are_refused(tmp_path):
    run_on_ranks(altered, str(tmp_path), 2)


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


def test_a_rank_without_rows_sends_none(tmp_path):
    run_on_ranks(sends_nothing, str(tmp_path), 2)
