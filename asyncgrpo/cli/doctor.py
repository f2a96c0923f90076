"""`asyncgrpo doctor`: check what this machine can run, with a fix for each failure."""

import importlib
import importlib.metadata
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from asyncgrpo.cli.options import example, size_in_words
from asyncgrpo.config.memory import ARENAS, GIB
from asyncgrpo.host import Host, cores, has_gpu
from asyncgrpo.scratch import SHARED_MEMORY

app = typer.Typer()

# -- the checks --------------------------------------------------------------------------------------------------------

LEAST_DRIVER = {"13": (580, 65), "12": (525, 60)}
"""Minimum driver by major version of CUDA (release notes of CUDA 12.0 and 13.0)."""
SLOW_LOOKUP_S = 0.5
LEAST_GLIBC = (2, 34)
"""Minimum for the wheels of SGLang's kernels."""
CONTAINER = "docker run --gpus all --ipc=host --ulimit memlock=-1 lmsysorg/sglang:v0.5.23"
"""SGLang's image. It has not been tested with asyncgrpo."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    status: Literal["ok", "warning", "failed"]
    """`warning`: training works, but slower or less safely."""
    detail: str
    fix: str = ""
    """Command that fixes a warning or a failure."""
    needed: bool = True
    """True if a failure makes training impossible."""


def all_findings(out: Path) -> Iterator[Finding]:
    """Yield the finding of each check, cheap ones first. `out` is the folder for the runs."""
    yield Finding("python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")
    yield from check_machine()
    yield check_open_files()
    yield check_shared_memory()
    yield check_runs_folder(out)
    yield check_names()
    yield check_package("ray", "ray>=2.60,<2.61")
    yield check_package("transformers", "transformers>=5.12")
    yield check_package("torch", "torch>=2.11", lambda torch: f", CUDA {torch.version.cuda or 'not built in'}")
    with suppress(Exception):  # of a broken installation, which was reported
        yield check_cuda()
    if has_gpu():
        yield check_locked_memory()
        yield check_kernels()
    yield check_sglang()


def _enough(name: str, is_enough: bool, detail: str, need: str, fix: str = "") -> Finding:
    """Return `ok` or a warning with the need and its fix."""
    return Finding(name, "ok", detail) if is_enough else Finding(name, "warning", f"{detail}; {need}", fix)


def check_machine() -> Iterator[Finding]:
    import psutil

    yield _enough("cores", cores() >= 2, f"{cores()}", "generators and learner share it")
    free = min(psutil.virtual_memory().available, Host.here(SHARED_MEMORY).memory)
    yield _enough("memory", free >= 4 * GIB, f"{size_in_words(free)} free", "the demo needs about 3 GiB")


def check_open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    is_enough = soft >= 8192 or soft == resource.RLIM_INFINITY
    return _enough("open files", is_enough, f"limit {soft}", "Ray and many sockets need more", f"ulimit -n {raised}")


def check_shared_memory() -> Finding:
    free = Host.here(SHARED_MEMORY).shared_free
    billions = free / ARENAS / 2e9
    detail = f"{size_in_words(free)} free in {SHARED_MEMORY}, for the weights of {billions:.1f} billion parameters"
    fix = "docker run --shm-size=8g ..., or: mount -o remount,size=8g /dev/shm"
    return _enough("shared memory", free >= GIB, detail, "larger models need more", fix)


def check_locked_memory() -> Finding:
    """Check the limit of pinned memory. NCCL pins its buffers over InfiniBand."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_enough = soft == resource.RLIM_INFINITY
    detail = "unlimited" if is_enough else f"limit {size_in_words(soft)}"
    fix = "ulimit -l unlimited, or: docker run --ulimit memlock=-1 ..."
    return _enough("pinned memory", is_enough, detail, "NCCL over InfiniBand needs more", fix)


def check_names() -> Finding:
    """Time the lookup that torch makes at both ends of each connection to a store, whose members wait meanwhile."""
    started = time.monotonic()
    with suppress(OSError):
        socket.getnameinfo(("::ffff:127.0.0.1", 0, 0, 0), socket.NI_NUMERICSERV)
    took_s = time.monotonic() - started
    detail, need = f"looking up an address took {took_s:.1f} s", "processes of a run do so when they connect"
    fix = "echo '::ffff:ADDRESS NAME' >> /etc/hosts, on each machine for the address of each (127.0.0.1 for a run on it alone)"
    return _enough("names", took_s < SLOW_LOOKUP_S, detail, need, fix)


def check_runs_folder(out: Path) -> Finding:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        return Finding("runs folder", "failed", f"{out}: {error.strerror}", f"mkdir -p {out} && chmod u+rwx {out}")
    free = shutil.disk_usage(out).free
    detail, fix = f"{out} is writable, {size_in_words(free)} free", "asyncgrpo doctor --out /larger/disk"
    return _enough("runs folder", free >= 5 * GIB, detail, "checkpoints need more", fix)


