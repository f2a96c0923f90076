"""Reads a TRL configuration for `asyncgrpo config from-trl`: a Python script, a YAML or JSON file, a shell script.

Nothing is run. Of a Python script the arguments of `GRPOConfig(...)` and of the like are read, where they are literals or
names that the script sets once to a literal; others are named.
"""

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncgrpo.config.files import load_values, parse, text_of
from asyncgrpo.config.shell import read_lines
from asyncgrpo.config.translation import Translation, translation
from asyncgrpo.config.trl import TRL, hub_source
from asyncgrpo.errors import ConfigError

Found = tuple[dict[str, Any], list[str]]
"""TRL's fields with their values, and sentences about what could not be read."""

_FIELD = re.compile(r"([a-z]\w*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_LAUNCHERS = {"nproc_per_node": "num_processes"}
"""torchrun's names for accelerate's."""


def read(words: Sequence[str], stdin: str = "") -> Translation:
    """The translation of files and `field=value`; later ones win.

    Args:
        words: Python scripts (`.py`), `.yaml`, `.yml` and `.json` files, other files (shell scripts), `-` for a shell
            script in `stdin`, or `field=value`.
    Raises:
        ConfigError: a file cannot be read, a word is none of these, or no field of TRL's is in them.
    """
    given: dict[str, Any] = {}
    unread: list[str] = []
    for word in words:
        found, problems = _read_word(word, stdin)
        given |= found
        unread += problems
    if not given and not unread:
        raise ConfigError(f"{' '.join(words)}: it has no field of TRL's")
    return translation(given, unread, TRL)


def _read_word(word: str, stdin: str) -> Found:
    file = Path(word)
    if word == "-":
        return read_shell(stdin, os.environ)
    if file.is_file() and file.suffix == ".py":
        return read_python(text_of(file), word)
    if file.is_file() and file.suffix in (".yaml", ".yml", ".json"):
        return load_values(file), []
    if file.is_file():
        return read_shell(text_of(file), os.environ)
    if field := _FIELD.fullmatch(word):
        return {field[1]: parse(field[2])}, []
    raise ConfigError(f"`{word}` is neither a file nor of the form field=value")


# -- command lines -----------------------------------------------------------------------------------------------------


def read_shell(text: str, environment: Mapping[str, str]) -> Found:
    """The flags of `trl grpo`, of a Python script and of its launcher, in a shell script."""
    given: dict[str, Any] = {}
    problems: list[str] = []
    for line in read_lines(text, environment):
        if not _is_training(line.words):
            continue
        for name, value in _flags(line.words):
            if line.in_branch:
                problems.append(f"{name}: in an `if`, a `case` or a loop of the script")
            elif any("$" in str(one) for one in (value if isinstance(value, list) else [value])):
                problems.append(f"{name}: `{value}` is not set in the script")
            else:
                given[name] = value
    return given, problems


def _is_training(words: Sequence[str]) -> bool:
    """Whether a line trains, or is a line of a list of flags."""
    if not words:
        return False
    named = any(word == "grpo" or word.endswith(".py") or word in ("-m", "accelerate", "torchrun") for word in words)
    return named or words[0].startswith("--")


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The flags of a command, as argparse reads those of TRL: `--no_x` is x=false, several values are a list."""
    name, values = "", list[Any]()
    for word in [*words, "--end"]:
        flag = _FLAG.fullmatch(word)
        if flag is None:
            values += [parse(word)] if name and not word.endswith(".py") and "${" not in word else []
            continue
        if name:
            yield _value(name, values)
        name, values = flag[1].replace("-", "_"), [parse(flag[2])] if flag[2] is not None else []


def _value(name: str, values: list[Any]) -> tuple[str, Any]:
    name = _LAUNCHERS.get(name, name)
    if not values and name.startswith("no_") and name.removeprefix("no_") in TRL.keys:
        return name.removeprefix("no_"), False
    return name, True if not values else values[0] if len(values) == 1 else values


# -- Python scripts ----------------------------------------------------------------------------------------------------

_CONFIGS = {"GRPOConfig", "ModelConfig", "ScriptArguments", "GRPOScriptArguments"}
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
_TRAINER = {"model": "model_name_or_path", "eval_dataset": "eval_dataset", "train_dataset": "train_dataset"}
_PLACES = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
"""GRPOTrainer's arguments that may be given without a name."""


def read_python(text: str, file: str) -> Found:
    """The arguments of GRPOConfig, ModelConfig, LoraConfig and GRPOTrainer in a script. Raises ConfigError.

    Args:
        file: its name, for messages and for rewards that are functions of the script.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} is no Python that can be read: {error}") from error
    script = _Script(tree, file)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            script.take(call)
    return script.given, script.problems


class _Script:
    """The fields that a script sets, collected call by call."""

    def __init__(self, tree: ast.Module, file: str) -> None:
        self.given: dict[str, Any] = {}
        self.problems: list[str] = []
        self._file = file
        self._set = _assigned_once(tree)
        self._functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        outside = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)]
        self._trains_when_imported = any(
            isinstance(node, ast.Call) and _name(node.func) == "GRPOTrainer"
            for top in outside
            for node in ast.walk(top)
        )

    def take(self, call: ast.Call) -> None:
        name = _name(call.func)
        if name in _CONFIGS:
            self.problems += [f"{name}({ast.unparse(value)}): name the field" for value in call.args]
            for keyword in call.keywords:
                self._keep(keyword.arg, keyword.value, f"{name}(**{ast.unparse(keyword.value)})")
        elif name == "LoraConfig":
            self.given["use_peft"] = True
            for keyword in call.keywords:
                known = _LORA.get(keyword.arg or "", keyword.arg or "")
                self._keep(known if known.startswith("lora_") else f"lora_{known}", keyword.value, "LoraConfig")
        elif name == "GRPOTrainer":
            by_place = dict(zip(_PLACES, call.args, strict=False))
            self._take_trainer(by_place | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg})

    def _take_trainer(self, given: Mapping[str, ast.expr]) -> None:
        for argument, field in _TRAINER.items():
            if argument in given:
                self._take_source(field, given[argument])
        if "reward_funcs" in given:
            listed = self._resolved(given["reward_funcs"])
            self._take_rewards(listed.elts if isinstance(listed, ast.List) else [listed])

    def _take_source(self, field: str, node: ast.expr) -> None:
        """A model or a dataset. `load_dataset` of one file is that file, and with literals alone `hf:ID`."""
        value = self._resolved(node)
        files = [k.value for k in value.keywords if k.arg == "data_files"] if isinstance(value, ast.Call) else []
        if field == "train_dataset" and files:
            self._keep("data_files", files[0], field)
        elif field == "model_name_or_path":
            self._keep(field, node, field)
        else:
            self.given[field] = self._hub_source(value) or ast.unparse(value)

    def _hub_source(self, value: ast.expr) -> str | None:
        """`hf:ID` for `load_dataset(ID, ...)` and `load_dataset(ID)[SPLIT]`; None where it takes more than literals."""
        of_split = [("split", value.slice)] if isinstance(value, ast.Subscript) else []
        call = self._resolved(value.value) if isinstance(value, ast.Subscript) else value
        if not isinstance(call, ast.Call) or _name(call.func) != "load_dataset" or len(call.args) > 2:
            return None
        arguments = [
            *zip(("path", "name"), call.args, strict=False),
            *((k.arg, k.value) for k in call.keywords),
            *of_split,
        ]
        nodes = {str(name): self._resolved(node) for name, node in arguments}
        literals = {
            name: node.value
            for name, node in nodes.items()
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        known = nodes.keys() <= {"path", "name", "split", "revision"} and len(literals) == len(arguments)
        if not known or "path" not in literals:
            return None
        return hub_source(**literals)

    def _take_rewards(self, functions: Sequence[ast.expr]) -> None:
        names = [ast.unparse(node).strip("'\"") for node in functions]
        own = [name for name in names if name in self._functions]
        if own and self._trains_when_imported:
            self.problems.append(
                f"reward_funcs: to load {', '.join(own)} from {self._file} would train; move them to a file of their own"
            )
            return
        self.given["reward_funcs"] = [f"{self._file}:{name}" if name in own else name for name in names]

    def _keep(self, field: str | None, node: ast.expr, where: str) -> None:
        if field is None:
            self.problems.append(f"{where}: its fields are not literals")
            return
        try:
            self.given[field] = ast.literal_eval(self._resolved(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            self.problems.append(f"{field}: `{ast.unparse(node)}` is no literal")

    def _resolved(self, node: ast.expr) -> ast.expr:
        """What a name stands for, where the script sets it once."""
        return self._set.get(node.id, node) if isinstance(node, ast.Name) else node


def _assigned_once(tree: ast.Module) -> dict[str, ast.expr]:
    times = Counter(
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    return {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and times[node.targets[0].id] == 1
    }


def _name(function: ast.expr) -> str:
    """`GRPOConfig` for both `GRPOConfig(...)` and `trl.GRPOConfig(...)`."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
