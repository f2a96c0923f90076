"""Policy surrogates: for every token, what its log-prob's gradient is multiplied by.

The gradient of every surrogate by the policy is `c_t A_t ∇log π(y_t)`, and only `c` differs from paper to paper. So a
surrogate returns that product, detached; it cannot forget to stop a gradient, and all of them share one line of the
learner. They are called alike, `name(policy_logprobs, anchor_logprobs, advantages, mask, cu_seqlens, *, ...)`:

    policy_logprobs   [T] log π of the sampled tokens, nats; here without gradient
    anchor_logprobs   [T] the same under the policy that the trust region is around: proximal, behaviour or interpolated
    advantages        [T] of each token's sequence
    mask              [T] bool, true on tokens to train; what the other positions hold, even NaN, reaches nothing
    cu_seqlens        [S+1] where each sequence begins. Surrogates not in SEQUENCE_LEVEL are elementwise: they may be
                      called on any slice of the tokens, and take None here

Below, r = π/anchor is a token's ratio and x = log r. Log-ratios are cut to ±20 where verl does; where the formula
differentiates r, a token beyond that has no gradient. A bound says its unit: `clip_low` and `clip_high` are distances
of a ratio from 1, `..._nats` distances in log space, `..._prob` differences of probabilities, `..._ratio` a ratio itself.

To add a paper, write one function here under `@surrogate()`. Its name is then a value of `algorithm.loss`, and its
keyword arguments are those of `algorithm.loss_args`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms.aggregation import MAX_LOG_RATIO, sequence_of_token, trained_sum, upcast

MAX_GSPO_LOG_RATIO = 10.0


class Surrogate(NamedTuple):
    """A surrogate at every token; 0 and False where the mask is false. Nothing here has a gradient."""

    objective_gradient: Tensor
    """[T] c_t A_t: derivative of the objective, which is maximised, by log π(y_t). The loss to differentiate is
    `-Σ w_t objective_gradient_t log π(y_t)`."""
    value: Tensor
    """[T] the objective as the paper writes it; for reports."""
    clipped: Tensor
    """[T] bool: the clip took this token's gradient away."""


SURROGATES: dict[str, Callable[..., Surrogate]] = {}
"""By name, for a configuration; `surrogate` fills this and the three below."""

SEQUENCE_LEVEL: set[str] = set()
"""Those whose gradient at a token depends on the other tokens of its sequence."""

WITH_RATIO: set[str] = set()
"""Those whose gradient contains π/anchor, so that it already corrects for what it is anchored to."""

TRAINS_ZERO_ADVANTAGE: set[str] = set()
"""Those that have a gradient where the advantage is 0."""


def surrogate(
    *, sequence_level: bool = False, with_ratio: bool = True, trains_zero_advantage: bool = False
) -> Callable[[Callable[..., Surrogate]], Callable[..., Surrogate]]:
    """Decorator that makes a function a value of `algorithm.loss`, and runs it without gradients.

    Args:
        sequence_level: the gradient of a token depends on the other tokens of its sequence.
        with_ratio: the gradient contains π/anchor.
        trains_zero_advantage: there is a gradient where the advantage is 0.
    """

    def register(function: Callable[..., Surrogate]) -> Callable[..., Surrogate]:
        name = function.__name__
        traits = (
            (SEQUENCE_LEVEL, sequence_level),
            (WITH_RATIO, with_ratio),
            (TRAINS_ZERO_ADVANTAGE, trains_zero_advantage),
        )
        for names, has_trait in traits:
            if has_trait:
                names.add(name)
        SURROGATES[name] = torch.no_grad()(function)
        return SURROGATES[name]

    return register


@surrogate()
def ppo_clip(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_ratio: float | None = None,
) -> Surrogate:
    """PPO's pessimistic clip with two bounds, and optionally a third for bad tokens that became likely.

        value = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A);   with `dual_ratio`, where A < 0:  max(that, dual_ratio A)
        c     = r where that is differentiable in r, else 0

    Args:
        clip_low, clip_high: how far r may leave 1 before a token stops pulling it further. DAPO's `clip_high` is 0.28.
        dual_ratio: largest r at which a token with A < 0 is still pushed down, more than 1. INTELLECT-2's two-sided
            clip with its delta is the same thing.
    Source:
        PPO: arXiv:1707.06347. Two bounds: DAPO, arXiv:2503.14476. Dual clip: arXiv:1912.09729.
    """
    policy, anchor, advantages = _trained(mask, policy_logprobs, anchor_logprobs, advantages)
    x = policy - anchor
    clip = _pessimistic(x, x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), advantages, clip_low, clip_high)
    if dual_ratio is None:
        return clip
    assert dual_ratio > 1, f"dual_ratio ({dual_ratio}) must be more than 1"
    is_floored = (advantages < 0) & (x > math.log(dual_ratio))
    return Surrogate(
        clip.objective_gradient.masked_fill(is_floored, 0.0),
        torch.where(is_floored, dual_ratio * advantages, clip.value),
        clip.clipped | is_floored,
    )


