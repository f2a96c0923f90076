"""The copies of a model's loader, as the plan has them (`proof.py`), made without the loader.

SGLang's loader spends half a second of Python on the 18,867 tensors of Qwen3-30B-A3B, while its engine is paused. Here copies
that follow each other, in the publication and in a parameter, are one: with one GPU for an engine, those of all experts of a
layer.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncgrpo.engines.sglang.proof import Part, Published
from asyncgrpo.types import TensorInfo
from asyncgrpo.weights.arena import Arenas, Layout

MOST_UPLOADED = 2**30
"""Bytes of the largest tensor that is uploaded whole."""


class Run(NamedTuple):
    """Bytes of a publication that are consecutive elements of a parameter."""

    start: int
    end: int
    dtype: torch.dtype
    parameter: str
    offset: int
    """Of the first element in the parameter's memory, elements."""


class Copies:
    """The copies that a model's loader makes."""

    def __init__(self, parts: Iterable[Part], published: Iterable[Published]) -> None:
        """
        Args:
            parts: of the plan.
            published: all tensors of a publication, in its order.
        """
        self._layout = Layout([TensorInfo(name=name, dtype=dtype, shape=shape) for name, dtype, shape in published])
        self._shapes = {info.name: info.shape for info in self._layout.tensors}
        self._scattered: dict[str, list[Part]] = {}
        """Columns of a tensor, or a transposed view."""
        self._runs: list[Run] = []
        self._stream: Any = None
        """Of all copies: torch's allocator keeps memory for each stream."""
        dtypes = {info.name: getattr(torch, info.dtype) for info in self._layout.tensors}
        found = []
        for part in parts:
            name, shape = part.box.tensor, self._shapes[part.box.tensor]
            if part.is_one_copy(shape):
                start, end = self._layout.run(name, part.box.first(shape), prod(part.box.size))
                found.append(Run(start, end, dtypes[name], part.parameter, part.offset))
            else:
                self._scattered.setdefault(name, []).append(part)
        for run in sorted(found, key=lambda run: run.start):
            last = self._runs[-1] if self._runs else None
            if last is not None and run == _next(last, run.end):
                self._runs[-1] = last._replace(end=run.end)
            else:
                self._runs.append(run)

    def write(self, parameters: Mapping[str, Tensor], arenas: Arenas, slot: int) -> Iterator[str]:
        """Write the weights of an arena into a model's parameters.

        A stream of a GPU has all the copies queued before the first name is returned.

        Yields:
            Each parameter, once the present stream waits for its copies.
        """
        flat, device = arenas.arena(self._layout, slot), next(iter(parameters.values())).device
        streams = torch.get_device_module(device)
        self._stream = copying = self._stream or streams.Stream()
        written: dict[str, Any] = {}
        with streams.stream(copying):
            for start, end, dtype, parameter, offset in self._runs:
                values = flat[start:end].view(dtype)
                parameters[parameter].detach().as_strided(values.shape, (1,), offset).copy_(values, non_blocking=True)
                written[parameter] = copying.record_event()
            for name, parts in self._scattered.items():
                whole = self._layout.part(flat, name, 0, self._shapes[name])
                if whole.nbytes <= MOST_UPLOADED:
                    # torch would gather the view on one core, and upload it out of pages that are not pinned.
                    whole = whole.to(device, non_blocking=True)
                for part in parts:
                    part.of(parameters[part.parameter]).copy_(part.box.of(whole))
                    written[part.parameter] = copying.record_event()
        for parameter, event in written.items():
            streams.current_stream().wait_event(event)
            yield parameter


def _next(run: Run, end: int) -> Run:
    """Return the run that follows, up to `end`."""
    return run._replace(start=run.end, end=end, offset=run.offset + (run.end - run.start) // run.dtype.itemsize)
