"""From a Hugging Face folder to a sharded model that returns token log-probs.

One path for every number of ranks: FSDP2 on a one-dimensional mesh, a shard for each decoder layer and one for the
rest. Weights and optimizer are float32; where `dtype` is bfloat16, layers are gathered and run in bfloat16 and
gradients are summed in float32. Gradients are *summed* over ranks, not averaged: losses are already shares of the
step's loss.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from asyncgrpo.config import Config, LoraConfig
from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.logprobs import TokenScorer

LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Fields of model configs that change logits after the head, which `TokenScorer` calls itself."""


def build_model(
    path: str, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh, config: Config, *, trainable: bool = True
) -> TokenScorer:
    """Load, adapt and shard a causal language model. Collective: every rank of the mesh calls it.

    Args:
        path: folder of a Hugging Face model, or its hub id.
        dtype: of the forward pass and of the gathered weights; the master copy is float32.
        device: of this rank.
        mesh: the ranks that share the weights, one dimension.
        config: for LoRA, attention, activation checkpointing, reference offload and the sampling temperature.
        trainable: false for the reference: frozen, without adapters, offloaded if configured.
    Raises:
        ConfigError: the model cannot be loaded or trained here.
    """
    attention = choose_attention(config.learner.attention, device, dtype)
    language_model = load_language_model(path, attention)
    if not trainable:
        language_model.requires_grad_(False)
    elif config.model.lora.rank:
        language_model = add_adapters(language_model, config.model.lora, seed=config.run.seed)
    if trainable and config.learner.activation_checkpointing:
        language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        _train_without_dropout(language_model)
    scorer = TokenScorer(
        language_model,
        temperature=config.sampling.temperature,
        has_varlen_kernel=attention == "flash_attention_2",
    )
    offload = not trainable and config.learner.offload_reference and device.type == "cuda"
    _shard(scorer, _layers(language_model, path), dtype, mesh, CPUOffloadPolicy() if offload else OffloadPolicy())
    return scorer


def choose_attention(wish: str, device: torch.device, dtype: torch.dtype) -> str:
    """`sdpa` or `flash_attention_2`. Raises ConfigError if the wish cannot be met."""
    is_installed = importlib.util.find_spec("flash_attn") is not None
    can_flash = is_installed and device.type == "cuda" and dtype == torch.bfloat16
    if wish == "flash_attention_2" and not can_flash:
        reason = "flash_attn is not installed" if not is_installed else f"{device} with {dtype} cannot run it"
        raise ConfigError(f"learner.attention is flash_attention_2, but {reason}; use auto or sdpa")
    return "flash_attention_2" if can_flash and wish != "sdpa" else "sdpa"


def load_language_model(path: str, attention: str) -> PreTrainedModel:
    """The model in float32 on the CPU, in evaluation mode. Raises ConfigError."""
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.path ({path}) cannot be loaded as a causal language model: {error}") from error
    for field in LOGIT_TRANSFORMS:
        if getattr(model.config, field, None) not in (None, 1, 1.0):
            raise ConfigError(f"model.path ({path}) sets {field}, which the learner's log-probs do not apply")
    if get_checkpoint_conversion_mapping(model.config.model_type):
        raise ConfigError(
            f"model.path ({path}) is a {model.config.model_type}, whose tensors are named and shaped otherwise in "
            "memory than on disk; only models without such a conversion can be published"
        )
    return model.eval()


def add_adapters(model: PreTrainedModel, lora: LoraConfig, *, seed: int) -> PreTrainedModel:
    """Freeze the model and put LoRA adapters into its linear layers, the same ones for a seed on every rank."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.lora.rank is above 0, but peft is not installed; install asyncgrpo[lora]") from error
    adapters = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number works
        target_modules=list(lora.targets) or "all-linear",
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(adapters, model)
        except ValueError as error:
            raise ConfigError(f"model.lora.targets ({', '.join(lora.targets)}) fit no layer: {error}") from error
    return model


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The base model inside the block: the reference of a run with LoRA.

    Sets the flag directly, because peft's `enable_adapters` also flips `requires_grad`, which FSDP has already read.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _layers(model: PreTrainedModel, path: str) -> list[nn.Module]:
    """The decoder layers, by the class names that the model says must not be split."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"model.path ({path}): {type(model).__name__} does not name its decoder layers to shard")
    return layers


def _shard(
    scorer: TokenScorer, layers: list[nn.Module], dtype: torch.dtype, mesh: DeviceMesh, offload: OffloadPolicy
) -> None:
    """FSDP2 in place, layers first, then the rest with the scorer as root."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*layers, scorer):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def reshard(scorer: TokenScorer) -> None:
    """Drop gathered weights after a forward pass that has no backward.

    FSDP keeps those of the root for a backward that is expected next; the optimizer would step without them changing.
    """
    assert isinstance(scorer, FSDPModule)
    scorer.reshard()


def _train_without_dropout(model: nn.Module) -> None:
    """Transformers recomputes activations only in training mode, which must not change the log-probs."""
    model.train()
    for module in model.modules():
        for rate in ("p", "attention_dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
