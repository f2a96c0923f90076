"""What every command has in common."""

import sys

import pytest
import typer

from asyncgrpo import __version__, cli
from asyncgrpo.errors import DataError


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


def test_a_usage_error_is_one_sentence_and_code_2(asyncgrpo):
    for typed, names in (
        (["trian"], ["trian", "train"]),
        (["doctor", "--nonsense"], ["--nonsense", "asyncgrpo doctor --help"]),
        (["train", "--lr", "fast"], ["--lr", "'fast'"]),
        (["train", "--rollout_n", "five"], ["--rollout-n", "'five'"]),
        (["scale", "learners", "3"], ["generators", "'learners'"]),
        (["audit"], ["RUN", "asyncgrpo audit --help"]),
        (["audit", "a", "b"], ["b", "asyncgrpo audit --help"]),
    ):
        ended = asyncgrpo(*typed)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
        assert ended.err.startswith("error: ") and all(name in ended.err for name in names), ended.err
    for typed in ([], ["data"]):
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

    def test_a_name_that_no_file_can_have_is_one_sentence_and_code_1(self, asyncgrpo):
        for command in ("demo --engine torch --out", "audit", "status", "serve"):
            ended = asyncgrpo(*command.split(), "a" * 300)
            assert (ended.code, ended.err.count("\n")) == (1, 1) and ended.err.endswith("File name too long\n")

    def test_faults_per_hour_are_a_number_above_0(self, asyncgrpo):
        for faults in ("0", "nan", "inf"):
            ended = asyncgrpo("demo", "--engine", "torch", "--chaos", faults)
            assert ended.code == 1 and f"--chaos {faults}: faults per hour" in ended.err

    def test_ctrl_c_is_130(self, monkeypatch, asyncgrpo):
        self.raising(monkeypatch, KeyboardInterrupt())
        assert asyncgrpo().code == 130

    def test_a_mistake_of_ours_keeps_its_traceback(self, monkeypatch):
        self.raising(monkeypatch, ZeroDivisionError("ours"))
        monkeypatch.setattr(sys, "argv", ["asyncgrpo"])
        with pytest.raises(ZeroDivisionError):
            cli.main()
