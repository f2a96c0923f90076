"""The keys of verl and of TRL in the keys of asyncgrpo: `VERL` and `TRL` apply the map `foreign_keys.yaml`.

The map is data. Where a value depends on several of their keys, it names a rule: a function of this file that takes the value,
all keys that were given, and the key of ours that the map names. A rule returns our keys with their values, a reason why there
are none, or both: keys and a note. It raises `Odd` where the user has to choose.
"""

import math
import os
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import msgspec
from msgspec.structs import replace

from asyncgrpo.errors import ConfigError

Given = dict[str, Any]
Translated = dict[str, Any] | str | tuple[dict[str, Any], str]

# -- the map -----------------------------------------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The translation of one key of theirs. The head of `foreign_keys.yaml` explains the fields."""

    ours: str = ""
    values: dict[str, Any] | None = None
    special: dict[str, Any] = {}
    without: dict[str, str] = {}
    when: dict[str, str] = {}
    rule: str = ""
    note: str = ""
    by_hand: str = ""
    absent: str = ""


class _Section(msgspec.Struct, forbid_unknown_fields=True):
    renamed: dict[str, str]
    translated: dict[str, Entry]
    by_hand: dict[str, list[str]]
    absent: dict[str, list[str]]
    defaults: dict[str, Any]
    without_a_key: dict[str, Any]


class TranslatedKey(NamedTuple):
    """One key of another system, translated."""

    key: str
    """Theirs."""
    value: Any
    ours: dict[str, Any]
    """Our keys and their values; empty where this value has no counterpart."""
    words: str
    """The reason for no counterpart, or the work to do by hand; beside a counterpart, a note."""
    by_hand: bool = False
    """True if the user has to choose: nothing takes the value, or the value of our key is not known."""


class KeyMap:
    """The keys of one system and their counterparts. A key that ends in `*` stands for all keys with that start.

    Args:
        system: its name, in messages and as the section of `foreign_keys.yaml`.
    """

    def __init__(self, system: str) -> None:
        self.system = system

    @cached_property
    def _section(self) -> _Section:
        file = Path(__file__).with_name("foreign_keys.yaml")
        return msgspec.yaml.decode(file.read_bytes(), type=dict[str, _Section])[self.system]

    @cached_property
    def keys(self) -> dict[str, Entry]:
        """The map, in the order of its file."""
        entries = {key: Entry(ours=ours) for key, ours in self._section.renamed.items()} | self._section.translated
        entries |= {key: Entry(by_hand=do) for do, keys in self._section.by_hand.items() for key in keys}
        return entries | {key: Entry(absent=why) for why, keys in self._section.absent.items() for key in keys}

    def entry_of(self, key: str) -> Entry | None:
        """Return the entry of the map for `key`, with the rest of its name for a `*`; None for a key that is not theirs."""
        for name, entry in self.keys.items():
            start, star, _ = name.partition("*")
            if key == name or (star and key.startswith(start)):
                return replace(entry, ours=entry.ours.replace("*", key.removeprefix(start)))
        return None

    def translate(self, given: Given) -> list[TranslatedKey]:
        """Translate each key of `given` that the map has; other keys are left out.

        Args:
            given: their keys, dotted and without Hydra's plus, and their values as YAML reads them.
        """
        known = {key: entry for key in given if (entry := self.entry_of(key)) is not None}
        return [_translated(key, entry, given) for key, entry in known.items()]

    def unwritten(self, given: Given, unknown: Collection[str] = ()) -> dict[str, Any]:
        """Return their defaults for keys that are not given, in our keys, where our default differs.

        Args:
            unknown: their keys that are given with a value that is not known.
        """
        written = merged(self.translate(given))
        defaults = {key: value for key, value in self._section.defaults.items() if key not in unknown}
        does = merged(self.translate(defaults | given)) | self._section.without_a_key
        return {key: value for key, value in does.items() if key not in written}


def _translated(key: str, entry: Entry, given: Given) -> TranslatedKey:
    value = given[key]
    try:
        found = _applied(entry, value, given)
    except Odd as odd:
        return TranslatedKey(key, value, {}, f"{entry.ours} {odd}", by_hand=True)
    if isinstance(found, str):
        return TranslatedKey(key, value, {}, found, by_hand=bool(entry.by_hand))
    return TranslatedKey(key, value, *(found if isinstance(found, tuple) else (found, entry.note)))


def _applied(entry: Entry, value: Any, given: Given) -> Translated:
    text = as_text(value)
    if entry.by_hand or entry.absent:
        return entry.by_hand or entry.absent
    for other, needed in entry.when.items():
        if as_text(given.get(other)) != needed:
            return f"{other} is not {needed}, so it does nothing"
    if text in entry.without:
        return entry.without[text]
    if text in entry.special:
        return {entry.ours: entry.special[text]}
    if value is None and entry.rule not in _READ_NULL and text not in (entry.values or ()):
        return "null leaves the default"
    if entry.rule:
        return RULES[entry.rule](value, given, entry.ours)
    if entry.values is None:
        return {entry.ours: value}
    if text not in entry.values:
        return entry.note or f"{text} has no counterpart"
    ours = entry.values[text]
    return {entry.ours: ours}, "" if as_text(ours) == text else entry.note


