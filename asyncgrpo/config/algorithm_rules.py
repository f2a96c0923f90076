"""Rules of the algorithm's settings, beside those of `rules.py`: they ask `algorithms/`, which imports torch.

`check_algorithm` refuses what has no meaning, what would count something twice, and what would be ignored without a
word; each in one sentence with key and value. It looks at the configuration only, so whoever starts a run calls it
before anything else is started.
"""

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from asyncgrpo.algorithms import pairwise
from asyncgrpo.algorithms.surrogates import SURROGATES
from asyncgrpo.config.explain import near, value_in_words
from asyncgrpo.config.schema import CRITIC, PAIRWISE, AlgorithmConfig, Config, CorrectionConfig, CriticConfig
from asyncgrpo.errors import ConfigError

WITHOUT_RATIO = frozenset({"reinforce", "dro", PAIRWISE})
"""Losses whose coefficient does not contain policy / anchor."""

_NOT_NEGATIVE = frozenset({"low", "high", "k_positive", "lam_positive", "k_negative", "lam_negative"})


def check_algorithm(config: Config) -> None:
    """Raise ConfigError for the first thing wrong with `algorithm`, or with what `learner` makes of it."""
    problem = next((problem for rule in _RULES for problem in rule(config)), None)
    if problem is not None:
        raise ConfigError(problem)


# -- arguments of the loss ---------------------------------------------------------------------------------------------


def loss_arguments(loss: str) -> dict[str, inspect.Parameter]:
    """What `algorithm.loss_args` may say of a loss, with types and defaults."""
    function: Callable[..., Any] = pairwise.pairwise if loss == PAIRWISE else SURROGATES[loss]
    parameters = inspect.signature(function).parameters.values()
    found = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "reference_logprobs"}
    if loss == PAIRWISE:
        found["reference"] = inspect.Parameter(
            "reference", inspect.Parameter.KEYWORD_ONLY, annotation=bool, default=False
        )
        found["pairs"] = inspect.Parameter(
            "pairs", inspect.Parameter.KEYWORD_ONLY, annotation=pairwise.PairKind, default="best_worst"
        )
    return found


