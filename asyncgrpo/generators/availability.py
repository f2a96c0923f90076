"""Whether an inference engine can run here, answered without importing it: importing SGLang takes seconds and changes
the process. Whoever is about to start engines asks first, and prints the sentence it gets.
"""

import sys
from importlib.util import find_spec

import torch

OLDEST_PYTHON = (3, 11)


def why_sglang_cannot_run() -> str | None:
    """One sentence that names what is missing and the command that mends it, or None if SGLang can be started.

    Says nothing about the model, and nothing about the GPU driver: those show when the engine starts.
    """
    has_gpu = torch.cuda.is_available()
    if sys.version_info[:2] < OLDEST_PYTHON:
        python = ".".join(map(str, sys.version_info[:2]))
        return f"the engine sglang needs Python 3.11 or later, and this is {python}: python3.11 -m venv VENV"
    if find_spec("sglang") is None:
        # SGLang declares the CUDA build of torch and its kernels, which a machine without a GPU has no use for.
        mend = "pip install 'asyncgrpo[sglang]'" if has_gpu else "./setup.sh in a checkout of asyncgrpo"
        return f"the engine sglang needs the package sglang, which is not installed here: {mend}"
    if not has_gpu and find_spec("sgl_kernel") is None:
        return (
            "without a GPU, the engine sglang needs a stand-in for its compiled kernels (module sgl_kernel), "
            "which is not installed here: pip install ./packaging/cpu-shims"
        )
    return None
