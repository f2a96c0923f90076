"""What a run holds: each GPU of the learner and of the engines at its fullest moment, and each node's host memory.

Arithmetic on a model's shape and the configuration, without torch; docs/memory.md says what each figure is made of and
where it comes from. A learner rank is at its fullest in one of five phases of a step: when embedding and head are copied out
of the buffer that they were gathered in, in the loss, in the backward pass of a layer, when the gradients of embedding and
head are reduced, or in the update.

bytes of a number: 4 for master weights, gradients and each of AdamW's two moments, those of `model.dtype` for gathered
and for frozen weights, activations, engines and publications.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from asyncgrpo.config.schema import Config
from asyncgrpo.config.shapes import ModelShape

GIB = 2**30

# -- constants ---------------------------------------------------------------------------------------------------------

# Assumed, not measured here. On a GPU: `nvidia-smi` shows them as what torch.cuda.memory_reserved() does not count.
CONTEXT = int(0.6 * GIB)
"""Of each process that uses a GPU: the CUDA context with its kernels, and workspace of cuBLAS."""
NCCL = int(0.5 * GIB)
"""Buffers of NCCL, of a process in a group of several."""
SLACK = 0.05
"""Of what torch has allocated: blocks that its allocator cannot use because of their sizes."""
PROCESS = 3 * GIB
"""Host memory of one Python process with torch and CUDA."""
CPU_PROCESS = 2**27
"""Of one without CUDA, at least: torch alone takes it."""
ENGINE_WORK = 2 * GIB
"""Of an engine that shares its GPU, beside weights and KV cache: workspace of attention (384 MiB), graphs of up to 48
sequences (2 MiB each, as SGLang reckons), a prefill of 4,096 tokens, and what SGLang keeps for itself (512 MiB)."""

STREAMED_MOMENTS = GIB
"""Moments on the GPU at once, where `learner.offload_optimizer` streams them through the update, or one parameter's."""
GATHERED_LAYERS = 3
"""Layers that FSDP2 has in whole at once: the one that runs, the next one, and the buffer that it is copied out of."""
TILE_LOGITS = 2**27
"""Logits that `learner/head.py` has at once on a GPU."""
ARENAS = 2
"""Publications that the learner keeps in host memory (`weights.arena.SLOTS`); one more where deltas may be sent."""
PCIE_BYTES_PER_S = 50e9
"""What one GPU reads of locked pages. Assumed, for PCIe 5 x16: not measured."""
COPIED_BYTES_PER_S = 12e9
"""What a core copies (docs/weights.md)."""
SHOWN_OF_NOMINAL = 0.985
"""Of the memory that a card is named after, in GiB: what CUDA shows of it. An H100 of 80 GB shows 79.2."""
SHARED_BY_OTHERS = 2 * GIB
"""Of `/dev/shm`, for NCCL, Ray and SGLang. Assumed, not measured."""
GPUS_PER_NODE = 8
ASSUMED_CARD_GB = 80.0


@dataclass(frozen=True)
class Card:
    """The memory of one GPU."""

    num_bytes: int
    known: Literal["found", "given", "assumed"]

    @classmethod
    def of(cls, config: Config, found: int | None = None) -> "Card":
        """The card of a run.

        Args:
            found: bytes of the smallest GPU here; none: there is no GPU here.
        """
        named = config.cluster.gpu_memory_gb
        if named is not None:
            return cls(int(SHOWN_OF_NOMINAL * named * GIB), "given")
        return cls(found, "found") if found else cls(int(SHOWN_OF_NOMINAL * ASSUMED_CARD_GB * GIB), "assumed")


