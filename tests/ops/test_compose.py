"""The compose file and what Grafana is provisioned with: no docker and no Grafana is at hand, so names and files are compared."""

import re
from pathlib import Path

import yaml

OPS = Path(__file__).parents[2] / "ops"
COMPOSE = yaml.safe_load((OPS / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
MADE_BY_RUNS = {"../runs/prometheus"}


def mounts(service: str) -> dict[str, str]:
    return {source: inside for source, inside, *_ in (text.split(":") for text in SERVICES[service]["volumes"])}


def test_every_folder_that_is_mounted_is_there():
    for name in SERVICES:
        for source in mounts(name):
            assert source in COMPOSE["volumes"] or source in MADE_BY_RUNS or (OPS / source).is_dir(), source


def test_prometheus_finds_its_rules_and_the_targets_of_runs():
    inside = mounts("prometheus")
    config = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert f"--config.file={inside['./prometheus']}/prometheus.yml" in SERVICES["prometheus"]["command"]
    assert all((OPS / "prometheus" / rules).is_file() for rules in config["rule_files"])
    (files,) = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    at_root = "/" + re.sub(r"^(\.\./)+", "", files)  # two folders up from /etc/prometheus
    assert at_root == f"{inside['../runs/prometheus']}/*.json"


def test_grafana_finds_prometheus_and_the_boards():
    inside = mounts("grafana")
    provisioned = OPS / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioned / "datasources" / "prometheus.yaml").read_text())["datasources"]
    address = source["url"].removeprefix("http://")
    assert f"--web.listen-address={address}" in SERVICES["prometheus"]["command"]
    (provider,) = yaml.safe_load((provisioned / "dashboards" / "boards.yaml").read_text())["providers"]
    assert provider["options"]["path"] == inside["./grafana/boards"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (OPS / "grafana" / "boards" / Path(home).name).is_file()


def test_nothing_is_open_to_other_machines():
    """Both share the network of the host, so each must be told to listen on loopback."""
    assert all(service["network_mode"] == "host" for service in SERVICES.values())
    assert SERVICES["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
