"""The gradient of a step is that of the papers' loss, written down one completion at a time; whichever algorithm it is."""

import ast
import inspect
from collections.abc import Callable
from functools import cache
from textwrap import dedent

import msgspec
import pytest
import torch
from msgspec.structs import replace

from asyncgrpo.algorithms import surrogates
from asyncgrpo.config import rules
from asyncgrpo.config.schema import AlgorithmConfig
from asyncgrpo.learner import model as learner_model
from asyncgrpo.learner.learner import Learner
from tests.learner import objectives
from tests.learner.helpers import (
    FAMILIES,
    VERSION,
    assert_equal_but_for_rounding,
    assert_same_gradient,
    config,
    disturb,
    load,
    plain_logprobs,
    step_and_gradient,
    watch_updates,
)
from tests.learner.objectives import CASES, MAX_TOKENS, VOCAB
from tests.learner.reference import Policy, Result, Setup
from tests.models import make_tiny_qwen3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), hidden=32, vocab=VOCAB)


def learner(path, algorithm: dict, *, loss: str | None = None, temperature: float = 1.0, **options) -> Learner:
    """Whose weights are not the initial ones; `loss` is one that no file knows."""
    options = {"tokens_per_microbatch": 10_000, "lr": 1e-3} | options
    sampling = {"max_tokens": MAX_TOKENS, "temperature": temperature}
    settings = config(path, algorithm=algorithm, learner=options, sampling=sampling)
    if loss is not None:
        settings = replace(settings, algorithm=replace(settings.algorithm, loss=loss))
    made = Learner(settings, rank=0, world=1, device="cpu")
    disturb(made)
    return made


@pytest.fixture(scope="module")
def policies(path) -> dict[str, Policy]:
    """The learner's weights at the start, with and without a critic, and the initial ones."""
    found = {"initial": Policy(path, load(path).state_dict())}
    for name, algorithm in (("now", {}), ("critic", {"advantage": "gae"})):
        found[name] = policy_of(path, learner(path, algorithm))
    return found


def policy_of(path, ours: Learner) -> Policy:
    weights = {n.removeprefix("language_model."): p.full_tensor() for n, p in ours.model.named_parameters()}
    return Policy(path, {n: p.detach().clone() for n, p in weights.items()})


@pytest.fixture(scope="module")
def groups(policies):
    model = policies["now"].model
    return objectives.groups(lambda prompt, completion: plain_logprobs(model, prompt, completion))


def setup(policies, algorithm: dict, **others) -> Setup:
    settings = msgspec.convert(algorithm, AlgorithmConfig)
    now = policies["critic" if settings.advantage == "gae" else "now"]
    return Setup(
        **{"settings": settings, "now": now, "start": now, "initial": policies["initial"]} | others,
        version=VERSION.number,
        max_length=MAX_TOKENS,
    )


@pytest.fixture(scope="module")
def expected_of(policies, groups) -> Callable[[str], Result]:
    """The reference's result for a case, computed once."""
    return cache(lambda case: setup(policies, CASES[case]).update(groups))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_one_answer_at_a_time(path, groups, expected_of, case):
    report, gradient = step_and_gradient(learner(path, CASES[case]), groups)
    expected = expected_of(case)
    assert_same_gradient(gradient, expected.gradient, 1e-4)
    assert report.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-5)
    if report.value_loss is not None:
        assert report.value_loss == pytest.approx(expected.value_loss, rel=1e-4)


