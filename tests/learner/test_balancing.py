"""Experts are balanced by a loss or by biases, from the load of the update before; what is published of their routers."""

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from asyncgrpo.learner.routing import Routers
from tests.learner.helpers import (
    VERSION,
    assert_same_gradient,
    learner,
    load,
    random_groups,
    step_and_gradient,
    weights,
    with_true_logprobs,
)
from tests.models import make_tiny_deepseek_v3, make_tiny_qwen3_moe

COEF, RATE, EXPERTS = 0.5, 0.01, 8
GROUPS = [group for group in random_groups(8, 4) if len({r.score.value for r in group.rollouts}) > 1]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_the_loss_is_that_of_transformers_over_the_trained_tokens(tmp_path):
    """With weights that do not move, the update before has the same load."""
    path = make_tiny_qwen3_moe(tmp_path, layers=1, experts=EXPERTS)
    for tokens in (4096, 40):
        ours = learner(
            path, algorithm={"router_aux_coef": COEF}, learner={"lr": 1e-30, "tokens_per_microbatch": tokens}
        )
        (_, plain), (report, found) = (step_and_gradient(ours, GROUPS) for _ in range(2))
        model, logits = load(path), []
        for group in GROUPS:
            for rollout in group.rollouts:
                ids = [*group.prompt.token_ids, *rollout.completion.token_ids]
                (one,) = model(torch.tensor([ids]), output_router_logits=True).router_logits
                logits.append(one[len(group.prompt.token_ids) - 1 : -1])
        (COEF * load_balancing_loss_func((torch.cat(logits),), EXPERTS, 2)).backward()
        added = {name: found[name] - plain[name] for name in found}
        expected = {
            name: torch.zeros_like(added[name]) if p.grad is None else p.grad for name, p in model.named_parameters()
        }
        assert expected["model.layers.0.mlp.gate.weight"].norm() > 1e-3
        assert_same_gradient(added, expected, 2e-4)  # of a difference of two gradients that are larger
        chosen = torch.cat(logits).topk(2).indices.flatten().bincount(minlength=EXPERTS)
        assert report.diagnostics["expert_load"] == pytest.approx(float(chosen.max() / chosen.double().mean()))


@pytest.mark.parametrize(
    ("asks", "given", "is_balanced"), [(True, None, True), (True, 0.0, False), (False, None, False)]
)
def test_the_model_asks_and_the_run_decides(tmp_path, asks, given, is_balanced):
    path = make_tiny_qwen3_moe(tmp_path, layers=1, experts=EXPERTS)
    settings = load(path).config
    settings.output_router_logits, settings.router_aux_loss_coef = asks, COEF
    settings.save_pretrained(path)
    ours = learner(path, algorithm={"router_aux_coef": given}, learner={"lr": 1e-30})
    (_, before), (_, after) = (step_and_gradient(ours, GROUPS) for _ in range(2))
    assert before["lm_head.weight"].equal(after["lm_head.weight"])
    assert before["model.layers.0.mlp.gate.weight"].equal(after["model.layers.0.mlp.gate.weight"]) != is_balanced


def test_a_bias_moves_towards_an_equal_load_and_is_published(tmp_path):
    path = make_tiny_deepseek_v3(tmp_path, experts=EXPERTS)
    ours = learner(path, algorithm={"router_bias_rate": RATE}, learner={"lr": 1e-30})
    loads, end = [], Routers.end_update
    ours.model.routers.end_update = lambda is_made: loads.append(end(ours.model.routers, is_made=is_made)) or loads[-1]
    before = weights(ours)[BIAS]
    ours.step(GROUPS, VERSION)
    moved, ((load_of_layer,),) = weights(ours)[BIAS] - before, loads
    torch.testing.assert_close(moved, RATE * (load_of_layer.double().mean() - load_of_layer).sign().float())
    assert len(moved.round(decimals=4).unique()) > 1
    # Engines get the biases, so scores at lag 0 are those of an engine that has loaded them.
    ours.export(str(tmp_path / "exported"))
    assert ours.step(with_true_logprobs(tmp_path / "exported", GROUPS), VERSION).logprob_gap_max < 1e-4
    ours.save(str(tmp_path / "checkpoint"))
    resumed = learner(path)  # at a rate of 0, as DeepSeek-V3 ended its training
    resumed.load(str(tmp_path / "checkpoint"))
    assert weights(resumed)[BIAS].equal(weights(ours)[BIAS])


def test_the_bias_that_chooses_experts_is_not_rounded(tmp_path):
    path = make_tiny_deepseek_v3(tmp_path)
    ours, file = learner(path, model={"dtype": "bfloat16"}), load_file(path / "model.safetensors")
    ours.step(GROUPS, VERSION)
    published, biases = weights(ours), {name for name in file if name.endswith("e_score_correction_bias")}
    assert {
        name: tensor.dtype for name, tensor in published.items() if tensor.dtype != torch.bfloat16
    } == dict.fromkeys(biases, torch.float32)
    assert all(published[name].equal(file[name]) for name in biases), "training leaves it as it is"
