"""Builds the configured engine. Only that engine is imported."""

from typing import Any

import torch

from asyncgrpo.config.memory import Card, engine_gpu
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.schema import Config
from asyncgrpo.engines.base import Engine
from asyncgrpo.engines.installed import why_sglang_cannot_run
from asyncgrpo.errors import EngineError


def build_engine(config: Config, *, seed: int) -> Engine:
    """Build the engine of `config` without starting it.

    Args:
        seed: for engines with a random stream of their own. It must differ between the engines and the starts of a run,
            because equal streams would sample the same completions.
    Raises:
        EngineError: the engine cannot run here.
    """
    generators = config.generators
    dtype = getattr(torch, config.model.dtype)
    max_context = config.data.max_prompt_tokens + config.sampling.max_tokens
    max_completions = generators.groups_in_flight * config.algorithm.group_size
    if generators.engine == "sglang":
        if (why := why_sglang_cannot_run()) is not None:
            raise EngineError(f"generators.engine is sglang, which cannot run here: {why}")
        from asyncgrpo.engines.sglang.engine import SGLangEngine

        return SGLangEngine(
            config.model.path,
            dtype=dtype,
            max_context=max_context,
            device="cuda" if generators.gpus_each else "cpu",
            tensor_parallel=max(1, generators.gpus_each),
            max_completions=max_completions,
            memory_fraction=generators.memory_fraction,
            prefix_cache=generators.prefix_cache,
            random_seed=seed,
            extra=_beside_a_learner(config) | generators.extra,
        )
    if generators.engine == "torch":
        from asyncgrpo.engines.torch.engine import TorchEngine

        device = torch.device("cuda" if generators.gpus_each else "cpu")
        return TorchEngine(
            config.model.path, dtype=dtype, device=device, max_context=max_context, max_completions=max_completions
        )
    from asyncgrpo.data.tokenizer import vocabulary_size
    from asyncgrpo.engines.fake import FakeEngine

    # Tokens without delay would starve the other processes of a small machine.
    own = {"vocab_size": vocabulary_size(config.model.path) or 256, "seconds_per_token": 0.005}
    return FakeEngine(**own | {"max_completions": max_completions} | generators.extra)


SHARED_FRACTION = 0.9
"""Largest share for SGLang's weights and cache of the memory that is free on a shared GPU when it starts."""


def _beside_a_learner(config: Config) -> dict[str, Any]:
    """Return SGLang's arguments for its part of a shared GPU; none for a GPU of its own.

    By default SGLang takes a share of the memory that is free at its start: nearly all before the learner has loaded, little
    at a restart beside a training learner. So the cache gets a fixed size in tokens.
    """
    if not (config.cluster.share_gpu and config.generators.gpus_each and (size := size_at(config.model.path))):
        return {}
    found = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    fit = engine_gpu(size, config, Card.of(config, found))
    return {"max_total_tokens": fit.tokens, "mem_fraction_static": SHARED_FRACTION}
