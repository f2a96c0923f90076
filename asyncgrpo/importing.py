"""Imports of large libraries: quietly, and without the garbage collector, which takes a fifth to a third of their time."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

QUIET = {
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # nobody sees them, and Ray writes stderr to files whose disk may be full
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables of the processes of a run. Libraries read them when they are imported."""
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def has_gpu() -> bool:
    """True if torch sees a GPU here. Imports torch only where there is the device of a driver."""
    if not any(map(os.path.exists, _DEVICES)):
        return False
    import torch

    return torch.cuda.is_available()


@contextmanager
def importing() -> Iterator[None]:
    """Import torch, transformers or SGLang in the block, as a first import of them in this process.

    They make a million objects that stay. The collector would walk them again and again while they are made, and, unless
    they were frozen, in every full collection after.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()
