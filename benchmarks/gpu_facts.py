"""What the machine with the card is: driver, versions, sizes, and its two ceilings, operations and bytes a second.

python -m benchmarks.gpu_facts
"""

import importlib.metadata
import importlib.util
import inspect
import os
import shutil
import statistics
import subprocess
import sys
from typing import Any

import torch

from benchmarks.gpu_clock import Stopwatch, matmul_tflops
from benchmarks.measuring import device_parser, rounded, show, where

PACKAGES = ("torch", "triton", "transformers", "peft", "flash_attn", "ray", "sglang", "msgspec", "pyzmq", "omegaconf")
PACKAGES += ("pyarrow", "pytest", "nvidia-nccl-cu13")
QUERY = (
    "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,pcie.link.gen.current,pcie.link.width.current"
)


def main(argv: list[str] | None = None) -> None:
    device = device_parser(__doc__).parse_args(argv).device
    facts = {"python": sys.version.split()[0], "packages": ", ".join(versions())} | host() | kernels()
    if device == "cuda":
        facts |= card()
    for name, value in facts.items():
        show({"what": "fact", "name": name, "value": value})
    ceilings = {
        "bfloat16 product, TFLOP/s": matmul_tflops(device),
        "copy on the device, GB/s read and written": copy_gb_per_s(device),
    }
    for name, value in ceilings.items():
        show({"what": "ceiling", "name": name, "value": value} | where())


def versions() -> list[str]:
    """`name version` of each package that is there."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return found


def host() -> dict[str, Any]:
    """Cores, memory, and what /dev/shm can hold."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shared = shutil.disk_usage("/dev/shm")
    return {
        "cores": os.cpu_count(),
        "host memory, GiB": rounded(pages / 2**30),
        "/dev/shm, GiB": rounded(shared.total / 2**30),
    }


def kernels() -> dict[str, Any]:
    """What attention can run with."""
    found: dict[str, Any] = {"varlen_attn": "not there"}
    if importlib.util.find_spec("torch.nn.attention.varlen"):
        from torch.nn.attention.varlen import varlen_attn

        found["varlen_attn"] = ", ".join(inspect.signature(varlen_attn).parameters)
    return found


def card() -> dict[str, Any]:
    """What CUDA and nvidia-smi say of the card."""
    about = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    said = subprocess.run(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"], capture_output=True, text=True)
    return {
        "card": about.name,
        "nvidia-smi": said.stdout.strip() or said.stderr.strip(),
        "multiprocessors": about.multi_processor_count,
        "compute capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch's CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "memory that CUDA shows, GiB": rounded(total / 2**30),
        "of it used by this process's context and others, GiB": rounded((total - free) / 2**30),
    }


def copy_gb_per_s(device: str) -> float:
    """Bytes read and written by a copy on the device, median of five."""
    size = 2**32 if device == "cuda" else 2**26
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = Stopwatch(device)
    for _ in range(6):
        with clock:
            target.copy_(source)
    return rounded(2 * size / statistics.median(clock.seconds[1:]) / 1e9)


if __name__ == "__main__":
    main()
