"""One schedule, and the report of its failure."""

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
