"""Policy surrogates and KL penalties: for every token, the coefficient of the gradient of its log-prob.

The gradient of every surrogate by the policy is `c_t A_t ∇log π(y_t)`; papers differ in `c` alone. A surrogate returns this
product, detached, so no gradient leaks and the learner has one line for all of them. It is a function of `Tokens` and of its
own keyword arguments, and is called as `SURROGATES[name](policy, anchor, advantages, mask, cu_seqlens, ...)`.

Below, r = π/anchor is a token's ratio and x = log r. Log-ratios are cut to ±20 as in verl. If the formula differentiates r, a
token beyond the cut has no gradient. Names give the unit of a bound: `clip_low` and `clip_high` are distances of a ratio from
1, `..._nats` distances in log space, `..._prob` differences of probabilities, `..._ratio` ratios.

To add a paper, write one function under `@surrogate()`. Its name becomes a value of `algorithm.loss`, and its keyword
arguments those of `algorithm.loss_args`.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from asyncgrpo.algorithms.aggregation import MAX_LOG_RATIO, at_level, upcast

MAX_GSPO_LOG_RATIO = 10.0


class Tokens(NamedTuple):
    """T tokens of packed sequences, at least float32. Floats are 0 where the mask is False."""

    policy: Tensor
    """[T] log π of the sampled tokens, nats; without gradient."""
    anchor: Tensor
    """[T] log-probs under the center of the trust region: proximal, behaviour or interpolated policy."""
    advantages: Tensor
    """[T] of each token's sequence."""
    mask: Tensor
    """[T] bool, True on tokens to train. What is given at other positions, even NaN, is ignored."""
    cu_seqlens: Tensor | None
    """[S+1] start of each sequence. Surrogates not in SEQUENCE_LEVEL are elementwise: they accept any slice of the tokens,
    and None here."""

    @property
    def log_ratio(self) -> Tensor:
        """x of the formulas."""
        return self.policy - self.anchor


class Surrogate(NamedTuple):
    """A surrogate at every token, without gradient; 0 and False where the mask is False."""

    objective_gradient: Tensor
    """[T] c_t A_t: derivative of the maximised objective by log π(y_t). The loss to differentiate is
    `-Σ w_t objective_gradient_t log π(y_t)`."""
    value: Tensor
    """[T] objective as in the paper, for reports."""
    clipped: Tensor
    """[T] bool, True if the clip removed the token's gradient."""


SURROGATES: dict[str, Callable[..., Surrogate]] = {}
"""Surrogates by name. `surrogate` fills this and the three sets below."""

SEQUENCE_LEVEL: set[str] = set()
"""Surrogates whose gradient at a token depends on the other tokens of its sequence."""

WITH_RATIO: set[str] = set()
"""Surrogates whose gradient contains π/anchor, which already corrects for the distance to the anchor."""

TRAINS_ZERO_ADVANTAGE: set[str] = set()
"""Surrogates with a gradient at advantage 0."""


def surrogate(
    *, sequence_level: bool = False, with_ratio: bool = True, trains_zero_advantage: bool = False
) -> Callable[[Callable[..., Surrogate]], Callable[..., Surrogate]]:
    """Register a function of `Tokens` as a value of `algorithm.loss`. It runs without gradient.

    Args:
        sequence_level: the gradient of a token depends on the other tokens of its sequence.
        with_ratio: the gradient contains π/anchor.
        trains_zero_advantage: the gradient at advantage 0 is not 0.
    """

    def register(function: Callable[..., Surrogate]) -> Callable[..., Surrogate]:
        name = function.__name__
        if sequence_level:
            SEQUENCE_LEVEL.add(name)
        if with_ratio:
            WITH_RATIO.add(name)
        if trains_zero_advantage:
            TRAINS_ZERO_ADVANTAGE.add(name)

        @wraps(function)
        @torch.no_grad()
        def masked(
            policy: Tensor, anchor: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor | None, **settings: Any
        ) -> Surrogate:
            dtype = upcast(policy).dtype
            given = (policy, anchor, advantages)
            policy, anchor, advantages = (torch.where(mask, upcast(x).to(dtype), 0.0) for x in given)
            return function(Tokens(policy, anchor, advantages, mask, cu_seqlens), **settings)

        SURROGATES[name] = masked
        return masked

    return register


