"""What is added to the loss beside the surrogate: the KL to a reference model, and the entropy of the policy.

A KL penalty is, like a surrogate, a reported value and a detached factor of `∇log π`, so both go through the same line
of the learner; but a surrogate is maximised and a penalty minimised. Full KL and entropy depend on every logit: their
derivative is by the logits. All values are in nats.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms.aggregation import MAX_LOG_RATIO, upcast

KlKind = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl",
    "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+", "k3_reweighted",
]  # fmt: skip

MAX_LOW_VAR_KL = 10.0


class Penalty(NamedTuple):
    """A penalty at every token. Nothing here has a gradient."""

    value: Tensor
    """[T] the estimator itself, for reports."""
    loss_gradient: Tensor
    """[T] derivative of `value`, which is minimised, by log π. The loss to differentiate is
    `Σ w_t loss_gradient_t log π(y_t)`."""


class FullKl(NamedTuple):
    """A KL over the whole vocabulary. Nothing here has a gradient."""

    value: Tensor
    """[...] nats."""
    gradient: Tensor
    """[..., V] derivative of `value` by the policy's logits."""


@torch.no_grad()
def kl_penalty(
    policy_logprobs: Tensor, reference_logprobs: Tensor, *, kind: KlKind, log_ratio: Tensor | None = None
) -> Penalty:
    """Estimators of KL(policy ‖ reference) from one sampled token, with d = log π - log π_ref. Elementwise.

        k1, kl           d                  derivative 1, which is 0 in expectation: as a loss it only adds noise
        abs              |d|                derivative sign d
        k2, mse          d² / 2             derivative d, the right gradient
        k3               exp(-d) - 1 + d    derivative 1 - exp(-d); d is cut to ±20 in the exponential alone
        low_var_kl       k3 with d cut to ±20 and the value to at most 10, as in verl
        ...+             the value of any of these, with k2's derivative d
        k3_reweighted    r k3               derivative r d; log r is cut to ±20, and beyond that the derivative is 0

    Beyond either cut of `low_var_kl` the derivative is 0: a token that is very unlikely under the policy but not under
    the reference (d < -2.6) is no longer pulled back. `k3_reweighted` is for tokens that another policy sampled: with
    r = π/μ differentiated as well, the product is exactly the unbiased gradient.

    Args:
        policy_logprobs: [T] of the sampled tokens, nats.
        reference_logprobs: [T] the same under the frozen reference.
        log_ratio: [T] log r; for `k3_reweighted` only.
    Source:
        http://joschu.net/blog/kl-approx.html; cuts and "+": verl; reweighting: DeepSeek-V3.2, arXiv:2512.02556.
    """
    d = upcast(policy_logprobs) - upcast(reference_logprobs)
    if kind == "k3_reweighted":
        assert log_ratio is not None, "k3_reweighted needs log_ratio"
        x = upcast(log_ratio)
        ratio = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return Penalty(ratio * _estimate(d, "k3").value, (ratio * d).masked_fill(x.abs() > MAX_LOG_RATIO, 0.0))
    penalty = _estimate(d, kind.removesuffix("+"))
    return Penalty(penalty.value, d) if kind.endswith("+") else penalty


@torch.no_grad()
def full_kl(policy_logits: Tensor, reference_logits: Tensor) -> FullKl:
    """KL(policy ‖ reference) over the vocabulary, and its derivative.

        KL       = Σ_v p (log p - log q)           p, q: softmax of the logits over the last dimension
        gradient = p (log p - log q - KL)

    A logit of -inf under the policy (a token outside the support) takes no part.

    Args:
        policy_logits, reference_logits: [..., V].
    """
    log_p, log_q = upcast(policy_logits).log_softmax(-1), upcast(reference_logits).log_softmax(-1)
    p = log_p.exp()
    gap = torch.where(p > 0, log_p - log_q, 0.0)
    value = (p * gap).sum(-1)
    return FullKl(value, p * (gap - value.unsqueeze(-1)))


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax over the last dimension: `[..., V] -> [...]`, nats, differentiable.

    H = logsumexp(z) - Σ softmax(z) z
    """
    log_partition = logits.logsumexp(-1)
    return log_partition - (torch.exp(logits - log_partition.unsqueeze(-1)) * logits).sum(-1)


@torch.no_grad()
def entropy_gradient(logits: Tensor) -> Tensor:
    """Derivative of `entropy` by the logits, `-p (log p + H)`: [..., V] to [..., V], without keeping a graph."""
    log_p = upcast(logits).log_softmax(-1)
    p = log_p.exp()
    log_p = torch.where(p > 0, log_p, 0.0)
    return -p * (log_p - (p * log_p).sum(-1, keepdim=True))


def _estimate(d: Tensor, kind: str) -> Penalty:
    if kind in ("k1", "kl"):
        return Penalty(d, torch.ones_like(d))
    if kind == "abs":
        return Penalty(d.abs(), d.sign())
    if kind in ("k2", "mse"):
        return Penalty(d.square() / 2, d)
    bounded = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k3":
        return Penalty(torch.expm1(-bounded) + d, -torch.expm1(-bounded))
    assert kind == "low_var_kl", kind
    value = torch.expm1(-bounded) + bounded
    is_cut = value > MAX_LOW_VAR_KL  # so is it where d was
    return Penalty(value.clamp(max=MAX_LOW_VAR_KL), (-torch.expm1(-bounded)).masked_fill(is_cut, 0.0))
