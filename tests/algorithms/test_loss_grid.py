"""The whole loss, every surrogate with every aggregation and every correction, through a differentiable policy.

Ours is one line, `-Σ w weight keep coefficient log π`. Beside it stands each paper's objective in float64 with its
stop-gradients written out, differentiated by autograd; and its value, from scalar loops.
"""

import math
import random

import pytest
import torch
from torch import Tensor

from asyncgrpo.algorithms.aggregation import weighted_sum
from asyncgrpo.algorithms.corrections import Correction, combine, divergence, importance, m2po, opsm, veto
from asyncgrpo.algorithms.surrogates import SURROGATES
from tests.algorithms import oracle_losses as oracle
from tests.algorithms.batches import GROUPS, NUM_VOCAB, Batch, batch, logits_for, tensor
from tests.algorithms.test_aggregation import MAX_LENGTH, MODES, of_sequences

PARAMETERS = {
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_ratio": 3.0},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "dppo_tv": {"low_prob": 0.1, "high_prob": 0.15, "max_ratio": 1e4},
    "dppo_kl": {"low_nats": 0.05, "high_nats": 0.05, "max_ratio": None},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "gmpo": {"clip_low_nats": 0.4, "clip_high_nats": 0.4},
    "vespo": {"k_positive": 2.0, "lam_positive": 3.0, "k_negative": 3.0, "lam_negative": 2.0},
    "dro": {"beta": 0.1},
    "topr": {},
    "reinforce": {},
}

CHAIN = [
    ("importance", {"level": "token", "action": "truncate", "high_ratio": 2.0}),
    ("importance", {"level": "geometric", "action": "reject", "low_ratio": 0.5, "high_ratio": 3.0}),
    ("veto", {"low_ratio": 1e-4}),
]
CORRECTIONS = {
    "none": [],
    "token TIS": CHAIN[:1],
    "token clip": [("importance", {"level": "token", "action": "clip", "low_ratio": 0.5, "high_ratio": 2.0})],
    "IcePop": [("importance", {"level": "token", "action": "mask", "low_ratio": 0.5, "high_ratio": 5.0})],
    "sequence TIS": [("importance", {"level": "sequence", "action": "truncate", "high_ratio": 2.0})],
    "sequence MIS": [("importance", {"level": "sequence", "action": "mask", "high_ratio": 3.0})],
    "geometric reject": CHAIN[1:2],
    "k3 reject": [("divergence", {"estimator": "k3", "level": "sequence", "max_nats": 0.3})],
    "veto": CHAIN[2:],
    "opsm": [("opsm", {"max_nats": 0.1})],
    "m2po": [("m2po", {"max_mean_square": 0.04})],
    "chain": CHAIN,
}


def correct(log_rho: Tensor, advantages: Tensor, mask: Tensor, cu: Tensor, names: list) -> Correction:
    found = [Correction(mask.to(log_rho.dtype), mask)]
    for name, parameters in names:
        if name == "opsm":
            found.append(opsm(log_rho, advantages, mask, cu, **parameters))
        elif name == "m2po":
            found.append(m2po(log_rho, mask, **parameters))
        else:
            function = {"importance": importance, "veto": veto, "divergence": divergence}[name]
            found.append(function(log_rho, mask, cu, **parameters))
    return combine(found)


