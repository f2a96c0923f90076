"""The size of a model: parameters, activations for the backward pass and KV cache, counted from its `config.json`.

The model that transformers builds from the file is made on torch's meta device, which takes no memory. One decoder layer of
each kind runs forward there, and autograd reports what it saves. Building takes 0.04 to 0.3 s a model.

torch and transformers are imported by the first count, not with this module.
"""

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncgrpo.config.reach import find_model
from asyncgrpo.config.rules import local_model
from asyncgrpo.host import importing

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

TOKENS = 16_384
"""Tokens of the counted forward pass, as many as in a usual micro-batch, over which fixed costs are spread."""


class Kept(NamedTuple):
    """Activations that one layer saves for the backward pass, for each token."""

    numbers: int
    """In the model's dtype."""
    other_bytes: int
    """Of tensors whose dtype is fixed: float32 in norms and softmax, int64 in routers."""
    widest: int
    """Numbers of the largest tensor."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    parameters: int
    linears: tuple[tuple[int, int], ...]
    """Inputs and outputs of the linear layers, which adapters can be put into. Fused experts and routers are not linear."""
    trained: Kept
    """Where all weights are trained."""
    adapted: Kept
    """Where only adapters of rank 1 are trained."""
    expert_parameters: int = 0
    """Of `parameters`, those of all experts that a router chooses from."""

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters in every linear layer."""
        return sum(rank * (inputs + outputs) for inputs, outputs in self.linears)

    def bytes_kept(self, itemsize: int, *, adapters: int = 0) -> int:
        """Bytes that one token keeps for the backward pass.

        Args:
            itemsize: bytes of a number in the model's dtype.
            adapters: their rank; 0: all weights are trained.
        """
        kept = self.adapted if adapters else self.trained
        narrow = (adapters - 1) * len(self.linears) if adapters else 0
        return itemsize * (kept.numbers + narrow) + kept.other_bytes


@dataclass(frozen=True)
class ModelSize:
    """The numbers of a model that `memory.py` calculates with."""

    root_parameters: int
    """Embedding, last norm and head."""
    layers: tuple[Layer, ...] = ()
    hidden: int = 0
    vocabulary: int = 0
    heads: int = 1
    """Of queries. Tensor parallelism divides them."""
    cache_heads: int = 1
    """Of keys and values; 1 where all share one latent vector."""
    cache_width: int = 0
    """Numbers that the KV cache keeps of a token, in one layer and head."""
    stored_bytes: int = 2
    """Bytes of a number in the files."""
    vision_parameters: int = 0
    """Of `root_parameters`, those of a vision tower, which are frozen."""
    pixels: int = 0
    """Numbers of the pixels of one image token."""
    vision_numbers: int = 0
    """Numbers that the tower holds at once for one image token, pixels aside."""

    @cached_property
    def parameters(self) -> int:
        return self.root_parameters + sum(layer.parameters for layer in self.layers)

    def adapter_parameters(self, rank: int) -> int:
        return sum(layer.adapter_parameters(rank) for layer in self.layers)

    def cache_bytes_per_token(self, itemsize: int, gpus: int) -> int:
        """Bytes of a token in the KV cache of each of `gpus` GPUs that share an engine. A head is not divided."""
        return len(self.layers) * -(-self.cache_heads // gpus) * self.cache_width * itemsize


# -- reading -----------------------------------------------------------------------------------------------------------


def size_at(path: str, *, may_download: bool = False) -> ModelSize | None:
    """Return the size of the model at a `model.path`. None: it cannot be known yet, or not at all.

    Args:
        may_download: fetch the `config.json` of a hub id, a few kilobytes, if it is not here.
    Raises:
        ConfigError: the model does not exist, or it is to be downloaded and the hub does not reply.
    """
    folder = find_model(path) if may_download else local_model(path)
    if folder is None and may_download:
        folder = _downloaded(path)
    try:
        return None if folder is None else size_of((folder / "config.json").read_text(encoding="utf-8"))
    except Exception as error:  # transformers raises whatever a broken file leads to
        why = " ".join(str(error).split())[:200]
        log.warning("model.path (%s): the memory of the run is not checked, because its size is unknown: %s", path, why)
        return None


def _downloaded(hub_id: str) -> Path | None:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(hub_id, "config.json", etag_timeout=5)).parent
    except Exception:  # no such model: loading its tokenizer reports it
        return None


# -- counting ----------------------------------------------------------------------------------------------------------


VISION = "visual"
"""Name of the vision tower in the models that have one."""


