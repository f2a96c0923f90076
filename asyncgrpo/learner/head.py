"""The language model head fused with the loss: logits exist for one tile of tokens at a time and are computed once.

The objective's gradient by the logits has a closed form. With z = W h / temperature, p = softmax(z), y the sampled
token, H the entropy and KL = Σ p (log p - log q) for a reference q,

    ∂ log p(y) / ∂z = 1_y - p        ∂H / ∂z = -p (log p + H)        ∂KL / ∂z = p (log p - log q - KL)

For each tile of logits: compute log-probs, get the objective's gradients by them, overwrite the logits with the gradient by
the logits, and add its share to the gradients by h and W. Backward only returns those. Statistics are float32 (float64 for
float64 weights), block by block.

Compiled, a tile is one block: one program reads the logits for the scores, and another recomputes p and overwrites them with
the gradient. No float32 tensor of that size exists.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE_LOGITS = {"cpu": 2**24, "cuda": 2**27}
"""Number of logits of a tile, in the dtype of the model."""
BLOCK_LOGITS = {"cpu": 2**20, "cuda": 2**27}
"""Number of logits of a block, in float32. On a CPU 4 MiB, so that a block stays in the cache."""
FEWEST_ROWS = 32
"""Minimum rows of a block for any vocabulary, because the objective is called once per block."""
SUMMED_ROWS = 512
"""Minimum rows of a tile if the head is trained, because the float32 sum of its gradient is read and written once per tile.
Per token of the vocabulary a tile takes 1 KiB in bfloat16, and the sum 4 bytes times the width of the model."""


class Kept(NamedTuple):
    """Tokens of the vocabulary that top-p and top-k left to sample each of n tokens from."""

    ids: Tensor
    """[M] int64, those of the first token, then those of the second, and so on."""
    ends: Tensor
    """[n] int64 on the CPU, end of each token's part of `ids`; an empty part: the whole vocabulary."""

    def at(self, where: slice) -> "Kept":
        """Return those of a slice of the tokens."""
        ends = self.ends[where]
        first = int(self.ends[where.start - 1]) if where.start else 0
        return Kept(self.ids[first : int(ends[-1]) if len(ends) else first], ends - first)

    def dropped(self, size: int) -> Tensor:
        """Return [n, size] bool, true for tokens of a vocabulary of `size` that could not be sampled."""
        counts, device = self.ends.diff(prepend=self.ends.new_zeros(1)), self.ids.device
        rows = torch.arange(len(counts)).repeat_interleave(counts).to(device, non_blocking=True)
        dropped = (counts > 0).to(device, non_blocking=True)[:, None].repeat(1, size)
        return dropped.index_put_((rows, self.ids), dropped.new_zeros(()))


class TokenScores(NamedTuple):
    """Scores of the sampled tokens, without gradient."""

    logprobs: Tensor
    """[N] float32, of the sampled tokens under softmax(logits / temperature), over the `Kept` ones, nats."""
    entropy: Tensor
    """[N] float32, nats, of that distribution."""
    reference_kl: Tensor | None = None
    """[N] float32, KL(policy ‖ reference) over the full vocabulary, nats; None if not requested."""


class LossGradients(NamedTuple):
    """Derivatives of the step's loss by the scores of each token; None is zero."""

    logprobs: Tensor
    """[n] by the sampled token's log-prob."""
    entropy: Tensor | None = None
    """[n] by the entropy."""
    reference_kl: Tensor | None = None
    """[n] by the full KL."""

    def at(self, where: slice) -> "LossGradients":
        """Return the gradients of a slice of the tokens."""
        entropy, reference_kl = (None if x is None else x[where] for x in self[1:])
        return LossGradients(self.logprobs[where], entropy, reference_kl)


Objective = Callable[[slice, TokenScores], LossGradients]
"""A loss that the head evaluates block by block: from a slice of the N tokens and their scores to its gradients."""


