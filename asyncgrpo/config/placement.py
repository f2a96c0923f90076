"""Placement of a run on GPUs: what cannot fit is refused with the nearest settings that fit, open settings are chosen.

One rule decides: `problems` compares the memory that `memory.py` predicts with the card. `refuse` and `refuse_host` raise
before anything starts, `choose` and `share_one_gpu` choose settings, `report` is the table that commands print.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from asyncgrpo.config import memory
from asyncgrpo.config.explain import value_in_words
from asyncgrpo.config.foreign_rules import split_gpus
from asyncgrpo.config.model_size import ModelSize
from asyncgrpo.config.schema import Config, changed
from asyncgrpo.errors import ConfigError
from asyncgrpo.host import Host

Changes = dict[str, Any]
"""Values of settings by their dotted keys."""

MIB = 2**20
COMFORTABLE = 0.95
"""Share of a card that chosen settings may fill. Given settings may fill all of it."""
LEAST_CACHE = 0.4
"""Share of a card that is enough for the KV cache, if it does not hold all completions that are wanted at once."""
TEACHER_MEMORY = 0.85
"""Share of its GPUs' memory that a teacher fills with weights and cache."""
FEWEST_TOKENS = 4096
"""Least `learner.tokens_per_microbatch` that is chosen: with fewer the GPU would wait for its weights."""


# -- what does not fit -------------------------------------------------------------------------------------------------


def problems(size: ModelSize, config: Config, card: memory.Card, *, filled: float = 1.0) -> dict[str, str]:
    """Return why learner or engine cannot run on GPUs like `card`, by "learner" and "engine"; empty if they can.

    Args:
        filled: share of its GPU that the learner may take.
    """
    found, of_card = {}, f"of {_gib(card.num_bytes)} GiB"
    engine = _engine(size, config, card)
    if memory.runs_on_gpu(config):
        rank = memory.learner_rank(size, config)
        if rank.total() > filled * card.num_bytes:
            needs = f"{_gib(rank.total())} {of_card} ({_in_words(rank)})"
            found["learner"] = f"a learner rank does not fit its GPU: {needs}"
        elif config.cluster.share_gpu and engine is not None:
            needed = (1 + memory.SLACK) * memory.learner_tensors(size, config).total()
            beside_engine = card.num_bytes - memory.CONTEXT - engine.gpu.total()
            left = min(memory.learner_share(config, card) * card.num_bytes, beside_engine)
            if needed > filled * left:
                fraction = f"generators.memory_fraction={config.generators.memory_fraction:g}"
                why = f"the learner needs {_gib(needed)} GiB, and an engine with {fraction} leaves it {_gib(max(left, 0))} GiB"
                found["learner"] = f"learner and engine do not fit one GPU {of_card} together: {why}"
    if engine is not None and engine.gpu.total() > card.num_bytes:
        found["engine"] = f"an engine does not fit its GPU: {_gib(engine.gpu.total())} {of_card}"
    elif engine is not None and engine.completions < 1:
        cache = f"{_gib(engine.gpu['KV cache'])} GiB left for the KV cache beside {_gib(engine.gpu['weights'])} GiB of weights"
        why = f"too little for one completion of {engine.longest:,} tokens"
        found["engine"] = f"an engine's GPU {of_card} has {cache}, {why}"
    return found


def _engine(size: ModelSize, config: Config, card: memory.Card) -> memory.EngineFit | None:
    on_gpu = config.generators.gpus_each > 0 and config.generators.engine != "fake"
    return memory.engine_gpu(size, config, card) if on_gpu else None


def keeps_activations(size: ModelSize, config: Config, card: memory.Card) -> bool:
    """True if a learner rank on `card` has room for all activations of a micro-batch, so that none need be recomputed."""
    kept = changed(config, {"learner.activation_checkpointing": False, "learner.device": "cuda"})
    return "learner" not in problems(size, kept, card, filled=COMFORTABLE)


def refuse_teacher(path: str, size: ModelSize, config: Config, card: memory.Card) -> None:
    """Raise ConfigError if a teacher that the run starts does not fit its GPUs. An assumed card refuses nothing."""
    own = {"model.path": path, "model.lora.rank": 0, "generators.engine": "sglang", "cluster.share_gpu": False}
    own |= {"generators.gpus_each": config.teacher_gpus_each, "generators.memory_fraction": TEACHER_MEMORY}
    if card.known != "assumed" and (why := problems(size, changed(config, own), card).get("engine")) is not None:
        raise ConfigError(f"teacher.path ({path}): {why}; raise teacher.gpus_each ({config.teacher_gpus_each})")


