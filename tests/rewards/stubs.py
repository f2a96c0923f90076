"""Rewards in the place of the product's, for tests of what calls them."""

from collections.abc import Sequence

from asyncgrpo.rewards.base import Reward, Sampled
from asyncgrpo.types import Prompt, Score


class OneByOne(Reward):
    """A reward that scores one completion after the other; a test says how."""

    async def score_one(self, prompt: Prompt, text: str) -> Score:
        raise NotImplementedError

    async def score(self, prompt: Prompt, completions: Sequence[Sampled]) -> list[Score]:
        return [await self.score_one(prompt, one.text) for one in completions]
