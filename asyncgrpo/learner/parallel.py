"""How the ranks of a learner divide one step: rows of data, parts of a row, and the experts of a mixture.

Weights other than experts are sharded over all ranks (FSDP). With `learner.parallel.expert`, as many ranks hold the experts of
every layer together, each some of them whole: tokens travel to their experts by an all-to-all, and expert weights stay. If
there are more ranks, the copies of an expert are sharded over them. With `learner.parallel.context`, as many consecutive ranks
run each row of tokens together, a `Row`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncgrpo.config.schema import ParallelConfig
from asyncgrpo.errors import ConfigError

DISPATCH = "ep_dispatch_experts"
"""The style of transformers that sends tokens to the ranks of their experts."""

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts in model configs."""

SKEW = 2
"""Tokens that a rank takes at once for its experts, as a multiple of an equal share."""


class Row:
    """The ranks that run one row of T tokens together; each holds T / `size` consecutive ones.

    Before attention, tokens are exchanged for heads: each rank attends with some heads over the whole row, so every kernel and
    mask works unchanged (DeepSpeed-Ulysses, arXiv:2309.14509). For the head, the N sampled tokens are dealt evenly.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """
        Args:
            group: None: one rank runs its rows alone.
        """
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def own(self, length: int) -> slice:
        """Return this rank's share of `length` items, as `torch.chunk` splits."""
        share = self._share(length)
        return slice(min(self.rank * share, length), min((self.rank + 1) * share, length))

    def by_heads(self, x: Tensor) -> Tensor:
        """Exchange [T / size, H, D] for [T, H / size, D]. Collective."""
        if self._group is None:
            return x
        tokens, heads, width = x.shape
        parts = x.reshape(tokens, self.size, heads // self.size, width).transpose(0, 1).flatten(0, 1)
        return self._exchange(parts)

    def by_tokens(self, x: Tensor) -> Tensor:
        """Exchange [T, H / size, D] for [T / size, H, D]. Collective."""
        if self._group is None:
            return x
        parts = self._exchange(x).unflatten(0, (self.size, -1))
        return parts.transpose(0, 1).flatten(1, 2)

    def shared_by_heads(self, x: Tensor) -> Tensor:
        """Exchange keys or values [T / size, G, D], where G may be too few to divide: each is repeated as often as needed."""
        copies = self.size // gcd(x.shape[1], self.size)
        return self.by_heads(x if copies == 1 else x.repeat_interleave(copies, 1))

    def read(self, hidden: Tensor, read_at: Tensor) -> Tensor:
        """Return this rank's share of the hidden states at N positions of the row. Collective.

        Args:
            hidden: [T / size, D] of this rank's tokens.
            read_at: [N] int64.
        """
        if self._group is None:
            return hidden.index_select(0, read_at)
        owner, mine = read_at // len(hidden), self.own(len(read_at))
        reader = torch.arange(len(read_at), device=read_at.device) // max(1, self._share(len(read_at)))
        sent, received = (owner == self.rank).nonzero().squeeze(-1), owner[mine]
        counts = [x.bincount(minlength=self.size).tolist() for x in (received, reader[sent])]
        parts = hidden.index_select(0, read_at[sent] - self.rank * len(hidden))
        arrived = self._exchange(parts, *counts)
        return torch.empty_like(arrived).index_copy(0, received.argsort(stable=True), arrived)

    def all(self, x: Tensor, length: int) -> Tensor:
        """Return the shares of all ranks, [length], with gradient for this rank's own. Collective."""
        if self._group is None:
            return x
        padded = x.new_zeros(self._share(length))
        padded[: len(x)] = x.detach()
        everyone = x.new_empty(self.size * len(padded))
        dist.all_gather_into_tensor(everyone, padded, group=self._group)
        own = self.own(length)
        return torch.cat([everyone[: own.start], x, everyone[own.stop : length]])

    def _share(self, length: int) -> int:
        return -(-length // self.size)

    def _exchange(self, x: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        assert self._group is not None
        exchanged: Tensor = _AllToAll.apply(x, received, sent, self._group)
        return exchanged


class _AllToAll(torch.autograd.Function):
    """Sends parts of the first dimension to the ranks of a group, and receives theirs, in equal parts without sizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int] | None, sent: list[int] | None, group: Any) -> Tensor:
        ctx.sizes, ctx.group = (received, sent), group
        return _all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent = ctx.sizes
        return _all_to_all(gradients[0], sent, received, ctx.group), None, None, None


def _all_to_all(x: Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup) -> Tensor:
    arrived = x.new_empty((len(x) if received is None else sum(received), *x.shape[1:]))
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=group)
    return arrived


ALONE = Row()


@dataclass(frozen=True)
class Ranks:
    """All ranks of the learner, and this rank's place among them."""

    mesh: DeviceMesh
    """One dimension, all ranks."""
    experts: DeviceMesh | None
    """[copies, expert]: ranks of one line hold all experts together. None: experts are sharded like all other weights."""
    row: Row
    """Those that run a row together with this rank."""

    @classmethod
    def of(cls, device_type: str, world: int, sizes: ParallelConfig) -> "Ranks":
        """Collective. Raises ConfigError: a size does not divide the number of ranks."""
        for name, size in (("context", sizes.context), ("expert", sizes.expert)):
            if world % size:
                raise ConfigError(f"learner.parallel.{name} is {size}, which does not divide learner.ranks ({world})")

        def lines_of(size: int, name: str) -> DeviceMesh:
            return init_device_mesh(device_type, (world // size, size), mesh_dim_names=("copies", name))

        experts = lines_of(sizes.expert, "expert") if sizes.expert > 1 else None
        row = Row(lines_of(sizes.context, "context").get_group("context")) if sizes.context > 1 else Row()
        return cls(init_device_mesh(device_type, (world,)), experts, row)


def refuse_layout(model: PreTrainedModel, path: str, sizes: ParallelConfig, key: str = "model.path") -> None:
    """Raise ConfigError if the model's heads or experts cannot be divided as configured. A teacher needs no experts."""
    settings = model.config.get_text_config()
    if settings.num_attention_heads % sizes.context:
        raise ConfigError(
            f"learner.parallel.context is {sizes.context}, which does not divide the {settings.num_attention_heads} "
            f"attention heads of {key} ({path})"
        )
    if sizes.expert == 1 or (key == "algorithm.teacher" and not has_experts(model)):
        return
    if not has_experts(model):
        raise ConfigError(
            f"learner.parallel.expert is {sizes.expert}, but model.path ({path}) is a {settings.model_type}, which has no "
            "experts that can be distributed"
        )
    experts = next(count for name in EXPERTS if (count := getattr(settings, name, None)))
    if experts % sizes.expert:
        raise ConfigError(
            f"learner.parallel.expert is {sizes.expert}, which does not divide the {experts} experts of {key} ({path})"
        )


def has_experts(model: PreTrainedModel) -> bool:
    """True if the experts of the model can be distributed."""
    return DISPATCH in (model.ep_plan or {}).values()


def distribute_experts(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Assign each rank of a mesh of one dimension its experts of a model on `meta`, before the model is sharded.

    Returns the modules that hold experts; none of a dense teacher.
    """
    if not has_experts(model):
        return []
    # New in transformers 5.19. Other runs do with the least one of pyproject.toml.
    from transformers.distributed.tensor_parallel import apply_expert_parallelism, replace_layer_number_by_wildcard

    plan = model.ep_plan
    apply_expert_parallelism(model, mesh, None, plan)  # type: ignore[arg-type]  # no tensor parallelism
    named = ((replace_layer_number_by_wildcard(name), module) for name, module in model.named_modules())
    experts = [module for name, module in named if plan.get(name) == DISPATCH]
    for module in experts:
        module.forward = _bounded(module.forward, module.num_experts, mesh)
    return experts


def _bounded(forward: Callable[..., Tensor], experts: int, mesh: DeviceMesh) -> Callable[..., Tensor]:
    """Bound the memory that a skewed router takes, without a change of the result.

    If a rank would get more than `SKEW` times an equal share of the tokens, all ranks send theirs in pieces that are no more
    than that together. The backward pass recomputes each piece.

    Args:
        forward: sends tokens [T, D] with their experts and weights, both [T, K]. Collective.
        experts: of each rank.
        mesh: of the ranks that hold the experts of a layer together.
    """
    group, ways = mesh.get_group(), mesh.size()
    if ways <= SKEW:
        return forward

    @torch.compiler.disable
    def bounded(*args: Tensor) -> Tensor:
        _, chosen, _ = args
        received = (chosen.flatten() // experts).bincount(minlength=ways)
        dist.all_reduce(received, group=group)
        if ways * received.max() <= SKEW * received.sum():
            return forward(*args)
        pieces = zip(*(x.tensor_split(-(-ways // SKEW)) for x in args), strict=True)
        return torch.cat([checkpoint(forward, *piece, use_reentrant=False) for piece in pieces])

    return bounded


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split tensors into lists that one call of torch accepts: sharded over the same ranks."""
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(found.values())


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """Return the full tensor. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients together. Collective."""
    whole = [gather(torch.nn.utils.get_total_norm(some)) for some in by_mesh(gradients)]
    return whole[0] if len(whole) == 1 else torch.stack(whole).norm()
