"""Off-policy corrections: which tokens count, and how much, when older weights or another kernel sampled them.

Every correction is a function of `log ρ`, the log-prob of a token under the policy that is corrected to (proximal or
current) minus the log-prob with which it was sampled. Bounds are on ρ itself. A correction never edits the mask: it
returns a weight and a verdict for each token, and several are put together by `combine`.

    log_rho       [T] log π_num - log μ of the sampled tokens, nats
    mask          [T] bool, true on tokens to train; what the other positions hold, even NaN, reaches nothing
    cu_seqlens    [S+1] where each sequence begins; None will do at level "token", which is elementwise

Only whole-sequence weights without truncation are unbiased. A token's own weight, a geometric mean and every bound
trade that for variance: they are choices, not corrections in the strict sense.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms.aggregation import MAX_LOG_RATIO, sequence_of_token, trained_sum, upcast

# -- the anchor between two policies -----------------------------------------------------------------------------------


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


# -- corrections -------------------------------------------------------------------------------------------------------


Level = Literal["token", "sequence", "geometric"]
Action = Literal["truncate", "clip", "mask", "reject"]
Estimator = Literal["k2", "k3"]
Reduction = Literal["sum", "mean", "max"]


class Correction(NamedTuple):
    """What to do with every token. Nothing here has a gradient."""

    weight: Tensor
    """[T] to multiply the token's loss by; 0 where the mask is false."""
    keep: Tensor
    """[T] bool: the token counts; False where the mask is false. Denominators are not to shrink by those that do
    not."""


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
    assert action in ("truncate", "clip", "mask", "reject"), action
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
    low_ratio: float | None = 1e-4,
    high_ratio: float | None = None,
) -> Correction:
    """Drop every sequence that has a token with ρ outside the bounds: such a token says that the record is broken.

    Source: slime's and SkyRL's veto (the latter with high_ratio = 100).
    """
    x = at_level(log_rho, mask, None, level="token")
    is_bad = mask & ~_is_inside(x.exp(), low_ratio, high_ratio)
    num_bad = trained_sum(is_bad, mask, cu_seqlens)
    return Correction(mask.to(x.dtype), mask & (num_bad == 0)[sequence_of_token(cu_seqlens, x.numel())])


@torch.no_grad()
def opsm(log_rho: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor, *, max_nats: float) -> Correction:
    """Drop bad sequences that the policy has left: A < 0 and mean(log μ - log π) > max_nats.

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
    """Drop the tokens with the largest (log ρ)² until the mean of those that stay is less than `max_mean_square`.

    Over the whole batch: give it all tokens of the step, or another micro-batch changes what is dropped. All tokens
    are candidates, as in AReaL; of equal ones the later are dropped first.

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
    reduction: Reduction = "mean",
) -> Correction:
    """Drop tokens, or sequences, whose estimated divergence from the behaviour policy exceeds `max_nats`.

        k2    (log ρ)² / 2
        k3    ρ - 1 - log ρ

    log ρ is cut to ±20, as in verl.

    Args:
        level: judge each token by its own estimate, or all trained tokens of a sequence together.
        max_nats: largest estimate that is kept.
        reduction: at level "sequence": of the estimates of its tokens.
    Source:
        verl's rejection sampling; estimators: http://joschu.net/blog/kl-approx.html.
    """
    assert estimator in ("k2", "k3") and level in ("token", "sequence"), (estimator, level)
    x = at_level(log_rho, mask, None, level="token").clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    estimate = x.square() / 2 if estimator == "k2" else torch.expm1(x) - x
    if level == "sequence":
        assert cu_seqlens is not None
        estimate = _reduce(estimate, mask, cu_seqlens, reduction)[sequence_of_token(cu_seqlens, x.numel())]
    return Correction(mask.to(x.dtype), mask & (estimate <= max_nats))


@torch.no_grad()
def normalise(weight: Tensor, mask: Tensor, *, mean: Tensor | None = None) -> Tensor:
    """[T] weights divided by their mean over the mask, so that a correction does not change the size of a step.

    Args:
        mean: [] of the whole step, where `weight` is one micro-batch of it; None: of `weight`.
    """
    weight = torch.where(mask, upcast(weight), 0.0)
    if mean is None:
        mean = weight.sum(dtype=torch.float64) / mask.sum().clamp(min=1)
    return weight / torch.where(mean > 0, mean, 1.0).to(weight.dtype)


@torch.no_grad()
def combine(corrections: Sequence[Correction]) -> Correction:
    """All of them, one or more, at once: weights multiply, and a token is kept if all keep it."""
    weight, keep = corrections[0]
    for other in corrections[1:]:
        weight, keep = weight * other.weight, keep & other.keep
    return Correction(weight, keep)


@torch.no_grad()
def at_level(log_rho: Tensor, mask: Tensor, cu_seqlens: Tensor | None, *, level: Level) -> Tensor:
    """[T] log ρ of each token, of its sequence, or of its sequence per trained token; 0 where the mask is false."""
    assert level in ("token", "sequence", "geometric"), level
    x = upcast(log_rho)
    if level == "token":
        return torch.where(mask, x, 0.0)
    assert cu_seqlens is not None, f"level {level} needs cu_seqlens"
    total = trained_sum(x, mask, cu_seqlens)
    if level == "geometric":
        total = total / trained_sum(mask, mask, cu_seqlens).clamp(min=1)
    return torch.where(mask, total[sequence_of_token(cu_seqlens, x.numel())].to(x.dtype), 0.0)


def _is_inside(rho: Tensor, low: float | None, high: float | None) -> Tensor:
    """[T] bool; NaN is nowhere."""
    inside = ~rho.isnan()
    if low is not None:
        inside &= rho >= low
    return inside if high is None else inside & (rho <= high)


def _reduce(values: Tensor, mask: Tensor, cu_seqlens: Tensor, reduction: Reduction) -> Tensor:
    """[T] not negative to [S]; 0 for a sequence without trained tokens."""
    assert reduction in ("sum", "mean", "max"), reduction
    if reduction == "max":
        nothing = values.new_zeros(cu_seqlens.numel() - 1)
        return nothing.scatter_reduce(0, sequence_of_token(cu_seqlens, values.numel()), values, "amax")
    total = trained_sum(values, mask, cu_seqlens)
    return total if reduction == "sum" else total / trained_sum(mask, mask, cu_seqlens).clamp(min=1)
