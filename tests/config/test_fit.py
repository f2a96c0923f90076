"""What does not fit is refused with the nearest settings that do, and open settings are chosen so that the run fits."""

import itertools
import json
from dataclasses import replace

import pytest

from asyncgrpo.config import memory
from asyncgrpo.config.load import load_config
from asyncgrpo.config.memory import (
    GIB,
    Card,
    engine_gpu,
    fullest_host,
    fullest_shared_memory,
    learner_rank,
    learner_tensors,
)
from asyncgrpo.config.model_size import ModelSize, size_at, size_of
from asyncgrpo.config.placement import (
    COMFORTABLE,
    changed,
    choose,
    keeps_activations,
    refuse,
    refuse_host,
    report,
    settled,
    share_one_gpu,
)
from asyncgrpo.config.schema import Config
from asyncgrpo.engines.build import SHARED_FRACTION, SHARED_PREFILL, build_engine, check_extra
from asyncgrpo.errors import ConfigError
from asyncgrpo.host import Host
from asyncgrpo.learner import head, optimizer
from benchmarks import memory_table
from benchmarks.memory_table import PUBLISHED
from benchmarks.parallel_arithmetic import MODELS as MIXTURES


def size(name: str) -> ModelSize:
    return size_of(json.dumps(PUBLISHED[name]))


def run(*overrides: str, gb: float | None = 80) -> Config:
    named = [f"cluster.gpu_memory_gb={gb}"] if gb is not None else []
    return load_config(None, ["model.path=m", "data.train=d", "learner.device=cuda", *named, *overrides])


def parts(name: str, *overrides: str) -> dict[str, int]:
    return learner_rank(size(name), run(*overrides))


# -- what a rank holds -------------------------------------------------------------------------------------------------


def test_full_training_takes_16_bytes_a_parameter_divided_by_the_ranks_and_adapters_take_less():
    model = size("Qwen3-8B")
    numbers, adapters = model.parameters, model.adapter_parameters(32)
    there, off = run("learner.ranks=4"), run("learner.ranks=4", "learner.offload_optimizer=true")
    held = parts("Qwen3-8B", "learner.ranks=4")
    for name, size_of_one in (("weights", 4), ("gradients", 4), ("moments", 8)):
        assert 4 * held[name] == pytest.approx(size_of_one * numbers, rel=1e-6)
    assert "moments" not in learner_tensors(model, off), "they are on the host"
    assert fullest_host(model, off)["moments"] == 8 * numbers
    assert "moments" not in fullest_host(model, there)
    assert learner_rank(model, off).total() < learner_rank(model, there).total()
    held = parts("Qwen3-8B", "model.lora.rank=32")
    assert (held["weights"], held["gradients"]) == (2 * numbers + 4 * adapters, 4 * adapters)
    wide = learner_rank(size_of(json.dumps(PUBLISHED["Qwen3-8B"] | {"dtype": "float32"})), run("model.lora.rank=32"))
    assert wide["weights"] > 1.9 * held["weights"], "files of float32 stay"


@pytest.mark.parametrize(
    ("model", "gb", "keeps"), [("Qwen3-0.6B", 80, True), ("Qwen3-0.6B", 24, False), ("Qwen3-8B", 80, False)]
)
def test_activations_are_kept_where_the_card_has_room_for_them(model, gb, keeps):
    config = run("learner.ranks=4", gb=gb)
    assert keeps_activations(size(model), config, Card.of(config)) is keeps
    explicit = changed(config, {"learner.activation_checkpointing": keeps})
    assert settled(size(model), explicit, Card.of(config)) == explicit, "what is written counts"
    held = learner_rank(size(model), settled(size(model), config, Card.of(config)))
    assert (held["activations"] > learner_rank(size(model), explicit)["activations"]) is keeps
    assert held.total() <= Card.of(config).num_bytes


