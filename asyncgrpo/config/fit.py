"""Whether a run fits its GPUs, what would, and how GPUs are shared between generators and learner by the size of a model.

`refuse` and `refuse_host` say it in one sentence before anything is started. `choose` and `share_one_gpu` choose the
settings that are not given. `report` is the table that commands print.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import msgspec

from asyncgrpo.config.explain import value_in_words
from asyncgrpo.config.foreign_rules import split_gpus
from asyncgrpo.config.memory import (
    CONTEXT,
    ENGINE_WORK,
    GIB,
    GPUS_PER_NODE,
    SLACK,
    Card,
    EngineFit,
    Holding,
    engine_gpu,
    fullest_host,
    fullest_shared_memory,
    itemsize,
    learner_rank,
    learner_share,
    learner_tensors,
    publication_seconds,
    runs_on_gpu,
    shared_memory_size,
)
from asyncgrpo.config.schema import Config
from asyncgrpo.config.shapes import PUBLISHED, ModelShape, shape_of
from asyncgrpo.errors import ConfigError
from asyncgrpo.host import Host

MIB = 2**20
COMFORTABLE = 0.95
"""Share of a card that a choice of ours may fill. A choice of the user's may fill all of it."""
LEAST_CACHE = 0.4
"""Share of a card that is enough for the KV cache, if it does not hold all completions that are wanted at once."""
FEWEST_TOKENS = 4096
"""Tokens of a micro-batch below which we choose none: the GPU would wait for its weights."""


@dataclass(frozen=True)
class Fit:
    """What a run holds."""

    card: Card
    learner: Holding | None
    """None: on the CPU."""
    engine: EngineFit | None
    """None: on the CPU, or the fake engine."""
    host: Holding
    """The node that holds most."""
    shared: Holding
    """Of `host`, what lies in `/dev/shm`."""
    publication_s: float
    is_exact: bool
    """False: the architecture is not known, and its size is that of its files."""


def estimate(shape: ModelShape, config: Config, card: Card) -> Fit:
    """What a run of this model holds of each GPU and node."""
    if config.learner.activation_checkpointing is None:
        config = changed(config, {"learner.activation_checkpointing": not keeps_activations(shape, config, card)})
    has_engine = config.generators.gpus_each > 0 and config.generators.engine != "fake"
    return Fit(
        card=card,
        learner=learner_rank(shape, config) if runs_on_gpu(config) else None,
        engine=engine_gpu(shape, config, card) if has_engine else None,
        host=fullest_host(shape, config),
        shared=fullest_shared_memory(shape, config),
        publication_s=publication_seconds(shape, config),
        is_exact=shape.total is None,
    )


def keeps_activations(shape: ModelShape, config: Config, card: Card) -> bool:
    """True if a learner rank has room for all activations of a micro-batch, so that none need be recomputed."""
    kept = changed(config, {"learner.activation_checkpointing": False})
    if config.cluster.share_gpu:
        room = COMFORTABLE * learner_share(config, card) * card.num_bytes
        return (1 + SLACK) * learner_tensors(shape, kept).total <= room
    return _is_comfortable(shape, kept, card)


# -- what does not fit -------------------------------------------------------------------------------------------------


def refuse(shape: ModelShape, config: Config, card: Card) -> None:
    """Raise ConfigError for what cannot fit, with the nearest settings that do. An assumed card refuses nothing."""
    if card.known == "assumed":
        return
    fit = estimate(shape, config, card)
    if fit.learner is not None and fit.learner.total > card.num_bytes:
        raise ConfigError(
            f"a learner rank does not fit its GPU: {_gib(fit.learner.total)} of {_gib(card.num_bytes)} GiB "
            f"({_in_words(fit.learner)}); {_instead(shape, config, card, _is_comfortable, _FOR_LEARNER)}"
        )
    if fit.engine is not None and _engine_problem(fit.engine, card):
        raise ConfigError(
            f"{_engine_problem(fit.engine, card)}; {_instead(shape, config, card, _engine_fits, _FOR_ENGINE)}"
        )
    if config.cluster.share_gpu and fit.learner is not None and fit.engine is not None:
        _refuse_together(fit.learner, fit.engine, card)
        share, wanted = learner_share(config, card), (1 + SLACK) * learner_tensors(shape, config).total
        if wanted > share * card.num_bytes:
            raise ConfigError(
                f"generators.memory_fraction={config.generators.memory_fraction:g} leaves the learner "
                f"{_gib(max(share, 0) * card.num_bytes)} GiB of the shared GPU, and it needs {_gib(wanted)} GiB; lower it, or "
                "use --n-gpus 1, which chooses it"
            )


