"""Writes boards/*.json, the Grafana boards of asyncgrpo, from the list in boards.py.

    python ops/grafana/build.py            # after a change in boards.py
    python ops/grafana/build.py --check    # exit 1 if a file is not what the list says

Only the standard library is needed.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from boards import BOARDS
from panels import Board, Panel

FOLDER = Path(__file__).with_name("boards")
ALWAYS = -1e9
"""The threshold of what holds from the lowest value on."""
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


def in_run(expression: str) -> str:
    """The expression with every metric restricted to the runs chosen on the board."""

    def restrict(match: re.Match[str]) -> str:
        labels = ",".join(part for part in ('run=~"$run"', match["labels"]) if part)
        return f"{match['name']}{{{labels}}}"

    return re.sub(r"(?P<name>asyncgrpo[_:][\w:]+)(?:\{(?P<labels>[^}]*)\})?", restrict, expression)


def one_line_each(expression: str, legend: str) -> str:
    """The expression with one line for each legend, whichever processes have exported it, and without points that are NaN."""
    if not re.search(r"\b(sum|max|min|avg|count)\b", expression):
        labels = ", ".join(re.findall(r"{{(\w+)}}", legend))
        expression = f"max by ({labels}) ({expression})" if labels else f"max({expression})"
    may_be_nan = "/" in expression or "histogram_quantile" in expression or re.search("reward_mean|kv_use", expression)
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


def _high(panel: Panel) -> float | None:
    """What the axis of a graph reaches at least: its band, or a little where all lines may be 0."""
    bands = [value for value, colour in panel.thresholds if value > 0 and colour != "green"]
    if panel.axis[1] is not None or panel.axis[0] is None:
        return panel.axis[1]
    if bands:
        return round(1.25 * bands[0], 6)
    return {"percentunit": 0.1, "s": None, "bytes": None}.get(panel.unit, 1)


def _field_config(panel: Panel) -> dict[str, Any]:
    healthy = "transparent" if panel.kind == "timeseries" else "green"
    colours = [(value, healthy if colour == "green" else colour) for value, colour in panel.thresholds]
    if not colours or colours[0][0] != ALWAYS:
        colours.insert(0, (ALWAYS, healthy))
    steps = [{"color": colour, "value": None if value == ALWAYS else value} for value, colour in colours]
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
            "thresholdsStyle": {"mode": "area" if panel.thresholds else "off"},
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        if panel.stacked:
            defaults["min"] = 0
        if panel.top is not None:
            defaults["max"] = panel.top
        low, high = panel.axis[0], _high(panel)
        defaults["custom"] |= {"axisSoftMin": low} if low is not None else {}
        defaults["custom"] |= {"axisSoftMax": high} if high is not None else {}
    else:
        defaults["color"] = {"mode": "thresholds"}
    return {"defaults": defaults, "overrides": []}


def _options(panel: Panel) -> dict[str, Any]:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "stat":
        has_names = len(panel.queries) > 1 or "{{" in "".join(panel.queries)
        mode = "name" if panel.is_named else "value_and_name" if has_names else "value"
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
        "links": _links(panel),
        "datasource": DATASOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "targets": _targets(panel),
        "fieldConfig": _field_config(panel),
        "options": _options(panel),
    }


def _links(panel: Panel) -> list[dict[str, Any]]:
    """Where a click on the panel's title leads: the board that says more, of the same run and time, or an address."""
    if not panel.link:
        return []
    if panel.link.startswith("$"):
        return [{"title": "open", "url": panel.link, "targetBlank": True}]
    title = next(board.title for board in BOARDS if board.uid == panel.link)
    query = "${__url_time_range}&${run:queryparam}&${datasource:queryparam}"
    return [{"title": title, "url": f"/d/{panel.link}?{query}", "targetBlank": False}]


def _placed(board: Board) -> list[dict[str, Any]]:
    """The panels from left to right, on a new line where one does not fit, with a heading before each row."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in board.rows.items():
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


def _variable(name: str, label: str, query: str, **more: Any) -> dict[str, Any]:
    """A variable whose values are those that a label of a metric has."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": False,
        "includeAll": False,
        **more,
    }


def _board_links() -> list[dict[str, Any]]:
    """At the top of each board: all boards of the same run and time, and the run's own page."""
    boards = {
        "type": "dashboards",
        "title": "boards",
        "tags": ["asyncgrpo"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }
    return [
        boards,
        {"type": "link", "title": "the run's page", "url": "${page}", "icon": "external link", "targetBlank": True},
    ]


def as_json(board: Board) -> dict[str, Any]:
    """The board as Grafana reads it."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    return {
        "id": None,
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["asyncgrpo"],
        "schemaVersion": 41,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": []},
        "links": _board_links(),
        "templating": {
            "list": [
                source,
                _variable("run", "Run", "label_values(asyncgrpo_build_info, run)"),
                _variable("page", "Page", 'label_values(asyncgrpo_page_info{run=~"$run"}, url)', hide=2),
            ]
        },
        "panels": _placed(board),
    }


def texts() -> dict[Path, str]:
    """The text of every file, by its path."""
    return {
        FOLDER / f"{board.uid.removeprefix('asyncgrpo-')}.json": json.dumps(
            as_json(board), indent=1, ensure_ascii=False
        )
        + "\n"
        for board in BOARDS
    }


def wrong() -> list[Path]:
    """Files that are not what the list says: other text, not there, or of no board."""
    wanted = texts()
    found = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    return sorted(path for path in wanted | found if wanted.get(path) != found.get(path))


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(f"run build.py; not what boards.py says: {', '.join(map(str, stale))}" if (stale := wrong()) else 0)
    FOLDER.mkdir(exist_ok=True)
    for path in wrong():
        if path not in texts():
            path.unlink()
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
