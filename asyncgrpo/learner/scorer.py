"""A causal language model that trains on packed answers: hidden states where something is read, and the head's loss.

Only positions that predict a sampled token go through the head, and only a tile of them at a time (`head`). The scorer
is the root of what FSDP shards, because embedding and head are used inside its forward.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncgrpo.learner.batching import PackedBatch
from asyncgrpo.learner.head import Reference, TokenScores, fused_loss, score
from asyncgrpo.learner.objective import MicrobatchObjective


class Scored(NamedTuple):
    """What a forward pass says of the N sampled tokens of a micro-batch."""

    loss: Tensor | None
    """[] a root whose gradient is that of the micro-batch's loss; none without an objective."""
    scores: TokenScores
    values: Tensor | None
    """[N] float32, of the critic, with gradient; none where there is no critic."""
    hidden: Tensor
    """[N, D] what the head reads, without gradient."""


class TokenScorer(nn.Module):
    """The model, with the sampling temperature, and a value head where there is a critic."""

    language_model: PreTrainedModel

    def __init__(self, language_model: PreTrainedModel, *, temperature: float, has_critic: bool = False) -> None:
        super().__init__()
        self.language_model = language_model
        self.temperature = temperature
        self.value_head: nn.Linear | None = None
        if has_critic:  # begins at 0: before it has learned anything, every value is the same
            self.value_head = nn.Linear(self.head.in_features, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    @property
    def head(self) -> nn.Linear:
        """From hidden states to logits."""
        return cast(nn.Linear, self.language_model.get_output_embeddings())

    def forward(
        self,
        batch: PackedBatch,
        objective: MicrobatchObjective | None = None,
        *,
        reference: Reference | None = None,
        is_elementwise: bool = True,
    ) -> Scored:
        """Scores of a micro-batch and, with an objective, the root of its loss.

        Args:
            batch: on the model's device.
            objective: none: scores only.
            reference: for an objective with a full KL.
            is_elementwise: whether the objective can be asked tile by tile; else all log-probs are computed first.
        """
        hidden = self._read(batch)
        weight = self.head.weight
        if objective is None:
            scores = score(hidden, weight, batch.targets, temperature=self.temperature)
            return Scored(None, scores, self._values(hidden), hidden.detach())
        if not is_elementwise:
            objective.know(score(hidden.detach(), weight, batch.targets, temperature=self.temperature))
        loss, scores = fused_loss(
            hidden, weight, batch.targets, objective, temperature=self.temperature, reference=reference
        )
        return Scored(loss, scores, self._values(hidden), hidden.detach())

    def _read(self, batch: PackedBatch) -> Tensor:
        """[N, D] last hidden states of the positions before the sampled tokens."""
        output = self.language_model.get_decoder()(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            segments=batch.segments,
        )
        return output.last_hidden_state[0].index_select(0, batch.read_at)

    def _values(self, hidden: Tensor) -> Tensor | None:
        return None if self.value_head is None else self.value_head(hidden).float().sum(-1)


@torch.no_grad()
def whole(weight: Tensor, like: Tensor) -> Tensor:
    """A sharded weight in one piece. Collective."""
    full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full.to(like.device, like.dtype)
