"""Two nodes: learner ranks on both, and a whole run whose generators are on a node that is lost.

On an existing Ray cluster that asks for a token, with CURVE, from another working directory than Ray's.
"""

import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu_rehearsals.cluster import Cluster, needs_namespaces
from tests.runs import command, events, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_namespaces]

RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_health_check_period_ms": "1000",  # Ray's own values find a lost node after 65 s
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/tmp"))  # short: Ray keeps sockets below it
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    """Ray on two nodes. The last test loses the second one."""
    made = Cluster(folder, RAY)
    try:
        made.add(1)
        made.add(2)
        token = folder / ".ray" / "auth_token"
        token.parent.mkdir()
        token.write_text(secrets.token_hex(32))
        made.start_ray(1, '{"first": 4, "each": 1}')
        made.wait_for_ray(1)
        made.start_ray(2, '{"second": 4, "each": 1}')
        made.wait_for_ray(2)
        yield made
    finally:
        made.close()


@pytest.fixture
def work(folder: Path, tmp_path: Path) -> Path:
    """Not the working directory of Ray's workers. The demo's paths are relative."""
    made = folder / tmp_path.name
    made.mkdir()
    return made


DEMO = ["demo", "--engine", "torch", "--max-lag", "1", "--out", "run", "learner.ranks=2", "run.eval_every=100"]
EACH = ["learner.ray_resources={each: 1}", "generators.ray_resources={second: 1}"]
APART = ["learner.ray_resources={first: 1}", "generators.ray_resources={second: 1}"]
SOON = ["run.checkpoint_every=6", "weights.timeout_s=4", "cluster.silent_timeout_s=8"]


def lose_the_generators(cluster: Cluster, work: Path, steps: int, *settings: str) -> None:
    """Run the demo, and lose the second node at a third of its steps; then a third one joins. It ends well."""
    run, output = work / "run", work / "output.txt"
    arguments = [*DEMO, *APART, "--steps", str(steps), f"cluster.ray_address={cluster.ray_address}", *settings]
    process = cluster.start(1, *command(*arguments, "cluster.bind=0.0.0.0"), output=output, cwd=work)
    at = steps // 3  # what is left is for the second generator to be back before the last publication
    wait_until(lambda: len(events(run, "step")) >= at or process.poll() is not None, f"step {at}", 200.0)
    assert process.poll() is None, output.read_text()
    assert_metrics_ask_for_the_token(cluster, work)
    cluster.lose(2)
    time.sleep(2.0)
    cluster.add(3)
    cluster.start_ray(3, '{"second": 4}')
    assert process.wait(timeout=240) == 0, output.read_text()
    assert [event["step"] for event in events(run, "step")] == list(range(1, steps + 1))
    assert {event["actor"] for event in events(run, "restart")} == {"generator-0", "generator-1"}
    assert all(event["checksum"] == "ok" for event in events(run, "sync")) and events(run, "sync")[-1]["engines"] == 2
    audit = cluster.run(1, *command("audit", "run"), cwd=work)
    assert audit.returncode == 0, audit.stdout


SCRAPE = """
import json, pathlib, sys, urllib.request

token, found = pathlib.Path("prometheus/token").read_text(), {}
for entry in json.loads(pathlib.Path("prometheus/run.json").read_text()):
    for headers in ({}, {"Authorization": f"Bearer {token}"}):
        request = urllib.request.Request(f"http://{entry['targets'][0]}/metrics", headers=headers)
        try:
            status = urllib.request.urlopen(request, timeout=10).status
        except urllib.error.HTTPError as error:
            status = error.code
        found.setdefault(entry["targets"][0].partition(":")[0], set()).add((len(headers), status))
print({address: sorted(replies) for address, replies in sorted(found.items())})
"""


def assert_metrics_ask_for_the_token(cluster: Cluster, work: Path) -> None:
    """The processes of both nodes are found and scraped from the first one."""
    scraped = cluster.run(1, sys.executable, "-c", SCRAPE, cwd=work)
    expected = {cluster.address(node): [(0, 401), (1, 200)] for node in (1, 2)}
    assert scraped.stdout.strip() == str(expected), scraped.stdout + scraped.stderr


def test_ranks_on_two_nodes_train_and_publish_together(cluster: Cluster, work: Path):
    """Neither can map the other's memory, and the name of each leads to its own loopback."""
    settings = [f"cluster.ray_address={cluster.ray_address}", "cluster.bind=0.0.0.0"]
    output = work / "output.txt"
    process = cluster.start(1, *command(*DEMO, *EACH, "--steps", "8", *settings), output=output, cwd=work)
    assert process.wait(timeout=150) == 0, output.read_text()
    run = work / "run"
    assert [event["step"] for event in events(run, "step")] == list(range(1, 9))
    published = events(run, "sync")
    assert {(event["checksum"], event["engines"]) for event in published} == {("ok", 2)}
    assert published[-1]["version"] == "1.8" and not any(event.get("differing") for event in published)
    said = (run / "logs" / "learner-0.log").read_text()
    assert "learner ranks 0, 1 send the weights" in said
    sent = [event["sent_bytes"] for event in published if "sent_bytes" in event]
    assert sent and min(sent) > 0, "no generator maps the memory of a part of the weights"
    audit = cluster.run(1, *command("audit", "run"), cwd=work)
    assert audit.returncode == 0, audit.stdout


def test_a_run_on_two_nodes_survives_the_one_with_all_generators(cluster: Cluster, work: Path):
    elsewhere = ["learner.ray_resources={second: 1}", "generators.ray_resources={second: 1}"]
    loopback = cluster.run(1, *command(*DEMO, *elsewhere, f"cluster.ray_address={cluster.ray_address}"), cwd=work)
    assert loopback.returncode == 1 and "set cluster.bind=0.0.0.0" in loopback.stdout + loopback.stderr
    lose_the_generators(cluster, work, 24, *SOON)
