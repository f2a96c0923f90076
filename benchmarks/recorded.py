"""Writes down what Prometheus recorded of a run, as the input of `promtool test rules`: rules can be tried on it later.

    python -m benchmarks.recorded DIR/tsdb --runs soak --every 30 > tests/ops/recorded_soak.yml

Only the series that `alerts.yml` asks for.
"""

import argparse
import itertools
import math
import re
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.prometheus import OURS, Prometheus

MISSING = "_"
GONE = "stale"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tsdb", type=Path)
    parser.add_argument("--runs", nargs="+", required=True)
    parser.add_argument("--every", type=int, default=30, help="seconds")
    options = parser.parse_args()
    with Prometheus(options.tsdb, options.tsdb) as prometheus:
        wait_for(prometheus)
        print(yaml.safe_dump(recorded(prometheus, options.runs, options.every), width=130), end="")


def wait_for(prometheus: Prometheus, within_s: float = 60.0) -> None:
    """Wait until it has read its data. Raises OSError if it does not."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            prometheus.ask("labels")
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def recorded(prometheus: Prometheus, runs: list[str], every_s: int) -> dict[str, Any]:
    """Minutes, `interval` and `input_series` of a test of rules, from the first sample of these runs to the last."""
    chosen = f'run=~"{"|".join(runs)}"'
    times = [
        float(at) for line in whole(prometheus, f"count by (run) (up{{{chosen}}})", 60) for at, _ in line["values"]
    ]
    since, until = min(times), max(times)
    series = []
    for name in asked_for():
        asked = {"start": since, "end": until, "step": every_s}
        shift = since if name.endswith("_timestamp_seconds") else 0.0  # the clock of a test begins at 0
        for line in prometheus.ask("query_range", query=f"{name}{{{chosen}}}", **asked)["result"]:
            values = [(at, float(value) - shift) for at, value in line["values"]]
            series.append({"series": as_text(line["metric"]), "values": in_words(values, since, until, every_s)})
    return {"minutes": int(until - since) // 60, "interval": f"{every_s}s", "input_series": series}


def whole(prometheus: Prometheus, query: str, step_s: int) -> list[dict[str, Any]]:
    """A query over all that Prometheus has of the last two weeks."""
    head = prometheus.ask("status/tsdb")["headStats"]
    since = max(head["minTime"] / 1000.0, time.time() - 14 * 86400.0)
    return prometheus.ask("query_range", query=query, start=since, end=head["maxTime"] / 1000.0, step=step_s)["result"]


def asked_for() -> list[str]:
    """The metrics that alerts and recording rules ask for, and `up`."""
    text = (OURS / "alerts.yml").read_text(encoding="utf-8")
    return ["up", *sorted(set(re.findall(r"asyncgrpo_[a-z0-9_]+", text)))]


def as_text(metric: dict[str, str]) -> str:
    labels = ",".join(f'{label}="{value}"' for label, value in sorted(metric.items()) if label != "__name__")
    return f"{metric['__name__']}{{{labels}}}"


def in_words(values: list[tuple[float, float]], since: float, until: float, every_s: int) -> str:
    """One word for each time: a number, or that there is none, or that the series is gone."""
    known = {round((float(at) - since) / every_s): value for at, value in values}
    words: list[str] = []
    for place in range(round((until - since) / every_s) + 1):
        value = known.get(place)
        if value is not None:
            words.append("NaN" if math.isnan(value) else f"{value:.6g}")
        else:
            words.append(GONE if words and words[-1] not in (MISSING, GONE) else MISSING)
    return " ".join(repeated(word, len(list(same))) for word, same in itertools.groupby(words))


def repeated(word: str, times: int) -> str:
    """So many of the same word, as `promtool` writes it."""
    if times == 1 or word == "NaN":
        return " ".join([word] * times)
    return f"{word}x{times if word == MISSING else times - 1}"


if __name__ == "__main__":
    main()
