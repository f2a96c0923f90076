"""Many seeds, one after the other, or one seed with its last events.

python -m tests.simulation --seeds 2000 [--first 0]      schedules per second, and every violation
python -m tests.simulation --seed 17                     one seed, with what happened
"""

import argparse
import json
import sys
import time
from collections import Counter

from tests.simulation.checker import Violation
from tests.simulation.world import World


def failure_of(world: World) -> Exception | None:
    """Run it; what broke, if something did. Whatever escapes is a failure: the product may not raise either."""
    try:
        world.run()
    except Violation as violation:
        return violation
    except Exception as error:
        return error
    return None


def report(world: World, failure: Exception, num_events: int = 40) -> str:
    """What a person needs to find out why: the seed, what happened last, and how to see it again."""
    lines = [f"seed {world.seed}: {type(failure).__name__}: {failure}"]
    lines += [f"  enabled: {', '.join(sorted(world.faults.kinds))}; until {world.faults.until_s:.1f} s"]
    for at_s, what, details in list(world.events)[-num_events:]:
        lines.append(f"  {at_s:10.3f}  {what:10s} {' '.join(_short(d) for d in details)}")
    lines.append(f"  again: python -m tests.simulation --seed {world.seed}")
    return "\n".join(lines)


def _short(detail: object) -> str:
    if not hasattr(detail, "__struct_fields__"):
        return str(detail)
    shown = [getattr(detail, n) for n in ("lease_id", "lease_ids", "version", "step") if hasattr(detail, n)]
    if hasattr(detail, "lease"):
        shown.append(detail.lease.lease_id)
    return " ".join([type(detail).__name__, *map(str, shown)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one, with its events")
    parser.add_argument("--events", type=int, default=400, help="events to show of the one seed")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        world = World(arguments.seed)
        failure = failure_of(world)
        print(report(world, failure or RuntimeError("nothing failed"), arguments.events))
        return int(failure is not None)
    started, events, virtual_s, violations = time.perf_counter(), 0, 0.0, 0
    counts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    lags: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        world = World(seed)
        failure = failure_of(world)
        if failure is not None:
            violations += 1
            print(report(world, failure), file=sys.stderr, flush=True)
        events += world.loop.num_events
        virtual_s += world.now
        counts += world.checker.counts
        faults += world.fault_counts
        lags.update({f"{world.max_lag}: {lag}": n for lag, n in world.checker.lags.items()})
    seconds = time.perf_counter() - started
    result = {
        "schedules": arguments.seeds,
        "first": arguments.first,
        "violations": violations,
        "seconds": round(seconds, 1),
        "schedules_per_s": round(arguments.seeds / seconds, 1),
        "virtual_hours": round(virtual_s / 3600, 1),
        "events": events,
        "groups": dict(counts),
        "trained_by_max_lag_and_lag": dict(sorted(lags.items())),
        "faults": dict(faults),
    }
    print(json.dumps(result))
    return int(violations > 0)


if __name__ == "__main__":
    sys.exit(main())
