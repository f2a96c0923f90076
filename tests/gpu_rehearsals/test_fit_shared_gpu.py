"""On a shared GPU the engine gets the cache that was reckoned with, whatever the learner holds when it starts."""

import json

import pytest

from asyncgrpo.config.load import load_config
from asyncgrpo.config.memory import GIB, Card, engine_gpu, learner_rank
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.placement import changed, share_one_gpu
from asyncgrpo.config.schema import Config
from asyncgrpo.engines.build import SHARED_FRACTION, SHARED_PREFILL, build_engine, check_extra
from benchmarks.memory_table import PUBLISHED


@pytest.fixture
def shared(tmp_path) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen2.5-3B"]))
    settings = [f"model.path={tmp_path}", "data.train=d", "learner.device=cuda", "model.lora.rank=32"]
    config = load_config(None, [*settings, "cluster.gpu_memory_gb=24"])
    chosen = share_one_gpu(size_at(str(tmp_path)), config, Card.of(config))
    return changed(config, chosen | {"cluster.share_gpu": True})


def test_its_size_is_given_in_tokens(shared):
    pytest.importorskip("sglang")
    extra = build_engine(shared, seed=0).options.extra
    fit = engine_gpu(size_at(shared.model.path), shared, Card.of(shared))
    assert extra["max_total_tokens"] == fit.tokens >= fit.wanted * fit.longest
    assert extra["chunked_prefill_size"] == SHARED_PREFILL, "whatever the card"
    check_extra(changed(shared, {"generators.extra": extra}).generators)
    assert build_engine(changed(shared, {"cluster.share_gpu": False}), seed=0).options.extra == {}
    own = changed(shared, {"generators.extra": {"max_total_tokens": 5000}})
    assert build_engine(own, seed=0).options.extra["max_total_tokens"] == 5000


@pytest.mark.parametrize("learner_is", ["not there", "loaded", "training"])
def test_sglang_has_room_for_them_whoever_is_there_first(shared, learner_is):
    """By SGLang's rule: what is free after the weights, less (1 - mem_fraction_static) of what was free at the start."""
    size, card = size_at(shared.model.path), Card.of(shared)
    rank, engine = learner_rank(size, shared), engine_gpu(size, shared, card).gpu
    held = {"not there": 0, "loaded": rank["weights"] + GIB, "training": rank.total()}[learner_is]
    at_start = card.num_bytes - held - GIB
    sized = at_start - engine["weights"] - (1 - SHARED_FRACTION) * at_start
    assert sized >= engine["KV cache"]
    if held:  # what a fraction of what is free would have left for it
        assert shared.generators.memory_fraction * at_start < engine["weights"]