def test_the_host_holds_a_copy_of_a_checkpoint_and_the_reference_unless_it_is_to_stay():
    model, kl = size("Qwen3-8B"), "algorithm.kl_coef=0.1"
    away, here = run("learner.ranks=4", kl), run("learner.ranks=4", kl, "learner.offload_reference=false")
    assert fullest_host(model, away)["checkpoint"] == (12 + 2) * model.parameters
    adapters = 12 * model.adapter_parameters(32) + 2 * model.parameters
    assert fullest_host(model, run("model.lora.rank=32"))["checkpoint"] == adapters
    assert fullest_host(model, away)["reference"] == 2 * model.parameters
    moved = learner_rank(model, here)["reference"] - learner_rank(model, away)["reference"]
    assert moved == pytest.approx(2 * model.parameters / 4, abs=2)
    assert "reference" not in learner_rank(model, run(kl, "model.lora.rank=8")), "the model without adapters"


def test_the_kv_cache_is_what_the_weights_leave():
    model, config = size("Qwen3-8B"), run("generators.memory_fraction=0.5")
    fit = engine_gpu(model, config, Card(80 * GIB, "found"))
    assert fit.gpu["weights"] == 2 * model.parameters
    assert fit.gpu.total() == 80 * GIB
    per_completion = 1536 * 36 * 8 * 2 * 128 * 2  # tokens, layers, heads, keys and values, width, bytes
    assert fit.completions == fit.gpu["KV cache"] // per_completion
    assert fit.wanted == 32 * 8


def test_a_card_is_the_one_found_unless_another_is_named():
    assert Card.of(run(gb=None), 24 * GIB) == Card(24 * GIB, "found")
    given = Card.of(run(gb=40), 24 * GIB)
    assert given.known == "given" and 39 * GIB < given.num_bytes < 40 * GIB
    assumed = run(gb=None)
    refuse(size("Llama-3.1-70B"), assumed, Card.of(assumed))  # an assumed card refuses nothing, and a named one does
    assert refusal("Llama-3.1-70B", gb=8).endswith("use larger GPUs or a smaller model")
    assert Card.of(run(gb=None)).known == "assumed" and Card.of(run(gb=None)).num_bytes == Card.of(run(gb=80)).num_bytes


def test_the_constants_are_those_of_the_learner():
    assert memory.TILE_LOGITS == head.TILE_LOGITS["cuda"] == head.BLOCK_LOGITS["cuda"]
    assert memory.STREAMED_MOMENTS == optimizer.CHUNK_BYTES


# -- what does not fit -------------------------------------------------------------------------------------------------


def refusal(name: str, *overrides: str, gb: float = 80) -> str:
    config = run(*overrides, gb=gb)
    with pytest.raises(ConfigError) as error:
        refuse(size(name), config, Card.of(config))
    return str(error.value)


def test_a_rank_that_does_not_fit_is_refused_with_what_would():
    said = refusal("Qwen3-8B", "learner.ranks=2", "learner.tokens_per_microbatch=65536")
    assert "a learner rank does not fit its GPU" in said and "of 78.8 GiB" in said and "\n" not in said
    offered = [choice.split() for choice in said.partition("it fits with ")[2].split(" or with ")]
    assert len(offered) > 1
    for choice in offered:
        config = run("learner.ranks=2", "learner.tokens_per_microbatch=65536", *choice)
        assert learner_rank(size("Qwen3-8B"), config).total() <= COMFORTABLE * Card.of(config).num_bytes


@pytest.mark.parametrize(
    ("settings_of_model", "key", "settings", "gb"),
    [
        (MIXTURES["Qwen3-30B-A3B"].settings, "learner.parallel.expert", ["learner.ranks=4"], 76),
        (PUBLISHED["Qwen3-8B"], "learner.parallel.context", ["learner.ranks=8", "sampling.max_tokens=200000"], 80),
    ],
)
def test_a_layout_over_the_ranks_that_there_are_is_offered_where_it_fits(settings_of_model, key, settings, gb):
    settings = [*settings, "learner.activation_checkpointing=offload", "learner.offload_optimizer=true"]
    settings.append("learner.tokens_per_microbatch=" + ("210000" if len(settings) == 4 else "16384"))
    model, config = size_of(json.dumps(settings_of_model)), run(*settings, gb=gb)
    with pytest.raises(ConfigError) as error:
        refuse(model, config, Card.of(config))
    offers = str(error.value).partition("it fits with ")[2].split(" or with ")
    (offer,) = (one.split() for one in offers if one.startswith(key))
    divided = run(*settings, *offer, gb=gb)
    assert learner_rank(model, divided).total() < Card.of(divided).num_bytes
    assert f"each on {offer[0].partition('=')[2]}" in report(model, divided, Card.of(divided))


