"""Many seeds, one after the other, or one seed with its last events.

python -m tests.simulation --seeds 2000 [--first 0]     every violation, and their number
python -m tests.simulation --seed 17                    one seed, with what happened
"""

import argparse
import sys
from collections import Counter

from tests.simulation.schedules import failure_of, report
from tests.simulation.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one, with its events")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        world = World(arguments.seed)
        failure = failure_of(world)
        print(report(world, failure or RuntimeError("nothing failed"), num_events=400))
        return int(failure is not None)
    violations, faults = 0, Counter[str]()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        world = World(seed)
        if (failure := failure_of(world)) is not None:
            violations += 1
            print(report(world, failure), file=sys.stderr, flush=True)
        faults += world.fault_counts
    print(f"{arguments.seeds:,} schedules, {violations} violations, faults: {dict(faults)}")
    return int(violations > 0)


if __name__ == "__main__":
    sys.exit(main())
