"""Surrogates, corrections, weights and penalties once more, as loops over plain floats.

They follow the notation of the papers, case by case, and use nothing but `math`. Slow on purpose. A batch is lists over
tokens, and `sequences`, the indices of each sequence's tokens.
"""

import math
from collections.abc import Callable, Sequence

Tokens = Sequence[int]
Floats = list[float]


def trained(tokens: Tokens, mask: Sequence[bool]) -> list[int]:
    return [t for t in tokens if mask[t]]


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(x, high))


def exp(x: float) -> float:
    return math.exp(clip(x, -20, 20))


# Surrogates: (c A, value, clipped) of each token.

Point = tuple[float, float, bool]
NOTHING: Point = (0.0, 0.0, False)


def clipped_ratio(x: float, a: float, low: float, high: float, least: float, most: float) -> Point:
    """PPO at log-ratio x, with no gradient outside [least, most]."""
    r = math.exp(clip(x, least, most))
    value = min(r * a, clip(r, 1 - low, 1 + high) * a)
    if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low):
        return 0.0, value, True
    return (r * a if least <= x <= most else 0.0), value, False


def ppo_clip(logp: float, anchor: float, a: float, *, clip_low=0.2, clip_high=0.2, dual_ratio=None) -> Point:
    x = logp - anchor
    coefficient, value, clipped = clipped_ratio(x, a, clip_low, clip_high, -20, 20)
    if dual_ratio is not None and a < 0 and exp(x) > dual_ratio:
        return 0.0, dual_ratio * a, True
    return coefficient, value, clipped


def cispo(logp: float, anchor: float, a: float, *, clip_low=1.0, clip_high=4.0) -> Point:
    c = clip(exp(logp - anchor), 1 - clip_low, 1 + clip_high)
    return c * a, c * a * logp, False


def dppo_tv(logp: float, anchor: float, a: float, *, low_prob=0.2, high_prob=0.2, max_ratio=None) -> Point:
    p, q = math.exp(logp), math.exp(anchor)
    if (a > 0 and p - q > high_prob) or (a <= 0 and p - q < -low_prob):
        return 0.0, 0.0, a != 0
    c = min(exp(logp - anchor), math.inf if max_ratio is None else max_ratio)
    return c * a, c * a, False


def dppo_kl(logp: float, anchor: float, a: float, *, low_nats=0.05, high_nats=0.05, max_ratio=None) -> Point:
    p, q = math.exp(logp), math.exp(anchor)
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    if (a > 0 and p > q and kl > high_nats) or (a <= 0 and p < q and kl > low_nats):
        return 0.0, 0.0, a != 0
    c = min(exp(logp - anchor), math.inf if max_ratio is None else max_ratio)
    return c * a, c * a, False


def sapo(logp: float, anchor: float, a: float, *, tau_positive=1.0, tau_negative=1.05) -> Point:
    x, tau = logp - anchor, tau_positive if a > 0 else tau_negative
    r = exp(x)
    gate = 1 / (1 + math.exp(-clip(tau * (r - 1), -700, 700)))
    c = 4 * gate * (1 - gate) * r if abs(x) <= 20 else 0.0
    return c * a, 4 / tau * gate * a, False


def dro(logp: float, anchor: float, a: float, *, beta: float) -> Point:
    x = logp - anchor
    return a - beta * x, a * logp - beta / 2 * x * x, False


def topr(logp: float, anchor: float, a: float) -> Point:
    c = 1.0 if a > 0 else clip(exp(logp - anchor), 0, 1)
    return c * a, c * a * logp, False


def reinforce(logp: float, anchor: float, a: float) -> Point:
    return a, a * logp, False


def gspo(logp: Floats, anchor: Floats, a: Floats, *, clip_low=3e-4, clip_high=4e-4) -> list[Point]:
    mean = math.fsum(p - q for p, q in zip(logp, anchor, strict=True)) / len(logp)
    return [clipped_ratio(mean, advantage, clip_low, clip_high, -math.inf, 10) for advantage in a]