@pytest.mark.parametrize("kernel", ["cpu", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_every_family_by_every_kernel_are_those_of_one_answer_at_a_time(
    tmp_path, monkeypatch, family, kernel
):
    """Also where activations are recomputed."""
    monkeypatch.setattr(learner_model, "choose_kernel", lambda device, dtype: kernel)
    path, groups = FAMILIES[family](tmp_path, hidden=32, vocab=VOCAB), objectives.groups()
    for share_prompts in (True, False):
        options = {"share_prompts": share_prompts, "activation_checkpointing": not share_prompts}
        ours = learner(path, CASES["entropy"], temperature=0.7, tokens_per_microbatch=100, **options)
        now = policy_of(path, ours)
        expected = setup({"now": now, "initial": None}, CASES["entropy"], temperature=0.7).update(groups)
        report, gradient = step_and_gradient(ours, groups)
        assert_same_gradient(gradient, expected.gradient, 1e-4)
        assert report.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-5)


MINIBATCHES = {
    "ppo_clip": {"loss_args": {"clip_low": 0.02, "clip_high": 0.02}},
    "behaviour": {"anchor": "behaviour", "corrections": ()},
    "sequences": {"loss": "gspo", "loss_args": {"clip_low": 0.01, "clip_high": 0.01}}
    | {"aggregation": "seq-mean-token-mean"},
    "kl": {"kl_coef": 0.3, "entropy_coef": 0.1},
    "kl in the reward": {"kl_coef": 0.3, "kl_in": "reward", "kl_kind": "k1"},
    "m2po": {"corrections": ({"kind": "m2po", "max_mean_square": 0.04},)},
    "gae": {"advantage": "gae", "critic": {"value_clip": 0.01}},
}


@pytest.mark.parametrize(
    ("case", "passes"), [*((case, 1) for case in MINIBATCHES), ("ppo_clip", 3), ("gae", 3)], ids=str
)
def test_updates_of_one_step_share_its_anchor(path, policies, groups, case, passes):
    """Against a plain loop: each update has the gradient of its minibatch under the weights before it, around the weights
    at the start of the step. Gathered weights are kept from one micro-batch to the next, and must not outlive an update."""
    ours = learner(path, MINIBATCHES[case], minibatches=3, ppo_epochs=passes, lr=5e-3, tokens_per_microbatch=20)
    seen = watch_updates(ours)
    report = ours.step(groups, VERSION)
    parts = [groups[0:2], groups[2:4], groups[4:6]]
    order = ours._order(3, VERSION)
    assert order[:3] == [0, 1, 2] and all(sorted(order[n : n + 3]) == [0, 1, 2] for n in range(0, len(order), 3))
    assert ours.steps == len(seen) == 3 * passes
    losses = []
    for number, update in zip(order, seen, strict=True):
        expected = setup(policies, MINIBATCHES[case], now=Policy(path, update.weights)).update(parts[number])
        assert_same_gradient(update.gradient, expected.gradient, 2e-4 if passes == 1 else 5e-4)
        losses.append(expected.loss)
    assert report.loss == pytest.approx(sum(losses) / len(losses), rel=1e-4, abs=1e-5)
    usable = [r.completion for g in groups for r in g.rollouts if r.score.value is not None]
    assert report.tokens_trained == sum(len(completion.token_ids) for completion in usable)
    once = learner(path, MINIBATCHES[case], minibatches=3, lr=5e-3, tokens_per_microbatch=20).step(groups, VERSION)
    for field in ("advantages", "signal_share"):
        assert getattr(report, field) == getattr(once, field), field


SPLITS = ({"tokens_per_microbatch": 1}, {"tokens_per_microbatch": 40, "share_prompts": False})


@pytest.mark.parametrize("case", objectives.STEP_WIDE)
def test_the_split_into_microbatches_changes_nothing(path, groups, case):
    expected, gradient = step_and_gradient(learner(path, CASES[case]), groups)
    for split in SPLITS:
        report, found = step_and_gradient(learner(path, CASES[case], **split), groups)
        assert_equal_but_for_rounding(found, gradient)
        for field in ("loss", "grad_norm", "entropy", "clip_ratio", "importance_mean", "tokens_trained"):
            assert getattr(report, field) == pytest.approx(getattr(expected, field), rel=1e-5, abs=1e-6), field
        assert report.diagnostics == pytest.approx(expected.diagnostics, rel=1e-4, abs=1e-5)
        assert report.advantages == pytest.approx(expected.advantages, rel=1e-4, abs=1e-5)


def test_a_new_paper_is_one_function(path, groups, request, monkeypatch):
    """A surrogate registered outside the module trains a step, with its argument and by its traits."""
    request.addfinalizer(lambda: (surrogates.SURROGATES.pop("scaled"), surrogates.SEQUENCE_LEVEL.remove("scaled")))

    @surrogates.surrogate(with_ratio=False, sequence_level=True)
    def scaled(tokens, *, factor: float = 2.0):
        assert tokens.cu_seqlens is not None and not torch.is_grad_enabled()
        gradient = factor * tokens.advantages
        return surrogates.Surrogate(gradient, gradient * tokens.policy, torch.zeros_like(tokens.mask))

    source = ast.parse(dedent(inspect.getsource(inspect.unwrap(scaled)))).body[0]
    monkeypatch.setitem(rules._losses(), "scaled", source)  # as if it stood in surrogates.py
    plain = {"loss": "reinforce", "anchor": "behaviour", "corrections": ()}
    _, once = step_and_gradient(learner(path, plain, grad_clip=1e9), groups)
    made = learner(path, plain | {"loss_args": {"factor": 3.0}}, loss="scaled", grad_clip=1e9)
    _, thrice = step_and_gradient(made, groups)
    assert_same_gradient(thrice, {name: 3 * value for name, value in once.items()}, 1e-5)
