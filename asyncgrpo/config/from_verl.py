"""Reads a verl configuration for `asyncgrpo config from-verl`: a YAML file, a shell script or `key=value`.

A script is read, not run. Keys in a loop, and in an `if` or a `case` that nothing known decides, are left out and named.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncgrpo.config.explain import near
from asyncgrpo.config.files import flat, load_values, parse, text_of
from asyncgrpo.config.shell import Line, read_lines
from asyncgrpo.config.translation import Translation, translation
from asyncgrpo.config.verl import VERL
from asyncgrpo.errors import ConfigError

FLAGS: dict[str, dict[str, Any]] = {
    "--model": {"actor_rollout_ref.model.path": None},
    "--data": {"data.train_files": None},
    "--rollout_n": {"actor_rollout_ref.rollout.n": None},
    "--epochs": {"trainer.total_epochs": None},
    "--reward_func": {"custom_reward_function.path": None},
    "--n_gpus": {"trainer.n_gpus_per_node": None},
    "--lr": {"actor_rollout_ref.actor.optim.lr": None},
    "--kl_coef": {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_coef": None},
}
"""Flags of a `train.sh` around verl's trainer, and the keys that they set; None stands for the flag's value."""
_KEY = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
_NAME = re.compile(r"\+{0,2}([A-Za-z_]\w*)=(.*)", re.DOTALL)
"""A key of no section, such as `model_engine`."""
_WRITTEN = re.compile(r"""(?:^|[\s"'(=])\+{0,2}([a-z_]\w*(?:\.[\w-]+)+)=""", re.MULTILINE)
_NO_COMMAND = re.compile(r"(?:^|\s)(?:#|echo\b|printf\b).*", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_OWN_FILES = frozenset(
    recipe + trainer
    for recipe in ("", "fully_async_", "one_step_off_")
    for trainer in ("ppo_trainer", "ppo_megatron_trainer", "ppo_veomni_trainer")
)
"""verl's own configurations, whose values are its defaults."""


def read(words: Sequence[str], stdin: str = "") -> Translation:
    """The translation of files and `key=value`, which are those of `read_words`. Raises ConfigError."""
    given, unread = read_words(words, stdin)
    if not given and not unread:
        raise ConfigError(f"{' '.join(words)}: it has no key of verl's")
    return translation(given, unread, VERL)


def read_words(words: Sequence[str], stdin: str = "") -> tuple[dict[str, Any], list[str]]:
    """verl's keys and values in `words`, and what could not be read. Later words win.

    Args:
        words: YAML files (`.yaml`, `.yml`), other files (shell scripts), `-` for a script in `stdin`, or `key=value`.
    Raises:
        ConfigError: a file cannot be read, or a word is none of these.
    """
    given: dict[str, Any] = {}
    problems: list[str] = []
    for word in words:
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            given |= {key: value for key, value in flat(load_values(Path(word))).items() if value != {}}
        elif word == "-" or Path(word).is_file():
            found, unread = read_script(stdin if word == "-" else text_of(Path(word)), os.environ)
            given |= found
            problems += unread
        elif key := _KEY.fullmatch(word):
            given[key[1]] = parse(key[2])
        else:
            raise ConfigError(f"`{word}` is neither a file nor of the form key=value")
    return given, problems


def read_script(text: str, environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """verl's keys in a shell script, and a sentence for each key and each variable that was left out."""
    assigned, in_branches = set[str](), set[str]()
    given: dict[str, Any] = {}
    problems: list[str] = []
    for line in read_lines(text, environment):
        if line.in_branch:
            in_branches |= set(line.assigned)
            names = [name for name in line.assigned if name in assigned] + [key for key, _ in _keys(line)]
            names += [flag for flag, _ in _flags(line.words)]
            problems += [f"{name}: in an `if`, a `case` or a loop of the script" for name in dict.fromkeys(names)]
            continue
        assigned |= set(line.assigned)
        set_by_flags, unknown = _from_flags(line.words)
        given |= set_by_flags
        problems += unknown + _config_files(line.words)
        for key, value in _keys(line):
            if "$" in value or "`" in value:
                problems.append(f"{key}: {_why_unknown(value, in_branches - assigned)}")
            else:
                given[key] = parse(value)
    problems += _not_reached(text, {*given, *(problem.partition(":")[0] for problem in problems)})
    return given, list(dict.fromkeys(problems))


def _not_reached(text: str, seen: Collection[str]) -> list[str]:
    """A sentence for each key in the text that no command gets which runs or may run."""
    written = dict.fromkeys(_WRITTEN.findall(_NO_COMMAND.sub("", text)))
    return [f"{key}: in a part of the script that does not run, or is not read" for key in written if key not in seen]


def _keys(line: Line) -> list[tuple[str, str]]:
    """The keys in a line and their values. Words such as `model_engine=fsdp` count beside keys that have a section."""
    if line.words[:1] in (["echo"], ["printf"]):
        return []
    found = [_KEY.fullmatch(word) for word in line.words]
    if any(found) or VERL.keys.keys() & {word.partition("=")[0] for word in line.words if "=" in word}:
        found = [key or _NAME.fullmatch(word) for key, word in zip(found, line.words, strict=True)]
    return [(key[1], key[2]) for key in found if key]


def _why_unknown(value: str, in_branches: set[str]) -> str:
    named = _VARIABLE.search(value)
    if "$(" in value or "`" in value or named is None:
        return f"`{value}` is known only when the script runs"
    if named[1] in in_branches:
        return f"`{value}` is set in an `if`, a `case` or a loop of the script"
    return f"`{value}` is not set in the script"


def _config_files(words: Sequence[str]) -> list[str]:
    """A sentence for each configuration that a command names, other than verl's own."""
    found = []
    for word, after in pairwise([*words, ""]):
        flag, equals, name = word.partition("=")
        name = name if equals else after
        if flag in ("--config-name", "-cn") and name.removesuffix(".yaml") not in _OWN_FILES:
            found.append(f"{flag}={name}: name that file too, before the script")
    return found


def _flags(words: Sequence[str]) -> list[tuple[str, str]]:
    """The flags of a `train.sh` with their values, where the words are a call of one."""
    start = next((place for place, word in enumerate(words[:2]) if Path(word).name == "train.sh"), None)
    after = words[start + 1 :] if start is not None else []
    found = []
    for place, word in enumerate(after, 1):
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.append(("--" + flag[2:].replace("-", "_"), value if equals else "".join(after[place : place + 1])))
    return found


def _from_flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """verl's keys that the flags of a `train.sh` set, and a sentence for each flag that is not known."""
    given: dict[str, Any] = {}
    problems: list[str] = []
    for flag, value in _flags(words):
        if "$" in value:
            problems.append(f"{flag}: `{value}` is not set in the script")
        elif flag in FLAGS:
            given |= {key: parse(value) if fixed is None else fixed for key, fixed in FLAGS[flag].items()}
        else:
            hint = near(flag, FLAGS)
            problems.append(f"{flag}: train.sh has no such flag that asyncgrpo knows" + (f"; {hint}" if hint else ""))
    return given, problems
