"""What commands share: output as JSON or text, options, and the settings that flags stand for.

A flag overrides the file, and an explicit `key=value` overrides a flag. A flag that is not given sets nothing.
"""

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncgrpo.config.schema import Config, changed
from asyncgrpo.errors import ConfigError
from asyncgrpo.logs import visible

# -- output ------------------------------------------------------------------------------------------------------------

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def example(arguments: str) -> str:
    """Return the epilog of a command. It stays on one line, for copying: `\\b` turns off wrapping."""
    return f"\b\nExample: asyncgrpo {arguments}"


def print_json(value: Any, *, indent: int | None = 2) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=indent, default=str))


def print_fact(name: str, text: str) -> None:
    """Print a text beside its name, with its control characters escaped."""
    typer.echo(f"{name:16} " + visible(text).replace("\n", f"\n{'':17}"))


def wrapped(line: str, *, indent: int) -> str:
    """Wrap `line` to the terminal, indented from the second line on. Return it as it is if stdout is not a terminal."""
    if not sys.stdout.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def columns(rows: list[dict[str, str]]) -> str:
    """Return the rows as text under their names: the first and the last column to the left, the others to the right."""
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [{name: name for name in names}, *rows]
    ends = (names[0], names[-1])
    return "\n".join(
        "  ".join(line[n].ljust(widths[n]) if n in ends else line[n].rjust(widths[n]) for n in names).rstrip()
        for line in lines
    )


def command(*arguments: object) -> str:
    """Return an asyncgrpo command quoted for a shell, such as `asyncgrpo samples 'my run'`."""
    return shlex.join(["asyncgrpo", *map(str, arguments)])


def same_command(out: Path | None = None) -> str:
    """Return the running command, quoted for a shell.

    Args:
        out: run folder to add as `--out`, if the command line has none.
    """
    name, *rest = sys.argv[1:]
    return command(name, *(["--out", out] if out is not None else []), *rest)


def shorten(text: str, length: int) -> str:
    """Keep `length` characters of `text` from both ends, and count the others."""
    if len(text) <= length:
        return text
    head = length * 2 // 3
    return f"{text[:head]} … ({len(text) - length:,} characters left out) … {text[head - length :]}"


