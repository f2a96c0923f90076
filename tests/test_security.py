"""Nothing that comes from outside is run, no socket is open without keys, and no secret is shown."""

import ast
import os
import pickle
import socket
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from asyncgrpo.cli import train
from asyncgrpo.cluster.folder import RunFolder
from asyncgrpo.cluster.wiring import Setup
from asyncgrpo.config.schema import Config, DataConfig, ModelConfig
from asyncgrpo.data import demo as demo_data
from asyncgrpo.tools.replay import Replay
from asyncgrpo.weights.group import serve_store
from asyncgrpo.wire.sockets import Keys

PACKAGE = Path(__file__).parent.parent / "asyncgrpo"

REVIEWED = {
    ("engines/sglang/weights.py", "pickle"): "writes only, to the schedulers of its own engine: SGLang's interface",
    ("learner/saving.py", "dcp.load"): "torch reads the index of a checkpoint by pickle: checkpoints are trusted",
}
"""Places that may run what they read, and why they may stay. docs/security.md says what that asks of a user."""

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
NAMES = {
    "recv_pyobj", "send_pyobj", "recv_serialized", "MultiprocessingSerializer", "allow_pickle", "all_gather_object",
    "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list",
    "allow_dangerous_deserialization", "trust_remote_code",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "dcp.load", "__import__"}


def dangers(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of everything in a module that runs, or may run, what it is given."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for module in modules:
                if module.partition(".")[0] in MODULES:
                    yield node.lineno, module.partition(".")[0]
            for alias in node.names:
                if alias.name in NAMES:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            called, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called in CALLS:
                safe = called == "yaml.load" and "Safe" in given.get("Loader", "")
                if not safe:
                    yield node.lineno, called
            elif called == "torch.load" and given.get("weights_only") != "True":
                yield node.lineno, called
            for name in NAMES & set(given):
                yield node.lineno, name
            if given.get("shell") == "True" or called == "asyncio.create_subprocess_shell":
                yield node.lineno, "shell"


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell():
    found = {
        (file.relative_to(PACKAGE).as_posix(), name)
        for file in PACKAGE.rglob("*.py")
        for _, name in dangers(file.read_text(encoding="utf-8"))
    }
    assert found - set(REVIEWED) == set()
    assert set(REVIEWED) - found == set(), "reviewed, and not there any more"


DANGEROUS = """
import pickle
socket.recv_pyobj()
torch.load(path)
eval(text)
subprocess.run(text, shell=True)
np.load(path, allow_pickle=True)
"""
HARMLESS = """
torch.load(path, weights_only=True)
yaml.load(text, Loader=yaml.SafeLoader)
subprocess.run([text])
"""


def test_what_runs_code_is_found_and_what_does_not_is_let_be():
    assert sorted(line for line, _ in dangers(DANGEROUS)) == [2, 3, 4, 5, 6, 7] and list(dangers(HARMLESS)) == []


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    trees = {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text("utf-8")) for file in PACKAGE.rglob("*.py")}
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(file, ast.unparse(node.func), node) for file, node in nodes]


def calls_of(name: str) -> Iterator[tuple[str, str]]:
    return ((file, ast.unparse(node)) for file, function, node in calls() if function == name)


def test_every_end_of_the_wire_is_given_the_keys_of_the_run():
    ends = [call for name in ("Server", "Client", "AsyncClient") for call in calls_of(name)]
    assert {file for file, _ in ends} == {
        "cluster/processes.py", "cluster/heartbeat.py", "cluster/wiring.py",
        "generators/service.py", "weights/publisher.py", "weights/receiver.py", "weights/lane.py",
    }  # fmt: skip
    assert [call for _, call in ends if "keys" not in call] == []
    assert [call for _, call in calls_of("Publisher") if "keys=self._setup.keys" not in call] == []
    ((file, setup),) = calls_of("Setup")
    assert file == "cluster/run.py"
    assert "keys=keys" in setup
    text = (PACKAGE / "cluster" / "run.py").read_text(encoding="utf-8")
    assert "Watch(config.cluster.bind, keys," in text
    stores = [(file, call) for file, call in calls_of("dist.TCPStore") if file != "cli/doctor.py"]  # there for a second
    assert {file for file, _ in stores} == {"weights/group.py"}
    assert [call for _, call in stores if "is_master=True" in call and "master_listen_fd" not in call] == []
    served = list(calls_of("metrics.serve"))
    assert {file for file, _ in served} == {"cluster/run.py", "cluster/wiring.py"}
    assert [call for _, call in served if "host=host, token=" not in call] == [], "metrics need the token of the run"


def test_the_meeting_place_of_a_group_listens_at_its_address_alone():
    store = serve_store("127.0.0.1", 5.0)
    socket.create_connection(("127.0.0.1", store.port), timeout=5.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5.0)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def claimed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = RunFolder(folder)
    claim.claim()
    claim.release()


def of_a_demo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_data, "make_demo_model", lambda *_, **__: None)
    train._make(folder, seed=0)


def of_a_replay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=ModelConfig(path="m"), data=DataConfig(train="t"))
    Replay(SimpleNamespace(run=folder / "none"), [config], folder, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [claimed, of_a_demo, of_a_replay])
def test_only_its_user_can_look_into_a_folder_of_a_run(make, tmp_path, monkeypatch):
    before = os.umask(0o022)
    try:
        make(tmp_path / "runs" / "one", monkeypatch)
    finally:
        os.umask(before)
    assert (mode(tmp_path / "runs" / "one"), mode(tmp_path / "runs")) == (0o700, 0o755), "Prometheus reads beside it"
    (tmp_path / "runs" / "one").chmod(0o750)
    claimed(tmp_path / "runs" / "one", monkeypatch)
    assert mode(tmp_path / "runs" / "one") == 0o750, "one that was opened to others stays so"


def test_no_secret_is_shown():
    keys = Keys.make()
    config = Config(model=ModelConfig(path="m"), data=DataConfig(train="t"))
    setup = Setup(config, Path("run"), 1, None, keys, "tcp://127.0.0.1:1", 1)
    shown = f"{setup!r} {setup} {keys} {[keys]!r} {msgspec.json.encode(config)!r}"
    assert "Keys object" in shown
    for secret in (keys.server_secret, keys.client_secret):
        assert secret.decode() not in shown
    assert pickle.loads(pickle.dumps(setup)).keys == keys, "processes of the run are given them all the same"