@surrogate(sequence_level=True)
def gspo(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Surrogate:
    """PPO's clip on the ratio of the whole sequence, per token of its length.

        s     = exp(mean_t x_t)        over the trained tokens of the sequence
        value = min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)
        c     = s where the unclipped branch is the smaller or equal one, else 0

    log s is cut at 10 from above, as in verl. To be aggregated as `seq-mean-token-mean`.

    Source:
        GSPO: arXiv:2507.18071; with advantages that differ within a sequence, its token variant.
    """
    policy, anchor, advantages = _trained(mask, policy_logprobs, anchor_logprobs, advantages)
    mean = _mean_in_sequence(policy - anchor, mask, cu_seqlens)
    return _pessimistic(mean, mean.clamp(max=MAX_GSPO_LOG_RATIO), advantages, clip_low, clip_high)


@surrogate(sequence_level=True)
def gmpo(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low_nats: float = 0.4,
    clip_high_nats: float = 0.4,
) -> Surrogate:
    """Geometric mean of the sequence's ratios, each clipped in log space, on the side where its advantage would go.

        x'    = min(x, clip_high_nats) where A > 0,  max(x, -clip_low_nats) where A < 0
        s     = exp(mean_t x'_t)       over the trained tokens of the sequence
        value = s A
        c     = s where x' = x, else 0

    On the other side x is cut at 20, which takes a token's gradient away too.

    The mean is within the sequence only; how sequences are averaged is the aggregation's business, as for every other
    surrogate (the paper's is `seq-mean-token-mean`).

    Args:
        clip_low_nats, clip_high_nats: how far x may leave 0, nats.
    Source:
        GMPO: arXiv:2507.20673.
    """
    policy, anchor, advantages = _trained(mask, policy_logprobs, anchor_logprobs, advantages)
    x = policy - anchor
    bounded = torch.where(advantages > 0, x.clamp(max=clip_high_nats), x)
    bounded = torch.where(advantages < 0, x.clamp(min=-clip_low_nats), bounded)
    bounded = bounded.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    clipped = bounded != x
    value = _mean_in_sequence(bounded, mask, cu_seqlens).exp() * advantages
    return Surrogate(value.masked_fill(clipped, 0.0), value, clipped)


@surrogate(sequence_level=True)
def vespo(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    k_positive: float = 2.0,
    lam_positive: float = 3.0,
    k_negative: float = 3.0,
    lam_negative: float = 2.0,
) -> Surrogate:
    """A smooth weight of the ratio of the whole sequence: 1 on policy, falling to 0 on both sides.

        W     = exp(Σ_t x_t)           over the trained tokens of the sequence
        c     = W^k exp(lam (1 - W))   with the positive k and lam where A >= 0
        value = c A log π

    x is cut to ±20 and log W to [log 1e-8, 20], as in TRL.

    Source:
        VESPO: arXiv:2602.10693; parameters as in TRL.
    """
    policy, anchor, advantages = _trained(mask, policy_logprobs, anchor_logprobs, advantages)
    x = (policy - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_w = trained_sum(x, mask, cu_seqlens).clamp(math.log(1e-8), MAX_LOG_RATIO)
    log_w = log_w[sequence_of_token(cu_seqlens, x.numel())].to(x.dtype)
    is_good = advantages >= 0
    k, lam = _choose(is_good, k_positive, k_negative, like=x), _choose(is_good, lam_positive, lam_negative, like=x)
    return _weighted_log_likelihood(torch.exp(k * log_w + lam * (1 - log_w.exp())), advantages, policy)


@surrogate()
def cispo(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Surrogate:
    """REINFORCE with a clipped importance weight; no token loses its gradient.

        c     = clip(r, 1 - clip_low, 1 + clip_high)
        value = c A log π

    Args:
        clip_low, clip_high: distances of r from 1, as in verl, slime and NeMo. Elsewhere the same words are the bounds
            themselves: TRL's `epsilon_high` = 5.0 (which ScaleRL recommends) is `clip_low=1.0, clip_high=4.0`, and
            ROLL's 0.9 to 1.1 is `clip_low=0.1, clip_high=0.1`. Copying a 5.0 from TRL would give 6.0.
    Source:
        CISPO: MiniMax-M1, arXiv:2506.13585. ScaleRL: arXiv:2510.13786.
    """
    policy, anchor, advantages = _trained(mask, policy_logprobs, anchor_logprobs, advantages)
    return _weighted_log_likelihood(_ratio(policy - anchor).clamp(1 - clip_low, 1 + clip_high), advantages, policy)


@surrogate()
def dppo_tv(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    *,
    low_prob: float = 0.2,
    high_prob: float = 0.2,
    max_ratio: float | None = None,
) -> Surrogate:
    """A trust region in probability instead of ratio: rare tokens may change by a large factor, common ones may not.

        p = exp(policy), q = exp(anchor)
        c     = 0 where A > 0 and p - q > high_prob, or A <= 0 and p - q < -low_prob;  else min(r, max_ratio)
        value = c A

    Args:
        low_prob, high_prob: how far the probability of a token may fall or rise before it stops pulling further.
        max_ratio: largest weight; None, as in prime-rl's code: none (but log r is cut at 20). verl's recipe has 1e4,
            its default is 3.
    Source:
        DPPO: arXiv:2602.04879. Bounds as in prime-rl.
    """
    policy, anchor, advantages = _trained(mask, policy_logprobs, anchor_logprobs, advantages)
    change = policy.exp() - anchor.exp()
    is_outside = torch.where(advantages > 0, change > high_prob, change < -low_prob)
    return _capped_inside(policy - anchor, advantages, is_outside, max_ratio)


@surrogate()
def dppo_kl(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    *,
    low_nats: float = 0.05,
    high_nats: float = 0.05,
    max_ratio: float | None = None,
) -> Surrogate:
    """The trust region of `dppo_tv` with another distance, the KL between sampling this token or another one.

        KL    = q log(q/p) + (1 - q) log((1 - q)/(1 - p))        nats
        c     = 0 where A > 0, p > q and KL > high_nats, or A <= 0, p < q and KL > low_nats;  else min(r, max_ratio)
        value = c A

    Args:
        low_nats, high_nats: how far that KL may go while the probability of the token falls or rises.
        max_ratio: largest weight; None: none.
    Source:
        DPPO: arXiv:2602.04879.
    """
    policy, anchor, advantages = _trained(mask, policy_logprobs, anchor_logprobs, advantages)
    distance = _bernoulli_kl(anchor, policy)
    rising, falling = (policy > anchor) & (distance > high_nats), (policy < anchor) & (distance > low_nats)
    return _capped_inside(policy - anchor, advantages, torch.where(advantages > 0, rising, falling), max_ratio)


@surrogate()
def sapo(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Surrogate:
    """A soft gate instead of a clip; tau is how sharply it closes.

        g     = sigmoid(tau (r - 1))         tau_positive where A > 0, else tau_negative
        value = 4/tau g A
        c     = 4 g (1 - g) r

    Source:
        SAPO: arXiv:2511.20347.
    """
    policy, anchor, advantages = _trained(mask, policy_logprobs, anchor_logprobs, advantages)
    x = policy - anchor
    ratio = _ratio(x)
    tau = _choose(advantages > 0, tau_positive, tau_negative, like=x)
    gate, rest = torch.sigmoid(tau * (ratio - 1)), torch.sigmoid(tau * (1 - ratio))
    gradient = (4 * gate * rest * ratio).masked_fill(x.abs() > MAX_LOG_RATIO, 0.0)
    return Surrogate(gradient * advantages, 4 / tau * gate * advantages, torch.zeros_like(mask))


@surrogate(with_ratio=False, trains_zero_advantage=True)
def dro(
    policy_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    *,
    beta: float,
) -> Surrogate:
    """REINFORCE with a quadratic pull towards the anchor: no ratio, no clip.

        value = A log π - beta/2 x²
        c A   = A - beta x

    A token with advantage 0 has a gradient too.

    Args:
        beta: strength of the pull.
    Source:
        DRO: arXiv:2405.19107, with the group's baseline for its value function.
    """
    policy, anchor, advantages = _trained(mask, policy_logprobs, anchor_logprobs, advantages)
    x = policy - anchor
    value = advantages * policy - beta / 2 * x.square()
    return Surrogate(advantages - beta * x, value, torch.zeros_like(mask))


@surrogate()
def topr(
    policy_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor | None
) -> Surrogate:
    """Good tokens as in supervised training; bad ones weigh less the less likely they have become.

        c     = 1 where A > 0, else clip(r, 0, 1)
        value = c A log π

    Source:
        TOPR: arXiv:2503.14286; per token as in ROLL.
    """
    policy, anchor, advantages = _trained(mask, policy_logprobs, anchor_logprobs, advantages)
    fading = (policy - anchor).clamp(-MAX_LOG_RATIO, 0.0).exp()
    return _weighted_log_likelihood(torch.where(advantages > 0, 1.0, fading), advantages, policy)


@surrogate(with_ratio=False)
def reinforce(
    policy_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor | None
) -> Surrogate:
    """The plain policy gradient; the anchor plays no part. Off policy it needs a correction: `corrections`.

    c = 1,  value = A log π

    Source:
        Williams 1992. With a token mask as correction it is IcePop, arXiv:2510.18855.
    """
    policy, advantages = _trained(mask, policy_logprobs, advantages)
    return _weighted_log_likelihood(torch.ones_like(policy), advantages, policy)


def _trained(mask: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Each [T] upcast, in the dtype of the first, and 0 where the mask is false: formulas of 0 give 0 there."""
    dtype = upcast(values[0]).dtype
    return tuple(torch.where(mask, upcast(v).to(dtype), 0.0) for v in values)


def _ratio(x: Tensor) -> Tensor:
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _choose(condition: Tensor, yes: float, no: float, *, like: Tensor) -> Tensor:
    """[T] one of two numbers, in the dtype of `like`: `torch.where` of two numbers would round them to float32."""
    return torch.where(condition, torch.full_like(like, yes), no)


def _mean_in_sequence(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] to [T]: at every token the mean over the trained tokens of its sequence; 0 where there are none."""
    mean = trained_sum(x, mask, cu_seqlens) / trained_sum(mask, mask, cu_seqlens).clamp(min=1)
    return mean[sequence_of_token(cu_seqlens, x.numel())].to(x.dtype)


def _pessimistic(log_ratio: Tensor, bounded: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """min(r A, clip(r) A) with r = exp(bounded), which has no gradient where the bound changed the log-ratio."""
    ratio = bounded.exp()
    unclipped = ratio * advantages
    pessimistic = ratio.clamp(1 - low, 1 + high) * advantages
    clipped = pessimistic < unclipped
    is_constant = clipped | (bounded != log_ratio)
    return Surrogate(unclipped.masked_fill(is_constant, 0.0), torch.minimum(unclipped, pessimistic), clipped)


def _capped_inside(x: Tensor, advantages: Tensor, is_outside: Tensor, max_ratio: float | None) -> Surrogate:
    """min(r, max_ratio) A where not `is_outside`. The weight is a constant: cutting it stops no gradient."""
    ratio = _ratio(x) if max_ratio is None else _ratio(x).clamp(max=max_ratio)
    gradient = (ratio * advantages).masked_fill(is_outside, 0.0)
    return Surrogate(gradient, gradient, is_outside)


def _weighted_log_likelihood(weight: Tensor, advantages: Tensor, policy: Tensor) -> Surrogate:
    """weight A log π with a constant weight."""
    gradient = weight * advantages
    return Surrogate(gradient, gradient * policy, torch.zeros_like(policy, dtype=torch.bool))


def _bernoulli_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL between two coins that show heads with probability q and p, from the logs of both; 0 log 0 is 0.

    In float32 the log-prob of a near-certain token rounds to 0. The chance of any other token is therefore taken as at
    least 1e-8: else the KL to such a token would be infinite, from a neighbour that differs by rounding.
    """
    q, rest_q, rest_p = log_q.exp(), *((-torch.expm1(x)).clamp(min=1e-8) for x in (log_q, log_p))
    return torch.where(q > 0, q * (log_q - log_p), 0.0) + rest_q * (rest_q / rest_p).log()
