"""Configuration and alerts of Prometheus, judged by its own tool."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from asyncgrpo import metrics

OPS = Path(__file__).parents[2] / "ops"
FOLDER = OPS / "prometheus"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
NAMES = [rule["alert"] for rule in ALERTS]
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
    ],
)
def test_promtool_agrees(command):
    promtool(*command.split())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rule_asks_for_metrics_that_we_export(rule):
    asked = set(re.findall(r"asyncgrpo_\w+", rule["expr"]))
    assert asked <= metrics.names()
    recorded = set(re.findall(r"asyncgrpo:[\w:]+", rule["expr"]))
    assert recorded <= {other["record"] for other in RULES if "record" in other}


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_alert_says_how_bad_it_is_and_what_to_do(rule):
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["runbook"] == f"ops/README.md#{rule['alert'].lower()}"
    assert f"\n## {rule['alert']}\n" in (OPS / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("alert", NAMES)
def test_alert_has_a_case_that_fires_and_one_that_is_silent(alert):
    cases = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    judged = [case for test in cases for case in test["alert_rule_test"] if case["alertname"] == alert]
    assert any(case.get("exp_alerts") for case in judged)
    assert any(not case.get("exp_alerts") for case in judged)


BALANCE = "LearnerStarved|BoundTooTight|RewardsSlow"
"""Each advises something that makes the causes of the others worse, or costs money where another is the cause."""


def balance_alert(waits: float, scored: float, held: float, in_flight: float) -> str | None:
    """The one that should fire."""
    if waits <= 0.5:
        return None
    if scored > 0.5:
        return "RewardsSlow"
    return "BoundTooTight" if held > 0.9 and in_flight < 0.9 else "LearnerStarved"


def series_of(run: str, waits: float, scored: float, held: float, in_flight: float) -> dict[str, str]:
    """A run in which the learner waits, completions are scored, slots are held and places are filled to these shares. Its
    groups are at the bound: that is normal for an eager buffer, and may mean anything."""
    slots, places = 40, 20
    leased = in_flight * places
    rates = {
        "learner_seconds_total{activity='wait_data'}": 60 * waits,
        "learner_seconds_total{activity='forward_backward'}": 60 * (1 - waits),
        "completion_seconds_total{activity='reward'}": 600 * scored,
        "completion_seconds_total{activity='generate'}": 600 * (1 - scored),
        "group_lag_steps_bucket{le='3.0'}": 0,
        "group_lag_steps_bucket{le='4.0'}": 60,
        "group_lag_steps_bucket{le='+Inf'}": 60,
        "group_lag_steps_count": 60,
        "groups_at_bound_total": 60,
    }
    levels = {
        "buffer_groups{state='leased'}": leased,
        "buffer_groups{state='ready'}": max(0.0, held * slots - leased),
        "buffer_slots": slots,
        "generator_places": places,
        "max_lag_steps": 4,
    }
    values = {name: f"0+{rate}x40" for name, rate in rates.items()} | {name: f"{at}x40" for name, at in levels.items()}
    return {_of_run(f"asyncgrpo_{name}", run): text for name, text in values.items()}


def _of_run(name: str, run: str) -> str:
    metric, _, labels = name.rstrip("}").partition("{")
    return f"{metric}{{{', '.join(part for part in (labels, f'run={run!r}') if part)}}}"


@HAS_PROMTOOL
def test_no_two_alerts_that_advise_opposite_things_fire_at_once(tmp_path: Path):
    shares = itertools.product((0.1, 0.6, 0.95), (0.1, 0.7), (0.3, 1.0), (0.3, 0.95))
    runs = {f"run-{number}": share for number, share in enumerate(shares)}
    expected = [
        {"labels": f'{{alertname="{name}", run="{run}"}}', "value": 1}
        for run, share in runs.items()
        if (name := balance_alert(*share)) is not None
    ]
    assert len(runs) == 24 and len(expected) == 16
    firing = f"count by (alertname, run) (ALERTS{{alertname=~'{BALANCE}', alertstate='firing'}})"
    test = {
        "interval": "1m",
        "input_series": [
            {"series": series, "values": values}
            for run, share in runs.items()
            for series, values in series_of(run, *share).items()
        ],
        "promql_expr_test": [{"expr": firing, "eval_time": "35m", "exp_samples": expected}],
    }
    written = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "balance.yml").write_text(yaml.safe_dump(written))
    promtool("test", "rules", str(tmp_path / "balance.yml"))
