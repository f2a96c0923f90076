"""`top`: what it shows of several runs, until Ctrl-C."""

import contextlib
import os
import pty
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from asyncgrpo.cli.look import panels
from asyncgrpo.control.client import Address, Look, write_address
from asyncgrpo.recording.events import EventLog
from tests.control.operators import TOKEN, FakeOperator, make_run, served, step
from tests.runs import command, environment


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[list[FakeOperator]]:
    made = [FakeOperator(make_run(tmp_path / name)) for name in ("one", "two")]
    with served(made[0]) as first, served(made[1]) as second:
        for operator, url in zip(made, (first, second), strict=True):
            write_address(operator.run_dir, Address(url=url, token=TOKEN))
        yield made


def shown(looks: list[Look], width: int = 120) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(panels(looks))
    return console.export_text()


def test_every_run_has_its_panel_and_on_a_terminal_of_80_columns_nothing_is_cut(operators: list[FakeOperator]):
    operators[1].state = "paused"
    looks = [Look(operator.run_dir) for operator in operators]
    page = shown(looks)
    assert "one  step 12/60  training" in page and "two  step 12/60  paused" in page
    page = shown(looks[:1], width=80)
    words = [word for name, text in looks[0].rows() for word in (name, *text.split())]
    assert [word for word in words if word not in page] == [] and "…" not in page


def test_on_a_terminal_it_is_shown_until_ctrl_c(operators: list[FakeOperator]):
    ours, theirs = pty.openpty()
    of_terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": environment() | {"TERM": "xterm"}}
    process = subprocess.Popen(command("top", operators[0].run_dir), **of_terminal)
    os.close(theirs)
    seen = ""
    while "training" not in seen:
        seen += os.read(ours, 65536).decode(errors="replace")
    process.send_signal(signal.SIGINT)
    while process.poll() is None:  # it cannot end before what it prints is read
        with contextlib.suppress(OSError):
            if select.select([ours], [], [], 0.2)[0]:
                os.read(ours, 65536)
    assert process.returncode == 0
    os.close(ours)


def test_it_follows_the_events_and_a_run_that_ends_stays_on_the_page(operators: list[FakeOperator]):
    look = Look(operators[0].run_dir)
    shown([look])
    EventLog(operators[0].run_dir / "metrics.jsonl").write("step", **step(13, reward_mean=0.975))
    assert "0.975" in shown([look])
    EventLog(operators[0].run_dir / "metrics.jsonl").resume_at(4)
    shown([look])
    assert look.progress.step == 4, "a resume replaced the file"
    (operators[0].run_dir / "control.json").unlink()
    page = shown([look])
    assert "one  step 12/60  no reply" in page and "is not active" in page
