"""Writes overview.json, the Grafana board of asyncgrpo, from the list in panels.py.

    python ops/grafana/build.py            # after a change in panels.py
    python ops/grafana/build.py --check    # exit 1 if overview.json is not what this file says

Only the standard library is needed.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from panels import ROWS, Panel

BOARD = Path(__file__).with_name("overview.json")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


def in_run(expression: str) -> str:
    """The expression with every metric restricted to the runs chosen on the board."""

    def restrict(match: re.Match[str]) -> str:
        labels = ",".join(part for part in ('run=~"$run"', match["labels"]) if part)
        return f"{match['name']}{{{labels}}}"

    return re.sub(r"(?P<name>asyncgrpo_\w+)(?:\{(?P<labels>[^}]*)\})?", restrict, expression)


def one_line_each(expression: str, legend: str) -> str:
    """The expression with one line for each legend, whichever processes have exported it, and without points that are NaN."""
    if not re.search(r"\b(sum|max|min|avg|count)\b", expression):
        labels = ", ".join(re.findall(r"{{(\w+)}}", legend))
        expression = f"max by ({labels}) ({expression})" if labels else f"max({expression})"
    may_be_nan = "/" in expression or "histogram_quantile" in expression or "reward_mean" in expression
    return f"({expression}) > -Inf" if may_be_nan else expression


def _targets(panel: Panel) -> list[dict[str, Any]]:
    # Numbers and bars show one value over the chosen time, graphs show all values.
    instant = panel.kind != "timeseries"
    targets = []
    for i, (legend, expression) in enumerate(panel.queries.items()):
        target = {
            "datasource": DATASOURCE,
            "refId": chr(ord("A") + i),
            "expr": in_run(one_line_each(expression, legend)),
            "legendFormat": legend,
            "instant": instant,
            "range": not instant,
        }
        if panel.kind == "bargauge":
            target["format"] = "heatmap"
        targets.append(target)
    return targets


def _field_config(panel: Panel) -> dict[str, Any]:
    steps = [{"color": "green", "value": None}, *({"color": c, "value": v} for v, c in panel.thresholds)]
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.kind == "timeseries":
        defaults["color"] = {"mode": "palette-classic"}
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 60 if panel.stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        if panel.stacked:
            defaults["min"] = 0
        if panel.top is not None:
            defaults["max"] = panel.top
    else:
        defaults["color"] = {"mode": "thresholds"}
    return {"defaults": defaults, "overrides": []}


def _options(panel: Panel) -> dict[str, Any]:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "stat":
        mode = "value_and_name" if len(panel.queries) > 1 else "value"
        return {
            "reduceOptions": reduce,
            "graphMode": "none",
            "colorMode": "value",
            "textMode": mode,
            "wideLayout": False,
        }
    if panel.kind == "bargauge":
        return {"reduceOptions": reduce, "displayMode": "basic", "orientation": "horizontal", "showUnfilled": True}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "targets": _targets(panel),
        "fieldConfig": _field_config(panel),
        "options": _options(panel),
    }


def _placed() -> list[dict[str, Any]]:
    """The panels from left to right, on a new line where one does not fit, with a heading before each row."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": heading,
                "collapsed": False,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
                "panels": [],
            }
        )
        y += 1
        x = height = 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return panels


def board() -> dict[str, Any]:
    """The whole board as JSON for Grafana."""
    return {
        "id": None,
        "uid": "asyncgrpo-overview",
        "title": "asyncgrpo",
        "description": "One asynchronous GRPO run: does it learn, how stale is its data, who waits for whom.",
        "tags": ["asyncgrpo"],
        "schemaVersion": 41,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                    "refresh": 1,
                },
                {
                    "name": "run",
                    "label": "Run",
                    "type": "query",
                    "datasource": DATASOURCE,
                    "query": {"query": "label_values(asyncgrpo_build_info, run)", "refId": "run"},
                    "refresh": 2,
                    "sort": 1,
                    "multi": False,
                    "includeAll": False,
                },
            ]
        },
        "panels": _placed(),
    }


def text() -> str:
    """The text of overview.json."""
    return json.dumps(board(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(
            0 if BOARD.read_text(encoding="utf-8") == text() else f"{BOARD} is not what build.py says; run build.py"
        )
    BOARD.write_text(text(), encoding="utf-8")