def merged(rows: Iterable[TranslatedKey]) -> dict[str, Any]:
    return {key: value for row in rows for key, value in row.ours.items()}


def as_text(value: Any) -> str:
    """A value as YAML writes it, for looking up: `true`, `null`, `-1`, `vllm`."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# -- values that a rule can compute with -------------------------------------------------------------------------------


class Odd(ValueError):
    """A value of theirs that leaves our key to the user. The message follows the name of our key."""


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(given: Given, key: str, default: int | None = None) -> int:
    """Return a whole number above 0. Raises Odd."""
    value = given.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = f"{key}={as_text(value)}" if key in given else f"{key}, which is not given"
    raise Odd(f"cannot be computed from {found}")


def _number(given: Given, key: str, default: float) -> float:
    """Return a number of at least 0. Raises Odd."""
    value = given.get(key, default)
    if _is_number(value) and value >= 0:
        return float(value)
    raise Odd(f"cannot be computed from {key}={as_text(value)}")


# -- rules of both -----------------------------------------------------------------------------------------------------

_LOGGERS = ("wandb", "tensorboard", "trackio", "mlflow")


def files(value: Any, _: Given, ours: str) -> Translated:
    """A file, or a list of several."""
    named = [os.path.expanduser(str(file)) for file in (value if isinstance(value, list) else [value])]
    if not named:
        raise Odd("takes a file, or several")
    return {ours: named[0] if len(named) == 1 else named}


def lora_targets(value: Any, _: Given, ours: str) -> Translated:
    """The names of layers, or `all-linear`."""
    return {ours: [] if value == "all-linear" else value if isinstance(value, list) else [value]}


def loggers(value: Any, _: Given, ours: str) -> Translated:
    """A logger or a list of them, without those that are always on, such as the console."""
    return {ours: [name for name in (value if isinstance(value, list) else [value]) if name in _LOGGERS]}


def entropy(value: Any, given: Given, ours: str) -> Translated:
    """The weight of the bonus, which is constant there."""
    is_constant = not value or given.get("algorithm.adv_estimator") == "gae"
    return {ours: value} if is_constant else ({ours: value}, "hopeless groups lower it here: docs/stability.md")


def split_gpus(
    n_gpus: int, gpus_each: int = 1, *, count: int | None = None, ranks: int | None = None
) -> tuple[int, int]:
    """Share GPUs between generators and learner, without knowing the model: half and half.

    Half, because full training keeps 16 bytes a parameter on the learner's GPUs alone, and the learner passes over each
    token two to three times. FSDP takes any number of ranks. Of an odd number the generators get one more; what is too
    little for one more generator of `gpus_each` GPUs is the learner's: 8 is 4 + 4, 5 is 3 + 2.

    Args:
        n_gpus: at least 2; `cluster.share_gpu` is for one.
        count: generators, where that is decided already; the learner then gets the rest.
        ranks: learner ranks, where that is decided already; the generators then get the rest.
    Returns:
        Generators and learner ranks. Together they use at most `n_gpus`, unless both were given.
    Raises:
        ConfigError: one side would get nothing.
    """
    if n_gpus < 2:
        raise ConfigError(f"--n-gpus {n_gpus} is too few to split; give 2 or more, 1 for a shared GPU, or 0 for CPU")
    if count is None:
        left = n_gpus - (n_gpus // 2 if ranks is None else ranks)
        count = left // gpus_each if ranks is not None else max(1, left // gpus_each)
    if ranks is None:
        ranks = n_gpus - count * gpus_each
    if count < 1 or ranks < 1:
        both = f"{max(count, 1)} x {gpus_each} GPUs of generators and {max(ranks, 1)} learner ranks"
        lower = "generators.gpus_each, generators.count or learner.ranks"
        raise ConfigError(f"--n-gpus {n_gpus} cannot hold {both}; give more GPUs, or lower {lower}")
    return count, ranks


# -- verl: sizes and places --------------------------------------------------------------------------------------------

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_CORRECTION, _ASYNC = "algorithm.rollout_correction.", "async_training."
_V1_MODE = "trainer.v1.trainer_mode"

# verl's defaults, where a rule needs a key that was not given.
_MINI_BATCH, _KL_COEF, _THRESHOLD, _EPOCHS, _CLIP = 256, 0.001, 2.0, 30, 0.2
_STALENESS, _SYNC_EVERY = 0.1, 4


def _is_fully_async(given: Given) -> bool:
    """True for the fully asynchronous recipe, which fetches prompts one by one and has no `data.train_batch_size`."""
    return any(key.startswith(_ASYNC) for key in given)


def _fetch(given: Given) -> tuple[int, int]:
    """Prompts and updates of one fetch of the fully asynchronous recipe, which is a step here."""
    updates = _count(given, f"{_ASYNC}require_batches", 1)
    return _count(given, f"{_ACTOR}ppo_mini_batch_size", _MINI_BATCH) * updates, updates


def verl_prompts_per_step(value: Any, given: Given, ours: str) -> Translated:
    return {ours: value if value and not _is_fully_async(given) else _fetch(given)[0]}


def verl_minibatches(_: Any, given: Given, ours: str) -> Translated:
    if _is_fully_async(given):
        prompts, updates = _fetch(given)
        return {ours: updates, "buffer.prompts_per_step": prompts}
    return {ours: _updates_per_step(given)}


def _updates_per_step(given: Given) -> int:
    mini = _count(given, f"{_ACTOR}ppo_mini_batch_size")
    if given.get("data.train_batch_size") == 0:
        return 1
    return max(1, round(_count(given, "data.train_batch_size") / mini))


def _updates_or_one(given: Given) -> int:
    try:
        return _fetch(given)[1] if _is_fully_async(given) else _updates_per_step(given)
    except Odd:
        return 1


def verl_max_lag(_: Any, given: Given, ours: str) -> dict[str, Any]:
    """The steps by which a group is behind at most: so many prompts begin between two synchronizations, and no more."""
    if not _is_fully_async(given):
        return {ours: 1}
    stale, every = _number(given, f"{_ASYNC}staleness_threshold", _STALENESS), _sync_every(given)
    prompts, _updates = _fetch(given)
    return {ours: -(-int(prompts * (1 + stale) * every) // prompts) - 1}


def verl_batches_ahead(_: Any, given: Given, ours: str) -> Translated:
    """verl's trainer of version 1: asynchronous, it generates so many batches before the first step, and stays ahead."""
    mode = given.get(_V1_MODE, "sync")
    return {ours: 0 if mode == "sync" else math.ceil(_number(given, f"trainer.v1.{mode}.num_warmup_batches", 1))}


