"""A Ray cluster of several nodes on one machine: a network namespace each, joined by a bridge. Needs root and `ip`.

Processes of two nodes share neither loopback nor addresses nor `/dev/shm`, as on two machines. They share the disk, and the
kernel.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.runs import REPOSITORY, wait_until

PORT = 6399
_COUNT = """
import sys
from ray._raylet import GcsClient

print(sum(node.state == 0 for node in GcsClient(address=sys.argv[1]).get_all_node_info().values()))
"""
BIN = Path(sys.executable).parent


def why_not() -> str:
    """Why this machine cannot have joined network namespaces; empty if it can."""
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    name = f"agt{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "hub", "type", "bridge")
        ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other")
    except subprocess.CalledProcessError as error:
        return f"network namespaces need root and a kernel with bridges: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


WHY_NOT = why_not()
needs_namespaces = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


class Cluster:
    """Nodes by number, from 1. `close` ends all that runs in them."""

    def __init__(self, folder: Path, environment: Mapping[str, str] = {}) -> None:
        """
        Args:
            folder: the home of Ray and of every process; a short path, because Ray keeps sockets below it.
            environment: of every process in every node.
        """
        self._folder = folder
        self._environment = dict(environment)
        self._name = f"ag{os.getpid()}"
        self._there: dict[int, subprocess.Popen] = {}  # a process that holds its namespaces
        self._running: list[subprocess.Popen[str]] = []
        ip("netns", "add", self._hub)
        ip("-n", self._hub, "link", "add", "hub", "type", "bridge")
        ip("-n", self._hub, "link", "set", "hub", "up")

    @property
    def _hub(self) -> str:
        return f"{self._name}hub"

    def _node(self, number: int) -> str:
        return f"{self._name}n{number}"

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number}"

    @property
    def ray_address(self) -> str:
        return f"{self.address(1)}:{PORT}"

    def add(self, number: int) -> None:
        """Make a node: its own loopback, and one interface that the other nodes reach."""
        node, plug = self._node(number), f"p{number}"
        ip("netns", "add", node)
        ip("-n", self._hub, "link", "add", plug, "type", "veth", "peer", "name", "net0", "netns", node)
        ip("-n", self._hub, "link", "set", plug, "master", "hub", "up")
        ip("-n", node, "addr", "add", f"{self.address(number)}/24", "dev", "net0")
        ip("-n", node, "link", "set", "net0", "up")
        ip("-n", node, "link", "set", "lo", "up")
        own = "mount -t tmpfs tmpfs /dev/shm && exec sleep infinity"
        self._there[number] = holder = subprocess.Popen(["ip", "netns", "exec", node, "unshare", "-m", "sh", "-c", own])
        self._running.append(holder)
        memory, ours = Path(f"/proc/{holder.pid}/root/dev/shm"), Path("/dev/shm").stat().st_dev
        wait_until(lambda: memory.stat().st_dev != ours, f"memory of {node}", 10.0)

    def start_ray(self, number: int, resources: str) -> None:
        """Start Ray on a node, the head on node 1. `resources` is JSON."""
        where = ["--address", self.ray_address]
        if number == 1:
            where = ["--head", "--include-dashboard", "false", "--port", str(PORT), "--temp-dir", f"{self._folder}/ray"]
        # With --block, so that what it starts is ours to end.
        self.start(
            number,
            *[str(BIN / "ray"), "start", "--block", "--node-ip-address", self.address(number), "--num-cpus", "4"],
            *["--num-gpus", "0", "--object-store-memory", str(100 * 2**20), "--resources", resources, *where],
            output=self._folder / f"ray-{number}.txt",
        )

    def wait_for_ray(self, nodes: int, timeout_s: float = 60.0) -> None:
        """Until so many nodes are alive, as Ray says."""
        wait_until(lambda: self._alive() >= nodes, f"{nodes} nodes ({self._folder}/ray-*.txt say why)", timeout_s)

    def _alive(self) -> int:
        done = self.run(1, sys.executable, "-c", _COUNT, self.ray_address)
        return int(done.stdout) if done.returncode == 0 else 0

    def start(self, number: int, *arguments: str, output: Path, cwd: Path | None = None) -> subprocess.Popen[str]:
        """Start a program on a node and go on."""
        with open(output, "a") as file:
            where = {"stdout": file, "stderr": file, "env": self._all_settings}
            process = subprocess.Popen(self._inside(number, arguments, cwd), text=True, **where)
        self._running.append(process)
        return process

    def run(
        self, number: int, *arguments: str, cwd: Path | None = None, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a node to its end."""
        where: dict[str, Any] = {"env": self._all_settings | settings}
        return subprocess.run(
            self._inside(number, arguments, cwd), capture_output=True, text=True, timeout=120, **where
        )

    def _inside(self, number: int, arguments: tuple[str, ...], cwd: Path | None) -> list[str]:
        enter = ["nsenter", "--net", "--mount", "--target", str(self._there[number].pid)]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd or self._folder), *arguments]

    @property
    def _all_settings(self) -> dict[str, str]:
        plain = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(self._folder), "PYTHONPATH": str(REPOSITORY)}
        plain |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        return plain | self._environment

    def processes(self, number: int) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self._node(number)], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def lose(self, number: int) -> None:
        """Take a node away as a power cut does: nothing that ran there says goodbye."""
        ip("-n", self._hub, "link", "del", f"p{number}")
        self._kill(number)
        ip("netns", "del", self._node(number))
        del self._there[number]

    def _kill(self, number: int) -> None:
        for pid in self.processes(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def close(self) -> None:
        for number in sorted(self._there):
            self._kill(number)
            subprocess.run(["ip", "netns", "del", self._node(number)], capture_output=True)
        subprocess.run(["ip", "netns", "del", self._hub], capture_output=True)
        for process in self._running:
            process.wait(timeout=20)