class Reference(NamedTuple):
    """Reference distribution of a full KL."""

    hidden: Tensor
    """[N, D] last hidden states of the reference."""
    weight: Tensor
    """[V, D] head of the reference."""


class Teacher(NamedTuple):
    """A served teacher's log-probs of n tokens, at temperature 1, nats."""

    sampled: Tensor
    """[n] float32, of the sampled tokens."""
    ids: Tensor
    """[n, k] int64, the teacher's most likely tokens."""
    values: Tensor
    """[n, k] float32, theirs."""

    def at(self, where: slice) -> "Teacher":
        """Return those of a slice of the tokens."""
        return Teacher(*(part[where] for part in self))

    def gap(self, log_p: Tensor, p: Tensor) -> Tensor:
        """Return [n, V] log P - log Q of the part of the vocabulary that a token is in.

        The parts are each of the teacher's k tokens, and all other tokens together. So Σ p gap is the KL between the two
        distributions over these k + 1 parts, which is at most the KL over the vocabulary, and equal to it for k = V.
        """
        values, smallest = self.values.to(p.dtype), torch.finfo(torch.float32).eps
        rest = p.scatter(-1, self.ids, 0.0).sum(-1, keepdim=True).clamp(min=smallest)
        rest_of_teacher = (1 - values.exp().sum(-1, keepdim=True)).clamp(min=smallest)
        gap = (rest.log() - rest_of_teacher.log()).repeat(1, p.shape[-1])
        return gap.scatter_(-1, self.ids, log_p.gather(-1, self.ids) - values)


@torch.no_grad()
def score(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, kept: Kept | None = None
) -> TokenScores:
    """Compute log-probs and entropies of `targets`, without gradient.

    Args:
        hidden: [N, D] input of the head.
        weight: [V, D] the head.
        targets: [N] int64, sampled tokens.
        temperature: of sampling.
        kept: of each target; None: the whole vocabulary.
    """
    rows, scores = _Rows(weight), []
    for tile in rows.tiles(len(targets)):
        logits = rows.logits(hidden[tile], weight)
        for block, here in rows.blocks(tile):
            dropped = kept and kept.at(here).dropped(len(weight))
            scores.append(_statistics(rows.exact(logits[block], temperature), targets[here], dropped)[0])
    return TokenScores(torch.cat([one.logprobs for one in scores]), torch.cat([one.entropy for one in scores]))


