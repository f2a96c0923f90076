"""From a Hugging Face folder to a sharded model that trains on packed completions.

Only positions that predict a sampled token go through the head, one tile at a time (`head`). The scorer is the FSDP root,
because its forward uses embedding and head.

All numbers of ranks use one path: FSDP2, one shard group per decoder layer and one for the rest (`parallel` has the layouts).
Trained parameters and their optimizer are float32. With `dtype` bfloat16, layers are gathered and run in bfloat16, and
gradients are reduced in float32. Frozen weights are stored in `dtype` if that is lossless. Gradients are summed over ranks,
not averaged, because losses are already shares of the step's loss.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncgrpo.config.memory import Card
from asyncgrpo.config.model_size import model_class, size_at
from asyncgrpo.config.placement import keeps_activations
from asyncgrpo.config.schema import CRITIC, Config, LoraConfig
from asyncgrpo.data.images import Images
from asyncgrpo.errors import ConfigError, WeightsError
from asyncgrpo.learner import attention, loading
from asyncgrpo.learner.head import LossGradients, Reference, Teacher, TokenScores, fused_loss, score
from asyncgrpo.learner.loading import ShardReader
from asyncgrpo.learner.objective import MicrobatchObjective
from asyncgrpo.learner.packing import PackedBatch
from asyncgrpo.learner.parallel import ALONE, Ranks, Row, distribute_experts, refuse_layout
from asyncgrpo.learner.routing import UNBALANCED, Balance, Routers, routers_of
from asyncgrpo.learner.vision import Vision, tower_of
from asyncgrpo.weights.files import disk_tensors

log = logging.getLogger(__name__)

# -- forward -----------------------------------------------------------------------------------------------------------


class Scored(NamedTuple):
    """Result of a forward pass for the N sampled tokens of a micro-batch."""

    loss: Tensor | None
    """[] root whose gradient is that of the micro-batch's loss; None without an objective."""
    scores: TokenScores
    values: Tensor | None
    """[N] float32, values of the critic, with gradient for this rank's share; None without a critic."""
    hidden: Tensor
    """[n, D] input of the head for this rank's share (`Row`) of the tokens, without gradient."""


