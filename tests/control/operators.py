"""A driver for tests, and folders of runs that it could have: every command is noted, and each can be made to fail."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncgrpo.control.api import Api, listening
from asyncgrpo.control.client import Command, Pause, ProcessStatus, Resume, Scale, Status
from asyncgrpo.errors import CommandRefused
from asyncgrpo.recording.advice import Advice
from asyncgrpo.recording.events import EventLog

TOKEN = "a-token-of-tests"
STARTED = 1_790_000_000.0


class FakeOperator:
    """Carries out each command at once, or fails with `failure`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.commands: list[Command] = []
        self.state: Any = "training"
        self.generators = 2
        told = {"sentence": "a third generator would make steps 18 % shorter; a fifth nothing", "evidence": "it waits"}
        self.advice = (Advice(bottleneck="generators", gain=0.18, command="scale generators 3", generators=3, **told),)
        self.failure: Exception | None = None
        self.released = threading.Event()
        self.released.set()
        """While it is clear, every command hangs."""

    def status(self) -> Status:
        names = ("buffer", "learner-0", *(f"generator-{i}" for i in range(self.generators)))
        return Status(
            run=self.run_dir.name, folder=str(self.run_dir), state=self.state, started=time.time() - 600, lineage=1,
            step=12, steps=60, generators_wanted=self.generators, generators_min=1, generators_max=8,
            settings={"learner.lr": 1e-3, "buffer.max_lag": 2, "generators.groups_in_flight": 32},
            processes=tuple(ProcessStatus(name=name, state="working", pid=100, heard_s=0.4) for name in names),
            waits_for="generator-0, generator-1" if self.state == "starting" else "", advice=self.advice,
        )  # fmt: skip

    def carry_out(self, command: Command) -> str:
        self.released.wait()
        if self.failure is not None:
            raise self.failure
        self.commands.append(command)
        match command:
            case Pause():
                self.state = "paused"
            case Resume():
                self.state = "training"
            case Scale(generators=n) if n > 8:
                raise CommandRefused(f"generators.max is 8, so {n} generators are too many")
            case Scale(generators=n):
                self.generators = n
        return f"{type(command).__name__} is done"


@contextmanager
def served(operator: FakeOperator) -> Iterator[str]:
    with listening(Api(operator, operator.run_dir, token=TOKEN).app, "127.0.0.1", 0) as url:
        try:
            yield url
        finally:
            operator.released.set()


def step(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": number, "version": f"1.{number}", "reward_mean": number / 100, "reward_std": 0.2, "loss": -0.01,
        "lags": {"0": 2, "1": 5, "2": 1}, "max_lag": 2, "slots": 24, "wanted": None, "under_way": 20, "completions": 64,
        "zero_signal_groups": 1, "tokens_trained": 700, "tokens_generated": 800 * number,
        "seconds": {"wait_data": 0.1, "forward_backward": 0.5, "optimizer": 0.1, "publish": 0.1},
        "generators": {
            "in_touch": 2, "places": 64, "in_flight": 18, "generate": 1.2, "reward": 0.1, "weights": 0.1, "idle": 0.2,
        },
        **fields,
    }  # fmt: skip


def make_run(folder: Path, steps: int = 12) -> Path:
    clock = iter(STARTED + i for i in range(10_000))
    log = EventLog(folder / "metrics.jsonl", clock=lambda: next(clock))
    log.write("start", run=folder.name, lineage=1, version="1.0", step=0, sizes="8 prompts x 8", steps=60)
    for number in range(1, steps + 1):
        log.write("sync", version=f"1.{number}", engines=2, ms=12.5, checksum="ok")
        log.write("step", **step(number))
    return folder
