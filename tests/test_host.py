"""What memory a machine has, and what a container leaves of it."""

import os

import psutil
import pytest

from asyncgrpo import host
from asyncgrpo.host import Host

ALL = psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({"memory.max": "67108864\n"}, 2**26),
        ({"memory.max": "max\n"}, ALL),
        ({"memory/memory.limit_in_bytes": "134217728\n"}, 2**27),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, ALL),
        ({}, ALL),
    ],
)
def test_no_more_memory_than_the_limit_of_a_container(tmp_path, monkeypatch, files, memory):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    assert Host.here(tmp_path).memory == memory


def test_shared_memory_is_what_its_file_system_has(tmp_path):
    there = os.statvfs(tmp_path)
    assert Host.here(tmp_path).shared == there.f_blocks * there.f_frsize
    assert Host.here(tmp_path / "nothing") == Host(Host.here(tmp_path).memory, 0, 0)
