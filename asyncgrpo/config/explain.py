"""Describes the settings: a catalog of all keys, `explain` for one of them, the sizes of a run, and hints for unknown keys.

Types, bounds, defaults and descriptions come from the structs of `schema.py`.
"""

import ast
import difflib
import itertools
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect
from msgspec.structs import asdict

from asyncgrpo.config import schema
from asyncgrpo.config.foreign_rules import TRL, VERL
from asyncgrpo.config.schema import AlgorithmConfig, Config
from asyncgrpo.errors import ConfigError


@dataclass(frozen=True)
class Knob:
    """One key of the configuration."""

    key: str
    """Dotted, as on the command line."""
    struct: type
    """Struct of `schema.py` that has the field."""
    type: inspect.Type
    required: bool
    default: Any

    @property
    def description(self) -> str:
        """Docstring of the field, without its final period."""
        return _descriptions()[self.struct.__name__, self.key.rpartition(".")[2]]

    @property
    def section(self) -> str:
        """First paragraph of the struct's docstring."""
        return " ".join((self.struct.__doc__ or "").split("\n\n")[0].split())

    @property
    def kinds(self) -> tuple[inspect.Type, ...]:
        """Types of a value: the members of a union, or the one type."""
        return self.type.types if isinstance(self.type, inspect.UnionType) else (self.type,)

    def takes(self, kind: Any) -> bool:
        """True if a value may be of this kind. A key that takes text needs no quotes: `run.out=2024`."""
        return any(isinstance(member, kind) for member in self.kinds)

    @property
    def choices(self) -> list[str]:
        """Values of a key that takes one of a few; empty for any other key."""
        return [str(v) for kind in self.kinds if isinstance(kind, inspect.LiteralType) for v in kind.values]

    @property
    def fields(self) -> dict[str, "Knob"]:
        """Keys of each entry, for a list of mappings such as `algorithm.corrections`; empty for any other key."""
        item = self.type.item_type if isinstance(self.type, inspect.VarTupleType) else None
        return dict(_knobs(item, f"{self.key}[].")) if isinstance(item, inspect.StructType) else {}


def _knobs(struct: inspect.StructType, prefix: str) -> Iterator[tuple[str, Knob]]:
    """Yield the fields of a struct by name; those of structs in it by dotted name."""
    for field in struct.fields:
        if isinstance(field.type, inspect.StructType):
            yield from ((f"{field.name}.{name}", knob) for name, knob in _knobs(field.type, f"{prefix}{field.name}."))
            continue
        default = field.default if field.default is not msgspec.NODEFAULT else None
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        yield field.name, Knob(prefix + field.name, struct.cls, field.type, field.required, default)


