"""The learner's ranks without Ray: this process is the first, the others are its children on this machine."""

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from asyncgrpo.config import Config
from asyncgrpo.errors import AsyncGRPOError, ConfigError, TrainingError
from asyncgrpo.learner.learner import Learner
from asyncgrpo.learner.service import follow
from asyncgrpo.learner.team import Order, Team
from asyncgrpo.weights.group import serve_store, visit_store

PATIENCE = timedelta(minutes=10)
"""For another rank, which loads a model or computes a step; one that died before it joined is noticed only then."""


@contextmanager
def learner_ranks(config: Config, checkpoint: str | None) -> Iterator[tuple[Learner, Team]]:
    """The learner of `config` and its team, as long as the block lasts.

    Args:
        checkpoint: folder that `Learner.save` wrote, to go on from; None: begin with the model's folder.
    Raises:
        ConfigError: the machine has too few GPUs, or the learner cannot be built.
        CheckpointError: the checkpoint cannot be loaded.
        TrainingError: another rank's process ended.
    """
    world = config.learner.ranks
    _device(config, world - 1)  # says it here if there are too few
    store = serve_store("127.0.0.1", PATIENCE.total_seconds())
    spawn = multiprocessing.get_context("spawn")
    others = [
        spawn.Process(target=_follow, args=(config, rank, store.port, checkpoint), daemon=True)
        for rank in range(1, world)
    ]
    for process in others:
        process.start()
    try:
        learner, team = _join(config, 0, store, checkpoint), Team(0, world)
        yield learner, team
        team.tell(Order(what="end"))
        for process in others:
            process.join()
    except RuntimeError as error:  # of a collective whose other side is gone
        codes = {rank: process.exitcode for rank, process in enumerate(others, start=1) if process.exitcode}
        if codes:
            raise TrainingError(f"a rank of the learner ended: {codes} (rank: exit code)") from error
        raise
    finally:
        for process in others:
            process.kill()
        if dist.is_initialized():
            dist.destroy_process_group()


def _follow(config: Config, rank: int, port: int, checkpoint: str | None) -> None:
    """Another rank. It ends with rank 0: by its order, or because their connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    store = visit_store("127.0.0.1", port, PATIENCE.total_seconds())
    with suppress(AsyncGRPOError):  # rank 0 meets the same and says it
        follow(_join(config, rank, store, checkpoint), Team(rank, config.learner.ranks))
        dist.destroy_process_group()


def _join(config: Config, rank: int, store: dist.Store, checkpoint: str | None) -> Learner:
    transformers_logging.disable_progress_bar()
    device = _device(config, rank)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as in a run: the order of a sum depends on it
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=config.learner.ranks, timeout=PATIENCE)
    learner = Learner(config, rank=rank, world=config.learner.ranks, device=device)
    if checkpoint is not None:
        learner.load(checkpoint)
    return learner


def _device(config: Config, rank: int) -> torch.device:
    wish = config.learner.device
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.cuda.device_count() <= rank:
        raise ConfigError(
            f"learner.ranks={config.learner.ranks} with learner.device={wish} needs as many GPUs, and this machine has "
            f"{torch.cuda.device_count()}; learner.device=cpu would give nearly the same numbers, not equal ones"
        )
    return torch.device("cuda", rank)
