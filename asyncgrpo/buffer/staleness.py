"""When a batch may be taken without letting any group grow older than `max_lag`: the bound, and the proof that it holds.

A group leased at version u may be trained at version u + max_lag at the latest: that is its *deadline*. At most
`(max_lag + 1) * P` groups are under way (admission), and each step trains P of them. A batch may be taken at version v
only if what remains, ready or not, can still meet its deadlines at P groups a step:

    for every k >= 0:   #{remaining groups with deadline <= v + k}  <=  k * P

This is earliest-deadline-first scheduling, and it loses nothing. Let D(k) be that count before the take. Admission
gives D(max_lag) <= (max_lag + 1) P; if D(k) <= (k + 1) P for all k at v, and the batch is feasible, then the same holds
at v + 1. And once every group is ready, taking the P oldest is always feasible. So the learner waits only when going on
would break a promise, no group is dropped for its age, and long answers are not filtered away.

A group that leaves untrained (dropped, or filtered for equal rewards) only lowers D; what is leased in its place at v
has the deadline v + max_lag, the last there is, and the slots bound those. So a refill endangers nobody's deadline.
"""

from collections.abc import Iterable


def lag_is_kept(remaining: Iterable[int], version: int, max_lag: int, groups_per_step: int) -> bool:
    """Whether the groups that a take at `version` leaves behind can all be trained in time.

    Args:
        remaining: for each group left, under way or ready, the oldest weight version in it (or that it was leased at).
        version: the learner's weight version, optimizer steps.
        max_lag: the bound, optimizer steps.
        groups_per_step: P.
    """
    slack = sorted(oldest + max_lag - version for oldest in remaining)
    return all(position < max(0, k) * groups_per_step for position, k in enumerate(slack))