def fused_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    objective: Objective,
    *,
    temperature: float,
    kept: Kept | None = None,
    reference: Reference | Teacher | None = None,
    is_compiled: bool = False,
) -> tuple[Tensor, TokenScores]:
    """Return a scalar whose gradient is that of the loss, and the scores. Arguments as in `score`.

    The scalar is 0; the objective reports the value of the loss. Call `backward` on this scalar or a multiple of it only.
    `is_compiled` runs the programs at the end of this file; it is ignored with a reference or kept tokens.
    """
    runs_programs = is_compiled and reference is None and kept is None
    root, *scores = _FusedLoss.apply(hidden, weight, targets, objective, temperature, kept, reference, runs_programs)
    return root, TokenScores(*scores)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        objective: Objective,
        temperature: float,
        kept_tokens: Kept | None,
        reference: Reference | Teacher | None,
        is_compiled: bool,
    ) -> tuple[Tensor, ...]:
        rows, of_reference = (_Rows(weight, sums_gradient=weight.requires_grad, is_whole=is_compiled) for _ in range(2))
        # Not a list of small tensors: glibc would leave holes between them that are too small for the next block's logits.
        kept = [hidden.new_empty(len(hidden), dtype=_exact(weight.dtype)) for _ in range(2 + (reference is not None))]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=_exact(weight.dtype)) if weight.requires_grad else None
        is_exact = weight.dtype == _exact(weight.dtype)
        share = None if is_exact or grad_weight is None else torch.empty_like(weight)  # of one tile, reused
        add = _compiled(_add) if is_compiled else _add
        for tile in rows.tiles(len(targets)):
            logits, there = rows.logits(hidden[tile], weight), None
            if isinstance(reference, Reference):
                there = of_reference.logits(reference.hidden[tile], reference.weight)
            grad_logits = logits if logits.dtype == hidden.dtype else torch.empty_like(logits, dtype=hidden.dtype)
            for block, here in rows.blocks(tile):
                if is_compiled and len(logits) > 1:  # 0 and 1 rows would be specialized into programs of their own
                    found, log_sum = _compiled(_scores)(logits[block], targets[here], 1 / temperature)
                    parts = (*objective(here, found)[:2], found.entropy, log_sum, targets[here], 1 / temperature)
                    _compiled(_write_gradient)(logits[block], grad_logits[block], *parts)
                else:
                    dropped = kept_tokens and kept_tokens.at(here).dropped(len(weight))
                    found, log_p, p = _statistics(rows.exact(logits[block], temperature), targets[here], dropped)
                    gap = None
                    if there is not None:
                        gap = log_p - _log_softmax(rows.exact(there[block], temperature), dropped)
                    elif isinstance(reference, Teacher):
                        gap = reference.at(here).gap(log_p, p)
                    if gap is not None:
                        found = found._replace(reference_kl=_dot(p, gap))
                    gradients = objective(here, found)
                    grad_logits[block] = _grad_logits(gradients, found, log_p, p, gap, targets[here], temperature)
                for whole, part in zip(kept, found, strict=False):
                    if part is not None:
                        whole[here] = part
            torch.mm(grad_logits, weight, out=grad_hidden[tile])
            if grad_weight is not None and share is not None:  # narrower than the sum
                add(grad_weight, torch.mm(grad_logits.t(), hidden[tile], out=share))
            elif grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden[tile])
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(*kept)
        return hidden.new_zeros((), dtype=torch.float32), *kept

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        for gradient in (grad_hidden, grad_weight):
            if gradient is not None:
                gradient.mul_(gradients[0])
        return grad_hidden, grad_weight, *[None] * 6