def test_ranks_that_the_layout_does_not_divide_are_not_offered():
    assert "learner.ranks=3 " in refusal("Qwen3-8B", "learner.ranks=2")
    assert "learner.ranks=4 " in refusal("Qwen3-8B", "learner.ranks=2", "learner.parallel.context=2")


def test_an_engine_without_room_for_one_completion_is_refused():
    said = refusal("Qwen3-32B", "learner.ranks=48", gb=66)
    assert "too little for one completion of 1,536 tokens" in said
    config = run("learner.ranks=48", *said.partition("it fits with ")[2].split(" or with ")[0].split(), gb=66)
    refuse(size("Qwen3-32B"), config, Card.of(config))
    assert "generators.gpus_each=" in said


@pytest.mark.parametrize(("name", "rank", "gb"), [("Qwen3-8B", 8, 80), ("Qwen2.5-3B", 8, 24), ("Qwen3-8B", 0, 80)])
def test_a_shared_gpu_is_refused_where_only_one_of_the_two_fits(name, rank, gb):
    settings = [f"model.lora.rank={rank}", "cluster.share_gpu=true", "generators.count=1", "learner.ranks=1"]
    settings.append("generators.memory_fraction=0.8")
    error = refusal(name, *settings, gb=gb)
    assert ("do not fit one GPU of" in error) == (rank > 0)
    for offered in error.partition("it fits with ")[2].split(" or with "):
        config = run(*settings, *offered.split(), gb=gb)
        refuse(size(name), config, Card.of(config))


# -- what is chosen ----------------------------------------------------------------------------------------------------


def fits(model: ModelSize, config: Config, card: Card) -> bool:
    """The learner with some room, and an engine with room for a group."""
    held = engine_gpu(model, config, card)
    rank = learner_rank(model, config).total()
    return rank <= COMFORTABLE * card.num_bytes and held.completions >= config.algorithm.group_size


def any_fits(model: ModelSize, config: Config, card: Card, n_gpus: int) -> bool:
    for each, offload, tokens in itertools.product((1, 2, 4, 8), (False, True), (16384, 8192, 4096)):
        if each < n_gpus and model.heads % each == 0:
            most = {"generators.gpus_each": each, "generators.count": 1, "learner.ranks": n_gpus - each}
            most |= {"learner.offload_optimizer": offload, "learner.tokens_per_microbatch": tokens}
            if fits(model, changed(config, most), card):
                return True
    return False


@pytest.mark.parametrize("gb", [24, 80, 141])
@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_split_fits_where_any_fits(name, rank, gb):
    model, config = size(name), run(f"model.lora.rank={rank}", gb=gb)
    card = Card.of(config)
    for n_gpus in (2, 3, 4, 6, 8, 16, 24, 64):
        chosen = choose(model, config, card, n_gpus, {})
        used = chosen["generators.count"] * chosen["generators.gpus_each"] + chosen["learner.ranks"]
        assert used == n_gpus
        assert fits(model, changed(config, chosen), card) is any_fits(model, config, card, n_gpus)


def test_what_was_decided_is_kept():
    config = run("learner.tokens_per_microbatch=8192")
    decided = {"learner.ranks": 2, "learner.offload_optimizer": False, "learner.tokens_per_microbatch": 8192}
    chosen = choose(size("Qwen3-14B"), config, Card.of(config), 8, decided)
    assert chosen["learner.ranks"] == 2 and chosen["generators.count"] * chosen["generators.gpus_each"] == 6
    assert "learner.offload_optimizer" not in chosen and "learner.tokens_per_microbatch" not in chosen


@pytest.mark.parametrize(("name", "rank"), [("Qwen3-0.6B", 0), ("Qwen2.5-3B", 32)])
def test_a_24_gb_card_is_shared(name, rank):
    model, config = size(name), run(f"model.lora.rank={rank}", "algorithm.group_size=8", gb=24)
    card = Card.of(config)
    values = share_one_gpu(model, config, card) | {"cluster.share_gpu": True}
    shared = changed(config, values)
    refuse(model, shared, card)
    held = engine_gpu(model, shared, card)
    assert learner_rank(model, shared).total() + held.gpu.total() <= COMFORTABLE * card.num_bytes
    assert held.completions >= held.wanted >= 16
    config = run(gb=24)
    with pytest.raises(ConfigError, match=r"do not fit one GPU of 23.6 GiB.*model\.lora\.rank=32"):
        share_one_gpu(size("Qwen3-8B"), config, Card.of(config))


