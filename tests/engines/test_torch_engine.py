"""What only the `torch` engine promises: how it queues, what it refuses, how it ends after a failure."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, MistralForCausalLM

from asyncgrpo.engines.base import EngineOccupancy
from asyncgrpo.engines.torch import decoder
from asyncgrpo.engines.torch.engine import TorchEngine
from asyncgrpo.errors import EngineError
from asyncgrpo.types import Completion, PolicyVersion, Sampling
from asyncgrpo.weights.digest import tensor_digest
from tests.engines.engines import MAX_CONTEXT, VOCAB, Rig, torch_rig
from tests.engines.shared import shared
from tests.models import make_tiny_qwen3

PROMPT = (5, 77, 130, 9, 201)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), vocab=VOCAB)


@pytest.fixture
def rig(model_path: Path) -> Iterator[Rig]:
    """Room for 4 completions at once."""
    rig = torch_rig(model_path, max_completions=4).start()
    yield rig
    rig.stop()


def new_engine(path: Path, *, max_context: int = MAX_CONTEXT) -> TorchEngine:
    return TorchEngine(str(path), dtype=torch.float32, device=torch.device("cpu"), max_context=max_context)


def test_the_smallest_context_is_one_token_and_its_successor(model_path: Path) -> None:
    rig = Rig(new_engine(model_path, max_context=2)).start()
    (completion,) = rig.run(rig.sample((5,), 1, max_tokens=4))
    assert (len(completion.token_ids), completion.finish_reason) == (1, "length")
    rig.stop()


async def turns(count: int) -> None:
    """Let everybody on the loop go on; a running engine makes about one step per turn."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- rows and queues


def test_completions_without_a_row_wait_first_come_first_served(rig: Rig) -> None:
    done: list[int] = []

    async def ask(number: int, count: int) -> list[Completion]:
        completions = await rig.sample(PROMPT, count, request_id=str(number), max_tokens=4)
        done.append(number)
        return completions

    async def fill() -> tuple[EngineOccupancy, list[list[Completion]]]:
        asked = [asyncio.create_task(ask(number, count)) for number, count in enumerate((3, 3, 2, 11))]
        while not rig.engine.occupancy().running:
            await asyncio.sleep(0)
        use = rig.engine.occupancy()
        await rig.engine.abort("2")
        return use, await asyncio.gather(*asked)

    use, (*_, aborted, many) = rig.run(fill())
    assert (use.running, use.waiting, use.places) == (3, 3 + 2 + 11, 4)
    assert use.kv == 3 * len(PROMPT) / (4 * MAX_CONTEXT), "the last token of each has none yet"
    assert done == [2, 0, 1, 3]
    assert [(len(a.token_ids), a.spans, a.finish_reason) for a in aborted] == [(0, (), "abort")] * 2
    assert sorted(completion.index for completion in many) == list(range(11)), "more than rows run in parts"
    for completion in many:
        rig.assert_logprobs(PROMPT, completion)


def test_a_request_id_in_flight_is_refused(rig: Rig) -> None:
    async def twice() -> None:
        first = asyncio.create_task(rig.sample(PROMPT, request_id="same", max_tokens=9))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="same is already in flight"):
            await rig.sample(PROMPT, request_id="same", max_tokens=9)
        assert len(await first) == 1

    rig.run(twice())


def test_prefill_in_many_forwards_gives_the_same(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 16)

    async def all_at_once() -> list:
        long = asyncio.create_task(rig.sample(tuple(range(30)), 2, max_tokens=40))
        short = asyncio.create_task(rig.sample((1, 2, 3), 2, max_tokens=40))
        await turns(5)
        await rig.load(1, keep_kv=False)
        return [(tuple(range(30)), await long), ((1, 2, 3), await short)]

    for prompt, completions in rig.run(all_at_once()):
        for completion in completions:
            rig.assert_logprobs(prompt, completion)


# --- weights


def test_tied_weights_may_be_given_once_or_twice_and_must_agree(tmp_path: Path) -> None:
    rig = torch_rig(make_tiny_qwen3(tmp_path, vocab=VOCAB, tie=True)).start()
    tensors, version = rig.weights(1), rig.run(rig.load(1))
    assert "lm_head.weight" not in tensors
    for _ in range(2):
        rig.run(rig.engine.load_weights(shared(tensors), version))
        (completion,) = rig.run(rig.sample(PROMPT, max_tokens=10))
        rig.assert_logprobs(PROMPT, completion)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(EngineError, match=r"lm_head\.weight another value"):
        rig.run(rig.engine.load_weights(shared(tensors), version))
    rig.stop()


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), rf"lack 1 of the model's tensors, the first is {NORM}"),
        (lambda tensors: tensors.update(more=torch.ones(1)), "tensor more that the model does not have"),
        (lambda tensors: tensors.update({NORM: torch.ones(3)}), rf"give {NORM} as \[3\], the model has \[64\]"),
    ],
)
def test_a_bad_load_names_the_tensor_and_stops_the_engine(rig: Rig, change, message: str) -> None:
    tensors = rig.weights(1)
    change(tensors)
    with pytest.raises(EngineError, match=message):
        rig.run(rig.engine.load_weights(shared(tensors), PolicyVersion(0, 1)))
    assert rig.engine.version == PolicyVersion(0, 0)
    with pytest.raises(EngineError, match="does not sample"):
        rig.run(rig.sample(PROMPT))


