"""Profiles of tests."""

import msgspec
import numpy as np

from asyncgrpo.config.load import load_config
from asyncgrpo.planner.plan import DecodeCurve, LearnerTimes, Lengths, Profile

SAME = Lengths(groups=((100.0,) * 4,))
SIZES = ("buffer.prompts_per_step=8", "algorithm.group_size=4", "generators.groups_in_flight=4")
SIZES += ("generators.count=2", "learner.ranks=2")


def profile(*settings: str, **changes: object) -> Profile:
    """Eight prompts of four completions, engines that hold four groups each, a step of 1 + 0.001 x 3200 / ranks seconds.

    Args:
        settings: further ones of its configuration.
    """
    made = Profile(
        source="test", hardware="none", config=load_config(None, ["model.path=m", "data.train=t", *SIZES, *settings]),
        lengths=SAME, decode=DecodeCurve(base_s=0.02, each_s=0.001), learner=LearnerTimes(base_s=1.0, each_s=0.001),
        publish_s=0.5, pause_s=0.2,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def long_tail(sigma: float = 0.6) -> Lengths:
    """Log-normal lengths of median 100, cut at 2,000. Half of the variance is the prompt's."""
    rng = np.random.default_rng(0)
    deviation = np.sqrt(0.5) * (rng.standard_normal((2000, 1)) + rng.standard_normal((2000, 4)))
    return Lengths(groups=tuple(map(tuple, np.minimum(2000.0, 100 * np.exp(sigma * deviation)).tolist())))
