"""What a scrape of a process gets."""

from types import ModuleType

from prometheus_client import generate_latest

from asyncgrpo import metrics
from asyncgrpo.metrics import Role


def exposition(*roles: Role, module: ModuleType = metrics) -> str:
    """The export of these roles in Prometheus' text format."""
    return generate_latest(module.registry(*roles)).decode()


def names() -> set[str]:
    """Every time series name that a query may use, histogram suffixes included."""
    families = metrics.registry(*metrics.ROLES).collect()  # without samples where labels are users' own names
    return {name for family in families for name in ({s.name for s in family.samples} or {family.name})}
