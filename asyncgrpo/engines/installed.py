"""Checks that SGLang can run here with the configured arguments, without importing it or torch."""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

from asyncgrpo.config.explain import near
from asyncgrpo.config.schema import GeneratorConfig
from asyncgrpo.errors import ConfigError
from asyncgrpo.importing import has_gpu

OLDEST_PYTHON = (3, 11)
NAMES_OF_ARGUMENTS = "srt/arg_groups/field_order.py"
"""The file of SGLang 0.5.23 that lists all arguments of its engine in one tuple."""


def why_sglang_cannot_run() -> str | None:
    """Return a sentence with the missing requirement and the command that installs it; None if SGLang can be started.

    It does not check the model or the GPU driver, which the start of the engine does.
    """
    on_gpu = has_gpu()
    if sys.version_info[:2] < OLDEST_PYTHON:
        python = ".".join(map(str, sys.version_info[:2]))
        return f"the engine sglang needs Python 3.11 or later, and this is {python}: python3.11 -m venv VENV"
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
    if not file.exists():  # another release, whose engine checks its arguments
        return
    (names,) = (
        ast.literal_eval(node.value) for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign)
    )
    for key in generators.extra:
        if key not in names:
            hint = near(key, names) or "all arguments: python -m sglang.launch_server --help"
            raise ConfigError(f"generators.extra.{key}: sglang.Engine has no such argument; {hint}")
