"""What the generator chose is replayed: experts by routers, and the tokens that top-p and top-k left."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from asyncgrpo.learner.routing import Routers
from asyncgrpo.types import Completion, KeptTokens, Observation, PolicyVersion, VersionSpan
from tests.learner.helpers import (
    VERSION,
    changed,
    learner,
    load,
    make_group,
    plain_logprobs,
    random_groups,
    step_and_gradient,
)
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3, make_tiny_qwen3_moe

# -- kept tokens; their scores and gradients: `test_head` ---------------------------------------------------------------


@torch.no_grad()
def sampled_from_five(path, prompt: list[int], length: int) -> Completion:
    """Each token is the third likeliest of five that top-k left."""
    model, tokens, logprobs, kept = load(path), list(prompt), [], []
    for _ in range(length):
        best = model(torch.tensor([tokens])).logits[0, -1].topk(5)
        tokens.append(int(best.indices[2]))
        logprobs.append(float(best.values.log_softmax(-1)[2]))
        kept.append(best.indices.int().numpy())
    sampled, counts = np.array(tokens[len(prompt) :], np.int32), np.full(length, 5, np.int32)
    spans = (VersionSpan(VERSION, 0, length),)
    return Completion(
        0, sampled, np.array(logprobs, np.float32), spans, "length", kept=KeptTokens(np.concatenate(kept), counts)
    )


def test_a_policy_of_kept_tokens_has_ratio_one_at_lag_zero(tmp_path):
    """Over the whole vocabulary the ratio is far from one."""
    path = make_tiny_qwen3(tmp_path / "model")
    group = make_group(0, [1.0, 0.0, 1.0], [[1], [2], [3]])
    completions = [sampled_from_five(path, [5, 6, 7], length) for length in (1, 4, 9)]

    def ratio(completions) -> float:
        rollouts = zip(group.rollouts, completions, strict=True)
        made = tuple(replace(r, completion=replace(c, index=i)) for i, (r, c) in enumerate(rollouts))
        return learner(path).step([replace(group, rollouts=made)], VERSION).importance_mean

    assert ratio(completions) == pytest.approx(1.0, abs=1e-5)
    assert ratio([replace(completion, kept=None) for completion in completions]) < 0.5


MIXTURES = {"qwen3_moe": partial(make_tiny_qwen3_moe, experts=8), "deepseek_v3": make_tiny_deepseek_v3}


@torch.no_grad()
def noisy_choices(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Experts that routers would choose whose inputs were rounded to bfloat16; [T, layers, K] int16, -1 in dense layers."""
    found, hooks = {}, []
    for layer, block in enumerate(model.model.layers):
        for router in block.modules():
            if type(router).__name__.lower().endswith("topkrouter"):
                keep = lambda router, given, out, layer=layer: found.__setitem__(layer, (router, given[0]))  # noqa: E731
                hooks.append(router.register_forward_hook(keep))
    model(tokens)
    for hook in hooks:
        hook.remove()
    chosen = {layer: router(given.bfloat16().float())[2].short() for layer, (router, given) in found.items()}
    dense = torch.full_like(next(iter(chosen.values())), -1)
    return torch.stack([chosen.get(layer, dense) for layer in range(len(model.model.layers))], 1)


@torch.no_grad()
def as_sampled(path, groups, *, observe: bool = False):
    """The same groups with routes, and log-probs, of an engine with noisy routers and the learner's weights."""
    model = load(path)
    routers, made = Routers(model), []
    for group in groups:
        for index, completion in enumerate(rollout.completion for rollout in group.rollouts):
            if observe and len(completion.token_ids) > 2:
                completion = replace(completion, observations=(Observation(2, np.array([7, 8, 9], np.int32)),))
            tokens = torch.tensor([[*group.prompt.token_ids, *completion.all_token_ids]])
            routers.replay(None)
            routes = noisy_choices(model, tokens)
            routers.replay(routes)
            logprobs = model(tokens).logits[0].log_softmax(-1)
            places = len(group.prompt.token_ids) + completion.sampled_at
            chosen = logprobs[places - 1].gather(1, tokens[0, places, None])[:, 0]
            spans = (VersionSpan(VERSION, 0, len(completion.token_ids)),)
            fields = {"logprobs": chosen.numpy(), "routes": routes[:-1].numpy(), "spans": spans}
            group = changed(group, index, observations=completion.observations, **fields)
        made.append(group)
    return made


