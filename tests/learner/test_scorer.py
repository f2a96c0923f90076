"""What the scorer says of packed completions is what plain transformers says of one sequence at a time."""

import pytest
import torch

from asyncgrpo.learner import attention
from asyncgrpo.learner.head import LossGradients, TokenScores
from asyncgrpo.learner.model import TokenScorer
from asyncgrpo.learner.packing import PackedBatch, pack
from tests.learner.helpers import VERSION, assert_same_gradient, cut_head, load, make_group, random_groups
from tests.models import make_tiny_deepseek_v3, make_tiny_llama, make_tiny_qwen3, make_tiny_qwen3_moe

MAKERS = {
    "qwen3": make_tiny_qwen3,
    "llama": make_tiny_llama,
    "qwen3_moe": make_tiny_qwen3_moe,
    "deepseek_v3": make_tiny_deepseek_v3,
}
GROUPS = [
    *random_groups(4, 3, prompt=(1, 30), answer=(1, 12)),
    make_group(4, [1.0, 0.0, 0.0], [[7], [8, 9], list(range(90))], prompt=(3,)),
]


@pytest.fixture(scope="module", params=MAKERS)
def path(request, tmp_path_factory):
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


def plain(path, dtype=torch.float64) -> torch.nn.Module:
    model = load(path).to(dtype)
    if dtype == torch.float64 and hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the others have no float64
    return model


def scorer(path, *, kernel="cpu", temperature=1.0, dtype=torch.float64) -> TokenScorer:
    model = plain(path, dtype)
    attention.install(model, kernel)
    return TokenScorer(model, temperature=temperature)


def batches(groups=GROUPS, *, share_prompts=True, budget=10_000) -> tuple[PackedBatch, ...]:
    return pack(groups, VERSION, rank=0, world=1, tokens_per_microbatch=budget, share_prompts=share_prompts).trained


def one_at_a_time(model, groups, *, temperature: float) -> dict:
    """[L, V] log-probs of every answer of the plain model, by group and index; with gradient."""
    found = {}
    for group in groups:
        for rollout in group.rollouts:
            prompt, completion = group.prompt.token_ids, rollout.completion.token_ids.tolist()
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            found[group.prompt_index, rollout.completion.index] = (logits / temperature).log_softmax(-1)
    return found


def in_order(batch: PackedBatch, by_answer: dict) -> torch.Tensor:
    """What belongs to the completions of a micro-batch, one after the other."""
    keys = list(by_answer)
    return torch.cat([by_answer[keys[i]] for i in batch.rollouts.tolist()])


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("kernel", ["cpu", "sdpa"])
def test_packed_scores_are_those_of_one_sequence_at_a_time(path, kernel, share_prompts):
    with torch.no_grad():
        expected = one_at_a_time(plain(path), GROUPS, temperature=0.7)
    ours = scorer(path, kernel=kernel, temperature=0.7)
    # The router of DeepSeek computes in float32, whatever the rest does.
    tolerance = 1e-6 if "deepseek" in path.name else 1e-9
    for batch in batches(share_prompts=share_prompts, budget=150):
        scored = ours(batch)
        log_p = in_order(batch, expected)
        logprobs = log_p.gather(-1, batch.targets[:, None]).squeeze(-1)
        torch.testing.assert_close(scored.scores.logprobs, logprobs, rtol=tolerance, atol=tolerance)
        entropy = -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(scored.scores.entropy, entropy, rtol=tolerance, atol=tolerance)
        assert scored.loss is None and scored.values is None and not scored.hidden.requires_grad
        assert scored.hidden.shape == (len(batch.targets), ours.head.in_features)


class Objective:
    """Some gradient for each token, whatever its micro-batch."""

    def __init__(self) -> None:
        self.precomputed: TokenScores | None = None
        self.positions: torch.Tensor | None = None

    def use_scores(self, scores: TokenScores) -> None:
        self.precomputed = scores

    def __call__(self, tile: slice, scores: TokenScores) -> LossGradients:
        if self.precomputed is not None:
            torch.testing.assert_close(scores.logprobs, self.precomputed.logprobs[tile])
        return LossGradients(scores.logprobs.cos(), 0.1 * scores.entropy)


def gradient(model: TokenScorer, share_prompts: bool, *, is_elementwise: bool = True) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in batches(share_prompts=share_prompts, budget=200):
        objective = Objective()
        model(batch, objective, is_elementwise=is_elementwise).loss.backward()
        assert (objective.precomputed is None) == is_elementwise
    return {n: p.grad.clone() for n, p in model.language_model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_gradient_is_that_of_one_sequence_at_a_time(path, share_prompts):
    model = plain(path)
    loss = 0.0
    by_answer = one_at_a_time(model, GROUPS, temperature=0.7)
    for group in GROUPS:
        for rollout in group.rollouts:
            log_p = by_answer[group.prompt_index, rollout.completion.index]
            tokens = torch.from_numpy(rollout.completion.token_ids).long()
            logprobs = log_p.gather(-1, tokens[:, None]).squeeze(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            loss = loss + logprobs.sin().sum() + 0.05 * entropy.square().sum()
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # Transformers computes norms in float32 whatever the model is, so a sum of gradients is rounded once or many times.
    assert_same_gradient(gradient(scorer(path, temperature=0.7), share_prompts), expected, 1e-6)


def test_an_objective_that_must_know_all_first_is_told_all_first(path, monkeypatch):
    cut_head(monkeypatch, 7 * 260)
    ours = scorer(path)
    assert_same_gradient(gradient(ours, True, is_elementwise=False), gradient(ours, True), 1e-12)


def test_a_value_head_reads_what_the_head_reads_and_begins_at_zero(tmp_path):
    model = load(make_tiny_qwen3(tmp_path)).double()
    attention.install(model, "cpu")
    ours = TokenScorer(model, temperature=1.0, has_critic=True).double()
    (batch,) = batches()
    assert (ours(batch).values == 0).all()
    torch.nn.init.normal_(ours.value_head.weight)
    torch.nn.init.constant_(ours.value_head.bias, 0.25)
    scored = ours(batch)
    expected = scored.hidden @ ours.value_head.weight[0] + 0.25
    torch.testing.assert_close(scored.values.double(), expected, rtol=1e-5, atol=1e-5)
    scored.values.sum().backward()
    assert ours.value_head.bias.grad.item() == len(batch.targets)
    assert model.get_decoder().embed_tokens.weight.grad.any(), "and trains what it reads"


def test_an_empty_microbatch_can_be_run(path):
    (batch,) = batches([])
    ours = scorer(path)
    scored = ours(batch, Objective())
    assert scored.scores.logprobs.shape == (0,)
    scored.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in ours.parameters())
