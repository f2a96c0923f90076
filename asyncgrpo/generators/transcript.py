"""One completion while it grows: what was sampled, and what was said between its turns."""

from collections.abc import Sequence

import msgspec
import numpy as np

from asyncgrpo.engines.base import Engine
from asyncgrpo.types import Completion, FinishReason, Observation, Sampling, VersionSpan

TURN_STRIDE = 2**48
"""Distance between the seeds of two turns: more than any seed of a group and its tries."""


class Transcript:
    """A sequence of tokens that only grows: a prompt, then turns that are sampled and observations between them."""

    def __init__(self, request_id: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        """
        Args:
            request_id: of the completion; each turn is a request of its own.
            sampling: `max_tokens` holds for all turns and observations together.
        """
        self._request_id, self._sampling, self._seed = request_id, sampling, seed
        self._context, self._start = list(prompt), len(prompt)
        self._turns: list[Completion] = []
        self._spans: list[VersionSpan] = []
        self._observations: list[Observation] = []
        self._sampled = 0
        self.turn_id = ""
        """The request of the newest turn."""

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self._sampling.max_tokens - (len(self._context) - self._start)

    @property
    def num_tokens(self) -> int:
        """Tokens that the model has read or sampled, the prompt included."""
        return len(self._context)

    @property
    def num_turns(self) -> int:
        return len(self._turns)

    @property
    def last_token(self) -> int | None:
        """The last token that was sampled; None: there is none."""
        return next((int(turn.token_ids[-1]) for turn in reversed(self._turns) if len(turn.token_ids)), None)

    async def sample(self, engine: Engine, max_tokens: int | None = None) -> Completion:
        """Sample a turn after all that there is. Raises what the engine raises.

        Args:
            max_tokens: of this turn; never more than there is room for.
        """
        self.turn_id = f"{self._request_id}.{len(self._turns)}"
        room = self.room if max_tokens is None else min(self.room, max_tokens)
        sampling, context = msgspec.structs.replace(self._sampling, max_tokens=room), tuple(self._context)
        seed = self._seed + len(self._turns) * TURN_STRIDE
        (turn,) = [one async for one in engine.generate(self.turn_id, context, 1, sampling, seed)]
        self._turns.append(turn)
        for span in turn.spans:
            start, end = span.start + self._sampled, span.end + self._sampled
            if self._spans and self._spans[-1].version == span.version:
                start = self._spans.pop().start
            self._spans.append(VersionSpan(span.version, start, end))
        self._sampled += len(turn.token_ids)
        self._context += turn.token_ids.tolist()
        return turn

    def observe(self, token_ids: Sequence[int]) -> bool:
        """Lay what was said behind what there is. False: a turn would have no room after it, and nothing is laid."""
        if len(token_ids) >= self.room:
            return False
        if token_ids:
            self._observations.append(Observation(self._sampled, np.array(token_ids, np.int32)))
            self._context += token_ids
        return True

    def completion(self, index: int, reason: FinishReason) -> Completion:
        """What there is, as a completion."""
        return Completion(
            index=index,
            token_ids=np.concatenate([np.empty(0, np.int32), *(turn.token_ids for turn in self._turns)]),
            logprobs=np.concatenate([np.empty(0, np.float32), *(turn.logprobs for turn in self._turns)]),
            spans=tuple(self._spans),
            finish_reason=reason,
            observations=tuple(self._observations),
        )