def with_routes(groups, change):
    made = []
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            group = changed(group, index, routes=change(rollout.completion.routes))
        made.append(group)
    return made


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("observe", [False, True])
def test_replayed_experts_close_the_gap_and_any_other_experts_open_it(tmp_path, kind, observe):
    path = MIXTURES[kind](tmp_path / kind)
    groups = as_sampled(path, random_groups(6, 4, answer=(3, 30)), observe=observe)

    def gap(change=lambda routes: routes, **settings) -> float:
        return learner(path, learner={"lr": 1e-3} | settings).step(with_routes(groups, change), VERSION).logprob_gap_max

    assert gap() <= 1e-4
    assert gap(share_prompts=False, tokens_per_microbatch=60) <= 1e-4
    assert gap(activation_checkpointing=True) <= 1e-4
    assert gap(lambda routes: None) > 1e-3, "the noise decides between experts"
    assert gap(lambda routes: (routes + 1) % 8) > 1e-3
    assert gap(lambda routes: np.roll(routes, 1, axis=0)) > 1e-3
    assert gap(lambda routes: np.where(np.arange(routes.shape[1])[:, None] == 1, -1, routes)) > 1e-3, "a layer less"


def test_the_gap_without_replay_is_measured_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncgrpo.learner.learner.LIVE_GAP_EVERY", VERSION.number)
    path = MIXTURES["qwen3_moe"](tmp_path / "model")
    groups = as_sampled(path, random_groups(6, 4, answer=(3, 30)))

    def step(version=VERSION, **model):
        return learner(path, model=model).step(groups, version)

    replayed, later = step(routing_replay="rollout"), PolicyVersion(VERSION.lineage, VERSION.number + 1)
    live = learner(path).step(with_routes(groups, lambda routes: None), VERSION).logprob_gap_max
    assert replayed.logprob_gap_max <= 1e-4 < live == pytest.approx(replayed.diagnostics["live_gap_max"], rel=1e-4)
    assert not any("live_gap_max" in one.diagnostics for one in (step(), step(later, routing_replay="rollout")))


def test_replayed_experts_have_the_gradients_of_their_choice(tmp_path):
    """With the live choice replayed a step is bitwise the same; recomputation takes the same experts."""
    path = MIXTURES["qwen3_moe"](tmp_path / "model")
    groups = as_sampled(path, random_groups(4, 4))
    plain = step_and_gradient(learner(path), with_routes(groups, lambda routes: None))[1]
    live = step_and_gradient(learner(path), with_routes(groups, lambda routes: np.full_like(routes, -1)))[1]
    replayed = step_and_gradient(learner(path), groups)[1]
    recomputed = step_and_gradient(learner(path, learner={"activation_checkpointing": True}), groups)[1]
    assert all(plain[name].equal(live[name]) for name in plain)
    assert any(not plain[name].equal(replayed[name]) for name in plain)
    for name in replayed:
        torch.testing.assert_close(replayed[name], recomputed[name], rtol=1e-5, atol=1e-7)


def test_a_teacher_takes_experts_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncgrpo.learner.learner.refuse_other_tokens", lambda *paths: None)
    path, teacher = (MIXTURES["qwen3_moe"](tmp_path / str(seed), seed=seed) for seed in (0, 1))
    groups = as_sampled(path, random_groups(3, 2, answer=(3, 30)))
    algorithm = {"kl_coef": 1.0, "kl_kind": "k1+", "teacher": str(teacher)}
    sampled = [(group.prompt.token_ids, r.completion) for group in groups for r in group.rollouts]
    expected = np.concatenate([c.logprobs - plain_logprobs(teacher, prompt, c) for prompt, c in sampled]).mean()
    assert learner(path, algorithm=algorithm).step(groups, VERSION).kl_reference == pytest.approx(expected, abs=1e-4)
