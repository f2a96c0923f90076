"""`asyncgrpo doctor`: tries what this machine can run, and says how to fix what it cannot."""

import importlib
import importlib.metadata
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from asyncgrpo.cli.output import JsonOption, print_json, size_in_words
from asyncgrpo.cores import cores
from asyncgrpo.host import Host
from asyncgrpo.importing import has_gpu
from asyncgrpo.scratch import SHARED_MEMORY

# -- the checks --------------------------------------------------------------------------------------------------------

GIB = 1024**3
WEIGHT_COPIES = 2
"""In shared memory, of the learner (docs/memory.md)."""
LEAST_DRIVER = {"13": (580, 65), "12": (525, 60)}
"""By the major version of CUDA (NVIDIA's release notes of CUDA 12.0 and 13.0)."""
LEAST_GLIBC = (2, 34)
"""For the wheels of SGLang's kernels."""
CONTAINER = "docker run --gpus all --ipc=host --ulimit memlock=-1 lmsysorg/sglang:v0.5.23"
"""SGLang's own image. It was not tried here."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    name: str
    status: Literal["ok", "note", "warning", "failed"]
    """A `note` is a fact without a verdict. With a `warning`, training is possible but slower or less safe."""
    detail: str
    fix: str = ""
    """The command that fixes a warning or a failure."""
    needed: bool = True
    """Whether training is impossible after a failure. False: there is another way to train."""


def all_findings(out: Path) -> Iterator[Finding]:
    """The findings of all checks, cheap ones first, each as soon as it is known.

    Args:
        out: folder in which runs will be.
    """
    yield check_python()
    yield from check_machine()
    yield check_open_files()
    yield check_shared_memory()
    yield check_locked_memory()
    yield check_runs_folder(out)
    yield check_port()
    yield check_ray()
    yield check_torch()
    yield check_cuda()
    yield check_fit()
    yield check_gloo()
    yield check_nccl()
    yield check_kernels()
    yield check_torch_engine()
    yield check_sglang()
    yield check_offline()


def engines(findings: list[Finding]) -> list[str]:
    """The names of the engines that can run."""
    return [f.name.removesuffix(" engine") for f in findings if f.name.endswith(" engine") and f.status == "ok"]


def can_train(findings: list[Finding]) -> bool:
    """Whether no needed check failed and at least one engine can run."""
    return bool(engines(findings)) and not any(f.needed and f.status == "failed" for f in findings)


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Finding:
    # Below 3.11 this module does not import, so there is nothing to check.
    return Finding("python", "ok", f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")


def check_machine() -> Iterator[Finding]:
    import psutil

    if (there := cores()) >= 2:
        yield Finding("cores", "ok", f"{there}")
    else:
        yield Finding("cores", "warning", "1: generators and learner take turns")
    free = min(psutil.virtual_memory().available, Host.here(SHARED_MEMORY).memory)
    if free >= 4 * GIB:
        yield Finding("memory", "ok", f"{size_in_words(free)} free")
    else:
        yield Finding("memory", "warning", f"{size_in_words(free)} free, the demo takes about 3 GiB")


def check_open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= 8192 or soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", f"up to {soft}")
    raised = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    return Finding("open files", "warning", f"up to {soft}; Ray and many sockets need more", f"ulimit -n {raised}")


def check_shared_memory() -> Finding:
    free = Host.here(SHARED_MEMORY).shared_free
    detail = f"{size_in_words(free)} free in {SHARED_MEMORY}"
    if free >= GIB:
        billions = free / WEIGHT_COPIES / 2e9
        return Finding("shared memory", "ok", f"{detail}: the weights of {billions:.1f} billion parameters")
    fix = "docker run --shm-size=8g ..., or: mount -o remount,size=8g /dev/shm"
    return Finding("shared memory", "warning", f"{detail}; larger models need more", fix)


def check_locked_memory() -> Finding:
    """Compare the limit of pinned memory with what NCCL needs: over InfiniBand it registers its buffers."""
    if not has_gpu():
        return Finding("pinned memory", "note", "nothing is pinned without a GPU")
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("pinned memory", "ok", "without a limit")
    fix = "ulimit -l unlimited, or: docker run --ulimit memlock=-1 ..."
    return Finding("pinned memory", "warning", f"up to {size_in_words(soft)}; NCCL over InfiniBand needs more", fix)


def check_runs_folder(out: Path) -> Finding:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        return Finding("runs folder", "failed", f"{out}: {error.strerror}", f"mkdir -p {out} && chmod u+rwx {out}")
    free = shutil.disk_usage(out).free
    if free >= 5 * GIB:
        return Finding("runs folder", "ok", f"{out} is writable, {size_in_words(free)} free")
    return Finding(
        "runs folder", "warning", f"{out} has {size_in_words(free)} left", "asyncgrpo doctor --out /larger/disk"
    )


def check_port() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return Finding(
                "loopback", "ok", f"a port can be bound and reached on 127.0.0.1 ({server.getsockname()[1]})"
            )
    except OSError as error:
        return Finding("loopback", "failed", f"127.0.0.1 cannot be used: {error}", "ip link set lo up")


def check_ray() -> Finding:
    return _check_package("ray", "ray>=2.60,<2.61")


def check_torch() -> Finding:
    return _check_package("torch", "torch>=2.11", lambda torch: f", CUDA {torch.version.cuda or 'not built in'}")


def _check_package(package: str, requirement: str, more: Callable[[Any], str] = lambda module: "") -> Finding:
    """Check that a package is installed and can be imported."""
    if version_of(package) is None:
        return Finding(package, "failed", "not installed", f"pip install '{requirement}'")
    try:
        module = importlib.import_module(package)
    except Exception as error:  # whatever a broken installation raises
        return Finding(package, "failed", f"does not import: {_one_line(error)}", f"pip install -U '{requirement}'")
    return Finding(package, "ok", f"{version_of(package)}{more(module)}")


def check_cuda() -> Finding:
    try:
        import torch
    except Exception:
        return Finding("GPUs", "note", "unknown without torch")
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        names = ", ".join(f"{device.name} ({size_in_words(device.total_memory)})" for device in devices)
        return Finding("GPUs", "ok", f"{len(devices)}: {names}")
    if shutil.which("nvidia-smi") is None:
        return Finding("GPUs", "note", "none; everything runs on the CPU (--n-gpus 0)")
    if torch.version.cuda is None:
        fix = "pip install --force-reinstall torch"
        return Finding("GPUs", "failed", "there is a driver, but torch is built for the CPU", fix, needed=False)
    driver, needs = driver_version(), LEAST_DRIVER.get(torch.version.cuda.partition(".")[0], (0, 0))
    if driver is not None and driver < needs:
        detail = f"the driver is {_dotted(driver)}, and CUDA {torch.version.cuda} of this torch needs {_dotted(needs)}"
        return Finding("GPUs", "failed", detail, f"apt-get install nvidia-driver-{needs[0]}", needed=False)
    return Finding("GPUs", "failed", "there is a driver, but torch sees no device", "nvidia-smi", needed=False)


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> tuple[int, int] | None:
    """The first two numbers of the version of NVIDIA's driver; None: unknown."""
    found = re.search(r"Kernel Module\D*(\d+)\.(\d+)", file.read_text()) if file.is_file() else None
    return None if found is None else (int(found[1]), int(found[2]))


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def check_fit() -> Finding:
    """The largest published models that the GPUs here can train, by arithmetic."""
    try:
        import torch
    except Exception:
        return Finding("models", "note", "unknown without torch")
    from asyncgrpo.config.placement import largest

    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    if not sizes:
        return Finding("models", "note", "without a GPU, those of some million parameters")
    full, adapted = (largest(len(sizes), min(sizes), adapters=rank) or "none" for rank in (0, 32))
    detail = f"all weights up to {full}, adapters up to {adapted}, with 1,536 tokens a sequence (docs/memory.md)"
    return Finding("models", "ok" if adapted != "none" else "warning", detail)


