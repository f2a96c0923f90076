"""What a person asks of a run: who is told, when it counts as done, what is refused, and what the next start is held against."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncgrpo.cluster.folder import RunFolder, Settings, look, record, values_of
from asyncgrpo.cluster.steering import Steering, _Asked
from asyncgrpo.config.load import load_config
from asyncgrpo.control import client
from asyncgrpo.errors import CommandRefused
from asyncgrpo.recording.advice import LOOK_S
from asyncgrpo.recording.events import EventLog, read_events
from asyncgrpo.recording.progress import Progress
from asyncgrpo.wire.supervision import Steer
from tests.recording.test_advice import step


class Watch:
    """Brings what it receives into effect, unless a process is deaf."""

    def __init__(self) -> None:
        self.sent: dict[str, Steer] = {}
        self.deaf: set[str] = set()

    def send(self, name: str, message: Steer) -> None:
        if name not in self.deaf:
            self.sent[name] = message

    def heartbeat(self, name: str, incarnation: str) -> SimpleNamespace:
        return SimpleNamespace(steered=self.sent[name].revision if name in self.sent else 0)

    def status(self, name: str, incarnation: str) -> client.ProcessStatus:
        return client.ProcessStatus(name=name, state="working" if incarnation else "starting")


class Fleet:
    def __init__(self, wanted: int) -> None:
        self.wanted, self.leaving = wanted, ()
        self.is_up = True

    def scale(self, count: int) -> None:
        self.leaving = tuple(f"generator-{i}-1.0" for i in range(count, self.wanted))
        self.wanted = count

    def processes(self) -> list[client.ProcessStatus]:
        state = "working" if self.is_up else "starting"
        return [client.ProcessStatus(name=f"generator-{i}", state=state) for i in range(self.wanted)]


class Run:
    """A driver whose turns a test decides."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.given = load_config(None, ["model.path=m", "data.train=t", f"run.out={folder}", *overrides])
        self.folder = RunFolder(folder)
        self.folder.claim()
        self.watch, self.fleet = Watch(), Fleet(self.given.generators.count)
        self.drained = threading.Event()
        self.now_s = 0.0
        self.events = EventLog(folder / "metrics.jsonl")
        self.steering = Steering(
            *(self.given, self.given, self.folder, self.events, self.fleet, self.watch),  # type: ignore[arg-type]
            drain=self.drained.set,
            gpus=0,
            clock=lambda: self.now_s,
        )
        self.core: SimpleNamespace | None = SimpleNamespace(incarnation="1", steps_done=3, first_step=0)

    def turn(self) -> None:
        self.steering.reconcile(self.core)  # type: ignore[arg-type]

    def ask(self, command: client.Command, turns: Callable[[], None] | None = None) -> str:
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.steering.carry_out, command)
            while not reply.done():
                (turns or self.turn)()
            return reply.result()

    @property
    def commands(self) -> list[tuple[str, str, bool]]:
        events = read_events(self.events.path)
        return [(e["command"], e["reply"], e["refused"]) for e in events if e["event"] == "command"]

    @property
    def status(self) -> client.Status:
        self.turn()
        return self.steering.status()


@pytest.fixture
def run(tmp_path: Path):
    run = Run(tmp_path / "run")
    yield run
    run.folder.release()


def test_a_run_is_starting_until_an_engine_serves_and_says_what_it_waits_for(run: Run):
    run.fleet.is_up, run.core.steps_done = False, 0
    assert (run.status.state, run.status.waits_for) == ("starting", "generator-0")
    run.fleet.is_up = True
    assert (run.status.state, run.status.waits_for) == ("training", "")
    run.fleet.is_up, run.core.steps_done = False, 1
    assert run.status.state == "training", "it has trained, so generators that are replaced do not start it anew"


def test_the_status_has_what_a_command_changed_when_its_reply_comes(run: Run):
    reply, states = Future[str](), []
    reply.add_done_callback(lambda _: states.append(run.steering.status().state))
    run.steering._queue.put(_Asked(client.Pause(), "a test", reply))
    run.turn()
    assert states == ["paused"]


def test_settings_that_make_no_sense_change_nothing(run: Run):
    run.turn()
    before = run.watch.sent
    for settings, why in (
        ({"learner.lr": 1e-5, "buffer.max_lag": -1}, "buffer.max_lag"),
        ({"generators.groups_in_flight": 0}, "generators.groups_in_flight must be at least 1"),
        ({"learner.lr": float("nan")}, "learner.lr"),
    ):
        with pytest.raises(CommandRefused, match=why):
            run.ask(client.ChangeSettings(settings=settings))
        assert run.steering.config == run.given and run.watch.sent == before
        assert run.commands[-1][2]


def test_generators_come_and_go_within_bounds(tmp_path: Path):
    run = Run(tmp_path / "run", "generators.count=2", "generators.min=2", "generators.max=5")
    assert run.ask(client.Scale(generators=4)).startswith("4 generators: 2 more, ")
    assert run.fleet.wanted == 4 and run.steering.config.generators.count == 4
    assert run.ask(client.Scale(generators=4)) == "4 generators already"
    assert run.ask(client.Scale(generators=3)).startswith("3 generators: 1 fewer, ")
    run.turn()
    assert run.watch.sent["buffer"].leaving == run.watch.sent["buffer"].ending == ("generator-3-1.0",)
    for count in (1, 6):
        with pytest.raises(CommandRefused, match=rf"{count} generators are outside generators.min \(2\) and .* \(5\)"):
            run.ask(client.Scale(generators=count))


