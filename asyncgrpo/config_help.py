"""What the knobs mean, in words: a catalogue read from the structs, `explain` for a person, a run's sizes in words.

Nothing is written twice: types, bounds, defaults and descriptions come from `config.py`.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from asyncgrpo.config import Config
from asyncgrpo.config_names import suggest
from asyncgrpo.errors import ConfigError


@dataclass(frozen=True)
class Knob:
    """One key of the configuration."""

    key: str
    """Dotted, as on the command line."""
    type: inspect.Type
    required: bool
    default: Any
    description: str
    section: str
    """First line of the section's docstring."""

    @property
    def takes_text(self) -> bool:
        """True where a value is text whatever it looks like, so that `run.out=2024` needs no quotes."""
        members = self.type.types if isinstance(self.type, inspect.UnionType) else (self.type,)
        return any(isinstance(member, inspect.StrType) for member in members)

    @property
    def is_mapping(self) -> bool:
        """True where the keys below are free (`generators.extra.attention_backend`)."""
        return isinstance(self.type, inspect.DictType)


def _bare(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """The type without its metadata wrapper, and the description that the wrapper held."""
    description = ""
    while isinstance(kind, inspect.Metadata):
        description = (kind.extra_json_schema or {}).get("description", description)
        kind = kind.type
    return kind, description


@cache
def knobs() -> dict[str, Knob]:
    """Every knob by its dotted key, in the order of `config.py`."""
    found: dict[str, Knob] = {}

    def walk(struct: inspect.StructType, prefix: str) -> None:
        section = " ".join((struct.cls.__doc__ or "").split("\n\n")[0].split())
        for field in struct.fields:
            kind, description = _bare(field.type)
            if isinstance(kind, inspect.StructType):
                walk(kind, f"{prefix}{field.name}.")
                continue
            default = field.default if field.default is not msgspec.NODEFAULT else None
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            found[prefix + field.name] = Knob(prefix + field.name, kind, field.required, default, description, section)

    root = inspect.type_info(Config)
    assert isinstance(root, inspect.StructType)
    walk(root, "")
    return found


@cache
def sections() -> frozenset[str]:
    """Dotted names of the sections: `algorithm`, `model.lora`, ..."""
    return frozenset(key.rpartition(".")[0] for key in knobs())


def bounds_in_words(kind: inspect.Type) -> str:
    """`above 0 and at most 1`; empty for a type without bounds. A union's bounds are those of its number."""
    if isinstance(kind, inspect.UnionType):
        return next((words for member in kind.types if (words := bounds_in_words(_bare(member)[0]))), "")
    if not isinstance(kind, inspect.IntType | inspect.FloatType):
        return ""
    limits = (("at least", kind.ge), ("above", kind.gt), ("at most", kind.le), ("below", kind.lt))
    return " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)


def type_in_words(kind: inspect.Type) -> str:
    """What a value must be, as the end of "must be ..."."""
    kind, _ = _bare(kind)
    bounds = bounds_in_words(kind)
    match kind:
        case inspect.UnionType():
            members = [type_in_words(m) for m in kind.types if not isinstance(_bare(m)[0], inspect.NoneType)]
            return f"{' or '.join(members)} (or null)"
        case inspect.IntType():
            return "a whole number" + (f", {bounds}" if bounds else "")
        case inspect.FloatType():
            return "a number" + (f", {bounds}" if bounds else "")
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.LiteralType():
            return "one of " + ", ".join(map(str, kind.values))
        case inspect.VarTupleType():
            return f"a list, each {type_in_words(kind.item_type)}"
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)}, each {type_in_words(kind.item_types[0])}"
        case inspect.DictType():
            return "a mapping"
    return type(kind).__name__


def value_in_words(value: Any) -> str:
    """A value as it would be written in YAML or on the command line."""
    return json.dumps(msgspec.to_builtins(value)) if not isinstance(value, str) else value or '""'


def explain(key: str | None = None) -> str:
    """What `key` means; without a key, a table of all of them; with a section, a table of its knobs.

    Raises:
        ConfigError: there is no such key; the message says which one was probably meant.
    """
    if key is None or key in sections():
        return "\n".join(_row(knob) for knob in knobs().values() if key is None or knob.key.startswith(key + "."))
    knob = knobs().get(key)
    if knob is None:
        hint = suggest(key, knobs()) or "`asyncgrpo config explain` lists all of them"
        raise ConfigError(f"there is no configuration key `{key}`: {hint}")
    default = "none, it must be given" if knob.required else value_in_words(knob.default)
    return "\n".join(
        (
            f"{knob.key}: {knob.description}",
            f"  value    {type_in_words(knob.type)}",
            f"  default  {default}",
            f"  section  {knob.section}",
        )
    )


def _row(knob: Knob) -> str:
    default = "(required)" if knob.required else value_in_words(knob.default)
    return f"{knob.key:34} {default:14} {knob.description}"


def sizes_in_words(config: Config) -> str:
    """What a step, a run and the machines come to, in three lines; printed before anything starts."""
    prompts, answers = config.buffer.prompts_per_step, config.algorithm.group_size
    sequences = prompts * answers
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    step = (
        f"{prompts:,} prompts x {answers} answers = {sequences:,} sequences per step, of at most {longest:,} tokens "
        f"each; {_lag_in_words(config)}; up to {config.buffer.num_slots:,} groups under way"
    )
    engine_gpus = config.generators.count * config.generators.gpus_each
    engines = f"{_count(config.generators.count, 'generator')} ({config.generators.engine}"
    engines += f", {_count(config.generators.gpus_each, 'GPU')} each)" if engine_gpus else ", on CPU)"
    ranks = _count(config.learner.ranks, "learner rank")
    total = f" = {engine_gpus + config.learner.ranks} GPUs" if engine_gpus and config.learner.device != "cpu" else ""
    lora = config.model.lora
    trained = f"LoRA of rank {lora.rank}" if lora.rank else "all weights"
    places = (
        f"{engines} + {ranks}{total}; {trained} trained in microbatches of at most "
        f"{config.learner.tokens_per_microbatch:,} tokens per rank"
    )
    return f"{step}\n{places}\n{_ends_in_words(config)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _lag_in_words(config: Config) -> str:
    lag = config.buffer.max_lag
    return "synchronous (lag 0)" if lag == 0 else f"lag at most {_count(lag, 'step')}"


def _ends_in_words(config: Config) -> str:
    run = config.run
    ends = [_count(run.steps, "step")] if run.steps else []
    ends += [_count(run.epochs, "epoch")] if run.epochs else []
    until = f"ends after {' or '.join(ends)}{', whichever is first' * (len(ends) > 1)}" if ends else "has no end"
    evaluation = f"evaluation every {_count(run.eval_every, 'step')}" if config.data.eval else "no evaluation"
    return f"{until}; checkpoint every {_count(run.checkpoint_every, 'step')}, {evaluation}; writes to {run.out}"
