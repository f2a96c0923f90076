"""Code of the model on this machine: real programs in bubblewrap, the hostile ones among them."""

import asyncio
import os
import re
import shutil

import psutil
import pytest

from asyncgrpo import isolation
from asyncgrpo.config.schema import CodeRewardConfig, RewardConfig
from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.base import Sampled, score_one
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.rewards.code import LocalRunner, Program, why_not_isolated
from tests.rewards.conftest import prompt, workers_of
from tests.runs import command_of

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None or why_not_isolated() is not None, reason="bubblewrap cannot run here"
)
SQUARES = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}
GOOD = "```python\nn = int(input())\nprint(n * n)\n```"
FUNCTION = {"inputs": [[[1, 2], 3]], "outputs": [[[4, 5]]], "fn_name": "add"}
METHOD = "class Solution:\n    def add(self, xs: List[int], n: int) -> List[int]:\n        return [x + n for x in xs]"


def reward(workers: int = 1, **settings) -> object:
    return build_reward(RewardConfig(timeout_s=5, workers=workers, code=CodeRewardConfig(**settings)))


@pytest.fixture
def no_bwrap(tmp_path, monkeypatch):
    (tmp_path / "prlimit").symlink_to(shutil.which("prlimit"))
    monkeypatch.setenv("PATH", str(tmp_path))


def test_reading_what_a_program_wrote_leaves_the_place_where_it_writes(monkeypatch):
    """A program that is being killed may still write; at the start it would overwrite what it wrote first."""
    monkeypatch.setattr(isolation, "MAX_OUTPUT", 5)
    with isolation.memory_file() as file:
        file.write(b"0123456789")
        assert isolation.text_of(file) == "01234"
        file.write(b"!")
        assert os.pread(file.fileno(), 20, 0) == b"0123456789!"


PROGRAMS = [
    (SQUARES, GOOD, 1.0),
    (SQUARES, "from __future__ import annotations\nimport numpy as np\nprint(np.int64(input()) ** 2)\nexit()", 1.0),
    (SQUARES, "import multiprocessing as m\nwith m.Pool(2) as pool: print(pool.map(abs, [4, 9])[-2])", 0.5),
    (SQUARES, "1. So:\n   ```python\n   n = int(input())\n   if n:\n       print(n * n)\n   ```", 1.0),
    (FUNCTION, METHOD, 1.0),
    (
        FUNCTION,
        f"from __future__ import annotations\nimport numpy as np\n\n{METHOD.replace('[x + n', '[np.int64(x + n)')}",
        1.0,
    ),
    (FUNCTION, "def add(xs, n):\n    print('hello')\n    return tuple(x + n for x in xs)", 1.0),
    (["assert f(2) == 4", "assert f(3) == 9"], "def f(x):\n    return 4", 0.5),
    (["assert f(2) == 4"], "import sys\nsys.modules['os'] = sys\nf = lambda x: 4", 0.0),
]


@needs_bwrap
async def test_code_is_run():
    rules = reward(workers=2)
    found = [await score_one(rules, prompt(source="code", answer=tests), text) for tests, text, _ in PROGRAMS]
    await rules.close()
    assert [(score.value, score.failure) for score in found] == [(value, None) for *_, value in PROGRAMS]


HOSTILE = {
    "a loop without an end": ("while True: pass", "timeout"),
    "one that ignores signals": (
        "import signal, time\nfor n in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(n, signal.SIG_IGN)\n"
        "while True: time.sleep(1)",
        "timeout",
    ),
    "a fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
    "10 GB of output": ("for _ in range(100_000): print('x' * 100_000)", "File too large"),
    "a text of 100 MB": ("print('x' * 100_000_000)", "File too large"),
    "a segmentation fault": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    "4 GB of memory": ("x = bytearray(4 << 30)", "MemoryError"),
    "files without an end": ("for n in range(999): open(f'/tmp/{n}', 'w').write('x' * 9_999_999)", "No space left"),
    "the network": ("import socket\nsocket.create_connection(('192.0.2.1', 80), 9)", "Network is unreachable"),
    "passwords": ("print(open('/etc/passwd').read())", "No such file"),
    "the environment": ("import os\nprint(os.environ['SECRET'])", "KeyError"),
    "a file beside it": ("open('/usr/x', 'w')", "Read-only"),
    "the processes of others": ("import os\nos.kill(1, 9)\nos.kill(-1, 9)", ""),
    "a child that outlives it": ("import os, time\nif not os.fork(): os.setsid() and time.sleep(1000)", "wrong output"),
}


