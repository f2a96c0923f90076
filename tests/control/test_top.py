"""`top`: what it shows of several runs, and that a key asks before it pauses one."""

import contextlib
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from asyncgrpo.control.client import Address, Pause, Resume, write_address
from asyncgrpo.control.top import Top
from asyncgrpo.recording.events import EventLog
from tests.control.operators import TOKEN, FakeOperator, make_run, served, step
from tests.runs import environment


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[list[FakeOperator]]:
    made = [FakeOperator(make_run(tmp_path / name)) for name in ("one", "two")]
    with served(made[0]) as first, served(made[1]) as second:
        for operator, url in zip(made, (first, second), strict=True):
            write_address(operator.run_dir, Address.of_this_process(url, TOKEN))
        yield made


def shown(top: Top, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(top.render())
    return console.export_text()


def test_every_run_has_its_panel_and_on_a_terminal_of_80_columns_nothing_is_cut(operators: list[FakeOperator]):
    operators[1].state = "paused"
    top = Top([operator.run_dir for operator in operators])
    top.refresh()
    page = shown(top)
    assert "one  step 12/60  training" in page and "two  step 12/60  paused" in page
    top = Top([operators[0].run_dir])
    top.refresh()
    words = [word for name, text in top.selected.rows() for word in (name, *text.split())]
    page = shown(top, width=80)
    assert [word for word in words if word not in page] == [] and "…" not in page


def test_a_key_asks_before_it_pauses(operators: list[FakeOperator]):
    top = Top([operator.run_dir for operator in operators])
    top.refresh()
    assert top.press("\t") and top.press("p")
    assert "pause two? y: yes" in shown(top)
    top.press("x")
    assert operators[1].commands == []
    top.press("p")
    top.press("y")
    assert "Pause is done" in shown(top)
    top.press("r")
    top.press("y")
    assert (operators[0].commands, operators[1].commands) == ([], [Pause(), Resume()])
    assert not top.press("q")


def test_on_a_terminal_keys_are_heard_at_once(operators: list[FakeOperator]):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "asyncgrpo", "top", str(operators[0].run_dir)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment() | {"TERM": "xterm"}
    )
    os.close(theirs)
    seen = ""

    def read_until(text: str) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(ours, 65536).decode(errors="replace")

    read_until("q quit")
    os.write(ours, b"py")
    read_until("Pause is done")
    os.write(ours, b"q")
    while process.poll() is None:  # it cannot end before what it prints is read
        with contextlib.suppress(OSError):
            if select.select([ours], [], [], 0.2)[0]:
                os.read(ours, 65536)
    assert process.returncode == 0
    assert operators[0].commands == [Pause()]
    os.close(ours)


def test_it_follows_the_events_and_a_run_that_ends_stays_on_the_page(operators: list[FakeOperator]):
    top = Top([operators[0].run_dir])
    top.refresh()
    EventLog(operators[0].run_dir / "metrics.jsonl").write("step", **step(13, reward_mean=0.975))
    top.refresh()
    assert "0.975" in shown(top)
    EventLog(operators[0].run_dir / "metrics.jsonl").resume_at(4)
    top.refresh()
    assert top.selected.progress.step == 4, "a resume replaced the file"
    (operators[0].run_dir / "control.json").unlink()
    top.refresh()
    page = shown(top)
    assert "one  step 12/60  no reply" in page and "is not going on" in page