def oracle_correct(b: Batch, names: list) -> list[float]:
    """Weight times verdict of each token."""
    verdicts = [(float(m), m) for m in b.mask]
    for name, parameters in names:
        if name == "opsm":
            more = oracle.opsm(b.log_rho, b.advantages, b.mask, b.sequences, **parameters)
        elif name == "m2po":
            more = oracle.m2po(b.log_rho, b.mask, **parameters)
        else:
            more = getattr(oracle, name)(b.log_rho, b.mask, b.sequences, **parameters)
        verdicts = oracle.combine([verdicts, more])
    return [weight * keep for weight, keep in verdicts]


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def our_loss(
    name: str, b: Batch, logp: Tensor, weights: Tensor, names: list, chosen: list[int]
) -> tuple[Tensor, Tensor]:
    """The loss to differentiate and its value, of the sequences `chosen`, whose tokens `logp` has."""
    tokens = [t for i in chosen for t in b.sequences[i]]
    anchor, behaviour, advantages = (tensor(v, logp.dtype)[tokens] for v in (b.anchor, b.behaviour, b.advantages))
    mask, cu = torch.tensor(b.mask)[tokens], torch.tensor([0, *(len(b.sequences[i]) for i in chosen)]).cumsum(0)
    surrogate = SURROGATES[name](logp, anchor, advantages, mask, cu, **PARAMETERS[name])
    correction = correct(anchor - behaviour, advantages, mask, cu, names)
    scale = torch.where(correction.keep, correction.weight, 0.0)
    return weighted_sum(-scale * surrogate.objective_gradient * logp, weights), weighted_sum(
        -scale * surrogate.value, weights
    )


def objective(name: str, logp: Tensor, anchor: Tensor, a: Tensor) -> Tensor:
    """[n] of the trained tokens of one sequence, as in the paper; what it treats as constant is detached."""
    p = PARAMETERS[name]
    x = logp - anchor
    r = x.clamp(-20, 20).exp()
    if name == "ppo_clip":
        j = torch.minimum(r * a, r.clamp(1 - p["clip_low"], 1 + p["clip_high"]) * a)
        return torch.where(a < 0, torch.maximum(j, p["dual_ratio"] * a), j)
    if name == "gspo":
        s = (x.mean().detach() + logp - logp.detach()).clamp(max=10).exp()
        return torch.minimum(s * a, s.clamp(1 - p["clip_low"], 1 + p["clip_high"]) * a)
    if name == "gmpo":
        bounded = torch.where(a > 0, x.clamp(-20, p["clip_high_nats"]), x.clamp(-p["clip_low_nats"], 20))
        return (bounded.mean().detach() + bounded - bounded.detach()).exp() * a
    if name == "sapo":
        tau = torch.where(a > 0, tensor([p["tau_positive"]]), tensor([p["tau_negative"]]))
        return 4 / tau * torch.sigmoid(tau * (r - 1)) * a
    if name == "dro":
        return a * logp - p["beta"] / 2 * x.square()
    with torch.no_grad():
        if name == "cispo":
            c = r.clamp(1 - p["clip_low"], 1 + p["clip_high"])
        elif name == "topr":
            c = torch.where(a > 0, 1.0, r.clamp(0, 1))
        elif name == "vespo":
            w = x.clamp(-20, 20).sum().clamp(math.log(1e-8), 20).exp()
            positive, negative = (
                w ** p[f"k_{s}"] * torch.exp(p[f"lam_{s}"] * (1 - w)) for s in ("positive", "negative")
            )
            c = torch.where(a >= 0, positive, negative)
        elif name.startswith("dppo"):
            new, old = logp.exp(), anchor.exp()
            far, unit = (new - old).abs(), "prob"
            if name == "dppo_kl":
                far, unit = old * (anchor - logp) + (1 - old) * torch.log((1 - old) / (1 - new)), "nats"
            rising, falling = (new > old) & (far > p[f"high_{unit}"]), (new < old) & (far > p[f"low_{unit}"])
            outside = torch.where(a > 0, rising, falling)
            c = torch.where(outside, 0.0, r.clamp(max=math.inf if p["max_ratio"] is None else p["max_ratio"]))
        else:
            c = torch.ones_like(x)
    return c * a * logp


