"""Configurations of verl and TRL in the keys of asyncgrpo: read, translated and printed.

`read` takes YAML or JSON files, launch scripts, one command, or single keys. Bash runs a script in a sandbox (`isolation.py`):
it has no network and no files of this machine but bash and a few programs that print. Every other command is recorded and
succeeds, and the recorded commands have the keys.
"""

import os
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncgrpo.config.explain import default_of, knobs, near, value_in_words
from asyncgrpo.config.foreign_rules import TRL, VERL, KeyMap, TranslatedKey, merged
from asyncgrpo.config.load import by_key, load_values, nested, parse, text_of
from asyncgrpo.errors import ConfigError
from asyncgrpo.isolation import Ended, run_isolated, why_not_isolated

_SECONDS, _MEMORY_MB, _TRIES = 10.0, 256, 30
"""Limits of a script, and of the times that it runs again with one more path."""

# -- sources -----------------------------------------------------------------------------------------------------------

_KEY = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
_NAME = re.compile(r"\+{0,2}([A-Za-z_]\w*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
_WRITTEN = {
    "verl": re.compile(r"""(?:^|[\s"'(=])\+{0,2}([a-z_]\w*(?:\.[\w-]+)+)=""", re.MULTILINE),
    "TRL": re.compile(r"(?:^|\s)--([a-z]\w*)", re.MULTILINE),
}
"""A key in the text of a script."""
_NO_COMMAND = re.compile(r"(?:^|\s)(?:#|echo\b|printf\b).*", re.MULTILINE)
_OWN_FILES = frozenset(
    recipe + trainer
    for recipe in ("", "fully_async_", "one_step_off_")
    for trainer in ("ppo_trainer", "ppo_megatron_trainer", "ppo_veomni_trainer")
)
"""verl's own configurations, whose values are its defaults."""

Found = tuple[dict[str, Any], list[str]]
"""Their keys with their values, and sentences about keys that were left out."""


def read(words: Sequence[str], keys: KeyMap, stdin: str = "") -> "Translation":
    """Translate what `read_words` takes. Raises ConfigError."""
    given, unread = read_words(words, keys, stdin)
    if not given and not unread:
        raise ConfigError(f"{' '.join(words)}: it has no key of {keys.system}'s")
    if keys is VERL:
        given = by_key(given)  # of mappings such as data.apply_chat_template_kwargs={enable_thinking: False}
    rows = keys.translate(given)
    unwritten = keys.unwritten(given, unknown={line.partition(":")[0] for line in unread})
    for key in given:
        if keys.entry_of(key) is None:
            hint = near(key, keys.keys)
            unread.append(f"{key}: asyncgrpo knows no such key of {keys.system}" + (f"; {hint}" if hint else ""))
    unwritten = {key: value for key, value in unwritten.items() if value_in_words(value) != default_in_words(key)}
    return Translation(keys.system, merged(rows), rows, unread, unwritten)


def read_words(words: Sequence[str], keys: KeyMap, stdin: str = "") -> Found:
    """Return the keys and values in `words`. Later words win.

    Args:
        words: YAML or JSON files, other files (launch scripts), `-` for a script in `stdin`, and `key=value`; or one command
            with its words.
    Raises:
        ConfigError: a file cannot be read, a word is none of these, or a script cannot run in a sandbox.
    """
    assignment = _KEY if keys is VERL else _NAME
    is_command = len(words) > 1 and words[0] != "-" and not Path(words[0]).suffix and not assignment.fullmatch(words[0])
    if is_command and any(of_command := from_commands([words], keys)):
        return of_command
    given: dict[str, Any] = {}
    problems: list[str] = []
    for word in words:
        file, unread = Path(word), list[str]()
        if file.suffix in (".yaml", ".yml", ".json") and "=" not in word:
            values = load_values(file)
            found = flat(values) if keys is VERL else values
        elif file.suffix == ".py" and file.is_file():
            raise ConfigError(f"{word} is Python, which is not read: {_FROM_PYTHON}")
        elif word == "-":
            found, unread = read_script(stdin, keys, os.environ)
        elif file.is_file():
            found, unread = read_script(text_of(file), keys, os.environ, str(file.resolve()))
        elif key := assignment.fullmatch(word):
            found = {key[1]: parse(key[2])}
        else:
            raise ConfigError(f"`{word}` is neither a file nor of the form key=value")
        given |= found
        problems += unread
    return given | _processes(given), problems


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by dotted key, without empty sections. Interpolations are resolved if possible; `???` is None."""
    found: dict[str, Any] = {}

    def walk(node: DictConfig, prefix: str) -> None:
        written: Any = OmegaConf.to_container(node)
        for name, plain in written.items():
            try:
                value = node[name]
            except OmegaConfBaseException:  # the interpolation cannot be resolved, or the value is `???`
                value = None if OmegaConf.is_missing(node, name) else plain
            if isinstance(value, DictConfig):
                walk(value, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value

    walk(OmegaConf.create(dict(values)), "")
    return found


_FROM_PYTHON = (
    "give the command that starts it; for TRL, print(args.to_json_string()) in it, and give that file with the fields that "
    "GRPOConfig has not (model_name_or_path=..., dataset_name=..., reward_funcs=FILE:NAME)"
)


def _processes(given: Mapping[str, Any]) -> dict[str, Any]:
    """The number of processes, which TRL's JSON has only as a factor of its generation batch."""
    names = ("generation_batch_size", "per_device_train_batch_size", "steps_per_generation")
    sizes = [size for name in names if isinstance(size := given.get(name), int) and size > 0]
    if "num_processes" in given or len(sizes) < len(names):
        return {}
    return {"num_processes": sizes[0] // (sizes[1] * sizes[2])}


def read_script(text: str, keys: KeyMap, environment: Mapping[str, str], file: str = "/script.sh") -> Found:
    """Return the keys of the commands that a launch script starts, and a sentence for each key that was left out."""
    started = run_script(text, environment, file)
    given, problems = from_commands(started.commands, keys, started.unset)
    seen = {*given, *(problem.partition(":")[0] for problem in problems)}
    written = dict.fromkeys(_WRITTEN[keys.system].findall(_NO_COMMAND.sub("", text)))
    problems += [
        f"{key}: no command that the script starts has it"
        for key in written
        if key not in seen and (keys is VERL or key in keys.keys)
    ]
    return given, problems + ([f"the script ends early: {started.problem}"] if started.problem else [])


def from_commands(commands: Sequence[Sequence[str]], keys: KeyMap, unset: Iterable[str] = ()) -> Found:
    """Return the keys of commands, and sentences about keys without a value that is known.

    Args:
        unset: variables whose value is their own name, `$NAME`.
    """
    given: dict[str, Any] = {}
    problems: list[str] = []
    several = defaultdict[str, list[Any]](list)
    for words in commands:
        pairs, unknown = (_verl_keys if keys is VERL else _trl_flags)(words)
        problems += unknown
        found: dict[str, Any] = {}
        for key, values in pairs:
            written = " ".join(map(str, values))
            if any(f"${name}" in written for name in unset):
                problems.append(f"{key}: `{written}` is not set in the script")
            elif "$" in written or not written:
                problems.append(f"{key}: `{written}` is known only when {keys.system} runs")
            else:
                value = [parse(one) if isinstance(one, str) else one for one in values]
                found[key] = value[0] if len(value) == 1 else value
        for key, value in found.items():
            several[key] += [] if value in several[key] else [value]
        given |= found
    problems += [
        f"{key}: commands of the script set {' and '.join(map(value_in_words, values))}; the last one counts"
        for key, values in several.items()
        if len(values) > 1
    ]
    return given, list(dict.fromkeys(problems))


def _verl_keys(words: Sequence[str]) -> tuple[list[tuple[str, list[Any]]], list[str]]:
    """The keys of a command. Words such as `model_engine=fsdp` count beside keys that have a section."""
    while words and (words[0] == "env" or _NAME.fullmatch(words[0])):
        words = words[1:]
    found = [_KEY.fullmatch(word) for word in words]
    if any(found) or VERL.keys.keys() & {word.partition("=")[0] for word in words if "=" in word}:
        found = [key or _NAME.fullmatch(word) for key, word in zip(found, words, strict=True)]
    pairs = [(key[1], [key[2]]) for key in found if key]
    problems = []
    for word, after in pairwise([*words, ""]):
        flag, equals, name = word.partition("=")
        name = name if equals else after
        if flag in ("--config-name", "-cn") and name.removesuffix(".yaml") not in _OWN_FILES:
            problems.append(f"{flag}={name}: name that file too, before the script")
    return pairs, problems


def _trl_flags(words: Sequence[str]) -> tuple[list[tuple[str, list[Any]]], list[str]]:
    """The flags of a command that trains, as argparse reads those of TRL: `--no_x` is x=false, several values are a list."""
    trains = any(word == "grpo" or word.endswith(".py") or word in ("-m", "accelerate", "torchrun") for word in words)
    pairs = list[tuple[str, list[Any]]]()
    for flag, values in _flags(words) if trains else ():
        name = "num_processes" if flag == "nproc_per_node" else flag  # torchrun's name
        values = [word for word in values if not word.endswith(".py")]  # the script that a launcher's flags end with
        if not values and name.startswith("no_") and name.removeprefix("no_") in TRL.keys:
            pairs.append((name.removeprefix("no_"), [False]))
        else:
            pairs.append((name, [*values] or [True]))
    return pairs, []


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Names of flags, with underscores for dashes, and the words up to the next one."""
    name, values = "", list[str]()
    for word in [*words, "--end"]:
        if flag := _FLAG.fullmatch(word):
            if name:
                yield name, values
            name, values = flag[1].replace("-", "_"), [flag[2]] if flag[2] is not None else []
        else:
            values.append(word)


# -- launch scripts ----------------------------------------------------------------------------------------------------

_PRINTING = (
    *("awk", "basename", "bc", "cat", "cut", "date", "dirname", "echo", "expr", "grep", "head", "printf", "realpath"),
    *("sed", "seq", "sort", "tail", "tr", "uname", "uniq", "wc"),
)
_PATH = "/usr/bin:/bin"
_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64")
_PRELUDE = r"""
[[ -e /dev/fd/9 ]] || { exec 9>&1 > /dev/null; export _number=0; trap ': $((_number++))' DEBUG; }
record() { printf '%s\0' "$_number" "$#" "$@" >&9; }
command_not_found_handle() { record "$@"; [[ ! -p /dev/stdin ]] || cat > /dev/null; }
python3() { record python3 "$@"; [[ $1 != -c ]]; }
python() { python3 "$@"; }
bash() { if [[ $1 == -*c ]]; then command bash "$@"; else record bash "$@"; fi; }
sh() { bash "$@"; }
exec() { (( $# == 0 )) || { record "$@"; exit 0; }; }
source() { record source "$@"; }
.() { record source "$@"; }
tee() { cat > /dev/null; }
cd() { local to=${!#}; [[ $to == /* ]] || to=$PWD/$to; PWD=$(realpath -sm -- "$to"); }
pwd() { printf '%s\n' "$PWD"; }
ulimit() { :; }
kill() { :; }
wait() { builtin wait; }
"""
"""Read by bash before the script. A record is the number of the command in the script, which orders those that run in the
background, the number of words and the words, each ended by a null byte."""
_UNSET = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?\?[^}]*)?\})")
"""A variable without a default: `$NAME`, `${NAME}`, `${NAME:?message}`."""
_ASSIGNS = r"for|read|select|local|declare|mapfile|readarray|getopts|-v"
_ASSIGNED = rf"(?<![\w$]){{0}}(?:\[[^]]*\])?[+:]?=|\b(?:{_ASSIGNS})\b[^\n;]*\b{{0}}\b"
_BLOCKED = re.compile(
    r"line \d+: (\S+): (?:No such file or directory|Read-only file system|Permission denied|Is a directory)"
)


class Started(NamedTuple):
    """The commands that a script starts."""

    commands: list[list[str]]
    """With their words, in their order. The commands of bash itself are not among them."""
    unset: frozenset[str]
    """Variables that the script needs and does not set; each had its own name as its value, `$NAME`."""
    problem: str
    """The reason for an early end; empty if there was none."""


def run_script(text: str, environment: Mapping[str, str], file: str = "/script.sh") -> Started:
    """Run a launch script in a sandbox and return the commands that it would start.

    Args:
        environment: the user's variables, which the script sees.
        file: the script's path, which it may ask for.
    Raises:
        ConfigError: this machine cannot make a sandbox.
    """
    bash = shutil.which("bash", path=_PATH) or "/bin/bash"
    programs = [path for name in _PRINTING if (path := shutil.which(name, path=_PATH))]
    own = ("ENV", "SHELLOPTS")
    kept = {key: text for key, text in environment.items() if key not in own and not key.startswith(("BASH", "LD_"))}
    unset = {name for found in _UNSET.findall(text) for name in found if name and name not in {*kept, "HOME", "PWD"}}
    unset = {name for name in unset if not re.search(_ASSIGNED.replace("{0}", name), text)}
    variables = {name: f"${name}" for name in unset} | {"PATH": _PATH, "LC_ALL": "C.UTF-8", "BASH_ENV": "/prelude.sh"}
    paths = dict[str, str]()
    """Commands and files that the script names by a path -> where they are."""
    visible = [*_LIBRARIES, bash, *programs]
    before: Ended | None = None
    for _ in range(_TRIES):
        functions = [f'function {path} {{ record {path} "$@"; }}\n' for path in paths if shlex.quote(path) == path]
        ended = run_isolated(
            [bash, file],
            visible=visible,
            files={file: text, "/prelude.sh": _PRELUDE + "".join(functions)},
            environment=kept | variables,
            timeout_s=_SECONDS,
            memory_mb=_MEMORY_MB,
            folder=os.getcwd(),
            discarded=list(paths.values()),
        )
        if not ended.is_started and before is not None:  # a path that cannot be made here, such as one below a file
            ended = before
            break
        if not ended.is_started:
            why = why_not_isolated([bash, "-c", ":"], visible=visible, files={})
            raise ConfigError(f"a script is read in a sandbox, and {why or 'it did not start'}: {_WITHOUT_A_SANDBOX}")
        new = {path: os.path.abspath(path) for path in _BLOCKED.findall(ended.stderr) if "/" in path or "." in path}
        if ended.is_late or not new.keys() - paths.keys():
            break
        paths |= new
        before = ended
    problem = f"exit code {ended.code}" if ended.code else ""
    problem = f"it did not end within {_SECONDS:g} s" if ended.is_late else problem
    if problem and (last := re.findall(r": (line \d+: .*)", ended.stderr)[-1:]):
        problem += f", {last[0]}"
    records = sorted(_records(ended.stdout), key=itemgetter(0))
    return Started([words for _, words in records], frozenset(unset), problem)


_WITHOUT_A_SANDBOX = (
    "install the package bubblewrap, or give the command itself, whose variables your shell fills in "
    "(python3 -m verl.trainer.main_ppo KEY=VALUE ...), or the YAML that Hydra wrote (.hydra/config.yaml)"
)


def _records(text: str) -> Iterator[tuple[int, list[str]]]:
    words = iter(text.split("\0"))
    for number, count in zip(words, words, strict=False):
        if not (number.isdecimal() and count.isdecimal()):
            return
        yield int(number), [word for _, word in zip(range(int(count)), words, strict=False)]


# -- translation ------------------------------------------------------------------------------------------------------


class Translation(NamedTuple):
    """A configuration of another system in our keys."""

    system: str
    ours: dict[str, Any]
    rows: list[TranslatedKey]
    """Its keys that are known here."""
    unread: list[str]
    """Sentences about keys that were not understood."""
    unwritten: dict[str, Any]
    """Its defaults for keys that are not given, in our keys, where our default differs."""


def report(found: Translation, problem: str, *, as_yaml: bool) -> str:
    """The translation as a command or a YAML file, followed by comments that name every key that was given.

    Args:
        problem: why the command does not run yet; empty where it does.
    """
    command = " \\\n    ".join(["asyncgrpo train", *map(shlex.quote, assignments(found.ours))])  # over several lines
    parts = [msgspec.yaml.encode(nested(found.ours)).decode().rstrip() if as_yaml else command]
    comments = {
        "Translated:": _translated([row for row in found.rows if row.ours]),
        "No counterpart:": _reasons(row for row in found.rows if not row.ours and not row.by_hand),
        "To be done by hand:": _reasons(row for row in found.rows if not row.ours and row.by_hand),
        "Not understood:": found.unread,
        f"{found.system}'s defaults for keys that are not given; asyncgrpo's are in brackets:": [
            f"{key}={value_in_words(value)} ({default_in_words(key) or 'the default of algorithm.loss'})"
            for key, value in found.unwritten.items()
        ],
        "It does not run yet:": problem.splitlines(),
    }
    for head, lines in comments.items():
        if lines:
            parts.append("\n".join([f"# {head}", *(f"#   {line}" for line in lines)]))
    return "\n\n".join(parts)


def _translated(rows: Sequence[TranslatedKey]) -> list[str]:
    """Lines `key=value: ours=value`, with what else to know, and with the later key where two disagree."""
    decides = {key: row for row in rows for key in row.ours}
    found = list[str]()
    for row in rows:
        others = [decides[key] for key, value in row.ours.items() if decides[key].ours[key] != value]
        later = f", but {_written(others[0])} comes later" if others else ""
        note = f" ({row.words})" if row.words else ""
        found.append(f"{_written(row)}: {' '.join(assignments(row.ours))}{later}{note}")
    return found


def _reasons(rows: Iterable[TranslatedKey]) -> list[str]:
    """Lines `key=value: why`. Keys with the same reason share a line."""
    alike = defaultdict[str, list[str]](list)
    for row in rows:
        alike[row.words].append(_written(row))
    return [f"{', '.join(keys)}: {words}" for words, keys in alike.items()]


def _written(row: TranslatedKey) -> str:
    return f"{row.key}={value_in_words(row.value)}"


def assignments(ours: dict[str, Any]) -> list[str]:
    """`key=value` for each key, as the command line takes it."""
    return [f"{key}={value_in_words(value)}" for key, value in ours.items()]


def default_in_words(key: str) -> str:
    """The default of one of our keys; empty for a key below a mapping (`generators.extra.x`)."""
    return default_of(knobs()[key], "required") if key in knobs() else ""
