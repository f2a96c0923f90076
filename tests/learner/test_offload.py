"""The optimizer's moments are on the CPU between updates, and that changes no number."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from asyncgrpo.learner import optimizer as learner_optimizer
from asyncgrpo.learner.optimizer import OptimizerOffload
from tests.learner.helpers import VERSION, learner, random_groups

GROUPS, MORE = random_groups(3, 4), random_groups(3, 4, seed=1)
META = torch.device("meta")


def parameters_on(device: torch.device, *sizes: int) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def moments(optimizer: torch.optim.AdamW) -> list[torch.Tensor]:
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def test_one_chunk_of_moments_is_at_hand_at_a_time(monkeypatch):
    """The meta device stands for a GPU; nothing can be copied out of it, so moments lose their values on the way."""
    monkeypatch.setattr(learner_optimizer, "CHUNK_BYTES", 2 * 4 * 100)
    monkeypatch.setattr(learner_optimizer, "_bring_back", lambda here, waiting: None)
    parameters = parameters_on(META, 60, 40, 96, 300, 4)
    optimizer = torch.optim.AdamW(parameters)
    offload = OptimizerOffload(optimizer)
    at_hand, stepped = [], []

    def look():
        at_hand.append(sum(tensor.nbytes for tensor in moments(optimizer) if tensor.is_meta))
        stepped.extend(p for group in optimizer.param_groups for p in group["params"])

    optimizer.step = look  # AdamW itself cannot count its steps on meta
    assert not any(tensor.is_meta for tensor in moments(optimizer))
    for _ in range(2):
        offload.step()
        assert not any(tensor.is_meta for tensor in moments(optimizer))
    assert at_hand == 2 * [2 * 4 * size for size in (60 + 40, 96, 300, 4)], "one that is larger comes alone"
    assert len(stepped) == 10 and all(a is b for a, b in zip(stepped, 2 * parameters, strict=True))
    groups, optimizer.step = optimizer.param_groups, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        offload.step()
    assert not any(tensor.is_meta for tensor in moments(optimizer)) and optimizer.param_groups is groups


def test_a_sharded_parameter_has_sharded_moments_where_they_wait(path):
    learner(path)  # makes the process group
    sharded = torch.nn.Parameter(
        distribute_tensor(torch.arange(12.0).view(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    )
    found = learner_optimizer.sharded_like(sharded, torch.empty(4, 3, device=META))
    assert isinstance(found, DTensor) and found.to_local().is_meta and not found.requires_grad
    assert (found.placements, found.shape, found.dtype) == (sharded.placements, sharded.shape, sharded.dtype)


@pytest.mark.parametrize("chunk_bytes", [1, 50_000, 2**30])
def test_steps_are_the_same_with_it(path, monkeypatch, chunk_bytes):
    """With groups that differ in their learning rate: a critic's value head has its own."""
    monkeypatch.setattr(learner_optimizer, "CHUNK_BYTES", chunk_bytes)
    results = []
    for is_on in (False, True):
        ours = learner(path, learner={"offload_optimizer": is_on, "lr": 1e-2}, algorithm={"advantage": "gae"})
        assert bool(ours.optimizer.state) == is_on
        assert (len(ours.optimizer.param_groups) > 3) == (is_on and chunk_bytes < 2**30)
        for groups in (GROUPS, MORE):
            ours.step(groups, VERSION)
        held = [x.full_tensor() for x in moments(ours.optimizer)]
        results.append([*(p.to_local() for p in ours.parameters), *held])
    assert all(one.equal(other) for one, other in zip(*results, strict=True))
