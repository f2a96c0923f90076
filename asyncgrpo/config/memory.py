"""The memory of a run: each GPU of the learner and of the engines at its fullest moment, and each node's host memory.

Arithmetic on a model's size and the configuration, without torch. docs/memory.md lists the parts of each figure and their
sources. Bytes of a number: 4 for master weights, gradients and each of AdamW's two moments; those of `model.dtype` for
gathered and frozen weights, activations, engines and publications.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from asyncgrpo.config.model_size import ModelSize, size_at
from asyncgrpo.config.schema import Config

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
"""Of an engine that shares its GPU, beside weights and KV cache: workspace of attention (384 MiB), graphs of about 100
sequences (2 MiB each, as SGLang reckons), a prefill of 4,096 tokens, and what SGLang keeps for itself (512 MiB)."""

STREAMED_MOMENTS = GIB
"""Moments on the GPU at once, where `learner.offload_optimizer` streams them through the update, or one parameter's."""
GRADIENTS = 3
"""Gradients of the size of a layer's widest activation that exist at once in its backward pass."""
GATHERED_LAYERS = 3
"""Layers that FSDP2 has in whole at once: the one that runs, the next one, and the buffer that it is copied out of."""
TILE_LOGITS = 2**27
"""Logits that `learner/head.py` has at once on a GPU."""
ARENAS = 2
"""Publications that the learner keeps in host memory (`weights.arena.SLOTS`); one more where deltas may be sent."""
PCIE_BYTES_PER_S = 55e9
"""Rate at which one GPU reads pinned memory over PCIe 5 x16, measured on an H200 (docs/gpu.md)."""
PROVED_BYTES_PER_S = 109e9
"""Rate at which one GPU digests its live parameters, measured on an H200 (docs/gpu.md)."""
WHOLE_SHARE = 0.35
"""Share of a model in matrices of which each GPU of an engine holds columns (`o_proj`, `down_proj`): it uploads them whole."""
LAST_SHARE = 0.08
"""Share of a model in the matrix that is uploaded last, and digested when no upload goes on: the head of Qwen3-8B."""
COPIED_BYTES_PER_S = 12e9
"""Rate at which one core copies (docs/weights.md)."""
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
            found: bytes of the smallest GPU here; None: no GPU is here.
        """
        named = config.cluster.gpu_memory_gb
        if named is not None:
            return cls(int(SHOWN_OF_NOMINAL * named * GIB), "given")
        return cls(found, "found") if found else cls(int(SHOWN_OF_NOMINAL * ASSUMED_CARD_GB * GIB), "assumed")


Holding = Counter[str]
"""Bytes held at one moment, by purpose."""


def itemsize(config: Config) -> int:
    """Bytes of a number in `model.dtype`."""
    return 4 if config.model.dtype == "float32" else 2


def runs_on_gpu(config: Config) -> bool:
    """True if the learner of this configuration is for a GPU, here or elsewhere."""
    device = config.learner.device
    return device == "cuda" or (device == "auto" and config.generators.gpus_each > 0)


# -- a rank of the learner ---------------------------------------------------------------------------------------------


class _Rank:
    """The sizes of one rank, in bytes unless they are called numbers."""

    def __init__(self, size: ModelSize, config: Config) -> None:
        self.size, self.config, self.item = size, config, itemsize(config)
        self.adapters = config.model.lora.rank
        all_numbers = size.parameters - size.vision_parameters
        self.trained_numbers = size.adapter_parameters(self.adapters) if self.adapters else all_numbers
        teacher = config.algorithm.teacher
        self.reference_size = (size_at(teacher) if teacher else None) or size

    def of_each(self, num_bytes: float) -> int:
        """The share of one rank."""
        return ceil(num_bytes / self.config.learner.ranks)

    @property
    def moments(self) -> int:
        """Of AdamW, on the GPU or on the host."""
        return self.of_each(8 * self.trained_numbers)

    @property
    def reference(self) -> int:
        """The shard of a reference, on the GPU or on the host."""
        return self.of_each(self.item * self.reference_size.parameters) if self.config.has_reference_copy else 0

    @property
    def offloaded_activations(self) -> int:
        """Layer inputs on the host, of one micro-batch."""
        if self.config.learner.activation_checkpointing != "offload":
            return 0
        return self.config.learner.tokens_per_microbatch * self.item * self.size.hidden * len(self.size.layers)

    def always(self) -> dict[str, int]:
        """Held in every phase, moments and the gathered part of a reference aside."""
        frozen_numbers = self.size.parameters if self.adapters else self.size.vision_parameters
        frozen = frozen_numbers * max(self.item, self.size.stored_bytes)
        return {
            "weights": self.of_each(4 * self.trained_numbers + frozen),
            "gradients": self.of_each(4 * self.trained_numbers),
            "reference": 0 if self.config.learner.offload_reference else self.reference,
        }

    def phases(self) -> Iterator[dict[str, int]]:
        """Held in each phase of a step, of which one is the fullest."""
        size, config, item, root = self.size, self.config, self.item, self.size.root_parameters
        tokens, head = config.learner.tokens_per_microbatch, size.vocabulary * size.hidden
        added = [layer.adapter_parameters(self.adapters) for layer in size.layers]
        ways = config.learner.parallel.expert  # each rank gathers its own experts only
        away = [layer.expert_parameters * (ways - 1) // ways for layer in size.layers]
        whole = [layer.parameters - less + more for layer, less, more in zip(size.layers, away, added, strict=True)]
        kept = [layer.bytes_kept(item, adapters=self.adapters) for layer in size.layers]
        recomputes = config.learner.activation_checkpointing is not False  # the least, where that is left open
        inputs = 1 if self.offloaded_activations else len(kept)
        waiting = tokens * (item * size.hidden * inputs if recomputes else sum(kept))
        recomputed = tokens * max(kept) if recomputes else 0
        last = tokens * size.hidden * (4 + 3 * item)  # of the last norm, and what the head reads, with its gradient
        gradients = tokens * (item * GRADIENTS * max(layer.trained.widest for layer in size.layers) + 8 * size.hidden)

        window = item * GATHERED_LAYERS * max(whole)
        gathered = item * root + window
        if config.learner.ranks == 1 and not self.adapters and not config.cluster.share_gpu:
            gathered = item * size.parameters  # kept between micro-batches
        of_head, of_root = (0, 0) if self.adapters else (head, root - size.vision_parameters)
        of_layer = max(added if self.adapters else whole)
        moments = 0 if config.learner.offload_optimizer else self.moments
        always = self.always()
        if self.config.has_reference_copy:
            # Its root is gathered, and not dropped after its forward pass.
            always["reference"] += item * self.reference_size.root_parameters
        running = always | {"moments": moments, "gathered": gathered}

        # The vision tower reads a row that is all images, in pixels of float32 and of the model's dtype.
        yield running | {"images": tokens * ((4 + item) * size.pixels + item * size.vision_numbers)}
        # Embedding and head are copied out of the buffer that they were gathered in.
        yield running | {"gathered": max(2 * item * root + window, gathered)}
        # The loss: the head's gradient is summed in float32, beside two copies in the model's dtype.
        yield running | {"activations": waiting + last, "head": self.logits() + (4 + 2 * item) * of_head}
        # The backward pass of a layer. The head's gradient waits in the model's dtype.
        yield running | {
            "activations": waiting + recomputed + gradients,
            "head": item * of_head,
            "reduced gradients": self.reduced(of_layer),
        }
        # The gradients of embedding and head are reduced.
        yield running | {"gathered": item * root, "reduced gradients": self.reduced(of_root)}
        # The update. Offloaded moments are streamed, at least one parameter's at once.
        streamed = min(self.moments, max(STREAMED_MOMENTS, self.of_each(8 * of_head)))
        yield always | {"moments": moments or streamed}

    def reduced(self, numbers: int) -> int:
        """Gradients in the model's dtype, in float32, and the sum of all ranks."""
        return (self.item + 4) * numbers + self.of_each(4 * numbers)

    def logits(self) -> int:
        """One tile of logits with its intermediate results, beside the rest of the tile before."""
        all_numbers = self.config.learner.tokens_per_microbatch * self.size.vocabulary
        each = 12 + (8 if all_numbers > TILE_LOGITS else 0)
        if self.item < 4:  # their gradients, which else take the place of the logits
            each += self.item
        if self.config.sampling.temperature != 1.0:
            each += 4
        if self.config.algorithm.kl_kind == "full" and self.config.algorithm.kl_coef:
            each += 12
        return min(TILE_LOGITS, all_numbers) * each


