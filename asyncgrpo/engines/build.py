"""Builds the engine that a configuration asks for, and says whether SGLang can run here and with what is asked of it.

Only the chosen engine is imported. The commands ask `why_sglang_cannot_run` and `check_extra` before they start engines.
"""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from asyncgrpo.config.explain import near
from asyncgrpo.config.memory import Card, engine_gpu
from asyncgrpo.config.schema import Config, GeneratorConfig
from asyncgrpo.config.shapes import shape_at
from asyncgrpo.engines.base import Engine
from asyncgrpo.errors import ConfigError, EngineError

OLDEST_PYTHON = (3, 11)
NAMES_OF_ARGUMENTS = "srt/arg_groups/field_order.py"
"""The file of SGLang 0.5.23 that names all arguments of its engine, in one tuple. It can be read without SGLang's imports."""


def build_engine(config: Config, *, seed: int) -> Engine:
    """Build the engine that `config` asks for. It is not started yet.

    Args:
        seed: for engines with a random stream of their own. It must differ between the engines and the starts of a run:
            with equal streams they would sample the same completions.
    Raises:
        EngineError: it cannot run here.
    """
    generators = config.generators
    dtype = getattr(torch, config.model.dtype)
    max_context = config.data.max_prompt_tokens + config.sampling.max_tokens
    max_completions = generators.groups_in_flight * (config.algorithm.group_size + generators.extra_completions)
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

    # Tokens that take no time would leave other processes of a small machine none either.
    own = {"vocab_size": vocabulary_size(config.model.path) or 256, "seconds_per_token": 0.005}
    return FakeEngine(**own | {"max_completions": max_completions} | generators.extra)


SHARED_FRACTION = 0.9
"""Of what is free of a shared GPU when SGLang starts: what weights and cache may take of it at most."""


def _beside_a_learner(config: Config) -> dict[str, Any]:
    """SGLang's arguments for its part of a shared GPU; none for a GPU of its own.

    By itself it takes a share of what is free when it starts. That is all before the learner has loaded, and little when a
    generator is started again beside one that trains. So the cache gets its size in tokens.
    """
    shape = shape_at(config.model.path) if config.cluster.share_gpu and config.generators.gpus_each else None
    if shape is None:
        return {}
    found = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    fit = engine_gpu(shape, config, Card.of(config, found))
    return {"max_total_tokens": fit.tokens, "mem_fraction_static": SHARED_FRACTION}


def why_sglang_cannot_run() -> str | None:
    """A sentence that names what is missing and the command that installs it; None if SGLang can be started.

    It does not check the model or the GPU driver: those show when the engine starts.
    """
    has_gpu = torch.cuda.is_available()
    if sys.version_info[:2] < OLDEST_PYTHON:
        python = ".".join(map(str, sys.version_info[:2]))
        return f"the engine sglang needs Python 3.11 or later, and this is {python}: python3.11 -m venv VENV"
    if find_spec("sglang") is None:
        # SGLang requires the CUDA build of torch and its kernels, which a machine without a GPU does not need.
        fix = "pip install 'asyncgrpo[sglang]'" if has_gpu else "./setup.sh in a checkout of asyncgrpo"
        return f"the engine sglang needs the package sglang, which is not installed here: {fix}"
    if not has_gpu and find_spec("sgl_kernel") is None:
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
    if not file.exists():  # another release; its engine says it
        return
    (names,) = (
        ast.literal_eval(node.value) for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign)
    )
    for key in generators.extra:
        if key not in names:
            hint = near(key, names) or "all arguments: python -m sglang.launch_server --help"
            raise ConfigError(f"generators.extra.{key}: sglang.Engine has no such argument; {hint}")
