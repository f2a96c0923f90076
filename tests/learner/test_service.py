"""The learner's loop with everything around it made up: what is in its last checkpoint, however the run ends."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from asyncgrpo import liveness
from asyncgrpo.config.schema import Config, DataConfig, ModelConfig, RunConfig
from asyncgrpo.errors import (
    AsyncGRPOError,
    CheckpointError,
    DataError,
    StalledError,
    TrainingError,
    WeightsError,
    WireError,
)
from asyncgrpo.learner.checkpoints import Checkpoints, RunState, read_state
from asyncgrpo.learner.ranks import RankCommand, Team
from asyncgrpo.learner.service import LearnerService
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire.rollouts import Batch, NoMore, Snapshot
from asyncgrpo.wire.supervision import Steer
from tests.learner.ranks import run_on_ranks

Taken = tuple[Batch | NoMore, memoryview]
NOTHING = memoryview(b"")
STEPS = 3
"""Trained before something happens. The checkpoint before that is of step 2."""


class Quiet:
    """Takes every other call, and does nothing."""

    def __getattr__(self, name: str) -> Callable:
        return lambda *arguments, **named: None


class Inbox(Quiet):
    """A buffer that knows by whom it was asked for what. `end` is what becomes of the batch after the last step."""

    def __init__(self, end: AsyncGRPOError | str = "exhausted") -> None:
        self.end = end
        self.is_draining = self.is_failing = self.is_forward_only = False
        self.version: PolicyVersion | None = None
        self.trained_in_snapshot: int | None = None
        self.snapshots = 0

    def take(self, version: PolicyVersion, shares_within: dict[int, float]) -> Taken:
        if version.number < STEPS:
            return Batch(version=version, groups=(), payload_sizes=(), counters={}, evals=()), NOTHING
        if isinstance(self.end, AsyncGRPOError):
            raise self.end
        return NoMore(why=self.end), NOTHING  # type: ignore[arg-type]

    def trained(self, version: PolicyVersion) -> None:
        self.version = version

    def last_evals(self) -> str:
        return str(self.end)

    def give_up(self, reason: str) -> None:
        self.is_draining = self.is_failing = True

    def snapshot(self, within_s: float = 0.0, while_waiting: Callable[[str, float], object] = print) -> Snapshot:
        if self.is_forward_only:
            raise WireError("the buffer did not respond for 60 s")
        self.snapshots += 1
        return Snapshot(
            counters={"tokens_generated": self.snapshots},
            state={"done": self.version.number if self.version else 0},
            draining=self.is_draining,
            failing=self.is_failing,
        )


class Publisher(Quiet):
    """Reaches someone for every version but those in `fails`, which the learner hears of when it asks."""

    is_idle = True

    def __init__(self, fails: dict[int, AsyncGRPOError] | None = None) -> None:
        self.fails = fails or {}
        self.offered: list[int] = []
        self.expected: list[tuple[int, list[float]]] = []
        self.is_full = False

    def offer(self, version: PolicyVersion, fill: Callable) -> bool:
        if not self.is_full:
            self.offered.append(version.number)
        return not self.is_full

    def expect(self, version: PolicyVersion, scores: list[float]) -> None:
        self.expected.append((version.number, scores))

    def reports(self) -> list:
        if self.offered and (error := self.fails.get(self.offered[-1])) is not None:
            raise error
        return []


class Learner:
    """Counts its updates, and remembers their learning rates; the last step may fail."""

    def __init__(self, error: AsyncGRPOError | None = None, at: float = 0.0) -> None:
        self.steps, self.error, self.at = 0, error, at
        self.lr, self.rates = 1e-3, list[float]()
        self.snapshot = SimpleNamespace(close=lambda: None)
        self.check = SimpleNamespace(score=lambda: [float(self.steps)])

    def step(self, groups: list, version: PolicyVersion) -> SimpleNamespace:
        if self.error is not None and version.number == STEPS - 1:
            self.steps += self.at > 0
            raise self.error
        self.steps += 1
        self.rates.append(self.lr)
        return SimpleNamespace(seconds={}, shares_within={})

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def begin_save(self, folder: str) -> Callable[[], None]:
        return lambda: Path(folder).mkdir(parents=True)

    def begin_export(self, folder: str, tokenizer: str) -> Callable[[], None]:
        return lambda: Path(folder).mkdir(parents=True)

    def export(self, folder: str, tokenizer: str) -> None:
        Path(folder).mkdir(parents=True)


class Recorder(Quiet):
    """Remembers how the run ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.left: dict[str, float] = {}
        self.events = SimpleNamespace(write=lambda *arguments, **named: None)

    def last(self, counters: dict[str, float]) -> dict[str, float]:
        self.left = counters
        return counters

    def end(self, status: str, step: int) -> None:
        self.ends.append(status)


