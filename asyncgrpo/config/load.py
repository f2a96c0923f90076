"""Finds YAML files, of users and of the package, and loads them and `key=value` into one frozen `Config`.

A file may extend others: `extends: OTHER.yaml` (relative to the file), a file that comes with the package
(`extends: one_node_8gpu`), an algorithm (`extends: algorithms/gspo`), or a list of these. They are read first, in order;
later ones win, and the file itself wins over all of them. Other paths in a file are relative to the working directory.

OmegaConf reads the layers and resolves interpolations. From weakest to strongest they are: built-in values, the
extended files, the file, the algorithm of `--algorithm`, the command line. msgspec then converts once. Each error is one
sentence that names where the mistake was written, the key, the value and what to change.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from asyncgrpo.config import rules
from asyncgrpo.config.explain import bounds_in_words, knobs, near, sections, suggest, type_in_words, value_in_words
from asyncgrpo.config.schema import AlgorithmConfig, Config, changed
from asyncgrpo.errors import ConfigError

# -- files and their layers --------------------------------------------------------------------------------------------

ALGORITHMS = "algorithms"
"""Folder of the algorithm presets in `configs/`, with one file per paper."""


class Layer(NamedTuple):
    """Keys written in one place. Later layers win."""

    name: str
    """File or `command line`, for messages."""
    values: dict[str, Any]
    """Values by dotted key, interpolations not resolved."""
    is_preset: bool = False
    """True for a preset of `configs/algorithms/`, which sets the whole objective: missing keys get their defaults."""


def shipped_names() -> list[str]:
    return sorted(file.stem for file in _shipped_folder().glob("*.yaml"))


def algorithm_file(name: str) -> Path:
    """Return the preset `configs/algorithms/NAME.yaml`. Raises ConfigError, which lists the names."""
    bare = name.removeprefix(f"{ALGORITHMS}/").removesuffix(".yaml")
    names = algorithm_names()
    if bare in names:
        return _shipped_folder() / ALGORITHMS / f"{bare}.yaml"
    hint = f"{meant} " if (meant := near(bare, names)) else ""
    raise ConfigError(f"unknown algorithm `{name}`; {hint}There are: {', '.join(names)}")


def algorithm_names() -> list[str]:
    return sorted(file.stem for file in (_shipped_folder() / ALGORITHMS).glob("*.yaml"))


def headline(file: Path) -> str:
    """Return the first line of a file's comment, its title."""
    with open(file, encoding="utf-8") as lines:
        return next(lines, "").removeprefix("#").strip()


def _shipped_folder() -> Path:
    """Return the folder `asyncgrpo/configs` of an installed wheel, else `configs` of the checkout."""
    package = Path(__file__).parent.parent
    return next((found for found in (package / "configs", package.parent / "configs") if found.is_dir()), package)


def find(path: str, folder: Path = Path(), named: str = "") -> Path:
    """Return the file `path`, or the file or preset of that name in the package.

    Args:
        folder: to which a path is relative.
        named: start of an error message, if a file has the name.
    Raises:
        ConfigError: there is none; the message suggests the closest.
    """
    file, names = folder / Path(path).expanduser(), shipped_names()
    if file.is_file():
        return file
    if path in names:
        return _shipped_folder() / f"{path}.yaml"
    if path.startswith(f"{ALGORITHMS}/"):
        return algorithm_file(path)
    if file.is_dir():
        raise ConfigError(f"{named}{file} is a folder; give a YAML file in it")
    beside = {other.stem: str(other) for other in sorted(file.parent.glob("*.y*ml"))}
    known = beside | {name: name for name in names}
    close = difflib.get_close_matches(file.stem, known, n=1, cutoff=0.5)
    hint = f"did you mean {known[close[0]]}?" if close else f"the package brings {', '.join(names)}"
    raise ConfigError(f"{named}file {file} does not exist; {hint}")


