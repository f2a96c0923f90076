"""Loads YAML files and `key=value` into one frozen `Config`.

A file may extend others: `extends: OTHER.yaml` (relative to the file), a file that comes with the package
(`extends: one_node_8gpu`), an algorithm (`extends: algorithms/gspo`), or a list of these. They are read first, in order;
later ones win, and the file itself wins over all of them. Other paths in a file are relative to the working directory.

OmegaConf reads and merges the layers and resolves interpolations. From weakest to strongest they are: built-in values, the
extended files, the file, the algorithm of `--algorithm`, the command line. msgspec then converts once. Each error is one
sentence that names where the mistake was written, the key, the value and what to change.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from asyncgrpo.config import rules
from asyncgrpo.config.explain import (
    bounds_in_words,
    choices,
    knobs,
    near,
    removed,
    sections,
    suggest,
    type_in_words,
    value_in_words,
)
from asyncgrpo.config.files import Layer, algorithm_file, find, flat, look_up, read, yaml_value
from asyncgrpo.config.schema import AlgorithmConfig, Config
from asyncgrpo.errors import ConfigError

COMMAND_LINE = "command line"
_LIST_ALL = "`asyncgrpo config explain` lists all keys"

# Keys of `algorithm` that choose a function, and the key that has its arguments.
_ARGUMENTS_OF = {"loss": "loss_args", "advantage": "critic"}

# A preset decides these keys of `learner`, and all of `algorithm` but the sizes.
_RECIPE_IN_LEARNER = ("learner.minibatches", "learner.ppo_epochs", "learner.ess_lr")
_SIZES = ("algorithm.group_size", "algorithm.min_completions")


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    base: dict[str, Any] | None = None,
    algorithm: str | None = None,
) -> Config:
    """Load the configuration of a run.

    Args:
        path: a YAML file, or the name of one of the package (`quickstart`). None: no file.
        overrides: `key.sub=value`, the value read as YAML. Later ones win, and all win over the file.
        base: nested values below all others.
        algorithm: name of a preset in `configs/algorithms/`. It sets the whole objective and wins over the file.
    Raises:
        ConfigError: one sentence naming the file or "command line", the key, the value and what to change.
    """
    written = [Layer("built-in values", base)] if base else []
    written += read(find(path)) if path is not None else []
    written += read(algorithm_file(algorithm)) if algorithm is not None else []
    written += [Layer(COMMAND_LINE, _parse(overrides))]
    _refuse_unknown(written)
    given = [layer._replace(values=_known_only(layer.name, layer.values)) for layer in written]
    layers, where = _under_presets(given), str(path) if path is not None else COMMAND_LINE
    config = _convert(_merge(layers, where), layers, where)
    try:
        rules.check(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def with_overrides(config: Config, overrides: Sequence[str], *, algorithm: str | None = None) -> Config:
    """Return `config` with changes of the form `key=value`, checked as in `load_config`."""
    return load_config(None, overrides, base=_escape(msgspec.to_builtins(config)), algorithm=algorithm)


def recorded(values: dict[str, Any], where: str) -> Config:
    """Return the configuration that a run of any release recorded as plain values. Keys removed since are ignored.

    Args:
        where: the place of the values, for messages.
    Raises:
        ConfigError: a value or a key is unknown to this release.
    """
    layers = [Layer(where, _known_only(where, _without_removed(values)))]
    _refuse_unknown(layers)
    return _convert(layers[0].values, layers, where)


def _without_removed(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if f"{prefix}{name}" not in removed().keys}
    return {n: _without_removed(v, f"{prefix}{n}.") if isinstance(v, dict) else v for n, v in kept.items()}


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML, from which `load_config` makes an equal one. The run folder keeps it."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(msgspec.to_builtins(config))))


def read_plain(path: Path) -> Any:
    """Read the nested plain values that `to_yaml` of any release wrote, unchecked. Raises ConfigError."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not a configuration ({_first_line(error)})") from error


