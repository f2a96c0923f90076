"""From a Hugging Face folder to a sharded model that trains on packed completions.

Only positions that predict a sampled token go through the head, and only a tile of them at a time (`head`). The scorer
is the root of what FSDP shards, because embedding and head are used inside its forward.

One path for every number of ranks: FSDP2 on a one-dimensional mesh, a shard for each decoder layer and one for the
rest. What is trained, and its optimizer, are float32; where `dtype` is bfloat16, layers are gathered and run in bfloat16
and gradients are summed in float32. Frozen weights are kept in `dtype`, where that loses nothing. Gradients are *summed*
over ranks, not averaged: losses are already shares of the step's loss.
"""

import contextlib
import errno
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncgrpo.config.fit import keeps_activations
from asyncgrpo.config.memory import Card
from asyncgrpo.config.schema import CRITIC, Config, LoraConfig
from asyncgrpo.config.shapes import shape_at
from asyncgrpo.errors import ConfigError, WeightsError
from asyncgrpo.learner import attention, loading
from asyncgrpo.learner.head import Reference, TokenScores, fused_loss, score
from asyncgrpo.learner.loading import ShardReader
from asyncgrpo.learner.objective import MicrobatchObjective
from asyncgrpo.learner.packing import PackedBatch
from asyncgrpo.weights.files import disk_tensors

log = logging.getLogger(__name__)

# -- hidden states where something is read -----------------------------------------------------------------------------


class Scored(NamedTuple):
    """What a forward pass says of the N sampled tokens of a micro-batch."""

    loss: Tensor | None
    """[] a root whose gradient is that of the micro-batch's loss; none without an objective."""
    scores: TokenScores
    values: Tensor | None
    """[N] float32, of the critic, with gradient; none where there is no critic."""
    hidden: Tensor
    """[N, D] what the head reads, without gradient."""


