"""Makes an environment with the CPU build of torch fit for SGLang: loaded by every Python start through the `.pth` beside it.

PyPI's torchvision is built against CUDA torch. Its C extension does not load beside CPU torch, and importing it, which
both transformers and SGLang do, then dies on "operator torchvision::nms does not exist". Declaring the two operators
just before torchvision is imported is enough; nothing on the text path calls them. Nothing is imported until then.
"""

import importlib.abc
import importlib.machinery
import sys


class _DeclareTorchvisionOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        if not torch.version.cuda:
            for name in ("nms", "qnms"):
                signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{name}", signature)
        return importlib.machinery.PathFinder.find_spec(fullname, path, target)


sys.meta_path.insert(0, _DeclareTorchvisionOperators())