def _refuse_together(learner: Holding, engine: EngineFit, card: Card) -> None:
    if learner.total + engine.gpu.total > card.num_bytes:
        raise ConfigError(
            f"learner and engine do not fit one GPU together: {_gib(learner.total)} + {_gib(engine.gpu.total)} of "
            f"{_gib(card.num_bytes)} GiB; lower generators.memory_fraction, or train adapters (model.lora.rank=32)"
        )


def _engine_problem(engine: EngineFit, card: Card) -> str:
    """Why an engine cannot run; empty if it can."""
    if engine.gpu.total > card.num_bytes:
        return f"an engine does not fit its GPU: {_gib(engine.gpu.total)} of {_gib(card.num_bytes)} GiB"
    if engine.completions < 1:
        return (
            f"an engine's GPU of {_gib(card.num_bytes)} GiB has {_gib(engine.gpu.parts['KV cache'])} GiB left for the KV "
            f"cache beside {_gib(engine.gpu.parts['weights'])} GiB of weights, too little for one completion of "
            f"{engine.longest:,} tokens"
        )
    return ""


def refuse_host(shape: ModelShape, config: Config, host: Host) -> None:
    """Raise ConfigError where this machine has too little memory, or too little shared memory, for a run on it alone."""
    held = fullest_host(shape, config)
    if held.total > host.memory:
        fewer = range(config.generators.count - 1, 0, -1)
        fits = (n for n in fewer if fullest_host(shape, changed(config, {"generators.count": n})).total <= host.memory)
        instead = f"it fits with generators.count={count}" if (count := next(fits, 0)) else "use a smaller model"
        raise ConfigError(
            f"the run does not fit the memory of this machine or container: {_gib(held.total)} of {_gib(host.memory)} GiB "
            f"({_in_words(held)}); {instead}"
        )
    shared = fullest_shared_memory(shape, config)
    if config.weights.backend in ("auto", "shared_memory") and shared.total > host.shared_free:
        size = ceil(shared_memory_size(shape, config) / GIB)
        raise ConfigError(
            f"the weights do not fit /dev/shm: {shared.total / MIB:,.0f} MiB ({_in_words(shared, MIB)}), and "
            f"{host.shared_free / MIB:,.0f} of its {host.shared / MIB:,.0f} MiB are free; give it more (docker run "
            f"--shm-size={size}g, or mount -o remount,size={size}g /dev/shm), or have weights broadcast, which is slower "
            "(weights.backend=gloo)"
        )


Fits = Callable[[ModelShape, Config, Card], bool]
Remedy = Callable[[ModelShape, Config], Iterator[dict[str, Any]]]
"""Changes of settings, the smallest first."""


def _engine_fits(shape: ModelShape, config: Config, card: Card) -> bool:
    return not _engine_problem(engine_gpu(shape, config, card), card)


def _instead(shape: ModelShape, config: Config, card: Card, fits: Fits, remedies: Sequence[Remedy]) -> str:
    """The nearest settings with which it fits, of up to three remedies."""
    found: list[dict[str, Any]] = []
    for remedy in remedies:
        change = next((c for c in remedy(shape, config) if fits(shape, changed(config, c), card)), None)
        if change is not None and not any(simpler.items() <= change.items() for simpler in found):
            found.append(change)
    said = [" ".join(f"{key}={value_in_words(value)}" for key, value in change.items()) for change in found[:3]]
    return f"it fits with {' or with '.join(said)}" if said else "use larger GPUs or a smaller model"


def _recompute(_: ModelShape, config: Config) -> Iterator[dict[str, Any]]:
    if config.learner.activation_checkpointing is False:
        yield {"learner.activation_checkpointing": True}


