"""Commands to an active run, and its status: the nouns between the admin API and the driver.

`api.py` turns requests into commands; `cluster/steering.py` carries them out. Neither knows the other.
"""

from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

from asyncgrpo.recording.advice import Advice
from asyncgrpo.recording.health import Problem

# -- commands ----------------------------------------------------------------------------------------------------------


class _Command(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Pause(_Command, frozen=True, tag="pause", tag_field="command"):
    """No more leases and no more batches. What is in flight is finished and kept."""


class Resume(_Command, frozen=True, tag="resume", tag_field="command"):
    """Go on after `Pause`."""


class DrainRun(_Command, frozen=True, tag="drain", tag_field="command"):
    """End in order: the step in flight, a checkpoint, exit code 0; the same as SIGTERM."""


class WriteCheckpoint(_Command, frozen=True, tag="checkpoint", tag_field="command"):
    """Write a checkpoint after the step in flight."""


class Evaluate(_Command, frozen=True, tag="evaluate", tag_field="command"):
    """Sample `data.eval` after the step in flight."""


class Scale(_Command, frozen=True, tag="scale", tag_field="command"):
    """Run so many generators, within `generators.min` and `generators.max`."""

    generators: Annotated[int, Meta(ge=1, le=4096)]


class ChangeSettings(_Command, frozen=True, tag="set", tag_field="command"):
    """Change settings while the run goes on; all of them, or none if one is refused."""

    settings: Annotated[dict[str, float | int], Meta(min_length=1, max_length=16)]
    """Values by key: one of `CHANGEABLE`."""

    def __post_init__(self) -> None:
        """Raises ValueError: a key may not change."""
        if fixed := [key for key in self.settings if key not in CHANGEABLE]:
            raise ValueError(f"{fixed[0]} cannot change while a run goes on; {', '.join(CHANGEABLE)} can")


Command = Pause | Resume | DrainRun | WriteCheckpoint | Evaluate | Scale | ChangeSettings


class Done(Struct, frozen=True):
    """The reply to a command."""

    done: str
    """Summary of what was done, in a sentence."""


CHANGEABLE = {
    "learner.lr": "peak learning rate; the schedule goes on from where it is",
    "buffer.max_lag": "bound on the lag, optimizer steps; for leases from now on",
    "generators.groups_in_flight": "groups that one generator works on at once",
}
"""Settings that may change while a run goes on, and what they mean."""

# -- status of a run ---------------------------------------------------------------------------------------------------


RunState = Literal["starting", "training", "paused", "draining", "ended"]
ProcessState = Literal["starting", "working", "leaving", "lost"]


class ProcessStatus(Struct, frozen=True, kw_only=True):
    """One process of the run."""

    name: str
    """`buffer`, `learner-<rank>` or `generator-<index>`."""
    state: ProcessState
    pid: int | None = None
    """None before its first heartbeat."""
    restarts: int = 0
    heard_s: float | None = None
    """Seconds since its last heartbeat."""
    waits: dict[str, float] = {}
    """Seconds that it has waited, by what it waits for."""


class Status(Struct, frozen=True, kw_only=True):
    """A run at this moment, as its driver knows it. What it has done is in its `metrics.jsonl`."""

    run: str
    folder: str
    state: RunState
    started: float
    """Unix seconds."""
    lineage: int
    step: int
    """Optimizer steps done."""
    steps: int | None
    """The last one; None: without an end."""
    generators_wanted: int
    """Target; `processes` has those that run."""
    generators_min: int
    generators_max: int
    settings: dict[str, float | int | str]
    """Of `CHANGEABLE`, in force. `buffer.max_lag` may be `auto`."""
    processes: tuple[ProcessStatus, ...] = ()
    waits_for: str = ""
    """Processes that a run that is starting waits for; empty in every other state."""
    advice: tuple[Advice, ...] = ()
    """Most urgent first; () unless the run trains."""


class Problems(Struct, frozen=True):
    """Conditions of a run that need attention."""

    problems: list[Problem]
    """Most urgent first."""


class Operator(Protocol):
    """The driver, as the admin API sees it. Both methods may be called from any thread."""

    def status(self) -> Status: ...

    def carry_out(self, command: Command) -> str:
        """Blocks until the command is in effect, or begun where that takes long. Returns what was done, in a sentence.

        Raises:
            CommandRefused: one sentence with the reason, and what would be accepted.
        """
        ...
