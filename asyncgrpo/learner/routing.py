"""The routers of a mixture of experts: replay of the choices that the generator made, load and balance of the experts.

Learner and engine compute a router's scores with different kernels, and a token near a tie takes another expert. Its log-prob
then differs by far more than rounding. With replay the learner's router takes the recorded experts, with its own present
weights for them, so gradients flow as always. Source: R3, arXiv:2510.11370.

Balancing compares experts by the trained tokens of the update before, which all ranks and micro-batches know in advance. So
its gradient is the same for every split of a step. The loss is that of Switch Transformers (arXiv:2101.03961), the mean of
all layers; the bias moves as in DeepSeek-V3 (arXiv:2412.19437).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from asyncgrpo.config.schema import AlgorithmConfig
from asyncgrpo.errors import ConfigError

NAMES = ("TopKRouter", "TopkRouter", "TopKGate")
"""Ends of the class names of routers in transformers that choose by `topk` over all experts."""

BIAS = "e_score_correction_bias"
"""Buffer of a router that is added to the scores for the choice alone."""


def routers_of(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield the number of each layer with experts, and its router."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith(NAMES):
            yield int(next(part for part in name.split(".") if part.isdigit())), module


class Balance(NamedTuple):
    """How strongly the load of experts is balanced."""

    loss: float = 0.0
    """Weight of the loss."""
    bias: float = 0.0
    """Change of an expert's bias in each update."""

    @classmethod
    def of(cls, model: PreTrainedModel, path: str, algorithm: AlgorithmConfig) -> "Balance":
        """Return what run and model ask for. Raises ConfigError: the model has no such loss or bias."""
        settings, routers = model.config.get_text_config(), [router for _, router in routers_of(model)]
        of_model = getattr(settings, "router_aux_loss_coef", None)
        wanted, rate = algorithm.router_aux_coef, algorithm.router_bias_rate
        if wanted and (of_model is None or not routers):
            raise ConfigError(
                f"algorithm.router_aux_coef is {wanted:g}, but model.path ({path}) has no router_aux_loss_coef"
            )
        if rate and not any(BIAS in router._buffers for router in routers):
            raise ConfigError(f"algorithm.router_bias_rate is {rate:g}, but model.path ({path}) has no {BIAS}")
        if wanted is None:
            wanted = of_model if routers and getattr(settings, "output_router_logits", False) else 0.0
        return cls(wanted or 0.0, rate)


UNBALANCED = Balance()


class Routers:
    """The routers of one model, in the order of their layers."""

    def __init__(self, model: nn.Module, balance: Balance = UNBALANCED) -> None:
        routers = list(routers_of(model))
        self._balance = balance
        self._chosen: dict[int, Tensor] = {}
        self._weights: Tensor | None = None
        self._scale = 0.0
        self._loads = torch.zeros(len(routers), routers[0][1].weight.shape[0] if routers else 0, dtype=torch.int64)
        """[routers, E], of this rank in this update."""
        self._before = torch.zeros_like(self._loads)
        """[routers, E], of all ranks in the update before."""
        self._biases = [router.get_buffer(BIAS) for _, router in routers if BIAS in router._buffers]
        self._initial = [bias.clone() for bias in self._biases]
        for number, (layer, router) in enumerate(routers):
            router.forward = self._replaying(number, layer, router.forward)

    def replay(self, routes: Tensor | None, weights: Tensor | None = None) -> None:
        """Use these choices in the next forward pass, and in its recomputation.

        Args:
            routes: [T, layers, K] integers, for all layers of the model; rows of -1 keep the live choice. None: all choices
                are live.
            weights: [T] int64, trained tokens that are predicted from each position. None: one each.
        """
        self._chosen = {} if routes is None else {layer: one.long() for layer, one in enumerate(routes.unbind(1))}
        self._weights = weights

    def begin_update(self, num_tokens: int) -> None:
        """Prepare to train on `num_tokens` tokens of all ranks."""
        self._loads.zero_()
        self._scale = self._balance.loss / max(self._loads.shape[0] * num_tokens, 1)

    @torch.no_grad()
    def end_update(self, *, is_made: bool) -> Tensor | None:
        """Return the trained tokens of each expert, [routers, E]; None without a mixture. Collective.

        If the update was made, biases move towards an equal load.
        """
        if not len(self._loads):
            return None
        loads = self._before = self._loads.clone()
        dist.all_reduce(loads)
        for bias, load in zip(self._biases, loads, strict=False):
            bias += is_made * self._balance.bias * (load.double().mean() - load).sign()
        return loads

    @contextmanager
    def with_initial_biases(self) -> Iterator[None]:
        """Use the biases of the model's files inside the block."""
        moved = [bias.clone() for bias in self._biases]
        for bias, initial in zip(self._biases, self._initial, strict=True):
            bias.copy_(initial)
        yield
        for bias, own in zip(self._biases, moved, strict=True):
            bias.copy_(own)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resume needs, by name. Loading in place restores them."""
        load = {"router_load": self._before} if self._balance.loss else {}
        return load | {f"router_bias.{number}": bias for number, bias in enumerate(self._biases)}

    def _replaying(self, number: int, layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        experts = self._loads.shape[1]

        @torch.compiler.disable
        def replaying(*args: Any, **kwargs: Any) -> Any:
            with _Chosen(self._chosen.get(layer), experts) as chosen:
                found = forward(*args, **kwargs)
            if not torch.is_grad_enabled() or chosen.taken is None:
                return found
            tokens, top_k = chosen.taken.shape
            weights = chosen.taken.new_ones(tokens) if self._weights is None else self._weights
            self._loads = self._loads.to(weights.device)
            self._loads[number].index_add_(0, chosen.taken.flatten(), weights.repeat_interleave(top_k))
            if not self._balance.loss:
                return found
            logits, scores, *others = found
            before = self._before[number].to(logits.device)
            shares = top_k * before / before.sum().clamp(min=1)
            loss = self._scale * experts * (weights * (logits.float().softmax(-1) @ shares)).sum()
            return logits, _WithLoss.apply(scores, loss), *others

        return replaying


class _WithLoss(torch.autograd.Function):
    """Returns a tensor whose backward pass adds the gradient of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.one


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
