"""Imports of large libraries without the garbage collector, which takes a fifth to a third of their time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
