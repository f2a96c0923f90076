"""What SGLang makes of our arguments on a GPU, as far as it goes without one: its own resolution, and no engine.

It finds an argument that was renamed, a default that changed, and two arguments that do not go together. Which kernels
SGLang then chooses depends on the card, so of these only what routes are recorded by is checked.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from asyncgrpo.engines.build import build_engine
from asyncgrpo.engines.sglang.engine import SGLangEngine, SGLangOptions
from asyncgrpo.errors import EngineError
from asyncgrpo.types import PolicyVersion
from asyncgrpo.weights.publication import NUM_SEQUENCES
from tests.learner.helpers import config
from tests.models import make_tiny_qwen3, make_tiny_qwen3_moe

pytest.importorskip("sglang")
pytestmark = pytest.mark.slow

GIB = 1024  # in MiB, as SGLang counts
Resolved = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("mixture"))


@pytest.fixture
def resolved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolved]:
    """What SGLang would run with: the arguments of an engine on a GPU of some size, resolved by SGLang itself."""
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.server_args import ServerArgs

    from asyncgrpo.engines.sglang import processes

    def resolve(*, gpu_gib: int, model: Path = folder, **arguments: Any) -> dict[str, Any]:
        monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda device: gpu_gib * GIB)
        given: dict[str, Any] = {}

        def launch(**own: Any) -> None:
            given.update(own)
            raise EngineError("far enough")

        monkeypatch.setattr(processes, "launch", launch)
        engine = SGLangEngine(
            SGLangOptions(model_path=str(model), dtype=torch.bfloat16, max_context=1000, device="cuda", **arguments)
        )
        with pytest.raises(EngineError, match="far enough"):
            asyncio.run(engine.start(PolicyVersion(1, 7)))
        server = ServerArgs(**given)
        server.resolve_once()
        return server.resolved_dict()

    with patch.dict(os.environ):  # SGLang's resolution sets some variables
        yield resolve


@pytest.mark.parametrize(("tensor_parallel", "gpu_gib"), [(1, 24), (1, 48), (8, 80), (8, 141)])
@pytest.mark.parametrize("at_once", [40, 256])
def test_sglang_takes_the_arguments_of_a_gpu_as_they_are(
    resolved: Resolved, tensor_parallel: int, gpu_gib: int, at_once: int
) -> None:
    arguments = resolved(
        gpu_gib=gpu_gib, tensor_parallel=tensor_parallel, max_completions=at_once, memory_fraction=0.7, random_seed=5
    )
    expected = {
        "device": "cuda",
        "tp_size": tensor_parallel,
        "dp_size": 1,
        "pp_size": 1,
        "dtype": "bfloat16",
        "context_length": 1007,
        "max_running_requests": at_once + NUM_SEQUENCES,
        "mem_fraction_static": 0.7,
        "random_seed": 5,
        "weight_version": "1.7",
        "disable_radix_cache": False,
        "skip_tokenizer_init": True,
        "disable_overlap_schedule": False,
    }
    assert {name: arguments[name] for name in expected} == expected
    # A batch larger than the largest captured one runs without a graph, several times slower.
    assert arguments["cuda_graph_config"]["decode"]["max_bs"] == at_once + NUM_SEQUENCES


def test_log_probs_are_of_float32_logits_and_of_no_other_distribution(resolved: Resolved) -> None:
    arguments = resolved(gpu_gib=80)
    assert arguments["enable_fp32_lm_head"], "as in the learner"
    assert not resolved(gpu_gib=80, extra={"enable_fp32_lm_head": False})["enable_fp32_lm_head"]
    assert arguments["rl_on_policy_target"] is None, "it rounds the logits to bfloat16"
    assert arguments["kv_cache_dtype"] == "auto" and arguments["quantization"] is None
    assert arguments["speculative_algorithm"] is None and not arguments["enable_tf32_matmul"]


@pytest.mark.parametrize("is_blackwell", [False, True])
@pytest.mark.parametrize("replay", ["off", "rollout"])
def test_routes_that_are_recorded_are_not_chosen_inside_of_a_kernel(
    resolved: Resolved, mixture: Path, is_blackwell: bool, replay: str
) -> None:
    """On a B200 SGLang's default chooses experts in the kernel that runs them, and all recorded ones are expert 0."""
    from sglang.srt.layers.moe.topk import TopK, TopKConfig, TopKOutputFormat
    from sglang.srt.layers.moe.utils import MoeRunnerBackend, RoutingMethodType
    from sglang.srt.runtime_context import override_platform

    engine: Any = build_engine(config(mixture, model={"routing_replay": replay}), seed=0)
    options = engine.options
    with override_platform(is_sm100=is_blackwell):
        arguments = resolved(gpu_gib=180, model=mixture, records_routes=options.records_routes, extra=options.extra)
    assert arguments["enable_return_routed_experts"] == (replay == "rollout")
    backend, router = MoeRunnerBackend(arguments["moe_runner_backend"]), TopKConfig(top_k=2, renormalize=True)
    chooser = SimpleNamespace(topk_config=router, _runner_backend_bound=False, is_fp4_experts=False)
    TopK.bind_runner_backend(chooser, backend, routing_method_type=RoutingMethodType.Renormalize)
    assert (router.output_format is TopKOutputFormat.STANDARD) == (replay == "rollout" or not is_blackwell)