@surrogate()
def ppo_clip(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_ratio: float | None = None
) -> Surrogate:
    """PPO's pessimistic clip with two bounds, and an optional third for bad tokens that became likely.

        value = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A);   with `dual_ratio`, where A < 0:  max(that, dual_ratio A)
        c     = r where the value is differentiable in r, else 0

    Args:
        clip_low, clip_high: distances of r from 1 beyond which a token has no gradient. DAPO's `clip_high` is 0.28.
        dual_ratio: largest r with a gradient for A < 0, above 1. Equal to delta of INTELLECT-2's two-sided clip.
    Source:
        PPO: arXiv:1707.06347. Two bounds: DAPO, arXiv:2503.14476. Dual clip: arXiv:1912.09729.
    """
    x, advantages = tokens.log_ratio, tokens.advantages
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
def gspo(tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Surrogate:
    """PPO's clip on the ratio of the whole sequence, per token of its length.

        s     = exp(mean_t x_t)        over the trained tokens of the sequence
        value = min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)
        c     = s where the unclipped branch is the smaller or equal one, else 0

    log s is cut at 10 from above, as in verl. Aggregate with `seq-mean-token-mean`.

    Source:
        GSPO: arXiv:2507.18071. With advantages that differ within a sequence: its token variant.
    """
    mean = at_level(tokens.log_ratio, tokens.mask, tokens.cu_seqlens, level="geometric")
    return _pessimistic(mean, mean.clamp(max=MAX_GSPO_LOG_RATIO), tokens.advantages, clip_low, clip_high)


@surrogate(sequence_level=True)
def gmpo(tokens: Tokens, *, clip_low_nats: float = 0.4, clip_high_nats: float = 0.4) -> Surrogate:
    """Geometric mean of the sequence's ratios, each clipped in log space on the side of its advantage.

        x'    = min(x, clip_high_nats) where A > 0,  max(x, -clip_low_nats) where A < 0
        s     = exp(mean_t x'_t)       over the trained tokens of the sequence
        value = s A
        c     = s where x' = x, else 0

    On the other side x is cut at 20, which also removes the token's gradient.

    The mean is within a sequence. The aggregation averages over sequences, as for every surrogate (`seq-mean-token-mean` in
    the paper).

    Args:
        clip_low_nats, clip_high_nats: bounds on the distance of x from 0, nats.
    Source:
        GMPO: arXiv:2507.20673.
    """
    x, advantages = tokens.log_ratio, tokens.advantages
    bounded = torch.where(advantages > 0, x.clamp(max=clip_high_nats), x)
    bounded = torch.where(advantages < 0, x.clamp(min=-clip_low_nats), bounded)
    bounded = bounded.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    clipped = bounded != x
    value = at_level(bounded, tokens.mask, tokens.cu_seqlens, level="geometric").exp() * advantages
    return Surrogate(value.masked_fill(clipped, 0.0), value, clipped)


@surrogate(sequence_level=True)
def vespo(
    tokens: Tokens,
    *,
    k_positive: float = 2.0,
    lam_positive: float = 3.0,
    k_negative: float = 3.0,
    lam_negative: float = 2.0,
) -> Surrogate:
    """A smooth weight from the sequence ratio: 1 on policy, falling to 0 on both sides.

        W     = exp(Σ_t x_t)           over the trained tokens of the sequence
        c     = W^k exp(lam (1 - W))   with the positive k and lam where A >= 0
        value = c A log π

    x is cut to ±20 and log W to [log 1e-8, 20], as in TRL.

    Source:
        VESPO: arXiv:2602.10693; parameters as in TRL.
    """
    x = tokens.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_w = at_level(x, tokens.mask, tokens.cu_seqlens, level="sequence").clamp(math.log(1e-8), MAX_LOG_RATIO)
    is_good = tokens.advantages >= 0
    k, lam = _choose(is_good, k_positive, k_negative, like=x), _choose(is_good, lam_positive, lam_negative, like=x)
    return _weighted_log_likelihood(torch.exp(k * log_w + lam * (1 - log_w.exp())), tokens)


@surrogate()
def cispo(tokens: Tokens, *, clip_low: float = 1.0, clip_high: float = 4.0) -> Surrogate:
    """REINFORCE with a clipped importance weight. Every token keeps its gradient.

        c     = clip(r, 1 - clip_low, 1 + clip_high)
        value = c A log π

    Args:
        clip_low, clip_high: distances of r from 1, as in verl, slime and NeMo. Other libraries give bounds on r: TRL's
            `epsilon_high` = 5.0 (recommended by ScaleRL) is `clip_low=1.0, clip_high=4.0`, and ROLL's 0.9 to 1.1 is
            `clip_low=0.1, clip_high=0.1`. Copying 5.0 from TRL would give a bound of 6.0.
    Source:
        CISPO: MiniMax-M1, arXiv:2506.13585. ScaleRL: arXiv:2510.13786.
    """
    return _weighted_log_likelihood(_ratio(tokens.log_ratio).clamp(1 - clip_low, 1 + clip_high), tokens)


@surrogate()
def dppo_tv(
    tokens: Tokens, *, low_prob: float = 0.2, high_prob: float = 0.2, max_ratio: float | None = None
) -> Surrogate:
    """A trust region in probability instead of ratio: rare tokens may change by a larger factor than common ones.

        p = exp(policy), q = exp(anchor)
        c     = 0 where A > 0 and p - q > high_prob, or A <= 0 and p - q < -low_prob;  else min(r, max_ratio)
        value = c A

    Args:
        low_prob, high_prob: fall and rise of a token's probability beyond which it has no gradient.
        max_ratio: largest weight; None, as in prime-rl: only the cut of log r at 20. verl's recipe has 1e4, its default
            is 3.
    Source:
        DPPO: arXiv:2602.04879. Bounds as in prime-rl.
    """
    change = tokens.policy.exp() - tokens.anchor.exp()
    return _capped_inside(tokens, torch.where(tokens.advantages > 0, change > high_prob, change < -low_prob), max_ratio)


@surrogate()
def dppo_kl(
    tokens: Tokens, *, low_nats: float = 0.05, high_nats: float = 0.05, max_ratio: float | None = None
) -> Surrogate:
    """The trust region of `dppo_tv` with the binary KL between sampling this token and any other.

        KL    = q log(q/p) + (1 - q) log((1 - q)/(1 - p))        nats
        c     = 0 where A > 0, p > q and KL > high_nats, or A <= 0, p < q and KL > low_nats;  else min(r, max_ratio)
        value = c A

    Args:
        low_nats, high_nats: bounds on the KL while the token's probability falls or rises.
        max_ratio: largest weight; None: no bound.
    Source:
        DPPO: arXiv:2602.04879.
    """
    policy, anchor = tokens.policy, tokens.anchor
    distance = _bernoulli_kl(anchor, policy)
    rising, falling = (policy > anchor) & (distance > high_nats), (policy < anchor) & (distance > low_nats)
    return _capped_inside(tokens, torch.where(tokens.advantages > 0, rising, falling), max_ratio)


@surrogate()
def sapo(tokens: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Surrogate:
    """A soft gate instead of a clip; tau is its sharpness.

        g     = sigmoid(tau (r - 1))         tau_positive where A > 0, else tau_negative
        value = 4/tau g A
        c     = 4 g (1 - g) r

    Source:
        SAPO: arXiv:2511.20347.
    """
    x, advantages = tokens.log_ratio, tokens.advantages
    ratio = _ratio(x)
    tau = _choose(advantages > 0, tau_positive, tau_negative, like=x)
    gate, rest = torch.sigmoid(tau * (ratio - 1)), torch.sigmoid(tau * (1 - ratio))
    gradient = (4 * gate * rest * ratio).masked_fill(x.abs() > MAX_LOG_RATIO, 0.0)
    return Surrogate(gradient * advantages, 4 / tau * gate * advantages, torch.zeros_like(tokens.mask))


@surrogate(with_ratio=False, trains_zero_advantage=True)
def dro(tokens: Tokens, *, beta: float) -> Surrogate:
    """REINFORCE with a quadratic pull towards the anchor, without ratio and clip.

        value = A log π - beta/2 x²
        c A   = A - beta x

    Tokens with advantage 0 have a gradient.

    Args:
        beta: strength of the pull.
    Source:
        DRO: arXiv:2405.19107, with the group baseline as its value function.
    """
    x, advantages = tokens.log_ratio, tokens.advantages
    value = advantages * tokens.policy - beta / 2 * x.square()
    return Surrogate(advantages - beta * x, value, torch.zeros_like(tokens.mask))


@surrogate()
def topr(tokens: Tokens) -> Surrogate:
    """Good tokens as in supervised training. Bad tokens lose weight as they become less likely.

        c     = 1 where A > 0, else clip(r, 0, 1)
        value = c A log π

    Source:
        TOPR: arXiv:2503.14286; per token as in ROLL.
    """
    fading = tokens.log_ratio.clamp(-MAX_LOG_RATIO, 0.0).exp()
    return _weighted_log_likelihood(torch.where(tokens.advantages > 0, 1.0, fading), tokens)


@surrogate(with_ratio=False)
def reinforce(tokens: Tokens) -> Surrogate:
    """The plain policy gradient; ignores the anchor. Off policy it needs a correction (`corrections`).

    c = 1,  value = A log π

    Source:
        Williams 1992. With a token mask as correction: IcePop, arXiv:2510.18855.
    """
    return _weighted_log_likelihood(torch.ones_like(tokens.policy), tokens)


def _ratio(x: Tensor) -> Tensor:
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _choose(condition: Tensor, yes: float, no: float, *, like: Tensor) -> Tensor:
    """Return [T] one of two numbers in the dtype of `like`. `torch.where` of two numbers would round them to float32."""
    return torch.where(condition, torch.full_like(like, yes), no)


def _pessimistic(log_ratio: Tensor, bounded: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """Return min(r A, clip(r) A) with r = exp(bounded). No gradient where the bound changed the log-ratio."""
    ratio = bounded.exp()
    unclipped = ratio * advantages
    pessimistic = ratio.clamp(1 - low, 1 + high) * advantages
    clipped = pessimistic < unclipped
    is_constant = clipped | (bounded != log_ratio)
    return Surrogate(unclipped.masked_fill(is_constant, 0.0), torch.minimum(unclipped, pessimistic), clipped)


def _capped_inside(tokens: Tokens, is_outside: Tensor, max_ratio: float | None) -> Surrogate:
    """Return min(r, max_ratio) A where not `is_outside`. The weight is detached, so its cap keeps the gradient."""
    ratio = _ratio(tokens.log_ratio).clamp(max=max_ratio or math.inf)
    gradient = (ratio * tokens.advantages).masked_fill(is_outside, 0.0)
    return Surrogate(gradient, gradient, is_outside & (tokens.advantages != 0))


def _weighted_log_likelihood(weight: Tensor, tokens: Tokens) -> Surrogate:
    """Return weight A log π with a constant weight."""
    gradient = weight * tokens.advantages
    return Surrogate(gradient, gradient * tokens.policy, torch.zeros_like(tokens.mask))


def _bernoulli_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return the KL between Bernoulli distributions of probabilities q and p, given as logs; 0 log 0 is 0.

    In float32 the log-prob of a near-certain token rounds to 0. The probability of the other tokens is therefore at least
    1e-8, or the KL between log-probs that differ by rounding would be infinite.
    """
    q, rest_q, rest_p = log_q.exp(), *((-torch.expm1(x)).clamp(min=1e-8) for x in (log_q, log_p))
    return torch.where(q > 0, q * (log_q - log_p), 0.0) + rest_q * (rest_q / rest_p).log()


# -- KL penalties to a reference model, estimated from sampled tokens; nats --------------------------------------------

# Like a surrogate, a penalty is a reported value and a detached coefficient of `∇log π`, so both share one line of the learner.
# A surrogate is maximised and a penalty minimised. Full KL and entropy depend on every logit: `learner/head.py`.

KlKind = Literal["k1", "abs", "k2", "k3", "low_var_kl", "k1+", "abs+", "k3+", "low_var_kl+", "k3_reweighted"]

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

        k1               d                  derivative 1, whose gradient is 0 in expectation: as a loss it is only noise
        abs              |d|                derivative sign d
        k2               d² / 2             derivative d, the unbiased gradient
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
    if kind == "k1":
        return Penalty(d, torch.ones_like(d))
    if kind == "abs":
        return Penalty(d.abs(), d.sign())
    if kind == "k2":
        return Penalty(d.square() / 2, d)
    bounded = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k3":
        return Penalty(torch.expm1(-bounded) + d, -torch.expm1(-bounded))
    assert kind == "low_var_kl", kind
    value = torch.expm1(-bounded) + bounded
    is_cut = value > MAX_LOW_VAR_KL  # so is it where d was
    return Penalty(value.clamp(max=MAX_LOW_VAR_KL), (-torch.expm1(-bounded)).masked_fill(is_cut, 0.0))
