"""torch.compile of the decoder layers and the head's loss: where it pays, where its programs are kept, what if it fails.

One program serves all layers and all lengths; attention stays outside it. It fuses what lies between the matrix products:
norms, SwiGLU, rotary embedding, casts. The head has programs of its own (`head`). The first step of a process is made
without them, so that it is not late, and all later ones with them: so a replay, which starts processes where the run did,
makes every step by the same programs.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from asyncgrpo.config.schema import Config

log = logging.getLogger(__name__)

LEAST_WEIGHTS = 2**20
"""Of all layers. In smaller ones, calling the program takes what it saves."""
COST_S = 40
"""CPU seconds to compile for the first time; later starts need 8."""
SAVED_S = 2.5e-9
"""CPU seconds that programs save for each trained token and each feature that a weight matrix computes for it. Measured: 2.8e-9
with layers of width 256, 1.8e-9 and 3.5e-9 with width 512, 3.2e-9 in a head of 151,936 tokens."""
TYPICAL_LENGTH = 150
"""Tokens of a completion, where `sampling.max_tokens` allows for as many."""


def pays(config: Config, layers: Sequence[nn.Module], vocabulary: int, device: torch.device) -> bool:
    """True if a run saves more CPU seconds than compiling takes. Always false on CUDA, where nothing was measured."""
    matrices = [parameter for layer in layers for parameter in layer.parameters() if parameter.ndim > 1]
    features = sum(len(matrix) for matrix in matrices) + vocabulary
    completions = config.buffer.prompts_per_step * config.algorithm.group_size
    saved_s = SAVED_S * features * completions * min(config.sampling.max_tokens, TYPICAL_LENGTH)  # each step
    is_long = config.run.steps is None or saved_s * config.run.steps >= COST_S
    is_large = sum(matrix.numel() for matrix in matrices) >= LEAST_WEIGHTS
    return device.type == "cpu" and not config.model.lora.rank and is_large and is_long


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Let each layer run as a program from its next call on, which makes it. What cannot be compiled runs without."""
    torch._dynamo.config.suppress_errors = True
    for layer in layers:
        layer.compile(dynamic=True)


def works(device: torch.device) -> bool:
    """Whether a small function can be compiled here; says in a warning why not.

    What usually is missing, a C++ compiler or a folder that can be written, is missed by this one too, and before ranks
    wait for one another.
    """
    _keep_programs()

    def small(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * 2

    try:
        torch.compile(small, dynamic=True)(torch.ones(8, device=device))
    except Exception as error:  # torch raises whatever a compiler, a disk or its own passes lead to
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        log.warning("learner.compile: the layers run uncompiled, because torch.compile fails here: %s", reason[:300])
        return False
    return True


def _keep_programs() -> None:
    """Compile in this process, and keep what was made for later starts, in a folder that only its owner can write."""
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch's own default is in the temporary folder, and it sets the variable to that as soon as it is imported.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "asyncgrpo" / "compiled"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    inductor.compile_threads = 1  # else torch starts processes, which stay as long as this one