class TokenScorer(nn.Module):
    """The model with the sampling temperature, and a value head if there is a critic."""

    language_model: PreTrainedModel

    def __init__(
        self,
        language_model: PreTrainedModel,
        row: Row = ALONE,
        balance: Balance = UNBALANCED,
        *,
        temperature: float,
        has_critic: bool = False,
        images: Images | None = None,
    ) -> None:
        super().__init__()
        self.language_model, self.row = language_model, row
        self.vision = Vision(language_model, images) if tower_of(language_model) is not None else None
        self.routers = Routers(language_model, balance)
        self.temperature = temperature
        self.is_compiled = False
        """True if the head's loss is compiled."""
        self.offloads = False
        """True if what the decoder saves for its backward pass waits in host memory."""
        self.layers: list[nn.Module] = []
        """The layers of the decoder, once it is sharded."""
        self.value_head: nn.Linear | None = None
        if has_critic:  # zeros, so that all values are equal before the first update
            self.value_head = nn.Linear(self.head.in_features, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    @property
    def head(self) -> nn.Linear:
        """The language model head."""
        return cast(nn.Linear, self.language_model.get_output_embeddings())

    def forward(
        self,
        batch: PackedBatch,
        objective: MicrobatchObjective | None = None,
        *,
        reference: Reference | Teacher | None = None,
        is_elementwise: bool = True,
        temperature: float | None = None,
    ) -> Scored:
        """Score a micro-batch. With an objective, also return the root of this rank's share of its loss.

        Args:
            batch: on the model's device.
            objective: None: scores only.
            reference: for an objective with a full KL.
            is_elementwise: True if the objective can be evaluated tile by tile; else all log-probs are computed first.
            temperature: of scores without an objective; None: the sampling temperature.
        """
        hidden, weight, share = self._read(batch), self.head.weight, self.row.own(len(batch.targets))
        targets, kept = batch.targets[share], batch.kept and batch.kept.at(share)
        if objective is None:
            scores = score(hidden, weight, targets, temperature=temperature or self.temperature, kept=kept)
            return self._scored(None, scores, hidden, batch)
        if not is_elementwise:
            scores = score(hidden.detach(), weight, targets, temperature=self.temperature, kept=kept)
            objective.use_scores(self._all(scores, batch))

        def of_share(tokens: slice, scores: TokenScores) -> LossGradients:
            return objective(slice(share.start + tokens.start, share.start + tokens.stop), scores)

        loss, scores = fused_loss(
            hidden,
            weight,
            targets,
            of_share,
            temperature=self.temperature,
            kept=kept,
            reference=reference.at(share) if isinstance(reference, Teacher) else reference,
            is_compiled=self.is_compiled,
        )
        return self._scored(loss, scores, hidden, batch)

    def _read(self, batch: PackedBatch) -> Tensor:
        """Return [n, D] last hidden states of the positions before this rank's share of the sampled tokens."""
        mine = self.row.own(len(batch.token_ids))
        weights = torch.zeros_like(batch.token_ids).index_add_(0, batch.read_at, batch.mask.long())
        self.routers.replay(None if batch.routes is None else batch.routes[mine], weights[mine])
        if self.vision is None or not batch.pictured:
            inputs = {"input_ids": batch.token_ids[None, mine], "position_ids": batch.position_ids[None, mine]}
        else:
            inputs = self.vision.inputs(batch)
        with save_on_cpu(pin_memory=batch.token_ids.is_cuda) if self.offloads else contextlib.nullcontext():
            output = self.language_model.get_decoder()(**inputs, use_cache=False, segments=batch.segments)
        return self.row.read(output.last_hidden_state[0], batch.read_at)

    def _scored(self, loss: Tensor | None, scores: TokenScores, hidden: Tensor, batch: PackedBatch) -> Scored:
        values = None
        if self.value_head is not None:
            values = self.row.all(self.value_head(hidden).float().sum(-1), len(batch.targets))
        return Scored(loss, self._all(scores, batch), values, hidden.detach())

    def _all(self, scores: TokenScores, batch: PackedBatch) -> TokenScores:
        """Return the scores of all N tokens from those of each rank's share."""
        logprobs, entropy, kl = (None if x is None else self.row.all(x, len(batch.targets)) for x in scores)
        assert logprobs is not None and entropy is not None
        return TokenScores(logprobs, entropy, kl)


# -- building and sharding ---------------------------------------------------------------------------------------------


_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO})
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Fields of model configs that transform logits after the head. `TokenScorer` calls the head directly."""


def build_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    config: Config,
    *,
    trainable: bool = True,
    images: Images | None = None,
) -> TokenScorer:
    """Load, adapt and shard a causal language model. Collective.

    Args:
        path: folder of a Hugging Face model, or its hub id.
        dtype: of the forward pass and of gathered weights. The master copy of trained parameters is float32.
        device: of this rank.
        ranks: that share the weights.
        config: for LoRA, attention, activation checkpointing, reference offload and the sampling temperature.
        trainable: False for the reference: frozen, without adapters, offloaded if configured.
        images: of the run, if the model reads any.
    Raises:
        ConfigError: the model cannot be loaded or trained here.
    """
    kernel = choose_kernel(device, dtype)
    key = "model.path" if path == config.model.path else "algorithm.teacher"
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    language_model, reader = unread_language_model(path, longest=longest, key=key)
    refuse_layout(language_model, path, config.learner.parallel, key)
    attention.install(language_model, kernel, ranks.row)
    if (tower := tower_of(language_model)) is not None:
        tower.requires_grad_(False)
    if not trainable:
        language_model.requires_grad_(False)
    elif config.model.lora.rank:
        with loading.as_if_on_cpu(language_model) if reader else contextlib.nullcontext():
            language_model = add_adapters(language_model, config.model.lora, seed=config.run.seed)
    if trainable and recomputes(config, device):
        language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        _let_recompute(language_model)
    scorer = TokenScorer(
        language_model,
        ranks.row,
        Balance.of(language_model, path, config.algorithm) if trainable else UNBALANCED,
        temperature=config.sampling.temperature,
        has_critic=trainable and config.algorithm.advantage == CRITIC,
        images=images,
    )
    scorer.offloads = trainable and config.learner.activation_checkpointing == "offload"
    scorer.layers = _layers(language_model, path, key)
    experts = distribute_experts(language_model, ranks.experts["expert"]) if ranks.experts else []
    offload = not trainable and config.learner.offload_reference and device.type == "cuda"
    if reader:
        _narrow_frozen(scorer, reader, dtype, is_reference=not trainable)
    shards = [(module, ranks.experts["copies"]) for module in experts if ranks.experts]
    shards += [(module, ranks.mesh) for module in (*scorer.layers, scorer)]
    offloading = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module, mesh in shards:  # inner ones first; the scorer is the last
        # Its own inputs stay as they are: log-probs of a teacher are among them.
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=module is not scorer)
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offloading)
    for sharded in _sharded(scorer):
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
    if reader:
        loading.fill(scorer, reader, _name_in_memory, torch.device("cpu") if offload else device)
    return scorer


def unread_language_model(
    path: str, *, longest: int, key: str = "model.path"
) -> tuple[PreTrainedModel, ShardReader | None]:
    """Return the model on `meta` and the reader of its files, or the full model and None if only transformers can read it.

    Raises ConfigError.
    """
    with _loading(path, key):
        model = loading.without_memory(path)
    try:
        reader = ShardReader(model, path)
    except WeightsError as error:
        log.warning("%s (%s): every rank loads the full model, because %s", key, path, error)
        return load_language_model(path, longest=longest, key=key), None
    _refuse_what_differs(model, path, longest, key)
    return model, reader


def _narrow_frozen(scorer: TokenScorer, reader: ShardReader, dtype: torch.dtype, *, is_reference: bool) -> None:
    """Store frozen weights in `dtype`, in which they are gathered anyway, if that is lossless.

    A base is also merged with its adapters, so it is narrowed only if the files hold no wider dtype.
    """

    def narrowed(name: str, parameter: nn.Parameter) -> Tensor:
        is_narrowed = not parameter.requires_grad and (is_reference or reader.holds(_name_in_memory(name), dtype))
        return torch.empty_like(parameter, dtype=dtype) if is_narrowed else parameter

    loading.replace_parameters(scorer, narrowed)


def _name_in_memory(name: str) -> str:
    """Return the name of a scorer's parameter in the model without adapters."""
    return name.removeprefix("language_model.").replace(".base_layer.", ".")


