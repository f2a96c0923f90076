"""Mixtures of experts: what is published of their routers. Gradients: `test_objective`; what is refused: `test_model`."""

import torch
from safetensors.torch import load_file

from tests.learner.helpers import VERSION, learner, random_groups, weights
from tests.models import make_tiny_deepseek_v3

GROUPS = random_groups(5, 4)
BIAS = "e_score_correction_bias"


def test_the_bias_that_chooses_experts_is_not_rounded(tmp_path):
    path = make_tiny_deepseek_v3(tmp_path)
    ours, file = learner(path, model={"dtype": "bfloat16"}), load_file(path / "model.safetensors")
    ours.step(GROUPS, VERSION)
    published = weights(ours)
    assert {n: t.dtype for n, t in published.items() if t.dtype != torch.bfloat16} == {
        n: torch.float32 for n in file if n.endswith(BIAS)
    }
    assert all(published[n].equal(t) for n, t in file.items() if n.endswith(BIAS)), "training leaves it as it is"
