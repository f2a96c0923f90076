"""KL penalties to a reference model, estimated from sampled tokens; nats.

Like a surrogate, a penalty is a reported value and a detached coefficient of `∇log π`, so both share one line of the learner.
A surrogate is maximised and a penalty minimised. Full KL and entropy depend on every logit and are computed in
`learner/head.py`.
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
    """A penalty at every token, without gradient."""

    value: Tensor
    """[T] value of the estimator, for reports."""
    loss_gradient: Tensor
    """[T] derivative of the minimised `value` by log π. The loss to differentiate is
    `Σ w_t loss_gradient_t log π(y_t)`."""


@torch.no_grad()
def kl_penalty(
    policy_logprobs: Tensor, reference_logprobs: Tensor, *, kind: KlKind, log_ratio: Tensor | None = None
) -> Penalty:
    """Estimate KL(policy ‖ reference) from one sampled token, with d = log π - log π_ref. Elementwise.

        k1, kl           d                  derivative 1, whose gradient is 0 in expectation: as a loss it is only noise
        abs              |d|                derivative sign d
        k2, mse          d² / 2             derivative d, the unbiased gradient
        k3               exp(-d) - 1 + d    derivative 1 - exp(-d); d is cut to ±20 in the exponential alone
        low_var_kl       k3 with d cut to ±20 and the value to at most 10, as in verl
        ...+             the value of one of these, with k2's derivative d
        k3_reweighted    r k3               derivative r d; log r is cut to ±20, and beyond that the derivative is 0

    Beyond either cut of `low_var_kl` the derivative is 0, so a token that is very unlikely under the policy but not under the
    reference (d < -2.6) is not pulled back. `k3_reweighted` is for tokens sampled by another policy: with r = π/μ
    differentiated too, the product is exactly the unbiased gradient.

    Args:
        policy_logprobs: [T] of the sampled tokens, nats.
        reference_logprobs: [T] log-probs under the frozen reference.
        log_ratio: [T] log r, for `k3_reweighted` only.
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
