"""A student learns from a teacher's distribution on its own tokens, without any reward."""

import numpy as np
import pytest
import torch

from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.errors import ConfigError
from asyncgrpo.types import PolicyVersion
from tests.learner.helpers import learner, load, make_group, step_and_gradient, weights

PROMPTS, COMPLETIONS, LENGTH = 6, 4, 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_demo_model(folder / "student", seed=0)
    make_demo_model(folder / "teacher", seed=5, layers=2, hidden=96)
    return folder


@torch.no_grad()
def sample(student, seed: int):
    """Groups with constant reward, and [N, LENGTH] sequences with their prompts of 5 tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(48, 58, (PROMPTS, 5), generator=generator)
    tokens, logprobs = prompts.repeat_interleave(COMPLETIONS, 0), []
    for _ in range(LENGTH):
        log_p = student(tokens).logits[:, -1].log_softmax(-1)
        chosen = torch.multinomial(log_p.exp(), 1, generator=generator)
        logprobs.append(log_p.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    sampled, logprobs = tokens[:, 5:].view(PROMPTS, COMPLETIONS, LENGTH), torch.cat(logprobs, 1)
    version = PolicyVersion(7, seed)
    groups = [
        make_group(n, [1.0] * COMPLETIONS, sampled[n].tolist(), prompt=prompts[n].tolist(), version=version,
                   logprobs=logprobs.view(PROMPTS, COMPLETIONS, LENGTH)[n].numpy())
        for n in range(PROMPTS)
    ]  # fmt: skip
    return groups, tokens, version


def divergence(student, teacher, tokens: torch.Tensor) -> torch.Tensor:
    """KL(student || teacher) at each sampled token."""
    a, b = (model(tokens).logits[:, 4:-1].log_softmax(-1) for model in (student, teacher))
    return (a.exp() * (a - b)).sum(-1)


@pytest.mark.parametrize(("kind", "falls_to"), [("full", 0.6), ("k1+", 0.7)])
def test_the_divergence_falls_with_a_constant_reward(folders, kind, falls_to):
    student, teacher = load(folders / "student"), load(folders / "teacher")
    ours = learner(
        folders / "student",
        algorithm={"teacher": str(folders / "teacher"), "kl_coef": 1.0, "kl_kind": kind, "group_size": COMPLETIONS},
        learner={"lr": 3e-3},
    )
    found = []
    for step in range(25):
        student.load_state_dict(weights(ours), strict=False)
        groups, tokens, version = sample(student, step)
        with torch.no_grad():
            found.append(divergence(student, teacher, tokens).mean().item())
        report = ours.step(groups, version)
        assert report.lr == pytest.approx(3e-3) and report.zero_signal_groups == PROMPTS
        if kind == "full":
            assert report.kl_reference == pytest.approx(found[-1], rel=1e-4)
    assert np.mean(found[-3:]) < falls_to * found[0]


def test_the_gradient_is_that_of_the_divergence(folders):
    student, teacher = load(folders / "student").double(), load(folders / "teacher").double()
    groups, tokens, version = sample(student, 0)
    divergence(student, teacher, tokens).mean().backward()
    ours = learner(
        folders / "student",
        algorithm={"teacher": str(folders / "teacher"), "kl_coef": 1.0, "kl_kind": "full", "group_size": COMPLETIONS},
    )
    found = step_and_gradient(ours, groups, version)[1]
    for name, parameter in student.named_parameters():
        if parameter.grad is not None:
            error = (found[name].double() - parameter.grad).norm()
            assert error <= 1e-5 * parameter.grad.norm(), name


def test_a_teacher_with_other_tokens_is_refused(folders, tmp_path):
    from transformers import AutoTokenizer

    make_demo_model(tmp_path / "other", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="token '<extra>' differs; a teacher must have the same vocabulary"):
        learner(folders / "student", algorithm={"teacher": str(tmp_path / "other"), "kl_coef": 1.0})
