"""How weights get from a learner to an engine on one card: each copy of the way, the two groups, and NCCL's errors.

    python -m benchmarks.gpu_weights copies          GB/s of each leg, of legs between two processes, and of the digests
    python -m benchmarks.gpu_weights shared-memory   a whole publication to another process, which maps the learner's memory
    python -m benchmarks.gpu_weights nccl            `NcclGroup`: alone; a member that never comes; two members on one card

Each case of `nccl` is a process of its own with a deadline, because what it must show is whether NCCL ends, and how.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.engines.sglang.copies import Copies
from asyncgrpo.engines.sglang.proof import PLAN, Held, question
from asyncgrpo.scratch import SHARED_MEMORY
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import Arenas, Layout
from asyncgrpo.weights.digest import tensor_digest
from asyncgrpo.weights.group import WeightGroup, form_group, serve_store, visit_store
from asyncgrpo.weights.publication import Checksum
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
from benchmarks.measuring import ROOT, device_parser, line, rounded, show
from tests.weights.publishing import of_nccl, publish

HOST = "127.0.0.1"
SEED = 1234
START_S = 60.0
"""How long a process may take to be there."""
NEVER_S = 5.0
"""The deadline of a group whose second member never comes."""
CASE_S = 60.0
"""What is not over then hangs: the other end gave up long before."""


def main(argv: list[str] | None = None) -> None:
    parser = device_parser(__doc__)
    parser.add_argument("what", choices=["copies", "shared-memory", "nccl"])
    parser.add_argument("--case", choices=list(CASES), help="of nccl: this one, in this process")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.case:
        CASES[arguments.case](arguments)
    elif arguments.what == "copies":
        copies(arguments.device, 2**16 if arguments.tiny else 2**29)
    elif arguments.what == "shared-memory":
        show(publication(arguments.device, 2**21 if arguments.tiny else 2**31))
    else:
        nccl(arguments.device)


# -- copies ------------------------------------------------------------------------------------------------------------


def copies(device: str, size: int) -> None:
    """GB/s of each leg between the card and the memory of two processes, `size` bytes each, and of the digests."""
    on_card = random_bytes(size, device)
    pageable = torch.empty(size, dtype=torch.uint8)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
    pageable.copy_(on_card)
    pinned.copy_(on_card)
    with file_in_memory(size) as shared:
        legs: dict[str, tuple[Tensor, Tensor]] = {
            "card to pinned": (pinned, on_card),
            "card to /dev/shm": (shared, on_card),
            "/dev/shm to card": (on_card, shared),
            "pageable to card": (on_card, pageable),
            "pinned to card": (on_card, pinned),
        }
        for name, (target, source) in legs.items():
            show_rate(name, size, device, lambda target=target, source=source: target.copy_(source))
        if device == "cuda" and register(shared):
            show_rate("card to /dev/shm, registered", size, device, lambda: shared.copy_(on_card))
            show_rate("/dev/shm, registered, to card", size, device, lambda: on_card.copy_(shared))
            columns(device, on_card, shared)
            torch.cuda.cudart().cudaHostUnregister(shared.data_ptr())
        elif device == "cpu":
            columns(device, on_card, shared)
    matrix = on_card.view(torch.bfloat16).view(-1, 4096)
    where = "card" if device == "cuda" else "CPU"
    show_rate(f"box digest on the {where}", size, device, lambda: tensor_digest(matrix, "w"))
    few = pageable[: size // 8].view(torch.bfloat16).view(-1, 4096)
    show_rate("box digest on the host", few.nbytes, device, lambda: tensor_digest(few, "w"))
    from_pages_of_another_process(device, on_card)
    swap(device, size)


def swap(device: str, size: int) -> None:
    """GB/s of the pause of an engine: layers uploaded out of registered pages, each digested beside the upload of the next."""
    layers = {f"layer{n}": torch.empty(size // 2**16, 2048, dtype=torch.bfloat16, device=device) for n in range(16)}
    layout = Layout([TensorInfo(name=n, shape=tuple(each.shape), dtype="bfloat16") for n, each in layers.items()])
    model, held, arenas = torch.nn.Module(), Held(), Arenas.create(layout)
    for name, layer in layers.items():
        model.register_parameter(name, torch.nn.Parameter(layer, requires_grad=False))
    model.load_weights = lambda given: [layers[name].copy_(tensor) for name, tensor in given]
    held.plan(model, question(list(layers.items())).removeprefix(PLAN))
    copies = Copies(held.parts, held.published)
    if device == "cuda":
        arenas.pin()

    def work() -> None:
        for name in copies.write(layers, arenas, 0):
            held.follow(name, layers[name])

    show_rate("a swap, digested meanwhile", layout.num_bytes, device, work)


def columns(device: str, on_card: Tensor, shared: Tensor) -> None:
    """GB/s of half of a matrix's columns: as torch copies them, and by way of the whole matrix, as an engine of several GPUs."""
    matrix, target = shared.view(-1, 8192), on_card[: len(on_card) // 2].view(-1, 4096)
    show_rate("half of the columns, registered, to card", target.nbytes, device, lambda: target.copy_(matrix[:, :4096]))
    whole = "half of the columns, by way of the whole, to card"
    show_rate(whole, target.nbytes, device, lambda: target.copy_(matrix.to(device)[:, :4096]))


def from_pages_of_another_process(device: str, on_card: Tensor) -> None:
    """GB/s out of pages of /dev/shm that are pinned, but not by this process: are they uploaded as if they were?"""
    with file_in_memory(len(on_card)) as shared, other_process(hold_pages, shared_file(), len(on_card), device) as said:
        what = f"/dev/shm, {'registered' if said.get(timeout=START_S) else 'mapped'} by another process, to card"
        show_rate(what, len(on_card), device, lambda: on_card.copy_(shared))


def hold_pages(said: Any, over: Any, file: str, size: int, device: str) -> None:
    """Register a file in memory, until `over` is set."""
    shared = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
    said.put(device == "cuda" and register(shared))
    over.wait()


@contextmanager
def other_process(work: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """The queue into which `work` puts what it has, in a process that ends with the block."""
    context = torch.multiprocessing.get_context("spawn")
    said, over = context.Queue(), context.Event()
    process = context.Process(target=work, args=(said, over, *arguments), daemon=True)
    process.start()
    try:
        yield said
    finally:
        over.set()
        process.join(10)
        process.kill()


def show_rate(what: str, size: int, device: str, work: Callable[[], object], **about: Any) -> None:
    """Show the GB/s at which `work` gets through `size` bytes, median of 5 after one that is not counted."""
    rates = []
    for _ in range(6):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(size / (time.perf_counter() - started) / 1e9)
    show(line(what, rates[1:], "GB/s", seed=SEED, bytes=size, **about))


def register(shared: Tensor) -> bool:
    """Let CUDA pin memory that is mapped from a file; whether it did."""
    return int(torch.cuda.cudart().cudaHostRegister(shared.data_ptr(), len(shared), 0)) == 0


@contextmanager
def file_in_memory(size: int) -> Iterator[Tensor]:
    """[size] uint8 in /dev/shm, all of it there, as the arenas are."""
    file = shared_file()
    with open(file, "wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, size)
    try:
        yield torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
    finally:
        os.unlink(file)


def shared_file() -> str:
    """Path of this process's file in memory."""
    return str(SHARED_MEMORY / f"gpu-weights-{os.getpid()}")


def random_bytes(size: int, device: str) -> Tensor:
    """[size] uint8, the same for every process."""
    return torch.randint(0, 256, (size,), generator=torch.Generator(device).manual_seed(SEED), device=device).byte()


# -- a publication to another process ----------------------------------------------------------------------------------


def publication(device: str, total: int) -> dict[str, Any]:
    """The line of publications of `total` bytes from this process's Publisher to a Receiver in another."""
    count = max(2, total // 2**25)
    layout = [TensorInfo(name=f"w{i}", shape=(total // count // 2,), dtype="bfloat16") for i in range(count)]
    tensor = random_bytes(total // count, device).view(torch.int16).to(torch.bfloat16)
    publisher = Publisher(WeightsConfig(timeout_s=60), maps=True, backend="gloo", bind=HOST, host=HOST, keys=None)
    publisher.start(layout)
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(publisher.endpoint,), daemon=True)
    process.start()
    try:
        publisher.wait_for(lambda: 1, START_S, lambda what, seconds: None)
        found = [publish(publisher, PolicyVersion(1, n), ((info, tensor) for info in layout)) for n in range(4)]
    finally:
        process.terminate()
        process.join()
        publisher.close()
    rates = [one.num_bytes / one.seconds / 1e9 for one in found]
    about = {"bytes": found[0].num_bytes, "first_s": rounded(found[0].seconds)}
    return line("publication in shared memory", rates[1:], "GB/s", seed=SEED, **about)


def receive(endpoint: str) -> None:
    """Receive as a generator whose engine takes weights at no cost, until the process is ended."""
    taken = Checksum("applied")
    Receiver(
        endpoint, generator_id="generator-0", incarnation="0", host=HOST, apply=lambda *_: taken, keys=None
    ).start()
    while True:
        time.sleep(1.0)


# -- NCCL --------------------------------------------------------------------------------------------------------------


def nccl(device: str) -> None:
    """Run each case in processes of its own, and show what it said, or that it hung."""
    if device == "cpu":
        raise SystemExit("skipped: NCCL does not run without a card")
    for case in CASES:
        store = serve_store(HOST, CASE_S)
        ranks = range(2 if case == "two members on one card" else 1)
        command = [sys.executable, "-m", "benchmarks.gpu_weights", "nccl", "--case", case, "--port", str(store.port)]
        started = time.monotonic()
        members = [_member([*command, "--rank", str(rank)]) for rank in ranks]
        said = [_words(member, CASE_S) for member in members]
        seconds = rounded(time.monotonic() - started)
        show({"what": "nccl", "case": case, "seconds": seconds, "said": said})


def _member(command: list[str]) -> subprocess.Popen[str]:
    """A process with NCCL's settings of a run, whose warnings are shown."""
    settings = os.environ | {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "WARN", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "20"}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=settings, start_new_session=True, **both)


def _words(member: subprocess.Popen[str], within_s: float) -> Any:
    """What a member showed, or its last words; and that it hung, if it did."""
    try:
        text, _ = member.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        os.killpg(member.pid, signal.SIGKILL)
        text = member.communicate()[0]
        return f"HANGS, killed after {within_s:.0f} s: {' | '.join(text.strip().splitlines()[-3:])[:600]}"
    shown = [json.loads(row) for row in text.splitlines() if row.startswith("{")]
    last = " | ".join(text.strip().splitlines()[-3:])[:600]
    return shown[0] if shown else f"exit status {member.returncode}: {last}"


def alone(arguments: argparse.Namespace) -> None:
    """A group of one: does the communicator that does not block come up, and does a broadcast end?"""
    started = time.monotonic()
    group = form_group(dist.HashStore(), of_nccl(0, 1, 30), HOST)
    formed = time.monotonic() - started
    flat, rates = random_bytes(2**26, "cuda"), []
    before = flat.clone()
    for _ in range(10):
        begun = time.monotonic()
        group.broadcast(flat)
        rates.append(time.monotonic() - begun)
    figures = {"formed_s": rounded(formed), "broadcast_ms": rounded(1000 * statistics.median(rates))}
    figures |= beside_a_busy_stream(group, flat)
    group.close()
    print(json.dumps(figures | {"same": torch.equal(flat, before)}), flush=True)


def beside_a_busy_stream(group: WeightGroup, flat: Tensor) -> dict[str, float]:
    """Milliseconds of a broadcast that begins while the default stream computes, and how long that goes on computing."""
    factor = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    begun = time.monotonic()
    for _ in range(500):
        torch.mm(factor, factor)
    with group.beside():
        group.broadcast(flat)
    broadcast = time.monotonic() - begun
    torch.cuda.synchronize()
    return {"broadcast_beside_ms": rounded(1000 * broadcast), "busy_ms": rounded(1000 * (time.monotonic() - begun))}


def without_the_second(arguments: argparse.Namespace) -> None:
    """A group of two whose second member never comes: does this process get an error at the deadline?"""
    _report(lambda: _form(arguments.port, 0, NEVER_S))


def with_a_dead_second(arguments: argparse.Namespace) -> None:
    """A group of two whose second member has joined and does not connect: does torch give NCCL up at the deadline?"""
    store = visit_store(HOST, arguments.port, NEVER_S)
    store.set("weights/1/0/joined/1", "")
    _report(lambda: _form(arguments.port, 0, NEVER_S))


def two_members(arguments: argparse.Namespace) -> None:
    """Two members on one card, which NCCL refuses: what does it say, and when?"""
    _report(lambda: _form(arguments.port, arguments.rank, 20.0))


def _form(port: int, rank: int, timeout_s: float) -> None:
    torch.cuda.init()
    group = form_group(visit_store(HOST, port, timeout_s), of_nccl(rank, 2, timeout_s), HOST)
    try:
        group.broadcast(torch.zeros(2**20, dtype=torch.uint8, device="cuda"))
    finally:
        group.close()


def _report(work: Callable[[], None]) -> None:
    """Print how `work` ended, and that this process goes on after it."""
    started = time.monotonic()
    try:
        work()
        error = "no error"
    except Exception as raised:
        error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:400]}"
    seconds = rounded(time.monotonic() - started)
    time.sleep(2.0)  # a watchdog that ends the process would do it now
    goes_on = bool(torch.ones(1, device="cuda").item())
    print(json.dumps({"error": error, "seconds": seconds, "goes_on": goes_on}), flush=True)


CASES: dict[str, Callable[[argparse.Namespace], None]] = {
    "alone": alone,
    "the second member never comes": without_the_second,
    "the second member dies before it connects": with_a_dead_second,
    "two members on one card": two_members,
}


if __name__ == "__main__":
    main()
