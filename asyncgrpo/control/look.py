"""What is known of a run at a moment: how its driver says it is, what is wrong with it, and what its newest events show."""

from collections.abc import Iterator
from pathlib import Path

from asyncgrpo.control.client import RunClient
from asyncgrpo.control.operator import Status
from asyncgrpo.control.problems import Problem
from asyncgrpo.errors import AsyncGRPOError
from asyncgrpo.recording.progress import RECENT, Progress, lag_line
from asyncgrpo.recording.tail import read_tail
from asyncgrpo.recording.text import number, parts_line, position, thousands

_BYTES = 2**21
"""Of the events, from their end: some hundred steps, however long the run."""


class Look:
    """A look at one run, again and again."""

    def __init__(self, run_dir: Path) -> None:
        """Nothing is asked yet."""
        self.run_dir = run_dir
        self.status: Status | None = None
        """What the driver said last; None: it has never replied."""
        self.problems: list[Problem] = []
        self.silence = ""
        """Why the driver does not reply, in a sentence; empty: it does."""
        self.progress = Progress()
        self._next, self._file = -_BYTES, ""

    def refresh(self) -> None:
        """Ask the driver, and read what came to the events."""
        try:
            client = RunClient(self.run_dir)
            self.status, self.problems, self.silence = client.status(), client.problems(), ""
        except AsyncGRPOError as error:
            self.silence = str(error)
        self._read()

    def _read(self) -> None:
        tail = read_tail(self.run_dir / "metrics.jsonl", self._next, file=self._file or None)
        if tail.rewound:
            self.progress = Progress()
        for event in tail.events:
            self.progress.update(event)
        self._next, self._file = tail.next, tail.file

    # -- in words

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.status.run if self.status is not None else self.run_dir.name

    @property
    def position(self) -> str:
        """Steps done, of how many."""
        if self.status is None:
            return position(self.progress)
        return f"{self.status.step}/{self.status.steps}" if self.status.steps else f"{self.status.step}"

    @property
    def state(self) -> str:
        """How the run is, in a word."""
        return "no reply" if self.silence or self.status is None else self.status.state

    @property
    def steps_per_hour(self) -> float | None:
        """Over the last steps; None before the second one."""
        recent = self.progress.steps[-RECENT - 1 :]
        if len(recent) < 2 or (seconds := recent[-1]["time"] - recent[0]["time"]) <= 0:
            return None
        return 3600 * (len(recent) - 1) / seconds

    def rows(self) -> Iterator[tuple[str, str]]:
        """The figures, each with its name. Shares and means are over the last ten steps. A run that is starting has none."""
        if self.status is not None and self.status.state == "starting":
            yield "waits for", self.status.waits_for
            return
        progress = self.progress
        generated, _ = progress.tokens_per_second()
        evaluation = f", evaluation {number(progress.last_eval['reward_mean'])}" if progress.last_eval else ""
        parts = parts_line(progress.last)
        yield "reward", f"{number(progress.last.get('reward_mean'))}{evaluation}" + (f" ({parts})" if parts else "")
        if lags := progress.lags(RECENT):
            yield "lag", lag_line(lags, progress.last.get("max_lag"))
        yield "learner", f"waits {progress.time_shares(RECENT).get('wait_data', 0.0):.0%} of its time"
        yield "generators", self._generators()
        rate = self.steps_per_hour
        yield "speed", f"{thousands(generated)} tok/s" + ("" if rate is None else f", {thousands(rate)} steps/h")

    def _generators(self) -> str:
        shares = self.progress.generator_shares(RECENT)
        busy = f"busy {1 - shares.get('idle', 0.0):.0%}, idle {shares.get('idle', 0.0):.0%}" if shares else ""
        if self.status is None:
            return busy
        states = [process.state for process in self.status.processes if process.name.startswith("generator")]
        counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
        if len(states) != self.status.generators_wanted:
            counts.append(f"of {self.status.generators_wanted} wanted")
        return ", ".join(filter(None, [*counts, busy]))

    def advice(self) -> Iterator[str]:
        """Each piece of advice, with the command that follows it."""
        for piece in self.status.advice if self.status is not None else ():
            yield piece.sentence + (f": asyncgrpo {piece.command} {self.run_dir}" if piece.command else "")

    def warnings(self) -> Iterator[str]:
        """Each problem, with its page."""
        if self.silence:
            yield self.silence
        for problem in self.problems:
            yield f"{problem.name}: {problem.text} ({problem.runbook})"
