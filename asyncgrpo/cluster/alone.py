"""Runs work in one process, placed as the first generator of a run would be, so that the work can be measured."""

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import ray

from asyncgrpo.cluster.nodes import environment_to_share, set_environment, with_absolute_paths
from asyncgrpo.cluster.ray_session import Placement, decide_device, ray_session_of, result
from asyncgrpo.cluster.wiring import prepare_environment, uses_cuda
from asyncgrpo.config.schema import Config

Found = TypeVar("Found")


class _Alone:
    """Actor that does one piece of work."""

    def __init__(self, environment: dict[str, str]) -> None:
        """
        Args:
            environment: variables that the processes share with the driver.
        """
        set_environment(environment)

    def work(self, work: Callable[[Config], Iterator[Found]], config: Config) -> Iterator[Found]:
        if not config.generators.gpus_each:
            os.environ["OMP_NUM_THREADS"] = "1"
        prepare_environment(config)
        yield from work(config)


def in_generator(config: Config, work: Callable[[Config], Iterator[Found]]) -> Iterator[Found]:
    """Yield the results of `work`, run in a process with the placement and GPUs of a run's first generator.

    Raises:
        AsyncGRPOError: the process could not be placed, or `work` raised it.
    """
    config = with_absolute_paths(config)
    with ray_session_of(config):
        config = decide_device(config)
        placement = Placement(config, learner_on_gpu=uses_cuda(config))
        try:
            actor = ray.remote(_Alone).options(**placement.generator(0)).remote(environment_to_share())
            try:
                for reference in actor.work.options(num_returns="streaming").remote(work, config):
                    yield result(reference, "generator-0")
            finally:
                ray.kill(actor)  # the session may outlive it
        finally:
            placement.release()
