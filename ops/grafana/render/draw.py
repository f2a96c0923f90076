"""Draws boards as PNG files with Grafana's panel library, from what a Prometheus answers. README.md says how to use it."""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import check  # noqa: E402

WIDTH, ROW, POINTS, COLOURS = 1600, 34, 240, 255
PAGE = """<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="board.css">
<div id="root"></div><script>window.BOARD = {data};</script>
<script src="board.js"></script>"""


def lines_of(
    url: str, target: dict[str, Any], values: dict[str, str], start: float, end: float
) -> list[dict[str, Any]]:
    """The lines of a target: name, times and values; None where there is no finite value."""
    step = max(1, int((end - start) / POINTS))
    asked = {"query": check.fill_in(target["expr"], values), "start": start, "end": end, "step": step}
    if target["instant"]:
        asked |= {"start": end}
    found = []
    for series in check.ask(url, "query_range", **asked)["result"]:
        name = check.fill_in(re.sub(r"{{(\w+)}}", r"$\1", target["legendFormat"]), series["metric"])
        finite = {round(float(t)): float(v) if math.isfinite(float(v)) else None for t, v in series["values"]}
        times = list(range(min(finite), max(finite) + 1, step))
        found.append({"name": name, "times": times, "values": [finite.get(t) for t in times]})
    if target.get("format") == "heatmap":
        found = [line | {"values": [height]} for line, height in _of_its_own(found)]
    return found


def _of_its_own(cumulative: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Buckets without those below them, as Grafana shows them; without the empty ones at the end."""
    buckets = sorted(cumulative, key=lambda line: math.inf if line["name"] == "+Inf" else float(line["name"]))
    heights, below = [], 0.0
    for line in buckets:
        heights.append((line, line["values"][-1] - below))
        below = line["values"][-1]
    while len(heights) > 1 and heights[-1][1] < 0.5:
        heights.pop()
    return heights


def filled(board: dict[str, Any], url: str, values: dict[str, str], start: float, end: float) -> dict[str, Any]:
    """The board with the lines of every panel."""
    panels = []
    for panel in board["panels"]:
        lines = [line for target in panel.get("targets", []) for line in lines_of(url, target, values, start, end)]
        panels.append(panel | {"series": lines})
    return board | {"panels": panels}


def draw(board: dict[str, Any], out: Path, scratch: Path, start: float, end: float) -> None:
    """Have Chromium draw one board."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) * ROW + 60
    data = {"board": board, "from": start, "to": end, "width": WIDTH - 16, "height": height}
    page = scratch / "board.html"
    page.write_text(PAGE.replace("{data}", json.dumps(data)), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    command = ["chromium", *options, f"--window-size={WIDTH},{height}", f"--screenshot={out}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=180)
    Image.open(out).convert("RGB").quantize(COLOURS).save(out, optimize=True)


def bundle(modules: Path, scratch: Path) -> None:
    """Make board.js of board.jsx and the library."""
    loaders = [f"--loader:.{kind}=dataurl" for kind in ("svg", "png", "woff", "woff2", "ttf", "gif")]
    command = [
        str(modules / "node_modules" / ".bin" / "esbuild"),
        str(HERE / "board.jsx"),
        "--bundle",
        "--minify",
        "--jsx=automatic",
        "--define:global=window",
        '--define:process.env.NODE_ENV="production"',
        *loaders,
        f"--outfile={scratch / 'board.js'}",
    ]
    environment = {"NODE_PATH": str(modules / "node_modules"), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    subprocess.run(command, check=True, env=environment)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("url", help="of Prometheus, for example http://127.0.0.1:9090")
    parser.add_argument("boards", nargs="*", help="names, such as overview; default: all")
    parser.add_argument("--modules", type=Path, required=True, help="the folder in which npm install was called")
    parser.add_argument("--run", default=".+", help="regular expression of run names")
    parser.add_argument("--last", type=int, default=600, metavar="SECONDS")
    parser.add_argument("--end", type=float, default=None, metavar="UNIX_TIME")
    parser.add_argument("--rate", type=int, default=30, metavar="SECONDS", help="stands for $__rate_interval")
    parser.add_argument("--out", type=Path, default=Path("boards"))
    arguments = parser.parse_args()
    end = round(arguments.end or time.time())
    values = {"run": arguments.run, "__rate_interval": f"{arguments.rate}s", "__range": f"{arguments.last}s"}
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        bundle(arguments.modules.absolute(), Path(scratch))
        for file in sorted(check.BOARDS.glob("*.json")):
            if not arguments.boards or file.stem in arguments.boards:
                board = filled(json.loads(file.read_text("utf-8")), arguments.url, values, end - arguments.last, end)
                png = arguments.out.absolute() / f"{file.stem}.png"
                draw(board, png, Path(scratch), end - arguments.last, end)
                print(f"{png}: {png.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
