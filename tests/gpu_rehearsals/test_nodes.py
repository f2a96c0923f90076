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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_namespaces]

RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_health_check_period_ms": "1000",  # Ray's own values find a lost node after 65 s
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/tmp"))  # short: Ray keeps sockets below it
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    made = Cluster(folder, RAY)
    try:
        made.add(1)
        made.add(2)
        yield made
    finally:
        made.close()


RANK = """
import sys
import torch
import torch.distributed as dist
from asyncgrpo.cluster.nodes import network_environment, set_environment
from asyncgrpo.cluster.wiring import joined_ranks
from asyncgrpo.weights.group import serve_store, visit_store

rank, leader, own, port = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
set_environment(network_environment(own))
if rank == 0:
    store = serve_store(leader, 30.0)
    open(port, "w").write(str(store.port))
else:
    store = visit_store(leader, int(open(port).read()), 30.0)
with joined_ranks(store, rank, 2, "cpu", 20.0):
    ones = torch.ones(1)
    dist.all_reduce(ones)
    print("sum", ones.item(), flush=True)
    dist.barrier()
"""


def test_ranks_on_two_nodes_meet_though_the_name_of_each_leads_to_loopback(cluster: Cluster, folder: Path):
    def start(rank: int) -> None:
        own, port = cluster.address(rank + 1), str(folder / "port")
        arguments = ["-c", RANK, str(rank), cluster.address(1), own, port]
        cluster.start(rank + 1, sys.executable, *arguments, output=folder / f"{rank}.txt")

    start(0)
    wait_until((folder / "port").exists, "store", 30.0)
    start(1)
    said = [folder / "0.txt", folder / "1.txt"]
    wait_until(lambda: all("sum 2.0" in path.read_text() for path in said), "sum over two nodes", 40.0)


REMOTE = ["learner.ray_resources={first: 1}", "generators.ray_resources={second: 1}", "cluster.bind=0.0.0.0"]
QUICK = ["run.eval_every=100", "run.checkpoint_every=6", "weights.timeout_s=4", "cluster.silent_timeout_s=8"]


def test_a_run_on_two_nodes_survives_the_one_with_all_generators(cluster: Cluster, folder: Path):
    token, work = folder / ".ray" / "auth_token", folder / "work"
    token.parent.mkdir()
    work.mkdir()
    token.write_text(secrets.token_hex(32))
    cluster.start_ray(1, '{"first": 4}')
    cluster.wait_for_ray(1)
    cluster.start_ray(2, '{"second": 4}')
    cluster.wait_for_ray(2)
    demo = ["demo", "--engine", "torch", "--max-lag", "1", "--out", "run", "--steps", "24"]
    demo += [f"cluster.ray_address={cluster.ray_address}", "learner.ranks=2", *QUICK]

    loopback = cluster.run(1, *command(*demo, *REMOTE[:2]), cwd=work)
    assert loopback.returncode == 1 and "set cluster.bind=0.0.0.0" in loopback.stdout + loopback.stderr

    run, output = work / "run", folder / "output.txt"
    process = cluster.start(1, *command(*demo, *REMOTE), output=output, cwd=work)
    wait_until(lambda: len(events(run, "step")) >= 8 or process.poll() is not None, "eighth step", 100.0)
    assert process.poll() is None, output.read_text()
    cluster.lose(2)
    time.sleep(2.0)
    cluster.add(3)
    cluster.start_ray(3, '{"second": 4}')
    assert process.wait(timeout=120) == 0, output.read_text()
    assert [event["step"] for event in events(run, "step")] == list(range(1, 25))
    assert {event["actor"] for event in events(run, "restart")} == {"generator-0", "generator-1"}
    assert all(event["checksum"] == "ok" for event in events(run, "sync")) and events(run, "sync")[-1]["engines"] == 2
    audit = cluster.run(1, *command("audit", "run"), cwd=work)
    assert audit.returncode == 0, audit.stdout