class _Rows:
    """Splits tokens into tiles and tiles into blocks, and computes the logits of a tile in one reused buffer."""

    def __init__(self, weight: Tensor, *, sums_gradient: bool = False, is_whole: bool = False) -> None:
        vocabulary, device = weight.shape[0], weight.device.type
        self._in_block = max(FEWEST_ROWS, BLOCK_LOGITS[device] // vocabulary)
        self._in_tile = max(self._in_block, TILE_LOGITS[device] // vocabulary, SUMMED_ROWS if sums_gradient else 0)
        if is_whole:
            self._in_block = self._in_tile
        self._memory: Tensor | None = None

    def tiles(self, num_tokens: int) -> list[slice]:
        """Return at least one tile, which may be empty."""
        return _cut(num_tokens, self._in_tile)

    def blocks(self, tile: slice) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of each block, in the tile and among all tokens."""
        for block in _cut(tile.stop - tile.start, self._in_block):
            yield block, slice(tile.start + block.start, tile.start + block.stop)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return [n, V] logits of one tile before the temperature. On a GPU they are not rounded to bfloat16."""
        if hidden.is_cuda and hidden.dtype == torch.bfloat16:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        if self._memory is None:
            self._memory = hidden.new_empty(len(hidden), weight.shape[0])
        return torch.mm(hidden, weight.t(), out=self._memory[: len(hidden)])

    def exact(self, logits: Tensor, temperature: float) -> Tensor:
        """Return the logits of one block in float32, after the temperature."""
        logits = logits.to(_exact(logits.dtype))
        return logits if temperature == 1.0 else logits / temperature


def _cut(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, max(length, 1), size)]


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return [n] row-wise dot products of [n, V] tensors. A GPU avoids the large intermediate product."""
    return torch.bmm(a[:, None], b[..., None])[:, 0, 0] if a.is_cuda else (a * b).sum(-1)


def _statistics(logits: Tensor, targets: Tensor, dropped: Tensor | None) -> tuple[TokenScores, Tensor, Tensor]:
    """Return scores of a block, [n, V] log p in the memory of the logits, and [n, V] p.

    Exponentials dominate the cost, so there is one: the softmax denominator is derived from the largest p. Of dropped
    tokens, p is 0; their log p is set to 0, so that they add nothing to a sum of p log p.
    """
    if dropped is not None:
        logits.masked_fill_(dropped, -torch.inf)
    p = logits.softmax(-1)
    log_p = logits.sub_(logits.amax(-1, keepdim=True)).add_(p.amax(-1, keepdim=True).log_())
    if dropped is not None:
        log_p.masked_fill_(dropped, 0.0)
    logprobs = log_p.gather(-1, targets[:, None]).squeeze(-1)
    return TokenScores(logprobs, -_dot(p, log_p)), log_p, p


def _log_softmax(logits: Tensor, dropped: Tensor | None) -> Tensor:
    """Return [n, V] log-probs of a reference over the tokens that are not dropped, 0 for those."""
    if dropped is None:
        return logits.log_softmax(-1)
    return logits.masked_fill(dropped, -torch.inf).log_softmax(-1).masked_fill_(dropped, 0.0)


def _grad_logits(
    gradients: LossGradients,
    scores: TokenScores,
    log_p: Tensor,
    p: Tensor,
    gap: Tensor | None,
    targets: Tensor,
    temperature: float,
) -> Tensor:
    """Return the [n, V] derivative of the loss by the logits before the temperature. Overwrites `p` and `log_p`."""
    gradient = (gradients.logprobs / temperature)[:, None].to(p.dtype)
    if gradients.reference_kl is not None:
        assert gap is not None and scores.reference_kl is not None
        gap.sub_(scores.reference_kl[:, None]).mul_((gradients.reference_kl / temperature)[:, None])
    if gradients.entropy is not None:
        weights = log_p.add_(scores.entropy[:, None]).mul_((-gradients.entropy / temperature)[:, None]).sub_(gradient)
    else:
        weights = -gradient
    if gap is not None and gradients.reference_kl is not None:
        weights = gap.add_(weights)
    return p.mul_(weights).scatter_add_(-1, targets[:, None], gradient)


# -- compiled ----------------------------------------------------------------------------------------------------------


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function as one program for all numbers of rows."""
    return torch.compile(function, dynamic=True)


def _scores(logits: Tensor, targets: Tensor, inverse: float) -> tuple[TokenScores, Tensor]:
    """Return scores of logits [n, V] before the temperature `1 / inverse`, and [n] log softmax denominators."""
    exact = logits.to(_exact(logits.dtype)) * inverse
    largest = exact.amax(-1, keepdim=True)
    centred = exact - largest
    e = centred.exp()
    total = e.sum(-1)
    log_total = total.log()
    logprobs = centred.gather(-1, targets[:, None]).squeeze(-1) - log_total
    entropy = log_total - (e * centred).sum(-1) / total
    return TokenScores(logprobs, entropy), largest.squeeze(-1) + log_total


def _write_gradient(
    logits: Tensor,
    out: Tensor,
    by_logprobs: Tensor,
    by_entropy: Tensor | None,
    entropy: Tensor,
    log_sum: Tensor,
    targets: Tensor,
    inverse: float,
) -> None:
    """Write `_grad_logits` of logits before the temperature into `out`, which may be the same memory."""
    log_p = logits.to(_exact(logits.dtype)) * inverse - log_sum[:, None]
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = by_logprobs[:, None] * (is_target.to(log_p.dtype) - log_p.exp())
    if by_entropy is not None:
        gradient = gradient - by_entropy[:, None] * log_p.exp() * (log_p + entropy[:, None])
    out.copy_(gradient * inverse)


def _add(total: Tensor, share: Tensor) -> None:
    total.add_(share)
