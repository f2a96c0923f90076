"""Checks that the configured engine can run here, and builds it. Only that engine is imported, and torch only to build it."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncgrpo.config.explain import near
from asyncgrpo.config.memory import Card, engine_gpu
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.schema import Config, GeneratorConfig
from asyncgrpo.data.images import Images
from asyncgrpo.errors import ConfigError, EngineError
from asyncgrpo.host import has_gpu

if TYPE_CHECKING:
    from asyncgrpo.engines.base import Engine

# -- whether SGLang can run here, found without importing it -----------------------------------------------------------

NAMES_OF_ARGUMENTS = "srt/arg_groups/field_order.py"
"""The file of SGLang 0.5.23 that lists all arguments of its engine in one tuple."""


def why_sglang_cannot_run() -> str | None:
    """Return a sentence with the missing requirement and the command that installs it; None if SGLang can be started.

    It does not check the model or the GPU driver, which the start of the engine does.
    """
    on_gpu = has_gpu()
    if find_spec("sglang") is None:
        # SGLang requires the CUDA build of torch and its kernels, which a machine without a GPU does not need.
        fix = "pip install 'asyncgrpo[sglang]'" if on_gpu else "./setup.sh in a checkout of asyncgrpo"
        return f"the engine sglang needs the package sglang, which is not installed here: {fix}"
    if not on_gpu and find_spec("sgl_kernel") is None:
        return (
            "without a GPU, the engine sglang needs a stand-in for its compiled kernels (module sgl_kernel), "
            "which is not installed here: pip install ./packaging/cpu-shims"
        )
    return None


def check_extra(generators: GeneratorConfig) -> None:
    """Raise ConfigError if `generators.extra` names an argument that the SGLang installed here does not have."""
    package = find_spec("sglang")
    if generators.engine != "sglang" or package is None or not package.submodule_search_locations:
        return
    file = Path(package.submodule_search_locations[0]) / NAMES_OF_ARGUMENTS
    (names,) = (
        ast.literal_eval(node.value) for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign)
    )
    for key in generators.extra:
        if key not in names:
            hint = near(key, names) or "all arguments: python -m sglang.launch_server --help"
            raise ConfigError(f"generators.extra.{key}: sglang.Engine has no such argument; {hint}")


# -- the engine --------------------------------------------------------------------------------------------------------


def build_engine(config: Config, *, seed: int, images: Images | None = None) -> "Engine":
    """Build the engine of `config` without starting it.

    Args:
        images: of the run, if the model reads any.
        seed: for engines with a random stream of their own. It must differ between the engines and the starts of a run,
            because equal streams would sample the same completions.
    Raises:
        EngineError: the engine cannot run here.
    """
    import torch

    generators = config.generators
    dtype = getattr(torch, config.model.dtype)
    max_context = config.data.max_prompt_tokens + config.sampling.max_tokens
    max_completions = generators.groups_in_flight * config.algorithm.group_size
    if generators.engine == "sglang":
        if (why := why_sglang_cannot_run()) is not None:
            raise EngineError(f"generators.engine is sglang, which cannot run here: {why}")
        from asyncgrpo.engines.sglang.engine import SGLangEngine, SGLangOptions

        records_routes = config.model.routing_replay == "rollout"
        # By default a B200 chooses experts in the kernel that runs them, which records none: all routes would be expert 0.
        chooses_apart = {"moe_runner_backend": "triton"} if records_routes and generators.gpus_each else {}
        options = SGLangOptions(
            model_path=config.model.path,
            dtype=dtype,
            max_context=max_context,
            device="cuda" if generators.gpus_each else "cpu",
            tensor_parallel=max(1, generators.gpus_each),
            max_completions=max_completions,
            memory_fraction=generators.memory_fraction,
            prefix_cache=generators.prefix_cache,
            random_seed=seed,
            records_routes=records_routes,
            extra=_beside_a_learner(config) | chooses_apart | generators.extra,
        )
        return SGLangEngine(options, images)
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
SHARED_PREFILL = 4096
"""Tokens that SGLang prefills at once there, as in `memory.ENGINE_WORK`. On a card of 60 GB or more it takes twice as many."""


def _beside_a_learner(config: Config) -> dict[str, Any]:
    """Return SGLang's arguments for its part of a shared GPU; none for a GPU of its own.

    By default SGLang takes a share of the memory that is free at its start: nearly all before the learner has loaded, little
    at a restart beside a training learner. So the cache gets a fixed size in tokens.
    """
    if not (config.cluster.share_gpu and config.generators.gpus_each and (size := size_at(config.model.path))):
        return {}
    import torch

    found = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    fit = engine_gpu(size, config, Card.of(config, found))
    return {
        "max_total_tokens": fit.tokens,
        "mem_fraction_static": SHARED_FRACTION,
        "chunked_prefill_size": SHARED_PREFILL,
    }
