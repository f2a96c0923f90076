"""The Ray that we start listens on loopback alone and asks for a token, and only this user can look into its session."""

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import ray
from ray.exceptions import RayTaskError

from asyncgrpo.cluster import ray_session as ray_session_module
from asyncgrpo.cluster.ray_session import check_ray, ray_session, result, session_beside
from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import AsyncGRPOError, ConfigError, ProcessLost, RewardError, StalledError
from tests import runs


def config(*settings: str) -> Config:
    return load_config("quickstart", ["model.path=m", "data.train=t", *settings])


PROGRAM = """
import contextlib, os, pathlib, signal, stat, time
import grpc, psutil, ray
from asyncgrpo import scratch
from asyncgrpo.cluster.ray_session import ray_session
from asyncgrpo.config.load import load_config

with ray_session(load_config("quickstart", ["model.path=m", "data.train=t"])):
    token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600, oct(token.stat().st_mode)
    assert ray.get(ray.remote(lambda: print("7") or 7).remote()) == 7
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0), "a worker gives way to others"
    assert ray.get(ray.remote(lambda: os.environ["RES_OPTIONS"]).remote()) == "timeout:1", "it waits for a dead DNS server"
    assert ray.get(ray.remote(lambda: __import__("wave").Error.__name__).remote()) == "Error", "the library's, not that here"
    context = ray.get_runtime_context()
    assert not ray._private.worker.global_worker.node.webui_url, "a dashboard"

    def ask(*metadata):
        with grpc.insecure_channel(context.gcs_address) as channel:
            call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
            try:
                return len(call(b"", timeout=10, metadata=metadata)) > 0
            except grpc.RpcError as error:
                return error.code().name

    def told(ask):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was found
            return ask()
        return []

    time.sleep(1.0)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    connections = [c for p in processes for c in told(lambda: p.net_connections("inet"))]
    listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, listening
    session = pathlib.Path(ray._private.worker.global_worker.node.get_session_dir_path())
    assert stat.S_IMODE(session.stat().st_mode) == 0o700, oct(session.stat().st_mode)
    titles = {word for p in processes for word in told(p.cmdline)[:1] if word.startswith("ray::")}
    assert titles == {"ray::DashboardAgent", "ray::IDLE", "ray::RuntimeEnvAgent"}, titles  # no monitors, no dashboard
    unowned = {word for p in processes[1:] for word in told(p.cmdline)[:1] if scratch.OWNER not in told(p.environ)}
    assert not unowned, f"the janitor does not find {unowned}"
    bearers = "x" * 64, token.read_text()
    print(ask(), *(ask(("authorization", "Bearer " + bearer)) for bearer in bearers), flush=True)
    assert {os.getpgid(p.pid) for p in processes[1:]}.isdisjoint({os.getpgid(0)}), "a signal to our group would end Ray, too"
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(9)
"""


@pytest.mark.slow
def test_a_request_without_the_token_is_refused_and_sigterm_ends_the_session_without_a_stack_of_c(tmp_path):
    (tmp_path / "wave.py").touch()
    pytest.importorskip("grpc")
    environment = runs.environment() | {"HOME": "/proc", "RAY_AUTH_MODE": "disabled"}  # a home that cannot be written
    for own in ("RAY_AUTH_TOKEN", "RES_OPTIONS"):
        environment.pop(own, None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],  # as a script, which does not import from the working directory
        **{"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 120},
    )
    assert (done.returncode, "SIGTERM received" in done.stderr) == (-signal.SIGTERM, False), done.stderr
    assert done.stdout.split() == ["UNAUTHENTICATED", "UNAUTHENTICATED", "True"]


LATE = """
from asyncgrpo import warm
from asyncgrpo.cluster import ray_session
from asyncgrpo.config.load import load_config

warm.__file__ = "/no/such/script.py"
ray_session.LATE_S = 1.0
with ray_session.ray_session(load_config("quickstart", ["model.path=m", "data.train=t"])):
    print("started")
"""


