"""Import-only stand-in for SGLang's compiled kernels, of which PyPI has no CPU build.

On its CPU platform SGLang imports a few names from here at module level; with the `torch_native` attention backend and
no speculative decoding it calls none of them. Calling one is an error that says so. Its module of Qwen3.5, which the one
of Qwen-VL imports, also looks up four operators, which are declared here.
"""

import torch

for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    torch.library.define(f"sgl_kernel::{_name}", "() -> ()")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: SGLang's compiled CPU kernels are not installed")

    return missing