def service(folder: Path, inbox: Inbox, publisher=None, learner=None, last_step: int | None = None) -> LearnerService:
    run = RunConfig(checkpoint_every=2, eval_every=100)
    config = Config(model=ModelConfig(path="m"), data=DataConfig(train="t", eval="e"), run=run)
    return LearnerService(
        config, learner or Learner(), Team(0, 1), inbox, publisher or Publisher(), Recorder(),
        lineage=1, run_dir=folder, start_with=1, last_step=last_step,
    )  # type: ignore[arg-type]  # fmt: skip


def saved(folder: Path) -> tuple[int, int]:
    """Step of the newest checkpoint, and what its prompts say of the same."""
    state = read_state(max((folder / "checkpoints").glob("step_*")))
    return state.step, state.prompts["done"]


@pytest.mark.parametrize("why", ["draining", "failing"])
@pytest.mark.parametrize("last_step", [None, STEPS])
def test_a_run_that_is_to_end_has_a_checkpoint_of_its_last_step(tmp_path: Path, why: str, last_step: int | None):
    """While it waits for a batch, or after its last step for evaluations."""
    learner = service(tmp_path, Inbox(why), last_step=last_step)
    assert learner.run() == {"draining": "drained", "failing": "failed"}[why]
    assert saved(tmp_path) == (3, 3)
    assert learner.recorder.ends == (["drained"] if why == "draining" else []), "who gives it up says that it failed"
    assert learner.recorder.left == {"tokens_generated": 3 if why == "draining" else 2}, "after its two checkpoints too"
    assert not (tmp_path / "final").exists()


def test_other_ranks_are_there_until_the_last_weights_have_landed(tmp_path: Path):
    """They send a part of them."""
    told: list[str] = []

    class Landing(Publisher):
        @property
        def is_idle(self) -> bool:
            told.append("landing" if "landing" not in told else "landed")
            return told[-1] == "landed"

    running = service(tmp_path, Inbox(), Landing(), last_step=STEPS)
    team = SimpleNamespace(world=1, broadcast=lambda command: told.append(command.what), train=lambda *_: None)
    running.team = team  # type: ignore[assignment]
    assert running.run() == "done"
    assert told[-3:] == ["landing", "landed", "end"]


def test_weights_that_found_no_free_arena_are_offered_again_while_the_learner_waits(tmp_path: Path):
    publisher = Publisher()

    class Busy(Inbox):
        def take(self, version: PolicyVersion, shares_within: dict[int, float]) -> Taken:
            if version.number == 2:
                publisher.is_full = False
                self.while_waiting("groups", 1.0)
            publisher.is_full = version.number == 1
            return super().take(version, shares_within)

    assert service(tmp_path, Busy(), publisher).run() == "done"
    assert publisher.offered == [0, 1, 2, 3], "2 was offered while the learner waited for its next batch"
    assert publisher.expected == [(n, [float(n)]) for n in range(4)], "each scored once, under its own weights"


STALLED, OTHER = StalledError("nothing to train for 60 s"), WeightsError("engines hold different weights")
SKIPS = TrainingError("3 in a row")


@pytest.mark.parametrize(("error", "of", "step"), [(STALLED, "buffer", 3), (OTHER, "engines", 3), (SKIPS, "update", 2)])
def test_a_learner_that_cannot_go_on_saves_what_it_has_done_and_raises_why(tmp_path: Path, error, of, step):
    inbox = Inbox(error if of == "buffer" else "exhausted")
    publisher, learner = Publisher({3: error} if of == "engines" else None), Learner(error if of == "update" else None)
    with pytest.raises(type(error), match=str(error)):
        service(tmp_path, inbox, publisher, learner).run()
    assert saved(tmp_path) == (step, step) and inbox.is_draining, "nothing is leased for weights that are not proven"