def recomputes(config: Config, device: torch.device) -> bool:
    """Return True if the backward pass recomputes activations: as configured, else on a GPU that cannot hold them.

    Collective. All ranks follow the one with the smallest GPU, because they must gather weights in the same order.
    """
    wish = config.learner.activation_checkpointing
    if wish is not None or device.type == "cpu":
        return bool(wish)
    memory = torch.tensor(torch.cuda.get_device_properties(device).total_memory)
    dist.all_reduce(memory, dist.ReduceOp.MIN)
    size = size_at(config.model.path)
    return size is None or not keeps_activations(size, config, Card.of(config, int(memory)))


def choose_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name in `attention.KERNELS` of the fastest kernel that is installed and runs there."""
    if device.type == "cpu":
        return "cpu"
    if dtype != torch.bfloat16:  # the two flash kernels have no float32
        return "sdpa"
    return "varlen" if attention.flash_function() is None else "flash_attention_2"


def load_language_model(path: str, *, longest: int, key: str = "model.path") -> PreTrainedModel:
    """Load the model in float32 on the CPU, in evaluation mode, for sequences of up to `longest` tokens.

    Raises ConfigError.
    """
    with _loading(path, key):
        model = model_class(AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=torch.float32)
    _refuse_what_differs(model, path, longest, key)
    return model.eval()


def check_language_model(path: str, config: Config, key: str = "model.path") -> PreTrainedModel:
    """Refuse what `build_model` would refuse, without reading the weights.

    Args:
        path: folder of the model. The hub is not contacted.
        key: of the model to train, or `algorithm.teacher`.
    Returns:
        The model on `meta`, with its adapters.
    Raises:
        ConfigError: the model cannot be trained, or teach, as configured.
    """
    with torch.device("meta"):
        with _loading(path, key):
            settings = AutoConfig.from_pretrained(path)
            model = model_class(settings).from_config(settings)
        _refuse_what_differs(model, path, config.data.max_prompt_tokens + config.sampling.max_tokens, key)
        _layers(model, path, key)
        refuse_layout(model, path, config.learner.parallel, key)
        if key == "algorithm.teacher":
            return model
        Balance.of(model, path, config.algorithm)
        if config.model.routing_replay == "rollout" and not any(True for _ in routers_of(model)):
            raise ConfigError(f"model.routing_replay is rollout, but model.path ({path}) has no experts to choose from")
        return add_adapters(model, config.model.lora, seed=config.run.seed) if config.model.lora.rank else model


def refuse_other_tokens(path: str, teacher: str) -> None:
    """Raise ConfigError if the teacher's token ids mean other tokens than the model's, or its vocabulary has another size."""
    with _loading(teacher, "algorithm.teacher"):
        configs = [AutoConfig.from_pretrained(one) for one in (path, teacher)]
        sizes = [one.get_text_config().vocab_size for one in configs]
        tokens = [AutoTokenizer.from_pretrained(one).get_vocab() for one in (path, teacher)]
    differing = tokens[0].items() ^ tokens[1].items()
    if differing or sizes[0] != sizes[1]:
        example = f"token {min(differing)[0]!r} differs" if differing else f"{sizes[0]} and {sizes[1]} rows"
        raise ConfigError(
            f"algorithm.teacher ({teacher}) has other tokens than model.path ({path}): {example}; a teacher must have the "
            "same vocabulary"
        )
    if hasattr(configs[0], "vision_config") and configs[0].model_type != configs[1].model_type:
        raise ConfigError(f"algorithm.teacher ({teacher}) has no vision tower like that of model.path ({path})")


@contextlib.contextmanager
def _loading(path: str, key: str = "model.path") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of many kinds, from broken files
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise  # the model is intact, and the next start may have space
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{key} ({path}) cannot be loaded as a causal language model: {reason}") from error


def _refuse_what_differs(model: PreTrainedModel, path: str, longest: int, key: str) -> None:
    """Raise ConfigError for a model whose attention or head the learner does not support, or that cannot be published."""
    for difference in _differences(model, longest):
        raise ConfigError(f"{key} ({path}) {difference}")


def _differences(model: PreTrainedModel, longest: int) -> Iterator[str]:
    settings = model.config.get_text_config()
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    if has_sinks or getattr(settings, "attn_logit_softcapping", None):
        yield f"is a {settings.model_type}, whose attention{' sinks' * has_sinks} the learner does not support"
    window = getattr(settings, "sliding_window", None)
    kinds = getattr(settings, "layer_types", None) or ["sliding_attention"]
    others = set(kinds) - {"full_attention", "sliding_attention"}
    if others or model._is_stateful:
        layers = ", ".join(sorted(others)) or "recurrence"
        yield f"has layers of {layers}, in which packed completions would not be separate"
    if not model._supports_attention_backend:  # it would ignore `attention.install`, and completions see each other
        yield f"is a {settings.model_type}, whose attention transformers does not let the learner replace"
    slides = getattr(settings, "use_sliding_window", True) and "sliding_attention" in kinds
    if window is not None and slides and window < longest:
        yield (
            f"attends to {window} tokens in some layers, but prompt and completion may have {longest} "
            "(data.max_prompt_tokens + sampling.max_tokens), and the learner does not support sliding windows"
        )
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        yield "has a head with a bias, which the learner does not support"
    for field in LOGIT_TRANSFORMS:
        if getattr(settings, field, None) not in (None, 1, 1.0):
            yield f"sets {field}, which the learner's log-probs do not apply"
    try:
        disk_tensors(model)
    except ValueError as error:
        yield f"is a {settings.model_type}, which can be trained but not published: {error}"


def add_adapters(model: PreTrainedModel, lora: LoraConfig, *, seed: int) -> PreTrainedModel:
    """Freeze the model and add LoRA adapters to linear layers of its decoder, equal on all ranks for one seed."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.lora.rank is above 0, but peft is not installed; install asyncgrpo[lora]") from error
    # Fused experts are not linear layers, and routers of one model type are (phimoe).
    linear = {layer for layer in model.get_decoder().modules() if isinstance(layer, nn.Linear)}
    linear -= {router for _, router in routers_of(model)}
    adapters = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number works
        target_modules=list(lora.targets) or [name for name, layer in model.named_modules() if layer in linear],
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            # In a plain container peft uses names as they are. For a transformers model it would translate names of
            # experts on disk, and adapt fused experts by swapping parameters that FSDP shards.
            peft.inject_adapter_in_model(adapters, nn.ModuleList([model]))
        except ValueError as error:
            raise ConfigError(f"model.lora.targets ({', '.join(lora.targets)}) match no layer: {error}") from error
    adapted = {name: module.base_layer for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if others := [name for name, layer in adapted.items() if layer not in linear]:
        raise ConfigError(
            f"model.lora.targets ({', '.join(lora.targets)}) match {others[0]}, which is no linear layer of the decoder; "
            "leave it out"
        )
    return model


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable adapters inside the block: the base model is the reference of a run with LoRA.

    Sets peft's flag directly, because `enable_adapters` also flips `requires_grad`, which FSDP has already read.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _layers(model: PreTrainedModel, path: str, key: str) -> list[nn.Module]:
    """Return the decoder layers, by the class names in `_no_split_modules`."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.get_decoder().modules() if type(module).__name__ in names]
    if not layers:
        raise ConfigError(f"{key} ({path}): {type(model).__name__} does not name its decoder layers to shard")
    return layers


def keep_gathered(scorer: TokenScorer, keep: bool) -> None:
    """Set whether gathered weights stay between micro-batches, with one reduction of gradients at the end.

    Saves an all-gather and a reduce-scatter per micro-batch, for the memory of a full copy of weights and gradients.
    """
    for module in _sharded(scorer):
        module.set_reshard_after_forward(not keep, recurse=False)
        module.set_reshard_after_backward(not keep, recurse=False)
        module.set_requires_gradient_sync(not keep, recurse=False)


def reshard(scorer: TokenScorer) -> None:
    """Drop gathered weights, so that the next forward pass gathers the updated ones."""
    for module in _sharded(scorer):
        module.reshard()


def _sharded(scorer: TokenScorer) -> list[FSDPModule]:
    return [module for module in scorer.modules() if isinstance(module, FSDPModule)]


def _let_recompute(model: nn.Module) -> None:
    """Set training mode of the layers, which transformers needs to recompute them; inside there is no dropout and no noise."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
            if isinstance(getattr(layer, "dropout", None), float):  # of the layer itself (opt)
                layer.dropout = 0.0  # type: ignore[assignment]


# -- torch.compile -----------------------------------------------------------------------------------------------------

LEAST_WEIGHTS = 2**20
"""Matrix weights of all layers. For smaller models the call overhead exceeds the gain."""
COST_S = 40
"""CPU seconds of the first compilation; later starts need 8."""
SAVED_S = 2.5e-9
"""CPU seconds saved per trained token and output feature of a weight matrix. Measured: 2.8e-9 with layers of width 256,
1.8e-9 and 3.5e-9 with width 512, 3.2e-9 in a head of 151,936 tokens."""
TYPICAL_LENGTH = 150
"""Assumed tokens per completion, up to `sampling.max_tokens`."""


def compiling_pays(config: Config, layers: Sequence[nn.Module], vocabulary: int, device: torch.device) -> bool:
    """Return True if a run saves more CPU seconds than the compilation takes. Always False on CUDA, which is not measured.

    One program serves all layers and all lengths. It fuses the operations between matrix products: norms, SwiGLU, rotary
    embedding, casts. Attention stays outside; the head has programs of its own (`head`).
    """
    matrices = [parameter for layer in layers for parameter in layer.parameters() if parameter.ndim > 1]
    features = sum(len(matrix) for matrix in matrices) + vocabulary
    completions = config.buffer.prompts_per_step * config.algorithm.group_size
    saved_s = SAVED_S * features * completions * min(config.sampling.max_tokens, TYPICAL_LENGTH)  # each step
    is_long = config.run.steps is None or saved_s * config.run.steps >= COST_S
    is_large = sum(matrix.numel() for matrix in matrices) >= LEAST_WEIGHTS
    return device.type == "cpu" and not config.model.lora.rank and is_large and is_long


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile each layer at its next call. A layer that cannot be compiled runs eagerly."""
    torch._dynamo.config.suppress_errors = True
    for layer in layers:
        layer.compile(dynamic=True)


def can_compile(device: torch.device) -> bool:
    """Return True if a small function can be compiled here; else log the reason.

    It needs a C++ compiler and a writable folder like all programs, and fails before ranks wait for one another.
    """
    _keep_programs()
    try:
        small = torch.compile(lambda x: nn.functional.silu(x) * 2, dynamic=True)
        small(torch.ones(8, device=device))
    except Exception as error:  # of many kinds, from compiler, disk or torch
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        log.warning("learner.compile: the layers run uncompiled, because torch.compile fails here: %s", reason[:300])
        return False
    return True


def _keep_programs() -> None:
    """Compile in this process, with a cache for later starts in a folder that only its owner can write."""
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch's default is in the temporary folder; importing torch sets the variable to it.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "asyncgrpo" / "compiled"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    inductor.compile_threads = 1  # else torch starts worker processes that live as long as this one
