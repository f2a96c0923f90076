"""The routers of a mixture of experts: replay of the choices that the generator made, and the load of the experts.

Learner and engine compute a router's scores with different kernels, and a token near a tie takes another expert. Its log-prob
then differs by far more than rounding. With replay the learner's router takes the recorded experts, with its own present
weights for them, so gradients flow as always. Source: R3, arXiv:2510.11370.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NAMES = ("TopKRouter", "TopkRouter", "TopKGate")
"""Ends of the class names of routers in transformers that choose by `topk` over all experts."""


class Routers:
    """The routers of one model, in the order of their layers."""

    def __init__(self, model: nn.Module) -> None:
        self._routers: list[Any] = [module for module in model.modules() if type(module).__name__.endswith(NAMES)]
        self._chosen: list[Tensor | None] = [None] * len(self._routers)
        self._loads: list[Tensor | int] = [0] * len(self._routers)
        for number, router in enumerate(self._routers):
            router.forward = self._replaying(number, router.forward, router)

    def __len__(self) -> int:
        return len(self._routers)

    def replay(self, routes: Tensor | None) -> None:
        """Use these choices in the next forward pass, and in its recomputation.

        Args:
            routes: [T, layers, K] integers; rows of -1 keep the live choice. None: all choices are live.
        """
        self._chosen = [None] * len(self) if routes is None else [one.long() for one in routes.unbind(1)]

    def take_loads(self) -> Tensor | None:
        """Return tokens by layer and expert, [layers, E] float64, since the last call; None without a mixture."""
        loads, self._loads = self._loads, [0] * len(self)
        return (
            torch.stack([torch.as_tensor(load) for load in loads]).double()
            if any(map(torch.is_tensor, loads))
            else None
        )

    def _replaying(self, number: int, forward: Callable[..., Any], router: Any) -> Callable[..., Any]:
        @torch.compiler.disable
        def replaying(*args: Any, **kwargs: Any) -> Any:
            experts = router.weight.shape[0]
            with _Chosen(self._chosen[number], experts) as chosen:
                found = forward(*args, **kwargs)
            if torch.is_grad_enabled() and chosen.taken is not None:
                self._loads[number] = self._loads[number] + chosen.taken.flatten().bincount(minlength=experts)
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
            ids = torch.where(self._ids < 0, found.indices, self._ids)
            found = torch.return_types.topk((args[0].gather(-1, ids), ids))
        self.taken = found.indices
        return found
