"""The files that start a run on several nodes, and those that start its monitoring, read as their programs read them."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from asyncgrpo.config.load import load_config
from benchmarks import memory_table
from tests.runs import wait_until

LAUNCH = Path(__file__).parents[2] / "ops" / "launch"
NEEDED = ["model.path=m", "data.train=t"]


def assert_is_a_run_on_several_nodes(command: str) -> None:
    """Every key is one of ours, and the processes reach each other."""
    program, serve, name, *settings = shlex.split(command)
    assert (program, serve) == ("asyncgrpo", "serve")
    cluster = load_config(name, [*NEEDED, *settings]).cluster
    assert cluster.ray_address is not None and cluster.bind == "0.0.0.0"


STUBS = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    "getent": "printf '127.0.1.1 STREAM node1\\n10.0.0.7 STREAM node1\\n'",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": 'echo "ray $RAY_AUTH_MODE $*" >> "$SAID"; exec /usr/bin/sleep 60',
    "python": "echo 2",
    "sleep": "",
    "asyncgrpo": """
trap 'echo drained >> "$SAID"; exit ${CODE:-0}' TERM
echo "asyncgrpo $*" >> "$SAID"
while :; do /usr/bin/sleep 0.1; done""",
}


@pytest.fixture
def job(tmp_path: Path):
    """The script of a job of two nodes, in which nothing is real but the shell, and the file of what its programs said."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    folder = str(tmp_path)
    settings = {"BIN": folder, "HOME": folder, "SAID": f"{folder}/said", "SLURM_JOB_NODELIST": "n[1-2]", "CODE": "3"}
    environment = settings | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", str(LAUNCH / "slurm.sh"), "cluster_64gpu", "run.out=/shared/run"]
    process = subprocess.Popen(script, env=environment, start_new_session=True)
    yield process, tmp_path / "said"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_slurm_job_starts_ray_on_every_node_and_the_end_of_its_time_drains_the_run(job):
    process, said = job
    wait_until(lambda: said.exists() and "asyncgrpo" in said.read_text(), "start of the driver", 20.0)
    wait_until(lambda: said.read_text().count("ray token") == 2, "Ray on two nodes", 20.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 3
    lines = said.read_text().splitlines()
    assert lines[-1] == "drained"
    (driver,) = [line for line in lines if line.startswith("asyncgrpo")]
    assert_is_a_run_on_several_nodes(driver)
    assert "cluster.ray_address=10.0.0.7:6379" in driver, "not the loopback address of the node's name"
    first, other = sorted((line for line in lines if line.startswith("ray")), key=lambda line: "--head" not in line)
    assert first == "ray token start --block --head --node-ip-address=10.0.0.7 --port=6379 --include-dashboard=false"
    assert other == "ray token start --block --address=10.0.0.7:6379"


def test_ray_takes_the_file_of_its_launcher():
    text = (LAUNCH / "ray-cluster.yaml").read_text(encoding="utf-8")
    check = "import sys, yaml; from ray.autoscaler._private.util import prepare_config, validate_config; "
    check += "validate_config(prepare_config(yaml.safe_load(sys.stdin)))"
    done = subprocess.run([sys.executable, "-c", check], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]
    read = yaml.safe_load(text)
    for command in (read["head_start_ray_commands"][-1], read["worker_start_ray_commands"][-1]):
        assert "RAY_AUTH_MODE=token" in command
    (typed,) = re.findall(r"'RAY_AUTH_MODE=token (asyncgrpo serve .*?)'", text.replace("\n#", " "), re.DOTALL)
    assert_is_a_run_on_several_nodes(typed)


def test_the_manifest_is_a_ray_job_whose_pods_only_the_run_reaches():
    job, policy = yaml.safe_load_all((LAUNCH / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert_is_a_run_on_several_nodes(job["spec"]["entrypoint"])
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"] for group in groups]
    chosen = policy["spec"]["podSelector"]["matchLabels"].items()
    assert [pod for pod in pods if not chosen <= pod["metadata"]["labels"].items()] == []
    assert policy["spec"]["policyTypes"] == ["Ingress"] and {} not in policy["spec"]["ingress"]
    gpus = 0
    for group, pod in zip(groups, pods, strict=True):
        (container,) = pod["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert set(mounts.values()) == set(volumes) and volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        gpus += group.get("replicas", 1) * int(container["resources"]["limits"]["nvidia.com/gpu"])
    config = load_config("cluster_64gpu", shlex.split(job["spec"]["entrypoint"])[3:])
    assert config.learner.ranks + config.generators.count * config.generators.gpus_each == gpus


def test_the_pods_have_the_memory_that_the_run_needs():
    manifest = (LAUNCH / "kuberay.yaml").read_text(encoding="utf-8")
    assert memory_table.sized(manifest) == manifest, "python -m benchmarks.memory_table --write"
    smaller = memory_table.sized(manifest.replace("Qwen3-32B", "Qwen3-8B"))
    sizes = [[int(gib) for gib in re.findall(r"(?:memory|sizeLimit): (\d+)Gi", text)] for text in (smaller, manifest)]
    assert all(more > some for some, more in zip(*sizes, strict=True))


OPS = Path(__file__).parents[2] / "ops"
COMPOSE = yaml.safe_load((OPS / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]


def mounts(service: str) -> dict[str, str]:
    return {source: inside for source, inside, *_ in (text.split(":") for text in SERVICES[service]["volumes"])}


def test_every_folder_that_is_mounted_is_there_and_nothing_is_open_to_other_machines():
    """Both share the network of the host, so each must be told to listen on loopback."""
    for name, service in SERVICES.items():
        assert service["network_mode"] == "host"
        made = {*COMPOSE["volumes"], "../runs/prometheus"}  # by Docker, and by runs
        assert [source for source in mounts(name) if source not in made and not (OPS / source).is_dir()] == []
    assert SERVICES["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


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
