"""A bound on lag that changes while groups are in flight: every order of events of a small model, in plain Python.

The model is of `asyncgrpo/buffer/admission.py` with a bound for each lease. All that matters of a group is how many
steps are left to train it, so prompts need no end: the states are finite all the same, and `reached` finds them all. At
any moment the bound becomes any of some. Groups arrive in any order, are filtered, or are given back.

Promised: no group is trained after its deadline, none is held beyond the slots of the largest bound, and the learner is
never stuck once all that is in flight has ended.
The wishes of just-in-time admission are any: fewer than a batch under way *must* be followed by a lease, everything else
*may*.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

P = 2
BOUNDS = (0, 1, 2)
MOST = P * (max(BOUNDS) + 1)
BEHIND = 2
"""Steps that a generator's weights may be behind the learner's."""


class Group(NamedTuple):
    """A group that is leased or ready, or a prompt that was given back and not begun again (`left` is None)."""

    left: int | None
    """Steps to its deadline."""
    bound: int = 0
    """The bound in force at its lease."""
    is_ready: bool = False


class State(NamedTuple):
    """What the buffer knows at one moment, counted from the learner's version."""

    bound: int
    is_training: bool
    groups: tuple[Group, ...]
    """Sorted: only their deadlines matter."""


GIVEN_BACK = Group(None)


class Rules(NamedTuple):
    """One way to do it."""

    may_begin: Callable[[State, int], bool]
    """Whether the prompt at this place may be leased."""
    take: Callable[[State], tuple[int, ...] | None]
    """Places of the next batch."""
    least: int = P
    """Groups under way below which admission must begin another one."""
    bounds: tuple[int, ...] = BOUNDS
    """That may come into force."""
    counts_behind: bool = True
    """Whether a generator whose weights are behind the learner's may begin fewer groups."""


# -- the rules, and mistakes in them -----------------------------------------------------------------------------------


def held(state: State) -> list[Group]:
    return [group for group in state.groups if group.left is not None]


def slots(state: State, place: int) -> bool:
    """The slots of today's bound."""
    return len(held(state)) + P * state.is_training < (state.bound + 1) * P


def slots_without_taken(state: State, place: int) -> bool:
    """Mistake: what is in training is forgotten."""
    return slots(state._replace(is_training=False), place)


def slots_of_the_largest(state: State, place: int) -> bool:
    """Mistake: the slots stay as they were when the bound shrinks."""
    return len(held(state)) + P * state.is_training < MOST


def earliest_deadline(state: State) -> tuple[int, ...] | None:
    return _feasible(state, lambda group: group.left)


def oldest_version(state: State) -> tuple[int, ...] | None:
    """Mistake: the oldest group first, whatever bound it was leased under; of two as old, any."""
    return _feasible(state, lambda group: (group.left - group.bound, -group.left))


def _feasible(state: State, urgency: Callable[[Group], object]) -> tuple[int, ...] | None:
    ready = sorted((urgency(g), place) for place, g in enumerate(state.groups) if g.is_ready)
    batch = tuple(place for _, place in ready[:P])
    left = sorted(g.left for place, g in enumerate(state.groups) if g.left is not None and place not in batch)
    is_kept = all(position < k * P for position, k in enumerate(left))
    return batch if len(batch) == P and is_kept else None


def without_rule(state: State) -> tuple[int, ...] | None:
    """Mistake: the earliest deadlines of those that are here, whatever they leave behind."""
    ready = sorted((g.left, place) for place, g in enumerate(state.groups) if g.is_ready)
    return tuple(place for _, place in ready[:P]) if len(ready) >= P else None


# -- every order of events ---------------------------------------------------------------------------------------------


def leases(state: State, rules: Rules) -> Iterator[tuple[State, bool]]:
    """The states that a lease leads to, and whether admission must grant it."""
    place = next((p for p, group in enumerate(state.groups) if group.left is None), len(state.groups))
    for behind in range(min(BEHIND, state.bound) + 1):  # of the generator; in the end one is not
        left = state.bound - behind
        if rules.may_begin(state._replace(bound=left) if rules.counts_behind else state, place):
            groups = (*state.groups[:place], Group(left, state.bound), *state.groups[place + 1 :])
            is_needed = len(held(state)) < rules.least
            yield state._replace(groups=groups), is_needed and not behind


def other_events(state: State, rules: Rules) -> Iterator[State]:
    """What else may happen: the bound changes, a group ends, a batch is taken, a step is made."""
    yield from (state._replace(bound=bound) for bound in rules.bounds if bound != state.bound)
    for place, group in enumerate(state.groups):
        before, after = state.groups[:place], state.groups[place + 1 :]
        if group.left is not None and not group.is_ready:
            for left in range(group.left, group.bound + 1 + state.is_training):  # the first token may be younger
                yield state._replace(groups=(*before, group._replace(left=left, is_ready=True), *after))
            yield state._replace(groups=(*before, GIVEN_BACK, *after))
            yield state._replace(groups=before + after)  # filtered
    if state.is_training:
        aged = tuple(g if g.left is None else g._replace(left=g.left - 1) for g in state.groups)
        yield state._replace(is_training=False, groups=aged)
    elif (batch := rules.take(state)) is not None:
        rest = tuple(group for place, group in enumerate(state.groups) if place not in batch)
        yield state._replace(is_training=True, groups=rest)


def verdict(state: State, rules: Rules) -> str | None:
    if any(group.left < 0 for group in held(state)):
        return "too old"
    if len(held(state)) + P * state.is_training > MOST:
        return "too many"
    is_over = not state.is_training and all(group.is_ready for group in held(state))
    if is_over and rules.take(state) is None and not any(must for _, must in leases(state, rules)):
        return "stuck"
    return None


def reached(rules: Rules) -> tuple[int, list[State]]:
    """The number of states that can be reached, and the way to the first wrong one, or an empty one."""
    first = [State(bound, False, ()) for bound in rules.bounds]
    came_from: dict[State, State | None] = dict.fromkeys(first)
    for state in (queue := list(first)):
        if verdict(state, rules) is not None:
            way = [state]
            while (before := came_from[way[-1]]) is not None:
                way.append(before)
            return len(came_from), way[::-1]
        for then in [*(then for then, _ in leases(state, rules)), *other_events(state, rules)]:
            then = then._replace(groups=tuple(sorted(then.groups, key=lambda g: (g.left is None, g))))
            if then not in came_from:
                came_from[then] = state
                queue.append(then)
    return len(came_from), []


SAFE = Rules(slots, earliest_deadline)


def test_in_no_order_of_events_is_a_group_too_old_or_the_learner_stuck():
    states, way = reached(SAFE)
    assert not way and states > 2_500


@pytest.mark.parametrize(
    ("rules", "wrong"),
    [
        pytest.param(Rules(slots_of_the_largest, earliest_deadline), "stuck", id="slots of a bound that was larger"),
        pytest.param(Rules(slots_without_taken, earliest_deadline), "too old", id="what is in training is forgotten"),
        pytest.param(SAFE._replace(counts_behind=False), "stuck", id="who is behind counts as current"),
        pytest.param(Rules(slots, oldest_version), "stuck", id="oldest version first"),
        pytest.param(Rules(slots, without_rule), "too old", id="taken whatever is left behind"),
        pytest.param(SAFE._replace(least=P - 1), "stuck", id="fewer than a batch under way"),
    ],
)
def test_a_planted_mistake_is_found(rules: Rules, wrong: str):
    _, way = reached(rules)
    assert way and verdict(way[-1], rules) == wrong
