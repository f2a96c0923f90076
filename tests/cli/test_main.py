"""What every command has in common."""

import os
import subprocess
import sys

import pytest
import typer
from rich.console import Console

from asyncgrpo import __version__, cli
from asyncgrpo.cli import train
from asyncgrpo.cli.running import Output
from tests.runs import command as command_line


def commands(command=None, path: tuple[str, ...] = ("asyncgrpo",)):
    command = command or typer.main.get_command(cli.app)
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


@pytest.mark.parametrize(
    ("path", "command"), list(commands()), ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_every_help_ends_with_an_example_of_that_command(path, command, asyncgrpo):
    ended = asyncgrpo(*path[1:], "--help")
    assert ended.code == 0
    assert ended.out.strip().splitlines()[-1].strip().startswith(f"Example: {' '.join(path)}")


def test_the_version_is_printed(asyncgrpo):
    assert asyncgrpo("--version").out == f"asyncgrpo {__version__}\n"


def test_a_usage_error_is_one_sentence_and_code_2_and_a_value_that_cannot_be_code_1(asyncgrpo):
    long = "a" * 300
    for typed, code, *names in (
        ("trian", 2, "trian", "train"),
        ("doctor --nonsense", 2, "--nonsense", "asyncgrpo doctor --help"),
        ("train --lr fast", 2, "--lr': Input should be a valid number, not 'fast'; see"),
        ("train --rollout_n five", 2, "--rollout-n", "'five'"),
        ("train --n-gpus -1", 2, "--n-gpus", "'-1'"),
        ("scale learners 3", 2, "value for 'generators': 'learners' is not one of 'generators'; see"),
        ("audit", 2, "RUN", "asyncgrpo audit --help"),
        ("audit a b", 2, "b", "asyncgrpo audit --help"),
        *((f"{command} {long}", 1, "name too long\n") for command in ("demo --engine torch --out", "audit", "serve")),
        *((f"{command} {__file__}", 1, "run folder") for command in ("status", "audit")),
        *((f"demo --engine torch --chaos {n}", 1, f"--chaos {n}: faults per hour") for n in ("0", "nan", "inf")),
    ):
        ended = asyncgrpo(*typed.split())
        assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1), ended
        assert ended.err.startswith("error: ") and all(name in ended.err for name in names), ended.err
    for typed in ([], ["data"]):
        ended = asyncgrpo(*typed)
        assert (ended.code, ended.out) == (2, "") and "Commands:" in ended.err


def test_ctrl_c_is_130_and_a_mistake_of_ours_keeps_its_traceback(monkeypatch, asyncgrpo):
    app, error = typer.Typer(pretty_exceptions_enable=False), KeyboardInterrupt()

    @app.command()
    def command() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    assert asyncgrpo().code == 130
    error = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        asyncgrpo()


def test_output_on_a_full_disk_is_an_error_in_one_sentence():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command_line("config", "explain"), stdout=full, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (1, b"error: the output cannot be written: No space left on device\n")


def test_a_run_continues_where_its_output_cannot_be_written(monkeypatch, tmp_path):
    read, write = os.pipe()
    os.close(read)
    (tmp_path / "log").touch()
    for out in (open("/dev/full", "w"), open(write, "w"), (tmp_path / "log").open("w")):  # noqa: SIM115
        monkeypatch.setattr(sys, "stdout", out)
        console = Console(file=Output())
        console.print("step 1")
        console.print("step 2")
        train._print_next("done", "runs/a", None)
    assert (tmp_path / "log").read_text().startswith("step 1\nstep 2\nnext: ")


CLOSED = """
import faulthandler, subprocess, sys
from asyncgrpo import cli

cli._open_standard_files()
faulthandler.enable()  # as Ray does
subprocess.run([sys.executable, "-c", "import os; [os.fstat(number) for number in range(3)]"], check=True)
"""


def test_standard_files_that_a_shell_has_closed_are_open_here_and_in_processes_started_from_here():
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, CLOSED]
    assert subprocess.run(shell, timeout=60).returncode == 0