class TokenScorer(nn.Module):
    """The model, with the sampling temperature, and a value head where there is a critic."""

    language_model: PreTrainedModel

    def __init__(self, language_model: PreTrainedModel, *, temperature: float, has_critic: bool = False) -> None:
        super().__init__()
        self.language_model = language_model
        self.temperature = temperature
        self.is_compiled = False
        """True if the head's loss is compiled."""
        self.value_head: nn.Linear | None = None
        if has_critic:  # begins at 0: before it has learned anything, every value is the same
            self.value_head = nn.Linear(self.head.in_features, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    @property
    def head(self) -> nn.Linear:
        """From hidden states to logits."""
        return cast(nn.Linear, self.language_model.get_output_embeddings())

    def forward(
        self,
        batch: PackedBatch,
        objective: MicrobatchObjective | None = None,
        *,
        reference: Reference | None = None,
        is_elementwise: bool = True,
        temperature: float | None = None,
    ) -> Scored:
        """Scores of a micro-batch and, with an objective, the root of its loss.

        Args:
            batch: on the model's device.
            objective: none: scores only.
            reference: for an objective with a full KL.
            is_elementwise: whether the objective can be asked tile by tile; else all log-probs are computed first.
            temperature: of scores without an objective; none: that of the sampling.
        """
        hidden = self._read(batch)
        weight = self.head.weight
        if objective is None:
            scores = score(hidden, weight, batch.targets, temperature=temperature or self.temperature)
            return Scored(None, scores, self._values(hidden), hidden.detach())
        if not is_elementwise:
            objective.use_scores(score(hidden.detach(), weight, batch.targets, temperature=self.temperature))
        loss, scores = fused_loss(
            hidden,
            weight,
            batch.targets,
            objective,
            temperature=self.temperature,
            reference=reference,
            is_compiled=self.is_compiled,
        )
        return Scored(loss, scores, self._values(hidden), hidden.detach())

    def _read(self, batch: PackedBatch) -> Tensor:
        """[N, D] last hidden states of the positions before the sampled tokens."""
        output = self.language_model.get_decoder()(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            segments=batch.segments,
        )
        return output.last_hidden_state[0].index_select(0, batch.read_at)

    def _values(self, hidden: Tensor) -> Tensor | None:
        return None if self.value_head is None else self.value_head(hidden).float().sum(-1)


@torch.no_grad()
def whole(weight: Tensor, like: Tensor) -> Tensor:
    """A sharded weight in one piece. Collective."""
    full = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full.to(like.device, like.dtype)


# -- building and sharding ---------------------------------------------------------------------------------------------


_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO})
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Fields of model configs that change logits after the head, which `TokenScorer` calls itself."""


def build_model(
    path: str, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh, config: Config, *, trainable: bool = True
) -> TokenScorer:
    """Load, adapt and shard a causal language model. Collective: every rank of the mesh calls it.

    Args:
        path: folder of a Hugging Face model, or its hub id.
        dtype: of the forward pass and of the gathered weights; the master copy of what is trained is float32.
        device: of this rank.
        mesh: the ranks that share the weights, one dimension.
        config: for LoRA, attention, activation checkpointing, reference offload and the sampling temperature.
        trainable: false for the reference: frozen, without adapters, offloaded if configured.
    Raises:
        ConfigError: the model cannot be loaded or trained here.
    """
    kernel = choose_kernel(device, dtype)
    language_model, reader = unread_language_model(
        path, longest=config.data.max_prompt_tokens + config.sampling.max_tokens
    )
    attention.install(language_model, kernel)
    if not trainable:
        language_model.requires_grad_(False)
    elif config.model.lora.rank:
        with loading.as_if_on_cpu(language_model) if reader else contextlib.nullcontext():
            language_model = add_adapters(language_model, config.model.lora, seed=config.run.seed)
    if trainable and recomputes(config, device):
        language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        _train_without_dropout(language_model)
    scorer = TokenScorer(
        language_model,
        temperature=config.sampling.temperature,
        has_critic=trainable and config.algorithm.advantage == CRITIC,
    )
    layers = _layers(language_model, path)
    offload = not trainable and config.learner.offload_reference and device.type == "cuda"
    if reader:
        _narrow_frozen(scorer, reader, dtype, is_reference=not trainable)
    _shard(scorer, layers, dtype, mesh, CPUOffloadPolicy() if offload else OffloadPolicy())
    if reader:
        loading.fill(scorer, reader, _name_in_memory, torch.device("cpu") if offload else device)
    return scorer


def unread_language_model(path: str, *, longest: int) -> tuple[PreTrainedModel, ShardReader | None]:
    """The model without memory, and what reads it; or the whole model, where only transformers can read it.

    Raises ConfigError.
    """
    with _loading(path):
        model = loading.without_memory(path)
    try:
        reader = ShardReader(model, path)
    except WeightsError as error:
        log.warning("model.path (%s): every rank loads the whole model, because %s", path, error)
        return load_language_model(path, longest=longest), None
    _refuse_what_differs(model, path, longest)
    return model, reader


def _narrow_frozen(scorer: TokenScorer, reader: ShardReader, dtype: torch.dtype, *, is_reference: bool) -> None:
    """Keep frozen weights in `dtype` where no number is changed by it: they are gathered in it anyway.

    A base under adapters is merged with them too, so it is narrowed only where the files have no more than `dtype` holds.
    """

    def narrowed(name: str, parameter: nn.Parameter) -> Tensor:
        is_narrowed = not parameter.requires_grad and (is_reference or reader.holds(_name_in_memory(name), dtype))
        return torch.empty_like(parameter, dtype=dtype) if is_narrowed else parameter

    loading.replace_parameters(scorer, narrowed)


def _name_in_memory(name: str) -> str:
    """The name that a parameter of the scorer has in the model alone, without adapters."""
    return name.removeprefix("language_model.").replace(".base_layer.", ".")


def recomputes(config: Config, device: torch.device) -> bool:
    """True if activations are recomputed in the backward pass: as configured, else on a GPU that cannot hold them.

    Collective. All ranks do as the one with the smallest GPU: they gather weights in the same order.
    """
    wish = config.learner.activation_checkpointing
    if wish is not None or device.type == "cpu":
        return bool(wish)
    memory = torch.tensor(torch.cuda.get_device_properties(device).total_memory)
    dist.all_reduce(memory, dist.ReduceOp.MIN)
    shape = shape_at(config.model.path)
    return shape is None or not keeps_activations(shape, config, Card.of(config, int(memory)))


def choose_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name in `attention.KERNELS` of the fastest kernel that is installed and runs there."""
    if device.type == "cpu":
        return "cpu"
    if dtype != torch.bfloat16:  # the two flash kernels have no float32
        return "sdpa"
    if attention.flash_function() is not None:
        return "flash_attention_2"
    return "varlen" if attention.varlen_function() is not None else "sdpa"


def load_language_model(path: str, *, longest: int) -> PreTrainedModel:
    """The model in float32 on the CPU, in evaluation mode, for sequences of up to `longest` tokens.

    Raises ConfigError.
    """
    with _loading(path):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    _refuse_what_differs(model, path, longest)
    return model.eval()


