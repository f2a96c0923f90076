"""Finds and reads YAML files, of users and of the package."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from asyncgrpo.errors import ConfigError

ALGORITHMS = "algorithms"
"""Folder of the algorithm presets in `configs/`, with one file per paper."""


class Layer(NamedTuple):
    """Keys written in one place. Later layers win."""

    name: str
    """File or `command line`, for messages."""
    values: dict[str, Any]
    """Nested values, interpolations not resolved."""
    is_preset: bool = False
    """True for a preset of `configs/algorithms/`, which sets the whole objective: missing keys get their defaults."""


def shipped(name: str) -> Path:
    """Return the file `configs/NAME.yaml` of the package. Raises ConfigError, which lists the names."""
    file = _shipped_folder() / f"{name.removesuffix('.yaml')}.yaml"
    if not file.is_file():
        raise ConfigError(f"no configuration `{name}` comes with the package; there are: {', '.join(shipped_names())}")
    return file


def shipped_names() -> list[str]:
    """Return the names that `shipped` takes."""
    return sorted(file.stem for file in _shipped_folder().glob("*.yaml"))


def algorithm_file(name: str) -> Path:
    """Return the preset `configs/algorithms/NAME.yaml`. Raises ConfigError, which lists the names."""
    bare = name.removeprefix(f"{ALGORITHMS}/").removesuffix(".yaml")
    names = algorithm_names()
    if bare in names:
        return _shipped_folder() / ALGORITHMS / f"{bare}.yaml"
    near = difflib.get_close_matches(bare, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"unknown algorithm `{name}`; {hint}There are: {', '.join(names)}")


def algorithm_names() -> list[str]:
    """Return the names that `algorithm_file` takes."""
    return sorted(file.stem for file in (_shipped_folder() / ALGORITHMS).glob("*.yaml"))


def headline(file: Path) -> str:
    """Return the first line of a file's comment, its title."""
    with open(file, encoding="utf-8") as lines:
        return next(lines, "").removeprefix("#").strip()


def _shipped_folder() -> Path:
    """Return the folder `asyncgrpo/configs` of an installed wheel, else `configs` of the checkout."""
    package = Path(__file__).parent.parent
    return next((found for found in (package / "configs", package.parent / "configs") if found.is_dir()), package)


def find(path: str | Path) -> Path:
    """Return the file `path`, or the file of that name in the package. Raises ConfigError, which suggests the closest."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        raise ConfigError(f"{path} is a folder; give a YAML file in it")
    names = shipped_names()
    if file.stem in names:
        if str(path) == file.stem:
            return shipped(file.stem)
        raise ConfigError(f"file {path} does not exist; the one that comes with the package is called `{file.stem}`")
    beside = {other.stem: str(other) for other in sorted(file.parent.glob("*.y*ml"))}
    known = {name: name for name in names} | beside
    near = difflib.get_close_matches(file.stem, known, n=1, cutoff=0.5)
    hint = f"did you mean {known[near[0]]}?" if near else f"the package brings {', '.join(names)}"
    raise ConfigError(f"file {path} does not exist; {hint}")


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
        layers += read(_extended(file, str(parent)), (*below, file.resolve()))
    is_preset = file.resolve().parent == (_shipped_folder() / ALGORITHMS).resolve()
    return [*layers, Layer(str(file), values, is_preset)]


def _extended(file: Path, parent: str) -> Path:
    """Return the file that `extends: PARENT` in `file` names."""
    beside = file.parent / parent
    if parent in shipped_names():
        return shipped(parent)
    if beside.is_file():
        return beside
    if parent.startswith(f"{ALGORITHMS}/"):
        return algorithm_file(parent)
    raise ConfigError(f"{file}: extends names {parent}, but {beside} does not exist")


def load_values(file: Path) -> dict[str, Any]:
    """Return the nested values of a YAML file, interpolations not resolved. Raises ConfigError, with the line."""
    try:
        values = OmegaConf.load(file)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{file}{line}: this is not valid YAML ({problem})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text; a configuration is a YAML file") from error
    except OSError as error:  # OmegaConf raises it for a lone scalar too
        why = error.strerror or "it holds no mapping such as `model: {path: ...}`"
        raise ConfigError(f"{file} cannot be read: {why}") from error
    if not isinstance(values, DictConfig):
        raise ConfigError(f"{file} holds a list; a configuration is a mapping such as `model: {{path: ...}}`")
    plain = OmegaConf.to_container(values)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def text_of(file: Path) -> str:
    """Return the text of a file. Raises ConfigError."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as text: {error}") from error


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by dotted key. Interpolations are resolved if possible; `???` becomes None."""
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for name in node:
            try:
                value = node[name]
            except OmegaConfBaseException:  # the interpolation cannot be resolved, or the value is `???`
                value = None if OmegaConf.is_missing(node, name) else _plain(node)[name]
            if isinstance(value, DictConfig) and value:
                walk(value, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = _plain(value)

    walk(OmegaConf.create(dict(values)), "")
    return found


def parse(text: str) -> Any:
    """Parse TEXT of `key=TEXT` as YAML; return the text itself if it is not valid YAML."""
    try:
        return yaml_value(text)
    except (YAMLError, OmegaConfBaseException):
        return text


def yaml_value(text: str) -> Any:
    """Parse `text` as YAML, interpolations not resolved. Raises YAMLError or OmegaConfBaseException."""
    value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    assert isinstance(value, dict)
    return value["value"]


def look_up(values: Any, key: str, default: Any = None) -> Any:
    """Return the value at a dotted key of nested dicts, or `default`."""
    for name in key.split("."):
        values = values.get(name, default) if isinstance(values, dict) else default
    return values


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
