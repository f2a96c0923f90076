"""Which GPUs each role gets. Ray counts only GPUs for us: without them every actor may run anywhere."""

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncgrpo.config import Config
from asyncgrpo.errors import ConfigError

RESERVE_TIMEOUT_S = 60.0


def gpus_wanted(config: Config, *, learner_on_gpu: bool) -> int:
    """Of the whole run."""
    return learner_on_gpu * config.learner.ranks + config.generators.gpus_each * config.generators.count


def check_gpus(config: Config, wanted: int, there: int) -> None:
    """Raises ConfigError when there are too few."""
    if there >= wanted:
        return
    hint = "lower one of them" if there else "without a GPU use --n-gpus 0 (generators.gpus_each=0)"
    raise ConfigError(
        f"this run needs {wanted} GPUs (learner.ranks {config.learner.ranks}, generators.count "
        f"{config.generators.count} x generators.gpus_each {config.generators.gpus_each}), the cluster has {there}; {hint}"
    )


class Placement:
    """The places of one run: bundle 0..ranks-1 for the learner, then one bundle a generator."""

    def __init__(self, config: Config, *, learner_on_gpu: bool) -> None:
        """Reserve all GPUs at once. Raises ConfigError when the cluster has too few."""
        self._learner_gpus = 1 if learner_on_gpu else 0
        self._generator_gpus = config.generators.gpus_each
        self._ranks = config.learner.ranks
        self._group: PlacementGroup | None = None
        wanted = gpus_wanted(config, learner_on_gpu=learner_on_gpu)
        if not wanted:
            return
        check_gpus(config, wanted, int(ray.cluster_resources().get("GPU", 0)))
        bundles = [self._bundle(self._learner_gpus)] * self._ranks
        bundles += [self._bundle(self._generator_gpus)] * config.generators.count
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(RESERVE_TIMEOUT_S):
            raise ConfigError(f"no place for {wanted} GPUs within {RESERVE_TIMEOUT_S:.0f} s; other jobs hold them")

    @staticmethod
    def _bundle(gpus: int) -> dict[str, float]:
        return {"CPU": 1.0, "GPU": float(gpus)} if gpus else {"CPU": 1.0}

    def learner(self, rank: int) -> dict[str, Any]:
        """Ray options of a learner rank."""
        return self._options(rank, self._learner_gpus)

    def generator(self, index: int) -> dict[str, Any]:
        """Ray options of a generator."""
        return self._options(self._ranks + index, self._generator_gpus)

    def anywhere(self) -> dict[str, Any]:
        """Ray options of the buffer."""
        return {"num_cpus": 0, "max_restarts": 0}

    def _options(self, bundle: int, gpus: int) -> dict[str, Any]:
        if self._group is None:
            return self.anywhere()
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": strategy}

    def release(self) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
