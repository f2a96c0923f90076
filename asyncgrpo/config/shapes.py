"""How large a model is, from its `config.json`: parameters, and what a forward pass keeps for the backward pass.

Pure arithmetic, without torch. For the architectures in `_KINDS` the number of parameters is exact. For any other model it
comes from the size of its files, and the layers are taken for those of a Llama.

What a token keeps is counted in numbers of two kinds: those that are float32 whatever the model's dtype, and those in that
dtype. It is what torch saves of transformers' layers with the learner's attention.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from asyncgrpo.config.reach import find_model
from asyncgrpo.config.rules import local_model

Settings = Mapping[str, Any]
"""What `config.json` says."""
Linear = tuple[int, int]
"""Inputs and outputs of a linear layer."""


@dataclass(frozen=True)
class Part:
    """Attention, or what follows it in a decoder layer. All that a token keeps is counted in numbers."""

    parameters: int
    linears: tuple[Linear, ...]
    """The linear layers that adapters can be put into; fused experts and routers are none."""
    kept: int
    """In the model's dtype."""
    kept_float32: int = 0
    kept_for_weights: int = 0
    """Of `kept`: only for the gradients of weights that have none where adapters are trained: norms, experts, routers."""
    float32_for_weights: int = 0
    """Of `kept_float32`, likewise."""
    widest: int = 0
    """Of the largest gradients that exist at once."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention: Part
    mlp: Part

    @property
    def parameters(self) -> int:
        return self.attention.parameters + self.mlp.parameters

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.attention.linears + self.mlp.linears

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters in every linear layer."""
        return sum(rank * (inputs + outputs) for inputs, outputs in self.linears)

    def bytes_kept(self, itemsize: int, *, adapters: int = 0) -> int:
        """Bytes that one token keeps for the backward pass.

        Args:
            itemsize: bytes of a number in the model's dtype.
            adapters: their rank; 0: all weights are trained.
        """
        whole = _together(self.attention, self.mlp)
        if not adapters:
            return itemsize * whole.kept + 4 * whole.kept_float32
        narrow = adapters * len(whole.linears)
        return itemsize * (whole.kept - whole.kept_for_weights + narrow) + 4 * (
            whole.kept_float32 - whole.float32_for_weights
        )


@dataclass(frozen=True)
class ModelShape:
    """What the arithmetic of `memory.py` must know of a model."""

    kind: str
    """`model_type` of its `config.json`."""
    hidden: int
    vocabulary: int
    is_tied: bool
    """The head is the embedding."""
    layers: tuple[Layer, ...]
    heads: int
    """Of queries. Tensor parallelism divides them."""
    cache_heads: int
    """Of keys and values; 1 where all share one latent vector."""
    cache_width: int
    """Numbers that the KV cache keeps of a token, in one layer and head."""
    stored_bytes: int = 2
    """Bytes of a number in the files."""
    total: int | None = None
    """Parameters by the size of the files, for an architecture that is not known. None: they are counted."""

    @cached_property
    def parameters(self) -> int:
        return self.root_parameters + sum(self.layer_parameters)

    @property
    def root_parameters(self) -> int:
        """Embedding, last norm and head."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2) + self.hidden

    @cached_property
    def layer_parameters(self) -> tuple[int, ...]:
        """Parameters of each layer; equal shares of what the files leave, for an architecture that is not known."""
        if self.total is None:
            return tuple(layer.parameters for layer in self.layers)
        return (max(self.total - self.root_parameters, 0) // len(self.layers),) * len(self.layers)

    def adapter_parameters(self, rank: int) -> int:
        return sum(layer.adapter_parameters(rank) for layer in self.layers)

    def cache_bytes_per_token(self, itemsize: int, gpus: int) -> int:
        """Bytes of a token in the KV cache of each of `gpus` GPUs that share an engine. A head is not divided."""
        return len(self.layers) * -(-self.cache_heads // gpus) * self.cache_width * itemsize


# -- reading -----------------------------------------------------------------------------------------------------------


def shape_at(path: str, *, may_download: bool = False) -> ModelShape | None:
    """The shape of the model at a `model.path`. None: it cannot be known yet.

    Args:
        may_download: fetch the `config.json` of a hub id, a few kilobytes, if it is not here.
    Raises:
        ConfigError: there is no such model, or it is to be downloaded and the hub does not reply.
    """
    folder = find_model(path) if may_download else local_model(path)
    if folder is None and may_download:
        folder = _downloaded(path)
    return None if folder is None else read_shape(folder)


def _downloaded(hub_id: str) -> Path | None:
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(hub_id, "config.json", etag_timeout=5)).parent
    except Exception:  # no such model: loading its tokenizer says so
        return None


def read_shape(folder: Path) -> ModelShape | None:
    """The shape of the model in a folder. None: its `config.json` does not say enough."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return shape_of(settings, weights_bytes(folder))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def shape_of(settings: Settings, num_bytes: int = 0) -> ModelShape:
    """The shape that a `config.json` describes.

    Args:
        num_bytes: of the weights on disk, which tell the size of an architecture that is not known; 0: unknown.
    Raises:
        KeyError, TypeError, ValueError: it does not say enough.
    """
    settings = settings.get("text_config") or settings
    kind = str(settings.get("model_type"))
    total = None
    stored_bytes = 4 if str(settings.get("dtype") or settings.get("torch_dtype")) == "float32" else 2
    if kind not in _KINDS:
        if not num_bytes:
            raise ValueError(f"{kind} is not known, and there are no files to tell its size")
        total = num_bytes // stored_bytes
    layer, cache = _KINDS.get(kind, (_llama, _grouped_cache))
    heads, width = cache(settings)
    return ModelShape(
        kind=kind,
        hidden=settings["hidden_size"],
        vocabulary=settings["vocab_size"],
        is_tied=bool(settings.get("tie_word_embeddings", False)),
        layers=tuple(layer(settings, index) for index in range(settings["num_hidden_layers"])),
        heads=settings["num_attention_heads"],
        cache_heads=heads,
        cache_width=width,
        stored_bytes=stored_bytes,
        total=total,
    )


