"""Pages are locked for a GPU and unlocked again, and a lock that CUDA refuses costs speed only. CUDA is a fake that can fail."""

import gc
import logging

import pytest
import torch

from asyncgrpo.types import TensorInfo
from asyncgrpo.weights.arena import Arenas, Layout

LAYOUT = Layout([TensorInfo(name="w", shape=(64, 64), dtype="float32")])


class Runtime:
    """Keeps the places that are locked. After an error the next call for memory fails, as in CUDA."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.locked, self.pending = error, dict[int, int](), False

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        if self.error:
            self.pending = True
        else:
            assert place not in self.locked, "CUDA refuses to lock pages twice"
            self.locked[place] = size
        return self.error

    def cudaHostUnregister(self, place: int) -> None:
        del self.locked[place]

    def zeros(self, *shape: int, device: str = "cpu", **how: object) -> torch.Tensor:
        if device == "cuda" and self.pending:
            self.pending = False
            raise RuntimeError("CUDA error")
        return torch.empty(*shape, **how).zero_()


@pytest.fixture(params=[0, 1])
def runtime(request, monkeypatch):
    fake = Runtime(request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch, "zeros", fake.zeros)
    return fake


def test_what_is_locked_is_unlocked_and_an_error_is_said_and_kept_from_others(runtime, caplog):
    with caplog.at_level(logging.WARNING, logger="asyncgrpo"):
        arenas = Arenas.create(LAYOUT)
        mapped = Arenas(arenas.file)
        staging = Arenas.create(LAYOUT, 1)
        arenas.pin()
        mapped.pin()
        staging.pin()
        staging.pin()
    assert len(runtime.locked) == (0 if runtime.error else 3) and not runtime.pending
    assert caplog.text.count("pinned (CUDA error 1)") == (3 if runtime.error else 0)
    arenas.close()
    del mapped, staging
    gc.collect()
    assert not runtime.locked
