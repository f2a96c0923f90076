"""The algorithms again, as loops over plain floats that follow the notation of the papers. Slow on purpose."""

import math


def ppo_value(log_ratio: float, advantage: float, *, low: float, high: float) -> float:
    ratio = math.exp(log_ratio)
    return min(ratio * advantage, max(1 - low, min(ratio, 1 + high)) * advantage)


def kl_value(policy: float, reference: float, *, kind: str) -> float:
    d = policy - reference
    return {"k1": d, "k2": d * d / 2, "low_var_kl": min(math.exp(-d) - 1 + d, 10.0)}[kind]


def token_weight(mode: str, lengths: list[list[bool]], max_length: int) -> list[float]:
    num_tokens = sum(map(sum, lengths))
    denominator = {"token-mean": num_tokens, "seq-mean-token-sum-norm": len(lengths) * max_length}[mode]
    return [float(trained) / denominator for sequence in lengths for trained in sequence]


def derivative(function, x: float, step: float = 1e-6) -> float:
    """Derivative by central differences."""
    return (function(x + step) - function(x - step)) / (2 * step)