def _smaller_microbatches(_: ModelShape, config: Config) -> Iterator[dict[str, Any]]:
    yield from ({"learner.tokens_per_microbatch": tokens} for tokens in _token_budgets(config)[1:])


def _offload(_: ModelShape, config: Config) -> Iterator[dict[str, Any]]:
    if not config.learner.offload_optimizer:
        yield {"learner.offload_optimizer": True}


def _more_ranks(_: ModelShape, config: Config) -> Iterator[dict[str, Any]]:
    ranks = config.learner.ranks
    yield from ({"learner.ranks": count} for count in range(ranks + 1, 8 * ranks + 1))


def _offload_over_more_ranks(shape: ModelShape, config: Config) -> Iterator[dict[str, Any]]:
    if not config.learner.offload_optimizer:
        yield from ({"learner.offload_optimizer": True} | change for change in _more_ranks(shape, config))


def _adapters(shape: ModelShape, config: Config) -> Iterator[dict[str, Any]]:
    if not config.model.lora.rank:
        yield {"model.lora.rank": 32}
        yield from ({"model.lora.rank": 32} | change for change in _smaller_microbatches(shape, config))


def _more_gpus(shape: ModelShape, config: Config) -> Iterator[dict[str, Any]]:
    for gpus in (2, 4, 8):
        if gpus > config.generators.gpus_each and shape.heads % gpus == 0:
            yield {"generators.gpus_each": gpus}


def _larger_fraction(_: ModelShape, config: Config) -> Iterator[dict[str, Any]]:
    now = config.generators.memory_fraction
    yield from ({"generators.memory_fraction": f} for f in (0.8, 0.85, 0.88) if f > now)


_FOR_LEARNER = (_recompute, _smaller_microbatches, _offload, _more_ranks, _offload_over_more_ranks, _adapters)
_FOR_ENGINE = (_larger_fraction, _more_gpus)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with other values at some dotted keys."""
    for key, value in values.items():
        config = _set(config, key.split("."), value)
    return config


def _set(struct: Any, names: list[str], value: Any) -> Any:
    name, *below = names
    inner = _set(getattr(struct, name), below, value) if below else value
    return msgspec.structs.replace(struct, **{name: inner})


# -- what is chosen ----------------------------------------------------------------------------------------------------


def choose(shape: ModelShape, config: Config, card: Card, n_gpus: int, decided: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that share GPUs between generators and learner, so that the model fits where it can.

    Half of the GPUs are the generators'. What does not fit then gets smaller micro-batches, then moments on the CPU, then
    more of the GPUs for the learner; what fits in no way keeps the half, and `refuse` says why.

    Args:
        config: of the run, with any split.
        n_gpus: to share, at least 2.
        decided: of the keys that are returned, those that are not ours to choose, with their values.
    Returns:
        Values of generators.count, generators.gpus_each and learner.ranks, and of learner.offload_optimizer and
        learner.tokens_per_microbatch where they must change.
    Raises:
        ConfigError: one side would get nothing.
    """
    count, ranks = decided.get("generators.count"), decided.get("learner.ranks")
    written = decided.get("generators.gpus_each")
    engines = [written] if written else engine_gpus(shape, config, card, n_gpus)
    possible = [each for each in engines if (count or 1) * each + (ranks or 1) <= n_gpus]
    halves = [_half(n_gpus, each, count, ranks) for each in possible or engines]
    for half in halves:
        for placed in _placements(n_gpus, half, is_open=count is None and ranks is None):
            for saving in _savings(config, decided):
                if _is_comfortable(shape, changed(config, placed | saving), card):
                    return placed | saving
    return halves[0]


def _is_comfortable(shape: ModelShape, config: Config, card: Card) -> bool:
    return learner_rank(shape, config).total <= COMFORTABLE * card.num_bytes


def _half(n_gpus: int, each: int, count: int | None, ranks: int | None) -> dict[str, int]:
    count, ranks = split_gpus(n_gpus, each, count=count, ranks=ranks)
    return {"generators.count": count, "generators.gpus_each": each, "learner.ranks": ranks}