def check_gloo() -> Finding:
    """Let two ranks, in threads of this process, meet over loopback and add a number."""
    try:
        import torch
        import torch.distributed as dist

        timeout = timedelta(seconds=20)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        sums: list[float] = []
        errors: list[Exception] = []

        def rank(number: int) -> None:
            try:
                own = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timeout)
                group: Any = dist.ProcessGroupGloo(dist.PrefixStore("doctor", own), number, 2, timeout)
                tensor = torch.ones(1)
                group.allreduce([tensor]).wait()
                sums.append(tensor.item())
            except Exception as error:
                errors.append(error)

        ranks = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join(40)
        if errors:
            raise errors[0]
        if sums != [2.0, 2.0]:
            raise RuntimeError(f"two ranks added 1 and 1 to {sums}")
    except Exception as error:  # whatever torch raises is the finding
        return Finding("gloo", "failed", f"two ranks cannot meet: {_one_line(error)}", "export GLOO_SOCKET_IFNAME=lo")
    return Finding("gloo", "ok", "two ranks met over loopback")


def check_nccl() -> Finding:
    """Let one rank reduce a number on the first GPU. More ranks would need a process each."""
    try:
        import torch
        import torch.distributed as dist
    except Exception:
        return Finding("nccl", "note", "unknown without torch")
    if not torch.cuda.is_available():
        return Finding("nccl", "note", "not needed without a GPU")
    try:
        group: Any = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
        tensor = torch.ones(1, device="cuda:0")
        group.allreduce([tensor]).wait()
        torch.cuda.synchronize()
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except Exception as error:
        return Finding("nccl", "failed", _one_line(error), "NCCL_DEBUG=INFO asyncgrpo doctor", needed=False)
    return Finding("nccl", "ok", f"{version}, one rank reduced on cuda:0")


