"""The memory and cores that a machine has, and what a container leaves of them."""

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from asyncgrpo import host
from asyncgrpo.host import CoreClock, CoreSeconds, Host, cores, importing

ALL = psutil.virtual_memory().total


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A function that limits this process as the files of a container do. The machine has 64 cores."""

    def limit(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)

    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    return limit


OLD = {"cpu/cpu.cfs_period_us": "100000\n", "cpuacct/cpuacct.usage": "7000000000\n"}
NEW = {"cpu.stat": "usage_usec 7000000\nuser_usec 1\n"}


@pytest.mark.parametrize(
    ("files", "memory", "quota"),
    [
        ({"memory.max": "67108864\n", "cpu.max": "250000 100000\n"} | NEW, 2**26, 3),
        ({"memory.max": "max\n", "cpu.max": "max 100000\n"}, ALL, 64),
        ({"memory/memory.limit_in_bytes": "134217728\n", "cpu/cpu.cfs_quota_us": "400000\n"} | OLD, 2**27, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n"} | OLD, ALL, 64),
        ({}, ALL, 64),
    ],
)
def test_a_container_has_the_memory_and_cores_of_its_limits_and_counts_its_own_work_alone(
    container, tmp_path, files, memory, quota
):
    container(files)
    assert (Host.here(tmp_path).memory, cores()) == (memory, quota)
    assert quota == 64 or host._busy_seconds() == 7.0


def test_shared_memory_is_what_its_file_system_has(tmp_path):
    there = os.statvfs(tmp_path)
    assert Host.here(tmp_path).shared == there.f_blocks * there.f_frsize
    assert Host.here(tmp_path / "nothing") == Host(Host.here(tmp_path).memory, 0, 0)


class Machine:
    def __init__(self, monkeypatch) -> None:
        self.now_s = self.busy_s = self.own_s = 100.0
        monkeypatch.setattr(host, "cores", lambda: 4)
        monkeypatch.setattr(host, "_busy_seconds", lambda: self.busy_s)
        monkeypatch.setattr(host, "_own_seconds", lambda: self.own_s)
        self.clock = CoreClock(lambda: self.now_s)

    def works(self, seconds: float, busy: float, own: float) -> CoreSeconds:
        """The count after so many seconds in which so many cores were busy, some of them with this process."""
        self.now_s += seconds
        self.busy_s += busy * seconds
        self.own_s += own * seconds
        return self.clock.count()


def test_core_seconds_are_counted_since_the_clock_was_made(monkeypatch):
    machine = Machine(monkeypatch)
    assert machine.works(2.0, busy=3.0, own=1.0) == (8.0, 2.0, 2.0)
    assert machine.works(0.5, busy=3.0, own=1.0) == (8.0, 2.0, 2.0), "not counted again within a second"
    assert machine.works(1.5, busy=3.0, own=0.0) == (16.0, 4.0, 2.5)
    assert machine.works(4.0, busy=9.0, own=-1.0) == (32.0, 4.0, 2.5), "none shrinks"


def test_a_child_counts_with_its_parent():
    before = host._own_seconds()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while host._own_seconds() - before < 0.3:
            assert child.poll() is None
        child.kill()
    assert host._own_seconds() - before > 0.2, "and after it has ended"


def test_descendants_are_the_children_of_all_threads_and_theirs():
    shell = "sleep 60 & echo started; wait"
    with ThreadPoolExecutor(1) as thread:
        child = thread.submit(subprocess.Popen, ["sh", "-c", shell], stdout=subprocess.PIPE).result()
        assert child.stdout is not None and child.stdout.readline() == b"started\n"
        found = set(host.descendants(os.getpid()))
        assert found == {one.pid for one in psutil.Process().children(recursive=True)} and len(found) >= 2
        for one in psutil.Process(child.pid).children():
            one.kill()
        child.communicate()
    assert set(host.descendants(child.pid)) == set()


def test_the_collector_is_off_in_a_block_of_imports_and_afterwards_as_it_was(request):
    request.addfinalizer(gc.unfreeze)
    request.addfinalizer(gc.enable)
    with importing():
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer block goes on"
    assert gc.isenabled() and gc.get_freeze_count() > 0
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()


def test_the_last_exception_of_a_child_is_found_although_its_output_arrives_late(tmp_path, monkeypatch):
    assert (host.stderr_size(), host.last_error(0)) == (0, "")
    monkeypatch.setattr(host, "stderr_file", tmp_path / "stderr")
    assert (host.stderr_size(), host.last_error(0)) == (0, "")
    (tmp_path / "stderr").touch()
    reader, writer = os.pipe()

    def copy() -> None:
        """As a thread of Ray does, with a delay."""
        with (tmp_path / "stderr").open("ab", buffering=0) as file:
            while data := os.read(reader, 2**16):
                time.sleep(0.1)
                file.write(data)

    copying, former = threading.Thread(target=copy), os.dup(2)
    copying.start()
    os.dup2(writer, 2)
    try:
        subprocess.run([sys.executable, "-c", "import nothing_like_it"], check=False)
        os.write(2, b"later\nError\n")
        assert host.last_error(0) == "ModuleNotFoundError: No module named 'nothing_like_it'"
        assert host.last_error(host.stderr_size()) == "", "it was there before"
    finally:
        os.dup2(former, 2)
        for file in (writer, former):
            os.close(file)
        copying.join()
        os.close(reader)
