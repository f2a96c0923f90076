"""Heartbeats over a real socket: silent and hanging processes, waits, messages to a process, and stacks on demand."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncgrpo.cluster.heartbeat import Heart, Watch
from asyncgrpo.wire.supervision import EndpointsChanged
from tests.journal.journals import Clock
from tests.runs import wait_until


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Iterator[Watch]:
    watch = Watch("127.0.0.1", None, host="127.0.0.1", clock=clock)
    yield watch
    watch.close()


def listen_until(watch: Watch, condition: Callable[[], object]) -> None:
    wait_until(lambda: bool(watch.listen() or condition()), "heartbeat", 20.0)


def test_a_process_that_is_silent_or_stands_still_is_found(watch: Watch, clock: Clock, tmp_path: Path):
    first = Heart(watch.endpoint, "buffer", "1", None, run_dir=tmp_path)
    assert watch.unhealthy_reason("buffer", "1", silent_s=5.0, still_s=5.0) is None, "nothing was heard yet"
    listen_until(watch, lambda: watch.pids("buffer"))
    assert watch.unhealthy_reason("buffer", "1", silent_s=5.0, still_s=5.0) is None
    assert not watch.has_begun("buffer", "1")
    first.stop()
    watch.listen()
    for _ in range(6):
        clock.now_s += 1.0
        watch.listen()
    assert "no heartbeat for 6 s" in (watch.unhealthy_reason("buffer", "1", silent_s=5.0, still_s=5.0) or "")
    assert watch.unhealthy_reason("buffer", "2", silent_s=5.0, still_s=5.0) is None, "of another start nothing is known"
    Heart(watch.endpoint, "buffer", "1", None, run_dir=tmp_path, loop_age_s=lambda: 8.0)
    listen_until(watch, lambda: watch.has_begun("buffer", "1"))
    assert "not turned for 8 s" in (watch.unhealthy_reason("buffer", "1", silent_s=5.0, still_s=5.0) or "")
    assert watch.unhealthy_reason("buffer", "1", silent_s=5.0, still_s=9.0) is None


def test_time_in_which_nobody_listened_is_no_silence(watch: Watch, clock: Clock, tmp_path: Path):
    """A driver that was stopped, or whose machine was, finds the others as it left them, and hears them a moment later."""
    heart = Heart(watch.endpoint, "buffer", "1", None, run_dir=tmp_path)
    listen_until(watch, lambda: watch.pids("buffer"))
    heart.stop()
    watch.listen()

    def is_silent() -> bool:
        return watch.unhealthy_reason("buffer", "1", silent_s=5.0, still_s=5.0) is not None

    clock.now_s += 600.0
    assert not is_silent(), "nobody has listened since"
    watch.listen()
    assert not is_silent()
    for _ in range(4):  # whatever it does so slowly, what is silent is found in the end
        clock.now_s += 60.0
        watch.listen()
    assert is_silent()


def test_a_process_is_told_and_writes_its_stacks(watch: Watch, tmp_path: Path):
    moved: list[EndpointsChanged] = []
    on_message = {EndpointsChanged: moved.append}
    Heart(
        watch.endpoint, "generator-0", "1.0", None, run_dir=tmp_path, on_message=on_message,
        buffer_endpoint=lambda: "old", step=lambda: 7,
    )  # fmt: skip
    listen_until(watch, lambda: watch.heartbeat("generator-0", "1.0").step == 7)
    assert watch.heartbeat("generator-0", "1.0").buffer_endpoint == "old"
    assert watch.heartbeat("generator-0", "1.1").buffer_endpoint == "" and not watch.has_begun("generator-0", "1.1")
    watch.send("generator-0", EndpointsChanged(buffer_endpoint="a", weights_endpoint="b"))
    is_over = threading.Event()
    for _ in range(100):  # as environments have
        threading.Thread(target=is_over.wait, daemon=True).start()
    watch.dump_stacks("nothing moves")
    stacks = tmp_path / "logs" / "generator-0.stacks"
    listen_until(watch, lambda: stacks.exists() and "test_a_process_is_told" in stacks.read_text())
    is_over.set()
    assert moved == [EndpointsChanged(buffer_endpoint="a", weights_endpoint="b")]
    assert stacks.read_text().startswith("nothing moves, process ")


def test_what_is_awaited_for_long_is_said_again_and_again(watch: Watch, tmp_path: Path, caplog, monkeypatch):
    monkeypatch.setattr("asyncgrpo.metrics.waits", lambda: {"batch": 31.0})
    caplog.set_level("INFO")
    Heart(watch.endpoint, "learner-0", "1", None, run_dir=tmp_path)
    listen_until(watch, lambda: "learner-0 waits for batch for 31 s" in caplog.text)
    monkeypatch.setattr("asyncgrpo.metrics.waits", lambda: {"batch": 62.0})
    listen_until(watch, lambda: "learner-0 waits for batch for 62 s" in caplog.text)
    assert caplog.text.count("batch for 31 s") == 1