def gmpo(logp: Floats, anchor: Floats, a: Floats, *, clip_low_nats=0.4, clip_high_nats=0.4) -> list[Point]:
    bounded = []
    for p, q, advantage in zip(logp, anchor, a, strict=True):
        x = p - q
        bounded.append(clip(min(x, clip_high_nats) if advantage > 0 else max(x, -clip_low_nats), -20, 20))
    s = math.exp(math.fsum(bounded) / len(bounded))
    points = []
    for p, q, advantage, b in zip(logp, anchor, a, bounded, strict=True):
        points.append((0.0 if b != p - q else s * advantage, s * advantage, b != p - q))
    return points


def vespo(
    logp: Floats, anchor: Floats, a: Floats, *, k_positive=2, lam_positive=3, k_negative=3, lam_negative=2
) -> list[Point]:
    log_w = math.fsum(clip(p - q, -20, 20) for p, q in zip(logp, anchor, strict=True))
    w = math.exp(clip(log_w, math.log(1e-8), 20))
    points = []
    for p, advantage in zip(logp, a, strict=True):
        k, lam = (k_positive, lam_positive) if advantage >= 0 else (k_negative, lam_negative)
        phi = w**k * math.exp(max(lam * (1 - w), -700))
        points.append((phi * advantage, phi * advantage * p, False))
    return points


TOKEN_SURROGATES = {f.__name__: f for f in (ppo_clip, cispo, dppo_tv, dppo_kl, sapo, dro, topr, reinforce)}
SEQUENCE_SURROGATES = {f.__name__: f for f in (gspo, gmpo, vespo)}


def surrogate(name: str, policy, anchor, advantages, mask, sequences, **parameters) -> list[Point]:
    points = [NOTHING] * len(mask)
    for tokens in (trained(s, mask) for s in sequences):
        if name in TOKEN_SURROGATES:
            found = [TOKEN_SURROGATES[name](policy[t], anchor[t], advantages[t], **parameters) for t in tokens]
        elif tokens:
            lists = ([values[t] for t in tokens] for values in (policy, anchor, advantages))
            found = SEQUENCE_SURROGATES[name](*lists, **parameters)
        else:
            found = []
        for t, point in zip(tokens, found, strict=True):
            points[t] = point
    return points


# Corrections: (weight, keep) of each token.

Verdict = tuple[float, bool]
UNTRAINED: Verdict = (0.0, False)


def by_token(mask, judge: Callable[[int], Verdict]) -> list[Verdict]:
    return [judge(t) if mask[t] else UNTRAINED for t in range(len(mask))]


def log_rho_at(level: str, log_rho, mask, sequences) -> dict[int, float]:
    found = {}
    for tokens in (trained(s, mask) for s in sequences):
        total = math.fsum(log_rho[t] for t in tokens)
        for t in tokens:
            found[t] = {"token": log_rho[t], "sequence": total, "geometric": total / len(tokens)}[level]
    return found


def importance(log_rho, mask, sequences, *, level, action, low_ratio=None, high_ratio=None) -> list[Verdict]:
    x = log_rho_at(level, log_rho, mask, sequences)
    least, most = 0.0 if low_ratio is None else low_ratio, math.inf if high_ratio is None else high_ratio

    def judge(t: int) -> Verdict:
        rho = exp(x[t])
        inside = least <= rho <= most
        if action == "truncate":
            return min(rho, most), True
        if action == "clip":
            return clip(rho, least, most), True
        if action == "mask":
            return (rho if inside else 0.0), True
        return 1.0, inside

    return by_token(mask, judge)


def veto(log_rho, mask, sequences, *, low_ratio=None, high_ratio=None) -> list[Verdict]:
    dead = set()
    for s in sequences:
        if any(
            math.exp(log_rho[t]) < low_ratio or (high_ratio and math.exp(log_rho[t]) > high_ratio)
            for t in trained(s, mask)
        ):
            dead |= set(s)
    return by_token(mask, lambda t: (1.0, t not in dead))


