"""Tokens are drawn from the distribution they are said to be drawn from, row by row."""

import numpy as np
import pytest
import torch

from asyncgrpo.engines.torch.decoder import Knobs, sample, uniforms

VOCAB = 50
CPU = torch.device("cpu")


def knobs(rows: int, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> Knobs:
    return Knobs.of(
        np.full(rows, temperature, np.float32), np.full(rows, top_p), np.full(rows, top_k), vocab_size=VOCAB, device=CPU
    )


def draw(logits: torch.Tensor, rows: int, **of: float) -> torch.Tensor:
    """`rows` tokens for one distribution, each with its own seed."""
    noise = torch.from_numpy(uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64)))
    return sample(logits.expand(rows, -1), knobs(rows, **of), noise)[0]  # type: ignore[arg-type]


def filtered(probs: list[float], top_k: int, top_p: float) -> list[float]:
    """Slowly: walk from the most probable token down, until top_k are taken or they hold top_p of the top_k."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])[: top_k if top_k > 0 else None]
    total, taken = sum(probs[token] for token in order), []
    for token in order:
        if sum(probs[t] for t in taken) >= top_p * total:
            break
        taken.append(token)
    share = sum(probs[token] for token in taken)
    return [probs[token] / share if token in taken else 0.0 for token in range(len(probs))]


def test_noise_is_uniform_and_neighbouring_seeds_and_places_share_nothing() -> None:
    seeds, places = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    table = uniforms(seeds.ravel(), places.ravel()).reshape(300, 300)
    assert table.min() >= 0
    assert table.max() < 1
    assert len(np.unique(table)) == table.size
    assert len(set(uniforms(np.array([0, 2**32, 2**64 - 1], np.uint64), np.zeros(3, np.int64)))) == 3, "of 64 bits"
    counts, _ = np.histogram(table, bins=50, range=(0, 1))
    expected = table.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi-squared with 49 degrees: above 100 in 3e-5 of cases
    for one, other in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, -1, 1.0), (0.5, -1, 1.0), (1.0, 7, 1.0), (1.0, -1, 0.6), (2.0, 20, 0.8)]
)
def test_tokens_come_as_often_as_their_probability_says(temperature: float, top_k: int, top_p: float) -> None:
    logits = 2 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    rows = 40_000
    tokens = draw(logits, rows, temperature=temperature, top_k=top_k, top_p=top_p)
    expected = np.array(filtered((logits / temperature).softmax(-1)[0].double().tolist(), top_k, top_p))
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert (counts[expected == 0] == 0).all()
    deviation = np.sqrt(expected * (1 - expected) / rows)
    assert (np.abs(counts / rows - expected) <= 5 * deviation + 1e-12).all()


def test_one_batch_may_mix_all_kinds_of_rows() -> None:
    """A row gives the same token beside others of another kind as it gives alone."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))
    noise = torch.tensor([0.1, 0.5, 0.7, 0.95], dtype=torch.float64)
    temperature, top_p, top_k = (
        np.float32([1.0, 0.0, 0.7, 1.3]),
        np.array([1.0, 1.0, 0.9, 0.4]),
        np.array([-1, 5, -1, 8]),
    )
    together = sample(logits, Knobs.of(temperature, top_p, top_k, VOCAB, CPU), noise)
    for row in range(4):
        here = slice(row, row + 1)
        alone = sample(logits[here], Knobs.of(temperature[here], top_p[here], top_k[here], VOCAB, CPU), noise[here])
        assert together[0][row] == alone[0][0]
        torch.testing.assert_close(together[1][row], alone[1][0])
    assert together[0][1] == logits[1].argmax()
    torch.testing.assert_close(together[1][1], logits[1].log_softmax(-1).max())
