"""One schedule, or many of them, and what there is to say of each."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass
class Tally:
    """What happened in some schedules."""

    schedules: int = 0
    violations: int = 0
    events: int = 0
    virtual_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    lags: Counter[str] = field(default_factory=Counter)
    """Groups trained, by max_lag and lag."""

    def __iadd__(self, other: "Tally") -> "Tally":
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


def tally_of(seeds: Sequence[int]) -> Tally:
    """Run these; violations go to the screen as they are found."""
    tally = Tally()
    for seed in seeds:
        world = World(seed)
        failure = failure_of(world)
        if failure is not None:
            print(report(world, failure), file=sys.stderr, flush=True)
        tally += Tally(
            1, failure is not None, world.loop.num_events, world.now, world.checker.counts, world.fault_counts,
            Counter({f"{world.max_lag}: {lag}": n for lag, n in world.checker.lags.items()}),
        )  # fmt: skip
    return tally