def size_in_words(num_bytes: float) -> str:
    """Format a size, such as `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.{0 if unit == 'B' else 1}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


# -- options -----------------------------------------------------------------------------------------------------------

ModelOption = Annotated[str | None, typer.Option("--model", help="Folder of a Hugging Face model, or its hub id.")]
RewardFuncOption = Annotated[
    list[str] | None,
    typer.Option("--reward-func", help="Python file with compute_score, FILE:NAME, or a built-in reward; repeatable."),
]
UnsafeRewardsOption = Annotated[
    bool,
    typer.Option(
        "--unsafe-rewards", help="Run generated code without a sandbox if bubblewrap cannot run (reward.code.unsafe)."
    ),
]
StepsOption = Annotated[int | None, typer.Option("--steps", help="Optimizer steps.")]
EngineOption = Annotated[str | None, typer.Option("--engine", help="Inference engine: sglang, torch or fake.")]
OutOption = Annotated[str | None, typer.Option("--out", help="Run folder.")]
MaxLagOption = Annotated[
    str | None,
    typer.Option("--max-lag", help="Maximum staleness of a group in optimizer steps; 0: synchronous; or auto."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check the run and print its sizes and placement without starting it.")
]
AlgorithmOption = Annotated[
    str | None,
    typer.Option(
        "--algorithm", help="Preset of the objective; overrides the file. `asyncgrpo config algorithms` lists them."
    ),
]
PROMPTS = "Parquet, JSONL or JSON file, hf:ID or reasoning-gym:NAME"
FILE = "YAML file, or the name of one in the package."
ConfigArgument = Annotated[str, typer.Argument(metavar="FILE", help=FILE)]
SettingsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Any setting; overrides files and flags.", show_default=False),
]

# -- settings of the flags ---------------------------------------------------------------------------------------------

_KEYS = {
    "model": "model.path",
    "data": "data.train",
    "eval_data": "data.eval",
    "reward_func": "reward.function",
    "unsafe_rewards": "reward.code.unsafe",
    "rollout_n": "algorithm.group_size",
    "kl_coef": "algorithm.kl_coef",
    "lr": "learner.lr",
    "engine": "generators.engine",
    "out": "run.out",
    "max_lag": "buffer.max_lag",
    "steps": "run.steps",
    "epochs": "run.epochs",
}
"""Setting of each flag."""


def train_overrides(*, explicit: Sequence[str] = (), **flags: Any) -> list[str]:
    """Return the overrides for `load_config`: those of the flags, then the explicit ones.

    If only one of `steps` and `epochs` is given, the other is unlimited.

    Args:
        explicit: `key=value` of the command line.
        flags: value of each flag. Those that are not in `_KEYS` are ignored. None, False and an empty list set nothing.
    """
    if (out := flags.get("out")) is not None and not out.strip():
        raise ConfigError("--out is empty; name a folder")
    given = {key: flags.get(name) for name, key in _KEYS.items()}
    given = {key: one_or_all(value) if isinstance(value, list | tuple) else value for key, value in given.items()}
    values = {key: value for key, value in given.items() if value is not None and value is not False}
    if ("run.steps" in values) != ("run.epochs" in values):
        values = {"run.steps": "null", "run.epochs": "null"} | values
    return [f"{key}={value}" for key, value in values.items()] + list(explicit)


def one_or_all(values: Sequence[str] | None) -> str | list[str] | None:
    """Return the setting for a repeatable flag: its only value, a list of several, or None."""
    if not values:
        return None
    return values[0] if len(values) == 1 else list(values)


def keys_of(overrides: Sequence[str]) -> set[str]:
    return {override.partition("=")[0].strip() for override in overrides}


def placed(config: Config, n_gpus: int, explicit: Sequence[str]) -> dict[str, Any]:
    """Return the settings that place a run on so many GPUs: by the size of the model, in halves if it is unknown.

    1 is shared by one generator and one learner rank. 0 puts both on the CPU, in float32.

    Args:
        config: of the run, without a place.
        explicit: `key=value` of the command line, which are kept.
    Raises:
        ConfigError: the GPUs cannot be split, or learner and generator do not fit one GPU.
    """
    from asyncgrpo.cli.running import card_of
    from asyncgrpo.config.explain import knobs
    from asyncgrpo.config.model_size import size_at
    from asyncgrpo.config.placement import choose, share_one_gpu

    kept = {key: attrgetter(key)(config) for key in keys_of(explicit) if key in knobs()}
    one_each: dict[str, Any] = {"generators.count": 1, "generators.gpus_each": n_gpus, "learner.ranks": 1}
    if n_gpus == 0:  # many CPUs only emulate bfloat16
        chosen = one_each | {"learner.device": "cpu", "model.dtype": "float32"}
    else:
        chosen = {"learner.device": "cuda"} | (one_each | {"cluster.share_gpu": True} if n_gpus == 1 else {})
        config = changed(config, chosen | kept)
        shared = n_gpus - config.teacher_gpus
        if shared < min(n_gpus, 2):
            left = f"--n-gpus {n_gpus} leaves {max(shared, 0)} beside {config.teacher_gpus} of teachers (teacher.path)"
            need = "generators and learner need 2; give more GPUs, or lower teacher.gpus_each"
            raise ConfigError(f"{left}, but {need}")
        size, card = size_at(config.model.path, may_download=True), card_of(config)
        if n_gpus > 1:
            chosen |= choose(size, config, card, shared, kept)
        else:
            chosen |= share_one_gpu(size, config, card, kept) if size else {"generators.memory_fraction": 0.35}
    return chosen | kept
