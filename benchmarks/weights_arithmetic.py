"""How long a publication must take on GPUs: arithmetic from stated rates, not a measurement. Prints the table of docs/weights.md.

    python -m benchmarks.weights_arithmetic

Half of the GPUs learn; with 8 all share a machine, otherwise a machine has 8 that do the same. The stages follow one another:
copy to the host, broadcast, upload. Learner ranks digest what they send beside the broadcast. A generator copies a bucket to the
host and digests it while the next one arrives. A GPU digests a parameter while others are uploaded.
"""

from asyncgrpo.config.memory import PCIE_BYTES_PER_S as PCIE
from asyncgrpo.config.memory import pause_seconds

GB = 1e9
MODELS = {"8B": (8.19e9, 1, (8, 16, 64)), "32B": (32.8e9, 2, (16, 64)), "70B": (70.6e9, 4, (64,))}
"""Parameters, GPUs of one engine, and fleets whose learner GPUs hold 16 bytes for each parameter."""
GPUS_OF_A_MACHINE = 8
NICS = {"8 x 400 Gb/s": (50 * GB, 8), "400 Gb/s": (50 * GB, 1), "25 GbE": (3.125 * GB, 1)}
"""Bytes that a link of a machine carries in a second, and its links."""
CORES, DIGEST = 16, 5 * GB
"""Cores of a process that digests, and the bytes that each digests in a second: half of what an AMD EPYC does, an assumption."""
MEMORY = 200 * GB
"""Bytes that all processes of a machine digest in a second at most, because they share its memory: an assumption."""
FEWER, COMPARE, APPLY = 33.7, 2.5 * GB, 8.5 * GB
"""Ratio of the bytes of all weights to a delta at a learning rate of 1e-6, and the rates of one core."""


def stages(parameters: float, tensor_parallel: int, gpus: int, nic: tuple[float, int]) -> dict[str, float]:
    """Return the seconds of each stage of one publication in bfloat16."""
    size, learners, is_one = 2 * parameters, gpus // 2, gpus <= GPUS_OF_A_MACHINE
    machines, engines = max(1, learners // GPUS_OF_A_MACHINE), GPUS_OF_A_MACHINE // tensor_parallel
    local = {"stall": size / learners / PCIE, "pause": pause_seconds(int(size), tensor_parallel)}
    if is_one:
        return local
    sent, received = (size / min(processes * CORES * DIGEST, MEMORY) for processes in (GPUS_OF_A_MACHINE, engines))
    return local | {"arrival": max(size / nic[0] / nic[1], size / PCIE / GPUS_OF_A_MACHINE, received, sent / machines)}


def delta(parameters: float, tensor_parallel: int, gpus: int, nic: tuple[float, int]) -> float | None:
    """Return the seconds of a publication by deltas; None where they are not used."""
    size, local = 2 * parameters, stages(parameters, tensor_parallel, gpus, nic)
    compare = size / (CORES * COMPARE)
    if not GPUS_OF_A_MACHINE < gpus <= 2 * GPUS_OF_A_MACHINE or compare > size / nic[0] / nic[1]:
        return None
    fixed = local["stall"] + local["pause"]
    return fixed + compare + size / FEWER / nic[0] + size / (CORES * APPLY) + size / (CORES * DIGEST)


def main() -> None:
    columns = [f"{way}, {nic}" for nic in NICS for way in ("all", "delta")]
    print("| " + " | ".join(["model", "GPUs", "learner stall", "engine pause", *columns]) + " |")
    print("|" + "---|" * (4 + len(columns)))
    for name, (parameters, tensor_parallel, fleets) in MODELS.items():
        for gpus in fleets:
            times = {nic: stages(parameters, tensor_parallel, gpus, rate) for nic, rate in NICS.items()}
            cells = [seconds(times["25 GbE"][what]) for what in ("stall", "pause")]
            for nic, rate in NICS.items():
                cells += [seconds(sum(times[nic].values())), seconds(delta(parameters, tensor_parallel, gpus, rate))]
            print(f"| {name} | {gpus} | " + " | ".join(cells) + " |")


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"


if __name__ == "__main__":
    main()
