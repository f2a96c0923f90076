"""Runs a program of the model and reports how it ended: with bubblewrap here, or in a Sandbox Fusion service.

In bubblewrap a program has no network, no environment, no files but /usr and Python, all of them read-only, and a small
/tmp in memory. Limits of the kernel bound its time, memory, processes and files. Its process namespace is killed at the
deadline, and nothing in it outlives that.

Limits of memory are for each process: `MAX_PROCESSES` of them may have `memory_mb` each. The kernel kills them first when
memory runs out (`guests.Host`).
"""

import contextlib
import itertools
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec

from asyncgrpo.errors import RewardError
from asyncgrpo.rewards.http import Service, ServiceError

MAX_CODE = 1 << 20
"""Most bytes of a program."""
MAX_OUTPUT = 16 << 20
"""Most bytes of a file that a program writes; its stdout and its stderr are such files."""
MAX_PROCESSES = 32
"""Most processes and threads of a program."""
_TMP_BYTES = 64 << 20
"""Of /tmp, and of /dev/shm, which `multiprocessing` needs."""
_NOBODY = 65534
_FIRST_UID = 0x70000000
"""The first user of programs where the trainer is root: `_as_nobody`. No account is here."""
_UIDS_EACH = 32
_HINT = "install the package bubblewrap, set reward.code.url to a Sandbox Fusion service, or give --unsafe-rewards"
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}

# -- what runners have in common ---------------------------------------------------------------------------------------

TIMEOUT = "timeout"


class Program(NamedTuple):
    """A program and its input."""

    code: str
    language: str = "python"
    """As Sandbox Fusion calls it."""
    stdin: str = ""


class Ran(NamedTuple):
    """End of a program."""

    stdout: str = ""
    problem: str = ""
    """Empty: it ended by itself with exit code 0. `TIMEOUT`: it was late. Else a text for people."""


class RunnerError(RewardError):
    """The runner failed, and not the program."""

    def __init__(self, failure: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        """Of the `Score`."""


class Runner(Protocol):
    """Runs programs."""

    async def run(self, program: Program) -> Ran:
        """Run a program to its end or to its deadline. Raises RunnerError."""


# -- bubblewrap --------------------------------------------------------------------------------------------------------


class LocalRunner:
    """Runs Python programs on this machine, one at a time. It blocks: it belongs into a process of its own."""

    def __init__(self, *, timeout_s: float, memory_mb: int, unsafe: bool = False) -> None:
        """
        Args:
            timeout_s: deadline of a program.
            memory_mb: address space of each process of a program, MiB.
            unsafe: where bubblewrap cannot run, run programs as processes like any other, with limits.
        Raises:
            RewardError: bubblewrap cannot run, and `unsafe` is false.
        """
        self._timeout_s, self._memory_mb, self._numbers = timeout_s, memory_mb, itertools.count()
        why = why_not_isolated()
        if why is not None and not unsafe:
            raise RewardError(why)
        self._is_isolated = why is None

    async def run(self, program: Program) -> Ran:
        """Run a program. See `Runner`."""
        if program.language != "python":
            return Ran(problem=f"{program.language} runs only in Sandbox Fusion (reward.code.url)")
        with _file(program.code) as code, _file(program.stdin) as stdin, _file() as stdout, _file() as stderr:
            status = self._run_to_end(code, stdin, stdout, stderr)
            errors = _text(stderr)
            if self._is_isolated and "exit-code" not in status.text and not status.is_late:
                raise RunnerError("sandbox", f"bwrap could not start a program: {_last_line(errors)}")
            return Ran(_text(stdout), TIMEOUT if status.is_late else _problem(status.code, errors))

    def _run_to_end(self, code: BinaryIO, stdin: BinaryIO, stdout: BinaryIO, stderr: BinaryIO) -> "_Ended":
        with _file() as report:
            python = [*_limits(self._timeout_s, self._memory_mb, is_isolated=self._is_isolated), *_PYTHON]
            if self._is_isolated:
                command = [
                    *_bwrap(code=code.fileno(), report=report.fileno()),
                    *_as_nobody(next(self._numbers)),
                    *python,
                    _MAIN,
                ]
            else:
                command = [*python, f"/proc/self/fd/{code.fileno()}"]
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(code.fileno(), report.fileno()) if self._is_isolated else (code.fileno(),),
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
            try:
                is_late = not _ends_within(process, self._timeout_s)
            finally:
                # bubblewrap dies with all of its process namespace; without it this reaches the program's own group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return _Ended(process.returncode, is_late, _text(report))


class _Ended(NamedTuple):
    code: int
    is_late: bool
    text: str
    """Report of bubblewrap: it has an `exit-code` if the program was started."""


def why_not_isolated() -> str | None:
    """Return the reason why programs cannot be isolated on this machine, or None. Runs one to find out."""
    if shutil.which("bwrap") is None:
        return f"code is run in a sandbox to score it, and bwrap is not here: {_HINT}"
    with _file() as code, _file() as report:
        descriptors = code.fileno(), report.fileno()
        limits = _limits(1.0, 1024, is_isolated=True)
        command = [*_bwrap(*descriptors), *_as_nobody(), *limits, *_PYTHON, _MAIN]
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, pass_fds=descriptors
        )
    if ended.returncode == 0:
        return None
    problem = _last_line(ended.stderr) or f"exit code {ended.returncode}"
    return f"code is run in a sandbox to score it, and bwrap cannot make one here ({problem}): {_HINT}"