def check_package(package: str, requirement: str, more: Callable[[Any], str] = lambda module: "") -> Finding:
    """Check that a package is installed and imports. `more` describes the imported module."""
    try:
        module = importlib.import_module(package)
    except Exception as error:  # of a broken installation
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return Finding(package, "failed", "not installed", f"pip install '{requirement}'")
        return Finding(package, "failed", f"import failed: {_one_line(error)}", f"pip install -U '{requirement}'")
    return Finding(package, "ok", f"{module.__version__}{more(module)}")


def check_cuda() -> Finding:
    import torch

    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        names = ", ".join(f"{device.name} ({size_in_words(device.total_memory)})" for device in devices)
        return Finding("GPUs", "ok", f"{len(devices)}: {names}")
    if shutil.which("nvidia-smi") is None:
        return Finding("GPUs", "ok", "none; runs use the CPU (--n-gpus 0)")
    detail, fix = "a driver is installed, but torch finds no device", "nvidia-smi"
    if torch.version.cuda is None:
        detail, fix = "a driver is installed, but torch is built for the CPU", "pip install --force-reinstall torch"
    elif (driver := driver_version()) is not None:
        needs = LEAST_DRIVER.get(torch.version.cuda.partition(".")[0], (0, 0))
        if driver < needs:
            detail = f"the driver is {_dotted(driver)}, and torch with CUDA {torch.version.cuda} needs {_dotted(needs)}"
            fix = f"apt-get install nvidia-driver-{needs[0]}"
    return Finding("GPUs", "failed", detail, fix, needed=False)


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> tuple[int, int] | None:
    """Return the first two numbers of the version of NVIDIA's driver; None if it is unknown."""
    found = re.search(r"Kernel Module\D*(\d+)\.(\d+)", file.read_text()) if file.is_file() else None
    return None if found is None else (int(found[1]), int(found[2]))


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def check_kernels(libc: str | None = None) -> Finding:
    """Check the compilers with which SGLang compiles its kernels when it starts on a GPU."""
    libc = libc or os.confstr("CS_GNU_LIBC_VERSION") or "an unknown C library"
    found = re.fullmatch(r"glibc (\d+)\.(\d+)", libc)
    if found is None or (int(found[1]), int(found[2])) < LEAST_GLIBC:
        detail = f"this system has {libc}, and SGLang's kernels need glibc {_dotted(LEAST_GLIBC)}"
        return Finding("kernels", "failed", detail, CONTAINER, needed=False)
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    there = {"nvcc": f"{cuda}/bin/nvcc", "ninja": "ninja", "c++": "c++"}
    missing = [name for name, path in there.items() if not (shutil.which(name) or shutil.which(path))]
    if missing:
        detail = f"SGLang compiles kernels when it starts; missing: {', '.join(missing)}"
        return Finding("kernels", "failed", detail, CONTAINER, needed=False)
    return Finding("kernels", "ok", "nvcc, ninja and c++ are installed")


def check_sglang() -> Finding:
    try:
        from asyncgrpo.engines.build import why_sglang_cannot_run

        why = why_sglang_cannot_run()
    except Exception as error:  # of a broken torch
        why = f"{_one_line(error)}: pip install 'torch>=2.11'"
    if why is not None:
        detail, _, fix = why.rpartition(": ")  # the message ends with the fix
        return Finding("sglang engine", "failed", detail, fix, needed=False)
    return Finding("sglang engine", "ok", f"sglang {importlib.metadata.version('sglang')}")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


# -- the command -------------------------------------------------------------------------------------------------------

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "red")}


@app.command("doctor", epilog=example("doctor --out /scratch/runs"))
def doctor(out: Annotated[Path, typer.Option("--out", help="Folder for the runs.")] = Path("runs")) -> None:
    """Check packages, engines, GPUs and memory of this machine.

    Exits with 0 if training is possible with at least one engine.
    """
    findings = []
    for finding in all_findings(out):
        findings.append(finding)
        sign, colour = _SIGNS[finding.status]
        typer.echo(f"{typer.style(sign, fg=colour)} {finding.name:14} {finding.detail}")
        if finding.fix:
            typer.echo(f"{'':17}fix: {finding.fix}")
    # The torch engine needs nothing beyond the needed checks.
    if to_fix := [finding.name for finding in findings if finding.needed and finding.status == "failed"]:
        typer.echo(f"\nThis machine cannot train yet; fix {', '.join(to_fix)} first.")
        raise typer.Exit(1)
    has_sglang = any(finding.name == "sglang engine" and finding.status == "ok" for finding in findings)
    typer.echo(f"\nThis machine can train, with the engine {'torch or sglang' if has_sglang else 'torch'}.")
