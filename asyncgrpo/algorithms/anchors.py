"""The policy that a trust region is drawn around, where it is neither recomputed nor the behaviour policy."""

import torch
from torch import Tensor

from asyncgrpo.algorithms.precision import upcast


@torch.no_grad()
def interpolated(
    policy_logprobs: Tensor, behaviour_logprobs: Tensor, token_versions: Tensor, version: int | Tensor
) -> Tensor:
    """The proximal policy's log-probs without its forward pass, on the line between two that are known.

        log prox = log μ + a (log π - log μ)
        a        = clip((v_prox - v_t) / (v - v_t), 0, 1),    v_prox = v - 1

    The older the token, the nearer its anchor is to the present policy; lag 1 gives μ itself, and so does lag 0, where
    the formula is 0/0 (as in AReaL). Per token, so a sequence may mix versions.

    Args:
        policy_logprobs: [T] of the sampled tokens under the learner's present weights, nats.
        behaviour_logprobs: [T] as sampled.
        token_versions: [T] integers, the weights that sampled each token. Negative (a prompt, an observation): a = 0.
        version: the learner's.
    Returns:
        [T] float32 (float64 of float64), no gradient. Elementwise.
    Source:
        A-3PO, arXiv:2512.06547; AReaL's `loglinear`.
    """
    policy, behaviour = upcast(policy_logprobs), upcast(behaviour_logprobs)
    lag = (version - token_versions).clamp(min=1).to(torch.float64)  # a lag of 0 counts as 1: both give a = 0
    share = torch.where(token_versions >= 0, (lag - 1) / lag, 0.0).to(policy.dtype)
    return behaviour + share * (policy - behaviour)
