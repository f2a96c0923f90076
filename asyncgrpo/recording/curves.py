"""The curves of a run as one picture: reward, lag, log-prob gap between learner and engine, and time by activity."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncgrpo.recording.events import Event
from asyncgrpo.recording.progress import Progress, mean_lag, seconds_by_activity

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#2f6fb0", "#e08214", "#3a923a", "#c03d3e", "#9a9a9a"
_SUITES = (_ORANGE, _GREEN, "#8c6bb1", _RED, "#17808e", "#b8860b", _GREY, "#d6a5c9")
"""Of the curves of at most eight suites."""
_TIME_COLOURS = {
    "train": _GREEN,
    "wait_data": _ORANGE,
    "publish": _BLUE,
    "checkpoint": "#8c6bb1",
    "eval": "#d6a5c9",
    "other": "#c8c8c8",
}
_TIME_NAMES = {"wait_data": "wait for data"}


def plot(events: Iterable[Event], png_path: Path) -> Path:
    """Draw the run into `png_path` (1600 x 1000 pixels), which is replaced atomically. A run without a step is fine."""
    # pyplot would keep global state and choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    progress = Progress.of(events)
    figure = Figure(figsize=(12.8, 8), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)
    (reward, lag), (gap, time) = figure.subplots(2, 2, sharex=True)
    steps = [step["step"] for step in progress.steps]
    _reward(reward, progress)
    _lag(lag, progress)
    _gap(gap, progress)
    _time(time, progress, steps)
    for axes in (reward, lag, gap, time):
        axes.grid(True, color="#e8e8e8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    for axes in (gap, time):
        axes.set_xlabel("optimizer step")
    if steps:
        reward.set_xlim(min(steps), max(steps) if len(steps) > 1 else steps[0] + 1)
    title = progress.run or "run"
    figure.suptitle(f"{title}   {progress.sizes}" if progress.sizes else title, fontsize=12)

    png_path = Path(png_path)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    temporary = png_path.with_name(f".{png_path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, png_path)
    return png_path


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold")


def _series(progress: Progress, field: str) -> tuple[list[int], list[float]]:
    pairs = [(step["step"], step[field]) for step in progress.steps if step.get(field) is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _smoothed(values: list[float], window: int) -> list[float]:
    """The mean of the `window` values around each point. At both ends there are fewer values."""
    half = window // 2
    parts = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _reward(axes: Any, progress: Progress) -> None:
    _title(axes, "Reward")
    x, y = _series(progress, "reward_mean")
    if x:
        axes.plot(x, y, color=_BLUE, linewidth=1.0, alpha=0.35, label="each step")
        axes.plot(x, _smoothed(y, 5), color=_BLUE, linewidth=2.0, label="mean of 5 steps")
    held_out = _held_out(progress)
    for (name, points), colour in zip(held_out.items(), _SUITES, strict=False):
        style = {"marker": "o", "markersize": 5, "linewidth": 1.2, "linestyle": "--"}
        axes.plot(*zip(*points, strict=True), color=colour, label=name, **style)
    if x or held_out:
        axes.legend(loc="best", frameon=False, fontsize=9)


def _held_out(progress: Progress) -> dict[str, list[tuple[int, float]]]:
    """Steps and mean rewards of each suite, by the name of its curve; of one suite alone it is `held-out`."""
    points: dict[str, list[tuple[int, float]]] = {}
    for event in progress.evals:
        means = {name: suite["numbers"].get("reward", [None])[0] for name, suite in (event.get("suites") or {}).items()}
        if len(means) < 2:
            means = {"held-out": event.get("reward_mean")}
        for name, mean in means.items():
            if mean is not None:
                points.setdefault(name, []).append((event["step"], mean))
    return points


def _lag(axes: Any, progress: Progress) -> None:
    _title(axes, "Lag of trained groups (optimizer steps)")
    x, mean, most = [], [], []
    for step in progress.steps:
        lags = {int(lag): groups for lag, groups in (step.get("lags") or {}).items() if groups}
        if lags:
            x.append(step["step"])
            mean.append(mean_lag(lags))
            most.append(max(lags))
    if x:
        axes.fill_between(x, 0, most, step="mid", color=_GREY, alpha=0.3, linewidth=0, label="oldest group")
        axes.plot(x, mean, color=_BLUE, linewidth=1.6, label="mean")
        top = max(1, *most) * 1.15
        bounds = _series(progress, "max_lag")
        if bounds[1] and min(bounds[1]) <= top:  # one far above all lags is not drawn
            axes.plot(*bounds, color=_GREY, linewidth=1.2, linestyle="--", drawstyle="steps-mid", label="bound")
        axes.legend(loc="best", frameon=False, fontsize=9)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, top)


def _gap(axes: Any, progress: Progress) -> None:
    _title(axes, "Log-prob gap, learner against engine (nats)")
    drawn = False
    checked = [(version, gap) for version, gap in progress.gaps if gap > 0]
    if checked:
        drawn = True
        axes.plot(*zip(*checked, strict=True), color=_GREY, linewidth=1.2, label="largest, check sequences")
    for field, label, colour in (
        ("logprob_gap_max", "largest, completions of lag 0", _RED),
        ("logprob_gap_mean", "mean of them", _BLUE),
    ):
        x, y = _series(progress, field)
        positive = [(a, b) for a, b in zip(x, y, strict=True) if b > 0]
        if positive:
            drawn = True
            # Points, because at a lag above 0 few steps have completions of the current version, often only the first.
            steps, gaps = zip(*positive, strict=True)
            axes.plot(steps, gaps, color=colour, linewidth=1.4, marker="o", markersize=4, label=label)
    if drawn:
        axes.set_yscale("log")
        axes.legend(loc="best", frameon=False, fontsize=9)


def _time(axes: Any, progress: Progress, steps: list[int]) -> None:
    _title(axes, "Where a step's time goes (seconds)")
    spent = [seconds_by_activity([step]) for step in progress.steps]
    names = [name for name in _TIME_COLOURS if any(name in seconds for seconds in spent)]
    names += sorted({name for seconds in spent for name in seconds} - set(names))
    if not steps or not names:
        return
    layers = [[seconds.get(name, 0.0) for seconds in spent] for name in names]
    colours = [_TIME_COLOURS.get(name, _GREY) for name in names]
    labels = [_TIME_NAMES.get(name, name) for name in names]
    if len(steps) == 1:
        steps, layers = [steps[0], steps[0] + 1], [layer * 2 for layer in layers]
    axes.stackplot(steps, layers, colors=colours, labels=labels, alpha=0.9, linewidth=0)
    axes.set_ylim(0, 1.25 * max(seconds.total() for seconds in spent) or 1)
    axes.legend(loc="upper right", frameon=False, fontsize=9, ncols=3)
