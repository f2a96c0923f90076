"""A whole run on three nodes: a learner rank on each of two, and the generators on one that is lost.

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
    """Ray on three nodes, of which the test loses the third."""
    made = Cluster(folder, RAY)
    try:
        for number in (1, 2, 3):
            made.add(number)
        token = folder / ".ray" / "auth_token"
        token.parent.mkdir()
        token.write_text(secrets.token_hex(32))
        for number, resources in enumerate(('{"rank": 1}', '{"rank": 1}', '{"generator": 4}'), 1):
            made.start_ray(number, resources)
            made.wait_for_ray(number)
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
APART = ["learner.ray_resources={rank: 1}", "generators.ray_resources={generator: 1}"]
SOON = ["run.checkpoint_every=6", "weights.timeout_s=4", "cluster.silent_timeout_s=8"]
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
    """The processes of all nodes are found and scraped from the first one."""
    scraped = cluster.run(1, sys.executable, "-c", SCRAPE, cwd=work)
    expected = {cluster.address(node): [(0, 401), (1, 200)] for node in (1, 2, 3)}
    assert scraped.stdout.strip() == str(expected), scraped.stdout + scraped.stderr


def test_ranks_on_two_nodes_train_and_publish_together_and_survive_the_node_of_all_generators(
    cluster: Cluster, work: Path
):
    """No node can map the memory of another, and the name of each leads to its own loopback. The third node is lost at a
    third of the steps, and a fourth one joins; what is left is for its generators to be there before the last publication."""
    run, output, steps = work / "run", work / "output.txt", 24
    demo = [*DEMO, *APART, f"cluster.ray_address={cluster.ray_address}"]
    loopback = cluster.run(1, *command(*demo), cwd=work)
    assert loopback.returncode == 1 and "set cluster.bind=0.0.0.0" in loopback.stdout + loopback.stderr
    several = command(*demo, *SOON, "--steps", str(steps), "cluster.bind=0.0.0.0")
    process = cluster.start(1, *several, output=output, cwd=work)
    wait_until(lambda: len(events(run, "step")) >= steps // 3 or process.poll() is not None, "third of the run", 200.0)
    assert process.poll() is None, output.read_text()
    assert_metrics_ask_for_the_token(cluster, work)
    cluster.lose(3)
    time.sleep(2.0)
    cluster.add(4)
    cluster.start_ray(4, '{"generator": 4}')
    assert process.wait(timeout=240) == 0, output.read_text()
    assert [event["step"] for event in events(run, "step")] == list(range(1, steps + 1))
    assert {event["actor"] for event in events(run, "restart")} == {"generator-0", "generator-1"}
    published = events(run, "sync")
    assert all(event["checksum"] == "ok" and not event.get("differing") for event in published)
    assert (published[-1]["version"], published[-1]["engines"]) == (f"1.{steps}", 2)
    assert "learner ranks 0, 1 send the weights" in (run / "logs" / "learner-0.log").read_text()
    sent = [event["sent_bytes"] for event in published[: steps // 3] if "sent_bytes" in event]
    assert all(sent), "no generator maps the memory of a part of the weights"
    audit = cluster.run(1, *command("audit", "run"), cwd=work)
    assert audit.returncode == 0, audit.stdout