def model_class(config: Any) -> Any:
    """Return transformers' class that builds models of this config: with a vision tower where the config has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(config, "vision_config")
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


@cache
def size_of(config_json: str) -> ModelSize:
    """Return the size of the model that a `config.json` describes. Raises what transformers raises for one it cannot build."""
    with importing():
        import torch
        from torch import nn
        from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig

    config = AutoConfig.for_model(**json.loads(config_json))
    dtype = config.get_text_config().dtype or config.dtype  # before a model is made, which sets it
    AttentionInterface.register("counted", _flash())
    AttentionMaskInterface.register("counted", lambda *args, **named: None)
    with torch.device("meta"), torch.enable_grad():
        model = model_class(config).from_config(config, dtype=torch.bfloat16, attn_implementation="counted").eval()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        decoder = [m for m in model.get_decoder().modules() if type(m).__name__ in (model._no_split_modules or ())]
        args, named = _inputs(model, decoder[0])
        kinds: dict[Any, Layer] = {}
        layers = []
        for layer in decoder:
            kind = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
            if kind not in kinds:
                linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
                kinds[kind] = Layer(
                    parameters=sum(parameter.numel() for parameter in layer.parameters()),
                    linears=tuple((linear.in_features, linear.out_features) for linear in linears),
                    trained=_kept(layer, args, named),
                    adapted=_kept(_with_adapters(layer, linears), args, named),
                    expert_parameters=sum(shape.numel() for name, shape in kind if ".experts." in name),
                )
            layers.append(kinds[kind])
    vision = _vision_of(model, config)
    config = config.get_text_config()
    cache_heads, cache_width = cache_of(config)
    return ModelSize(
        root_parameters=parameters - sum(layer.parameters for layer in layers),
        layers=tuple(layers),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        heads=config.num_attention_heads,
        cache_heads=cache_heads,
        cache_width=cache_width,
        stored_bytes=4 if dtype == torch.float32 else 2,
        **vision,
    )


def _vision_of(model: Any, config: Any) -> dict[str, int]:
    """Return the fields of `ModelSize` about a vision tower; none without one."""
    tower = getattr(model.base_model, VISION, None)
    if tower is None:
        return {}
    seen = config.vision_config
    patches = seen.spatial_merge_size**2
    # Residual, norm, and the wider of queries, keys, values and output and of the MLP before and after its activation.
    numbers = 2 * seen.hidden_size + max(4 * seen.hidden_size, 2 * seen.intermediate_size)
    return {
        "vision_parameters": sum(parameter.numel() for parameter in tower.parameters()),
        "pixels": patches * 3 * seen.temporal_patch_size * seen.patch_size**2,
        "vision_numbers": patches * numbers,
    }


@cache
def _flash() -> Callable[..., Any]:
    """Attention for transformers that computes nothing and saves what flash attention saves."""
    import torch

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: "Tensor", key: "Tensor", value: "Tensor") -> "Tensor":
            _, heads, tokens, _ = query.shape
            out = query.new_empty(1, tokens, heads, value.shape[-1])
            denominators = query.new_empty(heads, tokens, dtype=torch.float32)
            ctx.save_for_backward(query, key, value, out, denominators)
            return out

    return lambda module, query, key, value, *args, **named: (Flash.apply(query, key, value), None)


class _Called(Exception):
    """Ends a forward pass at its first decoder layer."""


def _inputs(model: Any, layer: "nn.Module") -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments with which `model` calls its first decoder layer. The hidden states have a gradient."""
    import torch

    def stop(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _Called(args, named)

    layer.register_forward_pre_hook(stop, with_kwargs=True)
    ids, positions = torch.zeros(1, TOKENS, dtype=torch.int64), torch.arange(TOKENS)[None]
    mask = torch.ones(1, TOKENS)  # without one transformers looks at the positions, which have no values
    try:
        model.get_decoder()(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
    except _Called as called:
        (hidden, *others), named = called.args
    layer._forward_pre_hooks.clear()
    return [hidden.detach().requires_grad_(), *others], named


def _kept(layer: "nn.Module", args: list[Any], named: dict[str, Any]) -> Kept:
    """What autograd saves of a layer, weights and the layer's inputs aside. Tensors that share memory count once."""
    import torch

    def storage(tensor: "Tensor") -> int:
        """Identity of a tensor's memory, for as long as the tensor lives."""
        return tensor.untyped_storage()._cdata

    saved: dict[int, Tensor] = {}  # it keeps the tensors alive
    flat = [x for value in (*args, *named.values()) for x in (value if isinstance(value, tuple) else (value,))]
    others = {storage(x) for x in (*layer.parameters(), *flat) if isinstance(x, torch.Tensor)}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.setdefault(storage(x), x.detach()), lambda x: x):
        layer(*args, **named)
    activations = [x for where, x in saved.items() if where not in others]
    in_dtype = sum(x.untyped_storage().nbytes() for x in activations if x.dtype == torch.bfloat16)
    in_all = sum(x.untyped_storage().nbytes() for x in activations)
    widest = max(x.numel() for x in activations)
    return Kept(in_dtype // 2 // TOKENS, (in_all - in_dtype) // TOKENS, widest // TOKENS)


def _with_adapters(layer: "nn.Module", linears: "Iterable[nn.Linear]") -> "nn.Module":
    """Freeze a layer, and add an adapter of rank 1 to its linear layers."""
    from torch import empty
    from torch.nn.functional import linear as multiply

    def add(linear: "nn.Linear", args: tuple[Any, ...], out: "Tensor") -> "Tensor":
        down = empty(1, linear.in_features, dtype=out.dtype, requires_grad=True)
        up = empty(linear.out_features, 1, dtype=out.dtype, requires_grad=True)
        return out + multiply(multiply(args[0], down), up)

    layer.requires_grad_(False)
    for linear in linears:
        linear.register_forward_hook(add)
    return layer


def cache_of(config: Any) -> tuple[int, int]:
    """Heads of the KV cache and numbers of each for a token: keys and values, or the latent vector that all heads share."""
    if latent := getattr(config, "kv_lora_rank", None):
        return 1, latent + config.qk_rope_head_dim
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads, 2 * width
