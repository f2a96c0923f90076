"""What every engine promises (`generators/engine.py`), tested on all of them.

Engines with a model are checked against a plain transformers forward under the weights that each span names.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncgrpo.engines.base import EngineOccupancy
from asyncgrpo.engines.fake import FakeEngine
from asyncgrpo.errors import EngineError
from asyncgrpo.types import Completion, PolicyVersion, Sampling
from asyncgrpo.weights.publication import BOUNDS, CheckSequences, SyncGap
from tests.engines.engines import MAX_CONTEXT, RIGS, VOCAB, Rig
from tests.engines.shared import shared

PROMPT = (5, 77, 130, 9, 201)
OFTEN = tuple(range(0, VOCAB, 12))
"""Stop tokens that end most completions after some ten tokens, each at another place."""
LONG = 200
"""Tokens of a completion that must outlive what a test does meanwhile."""

SGLANG = pytest.param("sglang", marks=pytest.mark.slow)
"""With a mixture of experts, and attention that multiplies with weights that SGLang derives from published ones."""
MODELS = ["torch-qwen3", "torch-llama", "torch-qwen3-moe", "torch-deepseek-v3", SGLANG]


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Rig]]:
    """Engines by name, each started when first asked for and once per module."""
    started: dict[str, Rig] = {}

    def get(name: str) -> Rig:
        if name not in started:
            started[name] = RIGS[name](tmp_path_factory.mktemp(name)).start()
        started[name].run(started[name].load(0))
        return started[name]

    yield get
    for rig in started.values():
        rig.stop()


def each_of(*names: Any) -> Any:
    """A fixture that is each of these engines."""

    @pytest.fixture(params=names)
    def rig(rigs: Callable[[str], Rig], request: pytest.FixtureRequest) -> Rig:
        return rigs(request.param)

    return rig


rig = each_of("fake", "torch-qwen3", SGLANG)
every_rig = each_of("fake", *MODELS)
model_rig = each_of(*MODELS)
seeded_rig = each_of("fake", "torch-qwen3", "torch-llama")
choosing_rig = each_of(SGLANG)


def texts(completions: list[Completion]) -> list[tuple[int, ...]]:
    """Token ids of each completion, in the order of their index."""
    return [
        tuple(completion.token_ids.tolist())
        for completion in sorted(completions, key=lambda completion: completion.index)
    ]


def assert_spans_partition(completion: Completion) -> None:
    edges = [0, *(span.end for span in completion.spans)]
    assert [span.start for span in completion.spans] == edges[:-1]
    assert edges[-1] == len(completion.token_ids) == len(completion.logprobs)
    assert all(span.start < span.end for span in completion.spans)
    versions = [span.version for span in completion.spans]
    assert versions == sorted(set(versions))


# --- completions, streaming, endings


def test_a_stop_token_in_the_last_allowed_place_counts_as_stop(rig: Rig) -> None:
    (free,) = rig.run(rig.sample(PROMPT, max_tokens=20, temperature=0.0))
    stop = int(free.token_ids[-1])
    place = free.token_ids.tolist().index(stop)
    (stopped,) = rig.run(rig.sample(PROMPT, max_tokens=place + 1, temperature=0.0, stop_token_ids=(stop,)))
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[: place + 1]
    assert stopped.finish_reason == "stop"


def test_completions_of_one_request_are_yielded_one_by_one(rig: Rig) -> None:
    async def abort_after_first() -> list[Completion]:
        completions = []
        # One stop token in twelve: the first of 8 ends early, and that all the others end with it will not happen.
        sampling = Sampling(max_tokens=LONG, stop_token_ids=OFTEN)
        async for completion in rig.engine.generate("one-by-one", PROMPT, 8, sampling, seed=0):
            completions.append(completion)
            await rig.engine.abort("one-by-one")
        return completions

    completions = rig.run(abort_after_first())
    assert len(completions) == 8
    assert completions[0].finish_reason == "stop"
    assert "abort" in {completion.finish_reason for completion in completions}


def test_abort_returns_what_was_generated(rig: Rig) -> None:
    async def abort_midway() -> list[Completion]:
        long = asyncio.create_task(rig.sample(PROMPT, 4, request_id="to-abort", max_tokens=LONG))
        await rig.sample(PROMPT[:2], max_tokens=6)
        await rig.engine.abort("to-abort")
        return await long

    rig.run(rig.engine.abort("unknown"))
    completions = rig.run(abort_midway())
    assert sorted(completion.index for completion in completions) == [0, 1, 2, 3]
    for completion in completions:
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids) < LONG
        assert_spans_partition(completion)
        rig.assert_logprobs(PROMPT, completion)


def test_whoever_stops_listening_leaves_nothing_running(rig: Rig) -> None:
    async def leave() -> None:
        for _ in range(3):
            listener = asyncio.create_task(rig.sample(PROMPT, 4, max_tokens=LONG))
            while rig.engine.occupancy().running < 4:
                await asyncio.sleep(0)
            listener.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listener
            while rig.engine.occupancy().running:
                await asyncio.sleep(0.01)
        assert len(await rig.sample(PROMPT, 4, max_tokens=3)) == 4

    rig.run(leave(), timeout_s=20.0)


def test_a_completion_ends_where_the_context_is_full(rig: Rig) -> None:
    prompt = tuple(range(MAX_CONTEXT - 6))
    for completion in rig.run(rig.sample(prompt, 2, max_tokens=50)):
        assert (len(completion.token_ids), completion.finish_reason) == (6, "length")
        rig.assert_logprobs(prompt, completion)


def test_it_reports_how_full_it_is_and_how_long_its_steps_took(rig: Rig) -> None:
    async def ask_midway() -> list[EngineOccupancy]:
        seen = [rig.engine.occupancy()]
        sampling = asyncio.create_task(rig.sample(PROMPT, 3, max_tokens=LONG))
        while not sampling.done() and (len(seen) == 1 or seen[-1].running < 3):
            await asyncio.sleep(0)
            seen.append(rig.engine.occupancy())
        await sampling
        while rig.engine.occupancy().running:
            await asyncio.sleep(0.05)
        return [seen[0], seen[-1], rig.engine.occupancy()]

    began_s = time.monotonic()
    before, midway, after = rig.run(ask_midway())
    assert (before.running, midway.running, after.running) == (0, 3, 0)
    assert midway.waiting == 0 and midway.places >= 3 and after.present_s == 0
    assert LONG / 2 < after.steps - before.steps <= LONG
    assert 0 < after.step_s - before.step_s < time.monotonic() - began_s
    if not isinstance(rig.engine, FakeEngine):
        assert before.kv == after.kv == 0 < midway.kv < 1


def test_many_requests_at_once_are_each_right(every_rig: Rig) -> None:
    """Each of its own prompt, number of completions, length, stop tokens and temperature."""
    requests = [
        {
            "prompt": tuple((7 * i + j) % VOCAB for j in range(1 + i % 13)),
            "num_completions": 1 + i % 4,
            "max_tokens": 2 + 3 * i % 17,
            "stop_token_ids": ((), OFTEN, OFTEN[:5], (i,))[i % 4],
            "temperature": (1.0, 0.7, 1.5)[i % 3],
        }
        for i in range(24)
    ]

    async def all_at_once() -> list[list[Completion]]:
        return await asyncio.gather(*(every_rig.sample(**request) for request in requests))

    for request, completions in zip(requests, every_rig.run(all_at_once()), strict=True):
        assert sorted(completion.index for completion in completions) == list(range(request["num_completions"]))
        assert len(set(texts(completions))) == len(completions) or request["max_tokens"] < 5, "they differ"
        for completion in completions:
            assert_spans_partition(completion)
            assert [span.version for span in completion.spans] == [every_rig.engine.version]
            assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
            assert (completion.logprobs <= 0).all()
            stops = [token in request["stop_token_ids"] for token in completion.token_ids.tolist()]
            assert not any(stops[:-1])
            assert completion.finish_reason == ("stop" if stops[-1] else "length")
            assert stops[-1] or len(stops) == request["max_tokens"]
            every_rig.assert_logprobs(request["prompt"], completion, request["temperature"])


# --- log-probs and sampling, against transformers


def test_greedy_is_transformers_greedy(model_rig: Rig) -> None:
    (completion,) = model_rig.run(model_rig.sample(PROMPT, max_tokens=24, temperature=0.0))
    prompt = torch.tensor([PROMPT])
    expected = model_rig.model_of(model_rig.engine.version).generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
    )
    assert completion.token_ids.tolist() == expected[0, len(PROMPT) :].tolist()
    model_rig.assert_logprobs(PROMPT, completion)
    assert texts(model_rig.run(model_rig.sample(PROMPT, max_tokens=24, top_k=1))) == texts([completion])


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (-1, 0.3), (10, 0.5)])
def test_top_k_and_top_p_restrict_what_is_sampled(model_rig: Rig, top_k: int, top_p: float) -> None:
    """Each token is among the top_k best, and the better ones do not already hold top_p of all probability.

    Log-probs are over the whole vocabulary, or over the tokens that were kept (below).
    """
    for completion in model_rig.run(model_rig.sample(PROMPT, 6, max_tokens=16, top_k=top_k, top_p=top_p)):
        if completion.kept is None:
            model_rig.assert_logprobs(PROMPT, completion)
        tokens = completion.token_ids.tolist()
        probs = model_rig.logits([*PROMPT, *tokens], model_rig.engine.version).softmax(dim=-1).double()
        for place, token in enumerate(tokens):
            here = probs[len(PROMPT) - 1 + place]
            better = here[here > here[token]]
            assert len(better) < (top_k if top_k > 0 else VOCAB)
            assert better.sum() < top_p + 1e-5


# --- what SGLang records: the experts of each token, and the tokens that top-p and top-k left


@torch.no_grad()
def forward(rig: Rig, completion: Completion) -> tuple[torch.Tensor, np.ndarray]:
    """Log-probs before each sampled token, and the experts of all tokens but the last, by transformers."""
    found, model = [], rig.model_of(rig.engine.version)
    hooks = [
        module.register_forward_hook(lambda router, given, out: found.append(out[2]))
        for module in model.modules()
        if type(module).__name__.lower().endswith("topkrouter")
    ]
    logits = model(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(found, 1)[:-1].numpy()


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 7}, {"top_p": 0.9, "top_k": 7, "temperature": 0.8}])
def test_log_probs_are_those_over_the_tokens_that_were_kept(choosing_rig: Rig, sampling: dict) -> None:
    for completion in choosing_rig.run(choosing_rig.sample(PROMPT, 3, max_tokens=12, **sampling)):
        logits, _ = forward(choosing_rig, completion)
        logits = logits / sampling.get("temperature", 1.0)
        kept = np.split(completion.kept.ids, completion.kept.counts.cumsum()[:-1])
        assert len(kept) == len(completion.token_ids) and max(map(len, kept)) < 260
        for place, ids in enumerate(kept):
            token = completion.token_ids[place]
            assert token in ids and len(set(ids.tolist())) == len(ids)
            among = logits[place][ids.tolist()].log_softmax(-1)
            expected = among[ids.tolist().index(token)].item()
            assert completion.logprobs[place] == pytest.approx(expected, abs=1e-4)
            if "top_k" in sampling:
                assert len(ids) <= 7
            else:
                dropped = 1 - logits[place].softmax(-1)[ids.tolist()].sum()
                assert dropped <= 0.1 + 1e-4


@pytest.mark.parametrize("start", [0, 3])
def test_routes_are_the_experts_that_transformers_takes(choosing_rig: Rig, start: int) -> None:
    for completion in choosing_rig.run(choosing_rig.sample(PROMPT, 3, routes_from=start, max_tokens=12)):
        assert completion.kept is None
        _, experts = forward(choosing_rig, completion)
        assert completion.routes.shape == (len(PROMPT) + len(completion.token_ids) - 1 - start, 3, 2)
        chosen = np.sort(completion.routes[:, 1:], -1)
        assert np.array_equal(chosen, np.sort(experts[start:], -1)), "the first layer is dense"


# --- weights


@pytest.mark.parametrize("keep_kv", [True, False])
def test_each_span_is_sampled_by_its_version(every_rig: Rig, keep_kv: bool) -> None:
    """Three long completions whose weights change twice while they run, between two tokens."""

    async def change_midway() -> tuple[list[Completion], list[PolicyVersion]]:
        versions = [every_rig.engine.version]
        long = asyncio.create_task(every_rig.sample(PROMPT, 3, max_tokens=LONG))
        for change in (1, 2):
            await every_rig.sample(PROMPT[:2], max_tokens=6)  # a short one does not wait for the long ones
            versions.append(await every_rig.load(change, keep_kv=keep_kv))
        return await long, versions

    completions, versions = every_rig.run(change_midway())
    assert every_rig.engine.version == versions[2]
    for completion in completions:
        assert_spans_partition(completion)
        assert len(completion.token_ids) == LONG
        assert [span.version for span in completion.spans] == versions
        if every_rig.reference_model is not None:
            kept = every_rig.expected_logprobs_kept(PROMPT, completion)
            recomputed = every_rig.expected_logprobs(PROMPT, completion)
            expected, other = (kept, recomputed) if keep_kv else (recomputed, kept)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=every_rig.tolerance)
            assert np.abs(other - completion.logprobs).max() > 100 * every_rig.tolerance, "the oracle can tell"


@pytest.mark.parametrize("keep_kv", [True, False])
def test_no_later_request_reuses_old_keys(model_rig: Rig, keep_kv: bool) -> None:
    prompt = tuple(range(3, 103))  # long enough for any prefix cache to want it
    for change in (0, 1, 2):
        version = model_rig.run(model_rig.load(change, keep_kv=keep_kv))
        for _ in range(2):
            for completion in model_rig.run(model_rig.sample(prompt, 2, max_tokens=6)):
                assert [span.version for span in completion.spans] == [version]
                model_rig.assert_logprobs(prompt, completion)


@pytest.mark.parametrize("keep_kv", [True, False])
def test_scores_are_those_of_a_transformers_forward_under_the_present_weights(model_rig: Rig, keep_kv: bool) -> None:
    """Also while it samples, and though it has seen the same sequences under older weights."""
    check = CheckSequences.draw(VOCAB, MAX_CONTEXT)

    async def change_and_score(change: int) -> list[float]:
        beside = asyncio.create_task(model_rig.sample(PROMPT, 4, max_tokens=30))
        await asyncio.sleep(0)
        await model_rig.load(change, keep_kv=keep_kv)
        scores = await model_rig.engine.score(check.tokens, check.start)
        assert len(await beside) == 4
        return scores

    for change in (0, 1, 2):
        scores = model_rig.run(change_and_score(change))
        expected: list[float] = []
        for tokens in check.tokens:
            logprobs = model_rig.logits(list(tokens), model_rig.engine.version).log_softmax(-1)
            expected += [logprobs[place - 1, tokens[place]].item() for place in range(check.start, len(tokens))]
        np.testing.assert_allclose(scores, expected, rtol=0, atol=model_rig.tolerance)
        assert SyncGap.between(expected, scores).mean < BOUNDS["float32"][0]


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_requests_submitted_just_before_a_change_are_right(rig: Rig, turns: int) -> None:
    async def race() -> list[list[Completion]]:
        requests = [asyncio.create_task(rig.sample(PROMPT, 2, max_tokens=20)) for _ in range(4)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await rig.load(1, keep_kv=False)
        requests += [asyncio.create_task(rig.sample(PROMPT, 2, max_tokens=20))]
        return await asyncio.gather(*requests)

    *before, after = rig.run(race())
    for completions in (*before, after):
        for completion in completions:
            assert_spans_partition(completion)
            rig.assert_logprobs(PROMPT, completion)
    assert {span.version for completion in after for span in completion.spans} == {rig.engine.version}


def test_the_checksum_follows_the_weights(every_rig: Rig) -> None:
    async def checksums() -> list[str]:
        sums = []
        for change in (0, 1, 1, 2, 0):
            await every_rig.load(change)
            sums.append(await every_rig.engine.checksum())
            assert not getattr(every_rig.engine, "does_not_follow", "")
        return sums

    zero, one, one_again, two, zero_again = every_rig.run(checksums())
    assert one == one_again and zero == zero_again
    assert len({zero, one, two}) == 3


# --- seeds


def test_completion_i_is_seeded_by_seed_plus_i_whatever_runs_beside_it(seeded_rig: Rig) -> None:
    async def crowded() -> list[Completion]:
        others = [asyncio.create_task(seeded_rig.sample((1, 2), 2, seed=i, max_tokens=i + 1)) for i in range(4)]
        await asyncio.sleep(0)
        alone = await seeded_rig.sample(PROMPT, seed=13, max_tokens=20)
        await asyncio.gather(*others)
        return alone

    together, again, other = (
        texts(seeded_rig.run(seeded_rig.sample(PROMPT, 4, seed=seed, max_tokens=20))) for seed in (11, 11, 100)
    )
    assert together == again and not set(together) & set(other)
    assert texts(seeded_rig.run(crowded())) == [together[2]]


# --- what is refused


@pytest.mark.parametrize(
    ("prompt", "named"), [((), "prompt"), (tuple([1] * MAX_CONTEXT), "max_context"), ((1, VOCAB), str(VOCAB))]
)
def test_a_prompt_that_cannot_be_sampled_is_refused_by_name(
    seeded_rig: Rig, prompt: tuple[int, ...], named: str
) -> None:
    with pytest.raises(EngineError, match=named):
        seeded_rig.run(seeded_rig.sample(prompt))
    assert len(seeded_rig.run(seeded_rig.sample(PROMPT, 2, max_tokens=3))) == 2


def test_after_a_failed_load_nothing_is_sampled_until_a_good_one(rig: Rig) -> None:
    """As when the engine was frozen, and the learner has written new weights over those that it reads."""

    async def break_midway() -> PolicyVersion:
        overwritten = shared(rig.weights(1))
        overwritten.arenas.begin(0, overwritten.writes + 1)
        before = rig.engine.version
        running = asyncio.create_task(rig.sample(PROMPT, 2, max_tokens=LONG))
        await rig.sample(PROMPT, max_tokens=3)
        with pytest.raises(EngineError, match="weights were overwritten"):
            await rig.engine.load_weights(overwritten, PolicyVersion(0, 999_999))
        with pytest.raises(EngineError, match="weights were overwritten"):
            await running
        with pytest.raises(EngineError, match="does not sample"):
            await rig.sample(PROMPT)
        assert rig.engine.version == before
        return await rig.load(2)

    version = rig.run(break_midway())
    for completion in rig.run(rig.sample(PROMPT, 2, max_tokens=8)):
        assert [span.version for span in completion.spans] == [version]
        rig.assert_logprobs(PROMPT, completion)
