"""Off-policy corrections: weights and rejections of tokens that older weights or another kernel sampled.

Every correction is a function of `log ρ`, the log-prob of a token under the target policy (proximal or current) minus the
log-prob with which it was sampled. Bounds are on ρ. A correction leaves the mask unchanged and returns a weight and a
verdict per token; `combine` merges several.

    log_rho       [T] log π_num - log μ of the sampled tokens, nats
    mask          [T] bool, True on tokens to train. Values at other positions, even NaN, are ignored
    cu_seqlens    [S+1] start of each sequence; None is allowed at level "token", which is elementwise

Only sequence weights without truncation are unbiased. Token weights, geometric means and bounds trade bias for variance.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms.aggregation import MAX_LOG_RATIO, Level, at_level, sequence_of_token, trained_sum, upcast

# -- the anchor between two policies -----------------------------------------------------------------------------------


@torch.no_grad()
def interpolated(
    policy_logprobs: Tensor, behaviour_logprobs: Tensor, token_versions: Tensor, version: int | Tensor
) -> Tensor:
    """Approximate the proximal policy's log-probs without its forward pass, by interpolation.

        log prox = log μ + a (log π - log μ)
        a        = clip((v_prox - v_t) / (v - v_t), 0, 1),    v_prox = v - 1

    The older the token, the closer its anchor to the current policy. Lag 1 gives μ, and so does lag 0, where the formula is
    0/0 (as in AReaL). Elementwise, so a sequence may mix versions.

    Args:
        policy_logprobs: [T] of the sampled tokens under the learner's current weights, nats.
        behaviour_logprobs: [T] as sampled.
        token_versions: [T] integers, version that sampled each token. Negative (a prompt, an observation): a = 0.
        version: of the learner.
    Returns:
        [T] float32 (float64 for float64), without gradient.
    Source:
        A-3PO, arXiv:2512.06547; AReaL's `loglinear`.
    """
    policy, behaviour = upcast(policy_logprobs), upcast(behaviour_logprobs)
    lag = (version - token_versions).clamp(min=1).to(torch.float64)  # a lag of 0 counts as 1: both give a = 0
    share = torch.where(token_versions >= 0, (lag - 1) / lag, 0.0).to(policy.dtype)
    return behaviour + share * (policy - behaviour)


# -- corrections -------------------------------------------------------------------------------------------------------


Action = Literal["truncate", "clip", "mask", "reject"]
Estimator = Literal["k2", "k3"]


class Correction(NamedTuple):
    """Weight and verdict of every token, without gradient."""

    weight: Tensor
    """[T] factor of the token's loss; 0 where the mask is False."""
    keep: Tensor
    """[T] bool, True if the token is kept; False where the mask is False. Denominators still count rejected tokens."""


@torch.no_grad()
def importance(
    log_rho: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    *,
    level: Level,
    action: Action,
    low_ratio: float | None = None,
    high_ratio: float | None = None,
) -> Correction:
    """Weight or drop tokens by their importance ratio.

        ρ at level    token       ρ_t
                      sequence    Π ρ_t          over the trained tokens of the sequence, the same at all of them
                      geometric   (Π ρ_t)^(1/n)
        action        truncate    weight min(ρ, high_ratio)                          TIS
                      clip        weight clip(ρ, low_ratio, high_ratio)
                      mask        weight ρ inside [low_ratio, high_ratio], else 0    IcePop, MIS
                      reject      weight 1, kept inside [low_ratio, high_ratio]

    log ρ at its level is cut to ±20 in the weight, as in verl.

    Args:
        low_ratio, high_ratio: bounds on ρ, inclusive; None: no bound.
    Source:
        TIS: arXiv:2110.00641 and arXiv:2505.24298. IcePop: arXiv:2510.18855.
    """
    assert action != "truncate" or low_ratio is None, "truncate has no lower bound; clip has"
    x = at_level(log_rho, mask, cu_seqlens, level=level)
    inside = _is_inside(x.exp(), low_ratio, high_ratio)
    weight = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if action == "reject":
        return Correction(mask.to(x.dtype), mask & inside)
    if action == "mask":
        return Correction(weight.where(mask & inside, 0.0), mask)
    if low_ratio is not None or high_ratio is not None:
        weight = weight.clamp(low_ratio, high_ratio)
    return Correction(weight.where(mask, 0.0), mask)