def opsm(log_rho, advantages, mask, sequences, *, max_nats) -> list[Verdict]:
    x = log_rho_at("geometric", log_rho, mask, sequences)
    return by_token(mask, lambda t: (1.0, not (advantages[t] < 0 and -x[t] > max_nats)))


def m2po(log_rho, mask, *, max_mean_square=0.04) -> list[Verdict]:
    kept = [t for t in range(len(mask)) if mask[t]]
    while kept and math.fsum(log_rho[t] ** 2 for t in kept) / len(kept) >= max_mean_square:
        kept.remove(max(kept, key=lambda t: (log_rho[t] ** 2, t)))
    return by_token(mask, lambda t: (1.0, t in kept))


def divergence(log_rho, mask, sequences, *, estimator, level, max_nats) -> list[Verdict]:
    def estimate(t: int) -> float:
        x = clip(log_rho[t], -20, 20)
        return x * x / 2 if estimator == "k2" else math.exp(x) - 1 - x

    found = {}
    for tokens in (trained(s, mask) for s in sequences):
        values = [estimate(t) for t in tokens]
        if level == "token":
            found |= dict(zip(tokens, values, strict=True))
        elif tokens:
            found |= dict.fromkeys(tokens, math.fsum(values) / len(values))
    return by_token(mask, lambda t: (1.0, found[t] <= max_nats))


def correct(kind: str, log_rho, advantages, mask, sequences, **parameters) -> list[Verdict]:
    """The verdicts of the correction of that name."""
    given = {"opsm": (log_rho, advantages, mask, sequences), "m2po": (log_rho, mask)}
    return globals()[kind](*given.get(kind, (log_rho, mask, sequences)), **parameters)


def combine(several: list[list[Verdict]]) -> list[Verdict]:
    return [(math.prod(w for w, _ in each), all(k for _, k in each)) for each in zip(*several, strict=True)]


# Aggregation.


def token_weights(mode: str, mask, sequences, groups, *, num_sequences: int, max_length: int) -> Floats:
    """As if this batch were the whole step, but for `num_sequences`."""
    weights = [0.0] * len(mask)
    num_tokens = sum(mask)
    for s, group in zip(sequences, groups, strict=True):
        in_group = sum(len(trained(other, mask)) for other, g in zip(sequences, groups, strict=True) if g == group)
        for t in trained(s, mask):
            weights[t] = {
                "token-mean": lambda: 1 / num_tokens,
                "seq-mean-token-sum": lambda: 1 / num_sequences,
                "seq-mean-token-mean": lambda s=s: 1 / (len(trained(s, mask)) * num_sequences),
                "seq-mean-token-sum-norm": lambda: 1 / (num_sequences * max_length),
                "prompt-mean": lambda n=in_group: 1 / (n * len(set(groups))),
            }[mode]()
    return weights


# Penalties: (value, derivative) at a token.


def kl(kind: str, logp: float, reference: float, log_ratio: float = 0.0) -> tuple[float, float]:
    d, r = logp - reference, exp(log_ratio)
    if kind.endswith("+"):
        return kl(kind[:-1], logp, reference)[0], d
    if kind == "k1":
        return d, 1.0
    if kind == "abs":
        return abs(d), float((d > 0) - (d < 0))
    if kind == "k2":
        return d * d / 2, d
    if kind == "k3":
        return exp(-d) - 1 + d, 1 - exp(-d)
    if kind == "k3_reweighted":
        return r * (exp(-d) - 1 + d), r * d if abs(log_ratio) <= 20 else 0.0
    assert kind == "low_var_kl", kind
    value = exp(-d) - 1 + clip(d, -20, 20)
    return min(value, 10.0), (1 - math.exp(-d) if value <= 10 and abs(d) <= 20 else 0.0)
