"""A fake engine whose completions meet a fate, or that fails itself, when a test says so."""

from collections.abc import Callable
from typing import Any, Literal

from asyncgrpo.engines.base import PendingCompletion
from asyncgrpo.engines.fake import FakeEngine
from asyncgrpo.errors import EngineError

Fate = Literal["abort", "hang"]
"""A completion ends as if the engine had aborted it, or it gets no further token."""


class FaultyEngine(FakeEngine):
    def __init__(
        self,
        *,
        injected_fault: Callable[[PendingCompletion, int], Any] = lambda completion, length: None,
        fail_after_tokens: float = float("inf"),
        **options: Any,
    ) -> None:
        """
        Args:
            injected_fault: called before each token of a completion with its length so far; returns a `Fate` or None.
            fail_after_tokens: number of sampled tokens after which the engine fails for good.
        """
        super().__init__(**options)
        self.injected_fault, self.fail_after_tokens = injected_fault, fail_after_tokens
        self._num_sampled = 0

    def _extend(self, completion: PendingCompletion, tokens: list[int], limit: int) -> None:
        fate = self.injected_fault(completion, len(tokens))
        if fate is None:
            super()._extend(completion, tokens, limit)
            self._num_sampled += 1
        elif fate == "abort":
            self._complete(completion, "abort")
        if self._num_sampled >= self.fail_after_tokens:
            self._fail(EngineError(f"it is to fail after {self.fail_after_tokens} tokens"))
