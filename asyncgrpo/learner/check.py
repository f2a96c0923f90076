"""The learner's half of the sync gap: log-probs of the check sequences under the weights that were just published."""

import numpy as np
import torch

from asyncgrpo.learner.model import TokenScorer, reshard
from asyncgrpo.learner.packing import pack
from asyncgrpo.types import Completion, Group, PolicyVersion, Prompt, Rollout, Score, VersionSpan
from asyncgrpo.weights.check import CheckSequences


class LearnerCheck:
    """The check sequences of a run, packed once."""

    def __init__(self, model: TokenScorer, max_context: int, device: torch.device) -> None:
        """Args:
        max_context: longest prompt plus completion, tokens.
        """
        self._model = model
        config = model.language_model.config.get_text_config()
        self.sequences = CheckSequences.draw(config.vocab_size, max_context)
        groups = [_group(number, tokens, self.sequences.start) for number, tokens in enumerate(self.sequences.tokens)]
        (self._batch,) = pack(groups, None, rank=0, world=1, tokens_per_microbatch=2**31).trained
        self._order = torch.argsort(self._batch.rollouts)
        self._device = device

    @torch.no_grad()
    def score(self) -> list[float]:
        """Log-probs of all scored tokens, in the order of the sequences, nats, at temperature 1.

        Collective: every rank runs all sequences. Layers run uncompiled, since without a gradient they would be compiled anew.
        """
        with torch.compiler.set_stance("force_eager"):
            logprobs = self._model(self._batch.to(self._device), temperature=1.0).scores.logprobs
        reshard(self._model)
        parts = logprobs.cpu().split(self._batch.cu_seqlens.diff().tolist())
        return torch.cat([parts[place] for place in self._order.tolist()]).tolist()


def _group(number: int, tokens: tuple[int, ...], start: int) -> Group:
    """A sequence as the one completion of a prompt."""
    sampled = np.array(tokens[start:], np.int32)
    spans = (VersionSpan(PolicyVersion(0, 0), 0, len(sampled)),)
    completion = Completion(0, sampled, np.zeros(len(sampled), np.float32), spans, "length")
    name = f"check-{number}"
    return Group(
        group_id=name,
        lease_id=name,
        attempt=0,
        prompt_index=number,
        purpose="eval",
        prompt=Prompt(prompt_id=name, token_ids=tokens[:start]),
        rollouts=(Rollout(completion, Score(value=0.0)),),
    )
