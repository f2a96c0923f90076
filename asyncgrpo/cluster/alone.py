"""One process of a run without the run: work done where the first generator would be, to be measured."""

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
    """A process that does one piece of work."""

    def __init__(self, environment: dict[str, str]) -> None:
        """
        Args:
            environment: of the driver, as far as its processes share it.
        """
        set_environment(environment)

    def work(self, work: Callable[[Config], Iterator[Found]], config: Config) -> Iterator[Found]:
        if not config.generators.gpus_each:
            os.environ["OMP_NUM_THREADS"] = "1"
        prepare_environment(config)
        yield from work(config)


def in_generator(config: Config, work: Callable[[Config], Iterator[Found]]) -> Iterator[Found]:
    """What `work` finds, one by one, in a process that Ray places and gives GPUs as it does with a run's first generator.

    Raises:
        AsyncGRPOError: the process could not be placed, or what `work` raised.
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
                ray.kill(actor)  # the session may go on
        finally:
            placement.release()
