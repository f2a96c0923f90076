"""SGLang's output in our words; the outputs are shaped like those of SGLang 0.5.23."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncgrpo import host
from asyncgrpo.engines.sglang.engine import (
    MOST_KEPT,
    SGLangEngine,
    SGLangOptions,
    completion_of,
    keeps_some,
    sampling_params,
    with_arrays,
)
from asyncgrpo.errors import EngineError
from asyncgrpo.types import PolicyVersion, Sampling, VersionSpan


def output(
    token_ids: list[int], logprobs: list[float], reason: dict[str, Any] | None = None, **meta: Any
) -> dict[str, Any]:
    return {
        "output_ids": token_ids,
        "meta_info": {
            "output_token_logprobs": [(logprob, 0, None) for logprob in logprobs],
            "finish_reason": reason or {"type": "length", "length": len(token_ids)},
            "weight_version": "2.7",
            **meta,
        },
    }


def test_tokens_log_probs_and_reason_are_kept() -> None:
    completion = completion_of(output([5, 6], [-0.5, -1.5], {"type": "stop", "matched": 6}), 3)
    assert (completion.index, completion.finish_reason) == (3, "stop")
    assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
    assert (completion.token_ids.tolist(), completion.logprobs.tolist()) == ([5, 6], [-0.5, -1.5])
    assert completion.spans == (VersionSpan(PolicyVersion(2, 7), 0, 2),), "the version at its end"


def test_spans_are_those_of_sglang_without_empty_ones() -> None:
    spans = [{"version": "2.6", "start": 0, "end": 0}, {"version": "2.7", "start": 0, "end": 1}]
    spans += [{"version": "2.8", "start": 1, "end": 3}]
    completion = completion_of(output([1, 2, 3], [-1.0] * 3, weight_versions=spans), 0)
    assert completion.spans == (VersionSpan(PolicyVersion(2, 7), 0, 1), VersionSpan(PolicyVersion(2, 8), 1, 3))


def test_a_completion_aborted_before_its_first_token_is_empty() -> None:
    completion = completion_of(output([], [-1.0], {"type": "abort", "message": "Aborted"}), 0)
    assert (len(completion.token_ids), len(completion.logprobs), completion.spans) == (0, 0, ())
    assert completion.finish_reason == "abort"


def test_routes_are_arrays_which_sglang_passes_on() -> None:
    async def handle(batch: Any) -> None:
        nothing, experts = batch.routed_experts
        assert nothing is None
        completion = completion_of(output([5], [-0.5], routed_experts=experts), 0)
        assert completion.routes is not None and completion.routes.tolist() == [[[7]], [[9]]]

    routes = torch.tensor([[[7]], [[9]]], dtype=torch.int32)
    asyncio.run(with_arrays(handle, SimpleNamespace(routed_experts=[None, routes])))


@pytest.mark.parametrize(
    ("logprobs", "reason", "message"),
    [
        ([-1.0, np.nan], None, r"not finite under weights 2\.7"),
        ([-1.0, float(np.finfo(np.float32).min)], None, "not finite"),
        ([-1.0, -1.0], {"type": "stop", "matched": "NaN happened"}, "not finite"),  # a token outside the vocabulary
        ([-1.0], None, "2 tokens with 1 log-probs"),
    ],
)
def test_numbers_that_cannot_be_are_an_error(logprobs: list[float], reason: dict | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        completion_of(output([1, 2], logprobs, reason), 0)


def test_a_completion_is_no_longer_than_its_room() -> None:
    assert [sampling_params(Sampling(max_tokens=n), room=30)["max_new_tokens"] for n in (100, 20)] == [30, 20]


@pytest.mark.parametrize(
    ("sampling", "is_kept", "top_k"),
    [
        ({}, False, -1),
        ({"top_p": 0.9}, True, MOST_KEPT),
        ({"top_k": 1}, False, 1),
        ({"top_k": MOST_KEPT}, True, MOST_KEPT),
        ({"top_k": MOST_KEPT + 1, "top_p": 0.9}, False, MOST_KEPT + 1),
        ({"top_p": 0.9, "temperature": 0.0}, False, -1),
    ],
)
def test_tokens_are_recorded_where_some_are_left_out(sampling, is_kept, top_k):
    given = Sampling(**sampling)
    assert keeps_some(given) == is_kept and sampling_params(given, room=10)["top_k"] == top_k


OTHER = "Traceback (most recent call last):\nValueError: of a reward function\n"
OUT = "[TP0] Scheduler hit an exception: Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory.\n"


@pytest.mark.parametrize(
    ("written", "said"),
    [(OTHER + OUT, "torch.OutOfMemoryError: CUDA out of memory."), (OTHER, "one of its processes died")],
)
async def test_the_end_of_a_scheduler_is_reported_with_its_reason(tmp_path, monkeypatch, written, said) -> None:
    """The output itself is in a folder of Ray, which is removed with the run."""
    (tmp_path / "stderr").write_text(written)
    monkeypatch.setattr(host, "stderr_file", tmp_path / "stderr")
    monkeypatch.setattr(host, "DELIVERED_S", 0.0)
    engine = SGLangEngine(SGLangOptions(model_path="m", dtype=torch.float32, max_context=8, device="cuda"))
    engine._engine, engine._death = SimpleNamespace(), asyncio.get_running_loop().create_future()
    engine._die("one of its processes died")
    assert str(engine._failure) == f"SGLang ended: {said}"