@needs_bwrap
@pytest.mark.parametrize(("timeout_s", "is_endless"), [(2.0, True), (30.0, False)])
async def test_hostile_code_fails_its_test_and_harms_no_other(monkeypatch, tmp_path, timeout_s, is_endless):
    """None is a failure of the runner: each ended within its time, or the pool would have killed its worker."""
    monkeypatch.setenv("SECRET", "token")
    rules = reward(workers=2, timeout_s=timeout_s)
    secret = tmp_path / "secret"
    secret.write_text("4")
    hostile = {name: one for name, one in HOSTILE.items() if (one[1] == "timeout") == is_endless}
    texts = [text for text, _ in hostile.values()] + [f"print(open({str(secret)!r}).read())"]
    both = [Sampled(text) for bad in texts for text in (bad, GOOD)]
    scores = await rules.score(prompt(source="code", answer=SQUARES), both)
    assert [score.failure for score in scores] == [None] * len(both)
    assert [score.value for score in scores[1::2]] == [1.0] * len(texts)
    for (name, (_, why)), score in zip(hostile.items(), scores[::2], strict=False):
        assert score.value == 0.0 and why in score.detail, name
    assert scores[-2].value == 0.0 and "No such file" in scores[-2].detail
    assert len(workers_of()) == 2, "workers, and nothing that they started"
    await rules.close()
    assert workers_of() == []


@needs_bwrap
async def test_a_worker_that_is_killed_takes_its_program_along():
    rules = reward(timeout_s=60)
    running = asyncio.create_task(
        rules.score(prompt(source="code", answer=SQUARES), [Sampled("import time\ntime.sleep(1000)")])
    )
    while not (below := [one for one in workers_of() if re.search("bwrap|/main.py", command_of(one))]):
        await asyncio.sleep(0.01)
    await rules.close()
    await running
    _, alive = psutil.wait_procs(below, timeout=10)
    assert not [command for one in alive if (command := command_of(one))], "what has ended has no command"


async def test_without_isolation_code_is_refused_before_the_run_and_by_each_call(no_bwrap):
    for rules, source in ((reward(), "codecontests"), (build_reward(RewardConfig(function="code")), "any")):
        with pytest.raises(RewardError, match=r"bwrap is not here: install the package bubblewrap.*--unsafe-rewards"):
            rules.check_sources({source})
    reward().check_sources({"gsm8k"})
    score = await score_one(reward(), prompt(source="code", answer=SQUARES), GOOD)
    assert score.value is None and "bubblewrap" in score.detail


async def test_without_isolation_code_runs_where_that_is_wanted(no_bwrap, caplog):
    rules = reward(unsafe=True, timeout_s=2.0)
    rules.check_sources({"code"})
    assert "runs as your user" in caplog.text
    texts = [GOOD, "while True: pass", "print('x' * 100_000_000)", "import ctypes\nctypes.string_at(0)"]
    scores = await rules.score(prompt(source="code", answer=SQUARES), [Sampled(text) for text in texts])
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0]
    await rules.close()


@needs_bwrap
async def test_a_bwrap_that_makes_no_sandbox_is_refused_and_no_fault_of_the_code(tmp_path, monkeypatch):
    """As in a container that may make no namespaces."""
    runner = LocalRunner(timeout_s=5, memory_mb=1024)
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RewardError, match=r"cannot make one here \(bwrap: No permissions.*bubblewrap"):
        reward().check_sources({"code"})
    with pytest.raises(RewardError, match="bwrap could not start a program: bwrap: No permissions"):
        await runner.run(Program("print(1)"))


@needs_bwrap
def test_a_machine_without_a_tool_that_sets_limits_is_refused(monkeypatch):
    monkeypatch.setattr(isolation, "limits", lambda *_, **__: ["prlimit-that-is-not-here", "--"])
    with pytest.raises(RewardError, match=r"cannot make one here \(.*prlimit-that-is-not-here"):
        reward().check_sources({"code"})


@needs_bwrap
def test_a_program_sees_a_folder_below_tmp_that_it_is_given_and_no_other(tmp_path):
    """As where asyncgrpo is installed below /tmp."""
    for name in ("given", "other"):
        (tmp_path / name).mkdir(mode=0o755)
        (tmp_path / name / "file").write_text(name)
    ended = isolation.run_isolated(
        [
            "/bin/sh",
            "-c",
            f"cat {tmp_path}/given/file; echo; ls {tmp_path}; echo x > {tmp_path}/given/new || echo refused",
        ],
        visible=["/usr", "/bin", "/lib", "/lib64", str(tmp_path / "given")],
        files={},
        environment={"PATH": "/usr/bin:/bin"},
        timeout_s=10.0,
        memory_mb=256,
    )
    assert (ended.code, ended.stdout.split()) == (0, ["given", "given", "refused"]), ended.stderr


@needs_bwrap
def test_what_the_processes_of_a_program_print_at_the_same_time_is_all_kept():
    prints = "for i in {1..3000}; do echo x; done"
    ended = isolation.run_isolated(
        ["/bin/bash", "-c", f"({prints}) & {prints}; wait"],
        visible=["/usr", "/bin", "/lib", "/lib64"],
        files={},
        environment={},
        timeout_s=30.0,
        memory_mb=256,
    )
    assert len(ended.stdout.split()) == 6000, ended.stderr