def _arguments(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    allowed = loss_arguments(algorithm.loss)
    for name, value in algorithm.loss_args.items():
        if name not in allowed:
            hint = f"{near(name, allowed)} " if near(name, allowed) else ""
            yield (
                f"algorithm.loss_args.{name} (value {value_in_words(value)}) is no argument of {algorithm.loss}: "
                f"{hint}{_list(allowed)}"
            )
            return
        needs = _needs(name, allowed[name].annotation, value)
        if needs:
            yield f"algorithm.loss_args.{name} must be {needs}; it is {value_in_words(value)}"
    missing = [n for n, p in allowed.items() if p.default is p.empty and n not in algorithm.loss_args]
    for name in missing:
        yield (
            f"algorithm.loss={algorithm.loss} needs algorithm.loss_args.{name}, which has no default, for example "
            f"algorithm.loss_args.{name}=0.1"
        )


def _list(allowed: dict[str, inspect.Parameter]) -> str:
    """The arguments and their defaults, as the end of a sentence."""
    if not allowed:
        return "it takes none"
    said = [f"{n} ({'required' if p.default is p.empty else value_in_words(p.default)})" for n, p in allowed.items()]
    return f"it takes {', '.join(said)}"


def _needs(name: str, annotation: Any, value: Any) -> str:
    """What the value must be instead, as the end of "must be"; empty if it is that."""
    optional = isinstance(annotation, types.UnionType) and type(None) in typing.get_args(annotation)
    if value is None and optional:
        return ""
    or_null = " (or null)" if optional else ""
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return "" if value in choices else f"one of {', '.join(choices)}"
    if annotation is bool:
        return "" if isinstance(value, bool) else "true or false"
    least, strictly = (1.0, True) if name == "dual" else (0.0, name not in _NOT_NEGATIVE)
    words = f"a number, {'above' if strictly else 'at least'} {least:g}{or_null}"
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return words
    return "" if value > least or (value == least and not strictly) else words


# -- corrections -------------------------------------------------------------------------------------------------------

# Which fields each kind reads, beside `kind`.
_READS = {
    "importance": {"level", "action", "low", "high"},
    "veto": {"low", "high"},
    "opsm": {"threshold"},
    "m2po": {"threshold"},
    "divergence": {"level", "high", "estimator"},
}


def _corrections(config: Config) -> Iterator[str]:
    for number, one in enumerate(config.algorithm.corrections):
        key = f"algorithm.corrections[{number}]"
        for name in one.__struct_fields__:
            value = getattr(one, name)
            if name != "kind" and name not in _READS[one.kind] and value != getattr(CorrectionConfig(), name):
                reads = ", ".join(n for n in one.__struct_fields__ if n in _READS[one.kind])
                yield f"{key}.{name} is {value_in_words(value)}, which kind {one.kind} does not read; it takes {reads}"
        yield from (f"{key} {problem}" for problem in _bounds(one))
        yield from (f"{key} {problem}" for problem in _place(one, config.algorithm))


def _bounds(one: CorrectionConfig) -> Iterator[str]:
    """What is wrong with the numbers of one correction, after its key."""
    low, high = one.low, one.high
    for name in ("low", "high", "threshold"):
        value = getattr(one, name)
        if value is not None and not value > 0:
            yield f"has {name}: {value:g}, but it must be above 0"
    if low is not None and high is not None and low > high:
        yield f"has low: {low:g} above high: {high:g}, so it would keep nothing"
    if one.kind == "importance" and one.action == "truncate" and low is not None:
        yield f"truncates, which has no lower bound, but has low: {low:g}; use action: clip"
    unbounded = low is None and high is None
    if one.kind == "importance" and one.action != "truncate" and unbounded:
        yield f"has action: {one.action} and no bound, so there is nothing outside; give low, high or both"
    if one.kind == "veto" and unbounded:
        yield "is a veto without a bound, which rejects nothing; give low, high or both, for example low: 1e-4"
    if one.kind == "divergence" and high is None:
        yield "is a divergence without high, the largest estimate that is kept, nats; for example high: 0.01"
    if one.kind == "divergence" and one.level == "geometric":
        yield "is a divergence at level geometric; it has the levels token and sequence (the mean over an answer)"
    if one.kind == "opsm" and one.threshold is None:
        yield "is opsm without threshold, the mean log-ratio that is kept, nats per token; for example threshold: 0.5"


def _place(one: CorrectionConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    """What is wrong with a correction where it stands, after its key."""
    weighs = one.kind == "importance" and one.action != "reject"
    if algorithm.anchor == "behaviour" and weighs and algorithm.loss not in WITHOUT_RATIO:
        yield (
            f"weights tokens by policy / behaviour, and with algorithm.anchor=behaviour {algorithm.loss} contains that "
            "ratio already: it would count twice; use algorithm.corrections=[], action: reject, or loss: reinforce"
        )
    only_rejects = one.kind in ("veto", "opsm", "divergence") or (one.kind == "importance" and one.action == "reject")
    if algorithm.anchor == "interpolated" and only_rejects:
        what = one.kind if one.kind != "importance" else "rejection"
        yield (
            f"judges anchor / behaviour ({what}), which algorithm.anchor=interpolated makes 1 for tokens of lag 0 and 1: "
            "it would pass what it is for; use anchor: proximal or behaviour"
        )
    if one.kind == "opsm" and algorithm.advantage == CRITIC:
        yield "is opsm, which judges an answer by its advantage, but algorithm.advantage=gae has one for each token"


# -- the rest ----------------------------------------------------------------------------------------------------------


def _kl(config: Config) -> Iterator[str]:
    a = config.algorithm
    if a.kl_target is not None and not a.kl_target > 0:
        yield f"algorithm.kl_target must be above 0; it is {a.kl_target:g}"
    if a.kl_target is not None and a.kl_coef == 0:
        yield (
            f"algorithm.kl_target is {a.kl_target:g}, but algorithm.kl_coef is 0, so there is no KL to steer; set "
            "kl_coef to where it begins"
        )
    if a.kl_coef == 0:
        return
    if a.kl_in == "loss" and a.kl_kind == "k1":
        yield (
            "algorithm.kl_kind=k1 has no gradient in expectation when algorithm.kl_in is loss, only noise; use k1+ (its "
            "value, the gradient of k2), low_var_kl, or kl_in=reward"
        )
    if a.kl_in == "reward" and (a.kl_kind in ("full", "k3_reweighted") or a.kl_kind.endswith("+")):
        why = "is only another gradient" if a.kl_kind.endswith("+") else "has no value for one sampled token"
        why = "is made for its gradient" if a.kl_kind == "k3_reweighted" else why
        yield (
            f"algorithm.kl_kind={a.kl_kind} {why}, and a KL in the reward (algorithm.kl_in=reward) needs the value of "
            "each token; use k1"
        )
    if a.kl_in == "reward" and a.loss == PAIRWISE:
        yield (
            "algorithm.kl_in=reward has no part in algorithm.loss=pairwise, which only asks which reward is higher; use "
            "kl_in=loss, or loss_args.reference=true"
        )


def _rewards(config: Config) -> Iterator[str]:
    a, longest = config.algorithm, config.sampling.max_tokens
    if a.overlong_buffer > longest:
        yield (
            f"algorithm.overlong_buffer ({a.overlong_buffer}) is more than sampling.max_tokens ({longest}); a fifth of "
            "it is usual"
        )
    if a.overlong_buffer and a.truncated == "zero":
        yield (
            f"algorithm.truncated=zero with algorithm.overlong_buffer ({a.overlong_buffer}) rewards an answer that is "
            "cut (0) above one that ends just before (a penalty); use truncated=keep or mask"
        )
    below_zero = None
    if a.overlong_buffer and a.overlong_factor:
        below_zero = f"algorithm.overlong_buffer ({a.overlong_buffer}) subtracts from"
    if a.kl_coef and a.kl_in == "reward":
        below_zero = "algorithm.kl_in=reward subtracts from"
    if a.advantage == "max_rl" and below_zero:
        yield f"algorithm.advantage=max_rl divides by the mean reward, so rewards must not be negative, but {below_zero} them"


def _estimators(config: Config) -> Iterator[str]:
    a = config.algorithm
    if a.advantage != CRITIC and a.critic != CriticConfig():
        changed = [n for n in a.critic.__struct_fields__ if getattr(a.critic, n) != getattr(CriticConfig(), n)]
        yield f"algorithm.critic.{changed[0]} is set, but algorithm.advantage={a.advantage} has no critic; only gae has"
    if a.critic.value_clip is not None and not a.critic.value_clip > 0:
        yield f"algorithm.critic.value_clip must be above 0 (or null); it is {a.critic.value_clip:g}"
    if a.loss == PAIRWISE and a.advantage == CRITIC:
        yield "algorithm.advantage=gae trains a critic for advantages that algorithm.loss=pairwise does not use"
    if a.filter_zero_signal and a.advantage == CRITIC:
        yield (
            "algorithm.filter_zero_signal replaces groups whose rewards are all equal, but algorithm.advantage=gae learns "
            "from them too, and its critic would never see a prompt that is always or never solved"
        )


def _updates(config: Config) -> Iterator[str]:
    a, learner = config.algorithm, config.learner
    if learner.minibatches > config.buffer.prompts_per_step:
        yield (
            f"learner.minibatches ({learner.minibatches}) is more than buffer.prompts_per_step "
            f"({config.buffer.prompts_per_step}), and each needs at least one group"
        )
    if learner.minibatches > 1 and a.loss == PAIRWISE:
        yield (
            f"learner.minibatches is {learner.minibatches}, but algorithm.loss=pairwise compares answers under the "
            "weights at the start of the step, which only the first of several updates would have; use 1"
        )
    if learner.ess_lr and a.anchor == "interpolated":
        yield (
            "learner.ess_lr measures the effective sample share of anchor / behaviour, which "
            "algorithm.anchor=interpolated makes 1 for tokens of lag 0 and 1; use anchor: proximal or behaviour"
        )


_RULES = (_arguments, _corrections, _kl, _rewards, _estimators, _updates)