def refuse(size: ModelSize, config: Config, card: memory.Card) -> None:
    """Raise ConfigError for what cannot fit, with the nearest settings that do. An assumed card refuses nothing."""
    found = {} if card.known == "assumed" else problems(size, config, card)
    if not found:
        return
    side, why = next(iter(found.items()))
    offers: dict[str, Changes] = {}
    filled = 1.0 if config.cluster.share_gpu else COMFORTABLE  # `share_one_gpu` leaves room
    for change in _remedies(size, config, card, side):
        kind = next(iter(change))
        if kind not in offers and side not in problems(size, changed(config, change), card, filled=filled):
            offers[kind] = change
    words = [" ".join(f"{key}={value_in_words(value)}" for key, value in change.items()) for change in offers.values()]
    instead = f"it fits with {' or with '.join(words[:3])}" if words else "use larger GPUs or a smaller model"
    raise ConfigError(f"{why}; {instead}")


def _remedies(size: ModelSize, config: Config, card: memory.Card, side: str) -> Iterator[Changes]:
    """Changes that may make `side` fit. Those that begin with the same key are alternatives, the smallest first."""
    learner, engine, ranks = config.learner, config.generators, config.learner.ranks
    adapters: Changes = {} if config.model.lora.rank else {"model.lora.rank": 32}
    if config.cluster.share_gpu:
        for change in ({}, adapters):
            with contextlib.suppress(ConfigError):
                yield change | share_one_gpu(size, changed(config, change), card)
    elif side == "engine":
        yield from ({"generators.memory_fraction": f} for f in (0.8, 0.85, 0.88) if f > engine.memory_fraction)
        yield from ({"generators.gpus_each": n} for n in (2, 4, 8) if n > engine.gpus_each and size.heads % n == 0)
    else:
        smaller = [{"learner.tokens_per_microbatch": tokens} for tokens in _token_budgets(config)[1:]]
        for recompute in () if learner.activation_checkpointing == "offload" else (True, "offload"):
            yield {"learner.activation_checkpointing": recompute}
        yield from smaller
        yield from _layouts(size, config)
        yield from [] if learner.offload_optimizer else [{"learner.offload_optimizer": True}]
        multiple = learner.parallel.multiple
        yield from ({"learner.ranks": count} for count in range(ranks + 1, 8 * ranks + 1) if count % multiple == 0)
        yield from (adapters | change for change in ({}, *smaller) if adapters)


def _layouts(size: ModelSize, config: Config) -> Iterator[Changes]:
    """Ways to divide the experts of a mixture or long rows over more of the ranks that there are."""
    ways = [n for n in (2, 4, 8) if config.learner.ranks % n == 0]
    if any(layer.expert_parameters for layer in size.layers):
        yield from ({"learner.parallel.expert": n} for n in ways if n > config.learner.parallel.expert)
    for n in (n for n in ways if n > config.learner.parallel.context and size.heads % n == 0):
        divided: Changes = {"learner.parallel.context": n}
        yield divided | {"learner.tokens_per_microbatch": _token_budgets(changed(config, divided))[-1]}


def refuse_host(size: ModelSize, config: Config, host: Host) -> None:
    """Raise ConfigError where this machine has too little memory, or too little shared memory, for a run on it alone."""
    held = memory.fullest_host(size, config)
    if held.total() > host.memory:
        fewer = range(config.generators.count - 1, 0, -1)
        less = ((n, memory.fullest_host(size, changed(config, {"generators.count": n}))) for n in fewer)
        count = next((n for n, other in less if other.total() <= host.memory), None)
        instead = f"it fits with generators.count={count}" if count else "use a smaller model"
        needs = f"{_gib(held.total())} of {_gib(host.memory)} GiB ({_in_words(held)})"
        raise ConfigError(f"the run does not fit the memory of this machine or container: {needs}; {instead}")
    shared = memory.fullest_shared_memory(size, config)
    if shared.total() > host.shared_free:
        wanted = ceil(memory.shared_memory_size(size, config) / memory.GIB)
        needs = f"{shared.total() / MIB:,.0f} MiB ({_in_words(shared, MIB)})"
        free = f"{host.shared_free / MIB:,.0f} of its {host.shared / MIB:,.0f} MiB are free"
        more = f"docker run --shm-size={wanted}g, or mount -o remount,size={wanted}g /dev/shm"
        raise ConfigError(f"the weights do not fit /dev/shm: {needs}, and {free}; give it more ({more})")


