"""How many bytes the backward pass of a real decoder keeps, counted without memory: what a prediction is held against.

The decoder of transformers runs forward on the meta device, and autograd is asked what it saves. Flash attention does not
run there; a stand-in saves what it saves: queries, keys, values, the output, and the logarithms of the softmax
denominators.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from asyncgrpo.learner import attention
from asyncgrpo.learner.attention import Family, Segments
from asyncgrpo.learner.model import _layers, _train_without_dropout


def saved_bytes(
    model: str | Path | PretrainedConfig,
    tokens: int,
    checkpointing: bool,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "meta",
) -> int:
    """Bytes that are kept at once, at most, for the backward pass of a decoder; without weights, gradients and head.

    Args:
        model: folder of a model, or its configuration.
        tokens: of the micro-batch.
        checkpointing: whether activations are recomputed, layer by layer. Then what is kept is the input of every
            layer, and everything of the one that is being recomputed.
        dtype: of the gathered weights.
        device: `cpu` runs the real attention kernel of the CPU.
    """
    config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model)
    with torch.device(device):
        language_model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _train_without_dropout(language_model)
    with mock.patch.dict(attention.KERNELS, {"saving": _flash_stand_in}):
        attention.install(language_model, "cpu" if device == "cpu" else "saving")
    layers = _layers(language_model, str(model))
    with torch.device(device), _inputs_of(layers) as inputs, _Saved(language_model) as everything:
        _forward(language_model, tokens)
    if not checkpointing:
        return everything.bytes()
    with _Saved(language_model) as of_one, torch.device(device):
        arguments, named = inputs[0]
        layers[0](*arguments, **named)
    shared = [x for _, named in inputs for x in _tensors(named.values())]  # positions, the same in all layers
    return _bytes_of([x for arguments, _ in inputs for x in _tensors(arguments)] + shared + of_one.tensors)


def _forward(model: PreTrainedModel, tokens: int) -> None:
    whole = Segments.of([Family((0, 0), (0, tokens))]) if next(model.parameters()).device.type == "cpu" else None
    model.get_decoder()(
        input_ids=torch.zeros(1, tokens, dtype=torch.int64),
        position_ids=torch.arange(tokens)[None],
        attention_mask=torch.ones(1, tokens),  # without one transformers looks at the positions, which have no values
        use_cache=False,
        segments=whole,
    )


class _Saved:
    """What autograd saves inside the block, but for the weights."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {_storage(p) for p in model.parameters()}
        self.tensors: list[Tensor] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda saved: saved)

    def bytes(self) -> int:
        return _bytes_of(self.tensors)

    def _pack(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._weights:
            self.tensors.append(tensor.detach())
        return tensor

    def __enter__(self) -> "_Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


@contextmanager
def _inputs_of(layers: Iterable[nn.Module]) -> Iterator[list[tuple[tuple, dict]]]:
    """Positional and named arguments of every layer that is called inside the block."""
    inputs: list[tuple[tuple, dict]] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args, named: inputs.append((args, named)), with_kwargs=True)
        for layer in layers
    ]
    yield inputs
    for handle in handles:
        handle.remove()


class _FlashStandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, tokens = query.shape[1], query.shape[0]
        out = query.new_empty(tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(heads, tokens, dtype=torch.float32))
        return out


def _flash_stand_in(query: Tensor, key: Tensor, value: Tensor, segments: None, scale: float) -> Tensor:
    return _FlashStandIn.apply(query, key, value)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Tensors among the values, and in tuples among them."""
    flat = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return [x for x in flat if isinstance(x, Tensor)]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Memory behind the tensors; what two of them share counts once."""
    return sum({_storage(x): x.untyped_storage().nbytes() for x in tensors}.values())


def _storage(tensor: Tensor) -> int:
    """Identity of a tensor's memory, also on the meta device, for as long as the tensor lives."""
    return tensor.untyped_storage()._cdata