def _escape(node: Any) -> Any:
    """Escape each literal `${`, which OmegaConf would read as an interpolation."""
    if isinstance(node, dict):
        return {name: _escape(value) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [_escape(value) for value in node]
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", node)
    return node


def _parse(overrides: Sequence[str]) -> dict[str, Any]:
    values = OmegaConf.create()
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals or not key:
            raise ConfigError(f"{COMMAND_LINE}: `{override}` is not of the form key=value, for example learner.lr=1e-6")
        if key in sections():
            example = next(knob for knob in knobs() if knob.startswith(key + "."))
            raise ConfigError(f"{COMMAND_LINE}: `{key}` is a section; set one of its keys, for example {example}=...")
        try:
            OmegaConf.update(values, key, _parse_value(key, text), force_add=True)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{COMMAND_LINE}: `{override}` cannot be set ({_first_line(error)})") from error
    plain = OmegaConf.to_container(values)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _parse_value(key: str, text: str) -> Any:
    """Parse `text` as YAML. For a key that takes text, return the text itself unless it is quoted or null.

    For a key that also takes a list or a mapping, text in square brackets is a list and text in braces a mapping.
    """
    knob = knobs().get(key)
    more = {"[": inspect.VarTupleType, "{": inspect.DictType}.get(text[:1])
    is_quoted = text[:1] in ("'", '"')
    if knob and knob.takes(inspect.StrType) and not is_quoted and not (more and knob.takes(more)):
        return None if text in ("", "~", "null") else text
    try:
        return yaml_value(text)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{COMMAND_LINE}: the value of {key}, `{text}`, is not valid YAML") from error


def _refuse_unknown(layers: Sequence[Layer]) -> None:
    """Raise ConfigError with a line for each unknown key of files and command line."""
    lines = [
        f"{layer.name}: unknown configuration key `{key}` (value {value_in_words(value)}): {suggest(key) or _LIST_ALL}"
        for layer in layers
        for key, value in flat(layer.values).items()
        if not _is_known(key)
    ]
    if any("that is verl's" in line for line in lines):
        lines.append("`asyncgrpo config from-verl FILE|KEY=VALUE...` translates keys and values of verl")
    if lines:
        raise ConfigError("\n".join(lines))


def _is_known(key: str) -> bool:
    """True for a key, a section, or a name below a mapping (`generators.extra.x`)."""
    above = key.split(".")
    return key in sections() or any(".".join(above[:length]) in knobs() for length in range(1, len(above) + 1))


def _known_only(origin: str, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Drop empty sections (`reward:` with nothing below it). Raises ConfigError for a section that is not a mapping."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in knobs():
            kept[name] = value
        elif isinstance(value, dict):
            kept[name] = _known_only(origin, value, f"{key}.")
        elif value is not None:
            raise ConfigError(f"{origin}: `{key}` is a section and must be a mapping; it is {value_in_words(value)}")
    return kept


def _merge(layers: Sequence[Layer], where: str) -> dict[str, Any]:
    """Merge the layers into nested plain values, with interpolations resolved and the two sections of required keys."""
    try:
        merged = OmegaConf.merge({"model": {}, "data": {}}, *_without_leftovers(layers))
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{where}: {f'{key}: ' if key else ''}{_first_line(error)}") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def is_part_of_a_preset(key: str) -> bool:
    """True if presets set this key, also those that leave it at its default."""
    return key in _RECIPE_IN_LEARNER or (key.startswith("algorithm.") and key not in _SIZES)


def _under_presets(layers: Sequence[Layer]) -> list[Layer]:
    """Drop the keys that presets set from layers below a preset, so that it means the same over any file."""
    last = max((number for number, layer in enumerate(layers) if layer.is_preset), default=0)
    return [
        layer._replace(values=_without_recipe(layer.values)) if number < last else layer
        for number, layer in enumerate(layers)
    ]


def _without_recipe(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    kept = {name: value for name, value in values.items() if not is_part_of_a_preset(f"{prefix}{name}")}
    nested = ("algorithm", "learner")
    return {n: _without_recipe(v, f"{n}.") if not prefix and n in nested else v for n, v in kept.items()}


def _without_leftovers(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Return the values of each layer, without the arguments of a function that a later layer replaces.

    PPO's clip bounds in a file would be a thousand times too wide for GSPO in a later layer.
    """
    kept = [layer.values for layer in layers]
    for choice, arguments in _ARGUMENTS_OF.items():
        chosen = getattr(AlgorithmConfig(), choice)
        for number, values in enumerate(kept):
            other = look_up(values, f"algorithm.{choice}")
            if other is not None and other != chosen:
                kept[:number] = [_without(below, arguments) for below in kept[:number]]
                chosen = other
    return kept


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    algorithm = values.get("algorithm")
    if not isinstance(algorithm, dict) or name not in algorithm:
        return values
    return values | {"algorithm": {key: value for key, value in algorithm.items() if key != name}}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _convert(values: dict[str, Any], layers: Sequence[Layer], where: str) -> Config:
    try:
        # Not strict, so that a number from ${oc.env:...} and `tokens_per_microbatch: 16e3` count as numbers.
        config = msgspec.convert(values, Config, strict=False)
    except msgspec.ValidationError as error:
        raise _explained(str(error), values, layers, where) from None
    plain = msgspec.to_builtins(config)
    for key in knobs():
        try:
            json.dumps(value := look_up(plain, key), allow_nan=False)
        except ValueError:
            raise ConfigError(f"{_origin(key, layers, where)}: {key} must be finite; it is {value}") from None
    return config


def _origin(key: str, layers: Sequence[Layer], where: str) -> str:
    """Return the name of the layer that sets a key."""
    return next((layer.name for layer in reversed(layers) if look_up(layer.values, key) is not None), where)


def _explained(message: str, values: dict[str, Any], layers: Sequence[Layer], where: str) -> ConfigError:
    """Turn msgspec's message, which has only a path, into a sentence with origin, key and value."""
    problem, _, path = message.partition(" - at `$.")
    path = path.rstrip("`")
    key = re.sub(r"\[.*", "", path)  # without an index: of `data.columns[...]` and `run.loggers[0]`
    if missing := re.search(r"missing required field `(\w+)`", problem):
        key = f"{key}.{missing[1]}"
        return ConfigError(
            f"{where}: {key} is missing ({knobs()[key].description}); write it in the file or as {key}=..."
        )
    knob, value = knobs()[key], look_up(values, key)
    out_of_bounds = re.fullmatch(r"Expected `\w+( \| null)?` [<>]=? \S+", problem) is not None
    needs = (out_of_bounds and bounds_in_words(knob.type)) or type_in_words(knob.type)
    hint = "; put it in quotes" if knob.takes(inspect.StrType) and isinstance(value, int | float) else ""
    if isinstance(value, str) and (meant := near(value, choices(key))):
        hint = f": {meant}"
    if knob.fields and path != key:  # in an entry of a list of mappings
        hint = f"; {path}: {problem}"
    return ConfigError(f"{_origin(key, layers, where)}: {key} must be {needs}; it is {value_in_words(value)}{hint}")
