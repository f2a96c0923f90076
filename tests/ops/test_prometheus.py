"""Configuration and alerts of Prometheus, judged by its own tool."""

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from asyncgrpo.recording.health import CONDITIONS
from tests import scrape

OPS = Path(__file__).parents[2] / "ops"
FOLDER = OPS / "prometheus"
RULES = [
    rule
    for file in ("alerts.yml", "recording.yml")
    for group in yaml.safe_load((FOLDER / file).read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
NAMES = [rule["alert"] for rule in ALERTS]
RUNBOOKS = OPS.parent / "docs" / "runbooks"
OPPOSED = yaml.safe_load((FOLDER / "opposed.yml").read_text())
CASES = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
RECORDED = sorted(Path(__file__).parent.glob("recorded_*.yml"))
HAS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*command: str) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@HAS_PROMTOOL
@pytest.mark.parametrize(
    "command",
    [
        "check config prometheus.yml",
        "check config --syntax-only nodes.yml",  # a run makes the token
        "check rules alerts.yml",
        "test rules alerts_test.yml",
        "check rules recording.yml",
        "test rules recording_test.yml",
    ],
)
def test_promtool_agrees(command):
    promtool(*command.split())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rule_asks_for_metrics_that_we_export(rule):
    asked = set(re.findall(r"asyncgrpo_\w+", rule["expr"]))
    assert asked <= scrape.names()
    recorded = set(re.findall(r"asyncgrpo:[\w:]+", rule["expr"]))
    assert recorded <= {other["record"] for other in RULES if "record" in other}


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_alert_says_how_bad_it_is_and_where_its_runbook_is_and_has_a_case_that_fires_and_one_that_is_silent(rule):
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["runbook_url"] == f"{{{{ $externalLabels.docs }}}}docs/runbooks/{rule['alert']}.md"
    assert {"summary", "description"} <= set(rule["annotations"])
    judged = [case for test in CASES for case in test["alert_rule_test"] if case["alertname"] == rule["alert"]]
    assert {bool(case.get("exp_alerts")) for case in judged} == {True, False}


SAME = {
    "TargetDown": "== 0",  # a target that cannot be scraped
    "RunPaused": "> 0",  # for an hour
    "RewardsPaused": "> 0",
    "WeightSyncFailing": "> 0",
    "WeightsDiffer": "> asyncgrpo_sync_gap_limit",
}
"""Conditions that Prometheus measures in other units."""


@pytest.mark.parametrize("condition", [c for c in CONDITIONS if not c.page], ids=lambda condition: condition.name)
def test_alert_has_the_limit_of_the_health_table(condition):
    (rule,) = (rule for rule in ALERTS if rule["alert"] == condition.name)
    if condition.name in SAME:
        assert SAME[condition.name] in rule["expr"]
    else:  # `increase` extrapolates: 3 are 3.01, so a count is asked for with half a one more
        limits = [float(limit) for limit in re.findall(r"[<>] ([\d.e]+)", rule["expr"])]
        assert {condition.limit, condition.limit + 0.5} & set(limits)


@pytest.mark.parametrize("alert", NAMES)
def test_runbook_says_what_it_means_how_to_check_and_what_to_do(alert):
    page = (RUNBOOKS / f"{alert}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {alert}\n\n")
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == ["Check", "Remedy"]
    checks = page.partition("## Check\n\n```\n")[2].partition("\n```")[0].splitlines()
    assert len(checks) == 3, "three commands"
    assert re.search(r"^- ", page.partition("## Remedy\n\n")[2], re.MULTILINE)


def test_each_alert_has_a_runbook_and_the_panels_that_it_names_are_on_a_board():
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in (OPS / "grafana").rglob("*.json")]
    titles = {panel["title"] for board in boards for panel in board.get("panels", ())}
    pages = {page.stem: page.read_text(encoding="utf-8").replace("\n", " ") for page in RUNBOOKS.glob("*.md")}
    assert sorted(pages) == sorted(NAMES), "a runbook for each alert"
    named = {(stem, panel) for stem, text in pages.items() for panel in re.findall(r" \*([A-Z][^*]+)\*", text)}
    assert len(named) > 9 and {(stem, panel) for stem, panel in named if panel not in titles} == set()


def test_page_of_alerts_has_their_severity_and_time():
    page = (OPS.parent / "docs" / "alerts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\(runbooks/\1\.md\) \| (\w+) \| ([\w ]+) \|", page, re.MULTILINE)
    assert rows == [(rule["alert"], rule["labels"]["severity"], rule.get("for", "at once")) for rule in ALERTS]


def test_every_rule_of_the_boards_has_a_case():
    cases = yaml.safe_load((FOLDER / "recording_test.yml").read_text())["tests"]
    asked = {one["expr"] for test in cases for one in test["promql_expr_test"]}
    recorded = yaml.safe_load((FOLDER / "recording.yml").read_text())["groups"]
    names = {rule["record"] for group in recorded for rule in group["rules"]}
    assert {name for name in names if not name.endswith("_busy:rate1h")} == asked  # of those two the hint is made


BALANCE = "LearnerStarved|BoundTooTight|RewardsSlow"
"""Each advises something that makes the causes of the others worse, or costs money where another is the cause."""

Cause = tuple[float, float, float, float, float, str]
"""Shares: of its time that the learner waits, of the completions that are scored, of the slots that are held, of the places that
are filled, of the groups that are dropped; and what stands still."""
STANDSTILLS = {"": "", "pause": "paused", "disk": "journal_blocked", "judge": "rewards_paused"}
"""By what stands still, the metric that says so."""


