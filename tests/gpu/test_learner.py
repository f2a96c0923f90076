"""A learner's step on the card is the step on the CPU but for bfloat16, and what saves memory changes no number."""

from collections.abc import Iterator

import pytest
import torch

from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.arena import Arenas, Layout
from tests.learner.helpers import VERSION, config, random_groups, step_and_gradient, weights, with_true_logprobs
from tests.weights.publishing import digest_of

COSINE = 0.99
"""Between the gradients of bfloat16 and float32. A tiny model drawn wide is as hard a case as there is."""
GAP = 0.15
"""Nats between log-probs of bfloat16 and float32, mean."""
STEPS = 3

pytestmark = pytest.mark.usefixtures("ranks")


def learner_on(device, path, **sections) -> Learner:
    """A learner in the dtype that the sections say, else bfloat16."""
    where = {"model": {"dtype": "bfloat16"}, "learner": {"device": device.type}}
    merged = {name: where.get(name, {}) | sections.get(name, {}) for name in where | sections}
    return Learner(config(path, **merged), rank=0, world=1, device=device)


def whole(gradient: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.double().flatten().cpu() for part in gradient.values()])


def test_a_step_in_bfloat16_is_that_of_the_cpu_in_float32(device, model):
    groups = with_true_logprobs(model, random_groups(4, 4, seed=1, prompt=(20, 60), answer=(5, 60)))
    exact = learner_on(torch.device("cpu"), model, model={"dtype": "float32"})
    expected_report, expected = step_and_gradient(exact, groups)
    report, found = step_and_gradient(learner_on(device, model), groups)
    assert found.keys() == expected.keys()
    assert {tensor.device.type for tensor in found.values()} == {device.type}
    cosine = torch.nn.functional.cosine_similarity(whole(found), whole(expected), dim=0).item()
    assert cosine > COSINE
    assert whole(found).norm() == pytest.approx(whole(expected).norm().item(), rel=0.05)
    assert expected_report.logprob_gap_mean < 1e-4, "the CPU in float32 is what the log-probs were made with"
    assert 0 < report.logprob_gap_mean < GAP
    assert report.tokens_trained == expected_report.tokens_trained and report.skipped is None
    print(f"cosine {cosine:.5f}, log-prob gap {report.logprob_gap_mean:.4f} nats, at most {report.logprob_gap_max:.3f}")


def test_a_step_in_float32_is_that_of_the_cpu(device, model):
    groups = with_true_logprobs(model, random_groups(4, 4, seed=1, prompt=(20, 60), answer=(5, 60)))
    exact, ours = (learner_on(where, model, model={"dtype": "float32"}) for where in (torch.device("cpu"), device))
    expected_report, expected = step_and_gradient(exact, groups)
    report, found = step_and_gradient(ours, groups)
    assert (whole(found) - whole(expected)).norm() <= 1e-4 * whole(expected).norm()
    assert report.loss == pytest.approx(expected_report.loss, rel=1e-4, abs=1e-6)
    assert report.logprob_gap_mean < 1e-4


def after_steps(device, path, **sections) -> dict[str, torch.Tensor]:
    """The weights after some steps."""
    learner = learner_on(device, path, **sections)
    for number in range(STEPS):
        version = PolicyVersion(VERSION.lineage, VERSION.number + number)
        learner.step(random_groups(3, 4, seed=number), version)
    return weights(learner)


def test_a_checkpoint_of_the_card_is_of_the_step_at_which_it_was_begun(device, model, tmp_path):
    """Twice: the second copy is made into the pinned memory of the first."""
    first = learner_on(device, model)
    for number in range(2):
        first.step(random_groups(3, 4, seed=number), VERSION)
        expected = weights(first)
        wait = first.begin_save(str(tmp_path / str(number)))
        first.step(random_groups(3, 4, seed=9), VERSION)
        wait()
        resumed = learner_on(device, model)
        resumed.load(str(tmp_path / str(number)))
        assert [name for name, tensor in weights(resumed).items() if not torch.equal(tensor, expected[name])] == []


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that sum in another order at each call are not used; what has no other way warns."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


SAVING = {
    "optimizer on the host": {"learner": {"offload_optimizer": True}},
    "reference on the host": {"learner": {"offload_reference": True}, "algorithm": {"kl_coef": 0.1}},
}


@pytest.mark.parametrize("way", SAVING)
def test_what_waits_on_the_host_changes_no_number(device, model, way, deterministic):
    saving = SAVING[way]
    plain = {name: section for name, section in saving.items() if name != "learner"}
    expected, found = after_steps(device, model, **plain), after_steps(device, model, **saving)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_recomputed_activations_change_next_to_nothing(device, model):
    expected = after_steps(device, model, learner={"activation_checkpointing": False})
    found = after_steps(device, model, learner={"activation_checkpointing": True})
    for name, tensor in expected.items():
        assert (found[name].double() - tensor.double()).norm() <= 2e-2 * tensor.double().norm(), name


def test_what_is_published_from_the_card_has_the_digest_of_the_host(device, model):
    learner = learner_on(device, model)
    layout = Layout(learner.layout())
    arenas = Arenas.create(layout, 1)
    is_written = learner.snapshot.write(arenas, 0)
    while is_written is not None and not is_written():
        pass
    on_host = ((info, tensor.cpu()) for info, tensor in learner.weights())
    assert digest_of(layout, layout.views(arenas.arena(layout))) == digest_of(layout, on_host)
