"""`asyncgrpo doctor`: each problem is found, and the finding says how to fix it."""

import resource
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from asyncgrpo.cli import doctor
from asyncgrpo.cli.doctor import Finding
from asyncgrpo.host import Host


def test_this_machine_can_train(asyncgrpo, tmp_path):
    ended = asyncgrpo("doctor", "--out", tmp_path)
    assert ended.code == 0 and "This machine can train, with the engine torch" in ended.out
    for name in ("python", "ray", "torch", "GPUs", "runs folder"):
        assert f"✓ {name} " in ended.out
    assert ended.out.count("fix: ") >= ended.out.count("✗")


def test_a_person_gets_a_line_for_each_finding_and_how_to_mend_it(asyncgrpo, tmp_path, monkeypatch):
    fine = [Finding("torch", "ok", ""), Finding("memory", "warning", "")]
    harmless = [*fine, Finding("sglang engine", "failed", "", needed=False)]
    for findings, code in ((harmless, 0), ([*harmless, Finding("ray", "failed", "gone", "pip install ray")], 1)):
        monkeypatch.setattr(doctor, "all_findings", lambda out, findings=findings: iter(findings))
        ended = asyncgrpo("doctor", "--out", tmp_path)
        assert ended.code == code and ("✗ ray" in ended.out and "fix: pip install ray" in ended.out) == code
        assert ("ray" in ended.out.splitlines()[-1]) == code


def test_a_runs_folder_that_cannot_be_made_and_too_few_open_files_are_found(tmp_path):
    (tmp_path / "file").write_text("in the way")
    finding = doctor.check_runs_folder(tmp_path / "file" / "runs")
    assert finding.status == "failed" and finding.fix
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        finding = doctor.check_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.status == "warning" and finding.fix.startswith("ulimit -n ")


def test_a_package_that_is_missing_or_broken_is_found(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert doctor.check_package("ray", "ray>=2.60,<2.61").fix == "pip install 'ray>=2.60,<2.61'"
    monkeypatch.undo()
    (tmp_path / "ray.py").write_text("raise OSError('libsomething.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert "OSError: libsomething.so is missing" in doctor.check_package("ray", "ray").detail


@pytest.mark.parametrize(
    ("libc", "there", "status", "says"),
    [
        ("glibc 2.31", ("nvcc", "ninja", "c++"), "failed", "glibc 2.34"),
        ("glibc 2.36", ("ninja",), "failed", "nvcc, c++"),
        ("glibc 2.36", ("nvcc", "ninja", "c++"), "ok", "nvcc"),
    ],
)
def test_what_sglang_compiles_with_on_a_gpu_is_looked_for(monkeypatch, libc, there, status, says):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if name in there else None)
    found = doctor.check_kernels(libc)
    assert found.status == status and says in found.detail and bool(found.fix) == (status == "failed")


def test_too_little_memory_that_may_be_locked_is_found_on_a_gpu(monkeypatch):
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    inside = [sys.executable, "-c", "from asyncgrpo.cli import doctor; "]
    inside[-1] += "found = doctor.check_locked_memory(); print(found.status, found.detail, found.fix)"
    said = subprocess.run(["prlimit", f"--memlock=65536:{hard}", *inside], capture_output=True, text=True).stdout
    assert said.startswith("warning") and "64.0 KiB" in said, said
    assert "ulimit -l unlimited" in said and "--ulimit memlock=-1" in said
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert doctor.check_locked_memory().status == "ok"


def test_memory_is_that_of_the_container_and_shared_memory_is_compared_with_weights(monkeypatch):
    small = Host(memory=2 * doctor.GIB, shared=2**26, shared_free=2**26)
    monkeypatch.setattr(doctor.Host, "here", lambda shared_memory: small)
    (memory,) = [found for found in doctor.check_machine() if found.name == "memory"]
    assert memory.status == "warning" and "2.0 GiB" in memory.detail
    shared = doctor.check_shared_memory()
    assert shared.status == "warning" and "64.0 MiB" in shared.detail and "--shm-size" in shared.fix
    monkeypatch.setattr(doctor.Host, "here", lambda shared_memory: replace(small, shared_free=48 * doctor.GIB))
    found = doctor.check_shared_memory()
    assert found.status == "ok" and "12.9 billion" in found.detail


def test_a_dns_server_that_does_not_reply_is_found_before_a_run_waits_for_it(monkeypatch):
    def slow(address, flags):
        time.sleep(0.01)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getnameinfo", slow)
    assert doctor.check_names().status == "ok"
    monkeypatch.setattr(doctor, "SLOW_LOOKUP_S", 0.005)
    found = doctor.check_names()
    assert found.status == "warning" and "/etc/hosts" in found.fix


def test_a_driver_that_is_older_than_cuda_needs_is_named(monkeypatch, tmp_path):
    import torch

    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    assert doctor.driver_version(tmp_path / "version") == (535, 104)
    monkeypatch.setattr(doctor, "driver_version", lambda: (535, 104))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = doctor.check_cuda()
    assert found.status == "failed"
    assert all(version in found.detail for version in ("535.104", "13.0", "580.65"))