def test_weights_that_are_not_finite_end_every_request_and_leave_nothing_behind(rig: Rig) -> None:
    async def poison() -> None:
        requests = [asyncio.create_task(rig.sample(PROMPT, 2, max_tokens=50)) for _ in range(4)]  # two of them wait
        await turns(5)
        bad = {name: tensor * float("nan") for name, tensor in rig.weights(0).items()}
        await rig.engine.load_weights(shared(bad), PolicyVersion(0, 1))
        for outcome in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(outcome, EngineError)
            assert "0.1: the model returned logits that are not finite" in str(outcome)
        with pytest.raises(EngineError, match="not finite"):
            await rig.sample(PROMPT)
        await rig.load(1)

    rig.run(poison())
    for completion in rig.run(rig.sample(PROMPT, 4, max_tokens=20)):
        rig.assert_logprobs(PROMPT, completion)


def test_the_checksum_is_of_the_live_tensors_in_the_order_in_which_they_came(rig: Rig) -> None:
    def checksum() -> tuple[str, dict[int, int]]:
        digest, tensors = rig.run(rig.engine.checksum())
        return digest, dict(np.frombuffer(tensors, np.uint64).reshape(-1, 2).tolist())

    given = dict(reversed(rig.weights(1).items()))
    rig.run(rig.engine.load_weights(shared(given), PolicyVersion(0, 1)))
    sent = dict(enumerate(tensor_digest(tensor, name) for name, tensor in given.items()))
    assert checksum() == (f"{sum(sent.values()) % 2**64:016x}", sent)
    rig.engine._places["model.norm.weight"].view(torch.int32)[3] += 1
    digest, held = checksum()
    assert digest != f"{sum(sent.values()) % 2**64:016x}"
    assert [list(given)[index] for index in sent if held[index] != sent[index]] == ["model.norm.weight"]


# --- start and close


def test_a_folder_without_a_model_and_a_window_smaller_than_the_context_are_refused(tmp_path: Path) -> None:
    MistralForCausalLM(
        MistralConfig(hidden_size=16, num_hidden_layers=1, vocab_size=20, num_attention_heads=2, intermediate_size=16)
    ).save_pretrained(tmp_path)
    window = MistralConfig().sliding_window
    with pytest.raises(EngineError, match=rf"sliding_window \({window}\) is smaller than max_context"):
        asyncio.run(new_engine(tmp_path, max_context=window + 1).start(PolicyVersion(0, 0)))
    with pytest.raises(EngineError, match=str(tmp_path / "nothing")):
        asyncio.run(new_engine(tmp_path / "nothing").start(PolicyVersion(0, 0)))


def test_capped_attention_scores_are_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20, "num_attention_heads": 2, "head_dim": 8}
    AutoModelForCausalLM.from_config(Gemma2Config(**shape, intermediate_size=16)).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"its attention scores are capped \(attn_logit_softcapping\)"):
        asyncio.run(new_engine(tmp_path).start(PolicyVersion(0, 0)))


def test_close_tells_whoever_still_waits(model_path: Path) -> None:
    async def close_midway() -> None:
        engine = new_engine(model_path)
        await engine.start(PolicyVersion(0, 0))

        async def ask() -> None:
            async for _ in engine.generate("r", PROMPT, 2, Sampling(), 0):
                pass

        asking = asyncio.create_task(ask())
        await turns(5)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await asking
        with pytest.raises(EngineError, match="closed"):
            await ask()
        with pytest.raises(EngineError, match="closed"):
            await engine.load_weights(shared({}), PolicyVersion(0, 1))

    asyncio.run(close_midway())


def test_in_bfloat16_logprobs_are_float32_and_close_to_transformers(model_path: Path) -> None:
    """Tolerance 0.3 nats on logits of about ±10, whose steps in bfloat16 are 0.06."""
    rig = torch_rig(model_path, dtype=torch.bfloat16, tolerance=0.3).start()
    for completion in rig.run(rig.sample(PROMPT, 4, max_tokens=20)):
        assert completion.logprobs.dtype == np.float32
        rig.assert_logprobs(PROMPT, completion)
    rig.stop()
