"""Samples tokens from logits for the `torch` engine: a whole batch at once, each row with its own parameters and noise.

Noise is stateless: the number that decides token t of a completion is a hash of the completion's seed and t, so a
completion does not depend on the others in its batch. The token is the inverse of the cumulative distribution at that
number, in vocabulary order.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Knobs:
    """Sampling parameters of R rows, on the device of the logits."""

    temperature: Tensor
    """[R] float32; 1 for greedy rows, whose log-probs are those of the raw logits."""
    greedy: Tensor | None
    """[R] bool; None: no row is greedy."""
    filtered_rows: Tensor | None
    """[F] int64, rows restricted by top-k or top-p; None: no row is."""
    top_k: Tensor
    """[F] int64; the size of the vocabulary where no limit is set."""
    top_p: Tensor
    """[F] float64."""

    @classmethod
    def of(cls, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, vocab_size: int, device: torch.device):
        """Build from the `types.Sampling` fields of R rows, [R] each."""
        greedy = temperature == 0
        filtered = np.flatnonzero(((top_p < 1) | (top_k != -1)) & ~greedy)
        limits = np.where(top_k == -1, vocab_size, top_k)[filtered]

        def on_device(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

        return cls(
            temperature=on_device(np.where(greedy, 1.0, temperature), torch.float32),
            greedy=on_device(greedy, torch.bool) if greedy.any() else None,
            filtered_rows=on_device(filtered, torch.long) if len(filtered) else None,
            top_k=on_device(limits, torch.long),
            top_p=on_device(top_p[filtered], torch.float64),
        )


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each pair of seed ([R] uint64) and position in the completion ([R] int64): [R] float64.

    Each seed has a stream of SplitMix64, started at a mixed seed so that neighbouring seeds are independent. The numbers
    have 52 bits, so that u * total stays below total in float64.
    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
    """
    mixed = _mix(_mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample(logits: Tensor, knobs: Knobs, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Pick one token per row.

    Args:
        logits: [R, V] any float dtype.
        knobs: sampling parameters of the R rows.
        noise: [R] float64 in [0, 1).
    Returns:
        tokens [R] int64, and [R] float32 their log-probabilities (nats) under softmax(logits / temperature) over the whole
        vocabulary; not finite where the logits were not.
    """
    logprobs = torch.log_softmax(logits.float() / knobs.temperature[:, None], dim=-1)
    probs = logprobs.exp()
    tokens = _invert(probs, noise)
    if knobs.filtered_rows is not None:
        rows = knobs.filtered_rows
        tokens[rows] = _invert_filtered(probs[rows], knobs.top_k, knobs.top_p, noise[rows])
    if knobs.greedy is not None:
        tokens = torch.where(knobs.greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _invert(probs: Tensor, noise: Tensor) -> Tensor:
    """Return [R] the first tokens whose cumulative probability exceeds noise * total. `probs` [R, V] need not sum to 1."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)  # float32 would lose tokens of a large vocabulary
    tokens = torch.searchsorted(cumulative, (noise * cumulative[:, -1])[:, None], right=True)[:, 0]
    return tokens.clamp(max=probs.shape[1] - 1)  # only NaNs exceed the end


def _invert_filtered(probs: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """Do as `_invert`, among the `top_k` most probable tokens and of those the fewest whose share reaches `top_p`."""
    ordered, tokens = probs.double().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    ordered = ordered.where(ranks < top_k[:, None], 0.0)
    better = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.where((better < top_p[:, None] * ordered.sum(dim=-1, keepdim=True)) | (ranks == 0), 0.0)
    # A parallel scan may round so that a token of probability 0 is picked: stay among those that are left.
    last = (ordered > 0).sum(dim=-1).clamp(min=1) - 1
    return tokens.gather(1, torch.minimum(_invert(ordered, noise), last)[:, None])[:, 0]


def _mix(state: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser, [R] uint64 to [R] uint64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
