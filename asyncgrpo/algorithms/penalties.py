"""What is added to the loss beside the surrogate: the KL to a reference model, and the entropy of the policy.

A KL penalty is, like a surrogate, a reported value and a detached coefficient before `∇log π`, so both go through the
same line of the learner. Entropy depends on every logit and keeps its own gradient. All values are in nats.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

KlKind = Literal["k1", "k2", "low_var_kl"]

MAX_LOG_RATIO = 20.0
MAX_LOW_VAR_KL = 10.0


class Penalty(NamedTuple):
    """A penalty at every token. Nothing here has a gradient."""

    value: Tensor
    """[T] the estimator itself, for reports."""
    coefficient: Tensor
    """[T] derivative of `value` by log π. The loss to differentiate is `Σ w_t coefficient_t log π(y_t)`."""


@torch.no_grad()
def kl_penalty(policy_logprobs: Tensor, reference_logprobs: Tensor, *, kind: KlKind) -> Penalty:
    """Estimators of KL(policy ‖ reference) from one sampled token, with d = log π - log π_ref.

        k1          d                   derivative 1, which is 0 in expectation: as a loss it only adds noise
        k2          d² / 2              derivative d, the right gradient
        low_var_kl  exp(-d) - 1 + d     derivative 1 - exp(-d); "k3", never negative

    `low_var_kl` is cut as in verl: d to ±20 and the value to at most 10. A token beyond either has coefficient 0, so
    one that is very unlikely under the policy but not under the reference (d < -2.6) is no longer pulled back.

    Args:
        policy_logprobs: [T] of the sampled tokens, nats.
        reference_logprobs: [T] the same under the frozen reference.
    Source:
        http://joschu.net/blog/kl-approx.html; cuts: verl `kl_penalty`.
    """
    d = policy_logprobs - reference_logprobs
    if kind == "k1":
        return Penalty(d, torch.ones_like(d))
    if kind == "k2":
        return Penalty(d.square() / 2, d)
    assert kind == "low_var_kl", kind
    bounded = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    value = torch.exp(-bounded) - 1 + bounded
    is_cut = (bounded != d) | (value > MAX_LOW_VAR_KL)
    return Penalty(value.clamp(max=MAX_LOW_VAR_KL), (1 - torch.exp(-bounded)).masked_fill(is_cut, 0.0))


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the softmax over the last dimension: `[..., V] -> [...]`, nats, differentiable.

    H = logsumexp(z) - Σ softmax(z) z
    """
    log_partition = logits.logsumexp(-1)
    return log_partition - (torch.exp(logits - log_partition.unsqueeze(-1)) * logits).sum(-1)
