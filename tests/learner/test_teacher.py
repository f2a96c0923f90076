"""A student learns from a teacher's distribution on its own tokens, without any reward."""

import pytest
import torch

from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.errors import ConfigError, TrainingError
from asyncgrpo.types import PolicyVersion, TeacherLogprobs
from tests.learner.helpers import (
    assert_equal_but_for_rounding,
    assert_same_gradient,
    changed,
    learner,
    load,
    make_group,
    step_and_gradient,
)

PROMPTS, COMPLETIONS, LENGTH = 6, 4, 8
VOCABULARY = 261


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_demo_model(folder / "student", seed=0)
    make_demo_model(folder / "teacher", seed=5, layers=2, hidden=96)
    return folder


@torch.no_grad()
def sample(student, seed: int, rewards=lambda tokens: 1.0):
    """Groups with constant reward, or with one by the tokens, and [N, LENGTH] sequences with their prompts of 5 tokens."""
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
        make_group(n, [rewards(one) for one in sampled[n]], sampled[n].tolist(), prompt=prompts[n].tolist(), version=version,
                   logprobs=logprobs.view(PROMPTS, COMPLETIONS, LENGTH)[n].numpy())
        for n in range(PROMPTS)
    ]  # fmt: skip
    return groups, tokens, version


@torch.no_grad()
def taught(groups, teacher, tokens: torch.Tensor, top_k: int = 0):
    """The same groups with log-probs as a server of the teacher gives them, in the order of the sequences."""
    log_q = teacher(tokens).logits[:, 4:-1].double().log_softmax(-1)
    sampled = log_q.gather(-1, tokens[:, 5:, None])[..., 0]
    values, ids = log_q.topk(top_k)
    parts = (sampled.float().numpy(), ids.int().numpy(), values.float().numpy())
    for row in range(len(tokens)):
        group, index = divmod(row, COMPLETIONS)
        groups[group] = changed(groups[group], index, teacher=TeacherLogprobs(*(part[row] for part in parts)))
    return groups


def make_learner(folders, kind: str, top_k: int | None = None, dtype: str = "float32"):
    """With the teacher in the learner, or served."""
    algorithm, served = {"kl_coef": 1.0, "kl_kind": kind, "group_size": COMPLETIONS}, {}
    if top_k is None:
        algorithm["teacher"] = str(folders / "teacher")
    else:
        served = {"url": "http://unused", "top_k": top_k}
    sections = {"algorithm": algorithm, "teacher": served, "model": {"dtype": dtype}, "learner": {"lr": 3e-3}}
    return learner(folders / "student", **sections)


@pytest.mark.parametrize(("kind", "top_k"), [("k1+", 0), ("k2", 0), ("low_var_kl", 0), ("full", VOCABULARY)])
def test_a_step_is_the_same_with_a_teacher_in_the_learner_and_a_served_one(folders, kind, top_k):
    groups, tokens, version = sample(load(folders / "student"), 0, lambda tokens: float(tokens[0] % 2))
    here, there = make_learner(folders, kind), make_learner(folders, kind, top_k)
    expected = step_and_gradient(here, groups, version)[1]
    found = step_and_gradient(there, taught(groups, load(folders / "teacher"), tokens, top_k), version)[1]
    assert_equal_but_for_rounding(found, expected)
    with pytest.raises(TrainingError, match="no log-probs of a teacher"):
        there.step(sample(load(folders / "student"), 1)[0], version)


@pytest.mark.parametrize("top_k", [None, 5])
def test_the_gradient_is_that_of_the_divergence_over_the_top_tokens_of_a_served_teacher_and_the_rest(folders, top_k):
    """Of a teacher in the learner, over all tokens."""
    student, teacher = load(folders / "student").double(), load(folders / "teacher").double()
    groups, tokens, version = sample(student, 0)
    log_p, log_q = (model(tokens).logits[:, 4:-1].log_softmax(-1) for model in (student, teacher))
    ids = log_q.topk(top_k or log_q.shape[-1] - 1).indices
    p, q = (
        torch.cat([x.exp().gather(-1, ids), x.exp().scatter(-1, ids, 0.0).sum(-1, True)], -1) for x in (log_p, log_q)
    )
    expected = (p * (p / q.detach()).log()).sum(-1).mean()
    expected.backward()
    given = groups if top_k is None else taught(groups, teacher, tokens, top_k)
    report, found = step_and_gradient(make_learner(folders, "full", top_k), given, version)
    assert report.lr == pytest.approx(3e-3) and report.zero_signal_groups == 0, "every group has a signal"
    assert report.kl_reference == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradient(found, {n: p.grad for n, p in student.named_parameters() if p.grad is not None}, 1e-5)


def test_log_probs_of_a_served_teacher_are_not_rounded_to_the_dtype_of_the_layers(folders):
    """Rounded to bfloat16, they change what its top tokens leave to the rest, and the gradient by 30 %."""
    student, teacher = load(folders / "student"), load(folders / "teacher")
    for parameter in teacher.parameters():
        parameter.data *= 3
    groups, tokens, version = sample(student, 0)
    given = taught(groups, teacher, tokens, 20)
    (exact, expected), (rounded, found) = (
        step_and_gradient(make_learner(folders, "full", 20, dtype), given, version) for dtype in ("float32", "bfloat16")
    )
    assert rounded.kl_reference == pytest.approx(exact.kl_reference, rel=2e-3)
    assert_same_gradient(found, expected, 0.1)


def test_a_teacher_with_other_tokens_is_refused(folders, tmp_path):
    from transformers import AutoTokenizer

    make_demo_model(tmp_path / "other", seed=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="token '<extra>' differs; a teacher must have the same vocabulary"):
        learner(folders / "student", algorithm={"teacher": str(tmp_path / "other"), "kl_coef": 1.0})