def check_kernels(libc: str | None = None) -> Finding:
    """What SGLang compiles its kernels with when it starts on a GPU: its wheels bring no compiler."""
    if not has_gpu():
        return Finding("kernels", "note", "nothing is compiled for a GPU")
    libc = libc or os.confstr("CS_GNU_LIBC_VERSION") or "an unknown C library"
    found = re.fullmatch(r"glibc (\d+)\.(\d+)", libc)
    if found is None or (int(found[1]), int(found[2])) < LEAST_GLIBC:
        detail = f"this system has {libc}, and SGLang's kernels need glibc {_dotted(LEAST_GLIBC)}"
        return Finding("kernels", "failed", detail, CONTAINER, needed=False)
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    there = {"nvcc": f"{cuda}/bin/nvcc", "ninja": "ninja", "c++": "c++"}
    missing = [name for name, path in there.items() if not (shutil.which(name) or shutil.which(path))]
    if missing:
        detail = f"SGLang compiles kernels when it starts, and there is no {' and no '.join(missing)}"
        return Finding("kernels", "failed", detail, CONTAINER, needed=False)
    return Finding("kernels", "ok", "nvcc, ninja and c++ are there")


def check_torch_engine() -> Finding:
    if version_of("transformers") is None:
        fix = "pip install 'transformers>=5.12'"
        return Finding("torch engine", "failed", "transformers is not installed", fix, needed=False)
    if version_of("torch") is None:
        return Finding("torch engine", "failed", "torch is not installed", "pip install 'torch>=2.11'", needed=False)
    return Finding("torch engine", "ok", f"transformers {version_of('transformers')}")


def check_sglang() -> Finding:
    try:
        from asyncgrpo.engines.installed import why_sglang_cannot_run

        why = why_sglang_cannot_run()
    except Exception as error:  # without torch it cannot even look
        why = f"{_one_line(error)}: pip install 'torch>=2.11'"
    if why is not None:
        detail, _, fix = why.rpartition(": ")  # the sentence ends with the command that fixes it
        return Finding("sglang engine", "failed", detail, fix, needed=False)
    return Finding("sglang engine", "ok", f"sglang {version_of('sglang')}")


def check_offline() -> Finding:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "WANDB_MODE", "HF_HOME")
    given = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    text = ", ".join(given) or "no offline flag is set; model.path as a folder needs no network"
    return Finding("hub", "note", text)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


# -- the command -------------------------------------------------------------------------------------------------------

_SIGNS = {"ok": "✓", "note": "·", "warning": "!", "failed": "✗"}
_COLOURS = {"ok": "green", "note": "white", "warning": "yellow", "failed": "red"}


def register(app: typer.Typer) -> None:
    """Add `doctor`."""
    app.command("doctor", epilog="Example: asyncgrpo doctor --out /scratch/runs")(doctor)


def doctor(
    out: Annotated[Path, typer.Option("--out", help="Folder that is to hold the runs.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Try out what training needs: packages, engines, GPUs, memory.

    Exits with 0 when training is possible with at least one engine.
    """

    findings = []
    for finding in all_findings(out):
        findings.append(finding)
        if as_json:
            continue
        sign = typer.style(_SIGNS[finding.status], fg=_COLOURS[finding.status])
        typer.echo(f"{sign} {finding.name:14} {finding.detail}")
        if finding.fix:
            typer.echo(f"{'':17}fix it: {finding.fix}")
    possible, running = can_train(findings), engines(findings)
    if as_json:
        print_json({"can_train": possible, "engines": running, "findings": [asdict(finding) for finding in findings]})
    elif possible:
        typer.echo(f"\nTraining is possible here, with the engine {' or '.join(running)}.")
    else:
        broken = [f.name for f in findings if f.needed and f.status == "failed"] or ["an engine"]
        typer.echo(f"\nTraining is not possible yet; fix {', '.join(broken)} first.")
    raise typer.Exit(0 if possible else 1)