@pytest.mark.slow
def test_a_ray_whose_workers_cannot_start_is_no_silent_wait():
    """It blocks its process without end."""
    with subprocess.Popen(
        [sys.executable, "-c", LATE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as late:
        said = next((line for line in late.stdout if "Ray has not started for 1 s" in line), "")
        late.kill()
    assert "its logs are in /" in said


def test_a_cluster_that_is_not_there_is_known_at_once():
    with pytest.raises(ConfigError, match=r"cluster.ray_address: tcp://127.0.0.1:1 cannot be reached"):
        check_ray("127.0.0.1:1")
    check_ray("auto")


def test_a_cluster_that_does_not_let_us_in_is_said_with_the_way_to_its_token(monkeypatch):
    monkeypatch.setattr(ray, "init", Mock(side_effect=ray.exceptions.AuthenticationError("no token")))
    with (
        pytest.raises(ConfigError, match=r"cluster\.ray_address auto: .* set RAY_AUTH_MODE=token"),
        ray_session(config("cluster.ray_address=auto")),
    ):
        raise AssertionError("it let us in")


def test_a_ray_that_does_not_start_here_is_said_with_its_logs(monkeypatch):
    late = Exception("The current node timed out\nduring startup.")
    monkeypatch.setattr(ray, "init", Mock(side_effect=late))
    monkeypatch.setattr(ray_session_module, "_require_token", lambda: None)
    monkeypatch.setattr(ray_session_module.scratch, "keep", kept := Mock())
    with (
        pytest.raises(StalledError, match=r"^Ray did not start: The .* out during startup\. Its logs are in /"),
        ray_session(config()),
    ):
        raise AssertionError("it started")
    kept.assert_called_once()


TEXT = """\x1b[36mray::A.__init__()\x1b[39m (pid=7, ip=10.0.0.7, actor_id=bc64)
RuntimeError: The actor with name A failed to import on the worker.
ModuleNotFoundError: No module named 'asyncgrpo'
"""
"""What Ray 2.60 says of a class that a worker cannot import, shortened."""
UNKNOWN = RayTaskError("A.__init__", TEXT, ModuleNotFoundError("No module named 'asyncgrpo'"))
OUT_OF_MEMORY = "4 worker(s) were killed due to the node running low on memory (IP: 10.0.0.7, ID: b24).\nOOM kill ..."
"""What Ray 2.60 says of actors that its memory monitor killed, shortened."""


def test_a_process_that_was_killed_may_be_replaced_and_one_without_our_package_is_named(monkeypatch):
    died, out = ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError(OUT_OF_MEMORY)
    monkeypatch.setattr(ray, "get", Mock(side_effect=[died(UNKNOWN), died(), out, ray.exceptions.RayError()]))
    for said, is_error in (
        (r"it cannot start on 10\.0\.0\.7: ModuleNotFound", True),
        ("its process died$", False),
        (r"4 worker\(s\) were killed due to the node running low on memory \(IP: 10\.0\.0\.7\)\.$", False),
        (r"RayError\(\)$", False),
    ):
        with pytest.raises(ProcessLost, match=rf"^learner-1: {said}") as loss:
            result(object(), "learner-1")
        assert loss.value.is_error is is_error


ON_A_CARD = """CUDA error: uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
"""What torch says of an error of a card."""
BETWEEN_CARDS = "NCCL error in: NCCLUtils.cpp:94, unhandled system error\nLast error:\nConnect to 10.0.0.7<4321> failed"


@pytest.mark.parametrize(
    ("text", "said"), [(ON_A_CARD, "uncorrectable ECC"), (BETWEEN_CARDS, "Connect to 10.0.0.7<43")]
)
def test_the_line_of_an_error_with_the_cause_is_shown(monkeypatch, text, said):
    monkeypatch.setattr(ray, "get", Mock(side_effect=RayTaskError("run", text, RuntimeError(text))))
    with pytest.raises(ProcessLost, match=f"^learner-1: .*{said}"):
        result(object(), "learner-1")


LOST, NO_REWARD = AsyncGRPOError("checkpoint of step 0 written"), AsyncGRPOError("checkpoint of step 0 written")
LOST.__cause__, NO_REWARD.__cause__ = ProcessLost("learner-0: its process died"), RewardError("it never worked")


@pytest.mark.parametrize(("error", "are_kept"), [(NO_REWARD, False), (LOST, True), (RuntimeError("unforeseen"), True)])
def test_rays_logs_are_kept_where_no_process_reported_what_is_wrong(monkeypatch, error, are_kept):
    kept = []
    for name, made in (("init", None), ("shutdown", None), ("is_initialized", False)):
        monkeypatch.setattr(ray_session_module.ray, name, lambda *_, made=made, **__: made)
    monkeypatch.setattr(ray_session_module, "_require_token", lambda: None)
    monkeypatch.setattr(ray_session_module, "_session_folder", lambda: None)
    monkeypatch.setattr(ray_session_module.scratch, "keep", lambda: kept.append(True))
    with pytest.raises(type(error)), ray_session(config()):
        raise error
    assert bool(kept) is are_kept


def test_work_is_done_while_the_session_starts_and_if_it_fails_the_session_ends(monkeypatch):
    seen, started = [], threading.Event()

    @contextmanager
    def session(config):
        seen.append("up")
        started.set()
        try:
            yield
        finally:
            seen.append("down")

    def work() -> str:
        assert started.wait(30.0), "the session waits for the work"
        return "made"

    fail = Mock(side_effect=ConfigError("no place for a model"))
    monkeypatch.setattr(ray_session_module, "ray_session", session)
    monkeypatch.setattr(ray_session_module.warm, "is_on", lambda: True)
    with session_beside(work, None) as made:  # type: ignore[arg-type]
        seen.append(f"inside, {made}")
    assert seen == ["up", "inside, made", "down"]
    with pytest.raises(ConfigError, match="no place for a model"), session_beside(fail, None):  # type: ignore[arg-type]
        seen.append("inside")
    assert seen[3:] == ["up", "down"]


@pytest.mark.parametrize(("num_signals", "done"), [(1, [1, 2]), (2, [1])])
def test_an_interrupt_waits_until_ray_has_started(monkeypatch, num_signals, done):
    """Raised in the middle of Ray's start it ended the run with a segmentation fault. A second one does not wait."""
    ended, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(**_):
        for number in 1, 2:
            if number <= num_signals:
                signal.raise_signal(signal.SIGINT)
            ended.append(number)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray_session_module, "_require_token", lambda: None)
    try:
        with pytest.raises(KeyboardInterrupt), ray_session(config()):
            raise AssertionError("it goes on")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == done
