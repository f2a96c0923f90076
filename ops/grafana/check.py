"""Runs every query of all boards against a Prometheus that has scraped a run.

    python ops/grafana/check.py http://127.0.0.1:9090 --run demo --last 300

Exits with 1 and lists the panels that would be empty, or could not be read: Prometheus refuses their query, has no finite
point in the time asked for, or has several lines of one name. Only the standard library is needed.
"""

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

BOARDS = Path(__file__).with_name("boards")


def ask(url: str, path: str, **params: Any) -> Any:
    """The `data` of a reply of Prometheus' API. Raises RuntimeError with its message when it refuses."""
    query = urllib.parse.urlencode(params, doseq=True)
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/v1/{path}?{query}", timeout=30) as reply:
            return json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace").strip()  # plain while Prometheus starts
        raise RuntimeError((json.loads(text).get("error") if text.startswith("{") else text) or str(error)) from error
    except (ValueError, KeyError) as error:
        raise RuntimeError("this is not Prometheus") from error


def queries(folder: Path) -> list[tuple[str, str, str]]:
    """Every target of the boards in a folder, as (board and panel, legend, expression)."""
    boards = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    return [
        (f"{board['title']} / {panel['title']}", target["legendFormat"], target["expr"])
        for board in boards
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]


def fill_in(text: str, values: dict[str, str]) -> str:
    """The text with each `$name` replaced by its value; without one, by nothing."""
    return re.sub(r"\$(\w+)", lambda match: values.get(match[1], ""), text)


def has_finite_point(result: list[dict[str, Any]]) -> bool:
    """Whether the result of a range query has a finite value."""
    return any(math.isfinite(float(value)) for series in result for _, value in series["values"])


def twin(result: list[dict[str, Any]], legend: str) -> str | None:
    """The name that several lines of the result have; None if each has its own."""
    names = [fill_in(re.sub(r"{{(\w+)}}", r"$\1", legend), line["metric"]) for line in result]
    return next((name for name in names if names.count(name) > 1), None)


def problem_of(url: str, expression: str, legend: str, last_s: int, known: set[str]) -> str | None:
    """Why this query shows nothing, or nothing that can be read; or None."""
    end = time.time()
    try:
        result = ask(url, "query_range", query=expression, start=end - last_s, end=end, step=max(1, last_s // 120))[
            "result"
        ]
    except RuntimeError as error:
        return f"refused: {error}"
    if (name := twin(result, legend)) is not None:
        return f"several lines named {name!r}"
    if has_finite_point(result):
        return None
    unknown = sorted(set(re.findall(r"asyncgrpo[_:][\w:]+", expression)) - known)
    return f"empty: Prometheus has never seen {', '.join(unknown)}" if unknown else "empty: no finite point"


def check(url: str, run: str = ".+", last_s: int = 600, rate_s: int = 30, may_be_empty: str = "^$") -> list[str]:
    """One line for each query that shows nothing, or several lines of one name.

    Args:
        run: regular expression of the label `run`.
        last_s: how far back to look, seconds.
        rate_s: stands for `$__rate_interval`; at least four scrape intervals.
        may_be_empty: regular expression of expressions that may be empty, such as evaluation in a run without one.
    """
    known = set(ask(url, "label/__name__/values"))
    of_grafana = {"run": run, "__rate_interval": f"{rate_s}s", "__range": f"{last_s}s"}
    found = []
    for title, legend, expression in queries(BOARDS):
        problem = problem_of(url, fill_in(expression, of_grafana), legend, last_s, known)
        if problem and not (problem.startswith("empty") and re.search(may_be_empty, expression)):
            found.append(f"{title} / {legend}: {problem}\n    {expression}")
    return found


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("url", help="of Prometheus, for example http://127.0.0.1:9090")
    parser.add_argument("--run", default=".+", help="regular expression of run names; default: every run")
    parser.add_argument("--last", type=int, default=600, metavar="SECONDS", help="how far back to look")
    parser.add_argument("--rate", type=int, default=30, metavar="SECONDS", help="stands for $__rate_interval")
    parser.add_argument("--may-be-empty", default="^$", metavar="REGEX", help="of expressions, e.g. eval_reward_mean")
    arguments = parser.parse_args()
    try:
        found = check(arguments.url, arguments.run, arguments.last, arguments.rate, arguments.may_be_empty)
    except (OSError, RuntimeError) as error:
        print(f"{arguments.url}: {error}", file=sys.stderr)
        return 1
    for line in found:
        print(line)
    total = len(queries(BOARDS))
    print(f"{total - len(found)} of {total} queries show something")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