def test_a_generator_may_end_once_the_learner_publishes_to_it_no_more(run: Run):
    run.ask(client.Scale(generators=3))
    run.watch.deaf = {"learner-0"}
    run.ask(client.Scale(generators=2))
    for _ in range(3):
        run.turn()
    assert run.watch.sent["buffer"].leaving == ("generator-2-1.0",) and run.watch.sent["buffer"].ending == ()
    run.watch.deaf = set()
    for _ in range(2):
        run.turn()
    assert run.watch.sent["buffer"].ending == ("generator-2-1.0",)


def test_an_evaluation_waits_for_the_end_of_a_pause(tmp_path: Path):
    run = Run(tmp_path, "data.eval=rows.jsonl")
    assert run.ask(client.Evaluate()) == "an evaluation begins after the current step, unless its step had one"
    run.ask(client.Pause())
    assert run.ask(client.Evaluate()) == "an evaluation begins after the pause, unless its step had one"


def test_what_cannot_be_done_is_refused(tmp_path: Path, run: Run):
    with pytest.raises(CommandRefused, match=r"data\.eval is not set"):
        run.ask(client.Evaluate())
    run.core = None
    with pytest.raises(CommandRefused, match="the learner is starting"):
        run.ask(client.WriteCheckpoint())
    assert run.status.state == "starting"
    for number, override in enumerate(("buffer.max_lag=auto", "buffer.policy=train")):
        unbound = Run(tmp_path / f"unbound {number}", override)
        with pytest.raises(CommandRefused, match=override.partition("=")[0]):
            unbound.ask(client.ChangeSettings(settings={"buffer.max_lag": 2}))
    shared = Run(tmp_path / "shared", "cluster.share_gpu=true", "generators.count=1")
    with pytest.raises(CommandRefused, match="share one GPU"):
        shared.ask(client.Scale(generators=2))


def test_a_new_learner_is_told_what_holds_and_not_asked_again_for_what_was_asked_of_another(run: Run):
    run.ask(client.ChangeSettings(settings={"learner.lr": 1e-5}))
    run.ask(client.WriteCheckpoint())
    run.core = None
    run.turn()
    run.watch.sent.clear()
    run.core = SimpleNamespace(incarnation="2", steps_done=None, first_step=3)
    run.turn()
    assert run.watch.sent["learner-0"].lr == 1e-5
    assert run.watch.sent["learner-0"].checkpoints == 0


def test_draining_is_begun_once_and_then_nothing_else_is(run: Run):
    assert run.ask(client.DrainRun()).startswith("draining")
    assert run.drained.is_set()
    run.steering.draining()
    with pytest.raises(CommandRefused, match="the run is ending"):
        run.ask(client.Pause())
    assert run.status.state == "draining"
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(run.steering.carry_out, client.Pause())
        while run.steering._queue.empty():
            pass
        run.steering.end()
        with pytest.raises(CommandRefused, match="the run is over"):
            reply.result()
    assert run.steering.status().state == "ended"


def test_the_next_start_is_held_against_what_was_changed(tmp_path: Path, monkeypatch):
    plain = lambda config: Settings(values=values_of(config), sources={})  # noqa: E731 - its files are not there
    monkeypatch.setattr("asyncgrpo.cluster.folder.settings_of", plain)
    run = Run(tmp_path / "run")
    record(run.given, run.folder, look(run.given, run.folder))
    run.events.write("start", run="run", lineage=1, version="1.0", step=0, sizes="")
    (tmp_path / "run" / "lineage").write_text("1")
    run.ask(client.ChangeSettings(settings={"learner.lr": 1e-5}))
    run.ask(client.Scale(generators=3))
    changes = {change.key: (change.before, change.now) for change in look(run.given, run.folder).changes}
    assert changes == {"learner.lr": ("1e-05", "1e-06"), "generators.count": ("3", "1")}


def train(run: Run, steps: range) -> None:
    for number in steps:
        fields = {name: one for name, one in step(number, wait=0.5, full=1.0).items() if name not in ("event", "time")}
        run.events.write("step", version="1.1", reward_mean=0.0, loss=0.0, **fields)


def test_advice_expires_when_something_changes(run: Run):
    def advice() -> list[str]:
        run.now_s += LOOK_S
        run.turn()
        return [one.bottleneck for one in run.steering.status().advice]

    for change in (lambda: run.ask(client.Scale(generators=3)), lambda: run.ask(client.Pause()), run.steering.draining):
        if run.status.state == "paused":
            run.ask(client.Resume())
            assert advice() == []
        train(run, range(1, 20))
        core, run.core = run.core, SimpleNamespace(incarnation="2", steps_done=None, first_step=3)
        assert advice() == [], "its learner is starting"
        run.core = core
        assert advice() == ["generators"]
        change()
        run.turn()
        assert run.steering.status().advice == () and (run.status.state == "draining" or advice() == [])


def test_the_last_advice_is_over_the_newest_steps(run: Run):
    train(run, range(1, 21))
    run.now_s += LOOK_S
    run.turn()
    train(run, range(21, 50))
    run.steering.has_trained()
    written = [event for event in read_events(run.folder.path / "metrics.jsonl") if event["event"] == "advice"]
    assert [event["evidence"].rpartition("(")[2] for event in written] == ["of steps 4 to 20)", "of steps 4 to 49)"]
    assert Progress.of(read_events(run.folder.path / "metrics.jsonl")).advice == written[-1]
