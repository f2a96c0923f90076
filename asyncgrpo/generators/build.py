"""The engine that a configuration asks for, with its arguments. Only the chosen one is imported."""

import torch

from asyncgrpo.config import Config
from asyncgrpo.errors import EngineError
from asyncgrpo.generators.availability import why_sglang_cannot_run
from asyncgrpo.generators.engine import Engine


def build_engine(config: Config, *, seed: int) -> Engine:
    """An engine that is not started yet.

    Args:
        seed: for engines that sample with a stream of their own. Must differ between the engines of a run, and between
            its starts: with equal streams they explore the same answers.
    Raises:
        EngineError: it cannot run here.
    """
    generators = config.generators
    dtype = getattr(torch, config.model.dtype)
    max_context = config.data.max_prompt_tokens + config.sampling.max_tokens
    max_answers = generators.groups_in_flight * (config.algorithm.group_size + generators.extra_answers)
    if generators.engine == "sglang":
        if (why := why_sglang_cannot_run()) is not None:
            raise EngineError(f"generators.engine is sglang, which cannot run here: {why}")
        from asyncgrpo.generators.sglang_engine import SGLangEngine

        return SGLangEngine(
            config.model.path,
            dtype=dtype,
            max_context=max_context,
            device="cuda" if generators.gpus_each else "cpu",
            tensor_parallel=max(1, generators.gpus_each),
            max_answers=max_answers,
            memory_fraction=generators.memory_fraction,
            prefix_cache=generators.prefix_cache,
            random_seed=seed,
            extra=dict(generators.extra),
        )
    if generators.engine == "torch":
        from asyncgrpo.generators.torch_engine import TorchEngine

        device = torch.device("cuda" if generators.gpus_each else "cpu")
        return TorchEngine(
            config.model.path, dtype=dtype, device=device, max_context=max_context, max_answers=max_answers
        )
    from asyncgrpo.data.tokenizer import vocabulary_size
    from asyncgrpo.generators.fake_engine import FakeEngine

    # A token of no time at all would leave the rest of a small machine none either.
    own = {"vocab_size": vocabulary_size(config.model.path) or 256, "seconds_per_token": 0.005}
    return FakeEngine(**own | generators.extra)