@dataclass(frozen=True)
class Holding:
    """What is held at one moment, in bytes, by what it is for."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def itemsize(config: Config) -> int:
    """Bytes of a number in `model.dtype`."""
    return 4 if config.model.dtype == "float32" else 2


def runs_on_gpu(config: Config) -> bool:
    """Whether the learner of this configuration is for a GPU, here or elsewhere."""
    device = config.learner.device
    return device == "cuda" or (device == "auto" and config.generators.gpus_each > 0)


# -- a rank of the learner ---------------------------------------------------------------------------------------------


class _Rank:
    """The sizes of one rank, in bytes unless they are called numbers."""

    def __init__(self, shape: ModelShape, config: Config) -> None:
        self.shape, self.config, self.item = shape, config, itemsize(config)
        self.ranks, self.adapters = config.learner.ranks, config.model.lora.rank
        added = shape.adapter_parameters(self.adapters)
        self.all_numbers = shape.parameters + added
        self.trained_numbers = added if self.adapters else shape.parameters
        of_layers = [
            (size, layer.adapter_parameters(self.adapters))
            for size, layer in zip(shape.layer_parameters, shape.layers, strict=True)
        ]
        self.layer_numbers = max(size + more for size, more in of_layers)
        self.trained_layer_numbers = max(more if self.adapters else size for size, more in of_layers)
        self.head_numbers = shape.vocabulary * shape.hidden
        self.tokens = config.learner.tokens_per_microbatch

    def of_each(self, num_bytes: float) -> int:
        """The share of one rank."""
        return ceil(num_bytes / self.ranks)

    @property
    def moments(self) -> int:
        return self.of_each(8 * self.trained_numbers)

    def always(self) -> dict[str, int]:
        """What is there in every phase, but for the moments of AdamW."""
        frozen = (self.all_numbers - self.trained_numbers) * max(self.item, self.shape.stored_bytes)
        reference = 0
        if self.has_reference_copy:
            reference = self.item * self.shape.root_parameters  # gathered, and not dropped after its forward pass
            if not self.config.learner.offload_reference:
                reference += self.of_each(self.item * self.shape.parameters)
        return {
            "weights": self.of_each(4 * self.trained_numbers + frozen),
            "gradients": self.of_each(4 * self.trained_numbers),
            "reference": reference,
        }

    @property
    def has_reference_copy(self) -> bool:
        """Whether there is a reference beside the model; with adapters it is the model without them."""
        algorithm = self.config.algorithm
        return (algorithm.kl_coef > 0 or bool(algorithm.loss_args.get("reference"))) and not self.adapters

    def gathered(self) -> int:
        """Whole weights in the dtype of the model, while it runs."""
        if self.ranks == 1 and not self.adapters and not self.config.cluster.share_gpu:  # kept between micro-batches
            return self.item * self.all_numbers
        return self.item * (self.shape.root_parameters + GATHERED_LAYERS * self.layer_numbers)

    def kept(self) -> int:
        """Activations of the layers that wait for the backward pass."""
        if self.recomputes:
            return self.tokens * self.item * self.shape.hidden * len(self.shape.layers)
        return self.tokens * sum(self.kept_by_layers())

    def last(self) -> int:
        """What the last norm keeps, and the hidden states that the head reads, with their gradient."""
        return self.tokens * self.shape.hidden * (4 + 3 * self.item)

    def kept_by_layers(self) -> list[int]:
        return [layer.bytes_kept(self.item, adapters=self.adapters) for layer in self.shape.layers]

    @property
    def recomputes(self) -> bool:
        """True unless the configuration keeps activations: where it leaves that open, this is the least that is held."""
        return self.config.learner.activation_checkpointing is not False

    def recomputed(self) -> int:
        """Activations of the one layer that is under way backward, where they are not kept."""
        return self.tokens * max(self.kept_by_layers()) if self.recomputes else 0

    def activation_gradients(self) -> int:
        """The largest gradients of activations that exist at once, in one layer."""
        widest = max(max(layer.attention.widest, layer.mlp.widest) for layer in self.shape.layers)
        return self.tokens * (self.item * widest + 8 * self.shape.hidden)

    def logits(self) -> int:
        """One tile of logits with what is computed of it, beside what is left of the tile before."""
        numbers = min(TILE_LOGITS, self.tokens * self.shape.vocabulary)
        each = 12 + (8 if self.tokens * self.shape.vocabulary > TILE_LOGITS else 0)
        if self.item < 4:  # their gradients, which else take the place of the logits
            each += self.item
        if self.config.sampling.temperature != 1.0:
            each += 4
        if self.config.algorithm.kl_kind == "full" and self.config.algorithm.kl_coef:
            each += 12
        return numbers * each

    @property
    def head_gradient(self) -> int:
        """The gradient of the head in the dtype of the model, which waits until the end of the backward pass."""
        return 0 if self.adapters else self.item * self.head_numbers

    def phases(self) -> list[dict[str, int]]:
        """What is held in each phase: start, loss, backward pass, reduction at its end, update."""
        always, waiting = self.always(), 0 if self.config.learner.offload_optimizer else self.moments
        running = always | {"moments": waiting, "gathered": self.gathered()}
        summed = 0 if self.adapters else 4 * self.head_numbers  # the head's gradient, in float32
        layer = (self.item + 4) * self.trained_layer_numbers + self.of_each(4 * self.trained_layer_numbers)
        root = 0 if self.adapters else (self.item + 4) * self.shape.root_parameters
        root += 0 if self.adapters else self.of_each(4 * self.shape.root_parameters)
        largest = 0 if self.adapters else self.of_each(8 * self.head_numbers)
        start = self.item * (2 * self.shape.root_parameters + GATHERED_LAYERS * self.layer_numbers)
        return [
            running | {"gathered": max(start, self.gathered())},
            running
            | {
                "activations": self.kept() + self.last(),
                "head": self.logits() + summed + 2 * self.head_gradient,
            },
            running
            | {
                "activations": self.kept() + self.recomputed() + self.activation_gradients(),
                "head": self.head_gradient,
                "reduced gradients": layer,
            },
            running | {"gathered": self.item * self.shape.root_parameters, "reduced gradients": root},
            always | {"moments": waiting or min(self.moments, max(STREAMED_MOMENTS, largest))},
        ]


def kept_for_backward(shape: ModelShape, config: Config) -> int:
    """Bytes of activations that a micro-batch keeps at once: of all layers, or the inputs of all and one layer's."""
    rank = _Rank(shape, config)
    return rank.kept() + max(rank.recomputed(), rank.last())


