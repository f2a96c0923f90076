"""How the learner's first rank tells the others what to do: bytes over the ranks' own process group, in lockstep.

Every order is a collective that all ranks enter, so rank 0 must give one for whatever the others have to join in.
Frames are those of the wire, so no rank unpickles anything.
"""

from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from asyncgrpo.types import WeightVersion


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks do next."""

    what: Literal["step", "gather_weights", "save", "export", "end"]
    version: WeightVersion | None = None
    folder: str = ""
    header: bytes = b""
    """`step`: the encoded Batch."""
    payload: bytes = b""


class Team:
    """The ranks of one learner. With one rank nothing is sent."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def tell(self, order: Order) -> None:
        """Rank 0: give an order."""
        if self.world == 1:
            return
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(order)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), src=0)
        dist.broadcast(data, src=0)

    def hear(self) -> Order:
        """Other ranks: the next order; waits as long as rank 0 waits."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0)
        data = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0)
        return msgspec.msgpack.decode(data.numpy().tobytes(), type=Order)