@cache
def _descriptions() -> dict[tuple[str, str], str]:
    """Docstrings of fields by struct and field, from the text of `schema.py`: Python does not keep them."""
    tree = ast.parse(Path(schema.__file__).read_text(encoding="utf-8"))
    return {
        (struct.name, field.target.id): " ".join(doc.value.value.split()).removesuffix(".")
        for struct in tree.body
        if isinstance(struct, ast.ClassDef)
        for field, doc in itertools.pairwise(struct.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }


@cache
def knobs() -> dict[str, Knob]:
    """Every key by its dotted name, in the order of `schema.py`."""
    root = inspect.type_info(Config)
    assert isinstance(root, inspect.StructType)
    return dict(_knobs(root, ""))


@cache
def sections() -> frozenset[str]:
    """Dotted names of the sections: `algorithm`, `model.lora`, ..."""
    return frozenset(key.rpartition(".")[0] for key in knobs())


def bounds_in_words(kind: inspect.Type) -> str:
    """Return bounds such as `above 0 and at most 1`; empty for a type without. A union has the bounds of its number."""
    if isinstance(kind, inspect.UnionType):
        return next((words for member in kind.types if (words := bounds_in_words(member))), "")
    if not isinstance(kind, inspect.IntType | inspect.FloatType):
        return ""
    limits = (("at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
    return " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)


def type_in_words(kind: inspect.Type) -> str:
    """Return the values that a type takes, to follow the words "must be"."""
    bounds = bounds_in_words(kind)
    match kind:
        case inspect.UnionType():
            taken = (m for m in kind.types if not isinstance(m, inspect.NoneType))
            members = [type_in_words(m) for m in sorted(taken, key=lambda m: bounds_in_words(m) != "")]  # bounds end it
            return " or ".join(members) + " (or null)" * (len(members) < len(kind.types))
        case inspect.IntType():
            return "a whole number" + (f", {bounds}" if bounds else "")
        case inspect.FloatType():
            return "a number" + (f", {bounds}" if bounds else "")
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.LiteralType():
            return "one of " * (len(kind.values) > 1) + ", ".join(map(str, kind.values))
        case inspect.VarTupleType():
            return f"a list, each {type_in_words(kind.item_type)}"
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)}, each {type_in_words(kind.item_types[0])}"
        case inspect.DictType(value_type=inspect.AnyType()):
            return "a mapping"
        case inspect.DictType():
            return f"a mapping, each value {type_in_words(kind.value_type)}"
        case inspect.StructType():
            return f"a mapping of {', '.join(field.name for field in kind.fields)}"
    return type(kind).__name__


def value_in_words(value: Any) -> str:
    """Return a value as in YAML or on the command line. Structs show only what differs from their defaults."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, tuple) and value and all(isinstance(item, msgspec.Struct) for item in value):
        return json.dumps([_changed(item) for item in value])
    return json.dumps(msgspec.to_builtins(value))


def _changed(struct: msgspec.Struct) -> dict[str, Any]:
    plain = type(struct)()
    return {name: value for name, value in asdict(struct).items() if value != getattr(plain, name)}


def explain(key: str | None = None) -> str:
    """Describe a key; or list the keys of a section, or all of them.

    Raises:
        ConfigError: the key is unknown; the message suggests one.
    """
    if key is None or key in sections():
        rows = [knob for knob in knobs().values() if key is None or knob.key.startswith(key + ".")]
        return "\n".join(f"{knob.key:34} {default_of(knob, '(required)'):14} {knob.description}" for knob in rows)
    parent, _, name = key.replace("[]", "").rpartition(".")
    knob = knobs().get(key) or (knobs()[parent].fields.get(name) if parent in knobs() else None)
    if knob is None:
        raise ConfigError(f"unknown configuration key `{key}`: {suggest(key)}")
    lines = [
        f"{knob.key}: {knob.description}",
        f"  value    {type_in_words(knob.type)}",
        f"  default  {default_of(knob, 'none, it must be given')}",
        f"  section  {knob.section}",
    ]
    lines += [f"  {field.key} ({value_in_words(field.default)}): {field.description}" for field in knob.fields.values()]
    return "\n".join(lines)


def default_of(knob: Knob, required: str) -> str:
    return required if knob.required else value_in_words(knob.default)


def sizes_in_words(config: Config, algorithm: str | None = None) -> str:
    """Return four lines for the start of a run: sizes of a step, objective, processes and end.

    Args:
        algorithm: name of the preset, if any.
    """
    run, generators, learner, group = config.run, config.generators, config.learner, config.algorithm.group_size
    prompts, longest = config.buffer.prompts_per_step, config.data.max_prompt_tokens + config.sampling.max_tokens
    step = f"{prompts:,} prompts x {group} completions = {prompts * group:,} sequences per step, of at most {longest:,} tokens"
    step += f" each; {_lag_in_words(config)}; up to {config.buffer.num_slots:,} groups in flight"
    objective = f"algorithm{f' {algorithm}' if algorithm else ''}: {algorithm_in_words(config.algorithm)}"
    engine_gpus = generators.count * generators.gpus_each
    each = f"{counted(generators.gpus_each, 'GPU')} each" if engine_gpus else "on CPU"
    gpus = engine_gpus + learner.ranks + config.teacher_gpus
    total = f" = {gpus} GPUs" if engine_gpus and learner.device != "cpu" else ""
    processes = f"{counted(generators.count, 'generator')} ({generators.engine}, {each})"
    processes += f" + {counted(learner.ranks, 'learner rank')}"
    if config.teacher.own:
        on = f"{counted(config.teacher_gpus_each, 'GPU')} each" if config.teacher_gpus else "on CPU"
        processes += f" + {counted(len(config.teacher.own), 'teacher')} ({on})"
    processes += " sharing 1 GPU" if config.cluster.share_gpu else total
    trained = f"LoRA of rank {config.model.lora.rank}" if config.model.lora.rank else "all weights"
    processes += f"; {trained} trained in microbatches of at most {learner.tokens_per_microbatch:,} tokens per rank"
    ends = [counted(number, unit) for number, unit in ((run.steps, "step"), (run.epochs, "epoch")) if number]
    end = f"ends after {' or '.join(ends)}{', whichever is first' * (len(ends) > 1)}" if ends else "has no end"
    end += f"; checkpoint every {counted(run.checkpoint_every, 'step')}, "
    end += f"evaluation every {counted(run.eval_every, 'step')}" if config.data.eval else "no evaluation"
    return "\n".join([step, objective, processes, f"{end}; writes to {run.out}"])


def algorithm_in_words(settings: AlgorithmConfig) -> str:
    """Return the objective, as `grpo advantages, ppo_clip {"clip_low": 0.2} around proximal, ..., token-mean`."""
    arguments = {name: value for name, value in settings.loss_args.items() if value is not None}
    loss = f"{settings.loss} {value_in_words(arguments)}" if arguments else settings.loss
    parts = [f"{settings.advantage} advantages", f"{loss} around {settings.anchor}"]
    parts += [f"corrections {value_in_words(settings.corrections)}"] if settings.corrections else []
    parts.append(settings.aggregation)
    weights = {
        f"{settings.kl_kind} KL in the {settings.kl_in}": settings.kl_coef,
        "KL to the samplers": settings.behaviour_kl_coef,
        "entropy": settings.entropy_coef,
    }
    return ", ".join(parts + [f"{name} x {weight:g}" for name, weight in weights.items() if weight])


def counted(number: int, noun: str) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _lag_in_words(config: Config) -> str:
    lag, policy = config.buffer.max_lag, config.buffer.policy
    if lag == 0:
        return "synchronous (lag 0)"
    steps = counted(config.buffer.largest_max_lag, "step") + " (auto)" * (lag == "auto")
    if policy == "train":
        return f"{steps} ahead at most, lag without bound"
    return f"lag at most {steps}" + (", older groups are dropped" if policy == "drop" else "")


# -- hints for unknown keys --------------------------------------------------------------------------------------------


def suggest(key: str) -> str:
    """Return a hint of one clause for a key that does not exist."""
    key = key.lstrip("+")
    if key in knobs():
        return f"write it as `{key}`"
    namesakes = [known for known in knobs() if known.rpartition(".")[2] == key.rpartition(".")[2]]
    theirs = VERL if "." in key or namesakes else TRL  # TRL's have no dot; `seed` is rather ours
    if (entry := theirs.entry_of(key)) is not None:
        what = f" name for `{entry.ours}`" if entry.ours else f": {entry.by_hand or entry.absent}"
        return f"that is {theirs.system}'s{what}"
    hint = near(key, namesakes or knobs().keys(), cutoff=0 if namesakes else 0.8)
    return hint or "`asyncgrpo config explain` lists all keys"


def near(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """Return the hint `did you mean ...?` with the name in `known` closest to `name`; empty when none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean `{close[0]}`?" if close else ""
