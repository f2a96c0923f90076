"""Which answers make a group when some fail or take too long: a pure rule on what has become of each.

"The first n that finish" are the n shortest of those launched, so training on them teaches brevity. Here an answer is
taken by its place in the order of launch, which nothing about the answer can change; when it finished never decides
between two that both did. Only the deadline of the group can leave a long answer out, and each of those is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from asyncgrpo.types import Completion, Rollout, Score


@dataclass(eq=False)
class Launched:
    """One answer that was begun."""

    index: int
    """Its place in the order of launch, from 0."""
    num_retries: int = 0
    seed: int = 0
    completion: Completion | None = None
    """What the engine sampled in the present try; None: not yet."""
    score: Score | None = None
    """None: it is still sampled, scored, or sampled again."""

    @property
    def is_good(self) -> bool:
        """It is complete and has a reward."""
        return self.score is not None and self.score.failure is None

    @property
    def num_tokens(self) -> int:
        """Sampled in the present try."""
        return 0 if self.completion is None else len(self.completion.token_ids)

    @property
    def rollout(self) -> Rollout:
        """The answer, once it is done."""
        assert self.completion is not None and self.score is not None, self
        return Rollout(self.completion, self.score, self.seed)


def choose(launched: Sequence[Launched], wanted: int, *, is_late: bool) -> list[Launched] | None:
    """The answers that make the group, in order of launch; None: it is not decided yet.

    The first `wanted` that did not fail. Until the deadline each of them is waited for; from then on those that are not
    done are passed over. Where too few are good, answers that failed fill the places, by name.

    Args:
        launched: every answer that was begun, in order of launch.
        is_late: the deadline of the group has come.
    """
    good: list[Launched] = []
    for one in launched:
        if len(good) == wanted:
            break
        if one.is_good:
            good.append(one)
        elif one.score is None and not is_late:
            return None
    failed = [one for one in launched if one.score is not None and not one.is_good]
    return sorted(good + failed[: wanted - len(good)], key=lambda one: one.index)


def censored(launched: Sequence[Launched], wanted: int) -> list[Launched]:
    """Of the first `wanted` that did not fail, those that are not done: what a cut leaves out."""
    not_failed = [one for one in launched if one.score is None or one.is_good]
    return [one for one in not_failed[:wanted] if one.score is None]
