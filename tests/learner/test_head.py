"""The head with the loss inside is autograd of the plain formula, one tile of logits at a time."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncgrpo.learner.head import Kept, LossGradients, Reference, TokenScores, fused_loss, score
from tests.learner.helpers import cut_head

WIDTH, VOCAB = 12, 37
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


class Objective:
    """LossGradients that depend on the scores, as a real objective's do, and a record of what was asked."""

    def __init__(self, *, entropy: bool, full_kl: bool) -> None:
        self.entropy, self.full_kl = entropy, full_kl
        self.tiles: list[slice] = []

    def __call__(self, tile: slice, scores: TokenScores) -> LossGradients:
        self.tiles.append(tile)
        assert not any(x is not None and x.requires_grad for x in scores)
        assert (scores.reference_kl is not None) == self.full_kl
        assert all(x is None or len(x) == tile.stop - tile.start for x in scores)
        return LossGradients(
            logprobs=(2 * scores.logprobs).cos(),
            entropy=0.3 * scores.entropy.sin() if self.entropy else None,
            reference_kl=scores.reference_kl.cos() if self.full_kl else None,
        )

    def value(self, logprobs: Tensor, entropy: Tensor, kl: Tensor | None) -> Tensor:
        """The loss that has these gradients."""
        loss = (2 * logprobs).sin().sum() / 2
        if self.entropy:
            loss = loss - 0.3 * entropy.cos().sum()
        return loss if kl is None else loss + kl.sin().sum()


def inputs(dtype: torch.dtype, *, tokens: int = 11, vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor, Reference]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    hidden, weight = draw(tokens, WIDTH).requires_grad_(), draw(vocab, WIDTH).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return hidden, weight, targets, Reference(draw(tokens, WIDTH), draw(vocab, WIDTH))


def some_kept(targets: Tensor) -> Kept:
    """The target and others, of some tokens; the whole vocabulary, of the others."""
    generator = torch.Generator().manual_seed(1)
    counts, ids = [1, 3, 5, 0, 2, 9, 4, VOCAB, 0, 1, 7], []
    for count, target in zip(counts, targets, strict=True):
        others = torch.randperm(VOCAB, generator=generator)
        ids.append(torch.cat([target[None], others[others != target]])[:count])
    return Kept(torch.cat(ids), torch.tensor(counts).cumsum(0))


def plain(hidden, weight, targets, objective, *, temperature, reference, kept=None) -> tuple[Tensor, TokenScores]:
    """The formula, token by token over the vocabulary that it has, for autograd."""
    ids = [torch.arange(VOCAB)] * len(targets)
    if kept is not None:
        ids = [some if len(some) else torch.arange(VOCAB) for some in kept.ids.tensor_split(kept.ends[:-1])]
    scores = []
    for i, columns in enumerate(ids):
        log_p = (hidden[i] @ weight[columns].t() / temperature).log_softmax(-1)
        scores.append([log_p[columns == targets[i]].sum(), -(log_p.exp() * log_p).sum()])
        if reference is not None:
            log_q = (reference.hidden[i] @ reference.weight[columns].t() / temperature).log_softmax(-1)
            scores[-1].append((log_p.exp() * (log_p - log_q)).sum())
    found = TokenScores(*(torch.stack(column) for column in zip(*scores, strict=True)))
    return objective.value(*found), found


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    assert (found.double() - expected).norm() <= TOLERANCE[dtype] * max(expected.norm().item(), 1e-3)


