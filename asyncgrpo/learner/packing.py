"""Which answers share a micro-batch: from lengths to rows of about equal size, few and full.

A row is one forward and backward of one rank. Answers to one prompt stay together as far as they can, because a row
computes their prompt once; where a row has room left that no whole group fits, a group is divided and its prompt
computed twice. Only lengths are looked at, so every rank finds the same rows without communication.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Some answers to one prompt, in one row."""

    group: int
    answers: tuple[int, ...]
    """Indices into the lengths of that group."""


PackedRow = list[Piece]

_SLACK = (1.0, 1.01, 1.03, 1.1)
"""Rows are first tried as small as equal shares, then a little larger."""

_CANDIDATES = 4
"""Pieces that are looked at to be divided, largest first."""

_Sized = tuple[int, int, tuple[int, ...]]
"""Tokens of a piece, its group, its answers; longest first."""


def rows_for_ranks(
    prompts: Sequence[int],
    answers: Sequence[Sequence[int]],
    *,
    world: int,
    budget: int,
    share_prompts: bool,
    pair_cost: float = 0.0,
) -> list[list[PackedRow]]:
    """Rows by rank, `[world][rows of a rank]`, equally many for each; a rank without work gets empty ones.

    There are as few rows as the budget allows, in a multiple of `world`. The k-th rows of all ranks, which wait for one
    another, are those that cost about the same.

    Args:
        prompts: [G] tokens of each group's prompt.
        answers: [G] of lists: tokens of each answer.
        world: number of ranks.
        budget: tokens of one row; only a single longer sequence may exceed it.
        share_prompts: a row computes the prompt of a group once; false: once for each answer.
        pair_cost: cost of one query-key pair of attention, in tokens.
    """
    pieces = _pieces(prompts, answers, share_prompts)
    if not pieces:
        return [[] for _ in range(world)]
    rows = _fill(prompts, answers, pieces, budget)
    wanted = -(-len(rows) // world) * world
    total = sum(size for size, _, _ in pieces)
    for slack in _SLACK:
        capacity = min(budget, int(slack * -(-total // wanted)))
        equal = _fill(prompts, answers, pieces, capacity)
        if len(equal) <= wanted:
            rows = equal
            break
    rows.sort(key=lambda row: -_cost(row, prompts, answers, pair_cost))
    rows += [[] for _ in range(wanted - len(rows))]
    return [rows[rank::world] for rank in range(world)]


def row_tokens(row: PackedRow, prompts: Sequence[int], answers: Sequence[Sequence[int]]) -> int:
    """Tokens that a row computes."""
    return sum(prompts[piece.group] + sum(answers[piece.group][a] for a in piece.answers) for piece in row)


def _pieces(prompts: Sequence[int], answers: Sequence[Sequence[int]], share_prompts: bool) -> list[_Sized]:
    """What can be laid into rows, smallest first."""
    pieces: list[_Sized] = []
    for group, lengths in enumerate(answers):
        order = sorted(range(len(lengths)), key=lambda a: -lengths[a])
        if share_prompts and order:
            pieces.append((prompts[group] + sum(lengths), group, tuple(order)))
        else:
            pieces += [(prompts[group] + lengths[a], group, (a,)) for a in order]
    return sorted(pieces)


def _fill(
    prompts: Sequence[int], answers: Sequence[Sequence[int]], pieces: list[_Sized], capacity: int
) -> list[PackedRow]:
    """Rows of at most `capacity` tokens: always the largest piece that fits, and at last a part of one that does not."""
    left = list(pieces)
    rows: list[PackedRow] = []
    while left:
        row: PackedRow = []
        room = capacity
        while left:
            fitting = bisect_left(left, (room + 1,))
            part = left.pop(fitting - 1) if fitting else _divide(left, prompts, answers, room, is_empty=not row)
            if part is None:
                break
            size, group, members = part
            row.append(Piece(group, members))
            room -= size
        rows.append(row)
    return rows


def _divide(
    left: list[_Sized], prompts: Sequence[int], answers: Sequence[Sequence[int]], room: int, *, is_empty: bool
) -> _Sized | None:
    """Take the answers that fit out of a piece that does not; none if there are no such answers.

    An empty row takes the longest answer of the largest piece whatever its size: it fits nowhere.
    """
    for index in range(len(left) - 1, max(-1, len(left) - 1 - _CANDIDATES), -1):
        size, group, members = left[index]
        lengths, free = answers[group], room - prompts[group]
        if free < lengths[members[-1]] and not is_empty:
            continue
        chosen = []
        for a in members:
            if lengths[a] <= free:
                chosen.append(a)
                free -= lengths[a]
        chosen = chosen or [members[0]]
        taken = sum(lengths[a] for a in chosen)
        del left[index]
        if len(chosen) < len(members):
            kept = tuple(a for a in members if a not in chosen)
            insort(left, (size - taken, group, kept))
        return prompts[group] + taken, group, tuple(chosen)
    return None


def _cost(row: PackedRow, prompts: Sequence[int], answers: Sequence[Sequence[int]], pair_cost: float) -> float:
    """Of a forward pass, in tokens."""
    cost = 0.0
    for group, members in row:
        prompt = prompts[group]
        cost += prompt * (1 + pair_cost * prompt / 2)
        for a in members:
            cost += answers[group][a] * (1 + pair_cost * (prompt + answers[group][a] / 2))
    return cost
