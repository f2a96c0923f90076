"""What a delta of a publication saves, and what it and the digest cost. One JSON line for each figure.

    python -m benchmarks.weights_delta speed --mb 512             digest, encode and apply on one core, beside a memcpy
    python -m benchmarks.weights_delta threads --threads 2         what several threads do, beside one, in seconds
    python -m benchmarks.weights_delta demo --lr 5e-3 --dtype float32      the demo, in one process
    python -m benchmarks.weights_delta model --model s100m --lr 1e-6       a random model, random rollouts

The weights of `demo` and `model` are those that a real learner publishes after real AdamW steps on float32 masters. The
delta of each publication is applied to the one before it and must make the same digest.
"""

import argparse
import asyncio
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from asyncgrpo.engines.torch.engine import weights_digest
from asyncgrpo.learner.learner import Learner
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights import threads as sharing
from asyncgrpo.weights.arena import Layout, dtype_of, size_bytes
from asyncgrpo.weights.boxes import box_digest
from asyncgrpo.weights.delta import Delta, Span, State, apply, encode
from asyncgrpo.weights.digest import add_digests, digest, digest_pieces
from asyncgrpo.weights.threads import spread
from benchmarks.cells import MODELS, SEED, make_model
from benchmarks.measuring import line, show

SHARES = (0.0, 0.0001, 0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Of bfloat16 elements that change."""
APART = (1, 2, 4)
"""Steps between the publications that are compared."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "threads", "demo", "model"])
    parser.add_argument("--mb", type=int, default=512, help="of speed and threads: MiB of weights")
    parser.add_argument("--rounds", type=int, default=7, help="of speed and threads")
    parser.add_argument("--threads", type=int, default=2, help="of threads")
    parser.add_argument("--model", choices=list(MODELS), default="s100m", help="of model")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of what is published")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1024, help="of model: in each step")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.what == "speed":
        speed(arguments.mb * 2**20, arguments.rounds)
        return
    if arguments.what == "threads":
        by_threads(arguments.mb * 2**20, arguments.rounds, arguments.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        steps = {"demo": demo_steps, "model": model_steps}[arguments.what](arguments, Path(folder))
        asyncio.run(measure_density(arguments, steps))


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(size: int, rounds: int) -> None:
    """GB of weights per CPU second, and the share of a memcpy of the same bytes in the same round."""
    random = np.random.default_rng(SEED)
    new = torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8))
    copy, spans = torch.empty_like(new), [Span(0, size, 2, 0)]
    beside(size, rounds, "digest", lambda: digest(new), lambda: copy.copy_(new))
    named = [("weights", new)]
    beside(size, rounds, "checksum of the torch engine", lambda: weights_digest(named), lambda: copy.copy_(new))
    before, after = (State(PolicyVersion(1, number), f"{number:016x}") for number in range(2))
    for share in SHARES:
        base = new.clone()
        base.view(torch.int16)[torch.from_numpy(random.random(size // 2) < share)] ^= 1
        delta = Delta.from_bytes(Delta(before, after, size, encode(new, base, spans)).to_bytes())
        target = base.clone()
        saved = {"share": share, "times_fewer_bytes": size / delta.packed_bytes}
        for what, work in (
            ("encode", lambda base=base: encode(new, base, spans)),
            ("apply", lambda delta=delta, target=target: apply(delta, target, before)),
        ):
            beside(size, rounds, what, work, lambda: copy.copy_(new), **saved)
        assert torch.equal(target, new)


def beside(
    size: int, rounds: int, what: str, work: Callable[[], object], copy: Callable[[], object], **fields: float
) -> None:
    """Run `work` and a copy in turn."""
    seconds: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        started = time.process_time()
        work()
        middle = time.process_time()
        copy()
        seconds.append((max(middle - started, 1e-9), max(time.process_time() - middle, 1e-9)))
    rates = [size / ours / 1e9 for ours, _ in seconds[1:]]
    show(line(what, rates, "GB per CPU s", seed=SEED, of_a_memcpy=_median([c / o for o, c in seconds[1:]]), **fields))


def by_threads(size: int, rounds: int, count: int) -> None:
    """How many times as fast as one thread several are, in turns, where the machine has as many cores free."""
    random = np.random.default_rng(SEED)
    new = torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8))
    base, copy = new.clone(), torch.empty_like(new)
    base.view(torch.int16)[torch.from_numpy(random.random(size // 2) < 0.015)] ^= 1
    spans, before = [Span(0, size, 2, 0)], State(PolicyVersion(1, 0), "0" * 16)
    delta = Delta(before, State(PolicyVersion(1, 1), "1" * 16), size, encode(new, base, spans))
    pieces = [slice(start, start + size // 16) for start in range(0, size, size // 16)]
    matrix = new.view(torch.int16).view(-1, 512)
    rows = [slice(piece.start // 1024, piece.stop // 1024) for piece in pieces]
    kinds: dict[str, Callable[[], object]] = {
        "copy": lambda: list(spread(lambda at: np.copyto(copy[at].numpy(), new[at].numpy()), pieces)),
        "digest": lambda: digest_pieces(new, ((at.start, at.stop) for at in pieces)),
        "compare": lambda: encode(new, base, spans),
        "apply": lambda: apply(delta, base, before),
        "boxes": lambda: list(spread(lambda at: box_digest(matrix[at], "w", (1, 512), (0, 0)), rows)),
    }
    for what, work in kinds.items():
        seconds = [(timed(work, 1), timed(work, count)) for _ in range(rounds + 1)]
        times = [one / several for one, several in seconds[1:]]
        show(line(f"{what} by threads", times, "times as fast as one", seed=SEED, threads=count, mb=size // 2**20))


def timed(work: Callable[[], object], threads: int) -> float:
    """Seconds of `work` by so many threads."""
    with mock.patch.object(sharing, "num_threads", lambda: threads):
        started = time.perf_counter()
        work()
        return time.perf_counter() - started


# -- density -----------------------------------------------------------------------------------------------------------


class Publications:
    """The last publications of a learner, each as one flat run of bytes."""

    def __init__(self, tensors: list[TensorInfo]) -> None:
        self.layout = Layout(tensors)
        places = zip(self.layout.tensors, self.layout.offsets, strict=True)
        self.spans = [Span(start, size_bytes(info), dtype_of(info).itemsize, start) for info, start in places]
        self.elements = sum(span.num_bytes // span.itemsize for span in self.spans)
        self.num_bytes = self.layout.num_bytes
        self.kept: deque[Tensor] = deque(maxlen=max(APART) + 1)

    def add(self, learner: Learner) -> None:
        flat = torch.zeros(self.num_bytes, dtype=torch.uint8)
        for (info, view), (given, tensor) in zip(self.layout.views(flat), learner.weights(), strict=True):
            assert info == given
            view.copy_(tensor)
        self.kept.append(flat)

    def compare(self, steps: int) -> tuple[float, int]:
        """The share of elements that differ between the last and the one `steps` before it, and bytes of the delta."""
        new, base = self.kept[-1], self.kept[-1 - steps]
        before, after = (State(PolicyVersion(1, n), add_digests([digest(f)])) for n, f in enumerate((base, new)))
        delta = Delta.from_bytes(Delta(before, after, self.num_bytes, encode(new, base, self.spans)).to_bytes())
        target = base.clone()
        apply(delta, target, before)
        assert add_digests([digest(target)]) == after.digest
        return sum(self._differing(new, base)) / self.elements, delta.packed_bytes

    def _differing(self, new: Tensor, base: Tensor) -> list[int]:
        numbers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        found = []
        for span in self.spans:
            ours, theirs = (flat[span.start :][: span.num_bytes].view(numbers[span.itemsize]) for flat in (new, base))
            found.append(int((ours != theirs).sum()))
        return found


async def measure_density(arguments: argparse.Namespace, steps: AsyncIterator[Learner]) -> None:
    """One line for each number of steps between two publications."""
    published: Publications | None = None
    found: dict[int, list[tuple[float, int]]] = {apart: [] for apart in APART}
    number = 0
    async for learner in steps:
        published = published or Publications(learner.layout())
        published.add(learner)
        for apart in APART:
            if number > apart:  # AdamW's first step has the length of its rate everywhere
                found[apart].append(published.compare(apart))
        number += 1
    assert published is not None
    about = {"lr": arguments.lr, "dtype": arguments.dtype, "parameters": published.elements}
    about["model"] = arguments.model if arguments.what == "model" else "demo"
    for apart, measured in found.items():
        if measured:
            sent = _median([size for _, size in measured])
            fewer = {"delta_bytes": sent, "times_fewer_bytes": published.num_bytes / sent, "steps_apart": apart}
            shares = [share for share, _ in measured]
            show(line("share of elements that changed", shares, "", seed=SEED, **fewer, **about))


async def demo_steps(arguments: argparse.Namespace, folder: Path) -> AsyncIterator[Learner]:
    """The learner after each step of the demo, whose engine, task and rewards are here in this process."""
    from asyncgrpo.config.load import load_config
    from asyncgrpo.data.demo import make_demo_model, write_demo_task
    from benchmarks.one_process import train

    make_demo_model(folder / "model", seed=SEED)
    write_demo_task(folder / "train.jsonl", folder / "eval.jsonl", seed=SEED)
    settings = [f"model.path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}", "data.eval=null"]
    settings += [f"learner.lr={arguments.lr}", f"model.dtype={arguments.dtype}", f"run.steps={arguments.steps}"]
    settings += ["generators.engine=torch", f"run.out={folder / 'run'}"]
    async for step in train(load_config("quickstart", settings)):
        yield step.learner


async def model_steps(arguments: argparse.Namespace, folder: Path) -> AsyncIterator[Learner]:
    """The learner after each step on other random groups, half of whose completions are right."""
    import msgspec

    from asyncgrpo.config.schema import Config
    from benchmarks.rollouts import make_groups, reasoning_lengths

    settings = {
        "model": {"path": str(make_model(folder, arguments.model)), "dtype": arguments.dtype},
        "data": {"train": "unused"},
        "learner": {"device": "cpu", "lr": arguments.lr},
    }
    learner = Learner(msgspec.convert(settings, Config), rank=0, world=1, device="cpu")
    for number in range(arguments.steps):
        lengths = reasoning_lengths(seed=number, prompt=(16, 32), median=48, longest=256, tokens=arguments.tokens)
        groups = make_groups(lengths, vocabulary=MODELS[arguments.model]["vocab"], seed=number)
        learner.step(groups, PolicyVersion(1, number))
        yield learner


def _median(values: list[float] | list[int]) -> float:
    return float(np.median(values))


if __name__ == "__main__":
    main()
