"""The optimizer's moments are on the CPU between updates, and that changes no number."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from asyncgrpo.learner import optimizer as learner_optimizer
from asyncgrpo.learner.optimizer import OptimizerOffload
from tests.learner.helpers import VERSION, learner, random_groups, weights
from tests.models import make_tiny_qwen3

GROUPS, MORE = random_groups(3, 4), random_groups(3, 4, seed=1)
META = torch.device("meta")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), hidden=32)


def local_device(tensor: torch.Tensor) -> str:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).device.type


def test_a_sharded_tensor_that_is_moved_really_is_there(path):
    learner(path)  # makes the process group
    sharded = distribute_tensor(torch.arange(12.0).view(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    moved = learner_optimizer._moved(sharded, META)
    assert isinstance(moved, DTensor) and moved.to_local().is_meta and moved.device == META
    assert (moved.placements, moved.shape, moved.dtype) == (sharded.placements, sharded.shape, sharded.dtype)
    assert not sharded.to_local().is_meta and not moved.requires_grad
    back = learner_optimizer._moved(sharded, torch.device("cpu"))
    assert torch.equal(back.full_tensor(), sharded.full_tensor())


def moments_of_a_parameter_on(device: torch.device) -> tuple[torch.optim.AdamW, dict]:
    """An optimizer whose parameter is elsewhere, with moments on the CPU."""
    parameter = torch.nn.Parameter(torch.empty(3, device=device))
    optimizer = torch.optim.AdamW([parameter])
    state = {"step": torch.tensor(4.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    optimizer.state[parameter] = state
    return optimizer, state


def test_moments_are_at_hand_inside_the_block_and_away_after_it_even_if_it_fails(monkeypatch):
    """The meta device stands for a GPU; nothing can be copied out of it, so moments lose their values on the way."""
    monkeypatch.setattr(learner_optimizer, "_moved", lambda tensor, device: torch.empty_like(tensor, device=device))
    optimizer, state = moments_of_a_parameter_on(META)
    with pytest.raises(RuntimeError, match="inside"), OptimizerOffload(optimizer, is_on=True).at_hand():
        assert state["exp_avg"].is_meta and state["exp_avg_sq"].is_meta
        assert not state["step"].is_meta, "the counter is where the optimizer wants it"
        raise RuntimeError("inside")
    assert {name: value.device.type for name, value in state.items()} == dict.fromkeys(state, "cpu")


@pytest.mark.parametrize(("is_on", "device"), [(False, META), (True, torch.device("cpu"))])
def test_nothing_is_touched_where_it_is_off_or_has_nowhere_to_go(is_on, device):
    optimizer, state = moments_of_a_parameter_on(device)
    before = dict(state)
    with OptimizerOffload(optimizer, is_on=is_on).at_hand():
        assert all(state[name] is value for name, value in before.items())
    assert all(state[name] is value for name, value in before.items())


def test_steps_and_checkpoints_are_the_same_with_it(path, tmp_path):
    results = []
    for is_on in (False, True):
        options = {"learner": {"offload_optimizer": is_on, "lr": 1e-2}}
        ours = learner(path, **options)
        ours.step(GROUPS, VERSION)
        ours.save(str(tmp_path / f"{is_on}"))
        resumed = learner(path, **options)
        resumed.load(str(tmp_path / f"{is_on}"))
        for one in (ours, resumed):
            one.step(MORE, VERSION)
        assert {local_device(t) for s in ours.optimizer.state.values() for t in s.values()} == {"cpu"}
        results += [weights(ours), weights(resumed)]
    for other in results[1:]:
        assert all(results[0][name].equal(tensor) for name, tensor in other.items())