def weights_bytes(folder: Path) -> int:
    """Bytes of the weights in a folder, by their index or by the sizes of the files; 0 where there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        size = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
        if isinstance(size, int):
            return size
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# -- layers ------------------------------------------------------------------------------------------------------------


def _linear_parameters(linears: tuple[Linear, ...], *, bias: bool = False) -> int:
    return sum(inputs * outputs + (outputs if bias else 0) for inputs, outputs in linears)


def _norm(width: int) -> Part:
    """It keeps its input in float32, a factor, what the weight is multiplied with, and its output, for who reads it."""
    return Part(width, (), kept=2 * width, kept_float32=width + 1, kept_for_weights=width)


def _together(*parts: Part) -> Part:
    return Part(
        parameters=sum(part.parameters for part in parts),
        linears=tuple(linear for part in parts for linear in part.linears),
        kept=sum(part.kept for part in parts),
        kept_float32=sum(part.kept_float32 for part in parts),
        kept_for_weights=sum(part.kept_for_weights for part in parts),
        float32_for_weights=sum(part.float32_for_weights for part in parts),
        widest=max(part.widest for part in parts),
    )


def _head_norm(width: int, heads: int) -> Part:
    """One norm for all heads. What it puts out is rotated at once, and not kept."""
    return Part(width, (), kept=heads * width, kept_float32=heads * (width + 1), kept_for_weights=heads * width)


def _head_width(settings: Settings) -> int:
    return int(settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"])


def _key_heads(settings: Settings) -> int:
    return int(settings.get("num_key_value_heads") or settings["num_attention_heads"])


def _attention(settings: Settings, *, bias: bool = False, out_bias: bool = False, has_norms: bool = False) -> Part:
    """Grouped queries: three linear layers, attention, which keeps queries, keys, values, result and denominators."""
    hidden, width = settings["hidden_size"], _head_width(settings)
    heads, groups = settings["num_attention_heads"], _key_heads(settings)
    inwards = ((hidden, heads * width), (hidden, groups * width), (hidden, groups * width))
    outwards = ((heads * width, hidden),)
    parts = [
        _norm(hidden),
        Part(
            _linear_parameters(inwards, bias=bias) + _linear_parameters(outwards, bias=out_bias),
            inwards + outwards,
            kept=2 * (heads + groups) * width,
            kept_float32=heads,
            widest=3 * heads * width,
        ),
    ]
    if has_norms:
        parts += [_head_norm(width, heads), _head_norm(width, groups)]
    return _together(*parts)


def _gated(settings: Settings, inner: int, *, bias: bool = False) -> Part:
    """down(silu(gate(x)) * up(x)), which keeps all four."""
    hidden = settings["hidden_size"]
    linears = ((hidden, inner), (hidden, inner), (inner, hidden))
    return Part(_linear_parameters(linears, bias=bias), linears, kept=4 * inner, widest=3 * inner)


def _experts(settings: Settings, count: int) -> Part:
    """Fused experts and their router. Every chosen expert keeps what it reads, its four inner vectors and its result."""
    hidden, inner, chosen = settings["hidden_size"], settings["moe_intermediate_size"], settings["num_experts_per_tok"]
    return Part(
        count * hidden + count * 3 * hidden * inner,
        (),
        kept=chosen * (2 * hidden + 4 * inner),
        kept_float32=count + 8 * chosen,  # scores, and places of the chosen ones, some as int64
        kept_for_weights=chosen * (hidden + inner),
        widest=chosen * 3 * inner + 2 * chosen * hidden,
    )


def _llama(settings: Settings, _: int) -> Layer:
    bias = bool(settings.get("attention_bias", False))
    mlp = _gated(settings, settings["intermediate_size"], bias=bool(settings.get("mlp_bias", False)))
    return Layer(_attention(settings, bias=bias, out_bias=bias), _together(_norm(settings["hidden_size"]), mlp))


def _qwen2(settings: Settings, _: int) -> Layer:
    mlp = _gated(settings, settings["intermediate_size"])
    return Layer(_attention(settings, bias=True), _together(_norm(settings["hidden_size"]), mlp))


def _qwen3(settings: Settings, index: int) -> Layer:
    bias = bool(settings.get("attention_bias", False))
    experts = settings.get("num_experts") or settings.get("num_local_experts") or 0
    dense, every = settings.get("mlp_only_layers") or (), settings.get("decoder_sparse_step", 1)
    is_mixture = index not in dense and (index + 1) % every == 0
    attention = _attention(settings, bias=bias, out_bias=bias, has_norms=True)
    norm = _norm(settings["hidden_size"])
    if not (experts and is_mixture):
        return Layer(attention, _together(norm, _gated(settings, settings["intermediate_size"])))
    # Frozen experts and a frozen router keep nothing of the norm's output.
    norm = replace(norm, kept_for_weights=norm.kept)
    return Layer(attention, _together(norm, _experts(settings, experts)))


def _deepseek(settings: Settings, index: int) -> Layer:
    hidden = settings["hidden_size"]
    if index < settings.get("first_k_dense_replace", 0):
        return Layer(
            _latent_attention(settings), _together(_norm(hidden), _gated(settings, settings["intermediate_size"]))
        )
    count = settings.get("n_routed_experts") or settings["num_local_experts"]
    shared = _gated(settings, settings["moe_intermediate_size"] * settings["n_shared_experts"])
    scores = Part(
        0, (), kept=0, kept_float32=hidden + 2 * count, float32_for_weights=hidden
    )  # the router reads and scores in float32
    return Layer(_latent_attention(settings), _together(_norm(hidden), _experts(settings, count), scores, shared))


def _latent_attention(settings: Settings) -> Part:
    """Queries, and keys with values, go through a narrow vector each; a part of the keys is shared by all heads."""
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    rotary, plain, value = settings["qk_rope_head_dim"], settings["qk_nope_head_dim"], settings["v_head_dim"]
    narrow, of_queries = settings["kv_lora_rank"], settings.get("q_lora_rank")
    bias = bool(settings.get("attention_bias", False))
    first: tuple[Linear, ...] = ((hidden, narrow + rotary), (heads * value, hidden))
    second: tuple[Linear, ...] = ((narrow, heads * (plain + value)),)
    parts = [_norm(hidden), _norm(narrow)]
    if of_queries:
        first, second = (*first, (hidden, of_queries)), (*second, (of_queries, heads * (plain + rotary)))
        parts.append(_norm(of_queries))
    else:
        second = (*second, (hidden, heads * (plain + rotary)))
    both = Part(
        _linear_parameters(first, bias=bias) + _linear_parameters(second),
        first + second,
        # Values are kept with the plain part of the keys, of which they are a view.
        kept=heads * (2 * (plain + rotary) + (plain + value) + value),
        kept_float32=heads,
        widest=heads * 3 * (plain + rotary),
    )
    return _together(both, *parts)


def _grouped_cache(settings: Settings) -> tuple[int, int]:
    return _key_heads(settings), 2 * _head_width(settings)


def _latent_cache(settings: Settings) -> tuple[int, int]:
    return 1, settings["kv_lora_rank"] + settings["qk_rope_head_dim"]


_KINDS: dict[str, tuple[Callable[[Settings, int], Layer], Callable[[Settings], tuple[int, int]]]] = {
    "llama": (_llama, _grouped_cache),
    "mistral": (_llama, _grouped_cache),
    "qwen2": (_qwen2, _grouped_cache),
    "qwen3": (_qwen3, _grouped_cache),
    "qwen3_moe": (_qwen3, _grouped_cache),
    "deepseek_v3": (_deepseek, _latent_cache),
}
"""`model_type` to the layers, and to heads and width of the cache."""


# -- published models --------------------------------------------------------------------------------------------------


def _published(
    kind: str, vocabulary: int, row: tuple[int, int, int, int, int], *, width: int = 128, tied: bool
) -> dict:
    hidden, layers, heads, groups, inner = row
    return {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": inner,
        "head_dim": width,
        "tie_word_embeddings": tied,
    }


PUBLISHED: dict[str, Settings] = {
    "Qwen3-0.6B": _published("qwen3", 151_936, (1024, 28, 16, 8, 3072), tied=True),
    "Qwen3-1.7B": _published("qwen3", 151_936, (2048, 28, 16, 8, 6144), tied=True),
    "Qwen2.5-3B": _published("qwen2", 151_936, (2048, 36, 16, 2, 11008), tied=True),
    "Qwen3-4B": _published("qwen3", 151_936, (2560, 36, 32, 8, 9728), tied=True),
    "Qwen3-8B": _published("qwen3", 151_936, (4096, 36, 32, 8, 12288), tied=False),
    "Qwen3-14B": _published("qwen3", 151_936, (5120, 40, 40, 8, 17408), tied=False),
    "Qwen3-32B": _published("qwen3", 151_936, (5120, 64, 64, 8, 25600), tied=False),
    "Llama-3.1-70B": _published("llama", 128_256, (8192, 80, 64, 8, 28672), tied=False),
}
"""What the `config.json` of models that many train says of their size, smallest first."""
