"""Import-only stand-in for SGLang's compiled kernels, of which PyPI has no CPU build.

On its CPU platform SGLang imports a few names from here at module level; with the `torch_native` attention backend and
no speculative decoding it calls none of them. Calling one is an error that says so.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: SGLang's compiled CPU kernels are not installed")

    return missing
