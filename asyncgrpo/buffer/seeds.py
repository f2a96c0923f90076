"""Where the chance of a group comes from."""


def group_seed(seed: int, order: int, attempt: int) -> int:
    """The sampling seed of a group: a fixed function of the run's seed and the group's place, below 2^48.

    splitmix64's finaliser, so that neighbouring groups get unrelated streams.
    """
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + order * 0xD1B54A32D192ED03 + attempt * 0x8CB92BA72F3D8DD7 + 1) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) >> 16
