"""How many cores a process may use."""

import os

import pytest

from asyncgrpo import cores as cores_module
from asyncgrpo.cores import cores, idle_cores


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({}, 64),
    ],
)
def test_no_more_cores_than_the_quota_of_a_container(tmp_path, monkeypatch, files, quota):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cores_module, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert cores() == quota


def test_idle_cores_are_some_of_those_there():
    idle_cores()
    assert 0 <= idle_cores() <= (os.cpu_count() or 1)