# -- what is chosen ----------------------------------------------------------------------------------------------------


def choose(
    size: ModelSize | None, config: Config, card: memory.Card, n_gpus: int, decided: Mapping[str, Any]
) -> Changes:
    """The settings that share GPUs between generators and learner, so that the model fits where it can.

    Half of the GPUs are the generators'. A learner that does not fit gets smaller micro-batches, then moments on the CPU,
    then more of the GPUs. A model that fits in no way keeps the half, and `refuse` reports why.

    Args:
        size: of the model; None: unknown, and half of the GPUs are the generators'.
        config: of the run, with any split.
        n_gpus: to share, at least 2.
        decided: values of those returned keys that are given.
    Returns:
        Values of generators.count, generators.gpus_each and learner.ranks, and of learner.offload_optimizer and
        learner.tokens_per_microbatch where they must change.
    Raises:
        ConfigError: one side would get nothing.
    """
    count, ranks = decided.get("generators.count"), decided.get("learner.ranks")
    given = decided.get("generators.gpus_each")
    engines = [given or 1] if given or size is None else engine_gpus(size, config, card, n_gpus)
    possible = [each for each in engines if (count or 1) * each + (ranks or 1) <= n_gpus]
    multiple = config.learner.parallel.multiple
    placements = [_placements(n_gpus, each, count, ranks, multiple) for each in possible or engines]
    for placed in itertools.chain.from_iterable(placements):
        for saving in _savings(config, decided):
            if size and "learner" not in problems(size, changed(config, placed | saving), card, filled=COMFORTABLE):
                return placed | saving
    return placements[0][0]


def _placements(n_gpus: int, each: int, count: int | None, ranks: int | None, multiple: int) -> list[Changes]:
    """The half, then ever fewer generators. GPUs that are too few for one more generator are the learner's, in multiples."""
    most, left = split_gpus(n_gpus, each, count=count, ranks=ranks)
    splits = [(most, left)]
    if count is None and ranks is None:
        splits += [(fewer, n_gpus - fewer * each) for fewer in range(most - 1, 0, -1)]
    return [
        {"generators.count": generators, "generators.gpus_each": each, "learner.ranks": max(rest - rest % multiple, 1)}
        for generators, rest in splits
    ]


def _savings(config: Config, decided: Mapping[str, Any]) -> Iterator[Changes]:
    """Changes that make a rank smaller, cheapest first."""
    offload, tokens = "learner.offload_optimizer", "learner.tokens_per_microbatch"
    budgets: list[Changes] = [{}]
    if tokens not in decided:
        budgets += [{tokens: budget} for budget in _token_budgets(config)[1:]]
    is_open = offload not in decided and not config.learner.offload_optimizer
    for offloaded in ({}, {offload: True}) if is_open else ({},):
        yield from (offloaded | budget for budget in budgets)