def _sync_every(given: Given) -> int:
    return _count(given, f"{_ASYNC}trigger_parameter_sync_step", _SYNC_EVERY)


def verl_every(value: Any, given: Given, ours: str) -> Translated:
    """Steps; the fully asynchronous recipe counts synchronizations, which are several steps apart."""
    return {ours: _count({"its value": value}, "its value") * _sync_every(given) if _is_fully_async(given) else value}


def verl_steps(value: Any, given: Given, ours: str) -> Translated:
    """verl ends after its epochs, if they come first."""
    has_epochs = "trainer.total_epochs" in given or "rollout.total_epochs" in given
    return {ours: value} if has_epochs else {ours: value, "run.epochs": _EPOCHS}


def verl_prompts_in_all(_: Any, given: Given, ours: str) -> Translated:
    return verl_steps(max(1, _count(given, "rollout.total_rollout_steps") // _fetch(given)[0]), given, ours)


def verl_parallel(value: Any, given: Given, ours: str) -> Translated:
    """The learner may have fewer ranks than verl's actor, whose GPUs generate too."""
    size, ranks = _count({"its value": value}, "its value"), _learner_ranks(given)
    if ranks % size == 0:
        return {ours: size}
    return {ours: math.gcd(size, ranks)}, f"the learner has {ranks} ranks, which {size} does not divide"


def _learner_ranks(given: Given) -> int:
    """Return the ranks of the learner; 0, which everything divides, where verl's GPUs are not given."""
    try:
        return int(verl_gpus(None, given, "").get("learner.ranks", 1))
    except Odd:
        return 0


def verl_warmup_steps(value: Any, given: Given, ours: str) -> Translated:
    """verl's rate moves once a step, ours at every update."""
    if not _is_number(value):
        raise Odd("counts updates")
    if value < 0 and f"{_ACTOR}optim.lr_warmup_steps_ratio" in given:
        return "lr_warmup_steps_ratio decides"
    return {ours: round(max(value, 0) * _count(given, f"{_ACTOR}ppo_epochs", 1) * _updates_or_one(given))}


def verl_warmup_share(value: Any, given: Given, ours: str) -> Translated:
    steps, counted = given.get("trainer.total_training_steps"), given.get(f"{_ACTOR}optim.lr_warmup_steps")
    if isinstance(counted, int) and counted >= 0:
        return "lr_warmup_steps decides"
    if value and not (isinstance(value, float) and _is_number(steps) and steps > 0):
        raise Odd("counts updates: this share of those of the run")
    return verl_warmup_steps(value * steps if value else 0, given, ours)


def _own_reward(given: Given) -> str:
    """FILE or FILE:NAME of the user's reward function; empty if there is none."""
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        if path := given.get(f"{section}.path"):
            name = given.get(f"{section}.name")
            return str(path) if name in (None, "compute_score") else f"{path}:{name}"
    return ""


def verl_reward_function(_: Any, given: Given, ours: str) -> Translated:
    return {ours: own} if (own := _own_reward(given)) else "custom_reward_function.path is not given"


def verl_reward_model(value: Any, given: Given, ours: str) -> Translated:
    if value is not True:
        return "rules or your function score, as by default"
    if _own_reward(given):
        return "your function scores; for both, name both: reward.function=[FILE:NAME, model]"
    return {ours: "model"}


def verl_gpus(_: Any, given: Given, __: str) -> dict[str, Any]:
    """verl's GPUs do both jobs in turn, or each its own where the rollout has some of its own (fully asynchronous)."""
    each, gpus = _count(given, f"{_ROLLOUT}tensor_model_parallel_size", 1), _gpus_of_trainer(given)
    if (of_rollout := _gpus_of_rollout(given)) is not None:
        return {"generators.count": max(1, of_rollout // each), "learner.ranks": gpus}
    if gpus == 1:
        return {"cluster.share_gpu": True}
    count, ranks = split_gpus(gpus, _leaving_a_learner(each, gpus))
    return {"generators.count": count, "learner.ranks": ranks}


def verl_gpus_each(value: Any, given: Given, ours: str) -> Translated:
    try:
        each, gpus = _count(given, f"{_ROLLOUT}tensor_model_parallel_size"), _gpus_of_trainer(given)
    except Odd:
        return {ours: value}
    fitting = _leaving_a_learner(each, gpus)
    if _gpus_of_rollout(given) is not None or each == fitting:
        return {ours: value}
    return {ours: fitting}, f"the learner has GPUs of its own, and {gpus} in all leave an engine no {value}"


def _leaving_a_learner(each: int, gpus: int) -> int:
    """The GPUs of an engine, halved until they leave one of `gpus`."""
    while each >= gpus and each > 1:
        each //= 2
    return each


def _gpus_of_trainer(given: Given) -> int:
    return _count(given, "trainer.nnodes", 1) * _count(given, "trainer.n_gpus_per_node")


def _gpus_of_rollout(given: Given) -> int | None:
    """GPUs that only generate; None where there are none."""
    try:
        if given.get(_V1_MODE) == "separate_async" and f"{_ROLLOUT}nnodes" in given:
            each = f"{_ROLLOUT}n_gpus_per_node"
            each = each if each in given else "trainer.n_gpus_per_node"
            return _count(given, f"{_ROLLOUT}nnodes") * _count(given, each)
        return _count(given, "rollout.nnodes", 1) * _count(given, "rollout.n_gpus_per_node")
    except Odd:
        return None


# -- verl: the objective -----------------------------------------------------------------------------------------------

_CLIPPED = dict.fromkeys(("vanilla", "ppo_clip", "gspo", "cispo"), "clip_{}")
_CLIPPED |= {"geo_mean": "clip_{}_nats", "dppo_tv": "{}_prob", "dppo_kl": "{}_nats"}
"""Losses with a lower and an upper bound: verl's name to that of our argument, where {} is the side."""

_ADVANTAGES = {
    name: name for name in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "remax", "gae", "reinforce_plus_plus_baseline")
} | {"grpo_passk": "pass_at_k", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}


def verl_advantage(_: Any, given: Given, ours: str) -> Translated:
    named = str(given.get("algorithm.adv_estimator", "grpo"))
    if named not in _ADVANTAGES:
        return f"{named} has no counterpart"
    centred = named.startswith("grpo") and given.get("algorithm.norm_adv_by_std_in_grpo", True) is False
    if centred and named == "grpo_passk":
        return "pass_at_k always divides by the std"
    if centred and named == "grpo_vectorized":
        return {ours: "grpo"}, "verl's grpo_vectorized always divides by the std"
    found = {ours: "dr_grpo" if centred else _ADVANTAGES[named]}
    if found[ours] in ("gae", "gpg", "reinforce_plus_plus_baseline") and _updates_or_one(given) > 1:
        return found, "its statistics are those of a minibatch here, of all of them in verl"
    return found


_SURROGATES = {"vanilla": "ppo_clip", "geo_mean": "gmpo", "gpg": "reinforce"} | {
    name: name for name in ("ppo_clip", "gspo", "cispo", "sapo", "reinforce", "dppo_tv", "dppo_kl", "vespo", "dro")
}
_BY_COMPLETION = ("sapo", "geo_mean")
"""Losses that verl averages as `seq-mean-token-mean`, whatever `loss_agg_mode` is."""
_AGGREGATIONS = {"true": "token-mean", "false": "seq-mean-token-mean"} | {
    name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
}


def verl_loss(value: Any, given: Given, ours: str) -> Translated:
    if _has_loss_type(given):
        return "in bypass mode loss_type decides, except in verl's trainer of version 1"
    if (named := str(value)) not in _SURROGATES:
        return f"{named} has no counterpart"
    found = {ours: _SURROGATES[named]}
    if named in _BY_COMPLETION:
        found["algorithm.aggregation"] = "seq-mean-token-mean"
    if _is_fully_async(given) and _bypasses(given) and found[ours] != "ppo_clip":
        return found, "in bypass mode verl's recipe takes loss_type instead, by default ppo_clip"
    return found


def verl_aggregation(value: Any, given: Given, ours: str) -> Translated:
    if _loss(given) in _BY_COMPLETION:
        return f"verl averages {_loss(given)} as seq-mean-token-mean; here its KL and entropy, too"
    if (text := as_text(value)) not in _AGGREGATIONS:
        return f"{text} has no counterpart"
    found = {ours: _AGGREGATIONS[text]}
    if text == "seq-mean-token-sum-norm" and given.get(f"{_ACTOR}loss_scale_factor") is None:
        return found, "without loss_scale_factor verl divides by its padded width, which may vary"
    return found


def _has_loss_type(given: Given) -> bool:
    return given.get(f"{_CORRECTION}bypass_mode") is True and f"{_CORRECTION}loss_type" in given


def _loss(given: Given) -> str:
    if _has_loss_type(given):
        return str(given[f"{_CORRECTION}loss_type"])
    return str(given.get(f"{_ACTOR}policy_loss.loss_mode", given.get(f"{_ACTOR}loss_mode", "vanilla")))


def _clipped(given: Given, **bounds: Any) -> dict[str, Any] | str:
    """The bounds of a ratio, by side."""
    if (name := _CLIPPED.get(_loss(given))) is None:
        return f"the loss {_loss(given)} has no such bound"
    return {f"algorithm.loss_args.{name.format(side)}": value for side, value in bounds.items()}


def verl_clip(value: Any, given: Given, _: str) -> Translated:
    sides = {side: f"{_ACTOR}clip_ratio_{side}" for side in ("low", "high")}
    found = _clipped(given, **{side: value if given.get(key) is None else given[key] for side, key in sides.items()})
    if isinstance(found, str) or value == _CLIP or given.keys() >= set(sides.values()):
        return found
    return found, f"verl itself takes clip_ratio_low and clip_ratio_high, by default {_CLIP}"


def verl_clip_side(value: Any, given: Given, ours: str) -> Translated:
    return _clipped(given, **{ours.rpartition("_")[2]: value})


def verl_clip_dual(value: Any, given: Given, ours: str) -> Translated:
    if _loss(given) in ("dppo_tv", "dppo_kl"):
        return {"algorithm.loss_args.max_ratio": value}
    return {ours: value} if _loss(given) in ("vanilla", "ppo_clip") else f"the loss {_loss(given)} has no such bound"


def verl_kl_in_loss(value: Any, given: Given, ours: str) -> Translated:
    if value:
        return {ours: given.get(f"{_ACTOR}kl_loss_coef", _KL_COEF)}
    return "the KL is in the reward" if given.get("algorithm.use_kl_in_reward") else {ours: 0.0}


def verl_kl_in_reward(value: Any, given: Given, ours: str) -> Translated:
    if not value:
        return {ours: "loss"}
    if given.get(f"{_ACTOR}use_kl_loss"):
        return "the KL is in the loss or in the reward, not in both"
    found = {ours: "reward", "algorithm.kl_coef": given.get("algorithm.kl_ctrl.kl_coef", _KL_COEF)}
    if given.get("algorithm.adv_estimator") == "remax":
        return found, "in verl the KL of a token lowers the advantages of it and of those before it, here of all"
    return found


def _bypasses(given: Given) -> bool:
    """True if verl's ratio is policy / behaviour: it takes the log-probs of the rollout, and computes none anew."""
    if given.get(f"{_ASYNC}compute_prox_log_prob") is True:
        return False
    for key in (f"{_CORRECTION}bypass_mode", f"{_ASYNC}use_rollout_log_probs", f"{_ACTOR}use_rollout_log_probs"):
        if key in given:
            return given[key] is True
    return _is_fully_async(given) or (given.get("actor_rollout_ref.hybrid_engine") is False and _V1_MODE not in given)


def verl_anchor(_: Any, given: Given, ours: str) -> dict[str, Any]:
    return {ours: "behaviour" if _bypasses(given) else "proximal", "algorithm.corrections": _corrections(given)[0]}


def verl_engines(_: Any, given: Given, ours: str) -> Translated:
    """`hybrid_engine=False`: the recipes with GPUs of their own for generation, fully asynchronous or one step off."""
    if _V1_MODE in given:
        return verl_batches_ahead(None, given, ours)
    return verl_max_lag(None, given, ours) | verl_anchor(None, given, "algorithm.anchor")


def _has_ratio(given: Given) -> bool:
    """True if the loss has the ratio policy / behaviour itself."""
    return _bypasses(given) and given.get(f"{_CORRECTION}loss_type", "ppo_clip") != "reinforce"


def verl_weight(value: Any, given: Given, ours: str) -> Translated:
    if value is not None and _has_ratio(given):
        return "verl does not apply it: the loss of its bypass mode has that ratio already"
    found = {ours: _corrections(given)[0]}
    return (found, "verl takes its geometric mean over a completion") if _loss(given) == "geo_mean" else found


def verl_rejections(_: Any, given: Given, ours: str) -> Translated:
    found, absent = _corrections(given)
    rejects = any(one.get("kind") == "divergence" or one.get("action") == "reject" for one in found)
    if absent and not rejects:
        return absent
    notes = [absent] if absent else []
    if rejects and not _bypasses(given):
        notes.append("what is rejected leaves verl's denominators and its KL, not ours")
    return {ours: found}, "; ".join(notes)


def _corrections(given: Given) -> tuple[list[dict[str, Any]], str]:
    """The weight (`rollout_is`) and the rejections (`rollout_rs`), and reasons for rejections that have no counterpart."""
    level = given.get(f"{_CORRECTION}rollout_is")
    found: list[dict[str, Any]] = []
    absent = list[str]()
    if level is not None and not _has_ratio(given):
        low, high = _bounds(given.get(f"{_CORRECTION}rollout_is_threshold", _THRESHOLD))
        bounds = {"action": "truncate"} if low is None else {"action": "mask", "low_ratio": low}
        found.append({"level": level, **bounds, "high_ratio": high})
    kinds, thresholds = (_names(given.get(f"{_CORRECTION}{name}")) for name in ("rollout_rs", "rollout_rs_threshold"))
    for number, kind in enumerate(kinds):
        rejection = _rejection(kind, thresholds[min(number, len(thresholds) - 1)] if thresholds else None)
        if isinstance(rejection, str):
            absent.append(rejection)
        else:
            found.append(rejection)
    return found, "; ".join(absent)


def _rejection(kind: str, threshold: Any) -> dict[str, Any] | str:
    """verl's *_k1 bound behaviour / policy, ours policy / behaviour; its *_k2 and *_k3 a divergence from above."""
    whose, _, estimator = kind.rpartition("_")
    low, high = _bounds(threshold)
    if threshold is None or high is None:
        return "rollout_rs needs rollout_rs_threshold"
    ratios = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}
    divergences = {"token": "token", "seq_mean": "sequence"}
    if estimator == "k1" and whose in ratios:
        bounds = {"low_ratio": 1 / high, "high_ratio": 1 / low if low else high}
        return {"level": ratios[whose], "action": "reject"} | bounds
    if estimator in ("k2", "k3") and whose in divergences:
        return {"kind": "divergence", "level": divergences[whose], "estimator": estimator, "max_nats": high}
    return f"rejection by {kind} has no counterpart"


def _bounds(threshold: Any) -> tuple[float | None, float | None]:
    """verl writes a number for an upper bound, and `0.5_5.0` for both."""
    low, _, high = str(threshold).rpartition("_")
    try:
        return (float(low) if low else None), float(high)
    except ValueError:
        return None, None


def _names(value: Any) -> list[str]:
    return [name.strip() for name in str(value).split(",")] if value is not None else []


# -- TRL: sizes and places ---------------------------------------------------------------------------------------------

# TRL's defaults, where a rule needs a field that was not given.
_NUM_GENERATIONS, _PER_DEVICE, _LORA_RANK, _LORA_ALPHA = 8, 8, 16, 32
_EPSILON, _BETAS, _CAP, _MASK = 0.2, (0.9, 0.999), 3.0, "sequence_mask"


def _counts(given: Given) -> tuple[int, int, int]:
    """Completions of an optimizer update, updates of one pass over a generation batch, and passes."""
    each = _count(given, "per_device_train_batch_size", _PER_DEVICE) * _count(given, "num_processes", 1)
    accumulated = _count(given, "gradient_accumulation_steps", 1)
    update, batch = each * accumulated, "generation_batch_size"
    if given.get(batch) is None:
        steps = given.get("steps_per_generation")
        given = given | {batch: each * (accumulated if steps is None else _count(given, "steps_per_generation"))}
    if _count(given, batch) % update:
        raise Odd(f"cannot be computed from a generation batch of {given[batch]} completions and updates of {update}")
    return update, given[batch] // update, _count(given, "num_iterations", 1)


def trl_prompts_per_step(_: Any, given: Given, ours: str) -> Translated:
    update, updates, _passes = _counts(given)
    size = _count(given, "num_generations", _NUM_GENERATIONS)
    if update * updates % size:
        raise Odd(f"cannot be computed from generation batches of {update * updates} and num_generations={size}")
    return {ours: update * updates // size} | ({"learner.minibatches": updates} if updates > 1 else {})


def trl_steps(value: Any, given: Given, ours: str) -> dict[str, Any]:
    """TRL counts updates. A step here has all updates of a generation batch."""
    _update, updates, passes = _counts(given)
    if _count({"its value": value}, "its value") % (updates * passes):
        raise Odd("counts steps of all updates of a generation batch; TRL counts updates")
    return {ours: value // (updates * passes)}


def trl_end(value: Any, given: Given, ours: str) -> Translated:
    return trl_steps(value, given, ours) | {"run.epochs": None}


def trl_epochs(value: Any, given: Given, ours: str) -> Translated:
    if _is_number(given.get("max_steps")) and given["max_steps"] > 0:
        return "max_steps ends the run"
    if not _is_number(value) or value < 1 or value != int(value):
        raise Odd("takes a whole number")
    return {ours: int(value)}


def trl_warmup_steps(value: Any, given: Given, ours: str) -> Translated:
    """Updates in both; below 1 it is a share of the run."""
    if not _is_number(value) or value < 0:
        raise Odd("counts updates")
    return trl_warmup_share(value, given, ours) if 0 < value < 1 else {ours: int(value)}


def trl_warmup_share(value: Any, given: Given, ours: str) -> Translated:
    updates = given.get("max_steps")
    if value and not (_is_number(value) and _is_number(updates) and updates > 0):
        raise Odd("counts updates: this share of those of the run")
    return {ours: round(value * updates) if value else 0}


def trl_gpus(_: Any, given: Given, ours: str) -> Translated:
    gpus, each = _count(given, "num_processes"), _count(given, "vllm_tensor_parallel_size", 1)
    if given.get("use_vllm") is True and given.get("vllm_mode") == "server":
        return {"learner.ranks": gpus}
    if gpus == 1:
        return {"cluster.share_gpu": True}
    try:
        count, ranks = split_gpus(gpus, each)
    except ConfigError:
        return f"{gpus} GPUs cannot be shared by engines of {each} and a learner"
    return {"generators.count": count, "learner.ranks": ranks}


# -- TRL: the objective ------------------------------------------------------------------------------------------------

_LOSSES = {
    "grpo": ("ppo_clip", "seq-mean-token-mean"),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm"),
    "dapo": ("ppo_clip", "token-mean"),
    "bnpo": ("ppo_clip", "token-mean"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "vespo": ("vespo", "token-mean"),
    "luspo": ("ppo_clip", "seq-mean-token-sum"),
}
"""loss_type to our loss and aggregation, for importance_sampling_level=token."""


def _chosen(given: Given) -> tuple[str, str]:
    """Our loss and aggregation; two empty texts where the loss has no counterpart."""
    loss, aggregation = _LOSSES.get(str(given.get("loss_type", "dapo")), ("", ""))
    if given.get("importance_sampling_level", "token") == "token":
        return loss, aggregation
    return ("gspo", aggregation) if loss == "ppo_clip" else ("", "")


def trl_loss(_: Any, given: Given, ours: str) -> Translated:
    loss, aggregation = _chosen(given)
    if not loss:
        level = given.get("importance_sampling_level", "token")
        return f"loss_type={given.get('loss_type', 'dapo')} with importance_sampling_level={level} has no counterpart"
    found = {ours: loss, "algorithm.aggregation": aggregation}
    if loss == "cispo" and given.get("epsilon_high") is None:
        return found, f"TRL's largest ratio is epsilon ({given.get('epsilon', _EPSILON)}) without epsilon_high"
    return found


def trl_clip(_: Any, given: Given, ours: str) -> Translated:
    """The bounds of a ratio as distances from 1. CISPO's epsilon_high is the bound itself, and there is none below."""
    loss, low, high = _chosen(given)[0], given.get("epsilon", _EPSILON), given.get("epsilon_high")
    high = low if high is None else high
    if loss not in ("ppo_clip", "gspo", "cispo"):
        return "this loss has no such bound"
    if not _is_number(low) or not _is_number(high):
        raise Odd("takes numbers")
    if loss == "cispo":
        if high < 1:
            return "TRL's bound of CISPO is the largest ratio, here at least 1: epsilon_high=5.0 is clip_high=4.0"
        low, high = 1.0, round(high - 1, 12)
    return {"algorithm.loss_args.clip_low": low, "algorithm.loss_args.clip_high": high}


def _kl_kind(given: Given) -> str:
    return "k3" if given.get("use_bias_correction_kl", True) is False else "k3_reweighted"


def trl_kl(value: Any, given: Given, ours: str) -> Translated:
    found = {ours: value, "algorithm.kl_kind": _kl_kind(given)} if value else {ours: 0.0}
    if value and _kl_kind(given) == "k3_reweighted" and given.get("importance_sampling_level") == "sequence":
        return found, "TRL weights it by the ratio of the completion, here by that of the token"
    return found


def trl_kl_correction(_: Any, given: Given, ours: str) -> Translated:
    return {ours: _kl_kind(given)} if given.get("beta") else "beta is 0, so it does nothing"


def trl_corrections(_: Any, given: Given, ours: str) -> Translated:
    """TRL weights the log-probs of vLLM against the learner's; without vLLM it has no weight."""
    if given.get("use_vllm") is not True or given.get("vllm_importance_sampling_correction", True) is False:
        return {ours: []}
    if _chosen(given)[0] == "vespo":
        found = {ours: [], "algorithm.anchor": "behaviour"}
        return found, "the weight is in the ratio of the loss, where TRL bounds it"
    level, _, action = str(given.get("vllm_importance_sampling_mode", _MASK)).partition("_")
    if level not in ("token", "sequence") or action not in ("truncate", "mask"):
        return "an entry of algorithm.corrections"
    high = given.get("vllm_importance_sampling_cap") or given.get("vllm_importance_sampling_clip_max", _CAP)
    low = given.get("vllm_importance_sampling_clip_min")
    if action == "truncate" and low is not None:
        action = "clip"
    bounds = {name: bound for name, bound in (("low_ratio", low), ("high_ratio", high)) if bound is not None}
    return {ours: [{"level": level, "action": action} | bounds] if bounds else []}


# -- TRL: the rest -----------------------------------------------------------------------------------------------------

_REWARDS = {"accuracy_reward": "math", "think_format_reward": "think_format"}
"""TRL's own rewards that are built in here."""


def trl_dataset(_: Any, given: Given, ours: str) -> Translated:
    name, is_eval = given.get("dataset_name"), ours == "data.eval"
    if is_eval and given.get("eval_strategy") not in ("steps", "epoch"):
        return "eval_strategy is neither steps nor epoch, so it does nothing"
    if not isinstance(name, str):
        return trl_source(None, given, ours)
    split = given.get("dataset_test_split" if is_eval else "dataset_train_split")
    parameters = {"name": given.get("dataset_config"), "split": split}
    query = "&".join(f"{key}={value}" for key, value in parameters.items() if value is not None)
    return {ours: f"hf:{name}" + (f"?{query}" if query else "")}


def trl_source(value: Any, _: Given, ours: str) -> Translated:
    if isinstance(value, str) and value.startswith("hf:"):
        return {ours: value}
    raise Odd("takes a file, Parquet, JSONL or JSON, or hf:ID?name=CONFIG&split=SPLIT")


def trl_train_file(value: Any, given: Given, ours: str) -> Translated:
    """`data_files` of load_dataset: a file, a list, or files by split."""
    return files(value.get("train", []) if isinstance(value, dict) else value, given, ours)


def trl_betas(_: Any, given: Given, ours: str) -> Translated:
    return {ours: [given.get(f"adam_beta{n}", default) for n, default in enumerate(_BETAS, 1)]}


def trl_lora(value: Any, given: Given, ours: str) -> Translated:
    if not value:
        return {ours: 0}
    return {ours: given.get("lora_r", _LORA_RANK), "model.lora.alpha": given.get("lora_alpha", _LORA_ALPHA)}


def trl_floor(value: Any, _: Given, ours: str) -> Translated:
    """The rate at which a cosine ends, as a share of the first."""
    share = value.get("min_lr_rate") if isinstance(value, dict) and len(value) == 1 else None
    if share is None:
        raise Odd("is the rate at the end, as a share")
    return {ours: share}


def trl_rewards(value: Any, _: Given, ours: str) -> Translated:
    """Functions in files and rewards that are built in here. If there are others, they are named and none is taken."""
    named = value if isinstance(value, list) else [value]
    known = [_REWARDS.get(str(name).removeprefix("trl.rewards."), str(name)) for name in named]
    if unclear := [name for name in known if ".py:" not in name and name not in _REWARDS.values()]:
        return f"name them as FILE:NAME, or built-in rewards: {', '.join(unclear)}"
    return {ours: known[0] if len(known) == 1 else known}


RULES: dict[str, Callable[[Any, Given, str], Translated]] = {
    name: rule
    for name, rule in globals().items()
    if name.startswith(("verl_", "trl_")) or name in ("files", "loggers", "lora_targets", "entropy")
}
"""The functions that the map names."""

_READ_NULL = ("verl_weight", "verl_rejections")
"""The rules that take null as a value."""

VERL, TRL = KeyMap("verl"), KeyMap("TRL")