@pytest.mark.parametrize("tile", [1, 3, 10, 11, 100])
@pytest.mark.parametrize("full_kl", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_kept", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients_are_those_of_the_plain_formula(
    monkeypatch, dtype, has_kept, temperature, entropy, full_kl, tile
):
    cut_head(monkeypatch, tile * VOCAB + VOCAB // 2)
    objective = Objective(entropy=entropy, full_kl=full_kl)
    hidden, weight, targets, reference = inputs(dtype)
    reference, kept = reference if full_kl else None, some_kept(targets) if has_kept else None
    options = {"temperature": temperature, "reference": reference, "kept": kept}
    root, scores = fused_loss(hidden, weight, targets, objective, **options)
    root.backward()
    assert root.item() == 0 and not any(x is not None and x.requires_grad for x in scores)
    assert [n for tile in objective.tiles for n in range(tile.start, tile.stop)] == list(range(11)), "each token once"
    assert max(tile.stop - tile.start for tile in objective.tiles) == min(tile, 11)

    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    if reference is not None:
        options["reference"] = Reference(*(x.double() for x in reference))
    loss, expected = plain(*exact, targets, objective, **options)
    loss.backward()
    for found, value in zip(scores, expected, strict=True):
        assert (found is None) == (value is None)
        if value is not None:
            assert_near(found, value.detach(), dtype)
    assert_near(hidden.grad, exact[0].grad, dtype)
    assert_near(weight.grad, exact[1].grad, dtype)
    without_loss = score(hidden, weight, targets, temperature=temperature, kept=kept)
    torch.testing.assert_close(without_loss[:2], scores[:2])
    assert not without_loss.logprobs.requires_grad and without_loss.reference_kl is None


def test_a_root_may_be_multiplied_and_added_to_others_and_a_head_be_frozen():
    objective = Objective(entropy=True, full_kl=False)
    hidden, weight, targets, _ = inputs(torch.float64)
    root, _ = fused_loss(hidden, weight, targets, objective, temperature=1.0)
    expected = torch.autograd.grad(root, (hidden, weight))
    frozen, _ = fused_loss(hidden, weight.detach(), targets, objective, temperature=1.0)
    torch.testing.assert_close(torch.autograd.grad(frozen, hidden)[0], expected[0])
    other, _ = fused_loss(hidden, weight, targets, objective, temperature=1.0)
    found = torch.autograd.grad(-3 * other + hidden.sum(), (hidden, weight))
    torch.testing.assert_close(found, (-3 * expected[0] + 1, -3 * expected[1]))


@pytest.mark.parametrize("full_kl", [False, True])
def test_no_tokens_are_no_gradient(full_kl):
    hidden, weight, targets, reference = inputs(torch.float32, tokens=0)
    objective = Objective(entropy=True, full_kl=full_kl)
    options = {"temperature": 1.0, "reference": reference if full_kl else None}
    root, scores = fused_loss(hidden, weight, targets, objective, **options)
    root.backward()
    assert scores.logprobs.shape == scores.entropy.shape == (0,) and hidden.grad.shape == (0, WIDTH)
    assert (weight.grad == 0).all()
    assert score(hidden, weight, targets, temperature=1.0).logprobs.shape == (0,)


def test_statistics_of_bfloat16_weights_are_float32():
    hidden, weight, targets, _ = inputs(torch.bfloat16)
    gradients = torch.linspace(-1, 1, 11)
    root, scores = fused_loss(
        hidden, weight, targets, lambda tile, _: LossGradients(gradients[tile], 0.3 * gradients[tile]), temperature=2.0
    )
    root.backward()
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_p = (exact[0] @ exact[1].t() / 2).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    (gradients * (log_p.gather(-1, targets[:, None]).squeeze(-1) + 0.3 * entropy)).sum().backward()
    for found, expected in ((hidden.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert (found.double() - expected).norm() < 0.02 * expected.norm()


def test_a_weight_gradient_is_summed_over_tiles_before_it_is_rounded(monkeypatch):
    """In bfloat16, 300 tiles of equal gradients would stop adding up at 256."""
    cut_head(monkeypatch, 2)
    hidden = torch.ones(300, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)

    def objective(tile: slice, scores: TokenScores) -> LossGradients:
        return LossGradients(torch.full_like(scores.logprobs, 2.0))

    root, _ = fused_loss(hidden, weight, torch.zeros(300, dtype=torch.int64), objective, temperature=1.0)
    root.backward()
    assert weight.grad.flatten().tolist() == [300.0, -300.0]


def test_certain_and_impossible_tokens_are_finite():
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[300.0], [-300.0], [0.0]], requires_grad=True)
    objective = Objective(entropy=True, full_kl=True)
    reference = Reference(-hidden.detach(), weight.detach())
    root, scores = fused_loss(hidden, weight, torch.tensor([0, 1]), objective, temperature=1.0, reference=reference)
    root.backward()
    assert scores.logprobs.tolist() == pytest.approx([0.0, -600.0])
    assert scores.entropy.tolist() == [0.0, 0.0] and scores.reference_kl.tolist() == pytest.approx([600.0, 600.0])
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


class Operations(TorchDispatchMode):
    """Remembers the largest tensor that any operation made, and how often a tensor of a shape was added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.sums = 0, Counter[torch.Size]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.add_.Tensor, torch.ops.aten.addmm_.default):
            self.sums[args[0].shape] += 1
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor):
                self.largest = max(self.largest, one.numel())
        return result


@pytest.mark.parametrize(("tokens", "vocab"), [(4096, 32_768), (64, 151_936)])
def test_logits_of_all_tokens_never_exist(monkeypatch, tokens, vocab):
    limit = 2**21
    cut_head(monkeypatch, limit // 4, tile=limit)
    width = 4
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    with Operations() as seen:
        score(hidden[:256], weight, targets[:256], temperature=0.9)
        full_kl = tokens < 100  # all there is, where there is time for it
        reference = Reference(hidden.detach(), weight.detach()) if full_kl else None
        objective = Objective(entropy=full_kl, full_kl=full_kl)
        fused_loss(hidden, weight, targets, objective, temperature=0.9, reference=reference)[0].backward()
    assert vocab * width < limit < tokens * vocab
    assert limit / 2 < seen.largest <= limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_of_a_large_head_is_read_and_written_once_for_many_tokens(dtype):
    """Each time costs as much as the products of 20 tokens: with a large vocabulary, more than they do."""
    hidden, weight, targets, _ = inputs(dtype, tokens=512, vocab=40_000)
    with Operations() as seen:
        fused_loss(hidden, weight, targets, Objective(entropy=False, full_kl=False), temperature=1.0)
    assert seen.sums[weight.shape] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "entropy", "tolerance"), [(torch.float32, True, 1e-6), (torch.bfloat16, False, 2e-3)], ids=str
)
def test_compiled_gradients_are_the_same(monkeypatch, cache_home, dtype, entropy, tolerance):
    """Tiles of three tokens, so that programs run for whole tiles, and the last one has two."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_home / "asyncgrpo" / "compiled"))
    cut_head(monkeypatch, VOCAB, tile=3 * VOCAB)
    found: list[list[Tensor]] = []
    for is_compiled in (False, True):
        objective = Objective(entropy=entropy, full_kl=False)
        hidden, weight, targets, _ = inputs(dtype)
        root, scores = fused_loss(hidden, weight, targets, objective, temperature=0.7, is_compiled=is_compiled)
        root.backward()
        found.append([hidden.grad, weight.grad, scores.logprobs, scores.entropy])
        assert len(objective.tiles) == (4 if is_compiled else 11)
    for eager, compiled in zip(*found, strict=True):
        assert (compiled.double() - eager.double()).norm() < tolerance * eager.norm()
        assert compiled.norm().item() == pytest.approx(eager.norm().item(), rel=tolerance)
