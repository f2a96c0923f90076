"""Sends new weights from this process to SGLang's schedulers with SGLang's calls for in-place updates.

The weights are not copied here: the message holds the file in shared memory (`weights/arena.py`). Each scheduler maps the file
and pins its pages for its GPU once, so that the pause contains one copy. The first weights go through the loader of SGLang's
model. If that does nothing but copies, which the plan has (`proof.py`), later weights are copied without it.
"""

import asyncio
import pickle
from typing import Any

import torch
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    UpdateWeightsFromTensorReqInput,
)

from asyncgrpo.engines.sglang.copies import Copies
from asyncgrpo.errors import EngineError
from asyncgrpo.weights.arena import Mappings, SharedTensors

# -- in the generator --------------------------------------------------------------------------------------------------


async def replace_weights(
    manager: Any,
    tensors: SharedTensors,
    label: str,
    *,
    keep_kv: bool,
    num_schedulers: int,
    by_plan: bool,
) -> None:
    """Pause between two tokens, write all tensors, resume.

    SGLang handles messages in the order of sending, so all are sent before the first reply is awaited, and the pause contains
    no round trip. If SGLang refuses, it resumes with the weights it has, and the caller must not let it sample.

    Args:
        manager: SGLang's TokenizerManager. No request may be submitted meanwhile.
        tensors: every tensor of the model.
        label: SGLang's name of the new weights, visible once they are written.
        keep_kv: False recomputes keys and values of requests in flight and drops the prefix cache.
        by_plan: see `payloads`.
    Raises:
        EngineError: SGLang refused. The weights may be part old, part new.
    """
    update = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=payloads(tensors, num_schedulers, by_plan=by_plan),
        load_format="flattened_bucket",
        flush_cache=not keep_kv,
        weight_version=label,
    )
    await manager.pause_generation(PauseGenerationReqInput(mode="in_place" if keep_kv else "retract"))
    calls = [
        ("begin_weight_update", BeginWeightUpdateReqInput()),
        ("update_weights_from_tensor", update),
        # Always, because an open session would refuse the next load, which may repair a failed one.
        ("end_weight_update", EndWeightUpdateReqInput()),
    ]
    replies = [asyncio.create_task(_ask(call, getattr(manager, f"{call}_communicator"), m)) for call, m in calls]
    await asyncio.sleep(0)  # lets the tasks above send
    await manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    for problem in await asyncio.gather(*replies, return_exceptions=True):
        if problem is not None:
            raise problem


async def _ask(call: str, communicator: Any, message: Any) -> None:
    refusals = [reply.message for reply in await communicator(message) if not reply.success]
    if refusals:
        raise EngineError(f"{call}: {refusals[0]}")


def payloads(tensors: SharedTensors, num_schedulers: int, *, by_plan: bool) -> list[bytes]:
    """Return the message for each scheduler, in types that SGLang accepts: the tensors' locations.

    Args:
        by_plan: repeat the copies of the plan, which knows the locations. Else the model's loader gets the tensors.
    """
    places = [
        (name, str(t.dtype).removeprefix("torch."), list(t.shape), t.storage_offset() * t.element_size())
        for name, t in (() if by_plan else tensors)
    ]
    where = {"tensors": places, "file": tensors.arenas.file, "slot": tensors.slot, "writes": tensors.writes}
    return [pickle.dumps(where)] * num_schedulers


# -- in a scheduler ----------------------------------------------------------------------------------------------------


class Mapped:
    """The shared-memory files that one scheduler has mapped."""

    def __init__(self) -> None:
        self._files = Mappings()
        self.copies = Copies((), ())
        """Of the plan."""

    def tensors(self, where: dict[str, Any]) -> SharedTensors:
        """Return the tensors of a message of `payloads`, none if the plan has them. Raises WeightsError if they are missing or
        were overwritten."""
        arenas, views = self._files[where["file"]], []
        arenas.pin()
        for name, dtype, shape, start in where["tensors"]:
            like = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            views.append((name, arenas.memory[start : start + like.nbytes].view(like.dtype).view(like.shape)))
        return SharedTensors(views, arenas, where["slot"], where["writes"])
