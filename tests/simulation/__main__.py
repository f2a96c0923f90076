"""Many seeds, one after the other, or one seed with its last events.

python -m tests.simulation --seeds 2000 [--first 0] [--jobs 2]      schedules per second, and every violation
python -m tests.simulation --seed 17                                one seed, with what happened
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator

from tests.simulation.schedules import Tally, failure_of, report, tally_of
from tests.simulation.world import World

PIECE = 500
"""Seeds that a process runs before it says how they went."""


def batched(seeds: range, size: int) -> Iterator[range]:
    """In pieces of this size."""
    return (seeds[at : at + size] for at in range(0, len(seeds), size))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="only this one, with its events")
    parser.add_argument("--events", type=int, default=400, help="events to show of the one seed")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        world = World(arguments.seed)
        failure = failure_of(world)
        print(report(world, failure or RuntimeError("nothing failed"), arguments.events))
        return int(failure is not None)
    started, total = time.perf_counter(), Tally()
    pieces = batched(range(arguments.first, arguments.first + arguments.seeds), PIECE)
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for tally in pool.imap(tally_of, pieces):
            total += tally
            print(f"{total.schedules:,} schedules, {total.violations} violations", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - started
    result = {
        "schedules": total.schedules,
        "first": arguments.first,
        "violations": total.violations,
        "jobs": arguments.jobs,
        "seconds": round(seconds, 1),
        "schedules_per_s": round(total.schedules / seconds, 1),
        "virtual_hours": round(total.virtual_s / 3600, 1),
        "events": total.events,
        "groups": dict(total.counts),
        "trained_by_max_lag_and_lag": dict(sorted(total.lags.items())),
        "faults": dict(total.faults),
    }
    print(json.dumps(result))
    return int(total.violations > 0)


if __name__ == "__main__":
    sys.exit(main())
