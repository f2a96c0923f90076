"""Host memory and time of loading a model into the shards of several ranks.

python -m benchmarks.loading --ranks 1 4 8
python -m benchmarks.loading --ranks 4 --lora 16 --dtype bfloat16

    rows    every rank reads the rows that it keeps (`learner.loading`)
    whole   every rank loads the whole model with transformers, and keeps its shard: what is left for files that are
            not read by rows

Ranks are processes with a gloo group, and shards stay on the CPU. The model is a Qwen3 of random weights, bfloat16 on
disk. `value` is the sum over ranks of how much the anonymous memory of each (`RssAnon` of /proc: pages of mapped files, which
all ranks share and the kernel takes back at will, do not count) grew at most beyond what it had before the model, as the
parent sees it every few milliseconds. `copies` is that in whole float32 copies of the model.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncgrpo.config.schema import Config
from asyncgrpo.errors import WeightsError
from asyncgrpo.learner import model as learner_model
from benchmarks.measuring import line, rounded, show

SHAPES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "vocab_size": 8192},
    "500m": {"hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 3072, "vocab_size": 151936},
}
WAYS = ("rows", "whole")
EVERY_S = 0.003


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="500m")
    parser.add_argument("--ranks", nargs="+", type=int, default=[4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="model.dtype")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: all weights are trained")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1234)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        with multiprocessing.get_context("fork").Pool(1) as apart:  # ranks inherit no memory that it has freed
            parameters = apart.apply(make_model, (arguments.shape, folder, arguments.seed))
        for way in arguments.ways:
            for ranks in arguments.ranks:
                found = [measure(way, ranks, folder, arguments) for _ in range(arguments.runs)]
                memory = [sum(peaks) / 1e6 for peaks, _ in found]
                sizes = {"way": way, "shape": arguments.shape, "ranks": ranks, "lora": arguments.lora}
                rest = {
                    "dtype": arguments.dtype,
                    "parameters": parameters,
                    "copies": rounded(statistics.median(memory) * 1e6 / (4 * parameters)),
                    "wall_s": rounded(statistics.median(seconds for _, seconds in found)),
                }
                show(line("host memory of loading", memory, "MB", seed=arguments.seed, **sizes, **rest))


def make_model(shape: str, folder: str, seed: int) -> int:
    """Write a random model, in bfloat16. Returns the number of its parameters."""
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape], **heads)).bfloat16()
    model.save_pretrained(folder)
    return model.num_parameters()


def measure(way: str, ranks: int, folder: str, arguments: argparse.Namespace) -> tuple[list[int], float]:
    """The peak of each rank in bytes beyond what it had before, and the time until the last was done, seconds."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as store:
        pipes = [fork.Pipe() for _ in range(ranks)]
        processes = [
            fork.Process(target=one_rank, args=(rank, ranks, way, folder, f"{store}/store", arguments, there))
            for rank, (_, there) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        here = [connection for connection, _ in pipes]
        for connection in here:
            connection.recv()
        before = [anonymous_bytes(process.pid) for process in processes]
        for connection in here:
            connection.send("load")
        started = time.monotonic()
        peaks = watch([process.pid for process in processes], here)
        seconds = time.monotonic() - started
        for connection, process in zip(here, processes, strict=True):
            connection.send("end")
            process.join()
            if process.exitcode:
                raise SystemExit(f"a rank ended with {process.exitcode}")
    return [peak - base for peak, base in zip(peaks, before, strict=True)], seconds


def watch(pids: Sequence[int | None], ranks: Sequence[Connection]) -> list[int]:
    """The most that each process had until all of them said that they are done."""
    peaks, running = [0] * len(pids), set(range(len(pids)))
    while running:
        for number, pid in enumerate(pids):
            peaks[number] = max(peaks[number], anonymous_bytes(pid))
        for number in [number for number in running if ranks[number].poll()]:
            ranks[number].recv()
            running.remove(number)
        time.sleep(EVERY_S)
    return peaks


def one_rank(
    rank: int, ranks: int, way: str, folder: str, store: str, arguments: argparse.Namespace, parent: Connection
) -> None:
    """Load when the parent says so."""
    dist.init_process_group("cpu:gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    settings = {
        "model": {"path": folder, "dtype": arguments.dtype, "lora": {"rank": arguments.lora}},
        "data": {"train": "unused"},
    }
    refuse = mock.patch.object(learner_model, "ShardReader", side_effect=WeightsError("it is asked to"))
    parent.send("ready")
    parent.recv()
    with refuse if way == "whole" else nullcontext():
        model = learner_model.build_model(
            folder, getattr(torch, arguments.dtype), torch.device("cpu"), mesh, msgspec.convert(settings, Config)
        )
    dist.barrier()
    parent.send("done")
    parent.recv()
    del model
    dist.destroy_process_group()


def anonymous_bytes(pid: int | None) -> int:
    """Memory that a process holds and that belongs to no file."""
    with suppress(OSError):
        for row in Path(f"/proc/{pid}/status").read_text().splitlines():
            if row.startswith("RssAnon"):
                return int(row.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
