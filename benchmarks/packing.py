"""How full the learner's rows are, and how long it takes to lay them out: 1,024 rollouts of reasoning length.

python -m benchmarks.packing --groups 128 --budgets 16384 32768

    rows of lengths     `batch.rows_for_ranks`: lengths in, which completions are in which row out; no tensor is made
    pack                `batch.pack` of whole groups: advantages, rows, and one rank's tensors

For rows, `fill` is tokens / (rows * tokens of the largest row), which says how long ranks wait for one another, and
`fill_of_budget` is tokens / (rows * budget). `forwarded` tokens are computed; `tokens` would be with every prompt
computed for each of its completions.
"""

import argparse
import itertools
from typing import Any

from asyncgrpo.learner.packing import PackedRow, StepBatch, pack, rows_for_ranks
from asyncgrpo.types import Group
from benchmarks.measuring import cpu_seconds, line, rounded, show
from benchmarks.rollouts import VERSION, Lengths, make_groups, reasoning_lengths

VOCABULARY = 151_936


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=128, help="of 8 completions")
    parser.add_argument("--budgets", nargs="+", type=int, default=[16384, 32768], help="tokens of a row")
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 8], help="numbers of ranks")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(argv)
    lengths = reasoning_lengths(arguments.groups, seed=arguments.seed)
    groups = make_groups(lengths, vocabulary=VOCABULARY, seed=arguments.seed)
    for budget, world, share in itertools.product(arguments.budgets, arguments.worlds, (True, False)):
        measure(lengths, groups, budget, world, share, runs=arguments.runs, seed=arguments.seed)


def measure(
    lengths: Lengths, groups: list[Group], budget: int, world: int, share: bool, *, runs: int, seed: int
) -> None:
    """Print the two lines of one setting."""

    def rows() -> list[PackedRow]:
        dealt = rows_for_ranks(lengths.prompts, lengths.completions, world=world, budget=budget, share_prompts=share)
        return [row for of_rank in dealt for row in of_rank]

    def tensors() -> StepBatch:
        return pack(groups, VERSION, rank=0, world=world, tokens_per_microbatch=budget, share_prompts=share)

    about: dict[str, Any] = {"rollouts": sum(map(len, lengths.completions)), "tokens": lengths.num_tokens}
    about |= {"budget": budget, "world": world, "share_prompts": share}
    filled = fills(rows(), lengths, budget, share)
    show(_in_ms("rows of lengths", cpu_seconds(rows, runs), seed, **filled, **about))
    show(_in_ms("pack", cpu_seconds(tensors, runs), seed, **about))


def fills(rows: list[PackedRow], lengths: Lengths, budget: int, share: bool) -> dict[str, Any]:
    """How many rows, and how full."""
    sizes = [_computed(row, lengths, share) for row in rows]
    total = sum(sizes)
    return {
        "rows": len(rows),
        "forwarded": total,
        "fill": rounded(total / (len(rows) * max(sizes))),
        "fill_of_budget": rounded(total / (len(rows) * budget)),
    }


def _computed(row: PackedRow, lengths: Lengths, share: bool) -> int:
    """Tokens of a row. Without shared prompts each piece is one completion with its own prompt."""
    assert share or all(len(piece.rollouts) == 1 for piece in row)
    return sum(lengths.prompts[group] + sum(lengths.completions[group][a] for a in chosen) for group, chosen in row)


def _in_ms(what: str, seconds: list[float], seed: int, **fields: Any) -> dict:
    return line(what, [1000 * s for s in seconds], "CPU ms", seed=seed, **fields)


if __name__ == "__main__":
    main()