def _placements(n_gpus: int, half: dict[str, int], *, is_open: bool) -> Iterator[dict[str, int]]:
    """First the half, then ever fewer generators; what is too little for one more generator is the learner's."""
    yield half
    if is_open:
        for count in range(half["generators.count"] - 1, 0, -1):
            yield half | {"generators.count": count, "learner.ranks": n_gpus - count * half["generators.gpus_each"]}


def _savings(config: Config, decided: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What makes a rank smaller, cheapest first."""
    offloads = [config.learner.offload_optimizer]
    if "learner.offload_optimizer" not in decided and not offloads[0]:
        offloads.append(True)
    budgets = _token_budgets(config)[: 1 if "learner.tokens_per_microbatch" in decided else None]
    for offload in offloads:
        for tokens in budgets:
            chosen: dict[str, Any] = {}
            if offload != config.learner.offload_optimizer:
                chosen["learner.offload_optimizer"] = offload
            if tokens != config.learner.tokens_per_microbatch:
                chosen["learner.tokens_per_microbatch"] = tokens
            yield chosen


def _token_budgets(config: Config) -> list[int]:
    """Tokens of a micro-batch: as configured, then halves, each enough for the longest sequence."""
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    budgets = [config.learner.tokens_per_microbatch]
    while budgets[-1] // 2 >= max(longest, FEWEST_TOKENS):
        budgets.append(budgets[-1] // 2)
    return budgets


def engine_gpus(shape: ModelShape, config: Config, card: Card, n_gpus: int) -> list[int]:
    """GPUs of one engine, the best number first; never none.

    The best is the smallest whose KV cache holds all completions wanted at once, or is large; where none is, that with the
    largest cache. Then come the others that hold a group, fewest first.
    """
    if config.generators.engine != "sglang":
        return [1]
    possible = [n for n in (1, 2, 4, 8) if n <= min(n_gpus - 1, GPUS_PER_NODE) and shape.heads % n == 0]
    fits = {n: engine_gpu(shape, changed(config, {"generators.gpus_each": n}), card) for n in possible}
    for number, fit in fits.items():
        if fit.completions >= fit.wanted or fit.gpu.parts["KV cache"] >= LEAST_CACHE * card.num_bytes:
            best = number
            break
    else:
        best = max(fits, key=lambda n: fits[n].completions, default=1)
    return [best, *(n for n, fit in fits.items() if n != best and fit.completions >= config.algorithm.group_size)]


def share_one_gpu(
    shape: ModelShape, config: Config, card: Card, decided: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The settings with which learner and generator share one GPU.

    First the learner gets what it needs, then the engine's weights and the KV cache of a few groups.

    Args:
        decided: keys that are not ours to choose, with their values.
    Returns:
        Values of generators.memory_fraction and generators.groups_in_flight, and of learner.offload_optimizer and
        learner.tokens_per_microbatch where they must change.
    Raises:
        ConfigError: they do not fit; the sentence says what would.
    """
    shared = changed(
        config,
        {"cluster.share_gpu": True, "generators.count": 1, "generators.gpus_each": 1, "learner.ranks": 1},
    )
    for enough in (min(config.generators.groups_in_flight, 4), 1):
        for saving in _savings(shared, decided or {}):
            tried = changed(shared, saving)
            left = card.num_bytes * COMFORTABLE - learner_rank(shape, tried).total - CONTEXT - ENGINE_WORK
            groups, fraction = _cache_of(shape, tried, card, left)
            if groups >= enough:
                return saving | {"generators.memory_fraction": fraction, "generators.groups_in_flight": groups}
    least = changed(shared, saving)
    held = learner_rank(shape, least).total + itemsize(config) * shape.parameters + CONTEXT + ENGINE_WORK
    raise ConfigError(
        f"learner and generator do not fit one GPU of {_gib(card.num_bytes)} GiB: they need more than {_gib(held)} GiB"
        + ("; train adapters (model.lora.rank=32), or use two GPUs" if not config.model.lora.rank else "; use two GPUs")
    )


def _cache_of(shape: ModelShape, config: Config, card: Card, left: float) -> tuple[int, float]:
    """Groups in flight and memory fraction of an engine that may hold `left` bytes of weights and KV cache."""
    item, generators = itemsize(config), config.generators
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    group = (config.algorithm.group_size + generators.extra_completions) * longest
    each = group * shape.cache_bytes_per_token(item, 1)
    weights = item * shape.parameters
    groups = min(int((left - weights) // each), generators.groups_in_flight)
    wanted = max(weights + 1.25 * groups * each, 0.1 * card.num_bytes)  # some room, so that a prefill need not wait
    held = min(left, wanted)
    return groups, int(1000 * held / (card.num_bytes - CONTEXT)) / 1000


def largest(n_gpus: int, card_bytes: int, *, adapters: int) -> str | None:
    """The largest of the published models that these GPUs can train with the settings that we choose, by name.

    Args:
        adapters: their rank; 0: all weights are trained.
    """
    from asyncgrpo.config.load import load_config

    plain = load_config(
        None, ["model.path=any", "data.train=any", "learner.device=cuda", f"model.lora.rank={adapters}"]
    )
    card, found = Card(card_bytes, "found"), None
    for name, settings in PUBLISHED.items():
        shape = shape_of(settings)
        try:
            if n_gpus == 1:
                share_one_gpu(shape, plain, card)
            else:
                refuse(shape, changed(plain, choose(shape, plain, card, n_gpus, {})), card)
        except ConfigError:
            continue
        found = name
    return found


# -- the table ---------------------------------------------------------------------------------------------------------


def report(fit: Fit, host: Host | None = None) -> str:
    """What a run holds, as a table.

    Args:
        host: this machine, where the run is on it.
    """
    from asyncgrpo.config.foreign import table

    return table(("memory", "GiB", "of", "what for"), list(_rows(fit, host)))


def _rows(fit: Fit, host: Host | None) -> Iterator[tuple[str, str, str, str]]:
    card = _gib(fit.card.num_bytes)
    if fit.learner is not None:
        yield "learner rank", _gib(fit.learner.total), card, _in_words(fit.learner)
    if fit.engine is not None:
        yield "engine GPU", _gib(fit.engine.gpu.total), card, _in_words(fit.engine.gpu)
        yield "", "", "", _cache_in_words(fit.engine)
    yield "host, a node", _gib(fit.host.total), _gib(host.memory) if host else "", _in_words(fit.host)
    yield "its /dev/shm", _gib(fit.shared.total), _gib(host.shared_free) if host else "", _in_words(fit.shared)
    notes = [f"publication: an engine pauses about {max(fit.publication_s, 0.1):.1f} s for it"]
    if fit.card.known == "assumed":
        notes.append("for cards of 80 GB, as there is no GPU here; cluster.gpu_memory_gb says another size")
    if not fit.is_exact:
        notes.append("the architecture is not known: its size is that of its files, its layers a Llama's")
    yield from (("", "", "", note) for note in notes)


def _cache_in_words(engine: EngineFit) -> str:
    said = (
        f"KV cache: {engine.completions:,} completions of {engine.longest:,} tokens at once, {engine.wanted:,} wanted"
    )
    if engine.completions >= engine.wanted:
        return said
    return f"{said}; if all are so long, some wait (lower generators.groups_in_flight)"


def as_json(fit: Fit) -> dict[str, Any]:
    """The table for scripts, in bytes and seconds."""
    return {
        "card_bytes": fit.card.num_bytes,
        "card_is": fit.card.known,
        "learner_rank": None if fit.learner is None else fit.learner.parts,
        "engine_gpu": None if fit.engine is None else fit.engine.gpu.parts,
        "completions_at_once": None if fit.engine is None else fit.engine.completions,
        "completions_wanted": None if fit.engine is None else fit.engine.wanted,
        "host": fit.host.parts,
        "shared_memory": fit.shared.parts,
        "publication_s": fit.publication_s,
    }


def _in_words(holding: Holding, unit: int = GIB) -> str:
    return ", ".join(f"{name} {size / unit:,.1f}" for name, size in holding.parts.items() if size >= unit / 20)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"
