"""What needs a card: `pytest -m gpu tests/gpu`. Every test of this folder is marked `gpu`.

Without a card the tests are skipped. `ASYNCGRPO_GPU_TESTS_ON=cpu` runs those that mean something on a CPU there: their code
has then been executed, and that of the kernels has not.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.models import make_tiny_qwen3

os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", "30")  # of every run; without it a missing member hangs
FORCED = os.environ.get("ASYNCGRPO_GPU_TESTS_ON", "")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The card, or the CPU where that is asked for."""
    if torch.cuda.is_available() and FORCED != "cpu":
        return torch.device("cuda:0")
    if FORCED != "cpu":
        pytest.skip("no CUDA device here (ASYNCGRPO_GPU_TESTS_ON=cpu runs this on the CPU)")
    torch.set_num_threads(1)
    return torch.device("cpu")


@pytest.fixture(scope="session")
def card(device: torch.device) -> torch.device:
    """A card: a CPU says nothing here."""
    if device.type != "cuda":
        pytest.skip("needs a card: a CPU cannot stand for it")
    return device


@pytest.fixture(scope="session")
def ranks(device: torch.device) -> Iterator[None]:
    """A process group of one in which learners on the card and on the CPU can both be built."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose heads share keys."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), hidden=128)