def _token_budgets(config: Config) -> list[int]:
    """Tokens of a micro-batch: as configured, then halves, each enough for the longest sequence."""
    longest = ceil((config.data.max_prompt_tokens + config.sampling.max_tokens) / config.learner.parallel.context)
    budgets = [config.learner.tokens_per_microbatch]
    while budgets[-1] // 2 >= max(longest, FEWEST_TOKENS):
        budgets.append(budgets[-1] // 2)
    return budgets


def engine_gpus(size: ModelSize, config: Config, card: memory.Card, n_gpus: int) -> list[int]:
    """GPUs of one engine, the best number first; never empty.

    The best is the smallest whose KV cache holds all completions wanted at once, or is large; where there is none, that with
    the largest cache. Then come the others that hold a group, fewest first.
    """
    if config.generators.engine != "sglang":
        return [1]
    possible = [n for n in (1, 2, 4, 8) if n <= min(n_gpus - 1, memory.GPUS_PER_NODE) and size.heads % n == 0]
    fits = {n: memory.engine_gpu(size, changed(config, {"generators.gpus_each": n}), card) for n in possible}
    enough = (
        number
        for number, fit in fits.items()
        if fit.completions >= fit.wanted or fit.gpu["KV cache"] >= LEAST_CACHE * card.num_bytes
    )
    best = next(enough, max(fits, key=lambda n: fits[n].completions, default=1))
    return [best, *(n for n, fit in fits.items() if n != best and fit.completions >= config.algorithm.group_size)]


def share_one_gpu(
    size: ModelSize, config: Config, card: memory.Card, decided: Mapping[str, Any] | None = None
) -> Changes:
    """The settings with which learner and generator share one GPU.

    First the learner gets what it needs, then the engine's weights and the KV cache of a few groups.

    Args:
        decided: values of those returned keys that are given.
    Returns:
        Values of generators.memory_fraction and generators.groups_in_flight, and of learner.offload_optimizer and
        learner.tokens_per_microbatch where they must change.
    Raises:
        ConfigError: they do not fit; the sentence names what would.
    """
    shared = {"cluster.share_gpu": True, "generators.count": 1, "generators.gpus_each": 1, "learner.ranks": 1}
    config, weights = changed(config, shared), memory.itemsize(config) * size.parameters
    in_flight = config.generators.groups_in_flight
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    of_group = config.algorithm.group_size * longest * size.cache_bytes_per_token(memory.itemsize(config), 1)
    for enough in (min(in_flight, 4), 1):
        for saving in _savings(config, decided or {}):
            rank = memory.learner_rank(size, changed(config, saving)).total()
            left = card.num_bytes * COMFORTABLE - rank - memory.CONTEXT - memory.ENGINE_WORK
            groups = min(int((left - weights) // of_group), in_flight)
            if groups >= enough:  # some room, so that a prefill need not wait
                held = min(left, max(weights + 1.25 * groups * of_group, 0.1 * card.num_bytes))
                fraction = int(1000 * held / (card.num_bytes - memory.CONTEXT)) / 1000
                return saving | {"generators.memory_fraction": fraction, "generators.groups_in_flight": groups}
    instead = "use two GPUs" if config.model.lora.rank else "train adapters (model.lora.rank=32), or use two GPUs"
    of_card, needed = f"of {_gib(card.num_bytes)} GiB", _gib(rank + weights + memory.CONTEXT + memory.ENGINE_WORK)
    raise ConfigError(
        f"learner and generator do not fit one GPU {of_card}: they need more than {needed} GiB; {instead}"
    )


# -- the table ---------------------------------------------------------------------------------------------------------


def settled(size: ModelSize, config: Config, card: memory.Card) -> Config:
    """Return the configuration with `learner.activation_checkpointing` as the learner would choose it."""
    if config.learner.activation_checkpointing is not None:
        return config
    return changed(config, {"learner.activation_checkpointing": not keeps_activations(size, config, card)})


def report(size: ModelSize, config: Config, card: memory.Card, host: Host | None = None) -> str:
    """Return the memory of a run as a table. `host` is this machine, if the run is on it."""
    config, engine, of = settled(size, config, card), _engine(size, config, card), _gib(card.num_bytes)
    held, shared = memory.fullest_host(size, config), memory.fullest_shared_memory(size, config)
    rows = [("memory", "GiB", "of", "what for")]
    if memory.runs_on_gpu(config):
        rank = memory.learner_rank(size, config)
        rows.append(("learner rank", _gib(rank.total()), of, _in_words(rank)))
        ranks, parallel = config.learner.ranks, config.learner.parallel
        if parallel.multiple > 1:
            lines = f"{ranks} ranks: {ranks // parallel.context} rows at once, each on {parallel.context}"
            copies = f"{ranks // parallel.expert} copies of the experts, each on {parallel.expert}"
            rows.append(("", "", "", f"{lines}; {copies}"))
    if engine is not None:
        rows.append(("engine GPU", _gib(engine.gpu.total()), of, _in_words(engine.gpu)))
        cache = f"KV cache: {engine.completions:,} completions of {engine.longest:,} tokens at once, {engine.wanted:,} wanted"
        waits = "; if all are so long, some wait (lower generators.groups_in_flight)"
        rows.append(("", "", "", cache + waits * (engine.completions < engine.wanted)))
    rows += [
        ("host, a node", _gib(held.total()), _gib(host.memory) if host else "", _in_words(held)),
        ("its /dev/shm", _gib(shared.total()), _gib(host.shared_free) if host else "", _in_words(shared)),
    ]
    pause = max(memory.pause_seconds(memory.published_bytes(size, config), config.generators.gpus_each), 0.1)
    rows.append(("", "", "", f"publication: an engine pauses about {pause:.1f} s for it"))
    if card.known == "assumed":
        rows.append(("", "", "", "for cards of 80 GB, as no GPU is here; set cluster.gpu_memory_gb for another size"))
    return "\n".join(f"{what:<14}{gib:<8}{whole:<8}{why}".rstrip() for what, gib, whole, why in rows)


def _in_words(holding: memory.Holding, unit: int = memory.GIB) -> str:
    return ", ".join(f"{name} {size / unit:,.1f}" for name, size in holding.items() if size >= unit / 20)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / memory.GIB:.1f}"
