"""Configuration and alerts of Prometheus, judged by its own tool."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from asyncgrpo import metrics

OPS = Path(__file__).parents[2] / "ops"
FOLDER = OPS / "prometheus"
ALERTS = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in ALERTS]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
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
    done = subprocess.run(["promtool", *command.split()], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_alert_asks_for_metrics_that_we_export(rule):
    asked = set(re.findall(r"asyncgrpo_\w+", rule["expr"]))
    assert asked <= metrics.names()


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
