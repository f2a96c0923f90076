"""Runs the command line in this process, as the script would."""

import sys
from dataclasses import dataclass

import pytest

from asyncgrpo import cli


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def asyncgrpo(monkeypatch, capsys):
    """A function that runs a command: `asyncgrpo("config", "explain")` returns Ended."""

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["asyncgrpo", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return Ended(int(end.value.code or 0), out, err)

    return run