def read(file: Path, below: tuple[Path, ...] = ()) -> list[Layer]:
    """Return the layers of a file: those of the files that it extends, in order, then its own.

    Args:
        below: files whose `extends` led here; this file must not extend them again.
    Raises:
        ConfigError: a file is not valid YAML (the message has the line) or not a mapping, or an `extends` names no file.
    """
    if file.resolve() in below:
        raise ConfigError(f"{file}: `extends` leads back to this file; remove one of the two")
    values = load_values(file)
    parents = values.pop("extends", None)
    named = parents if isinstance(parents, list) else [] if parents is None else [parents]
    layers: list[Layer] = []
    for parent in named:
        layers += read(find(str(parent), file.parent, f"{file}: extends: "), (*below, file.resolve()))
    is_preset = file.resolve().parent == (_shipped_folder() / ALGORITHMS).resolve()
    return [*layers, Layer(str(file), by_key(values), is_preset)]


def load_values(file: Path) -> dict[str, Any]:
    """Return the nested values of a YAML file, interpolations not resolved. Raises ConfigError, with the line."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.create(text_of(file)))
    except (YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or _first_line(error)
        raise ConfigError(f"{file}{line}: this is not valid YAML ({problem})") from error
    except AssertionError:  # of OmegaConf, for a lone scalar
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no mapping such as `model: {{path: ...}}`, as a configuration does")
    return {str(key): value for key, value in values.items()}


def text_of(file: Path) -> str:
    """Return the text of a file. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text") from error


def by_key(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key. A key that takes a mapping keeps it; below an unknown one come its leaves."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in knobs():
            found |= by_key(value, f"{key}.")
        else:
            found[key] = value
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as nested values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        reduce(lambda section, name: section.setdefault(name, {}), above, found)[last] = value
    return found


def parse(text: str) -> Any:
    """Parse TEXT of `key=TEXT` as YAML; return the text itself if it is not valid YAML."""
    try:
        return yaml_value(text)
    except (YAMLError, OmegaConfBaseException):
        return text


def yaml_value(text: str) -> Any:
    """Parse `text` as YAML, interpolations not resolved. Raises YAMLError or OmegaConfBaseException."""
    value: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    return value["value"]


# -- layers to a configuration -----------------------------------------------------------------------------------------

COMMAND_LINE = "command line"

# Keys of `algorithm` that choose a function, and the key that has its arguments.
_ARGUMENTS_OF = {"loss": "loss_args", "advantage": "critic"}

# A preset decides these keys of `learner`, and all of `algorithm` but sizes and what is of the model or the teacher.
_RECIPE_IN_LEARNER = ("learner.minibatches", "learner.ppo_epochs", "learner.ess_lr")
_KEPT = frozenset(
    f"algorithm.{key}" for key in ("group_size", "min_completions", "teacher", "router_aux_coef", "router_bias_rate")
)


_PATHS = {
    *("run.out", "data.train", "data.eval", "data.image_root"),
    *("model.path", "algorithm.teacher", "teacher.path", "reward.model.path"),
}
"""Keys in which `~` is the home folder; functions are looked up so where they are used."""


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    base: dict[str, Any] | None = None,
    algorithm: str | None = None,
    is_complete: bool = True,
) -> Config:
    """Load the configuration of a run.

    Args:
        path: a YAML file, or the name of one of the package (`quickstart`). None: no file.
        overrides: `key.sub=value`, the value read as YAML. Later ones win, and all win over the file.
        base: nested values below all others.
        algorithm: name of a preset in `configs/algorithms/`. It sets the whole objective and wins over the file.
        is_complete: False if `complete` follows, so that settings need not fit each other yet.
    Raises:
        ConfigError: one sentence naming the file or "command line", the key, the value and what to change.
    """
    written = [Layer("built-in values", by_key(base))] if base else []
    written += read(find(str(path))) if path is not None else []
    written += read(algorithm_file(algorithm)) if algorithm is not None else []
    written += [Layer(COMMAND_LINE, _parse(overrides))]
    layers, where = _under_presets(_known(written)), str(path) if path is not None else COMMAND_LINE
    defaults = {key: msgspec.to_builtins(knob.default) for key, knob in knobs().items() if not knob.required}
    values = _merge([Layer("defaults", defaults), *layers], where)
    values |= {key: each(os.path.expanduser, values[key]) for key in _PATHS & values.keys()}
    config = _convert(values, layers, where)
    return complete(config, where) if is_complete else config