def test_a_run_of_which_no_group_could_be_trained_fails_and_can_begin_again(tmp_path: Path):
    class Untrainable(Inbox):
        def take(self, version: PolicyVersion, shares_within: dict[int, float]) -> Taken:
            counters = {"groups_leased": 40.0, "groups_dropped_unscored": 39.0, "groups_filtered_zero_signal": 1.0}
            return NoMore(why="exhausted", counters=counters | {"filtered_all_wrong": 1.0}), NOTHING

    with pytest.raises(DataError, match=r"could be trained: dropped_unscored 39, filtered_zero_signal 1$"):
        service(tmp_path, Untrainable()).run()
    assert not list(tmp_path.glob("checkpoints/step_*")), "a checkpoint would say that all prompts are done"


def test_weights_between_two_steps_are_not_saved(tmp_path: Path, caplog):
    inbox = Inbox()
    with pytest.raises(TrainingError):
        service(tmp_path, inbox, learner=Learner(SKIPS, at=0.5)).run()
    assert not inbox.is_draining and "between two steps" in caplog.text


def test_without_a_buffer_there_is_no_checkpoint_and_the_reason_for_the_end_stands(tmp_path: Path, caplog):
    inbox = Inbox(StalledError("nothing to train for 60 s"))
    learner = service(tmp_path, inbox)
    inbox.give_up = lambda reason: setattr(inbox, "is_forward_only", True)  # type: ignore[method-assign]
    with pytest.raises(StalledError, match="nothing to train"):
        learner.run()
    assert saved(tmp_path) == (2, 2) and "no last checkpoint: the buffer did not respond" in caplog.text


@pytest.mark.parametrize(("is_failing", "status"), [(False, "drained"), (True, "failed")])
def test_a_run_that_is_asked_to_end_before_a_generator_is_up_ends_as_it_was_asked(tmp_path: Path, is_failing, status):
    inbox, publisher = Inbox(), Publisher()
    inbox.is_draining, inbox.is_failing = True, is_failing
    publisher.wait_for = lambda count, timeout_s, report: report("generators to start", 1.0)  # type: ignore[method-assign]
    assert service(tmp_path, inbox, publisher).run() == status


def test_a_run_that_is_made_smaller_while_it_starts_waits_for_no_generator_that_left(tmp_path: Path):
    publisher, awaited = Publisher(), []
    running = service(tmp_path, Inbox(), publisher)
    running.start_with = 4

    def wait_for(count: Callable[[], int], timeout_s: float, report: object) -> None:
        awaited.append(count())
        for generators in (2, 9):
            running.steer(Steer(revision=1, generators=generators))
            awaited.append(count())

    publisher.wait_for = wait_for  # type: ignore[method-assign]
    assert running.run() == "done" and awaited == [4, 2, 4]


class Asking(Inbox):
    """A buffer to whose learner a person speaks while it waits for the second batch."""

    learner: LearnerService | None = None

    def take(self, version: PolicyVersion, shares_within: dict[int, float]) -> Taken:
        if version.number == 1 and self.learner is not None:
            for times in (1, 2):
                self.learner.steer(Steer(revision=times, lr=1e-5, checkpoints=times))
                self.while_waiting("the end of the pause", 1.0)
        return super().take(version, shares_within)


def test_a_learner_that_waits_does_what_a_person_asks_for_once(tmp_path: Path):
    inbox, learner = Asking(), Learner()
    running = service(tmp_path, inbox, learner=learner)
    inbox.learner = running
    written = []
    running.recorder.events.write = lambda event, **fields: written.append((event, fields))
    assert running.run() == "done" and running.steered == 2
    assert learner.rates == [1e-3, 1e-5, 1e-5]
    assert [fields for event, fields in written if event == "lr_changed"] == [{"version": "1.1", "lr": 1e-5}]
    assert [fields["step"] for event, fields in written if event == "checkpoint"] == [1, 2, 3], "not twice"


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_checkpoint_of_another_start_that_ended_meanwhile_is_replaced(tmp_path: Path, is_damaged: bool):
    other = Checkpoints(tmp_path, 9).begin(RunState(step=2, lineage=0, prompts={}), lambda folder: lambda: None)()
    if is_damaged:
        (other / "state.json").unlink()
    assert service(tmp_path, Inbox()).run() == "done"
    assert read_state(other).lineage == 1 and saved(tmp_path) == (STEPS, STEPS)