def learner_tensors(shape: ModelShape, config: Config) -> Holding:
    """The tensors of one learner rank at the fullest moment of a step."""
    fullest = max(_Rank(shape, config).phases(), key=lambda parts: sum(parts.values()))
    return Holding({name: size for name, size in fullest.items() if size})


def learner_rank(shape: ModelShape, config: Config) -> Holding:
    """The GPU of one learner rank at the fullest moment of a step: its tensors, and what torch does not count."""
    tensors = learner_tensors(shape, config)
    outside = CONTEXT + NCCL * (config.learner.ranks > 1) + NCCL * (not config.cluster.share_gpu)
    return Holding(tensors.parts | {"rest": outside + int(SLACK * tensors.total)})


def learner_share(config: Config, card: Card) -> float:
    """Share of a shared GPU that torch in the learner may take: what the engine leaves, and CUDA in every process."""
    is_sglang = config.generators.engine == "sglang"  # its scheduler is a process beside the generator's
    outside = (3 if is_sglang else 2) * CONTEXT + (ENGINE_WORK if is_sglang else 0)
    return 1 - config.generators.memory_fraction - outside / card.num_bytes


# -- an engine ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineFit:
    """One GPU of an engine, and what its KV cache is enough for."""

    gpu: Holding
    completions: int
    """Of full length that run at once."""
    wanted: int
    """That the generator would have run at once."""
    longest: int
    """Tokens of a prompt and a completion of full length."""
    tokens: int
    """That the KV cache holds."""