def learner_tensors(size: ModelSize, config: Config) -> Holding:
    """The tensors of one learner rank at the fullest moment of a step."""
    return +max(map(Holding, _Rank(size, config).phases()), key=Holding.total)  # without zeros


def learner_rank(size: ModelSize, config: Config) -> Holding:
    """The GPU of one learner rank at the fullest moment of a step: its tensors, and what torch does not count."""
    held = learner_tensors(size, config)
    outside = CONTEXT + NCCL * (config.learner.ranks > 1) + NCCL * (not config.cluster.share_gpu)
    held["rest"] = outside + int(SLACK * held.total())
    return held


def learner_share(config: Config, card: Card) -> float:
    """Share of a shared GPU that torch in the learner may take, beside the engine and the CUDA context of each process."""
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


def engine_gpu(size: ModelSize, config: Config, card: Card) -> EngineFit:
    """One GPU of an engine. The KV cache gets what `generators.memory_fraction` leaves beside the weights."""
    generators, item = config.generators, itemsize(config)
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    wanted = generators.groups_in_flight * config.algorithm.group_size
    of_token = size.cache_bytes_per_token(item, generators.gpus_each)
    each = longest * of_token
    weights = ceil(item * size.parameters / generators.gpus_each)
    outside = CONTEXT + NCCL * (generators.gpus_each > 1)
    if generators.engine == "torch":  # it makes room for all of them, and computes on one GPU
        parts = {"weights": item * size.parameters, "KV cache": wanted * each, "rest": outside + GIB}
        return EngineFit(Holding(parts), wanted, wanted, longest, wanted * longest)
    cache = max(int(generators.memory_fraction * (card.num_bytes - outside)) - weights, 0)
    rest = outside + ENGINE_WORK if config.cluster.share_gpu else max(card.num_bytes - weights - cache, 0)
    parts = {"weights": weights, "KV cache": cache, "rest": rest}
    return EngineFit(Holding(parts), cache // each, wanted, longest, cache // of_token)


# -- a node, and a publication -----------------------------------------------------------------------------------------


def published_bytes(size: ModelSize, config: Config) -> int:
    """Bytes that an engine loads at a publication. With adapters they are merged first."""
    return itemsize(config) * size.parameters


def pause_seconds(num_bytes: int, gpus: int) -> float:
    """Longest pause of an engine of so many GPUs for a publication: it uploads the weights, and digests what is there meanwhile.

    With 0 GPUs it copies them on a core.
    """
    if not gpus:
        return num_bytes / COPIED_BYTES_PER_S
    uploaded_s = num_bytes * (WHOLE_SHARE + (1 - WHOLE_SHARE) / gpus) / PCIE_BYTES_PER_S
    proved_s = num_bytes / gpus / PROVED_BYTES_PER_S
    return max(uploaded_s, proved_s) + LAST_SHARE * proved_s


def fullest_host(size: ModelSize, config: Config) -> Holding:
    """The host memory of the node that holds most, shared memory included.

    A rank loads its shard tensor by tensor, and holds what is kept off its GPU, or all of it where it has none, and a copy of
    weights and moments while a checkpoint is written; rank 0 also the exported weights and two publications. A generator
    on another node holds one.
    """
    return max((_host(size, config, *node) for node in _nodes(config)), key=Holding.total)


def fullest_shared_memory(size: ModelSize, config: Config) -> Holding:
    """The part of `/dev/shm` that a run takes on the node where it takes most.

    The arenas are the learner's: what is published lies in one of them, and the next publication is written into the other.
    Engines on its node read it there. A generator elsewhere stages what it receives.
    """
    return max((_shared(size, config, *node) for node in _nodes(config)), key=Holding.total)


def shared_memory_size(size: ModelSize, config: Config) -> int:
    """Bytes of `/dev/shm` with which a node does well.

    Beside what it needs there are: a second publication that a generator receives while its engine still reads the first one, and
    `SHARED_BY_OTHERS`.
    """
    held = fullest_shared_memory(size, config)
    return held.total() + held["staging"] + SHARED_BY_OTHERS


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


def _host(size: ModelSize, config: Config, ranks: int, generators: int) -> Holding:
    rank = _Rank(size, config)
    on_gpu, engines_on_gpu = runs_on_gpu(config), config.generators.gpus_each > 0
    of_rank = rank.always() | {"moments": rank.moments, "reference": rank.reference}
    if on_gpu:
        of_rank = {
            "moments": rank.moments if config.learner.offload_optimizer else 0,
            "reference": rank.reference if config.learner.offload_reference else 0,
        }
    of_rank["activations"] = rank.offloaded_activations
    has_far = generators < config.generators.count or _staged(config, ranks, generators)
    makes_deltas = config.weights.deltas and has_far and ranks == config.learner.ranks
    arenas = ARENAS + makes_deltas if ranks else 0
    process = PROCESS if on_gpu or engines_on_gpu else CPU_PROCESS
    processes = 1 + ranks + generators * (1 + max(config.generators.gpus_each, 1))
    has_engine = config.generators.engine != "fake" and not engines_on_gpu
    parts = {name: ranks * held for name, held in of_rank.items()} | {
        "engines": generators * published_bytes(size, config) if has_engine else 0,
        "checkpoint": ranks * rank.of_each(12 * rank.trained_numbers) + (published_bytes(size, config) if ranks else 0),
        "publication": (_staged(config, ranks, generators) + arenas) * published_bytes(size, config),
        "processes": processes * process,
    }
    return +Holding(parts)


def _shared(size: ModelSize, config: Config, ranks: int, generators: int) -> Holding:
    sent = published_bytes(size, config)
    return +Holding(arenas=ARENAS * sent if ranks else 0, staging=_staged(config, ranks, generators) * sent)


def _staged(config: Config, ranks: int, generators: int) -> int:
    """Number of publications that a node receives: one for all generators, none where they load out of the learner's arenas."""
    maps = ranks == config.learner.ranks and config.weights.backend in ("auto", "shared_memory")
    return 0 if maps else min(generators, 1)