_BOOT = f"""
def boot():
    import builtins, sys
    builtins.exit = builtins.quit = sys.exit
    sys.path += {list(dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))))}
    del sys.modules["__main__"].boot
    return compile(open(sys.argv[1]).read(), sys.argv.pop(1), "exec")
exec(boot())
"""
"""Runs a file as `python FILE` would, with this Python's packages but without their start-up code (`site`, `.pth` files): that
takes longer than most programs."""
_PYTHON = [sys.executable, "-I", "-S", "-B", "-c", _BOOT]
_MAIN = "/main.py"


def _bwrap(code: int, report: int) -> list[str]:
    """The start of a command line, for descriptors of a file with the program and of one for bubblewrap's report."""
    return [
        shutil.which("bwrap") or "bwrap",
        *_namespaces(),
        *("--die-with-parent", "--new-session", "--clearenv"),
        *(word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *("--ro-bind", "/usr", "/usr"),
        *(word for path in _system_paths() for word in path),
        *(word for prefix in _prefixes() for word in _bound(prefix)),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "0444", "--ro-bind-data", str(code), _MAIN),
        *("--perms", "1777", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp"),
        *("--perms", "1777", "--size", str(_TMP_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--remount-ro", "/", "--chdir", "/tmp", "--json-status-fd", str(report), "--"),
    ]


def _namespaces() -> list[str]:
    """All of them; but root's programs become another user in root's own, because the kernel bounds no process of root's."""
    if not _is_root():
        return ["--unshare-all", "--uid", str(_NOBODY), "--gid", str(_NOBODY), "--cap-drop", "ALL"]
    kinds = [f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts", "cgroup-try")]
    return [*kinds, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def _as_nobody(number: int = 0) -> list[str]:
    """Give up what `_namespaces` left, and become a user that no other program is, so that none uses up the processes of
    another: not even the one before it in this worker, which may still be ending."""
    if not _is_root():
        return []
    user = str(_FIRST_UID + _UIDS_EACH * os.getpid() + number % _UIDS_EACH)
    return [
        "setpriv",
        "--reuid",
        user,
        "--regid",
        user,
        "--clear-groups",
        "--inh-caps=-all",
        "--ambient-caps=-all",
        "--",
    ]


def _is_root() -> bool:
    """Return True if this is the machine's root, and not that of a user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


def _system_paths() -> Iterator[tuple[str, str, str]]:
    """`/bin`, `/lib` and the like: links into /usr where they are that, else folders."""
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if path.is_symlink():
            yield "--symlink", str(path.readlink()), str(path)
        elif path.is_dir():
            yield "--ro-bind", str(path), str(path)


def _prefixes() -> list[str]:
    """The folders of this Python outside /usr."""
    return [path for path in dict.fromkeys((sys.base_prefix, sys.prefix)) if not Path(path).is_relative_to("/usr")]


def _bound(folder: str) -> Iterator[str]:
    for parent in reversed(Path(folder).parents[:-1]):
        yield from ("--dir", str(parent))  # bubblewrap would make one that only root may enter
    yield from ("--ro-bind", folder, folder)


def _limits(timeout_s: float, memory_mb: int, *, is_isolated: bool) -> list[str]:
    limits = {
        "cpu": math.ceil(timeout_s) + 1,
        "as": memory_mb << 20,
        "fsize": MAX_OUTPUT,
        "nofile": 256,
        "core": 0,
    }
    if is_isolated:  # else they would be counted with all processes of the trainer's user
        limits["nproc"] = MAX_PROCESSES
    return ["prlimit", *(f"--{name}={value}" for name, value in limits.items()), "--"]


# -- processes and files -----------------------------------------------------------------------------------------------


def _ends_within(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    descriptor = os.pidfd_open(process.pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def _problem(code: int, stderr: str) -> str:
    """Describe an exit code. Of a program killed by signal n it is -n, or 128 + n from bubblewrap."""
    number = -code if code < 0 else code - 128
    if number in set(signal.Signals):
        return f"killed by {signal.Signals(number).name}"
    return f"exit code {code}: {_last_line(stderr)}" if code else ""


@contextlib.contextmanager
def _file(text: str = "") -> Iterator[BinaryIO]:
    """A file in memory with this text, at its start."""
    with os.fdopen(os.memfd_create("sandbox"), "w+b", buffering=0) as file:
        file.write(text.encode(errors="surrogatepass"))
        file.seek(0)
        yield file


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT).decode(errors="replace")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


# -- Sandbox Fusion ----------------------------------------------------------------------------------------------------

TRIES = 3
"""Requests for one run of a program."""
QUEUE_S = 10.0
"""Longest wait of a program in the service, beside the time that compiling and running may take."""


class _FusionResult(msgspec.Struct):
    status: str
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _FusionReply(msgspec.Struct):
    status: str
    message: str | None = None
    compile_result: _FusionResult | None = None
    run_result: _FusionResult | None = None


class FusionRunner:
    """Runs programs in many languages in a Sandbox Fusion service, `POST {url}/run_code`. Use it from one event loop.

    A reply about a program is final. Source: https://github.com/bytedance/SandboxFusion; verl's `sandbox_fusion/utils.py`.
    """

    def __init__(self, url: str, *, timeout_s: float, memory_mb: int) -> None:
        """
        Args:
            url: with or without `/run_code` at its end.
            timeout_s: of compiling and of running, each.
        """
        self._limits = {"compile_timeout": timeout_s, "run_timeout": timeout_s, "memory_limit_MB": memory_mb}
        self._service = Service(
            url.rstrip("/").removesuffix("/run_code") + "/run_code",
            deadline_s=math.ceil(2 * timeout_s + QUEUE_S),
            tries=TRIES,
            max_reply=4 * MAX_OUTPUT,
        )

    async def run(self, program: Program) -> Ran:
        """Run a program. See `Runner`."""
        body = {"code": program.code, "language": program.language, "stdin": program.stdin} | self._limits
        try:
            return _ran(await self._service.post(msgspec.json.encode(body)))
        except ServiceError as error:
            raise RunnerError("timeout" if error.is_late else "sandbox", str(error)) from error

    async def close(self) -> None:
        """Close the connections; requests that run fail."""
        await self._service.close()


def _ran(body: bytes) -> Ran:
    try:
        reply = msgspec.json.decode(body, type=_FusionReply)
    except msgspec.MsgspecError as error:
        raise RunnerError("sandbox", f"the reply is not one of Sandbox Fusion: {error}") from error
    compiled, run = reply.compile_result, reply.run_result
    if reply.status not in ("Success", "Failed"):
        raise RunnerError("sandbox", f"Sandbox Fusion replied {reply.status}: {(reply.message or '')[:200]}")
    if compiled is not None and (problem := _problem_of(compiled)):
        return Ran(problem=problem if problem == TIMEOUT else f"it does not compile: {problem}")
    if run is None:
        raise RunnerError("sandbox", f"Sandbox Fusion replied {reply.status} and no run_result")
    return Ran(run.stdout or "", _problem_of(run) or ("" if reply.status == "Success" else "failed"))


def _problem_of(result: _FusionResult) -> str:
    if result.status == "TimeLimitExceeded":
        return TIMEOUT
    last_line = _last_line(result.stderr or "")
    if result.status != "Finished":
        return f"{result.status}: {last_line}"
    return f"exit code {result.return_code}: {last_line}" if result.return_code else ""
