import math

import pytest
import torch

from asyncgrpo.learner import logprobs
from asyncgrpo.learner.batching import pack
from asyncgrpo.learner.logprobs import TokenScorer, end_to_end, rectangle
from tests.learner.helpers import VERSION, load, random_groups, with_true_logprobs
from tests.models import make_tiny_llama, make_tiny_qwen3

GROUPS = random_groups(4, 3, prompt=(1, 30), answer=(1, 12))


def one_batch(groups):
    return pack(groups, VERSION, rank=0, world=1, tokens_per_microbatch=10_000).trained[0]


@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_llama])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_are_those_of_one_sequence_at_a_time(tmp_path, make, temperature):
    make(tmp_path)
    batch = one_batch(with_true_logprobs(tmp_path, GROUPS, temperature=temperature))
    scorer = TokenScorer(load(tmp_path), temperature=temperature, has_varlen_kernel=False)
    torch.testing.assert_close(scorer.score(batch).logprobs, batch.behaviour_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [make_tiny_qwen3, make_tiny_llama])
def test_end_to_end_inputs_score_the_same(tmp_path, make):
    """What a varlen kernel is given. Here transformers' own block-diagonal mask stands for the kernel."""
    make(tmp_path)
    batch = one_batch(GROUPS)
    scorer = TokenScorer(load(tmp_path), temperature=1.0, has_varlen_kernel=False)
    expected, _ = scorer(*rectangle(batch), entropy_gradient=False)
    ours, _ = scorer(*end_to_end(batch), entropy_gradient=False)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_entropy_is_that_of_the_distribution_and_zero_outside_the_mask(tmp_path):
    model = load(make_tiny_qwen3(tmp_path))
    group = GROUPS[0]
    batch = one_batch([group])
    scores = TokenScorer(model, temperature=0.5, has_varlen_kernel=False).score(batch)
    assert (scores.entropy[~batch.mask] == 0).all() and (scores.logprobs[~batch.mask] == 0).all()
    start, end = batch.cu_seqlens[:2].tolist()
    p = (model(batch.token_ids[None, start:end]).logits[0] / 0.5).softmax(-1)
    expected = -(p * p.log()).sum(-1)[:-1][batch.mask[start + 1 : end]]
    torch.testing.assert_close(scores.entropy[start:end][batch.mask[start:end]], expected, rtol=1e-4, atol=1e-4)


def test_a_uniform_model_has_the_entropy_of_its_vocabulary(tmp_path):
    model = load(make_tiny_qwen3(tmp_path, vocab=50))
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    batch = one_batch(random_groups(2, 2, vocab=50))
    scores = TokenScorer(model, temperature=1.0, has_varlen_kernel=False).score(batch)
    torch.testing.assert_close(scores.entropy[batch.mask], torch.full((int(batch.mask.sum()),), math.log(50)))


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunks_of_logits_change_neither_values_nor_gradients(tmp_path, monkeypatch, entropy_gradient):
    make_tiny_qwen3(tmp_path)
    batch = one_batch(GROUPS)

    def run():
        model = load(tmp_path)
        scores = TokenScorer(model, temperature=0.9, has_varlen_kernel=False).score(
            batch, entropy_gradient=entropy_gradient
        )
        assert scores.entropy.requires_grad == entropy_gradient
        loss = scores.logprobs.sum() + (scores.entropy.sum() if entropy_gradient else 0.0)
        loss.backward()
        return scores, [p.grad for p in model.parameters()]

    whole, expected = run()
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 7 * 260)
    chunked, gradients = run()
    torch.testing.assert_close(chunked.logprobs, whole.logprobs)
    torch.testing.assert_close(chunked.entropy, whole.entropy)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