class SlowDisk(Learner):
    """A disk that ends a checkpoint only when the learner has made so many updates."""

    def __init__(self, until: int, error: CheckpointError | None = None) -> None:
        super().__init__()
        self.until, self.refusal = until, error
        self.step_at_end: list[int] = []

    def begin_save(self, folder: str) -> Callable[[], None]:
        def write() -> None:
            while self.steps < self.until:
                time.sleep(0.001)
            self.step_at_end.append(self.steps)
            refusal, self.refusal = self.refusal, None
            if refusal is not None:
                raise refusal
            Path(folder).mkdir(parents=True)

        return write


def test_training_goes_on_while_a_checkpoint_is_written_and_the_end_waits_for_it(tmp_path: Path):
    learner = SlowDisk(until=STEPS)
    running = service(tmp_path, Inbox(), learner=learner)
    written, told = [], []
    running.recorder.events.write = lambda event, **fields: written.append((event, fields.get("step")))
    running.inbox.saved = told.append
    assert running.run() == "done"
    assert learner.step_at_end == [STEPS, STEPS], "that of step 2 ended behind step 3"
    assert [step for event, step in written if event == "checkpoint"] == told == [2, STEPS]
    assert saved(tmp_path) == (STEPS, STEPS)


def test_a_disk_that_refuses_beside_training_is_said_and_training_goes_on(tmp_path: Path, caplog):
    running = service(tmp_path, Inbox(), learner=SlowDisk(until=STEPS, error=CheckpointError("no space")))
    written = []
    running.recorder.events.write = lambda event, **fields: written.append((event, fields.get("text")))
    assert running.run() == "done"
    assert "no space; training continues" in caplog.text
    assert [text for event, text in written if event == "warning"] == ["no space; training continues"]
    assert saved(tmp_path) == (STEPS, STEPS)


class Blocked(Inbox):
    """The journal cannot be written when a checkpoint is due."""

    def snapshot(self, within_s: float = 0.0, while_waiting: Callable[[str, float], object] = print) -> Snapshot:
        while_waiting("the journal: no space", 31.0)
        return super().snapshot()


def test_a_checkpoint_that_waits_for_the_journal_is_reported(tmp_path: Path):
    running, written = service(tmp_path, Blocked()), []
    running.recorder.events.write = lambda event, **fields: written.append((event, fields.get("what")))
    assert running.run() == "done"
    assert ("stall", "the journal: no space") in written


# -- while rank 0 waits for the buffer, as it does for days where a run is paused, the other ranks wait with it ------------

GIVES_UP_S = 4
"""A rank that hears nothing for so long."""


class Paused(Inbox):
    """Nothing comes for half as long again, and then the end."""

    def take(self, version: PolicyVersion, shares_within: dict[int, float]) -> Taken:
        end_s = time.monotonic() + 1.5 * GIVES_UP_S
        while time.monotonic() < end_s:
            self.while_waiting("the end of the pause", 1.0)
            time.sleep(0.05)
        return NoMore(why="draining"), NOTHING


def wait_on_a_rank(rank: int, world: int, folder: str) -> None:
    dist.barrier()  # a rank that still connects would fail
    dist.destroy_process_group()
    short = timedelta(seconds=GIVES_UP_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=short)
    liveness.RANK_HEARTBEAT_S = GIVES_UP_S / 3
    team = Team(rank, world)
    if rank == 0:
        team.broadcast(RankCommand(what="step"), memoryview(bytearray(b"a batch")))
        running = service(Path(folder) / "run", Paused())
        running.team = team
        assert running.run() == "drained"
        return
    command, payload = team.receive()
    assert (command.what, payload) == ("step", b"a batch")
    heard = []
    while not heard or heard[-1] != "end":
        heard.append(team.receive()[0].what)
    Path(folder, "heard").write_text(" ".join(heard))


def test_a_rank_is_told_that_rank_0_waits(tmp_path: Path):
    run_on_ranks(wait_on_a_rank, str(tmp_path), 2)
    assert (tmp_path / "heard").read_text().split().count("wait") >= 3