def objectives(name: str, b: Batch, logits: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each sequence: where its trained tokens are, and their objectives, differentiable by the logits."""
    logp = logprobs(logits, tokens)
    pieces = []
    for s in b.sequences:
        t = torch.tensor(oracle.trained(s, b.mask), dtype=torch.long)
        if t.numel():
            pieces.append((t, objective(name, logp[t], tensor(b.anchor)[t], tensor(b.advantages)[t])))
    return pieces


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", PARAMETERS)
def test_value_and_gradient_of_every_combination(name, correction):
    b = batch(11)
    everyone = list(range(len(b.sequences)))
    logits, tokens = logits_for(b)
    logits.requires_grad_()
    single = logits.detach().float().requires_grad_()
    points = oracle.surrogate(name, b.policy, b.anchor, b.advantages, b.mask, b.sequences, **PARAMETERS[name])
    scale = oracle_correct(b, CORRECTIONS[correction])
    pieces = objectives(name, b, logits, tokens)
    for mode in MODES:
        w = oracle.token_weights(mode, b.mask, b.sequences, GROUPS, num_sequences=8, max_length=MAX_LENGTH)
        factor = tensor([a * c for a, c in zip(w, scale, strict=True)])
        loss = -sum((factor[t] * j).sum() for t, j in pieces)
        (expected,) = torch.autograd.grad(loss, logits, retain_graph=True)
        terms = [-f * v for f, (_, v, _) in zip(factor.tolist(), points, strict=True)]
        assert expected.norm() > 0
        for z, tolerance in ((logits, 1e-9), (single, 1e-5)):
            ours, ours_value = our_loss(
                name, b, logprobs(z, tokens), of_sequences(b, mode, everyone), CORRECTIONS[correction], everyone
            )
            (gradient,) = torch.autograd.grad(ours, z)
            assert (gradient.double() - expected).norm() <= tolerance * expected.norm(), mode
            assert abs(ours_value.item() - math.fsum(terms)) <= tolerance * math.fsum(map(abs, terms)), mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_gradient_does_not_depend_on_how_a_step_is_split_over_ranks_and_micro_batches(name, mode):
    b, rng = batch(12), random.Random(3)
    base, tokens = logits_for(b)
    features = torch.randn(len(tokens), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = torch.zeros(3, NUM_VOCAB, dtype=torch.float64, requires_grad=True)

    def gradient(chosen: list[int]) -> tuple[Tensor, Tensor]:
        t = [t for i in chosen for t in b.sequences[i]]
        logp = logprobs(base[t] + features[t] @ parameters, tokens[t])
        loss, value = our_loss(name, b, logp, of_sequences(b, mode, chosen), CHAIN, chosen)
        return torch.autograd.grad(loss, parameters)[0], value

    whole, value = gradient(list(range(len(b.sequences))))
    for num_ranks in (1, 2, 3):
        order = rng.sample(range(len(b.sequences)), len(b.sequences))
        ranks = [order[rank::num_ranks] for rank in range(num_ranks)]
        cuts = [rng.randrange(len(rank) + 1) for rank in ranks]
        micro_batches = [part for rank, cut in zip(ranks, cuts, strict=True) for part in (rank[:cut], rank[cut:])]
        parts = [gradient(part) for part in micro_batches]
        assert (sum(g for g, _ in parts) - whole).abs().max() < 1e-12 * max(whole.abs().max(), 1.0)
        assert sum(v for _, v in parts).item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize("name", PARAMETERS)
def test_nan_of_the_policy_itself_at_masked_positions_reaches_no_gradient(name):
    b = batch(11)
    mask, everyone = torch.tensor(b.mask), list(range(len(b.sequences)))
    gradients = []
    for junk in (0.0, math.nan, -math.inf):
        logp = tensor(b.policy).masked_fill(~mask, junk).requires_grad_()
        loss, _ = our_loss(name, b, logp, of_sequences(b, "token-mean", everyone), CHAIN, everyone)
        gradients += torch.autograd.grad(loss, logp)
    assert gradients[0].equal(gradients[1]) and gradients[0].equal(gradients[2])
    assert (gradients[0][~mask] == 0).all() and gradients[0].isfinite().all()