def complete(config: Config, where: str, changes: Mapping[str, Any] | None = None) -> Config:
    """Return `config` with other values at some keys. Raises ConfigError, which names `where`, if they do not fit each other."""
    config = changed(config, changes or {})
    try:
        rules.check(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return config


def with_overrides(config: Config, overrides: Sequence[str], *, algorithm: str | None = None) -> Config:
    """Return `config` with changes of the form `key=value`, checked as in `load_config`."""
    return load_config(None, overrides, base=_escape(msgspec.to_builtins(config)), algorithm=algorithm)


def recorded(values: dict[str, Any], where: str) -> Config:
    """Return the configuration that a run recorded as plain values.

    Raises:
        ConfigError: a value or a key is unknown to this release.
    """
    layers = _known([Layer(where, by_key(values))])
    return _convert(layers[0].values, layers, where)


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML, from which `load_config` makes an equal one. The run folder keeps it."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape(msgspec.to_builtins(config))))


def read_plain(path: Path) -> dict[str, Any]:
    """Read the values that `to_yaml` of any release wrote, by dotted key and unchecked. Raises ConfigError."""
    return _merge([Layer(str(path), by_key(load_values(path)))], str(path))


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
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals or not key:
            raise ConfigError(f"{COMMAND_LINE}: `{override}` is not of the form key=value, for example learner.lr=1e-6")
        if key in sections():
            example = next(knob for knob in knobs() if knob.startswith(key + "."))
            raise ConfigError(f"{COMMAND_LINE}: `{key}` is a section; set one of its keys, for example {example}=...")
        values = _over(values, nested({key: _parse_value(key, text)}))
    return by_key(values)


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


def _known(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers without empty sections (`reward:` with nothing below it).

    Raises ConfigError: with a line for each unknown key, and for each section that is not a mapping.
    """
    lines = list[str]()
    for layer in layers:
        for key, value in layer.values.items():
            if key in sections() and value not in (None, {}):
                lines.append(f"{layer.name}: `{key}` is a section and must be a mapping; it is {value_in_words(value)}")
            elif key not in knobs() and key not in sections():
                unknown = f"unknown configuration key `{key}` (value {value_in_words(value)})"
                lines.append(f"{layer.name}: {unknown}: {suggest(key)}")
    translators = {
        "verl": "`asyncgrpo config from-verl FILE|KEY=VALUE...`",
        "TRL": "`asyncgrpo config from-trl FILE|KEY=VALUE...`",
    }
    for system, translator in translators.items():
        if any(f"that is {system}'s" in line for line in lines):
            lines.append(f"{translator} translates keys and values of {system}")
    if lines:
        raise ConfigError("\n".join(lines))
    return [layer._replace(values={k: v for k, v in layer.values.items() if k in knobs()}) for layer in layers]


def _merge(layers: Sequence[Layer], where: str) -> dict[str, Any]:
    """Merge the layers into plain values by dotted key, with interpolations resolved."""
    merged: dict[str, Any] = {}
    for values in _without_leftovers(layers):
        merged |= {key: _over(merged.get(key), value) for key, value in values.items()}
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.create(nested(merged)), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{where}: {f'{key}: ' if key else ''}{_first_line(error)}") from error
    return by_key(plain)


def _over(below: Any, above: Any) -> Any:
    """Return a value with that of a lower layer under it: mappings are merged key by key, other values replaced."""
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {name: _over(below.get(name), value) for name, value in above.items()}
    return above


def each(function: Callable[[str], str], value: Any) -> Any:
    """Apply `function` to a text, each of several, or each value of a mapping; any other value stays."""
    if isinstance(value, list | tuple):
        return type(value)(each(function, one) for one in value)
    if isinstance(value, dict):
        return {name: each(function, one) for name, one in value.items()}
    return function(value) if isinstance(value, str) else value


def is_part_of_a_preset(key: str) -> bool:
    """True if presets set this key, also those that leave it at its default."""
    return key in _RECIPE_IN_LEARNER or (key.startswith("algorithm.") and key not in _KEPT)


def _under_presets(layers: Sequence[Layer]) -> list[Layer]:
    """Drop the keys that presets set from layers below a preset, so that it means the same over any file."""
    last = max((number for number, layer in enumerate(layers) if layer.is_preset), default=0)
    below = [
        layer._replace(values={key: value for key, value in layer.values.items() if not is_part_of_a_preset(key)})
        for layer in layers[:last]
    ]
    return [*below, *layers[last:]]


def _without_leftovers(layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Return the values of each layer, without the arguments of a function that a later layer replaces.

    PPO's clip bounds in a file would be a thousand times too wide for GSPO in a later layer.
    """
    kept = [layer.values for layer in layers]
    for choice, arguments in _ARGUMENTS_OF.items():
        chosen = getattr(AlgorithmConfig(), choice)
        for number, values in enumerate(kept):
            other = values.get(f"algorithm.{choice}", chosen)
            if other != chosen:
                gone = f"algorithm.{arguments}"
                kept[:number] = [{k: v for k, v in below.items() if not k.startswith(gone)} for below in kept[:number]]
                chosen = other
    return kept


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


MOST, MOST_SECONDS = 2**53, 10**9
"""Largest values of a number and of seconds: beyond them, messages, clocks and seeds overflow."""


def _convert(values: dict[str, Any], layers: Sequence[Layer], where: str) -> Config:
    try:
        # Not strict, so that a number from ${oc.env:...} and `tokens_per_microbatch: 16e3` count as numbers.
        config = msgspec.convert({"model": {}, "data": {}} | nested(values), Config, strict=False)
    except msgspec.ValidationError as error:
        raise _explained(str(error), values, layers, where) from None
    for key, value in by_key(msgspec.to_builtins(config)).items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise ConfigError(f"{_origin(key, layers, where)}: {key} must be finite; it is {value}") from None
        most = MOST_SECONDS if key.endswith("_s") else MOST
        if isinstance(value, int | float) and value > most:
            raise ConfigError(f"{_origin(key, layers, where)}: {key} must be at most {most}; it is {value}")
    return config


def _origin(key: str, layers: Sequence[Layer], where: str) -> str:
    """Return the name of the layer that sets a key."""
    return next((layer.name for layer in reversed(layers) if key in layer.values), where)


def _explained(message: str, values: dict[str, Any], layers: Sequence[Layer], where: str) -> ConfigError:
    """Turn msgspec's message, which has only a path, into a sentence with origin, key and value."""
    problem, _, path = message.partition(" - at `$.")
    path = path.rstrip("`")
    key = re.sub(r"\[.*", "", path)  # without an index: of `data.columns[...]` and `run.loggers[0]`
    if missing := re.search(r"missing required field `(\w+)`", problem):
        key = f"{key}.{missing[1]}"
        what = f"{key} is missing ({knobs()[key].description})"
        return ConfigError(f"{where}: {what}; write it in the file or as {key}=...")
    knob, value = knobs()[key], values.get(key)
    out_of_bounds = re.fullmatch(r"Expected `\w+( \| null)?` [<>]=? \S+", problem) is not None
    needs = (out_of_bounds and bounds_in_words(knob.type)) or type_in_words(knob.type)
    hint = "; put it in quotes" if knob.takes(inspect.StrType) and isinstance(value, int | float) else ""
    if isinstance(value, str) and (meant := near(value, knob.choices)):
        hint = f": {meant}"
    if knob.fields and path != key:  # in an entry of a list of mappings
        hint = f"; {path}: {problem}"
    return ConfigError(f"{_origin(key, layers, where)}: {key} must be {needs}; it is {value_in_words(value)}{hint}")
