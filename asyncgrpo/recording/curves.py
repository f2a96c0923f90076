"""Plots the curves of a run: reward, lag, log-prob gap between learner and engine, and time by activity."""

import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncgrpo.host import replace_file
from asyncgrpo.recording.events import Event
from asyncgrpo.recording.progress import lags_of, mean_lag, seconds_by_activity

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#2f6fb0", "#e08214", "#3a923a", "#c03d3e", "#9a9a9a"
_SUITES = (_ORANGE, _GREEN, "#8c6bb1", _RED, "#17808e", "#b8860b", _GREY, "#d6a5c9")
"""Colours of the curves of at most eight suites."""
_TIME_COLOURS = {
    "train": _GREEN,
    "wait_data": _ORANGE,
    "publish": _BLUE,
    "checkpoint": "#8c6bb1",
    "eval": "#d6a5c9",
    "other": "#c8c8c8",
}
_FIELDS = {
    "start": ("run", "sizes"),
    "step": ("step", "reward_mean", "lags", "max_lag", "logprob_gap_mean", "logprob_gap_max", "seconds"),
    "eval": ("step", "reward_mean", "suites"),
    "sync": ("version", "gap_max"),
}
"""Fields that are drawn, by the kind of their event."""

MOST_ROWS = 20_000
"""Events of a kind that are drawn, a dozen for each pixel: of a longer run every second one, every fourth and so on."""

Rows = Sequence[dict[str, Any]]


def plot(events: Iterable[Event], png_path: Path) -> Path:
    """Draw a run into `png_path` (1600 x 1000 pixels), which is replaced atomically. A run may have no steps yet."""
    # pyplot would keep global state and choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _rows(events)
    steps = rows["step"]
    figure = Figure(figsize=(12.8, 8), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)
    (reward, lag), (gap, time) = figure.subplots(2, 2, sharex=True)
    _reward(reward, steps, sorted(rows["eval"], key=itemgetter("step")))  # they are in the order of their ends
    _lag(lag, [step for step in steps if step["lags"]])
    _gap(gap, steps, rows["sync"])
    _time(time, steps)
    for axes in (reward, lag, gap, time):
        axes.grid(True, color="#e8e8e8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    for axes in (gap, time):
        axes.set_xlabel("optimizer step")
    if steps:
        reward.set_xlim(steps[0]["step"], max(steps[-1]["step"], steps[0]["step"] + 1))
    started = rows["start"][-1] if rows["start"] else {}
    title = started.get("run") or "run"
    figure.suptitle(f"{title}   {started['sizes']}" if started.get("sizes") else title, fontsize=12)

    image = io.BytesIO()
    figure.savefig(image, format="png")
    replace_file(png_path, image.getvalue())
    return png_path


def _rows(events: Iterable[Event]) -> dict[str, list[dict[str, Any]]]:
    """Return the fields that are drawn of at most `MOST_ROWS` events of each kind, at equal distances."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    seen, every = Counter[str](), defaultdict[str, int](lambda: 1)
    for event in events:
        kind = event["event"]
        if (fields := _FIELDS.get(kind)) is None:
            continue
        if seen[kind] % every[kind] == 0:
            if len(rows[kind]) == MOST_ROWS:
                del rows[kind][1::2]
                every[kind] *= 2
            rows[kind].append({name: event.get(name) for name in fields})
        seen[kind] += 1
    return rows


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold")


def _points(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Return the steps that have a field, and its values."""
    pairs = [(row["step"], row[name]) for row in rows if row[name] is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _reward(axes: Any, steps: Rows, evals: Rows) -> None:
    _title(axes, "Reward")
    x, y = _points(steps, "reward_mean")
    if x:
        axes.plot(x, y, color=_BLUE, linewidth=1.0, alpha=0.35, label="each step")
        smoothed = [fmean(y[max(0, i - 2) : i + 3]) for i in range(len(y))]
        axes.plot(x, smoothed, color=_BLUE, linewidth=2.0, label="mean of 5 steps")
    suites: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in evals:
        means = {name: suite["numbers"].get("reward", [None])[0] for name, suite in (row["suites"] or {}).items()}
        for name, mean in means.items() if len(means) > 1 else [("held-out", row["reward_mean"])]:
            if mean is not None:
                suites[name].append((row["step"], mean))
    for (name, points), colour in zip(suites.items(), _SUITES, strict=False):
        style = {"marker": "o", "markersize": 5, "linewidth": 1.2, "linestyle": "--"}
        axes.plot(*zip(*points, strict=True), color=colour, label=name, **style)
    if x or suites:
        axes.legend(loc="best", frameon=False, fontsize=9)


def _lag(axes: Any, steps: Rows) -> None:
    _title(axes, "Lag of trained groups (optimizer steps)")
    if not steps:
        return
    x, lags = [step["step"] for step in steps], [lags_of(step) for step in steps]
    most = [max((lag for lag, groups in of_step.items() if groups), default=0) for of_step in lags]
    axes.fill_between(x, 0, most, step="mid", color=_GREY, alpha=0.3, linewidth=0, label="oldest group")
    axes.plot(x, [mean_lag(of_step) for of_step in lags], color=_BLUE, linewidth=1.6, label="mean")
    top = max(1, *most) * 1.15
    bound_x, bound = _points(steps, "max_lag")
    if bound and min(bound) <= top:  # a bound far above all lags is not drawn
        style = {"linewidth": 1.2, "linestyle": "--", "drawstyle": "steps-mid"}
        axes.plot(bound_x, bound, color=_GREY, label="bound", **style)
    axes.legend(loc="best", frameon=False, fontsize=9)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, top)


def _gap(axes: Any, steps: Rows, syncs: Rows) -> None:
    _title(axes, "Log-prob gap, learner against engine (nats)")
    # Markers, because at a lag above 0 few steps have completions of the current version, often only the first.
    marked = {"linewidth": 1.4, "marker": "o", "markersize": 4}
    checked = [{"step": int(sync["version"].rpartition(".")[2]), "gap": sync["gap_max"]} for sync in syncs]
    for label, (x, y), colour, style in (
        ("largest, check sequences", _points(checked, "gap"), _GREY, {"linewidth": 1.2}),
        ("largest, completions of lag 0", _points(steps, "logprob_gap_max"), _RED, marked),
        ("mean of them", _points(steps, "logprob_gap_mean"), _BLUE, marked),
    ):
        if positive := [(step, gap) for step, gap in zip(x, y, strict=True) if gap > 0]:
            axes.plot(*zip(*positive, strict=True), color=colour, label=label, **style)
    if axes.lines:
        axes.set_yscale("log")
        axes.legend(loc="best", frameon=False, fontsize=9)


def _time(axes: Any, steps: Rows) -> None:
    _title(axes, "Time of a step by activity (seconds)")
    spent = [seconds_by_activity(step) for step in steps]
    layers = {name: [of_step[name] for of_step in spent] for name in _TIME_COLOURS}
    layers = {name: layer for name, layer in layers.items() if any(layer)}
    if not layers:
        return
    x = [step["step"] for step in steps]
    if len(x) == 1:
        x, layers = [x[0], x[0] + 1], {name: layer * 2 for name, layer in layers.items()}
    colours = [_TIME_COLOURS[name] for name in layers]
    labels = ["wait for data" if name == "wait_data" else name for name in layers]
    axes.stackplot(x, list(layers.values()), colors=colours, labels=labels, alpha=0.9, linewidth=0)
    axes.set_ylim(0, 1.25 * max(map(sum, zip(*layers.values(), strict=True))) or 1)
    axes.legend(loc="upper right", frameon=False, fontsize=9, ncols=3)