@torch.no_grad()
def veto(
    log_rho: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    low_ratio: float | None = None,
    high_ratio: float | None = None,
) -> Correction:
    """Reject every sequence with a token whose ρ is outside the bounds, which indicates a corrupt record.

    Source: slime's and SkyRL's veto (the latter with high_ratio = 100).
    """
    x = at_level(log_rho, mask, None, level="token")
    is_bad = mask & ~_is_inside(x.exp(), low_ratio, high_ratio)
    num_bad = trained_sum(is_bad, mask, cu_seqlens)
    return Correction(mask.to(x.dtype), mask & (num_bad == 0)[sequence_of_token(cu_seqlens, x.numel())])


@torch.no_grad()
def opsm(log_rho: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor, *, max_nats: float) -> Correction:
    """Reject bad sequences that the policy has moved away from: A < 0 and mean(log μ - log π) > max_nats.

    Args:
        advantages: [T] of each token's sequence.
        max_nats: per token.
    Source:
        Off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556.
    """
    x = at_level(log_rho, mask, cu_seqlens, level="geometric")
    return Correction(mask.to(x.dtype), mask & ~((advantages < 0) & (-x > max_nats)))


@torch.no_grad()
def m2po(log_rho: Tensor, mask: Tensor, *, max_mean_square: float = 0.04) -> Correction:
    """Reject the tokens with the largest (log ρ)² until the mean of the rest is less than `max_mean_square`.

    Needs all tokens of the step, so that the result does not depend on micro-batches. All tokens are candidates, as in
    AReaL. Among equal tokens the later ones are rejected first.

    Source:
        M2PO: arXiv:2510.01161.
    """
    x = upcast(log_rho)
    squares = torch.where(mask & ~x.isnan(), x.to(torch.float64).square(), torch.inf)
    ascending, order = squares.sort(stable=True)
    mean = ascending.cumsum(0) / torch.arange(1, x.numel() + 1, device=x.device)
    keep = torch.zeros_like(mask).index_put((order,), mean < max_mean_square)  # means of ascending numbers ascend
    return Correction(mask.to(x.dtype), mask & keep)


@torch.no_grad()
def divergence(
    log_rho: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    *,
    estimator: Estimator,
    level: Literal["token", "sequence"],
    max_nats: float,
) -> Correction:
    """Reject tokens or sequences whose estimated divergence from the behaviour policy exceeds `max_nats`.

        k2    (log ρ)² / 2
        k3    ρ - 1 - log ρ

    log ρ is cut to ±20, as in verl.

    Args:
        level: "token" compares each estimate; "sequence" compares the mean over the trained tokens of a sequence.
        max_nats: largest estimate that is kept.
    Source:
        verl's rejection sampling; estimators: http://joschu.net/blog/kl-approx.html.
    """
    assert estimator in ("k2", "k3") and level in ("token", "sequence"), (estimator, level)
    x = at_level(log_rho, mask, None, level="token").clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    estimate = x.square() / 2 if estimator == "k2" else torch.expm1(x) - x
    if level == "sequence":
        assert cu_seqlens is not None
        total, count = (trained_sum(values, mask, cu_seqlens) for values in (estimate, mask))
        estimate = (total / count.clamp(min=1))[sequence_of_token(cu_seqlens, x.numel())]
    return Correction(mask.to(x.dtype), mask & (estimate <= max_nats))


@torch.no_grad()
def combine(corrections: Sequence[Correction]) -> Correction:
    """Merge one or more corrections: weights multiply, and a token is kept if all keep it."""
    weight, keep = corrections[0]
    for other in corrections[1:]:
        weight, keep = weight * other.weight, keep & other.keep
    return Correction(weight, keep)


def _is_inside(rho: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return [T] bool; False for NaN."""
    inside = ~rho.isnan()
    if low is not None:
        inside &= rho >= low
    return inside if high is None else inside & (rho <= high)
