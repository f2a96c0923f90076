"""The routers of a mixture of experts: replay of the choices that the generator made, and the load of the experts.

Learner and engine compute a router's scores with different kernels, and a token near a tie takes another expert. Its log-prob
then differs by far more than rounding. With replay the learner's router takes the recorded experts, with its own present
weights for them, so gradients flow as always. Source: R3, arXiv:2510.11370.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NAMES = ("TopKRouter", "TopkRouter", "TopKGate")
"""Ends of the class names of routers in transformers that choose by `topk` over all experts."""


def routers_of(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield the number of each layer with experts, and its router."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith(NAMES):
            yield int(next(part for part in name.split(".") if part.isdigit())), module


class Routers:
    """The routers of one model, in the order of their layers."""

    def __init__(self, model: nn.Module) -> None:
        self._chosen: dict[int, Tensor] = {}
        self._loads: dict[int, Tensor] = {}
        for layer, router in routers_of(model):
            router.forward = self._replaying(layer, router.forward, router)

    def replay(self, routes: Tensor | None) -> None:
        """Use these choices in the next forward pass, and in its recomputation.

        Args:
            routes: [T, layers, K] integers, for all layers of the model; rows of -1 keep the live choice. None: all choices
                are live.
        """
        self._chosen = {} if routes is None else {layer: one.long() for layer, one in enumerate(routes.unbind(1))}

    def take_loads(self) -> Tensor | None:
        """Return the tokens that each expert was trained with since the last call, [routers, E]; None without a mixture."""
        loads, self._loads = self._loads, {}
        return torch.stack([loads[layer] for layer in sorted(loads)]) if loads else None

    def _replaying(self, layer: int, forward: Callable[..., Any], router: Any) -> Callable[..., Any]:
        @torch.compiler.disable
        def replaying(*args: Any, **kwargs: Any) -> Any:
            experts = router.weight.shape[0]
            with _Chosen(self._chosen.get(layer), experts) as chosen:
                found = forward(*args, **kwargs)
            if torch.is_grad_enabled() and chosen.taken is not None:
                load = chosen.taken.flatten().bincount(minlength=experts)
                self._loads[layer] = self._loads[layer] + load if layer in self._loads else load
            return found

        return replaying


class _Chosen(TorchFunctionMode):
    """Makes `topk` over the experts return given ids, [T, K], and the live scores there."""

    def __init__(self, ids: Tensor | None, experts: int) -> None:
        super().__init__()
        self._ids, self._experts = ids, experts
        self.taken: Tensor | None = None
        """[T, K] ids that the router took."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk) or args[0].shape[-1] != self._experts or args[0].ndim != 2:
            return found
        if self._ids is not None:
            is_known = (self._ids >= 0) & (self._ids < self._experts)
            ids = torch.where(is_known, self._ids, found.indices)
            found = torch.return_types.topk((args[0].gather(-1, ids), ids))
        self.taken = found.indices
        return found
