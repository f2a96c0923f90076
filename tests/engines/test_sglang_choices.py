"""SGLang returns what it chose: the experts of each token, and the tokens that top-p and top-k left."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from asyncgrpo.engines.sglang.engine import MOST_KEPT, keeps_some, sampling_params
from asyncgrpo.types import Completion, Sampling
from tests.engines.engines import Rig, sglang_rig
from tests.models import make_tiny_qwen3_moe

PROMPT = (5, 6, 7, 8, 9)


@pytest.fixture(scope="module")
def rig(tmp_path_factory) -> Iterator[Rig]:
    pytest.importorskip("sglang")
    path = make_tiny_qwen3_moe(tmp_path_factory.mktemp("model"), experts=8)
    rig = sglang_rig(path, records_routes=True).start()
    yield rig
    rig.stop()


def sample(rig: Rig, **sampling) -> list[Completion]:
    return rig.run(rig.sample(PROMPT, 3, max_tokens=12, **sampling))


@torch.no_grad()
def forward(rig: Rig, completion: Completion) -> tuple[torch.Tensor, np.ndarray]:
    """Log-probs before each sampled token, and the experts of all tokens but the last, by transformers."""
    found = []
    model = rig.reference_model
    hooks = [
        module.register_forward_hook(lambda router, given, out: found.append(out[2]))
        for module in model.modules()
        if type(module).__name__.endswith("TopKRouter")
    ]
    logits = model(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(found, 1)[:-1].numpy()


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 7}, {"top_p": 0.9, "top_k": 7, "temperature": 0.8}])
def test_log_probs_are_those_over_the_tokens_that_were_kept(rig, sampling):
    for completion in sample(rig, **sampling):
        logits, _ = forward(rig, completion)
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


def test_routes_are_the_experts_that_transformers_takes(rig):
    for completion in sample(rig):
        assert completion.kept is None
        _, experts = forward(rig, completion)
        assert completion.routes.shape == (len(PROMPT) + len(completion.token_ids) - 1, 2, 2)
        assert np.array_equal(np.sort(completion.routes, -1), np.sort(experts, -1))


@pytest.mark.parametrize(
    ("sampling", "is_kept", "top_k"),
    [
        ({}, False, -1),
        ({"top_p": 0.9}, True, MOST_KEPT),
        ({"top_k": 50}, True, 50),
        ({"top_k": 1}, False, 1),
        ({"top_k": MOST_KEPT}, True, MOST_KEPT),
        ({"top_k": MOST_KEPT + 1, "top_p": 0.9}, False, MOST_KEPT + 1),
        ({"top_p": 0.9, "temperature": 0.0}, False, -1),
    ],
)
def test_tokens_are_recorded_where_some_are_left_out(sampling, is_kept, top_k):
    given = Sampling(**sampling)
    assert keeps_some(given) == is_kept and sampling_params(given, room=10)["top_k"] == top_k
