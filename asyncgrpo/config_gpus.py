"""How many GPUs the generators get, and how many the learner, where only their sum is known."""

from asyncgrpo.errors import ConfigError

# Above this share of the GPUs the learner gets no more. Half: full training keeps 16 bytes a parameter on the learner's
# GPUs alone, so that an 8B model fits 4 of 8 GPUs and not 2, and the learner passes over each token two to three times.
_LEARNER_SHARE = 0.5


def split_gpus(
    n_gpus: int, gpus_each: int = 1, *, count: int | None = None, ranks: int | None = None
) -> tuple[int, int]:
    """Shares GPUs between generators and learner.

    The learner gets the largest power of two that is at most half (so that its ranks share the usual batch sizes
    equally), generators of `gpus_each` GPUs get the rest, and what is too little for one more generator goes back to
    the learner as far as that makes a larger power of two: 8 is 4 + 4, 12 is 8 + 4, 3 is 2 + 1.

    Args:
        n_gpus: at least 2, because learner and generators do not share one.
        count: generators, where that is decided already; the learner then gets the rest.
        ranks: learner ranks, where that is decided already; the generators then get the rest.
    Returns:
        Generators and learner ranks. Together they use at most `n_gpus`, unless both were given.
    Raises:
        ConfigError: one side would get nothing.
    """
    if n_gpus < 2:
        raise ConfigError(
            f"--n-gpus {n_gpus} is too few: learner and generators do not share a GPU, so give at least 2, or 0 for CPU"
        )
    if ranks is None:
        rest = n_gpus - _power_of_two(int(n_gpus * _LEARNER_SHARE))
        wanted = max(1, rest // gpus_each) if count is None else count
        ranks = _power_of_two(n_gpus - wanted * gpus_each)
    if count is None:
        count = (n_gpus - ranks) // gpus_each
    if count < 1 or ranks < 1:
        raise ConfigError(
            f"--n-gpus {n_gpus} cannot hold {max(count, 1)} x {gpus_each} GPUs of generators and {max(ranks, 1)} "
            "learner ranks; give more GPUs, or lower generators.gpus_each, generators.count or learner.ranks"
        )
    return count, ranks


def _power_of_two(at_most: int) -> int:
    """The largest power of two that is not above `at_most`; 0 for none."""
    return 1 << (at_most.bit_length() - 1) if at_most > 0 else 0
