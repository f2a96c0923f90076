"""What a reward is: one question, one answer, one score, before a deadline.

A reward never raises and never hangs for its caller. What goes wrong inside comes back as a named failure.
"""

from typing import Protocol

from asyncgrpo.types import Prompt, Score


class Reward(Protocol):
    """Scores answers. Build one with `rewards.build_reward`."""

    async def score(self, prompt: Prompt, answer_text: str) -> Score:
        """The score of one answer, always within the configured deadline (plus the time to kill a worker)."""

    async def close(self) -> None:
        """End every worker process."""
