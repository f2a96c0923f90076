"""Launch scripts run in a sandbox: which commands are recorded, and what a script cannot do."""

import os
import socket
import time

import pytest

from asyncgrpo.config.foreign import run_script
from asyncgrpo.errors import ConfigError


def commands(text: str, **environment: str) -> list[str]:
    return [" ".join(words) for words in run_script(text, environment).commands]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run a.b=1 'c d' \"e $N\" g\\ h # all else", ["run a.b=1 c d e 8 g h"]),
        ("L=(\n  a=1   # one\n  'b=2'\n)\nL+=(c=3)\nrun \"${L[@]}\"", ["run a=1 b=2 c=3"]),
        ("f() { local x=$((N * 2)); run $x \"$@\"; }\nf y", ["run 16 y"]),
        ("case $N in [78]) run a;; *) run b;; esac; [ $N -gt 9 ] && run c || run d", ["run a", "run d"]),
        ("V=$(echo a_b | sed s/_/-/ | tr a-z A-Z); run $V", ["run A-B"]),
        ("X=$(python3 -c 'import npu' && echo npu || echo gpu); run $X", ["python3 -c import npu", "run gpu"]),
        ("torchrun --x | tee log | grep y; ray start && python t.py", ["torchrun --x", "ray start", "python3 t.py"]),
        ("exec > >(tee -a all.log) 2>&1\nexec python3 a", ["python3 a"]),
        ("run a > logs/x.log 2>&1 &\nrun b >> /data/y.log\nwait", ["run a", "run b"]),
        ("(for i in {1..9999}; do :; done; run a) &\nbash -c 'run b; run c' & run d; wait", ["run a", "run b", "run c", "run d"]),
        ("./go.sh a; bash b.sh c; /opt/x/bin/run d; bash -c 'run e'", ["./go.sh a", "bash b.sh c", "/opt/x/bin/run d", "run e"]),
        ("cat <<'END' > f\nIt's no command\nEND\nrun a", ["run a"]),
        ("HERE=$(cd \"$(dirname \"${BASH_SOURCE[0]}\")\" && pwd); run $HERE $0", ["run / /script.sh"]),
        ("run $M ${M:?set it} ${M:-no} a$M", ["run $M $M $M a$M"]),
        (': "${M:=4}" ${K=2}; run $(($M * $K))', ["run 8"]),
    ],
)  # fmt: skip
def test_bash_runs_the_script_and_the_commands_that_it_starts_are_recorded(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commands(text, N="8") == expected
    assert list(tmp_path.iterdir()) == []


def test_a_script_writes_connects_and_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").write_text("x")
    text = f"""
        echo lost > {tmp_path}/kept
        echo new > {tmp_path}/new
        sed -i s/x/y/ {tmp_path}/kept
        builtin kill -9 {os.getpid()} && run killed
        builtin kill -9 -1
    """
    assert "run killed" not in commands(text)
    assert (tmp_path / "kept").read_text() == "x"
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_a_script_reaches_no_network_and_no_file():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, socket.create_server(("127.0.0.1", 0)) as tcp:
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        ports = f"udp/127.0.0.1/{udp.getsockname()[1]} tcp/127.0.0.1/{tcp.getsockname()[1]} tcp/192.0.2.1/80"
        text = f"for to in {ports}; do (echo x > /dev/$to); [ $to = udp ] || (: < /dev/$to) && run $to; done"
        assert [line for line in commands(text) if "tcp" in line] == []
        with pytest.raises(BlockingIOError):
            udp.recv(1)
    assert commands(f"cat /etc/passwd {__file__} && run read; [ -e {__file__} ] && run seen") == []


def test_no_program_of_this_machine_runs_but_those_that_print():
    loader = "for ld in /lib*/ld-linux*; do $ld $(ls /usr/bin/python3*) -c 'print(1)' && run python; done"
    assert "run python" not in commands(loader)
    started = ["/usr/bin/python3 -c print(1)", "perl -e 1", "run a"]
    assert commands("/usr/bin/python3 -c 'print(1)' && perl -e 1; run a") == started


@pytest.mark.parametrize(
    ("text", "is_endless"),
    [
        ("while :; do :; done", True),
        ("trap '' TERM HUP; sleep() { read < <(:); }; while :; do sleep; done", True),
        ("A=xx; while :; do A=$A$A; done", False),
        (":(){ :|:& };:; :", False),
        ("while :; do run 012345678901234567890123; done", False),
    ],
)
def test_time_memory_processes_and_records_of_a_script_are_bounded(text, is_endless, monkeypatch):
    monkeypatch.setattr("asyncgrpo.config.foreign._SECONDS", 0.5 if is_endless else 1.0)
    begun = time.monotonic()
    started = run_script(f"run a\n{text}", {})
    assert started.commands[0] == ["run", "a"] and time.monotonic() - begun < 5
    if is_endless:
        assert len(started.commands) == 1 and started.problem.startswith("it did not end within 0.5 s")


@pytest.mark.parametrize(
    "text", ["'", '"', "$(", "${", "`", "(", "A=(", "case x in", "if", "fi", ";;", "printf '9\\0x' >&9", "a\0b"]
)
def test_text_that_is_not_a_script_breaks_nothing(text):
    assert run_script(f"run a\n{text}", {}).commands[:1] in ([["run", "a"]], [])


def test_without_bubblewrap_a_script_is_refused_with_two_ways_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"bwrap is not here: install.* bubblewrap.*the command itself.*Hydra"):
        run_script("run a", {})
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(ConfigError, match=r"cannot make one here \(bwrap: No permissions.*Hydra"):
        run_script("run a", {})