def check_language_model(path: str, config: Config, device: torch.device) -> PreTrainedModel:
    """Everything that `build_model` would refuse, but for the weights themselves, which are not read.

    Args:
        path: folder of the model; the hub is not asked.
        device: that the learner will run on.
    Returns:
        The model without memory, with its adapters.
    Raises:
        ConfigError: the model cannot be trained as configured.
    """
    with torch.device("meta"):
        with _loading(path):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        _refuse_what_differs(model, path, config.data.max_prompt_tokens + config.sampling.max_tokens)
        _layers(model, path)
        return add_adapters(model, config.model.lora, seed=config.run.seed) if config.model.lora.rank else model


@contextlib.contextmanager
def _loading(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # transformers raises whatever a broken file leads to
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise  # the model is well, and the next start may find room
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"model.path ({path}) cannot be loaded as a causal language model: {reason}") from error


def _refuse_what_differs(model: PreTrainedModel, path: str, longest: int) -> None:
    """Raise ConfigError for a model whose attention or head is not what ours computes, or that cannot be published."""
    settings = model.config
    window = getattr(settings, "sliding_window", None)
    kinds = getattr(settings, "layer_types", None) or ["sliding_attention"]
    slides = getattr(settings, "use_sliding_window", True) and "sliding_attention" in kinds
    if window is not None and slides and window < longest:
        raise ConfigError(
            f"model.path ({path}) attends to {window} tokens in some layers, but prompt and completion may have "
            f"{longest} (data.max_prompt_tokens + sampling.max_tokens), and the learner has no sliding window"
        )
    if getattr(settings, "attn_logit_softcapping", None) or any(
        n.endswith(".sinks") for n, _ in model.named_parameters()
    ):
        raise ConfigError(
            f"model.path ({path}) is a {settings.model_type}, whose attention the learner does not compute"
        )
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"model.path ({path}) has a head with a bias, which the learner does not compute")
    for field in LOGIT_TRANSFORMS:
        if getattr(settings, field, None) not in (None, 1, 1.0):
            raise ConfigError(f"model.path ({path}) sets {field}, which the learner's log-probs do not apply")
    try:
        disk_tensors(model)
    except ValueError as error:
        raise ConfigError(
            f"model.path ({path}) is a {settings.model_type}, which can be trained but not published: {error}"
        ) from error


def add_adapters(model: PreTrainedModel, lora: LoraConfig, *, seed: int) -> PreTrainedModel:
    """Freeze the model and put LoRA adapters into its linear layers, the same ones for a seed on every rank."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.lora.rank is above 0, but peft is not installed; install asyncgrpo[lora]") from error
    adapters = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number works
        target_modules=list(lora.targets) or _linear_layers(model),
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            # In a plain container peft takes names as they are. Of a transformers model it would translate those of
            # experts on disk, and adapt the fused experts by swapping parameters that FSDP has sharded.
            peft.inject_adapter_in_model(adapters, nn.ModuleList([model]))
        except ValueError as error:
            raise ConfigError(f"model.lora.targets ({', '.join(lora.targets)}) fit no layer: {error}") from error
    return model


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of all linear layers but the head; fused experts and routers are none."""
    head = model.get_output_embeddings()
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]


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
    for sharded in _sharded(scorer):
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)


def keep_gathered(scorer: TokenScorer, keep: bool) -> None:
    """Whether gathered weights stay from one micro-batch to the next, and gradients are only reduced at the end.

    Saves gathering and reducing for each micro-batch, for the memory of one whole copy of weights and gradients.
    """
    for module in _sharded(scorer):
        module.set_reshard_after_forward(not keep, recurse=False)
        module.set_reshard_after_backward(not keep, recurse=False)
        module.set_requires_gradient_sync(not keep, recurse=False)


def reshard(scorer: TokenScorer) -> None:
    """Drop gathered weights: the next forward pass gathers those that the optimizer made."""
    for module in _sharded(scorer):
        module.reshard()


def decoder_layers(scorer: TokenScorer) -> list[nn.Module]:
    """The layers of a sharded model."""
    sharded: list[Any] = [module for module in _sharded(scorer) if module is not scorer]
    return sharded


def _sharded(scorer: TokenScorer) -> list[FSDPModule]:
    return [module for module in scorer.modules() if isinstance(module, FSDPModule)]


def _train_without_dropout(model: nn.Module) -> None:
    """Transformers recomputes activations only in training mode, which must not change the log-probs."""
    model.train()
    for module in model.modules():
        for rate in ("p", "attention_dropout"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
