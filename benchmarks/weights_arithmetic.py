"""How long a publication must take on GPUs: arithmetic from stated bandwidths, not a measurement. Two Markdown tables.

    python -m benchmarks.weights_arithmetic

Half of the GPUs learn and half generate; with 8 they share a machine, else machines have 8. A learner keeps 16 bytes for
each parameter, so small fleets cannot train large models. Rates of a core are those that `weights_delta speed` measures. Rank 0
digests and compares all weights, and each generator on another machine digests all. On the learner's machine engines load beside
the digest. Cores share the work as if no thread waited for another. Learner ranks on other machines than rank 0 send whole rows,
or deltas where deltas are sent, and have one core each for that.
"""

from math import ceil
from typing import NamedTuple

GB = 1e9
MODELS = {"8B": (8.19e9, 1), "32B": (32.8e9, 2), "70B": (70.6e9, 4)}
"""Parameters, and GPUs of one engine."""
FLEETS = (8, 16, 32, 64)
GPUS_OF_A_MACHINE = 8
USABLE = 72 * GB
"""Of a card of 80 GB, for weights, gradients and moments."""

PCIE = 50 * GB
"""Between a GPU and pinned memory."""
NIC = 50 * GB
"""400 Gb/s, one for each machine."""
ETHERNET = 3.125 * GB
"""25 GbE, one for each machine."""
TCP = 12.5 * GB
"""What the connections of the ranks of other machines bring to rank 0 together, over a quicker NIC than that."""
COPY, DIGEST, ENCODE, APPLY = 12 * GB, 13.7 * GB, 2.1 * GB, 15 * GB
"""Bytes of weights that a core copies, digests, compares and updates in a second, the last two at `SHARE`."""
SHARE, FEWER = 0.015, 33.7
"""Elements that change in a step of 1e-6, and how much smaller the delta is than the weights: a model of 100M."""


class Fleet(NamedTuple):
    """A model on some GPUs."""

    gpus: int
    size: float
    """Bytes of the bfloat16 weights."""
    tensor_parallel: int

    @property
    def learners(self) -> int:
        return self.gpus // 2

    @property
    def fits(self) -> bool:
        return 8 * self.size / self.learners <= USABLE

    @property
    def is_one_machine(self) -> bool:
        """Engines load out of the learner's memory, and get no deltas."""
        return self.gpus <= GPUS_OF_A_MACHINE

    @property
    def shard(self) -> float:
        return self.size / self.learners

    @property
    def stall(self) -> float:
        """The learner's: its ranks copy their shards into pinned memory."""
        return self.shard / PCIE

    @property
    def pause(self) -> float:
        """An engine's: each of its GPUs copies its slice out of pinned memory."""
        return self.size / self.tensor_parallel / PCIE

    @property
    def away(self) -> float:
        """Bytes of the rows of ranks on other machines."""
        return self.size * (1 - 1 / ceil(self.learners / GPUS_OF_A_MACHINE))

    def collect(self, cores: int, wire: float, *, changes: bool) -> float:
        """These rows come to rank 0, whole or as what has changed: compared, sent, copied, applied."""
        if not self.away:
            return 0.0
        digests = self.shard / DIGEST + self.away / (cores * DIGEST)
        if not changes:
            return digests + self.away / min(wire, TCP)
        work = self.shard / ENCODE + self.away / (cores * COPY) + self.away / (cores * APPLY)
        return digests + self.away / FEWER / min(wire, TCP) + work

    def digests(self, cores: int) -> float:
        """Of the learner, and of a generator on another machine."""
        return 0.0 if self.is_one_machine else 2 * self.size / (cores * DIGEST)

    def dense(self, cores: int, wire: float) -> float:
        """Publish to serving. `cores` work for rank 0 and for each generator; every machine receives over one `wire`."""
        arrival = 0.0 if self.is_one_machine else self.size / wire
        return self.stall + self.collect(cores, wire, changes=False) + arrival + self.digests(cores) + self.pause

    def delta(self, cores: int, wire: float) -> float:
        """The same for a delta."""
        if self.is_one_machine:
            return self.dense(cores, wire)
        arrival = self.size / FEWER / wire
        work = self.size / (cores * ENCODE) + self.size / (cores * APPLY)
        return self.stall + self.collect(cores, wire, changes=True) + arrival + work + self.digests(cores) + self.pause


def main() -> None:
    fleets = [
        (name, Fleet(gpus, 2 * parameters, tensor_parallel))
        for name, (parameters, tensor_parallel) in MODELS.items()
        for gpus in FLEETS
    ]
    print(
        f"Bytes that arrive at each machine with generators (a delta at {SHARE:.1%} changed elements), and how long:\n"
    )
    row("model", "dense", "one NIC of 400 Gb/s", "25 GbE", "delta", "one NIC of 400 Gb/s", "25 GbE")
    row(*["---"] * 7)
    for name, (parameters, _) in MODELS.items():
        size = 2 * parameters
        cells = [
            (f"{part / GB:.2f} GB", seconds(part / NIC), seconds(part / ETHERNET)) for part in (size, size / FEWER)
        ]
        row(name, *cells[0], *cells[1])
    print("\nA publication, seconds; 1 core and 8 cores for rank 0 and each generator:\n")
    row(
        "model",
        "GPUs",
        "learner stall",
        "engine pause",
        *(f"{lane}, {n}" for lane in ("dense", "delta") for n in COLUMNS),
    )
    row(*["---"] * (4 + 2 * len(COLUMNS)))
    for name, fleet in fleets:
        if not fleet.fits:
            row(name, str(fleet.gpus), *["does not fit"] * 2, *["-"] * (2 * len(COLUMNS)))
            continue
        ways = [way(*given) for way in (fleet.dense, fleet.delta) for given in COLUMNS.values()]
        row(name, str(fleet.gpus), *map(seconds, (fleet.stall, fleet.pause, *ways)))


COLUMNS = {"1 core": (1, NIC), "8 cores": (8, NIC), "8 cores, 25 GbE": (8, ETHERNET)}


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


def seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


if __name__ == "__main__":
    main()
