"""Weights on the card reach another process whole, and NCCL's errors end nothing but its group."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncgrpo.config.schema import WeightsConfig
from asyncgrpo.types import PolicyVersion, TensorInfo
from asyncgrpo.weights.arena import Layout
from asyncgrpo.weights.group import form_group, serve_store
from asyncgrpo.weights.publication import Checksum
from asyncgrpo.weights.publisher import Publisher
from asyncgrpo.weights.receiver import Receiver
from tests.weights.publishing import digest_of, of_nccl, publish

HOST = "127.0.0.1"
SIZES = (1000, 4, 5_000_000)
LAYOUT = [
    TensorInfo(name="embed", shape=(700, 33), dtype="bfloat16"),
    TensorInfo(name="norm", shape=(5,), dtype="float32"),
    TensorInfo(name="head", shape=(33, 700), dtype="bfloat16"),
]


def drawn(number: int, device: torch.device | str) -> torch.Tensor:
    """[SIZES[number]] uint8, the same for every process."""
    numbers = torch.randint(0, 256, (SIZES[number],), generator=torch.Generator().manual_seed(number))
    return numbers.byte().to(device)


@pytest.fixture
def start() -> Iterator[Callable[..., None]]:
    """Starts a function in a process of its own, which ends with the test."""
    processes = []

    def started(work: Callable[..., None], *arguments: Any) -> None:
        process = multiprocessing.get_context("spawn").Process(target=work, args=arguments, daemon=True)
        process.start()
        processes.append(process)

    yield started
    for process in processes:
        process.terminate()
        process.join()


# -- two processes -----------------------------------------------------------------------------------------------------


def generate(endpoint: str) -> None:
    """Receive as a generator whose engine reports a digest of what it was given."""

    def apply(tensors, version: PolicyVersion) -> Checksum:
        held = dict(tensors)
        return Checksum(digest_of(Layout(LAYOUT), ((info, held[info.name]) for info in LAYOUT)))

    receiver = Receiver(endpoint, generator_id="generator-0", incarnation="0", host=HOST, apply=apply, keys=None)
    receiver.start()
    while True:
        time.sleep(1.0)


def test_a_publication_from_the_card(device, start):
    settings = WeightsConfig(bucket_mb=1, timeout_s=60.0)
    publisher = Publisher(settings, maps=True, backend="gloo", bind=HOST, host=HOST, keys=None)
    publisher.start(LAYOUT)
    start(generate, publisher.endpoint)
    publisher.wait_for(lambda: 1, 60.0, lambda what, seconds: None)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tensors = [(i, torch.randn(i.shape, generator=generator).to(getattr(torch, i.dtype))) for i in LAYOUT]
        on_card = [(info, tensor.to(device)) for info, tensor in tensors]
        publication = publish(publisher, PolicyVersion(1, step), on_card)
        assert publication.generators == ("generator-0",) and publication.attempts == 1
        assert publication.checksums == {"generator-0": digest_of(Layout(LAYOUT), iter(tensors))}
    publisher.close()


# -- NCCL --------------------------------------------------------------------------------------------------------------


def test_a_group_of_nccl_alone(card):
    group = form_group(dist.HashStore(), of_nccl(0, 1, 30), HOST)
    assert group.device == card
    flat = drawn(2, card)
    for _ in range(3):
        group.broadcast(flat)
    assert torch.equal(flat.cpu(), drawn(2, "cpu"))
    group.close()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("has_joined", [False, True])
def test_nccl_gives_up_a_member_that_never_comes_or_dies_before_it_connects(card, has_joined):
    """This process goes on, and can form the next group. (torch has its own deadline to connect: conftest.py.)"""
    store = serve_store(HOST, 30)
    if has_joined:
        store.set("weights/1/0/joined/1", "")
    started = time.monotonic()

    def form_and_send() -> None:
        group = form_group(store, of_nccl(0, 2, 5), HOST)
        try:
            group.broadcast(drawn(0, card))
        finally:
            group.close()

    with pytest.raises(RuntimeError):
        form_and_send()
    assert time.monotonic() - started < 60
    test_a_group_of_nccl_alone(card)