@pytest.mark.parametrize("engine", ["sglang", "torch"])
def test_an_engine_that_leaves_the_learner_too_little_of_a_shared_gpu_is_refused(engine):
    """Torch in the learner is held to what the fraction leaves, also where the engine would take less."""
    settings = ["cluster.share_gpu=true", "generators.count=1", "learner.ranks=1", "model.lora.rank=8"]
    settings.append(f"generators.engine={engine}")
    config = run(*settings, "generators.memory_fraction=0.85", "generators.groups_in_flight=1", gb=24)
    needed = f"{1.05 * learner_tensors(size('Qwen3-0.6B'), config).total() / GIB:.1f}"
    with pytest.raises(ConfigError, match=rf"needs {needed} GiB.*generators\.memory_fraction=0\.85 leaves it"):
        refuse(size("Qwen3-0.6B"), config, Card.of(config))
    settings.append("generators.memory_fraction=0.1")
    fits, full = (run(*settings, f"generators.groups_in_flight={groups}") for groups in (48, 56))
    refuse(size("Qwen3-0.6B"), fits, Card.of(fits))
    if engine == "torch":  # it makes room for all completions whatever its fraction
        with pytest.raises(ConfigError, match="do not fit one GPU"):
            refuse(size("Qwen3-0.6B"), full, Card.of(full))


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


# -- a machine ---------------------------------------------------------------------------------------------------------

ROOMY = Host(memory=2048 * GIB, shared=1024 * GIB, shared_free=1024 * GIB)


def test_a_run_that_the_memory_of_its_machine_cannot_hold_is_refused():
    model, config = size("Qwen3-8B"), run("learner.ranks=4", "generators.count=4")
    held = fullest_host(model, config).total()
    refuse_host(model, config, replace(ROOMY, memory=held))
    with pytest.raises(ConfigError, match=r"memory of this machine or container: .*publication 30\.5") as refused:
        refuse_host(model, config, replace(ROOMY, memory=held - 1))
    assert "it fits with generators.count=3" in str(refused.value)
    refuse_host(model, changed(config, {"generators.count": 3}), replace(ROOMY, memory=held - 1))


def test_a_run_on_the_cpu_holds_what_it_trains_in_the_memory_of_its_machine():
    settings = ["model.path=m", "data.train=d", "learner.device=cpu", "generators.gpus_each=0", "learner.ranks=2"]
    model, config = size("Qwen3-0.6B"), load_config(None, settings)
    held = fullest_host(model, config)
    assert held["weights"] == pytest.approx(4 * model.parameters, abs=8)
    assert held["moments"] == pytest.approx(8 * model.parameters, abs=8)
    assert held["engines"] == config.generators.count * 2 * model.parameters
    assert "learner rank" not in report(model, config, Card.of(config))
    with pytest.raises(ConfigError, match="use a smaller model"):
        refuse_host(model, config, replace(ROOMY, memory=4 * GIB))


def test_weights_that_shared_memory_cannot_hold_are_refused():
    model, config = size("Qwen3-8B"), run("learner.ranks=4", "generators.count=4")
    copies = fullest_shared_memory(model, config).total()
    assert copies == 2 * 2 * model.parameters, "engines load out of the learner's arenas"
    refuse_host(model, config, replace(ROOMY, shared_free=copies))
    with pytest.raises(ConfigError, match=r"do not fit /dev/shm: .*--shm-size=33g"):
        refuse_host(model, config, replace(ROOMY, shared_free=copies - 1))
    broadcast = changed(config, {"weights.backend": "gloo"})
    far = fullest_shared_memory(model, broadcast)
    assert far == {"arenas": copies, "staging": copies / 2}, "one generator receives for all"
    with pytest.raises(ConfigError, match="do not fit /dev/shm"):
        refuse_host(model, broadcast, replace(ROOMY, shared_free=copies))


def test_the_page_has_the_tables_of_today():
    page = memory_table.PAGE.read_text(encoding="utf-8")
    assert memory_table.tables() in page, "python -m benchmarks.memory_table --write"
