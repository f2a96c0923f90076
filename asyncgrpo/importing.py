"""Quiet imports of large libraries, without the garbage collector, which takes a fifth to a third of their time."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

QUIET = {
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # Ray writes stderr to files, on a disk that may be full
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables of the processes of a run. Libraries read them when they are imported."""
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def has_gpu() -> bool:
    """Return True if torch sees a GPU here. Imports torch only if the device file of a driver exists."""
    if not any(map(os.path.exists, _DEVICES)):
        return False
    import torch

    return torch.cuda.is_available()


@contextmanager
def importing() -> Iterator[None]:
    """Disable the garbage collector for the block, which first imports torch, transformers or SGLang, then freeze objects.

    The imports create a million permanent objects. The collector would traverse them repeatedly during the import, and,
    unless frozen, in every later full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()