def engine_gpu(shape: ModelShape, config: Config, card: Card) -> EngineFit:
    """One GPU of an engine. The KV cache gets what `generators.memory_fraction` leaves beside the weights."""
    generators, item = config.generators, itemsize(config)
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    wanted = generators.groups_in_flight * config.algorithm.group_size
    of_token = shape.cache_bytes_per_token(item, generators.gpus_each)
    each = longest * of_token
    weights = ceil(item * shape.parameters / generators.gpus_each)
    outside = CONTEXT + NCCL * (generators.gpus_each > 1)
    if generators.engine == "torch":  # it makes room for all of them, and computes on one GPU
        parts = {"weights": item * shape.parameters, "KV cache": wanted * each, "rest": outside + GIB}
        return EngineFit(Holding(parts), wanted, wanted, longest, wanted * longest)
    cache = max(int(generators.memory_fraction * (card.num_bytes - outside)) - weights, 0)
    rest = outside + ENGINE_WORK if config.cluster.share_gpu else max(card.num_bytes - weights - cache, 0)
    parts = {"weights": weights, "KV cache": cache, "rest": rest}
    return EngineFit(Holding(parts), cache // each, wanted, longest, cache // of_token)


# -- a node, and a publication -----------------------------------------------------------------------------------------


def published_bytes(shape: ModelShape, config: Config) -> int:
    """Bytes that an engine loads at a publication. With adapters they are merged first."""
    return itemsize(config) * shape.parameters


def publication_seconds(shape: ModelShape, config: Config) -> float:
    """How long an engine may pause for one publication."""
    gpus = config.generators.gpus_each
    return published_bytes(shape, config) / (gpus * PCIE_BYTES_PER_S if gpus else COPIED_BYTES_PER_S)


def fullest_host(shape: ModelShape, config: Config) -> Holding:
    """The host memory of the node that holds most, shared memory included.

    A rank loads its shard tensor by tensor, and holds what is kept off its GPU, or all of it where it has none, and a copy of
    weights and moments while a checkpoint is written; rank 0 also the exported weights and two publications. A generator
    on another node holds one.
    """
    return max((_host(shape, config, *node) for node in _nodes(config)), key=lambda held: held.total)


def fullest_shared_memory(shape: ModelShape, config: Config) -> Holding:
    """What a run needs of `/dev/shm` on the node that needs most of it.

    The arenas are the learner's: what is published lies in one of them, and the next publication is written into the other.
    Engines on its node read it there. A generator elsewhere stages what it receives.
    """
    return max((_shared(shape, config, *node) for node in _nodes(config)), key=lambda held: held.total)


def shared_memory_size(shape: ModelShape, config: Config) -> int:
    """Bytes of `/dev/shm` with which a node does well.

    Beside what it needs there are: a second publication that a generator receives while its engine still reads the first one, and
    `SHARED_BY_OTHERS`.
    """
    held = fullest_shared_memory(shape, config)
    return held.total + held.parts.get("staging", 0) + SHARED_BY_OTHERS


def _nodes(config: Config) -> list[tuple[int, int]]:
    """Learner ranks and generators of the nodes that may hold most.

    Without a cluster one machine has all of them. In a cluster Ray fills one node with learner ranks before the next.
    """
    ranks, each, count = config.learner.ranks, max(config.generators.gpus_each, 1), config.generators.count
    if config.cluster.ray_address is None:
        return [(ranks, count)]
    together = 1 if config.cluster.share_gpu else ranks + each * count
    gpus = min(together, GPUS_PER_NODE)
    of_learner = min(ranks, gpus)
    beside = count if config.cluster.share_gpu else min(count, (gpus - of_learner) // each)
    return [(of_learner, beside), (0, min(count, gpus // each))]


def _host(shape: ModelShape, config: Config, ranks: int, generators: int) -> Holding:
    rank = _Rank(shape, config)
    on_gpu, engines_on_gpu = runs_on_gpu(config), config.generators.gpus_each > 0
    of_rank = rank.always() | {"moments": rank.moments}
    if on_gpu:
        kept = rank.has_reference_copy and config.learner.offload_reference
        reference = rank.of_each(rank.item * shape.parameters) if kept else 0
        of_rank = {"moments": rank.moments if config.learner.offload_optimizer else 0, "reference": reference}
    has_far = generators < config.generators.count or _staged(config, ranks, generators)
    arenas = ARENAS + (config.weights.deltas and has_far) if ranks else 0
    process = PROCESS if on_gpu or engines_on_gpu else CPU_PROCESS
    processes = 1 + ranks + generators * (1 + max(config.generators.gpus_each, 1))
    has_engine = config.generators.engine != "fake" and not engines_on_gpu
    parts = {name: ranks * size for name, size in of_rank.items()} | {
        "engines": generators * published_bytes(shape, config) if has_engine else 0,
        "checkpoint": ranks * rank.of_each(12 * rank.trained_numbers)
        + (published_bytes(shape, config) if ranks else 0),
        "publication": (_staged(config, ranks, generators) + arenas) * published_bytes(shape, config),
        "processes": processes * process,
    }
    return Holding({name: size for name, size in parts.items() if size})


def _shared(shape: ModelShape, config: Config, ranks: int, generators: int) -> Holding:
    sent = published_bytes(shape, config)
    parts = {"arenas": ARENAS * sent if ranks else 0, "staging": _staged(config, ranks, generators) * sent}
    return Holding({name: size for name, size in parts.items() if size})


def _staged(config: Config, ranks: int, generators: int) -> int:
    """How many of these generators keep what they receive. Beside the learner engines load out of its arenas."""
    return 0 if ranks and config.weights.backend in ("auto", "shared_memory") else generators
