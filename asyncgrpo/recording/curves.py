"""Plots the curves of a run: reward, lag, log-prob gap between learner and engine, and time by activity."""

import os
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncgrpo.recording.progress import Curve, Progress

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


def plot(progress: Progress, png_path: Path) -> Path:
    """Draw the run into `png_path` (1600 x 1000 pixels), which is replaced atomically. A run may have no steps yet."""
    # pyplot would keep global state and choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 8), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)
    (reward, lag), (gap, time) = figure.subplots(2, 2, sharex=True)
    _reward(reward, progress)
    _lag(lag, progress)
    _gap(gap, progress)
    _time(time, progress)
    for axes in (reward, lag, gap, time):
        axes.grid(True, color="#e8e8e8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    for axes in (gap, time):
        axes.set_xlabel("optimizer step")
    if progress.steps:
        curves = (*progress.seconds.values(), *progress.curves.values())
        first = min((curve.x[0] for curve in curves), default=progress.step)
        reward.set_xlim(first, max(progress.step, first + 1))
    title = progress.run or "run"
    figure.suptitle(f"{title}   {progress.sizes}" if progress.sizes else title, fontsize=12)

    temporary = png_path.with_name(f".{png_path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, png_path)
    return png_path


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold")


def _reward(axes: Any, progress: Progress) -> None:
    _title(axes, "Reward")
    curve = progress.rewards
    if curve.x:
        each = "each step" if curve.every == 1 else f"mean of {curve.every} steps"
        axes.plot(curve.x, curve.y, color=_BLUE, linewidth=1.0, alpha=0.35, label=each)
        smoothed = [fmean(curve.y[max(0, i - 2) : i + 3]) for i in range(len(curve.y))]
        axes.plot(curve.x, smoothed, color=_BLUE, linewidth=2.0, label=f"mean of {5 * curve.every} steps")
    for (name, points), colour in zip(progress.held_out.items(), _SUITES, strict=False):
        style = {"marker": "o", "markersize": 5, "linewidth": 1.2, "linestyle": "--"}
        axes.plot(points.x, points.y, color=colour, label=name, **style)
    if curve.x or progress.held_out:
        axes.legend(loc="best", frameon=False, fontsize=9)


def _lag(axes: Any, progress: Progress) -> None:
    _title(axes, "Lag of trained groups (optimizer steps)")
    mean, most, bound = (progress.curves.get(name, Curve()) for name in ("lag", "lag_max", "max_lag"))
    if mean.x:
        axes.fill_between(most.x, 0, most.y, step="mid", color=_GREY, alpha=0.3, linewidth=0, label="oldest group")
        axes.plot(mean.x, mean.y, color=_BLUE, linewidth=1.6, label="mean")
        top = max(1, *most.y) * 1.15
        if bound.y and min(bound.y) <= top:  # a bound far above all lags is not drawn
            style = {"linewidth": 1.2, "linestyle": "--", "drawstyle": "steps-mid"}
            axes.plot(bound.x, bound.y, color=_GREY, label="bound", **style)
        axes.legend(loc="best", frameon=False, fontsize=9)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, top)


def _gap(axes: Any, progress: Progress) -> None:
    _title(axes, "Log-prob gap, learner against engine (nats)")
    # Markers, because at a lag above 0 few steps have completions of the current version, often only the first.
    marked = {"linewidth": 1.4, "marker": "o", "markersize": 4}
    drawn = False
    for name, label, colour, style in (
        ("sync_gap", "largest, check sequences", _GREY, {"linewidth": 1.2}),
        ("logprob_gap_max", "largest, completions of lag 0", _RED, marked),
        ("logprob_gap_mean", "mean of them", _BLUE, marked),
    ):
        if positive := [(step, gap) for step, gap in progress.curves.get(name, ()) if gap > 0]:
            axes.plot(*zip(*positive, strict=True), color=colour, label=label, **style)
            drawn = True
    if drawn:
        axes.set_yscale("log")
        axes.legend(loc="best", frameon=False, fontsize=9)


def _time(axes: Any, progress: Progress) -> None:
    _title(axes, "Time of a step by activity (seconds)")
    names = [name for name, curve in progress.seconds.items() if any(curve.y)]
    if not names:
        return
    steps, layers = list(progress.seconds[names[0]].x), [list(progress.seconds[name].y) for name in names]
    colours = [_TIME_COLOURS[name] for name in names]
    labels = ["wait for data" if name == "wait_data" else name for name in names]
    if len(steps) == 1:
        steps, layers = [steps[0], steps[0] + 1], [layer * 2 for layer in layers]
    axes.stackplot(steps, layers, colors=colours, labels=labels, alpha=0.9, linewidth=0)
    axes.set_ylim(0, 1.25 * max(map(sum, zip(*layers, strict=True))) or 1)
    axes.legend(loc="upper right", frameon=False, fontsize=9, ncols=3)