def balance_alert(waits: float, scored: float, held: float, in_flight: float, dropped: float, stands: str):
    if waits <= 0.5 or stands:
        return None
    if scored > 0.5:
        return "RewardsSlow"
    if held > 0.9 and in_flight < 0.9:
        return "BoundTooTight"
    return "LearnerStarved" if dropped <= 0.2 else None


def series_of(run: str, cause: Cause) -> dict[str, str]:
    """A run with these shares, which makes no step."""
    waits, scored, held, in_flight, dropped, stands = cause
    slots, places = 40, 20
    leased = in_flight * places
    rates = {
        "learner_seconds_total{activity='wait_data'}": 60 * waits,
        "learner_seconds_total{activity='forward_backward'}": 60 * (1 - waits),
        "completion_seconds_total{activity='reward'}": 600 * scored,
        "completion_seconds_total{activity='generate'}": 600 * (1 - scored),
        "groups_total{outcome='leased'}": 100,
        "groups_total{outcome='trained'}": 100 * (1 - dropped),
        "groups_total{outcome='dropped_stale'}": 100 * dropped,
        "waiting_seconds{role='learner', rank='0', what='batch'}": 60,
    }
    levels = {
        "buffer_groups{state='leased'}": leased,
        "buffer_groups{state='ready'}": max(0.0, held * slots - leased),
        "buffer_slots": slots,
        "generator_places": places,
        "max_lag_steps": 4,
        "last_step_timestamp_seconds": 0,
        "checkpoint_last_success_timestamp_seconds": 0,
        # Of one process, so that nothing but their names tells them apart.
        **{f"{name}{{role='buffer'}}": float(name == STANDSTILLS[stands]) for name in STANDSTILLS.values() if name},
    }
    values = {name: f"0+{rate}x75" for name, rate in rates.items()} | {name: f"{at}x75" for name, at in levels.items()}
    up = {_of_run("up{job='asyncgrpo', role='driver'}", run): "1x75"}
    return {_of_run(f"asyncgrpo_{name}", run): text for name, text in values.items()} | up


def _of_run(name: str, run: str) -> str:
    metric, _, labels = name.rstrip("}").partition("{")
    return f"{metric}{{{', '.join(part for part in (labels, f'run={run!r}') if part)}}}"


FIRING = "ALERTS{alertname=~'%s', alertstate='firing'}"


def expects(expression: str, at: str, samples: Iterable[object] = ()) -> dict[str, object]:
    return {"expr": expression, "eval_time": at, "exp_samples": list(samples)}


def never_both(*times: str) -> list[dict[str, object]]:
    """That at these times no pair of opposed alerts fires."""
    pairs = [[f"count by (run) ({FIRING % pair[side]})" for side in ("one", "other")] for pair in OPPOSED]
    return [expects(" and ".join(pair), at) for pair in pairs for at in times]


def fires(alert: str, run: str) -> dict[str, object]:
    return {"labels": f'{{alertname="{alert}", run="{run}"}}', "value": 1}


def promtool_finds(test: dict[str, object], folder: Path, *, evaluated: str = "5m") -> None:
    written = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": evaluated, "tests": [test]}
    (folder / "test.yml").write_text(yaml.safe_dump(written))
    promtool("test", "rules", str(folder / "test.yml"))


@HAS_PROMTOOL
def test_no_two_alerts_that_advise_opposite_things_fire_at_once(tmp_path: Path):
    shares = itertools.product((0.1, 0.6), (0.1, 0.7), (0.3, 1.0), (0.3, 0.95), (0.0, 0.5), STANDSTILLS)
    runs: dict[str, Cause] = {f"run-{number}": cause for number, cause in enumerate(shares)}
    named = {run: name for run, cause in runs.items() if (name := balance_alert(*cause)) is not None}
    assert len(runs) == 128 and len(named) == 13
    for first in range(0, len(runs), 32):  # promtool's limit on samples
        some = list(runs)[first : first + 32]
        expected = [fires(named[run], run) for run in some if run in named]
        series = {name: values for run in some for name, values in series_of(run, runs[run]).items()}
        fired = expects(f"count by (alertname, run) ({FIRING % BALANCE})", "35m", expected)
        test = {"interval": "2m", "promql_expr_test": [fired, *never_both("35m", "130m")]}
        test["input_series"] = [{"series": name, "values": values} for name, values in series.items()]
        promtool_finds(test, tmp_path)


@HAS_PROMTOOL
@pytest.mark.parametrize("recording", RECORDED, ids=lambda path: path.stem)
def test_no_two_alerts_that_advise_opposite_things_fire_at_once_in_what_was_recorded(recording: Path, tmp_path: Path):
    """What Prometheus recorded of real runs (`python -m benchmarks.recorded` at 2657806), seen with the rules of today."""
    test = yaml.safe_load(recording.read_text())
    last, named = test.pop("minutes"), test.pop("fires")
    fired = f"group by (run, alertname) (max_over_time(ALERTS{{alertstate='firing'}}[{last}m]))"
    samples = [fires(name, run) for run in named for name in named[run]]
    moments = [f"{at}m" for at in range(1, last, 2)]
    test["promql_expr_test"] = [*never_both(*moments), expects(fired, f"{last}m", samples)]
    promtool_finds(test, tmp_path, evaluated="30s")
