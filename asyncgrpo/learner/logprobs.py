"""Log-probs of sampled tokens, without padding where a kernel can do without and without logits where nothing is read.

Two ways to run packed sequences. With flash attention they lie end to end, and the kernel keeps them apart. Without it,
they are the rows of a rectangle, filled up on the right: under plain causal attention no token sees what is right of
it, so no mask is needed, every kernel of `scaled_dot_product_attention` applies, and the cost is linear in the number
of sequences where a block-diagonal mask over [T, T] would be quadratic. `batching.spread` makes rows about equally
long.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncgrpo.algorithms.penalties import entropy
from asyncgrpo.learner.batching import PackedBatch

LOGITS_AT_ONCE = 2**26
"""Logits computed at once, as a count: 256 MiB of float32, a few times over while a chunk is worked on."""


class TokenScores(NamedTuple):
    """Of every packed token; 0 where the mask is false."""

    logprobs: Tensor
    """[T] float32, of logits / temperature, nats."""
    entropy: Tensor
    """[T] float32, nats, of the distribution that the token was sampled from."""


class ModelInputs(NamedTuple):
    """What the model runs on, and where in its output the sampled tokens are predicted."""

    input_ids: Tensor
    """[rows, width] int64."""
    position_ids: Tensor
    """[1, width] int64, the same for all rows."""
    read_at: Tensor
    """[N] int64, index into rows * width of the position before each sampled token."""
    targets: Tensor
    """[N] int64, the sampled tokens."""


def rectangle(batch: PackedBatch) -> ModelInputs:
    """Sequences as rows. The last token of each predicts nothing that is read, so the longest row is without it."""
    lengths = batch.lengths.long()
    width = max(int(lengths.max()) - 1, 1)
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    cell = rows * width + batch.position_ids
    fits = batch.position_ids < width
    input_ids = batch.token_ids.new_zeros(len(lengths) * width)
    input_ids[cell[fits]] = batch.token_ids[fits]
    position_ids = torch.arange(width, device=lengths.device)[None]
    return ModelInputs(input_ids.view(-1, width), position_ids, cell[batch.mask] - 1, batch.token_ids[batch.mask])


def end_to_end(batch: PackedBatch) -> ModelInputs:
    """All sequences in one row, for kernels that take `cu_seqlens`."""
    read_at = batch.mask.nonzero().squeeze(-1) - 1
    return ModelInputs(batch.token_ids[None], batch.position_ids[None], read_at, batch.token_ids[batch.mask])


class TokenScorer(nn.Module):
    """A causal language model that returns log-probs of given tokens instead of logits.

    It is the root of what FSDP shards, because embedding and head are used inside its forward.
    """

    language_model: PreTrainedModel

    def __init__(self, language_model: PreTrainedModel, *, temperature: float, has_varlen_kernel: bool) -> None:
        super().__init__()
        self.language_model = language_model
        self.temperature = temperature
        self.has_varlen_kernel = has_varlen_kernel

    def score(self, batch: PackedBatch, *, entropy_gradient: bool = False) -> TokenScores:
        """Log-prob and entropy of every sampled token, with gradient where grad mode is on.

        Args:
            batch: on the model's device.
            entropy_gradient: the entropy needs its gradient as well.
        """
        arguments: dict[str, object] = {}
        inputs = rectangle(batch)
        if self.has_varlen_kernel:
            inputs, longest = end_to_end(batch), int(batch.lengths.max())
            arguments = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
            arguments |= {"max_length_q": longest, "max_length_k": longest}
        logprobs, entropies = self(*inputs, entropy_gradient=entropy_gradient, **arguments)
        nothing = logprobs.new_zeros(len(batch.mask))
        return TokenScores(nothing.masked_scatter(batch.mask, logprobs), nothing.masked_scatter(batch.mask, entropies))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        read_at: Tensor,
        targets: Tensor,
        *,
        entropy_gradient: bool,
        **attention: object,
    ) -> tuple[Tensor, Tensor]:
        """[N] log-probs and [N] entropies of `targets`; see ModelInputs."""
        decoder, head = self.language_model.get_decoder(), self.language_model.get_output_embeddings()
        output = decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, **attention)
        hidden = output.last_hidden_state.flatten(0, 1)[read_at]
        rows = max(1, LOGITS_AT_ONCE // head.out_features)
        if len(targets) <= rows:
            return self._read(head, hidden, targets, entropy_gradient)
        chunks = [
            checkpoint(self._read, head, *chunk, entropy_gradient, use_reentrant=False)
            for chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _read(self, head: nn.Module, hidden: Tensor, targets: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of one chunk; its logits live no longer than this call (or its backward)."""
        logits = head(hidden).float() / self.temperature
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            return logprobs, entropy(logits)
