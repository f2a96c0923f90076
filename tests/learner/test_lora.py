"""Low-rank adapters: the base stays, engines and files get merged weights, the reference is the base."""

import pytest
import torch

from asyncgrpo.errors import ConfigError
from asyncgrpo.learner.learner import Learner
from tests.learner.helpers import VERSION, config, load, random_groups, step_and_gradient, weights, with_true_logprobs
from tests.models import make_tiny_qwen3

pytest.importorskip("peft")

GROUPS = random_groups(4, 4, seed=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


def learner(path, *, rank=4, targets=(), **sections) -> Learner:
    model = {"path": str(path), "dtype": "float32", "lora": {"rank": rank, "targets": targets}}
    return Learner(config(path, **{"model": model, "learner": {"lr": 1e-2}} | sections), rank=0, world=1, device="cpu")


def test_published_weights_are_merged_under_the_names_of_the_base(path, tmp_path):
    ours = learner(path)
    base = load(path).state_dict()
    assert {info.name for info in ours.layout()} == base.keys()
    assert all(base[name].equal(tensor) for name, tensor in weights(ours).items()), "a new adapter adds nothing"
    for _ in range(2):
        ours.step(GROUPS, VERSION)
    merged = weights(ours)
    changed = {name for name, tensor in merged.items() if not tensor.equal(base[name])}
    assert changed == {name for name in base if "_proj" in name}
    ours.export(str(tmp_path))
    report = ours.step(with_true_logprobs(tmp_path, GROUPS), VERSION)
    assert report.logprob_gap_max < 1e-4, "merged weights and the forward pass through adapters are one model"


def test_only_adapters_are_trained_and_only_where_asked(path):
    ours = learner(path, targets=("q_proj",))
    assert sum(p.numel() for p in ours.parameters) == 2 * (64 * 4 + 4 * 64)
    ours.step(GROUPS, VERSION)
    base = load(path).state_dict()
    assert {n for n, t in weights(ours).items() if not t.equal(base[n])} == {n for n in base if "q_proj" in n}


def test_the_reference_is_the_model_without_its_adapters(path):
    ours = learner(path, algorithm={"kl_coef": 0.1})
    assert ours.step(GROUPS, VERSION).kl_reference == pytest.approx(0.0, abs=1e-9)
    assert ours.step(GROUPS, VERSION).kl_reference > 1e-4


def test_the_gradient_is_that_of_the_merged_weights(path):
    """For W + s B A, the gradient of B is s (dL/dW) Aᵀ."""
    ours, full = learner(path, targets=("down_proj",)), learner(path, rank=0)
    (a,) = (p.full_tensor().clone() for n, p in ours.model.named_parameters() if "layers.1" in n and "lora_A" in n)
    (_, of_adapters), (_, of_weights) = (step_and_gradient(one, GROUPS) for one in (ours, full))
    expected = (16.0 / 4) * of_weights["model.layers.1.mlp.down_proj.weight"] @ a.T
    found = of_adapters["model.layers.1.mlp.down_proj.lora_B.default.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_holds_the_adapters_and_goes_on_bit_for_bit(path, tmp_path):
    first, resumed = learner(path), learner(path)
    first.step(GROUPS, VERSION)
    first.save(str(tmp_path / "checkpoint"))
    resumed.load(str(tmp_path / "checkpoint"))
    assert first.step(GROUPS, VERSION).loss == resumed.step(GROUPS, VERSION).loss
    expected = weights(first)
    assert all(expected[name].equal(tensor) for name, tensor in weights(resumed).items())
    base_bytes = sum(p.numel() * 4 for p in load(path).parameters())
    assert sum(file.stat().st_size for file in (tmp_path / "checkpoint").iterdir()) < base_bytes


def gathered_bytes(ours: Learner) -> int:
    """Memory of the gathered weights of the decoder layers."""
    layers = ours.model.language_model.model.layers
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers]
    gathered = [p._unsharded_param for group in groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
    return sum(parameter.untyped_storage().nbytes() for parameter in gathered)


def test_a_base_is_not_kept_twice_between_microbatches(path, monkeypatch):
    """One rank keeps gathered weights only where all are trained: a base is as wide as what is gathered of it."""

    def trained(rank: int, **attributes) -> tuple[int, dict[str, torch.Tensor]]:
        ours = learner(path, rank=rank, learner={"lr": 1e-2, "tokens_per_microbatch": 40})
        kept, loss = [], ours._loss
        monkeypatch.setattr(ours, "_loss", lambda *given: kept.append(gathered_bytes(ours)) or loss(*given))
        for name, value in attributes.items():
            monkeypatch.setattr(ours, name, value)
        ours.step(GROUPS, VERSION)
        assert len(kept) > 2, "micro-batches"
        return max(kept), weights(ours)

    (adapted, ours), (whole, _), (_, as_before) = trained(4), trained(0), trained(4, _keeps_gathered=True)
    assert adapted == 0 < whole
    assert all(as_before[name].equal(tensor) for name, tensor in ours.items()), "it changes no number"


def test_targets_that_fit_nothing_are_an_error(path):
    with pytest.raises(ConfigError, match="no_such_layer"):
        learner(path, targets=("no_such_layer",))
