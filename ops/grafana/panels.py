"""What a board is made of: boards, rows, panels, and expressions that many panels share. boards.py has the list.

Expressions name metrics of asyncgrpo/metrics.py, and recorded ones of prometheus/recording.yml, without the label of the run,
which build.py adds. Rates use `$__rate_interval`, so that a board works with any scrape interval.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Panel:
    """One panel. `unit` is one of Grafana's; `queries` maps a legend to an expression."""

    title: str
    shows: str
    do: str
    """What to do when it looks wrong."""
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False
    top: float | None = None
    """Upper end of the axis."""
    axis: tuple[float | None, float | None] = (0, None)
    """What the axis reaches at least, so that a line of zeros has a scale; None: build.py decides, or the data."""
    decimals: int | None = None
    thresholds: tuple[tuple[float, str], ...] = ()
    """Pairs of a value and the colour from it on. Below the first value it is green. A graph draws them as bands."""
    is_named: bool = False
    """A number whose legend is shown and not its value."""
    link: str = ""
    """The uid of the board that says more, or an address."""

    @property
    def description(self) -> str:
        """In Markdown, as Grafana shows it."""
        return f"{self.shows}\n\n**What to do:** {self.do}"


@dataclass(frozen=True)
class Board:
    """One board: rows of panels under headings, from left to right."""

    uid: str
    title: str
    description: str
    rows: dict[str, list[Panel]]


def number(title: str, shows: str, do: str, unit: str, queries: dict[str, str], **more: Any) -> Panel:
    """One of the numbers of a first row."""
    return Panel(title, shows, do, unit, queries, kind="stat", **{"width": 3, "height": 5, **more})


def quantiles(metric: str, *qs: float, by: str = "$__rate_interval") -> dict[str, str]:
    """Quantiles of a histogram over all processes: expressions by legend."""
    rate = f"sum by (le) (rate({metric}_bucket[{by}]))"
    return {f"p{q * 100:g}": f"histogram_quantile({q}, {rate})" for q in qs}


def share(metric: str, where: str, over: str = "$__rate_interval") -> str:
    """The share of a counter whose labels match `where`, 0 to 1."""
    return f"sum(rate({metric}{{{where}}}[{over}])) / sum(rate({metric}[{over}]))"


def shares(metric: str, label: str) -> dict[str, str]:
    """The share of a counter of each value of a label, 0 to 1."""
    rate = f"rate({metric}[$__rate_interval])"
    return {f"{{{{{label}}}}}": f"sum by ({label}) ({rate}) / ignoring ({label}) group_left sum({rate})"}


def lag(q: float, over: str) -> str:
    """A quantile of the lag. Up to 32 each lag has a bucket of its own, so rounding up makes it exact."""
    return f"ceil(histogram_quantile({q}, sum by (le) (increase(asyncgrpo_group_lag_steps_bucket[{over}]))))"


def of_step(gauge: str) -> str:
    """A gauge that the learner sets at every step. From a restart to the first step after it, it is 0 and means nothing."""
    return f"(max({gauge}) and max(asyncgrpo_learner_step) > 0)"


def between(low: float, high: float) -> tuple[tuple[float, str], ...]:
    """Thresholds of a number that is healthy between two."""
    return ((-1e9, "orange"), (low, "green"), (high, "orange"))
