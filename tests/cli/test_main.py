"""What every command has in common."""

import subprocess
import sys

import pytest
import typer

from asyncgrpo import __version__, cli
from asyncgrpo.errors import DataError

HEAVY = ("torch", "ray", "sglang", "transformers", "pyarrow", "omegaconf")


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


def test_help_answers_without_importing_anything_heavy():
    code = f"""
import sys
from asyncgrpo import cli
sys.argv = ["asyncgrpo", "--help"]
try:
    cli.main()
except SystemExit as end:
    assert not end.code
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "doctor" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_printed(asyncgrpo):
    assert asyncgrpo("--version").out == f"asyncgrpo {__version__}\n"


def test_a_usage_error_is_one_sentence_and_code_2(asyncgrpo):
    for typed, names in (
        (["trian"], ["trian", "train"]),
        (["doctor", "--nonsense"], ["--nonsense", "asyncgrpo doctor --help"]),
        (["train", "--lr", "fast"], ["--lr", "'fast'"]),
        (["samples", "run", "--limit", "0"], ["--limit", "'0'"]),
        (["scale", "learners", "3"], ["generators", "'learners'"]),
        (["train", "--steps"], ["--steps"]),
        (["audit"], ["RUN", "asyncgrpo audit --help"]),
        (["audit", "a", "b"], ["b", "asyncgrpo audit --help"]),
    ):
        ended = asyncgrpo(*typed)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
        assert ended.err.startswith("error: ") and all(name in ended.err for name in names), ended.err


@pytest.mark.parametrize("typed", [[], ["data"], ["config"]])
def test_a_group_without_a_command_prints_its_help(asyncgrpo, typed):
    ended = asyncgrpo(*typed)
    assert (ended.code, ended.out) == (2, "") and "Commands:" in ended.err


class TestEnds:
    def raising(self, monkeypatch, error: BaseException) -> None:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.command()
        def command() -> None:
            raise error

        monkeypatch.setattr(cli, "app", app)

    def test_a_mistake_of_the_user_is_one_sentence_and_code_1(self, monkeypatch, asyncgrpo):
        self.raising(monkeypatch, DataError("the file is empty"))
        ended = asyncgrpo()
        assert (ended.code, ended.err, ended.out) == (1, "error: the file is empty\n", "")

    @pytest.mark.parametrize("command", ["demo --engine torch --out", "audit", "status", "serve"])
    def test_a_name_that_no_file_can_have_is_one_sentence_and_code_1(self, asyncgrpo, command):
        ended = asyncgrpo(*command.split(), "a" * 300)
        assert ended.code == 1
        assert ended.err.startswith("error: ") and ended.err.endswith("File name too long\n")
        assert ended.err.count("\n") == 1

    @pytest.mark.parametrize("faults", ["0", "-1", "nan", "inf"])
    def test_faults_per_hour_are_a_number_above_0(self, asyncgrpo, faults):
        ended = asyncgrpo("demo", "--engine", "torch", "--chaos", faults)
        assert (ended.code, ended.err) == (1, f"error: --chaos {faults}: faults per hour must be a number above 0\n")

    def test_ctrl_c_is_130(self, monkeypatch, asyncgrpo):
        self.raising(monkeypatch, KeyboardInterrupt())
        assert asyncgrpo().code == 130

    def test_a_mistake_of_ours_keeps_its_traceback(self, monkeypatch):
        self.raising(monkeypatch, ZeroDivisionError("ours"))
        monkeypatch.setattr(sys, "argv", ["asyncgrpo"])
        with pytest.raises(ZeroDivisionError):
            cli.main()
