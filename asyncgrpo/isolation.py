"""Runs an unreviewed program in bubblewrap, up to a deadline.

The program has no network, no files but those that the caller names, all of them read-only, and a small /tmp in memory. Limits
of the kernel bound its time, memory, processes and files. The deadline kills its process namespace, and nothing in it survives.

Limits of memory are for each process: `MAX_PROCESSES` of them may have `memory_mb` each.
"""

import contextlib
import fcntl
import math
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAX_OUTPUT = 16 << 20
"""Most bytes of a file that a program writes; its stdout and its stderr are such files."""
MAX_PROCESSES = 32
"""Most processes and threads of a program."""
_TMP_BYTES = 64 << 20
"""Size of /tmp, and of /dev/shm, which `multiprocessing` needs."""
_NOBODY = 65534
_FIRST_UID = 0x70000000
"""The first user of programs where the caller is root: `_as_nobody`. No account is here."""
_UIDS_EACH = 32


class Ended(NamedTuple):
    """The end of a program."""

    code: int
    """Exit code, or the negative signal."""
    is_late: bool
    """True if the deadline killed it."""
    stdout: str
    stderr: str
    is_started: bool = True
    """False if bubblewrap failed before the program started; its message is in `stderr`."""


def run_isolated(
    command: Sequence[str],
    *,
    visible: Sequence[str],
    files: Mapping[str, str],
    environment: Mapping[str, str],
    timeout_s: float,
    memory_mb: int,
    stdin: str = "",
    folder: str = "/tmp",
    discarded: Sequence[str] = (),
    number: int = 0,
) -> Ended:
    """Run a program in a sandbox of its own, to its end or to its deadline.

    Args:
        visible: files and folders of this machine that the program may read and execute; `setpriv` and `prlimit` are added.
        files: further files, path -> text.
        memory_mb: address space of each process, MiB.
        folder: its working directory, which is empty unless it is visible.
        discarded: files that it may write; they are /dev/null.
        number: which program of this process it is: neighbours get different users (`_as_nobody`).
    """
    with contextlib.ExitStack() as opened:
        texts = {path: opened.enter_context(memory_file(text)) for path, text in files.items()}
        report = opened.enter_context(memory_file())
        tools = [path for path in map(_tool, ("setpriv", "prlimit")) if not path.startswith(tuple(visible))]
        sandbox = [
            _tool("bwrap"),
            *_namespaces(),
            *("--die-with-parent", "--new-session"),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--perms", "1777", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp"),
            *("--perms", "1777", "--size", str(_TMP_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            # after /tmp, which would hide what is installed below it
            *(word for path in (*visible, *tools) for word in _bound(Path(path))),
            *(word for path, file in texts.items() for word in _written(path, file)),
            *(word for path in discarded for word in (*_folders(Path(path)), "--dev-bind", "/dev/null", path)),
            *(*_folders(Path(folder)), "--dir", folder, "--remount-ro", "/", "--chdir", folder),
            *("--json-status-fd", str(report.fileno()), "--"),
        ]
        ended = run_to_end(
            [*sandbox, *_as_nobody(number), *limits(timeout_s, memory_mb, is_isolated=True), *command],
            stdin=stdin,
            environment=environment,
            timeout_s=timeout_s,
            descriptors=[file.fileno() for file in (*texts.values(), report)],
        )
        return ended._replace(is_started=ended.is_late or "exit-code" in text_of(report))


def run_to_end(
    command: Sequence[str], *, stdin: str, environment: Mapping[str, str], timeout_s: float, descriptors: Sequence[int]
) -> Ended:
    """Run a process in a session of its own, and kill its process group at the end or the deadline."""
    with memory_file(stdin) as source, memory_file() as stdout, memory_file() as stderr:
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=stdout,
            stderr=stderr,
            pass_fds=descriptors,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        try:
            is_late = not _ends_within(process, timeout_s)
        finally:
            # bubblewrap dies with all of its process namespace; without it this reaches the program's own group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Ended(process.returncode, is_late, text_of(stdout), text_of(stderr))


def why_not_isolated(command: Sequence[str], *, visible: Sequence[str], files: Mapping[str, str]) -> str:
    """Return why a program cannot run isolated on this machine, as the end of a sentence; empty if it can. Runs it."""
    if shutil.which("bwrap") is None:
        return "bwrap is not here"
    ended = run_isolated(command, visible=visible, files=files, environment={}, timeout_s=10.0, memory_mb=1024)
    if ended.is_started and ended.code == 0:
        return ""
    return f"bwrap cannot make one here ({last_line(ended.stderr) or f'exit code {ended.code}'})"


# -- how bubblewrap is called ------------------------------------------------------------------------------------------


def _namespaces() -> list[str]:
    """All of them; but root's programs become another user in root's own, because the kernel bounds no process of root's."""
    if not _is_root():
        return ["--unshare-all", "--uid", str(_NOBODY), "--gid", str(_NOBODY), "--cap-drop", "ALL"]
    kinds = [f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts", "cgroup-try")]
    return [*kinds, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def _as_nobody(number: int) -> list[str]:
    """Give up what `_namespaces` left, and become a user that no other program is, so that none uses up the processes of
    another: not even the one before it in this process, which may still be ending."""
    if not _is_root():
        return []
    user = str(_FIRST_UID + _UIDS_EACH * os.getpid() + number % _UIDS_EACH)
    dropped = ("--clear-groups", "--inh-caps=-all", "--ambient-caps=-all", "--")
    return [_tool("setpriv"), "--reuid", user, "--regid", user, *dropped]


def _is_root() -> bool:
    """True if this is the machine's root, and not that of a user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]


def _tool(name: str) -> str:
    return shutil.which(name) or name


def _bound(path: Path) -> Iterator[str]:
    """Show a path as it is here: a link into /usr such as `/bin`, or a file or a folder. A missing one is left out."""
    yield from _folders(path)
    if path.is_symlink() and path.parent == Path("/"):
        yield from ("--symlink", str(path.readlink()), str(path))
    elif path.exists():
        yield from ("--ro-bind", str(path), str(path))


def _written(path: str, text: BinaryIO) -> Iterator[str]:
    yield from (*_folders(Path(path)), "--perms", "0444", "--ro-bind-data", str(text.fileno()), path)


def _folders(path: Path) -> Iterator[str]:
    """Make the folders above a path. bubblewrap would make ones that only root may enter."""
    for parent in reversed(path.parents[:-1]):
        yield from ("--dir", str(parent))


def limits(timeout_s: float, memory_mb: int, *, is_isolated: bool) -> list[str]:
    """The start of a command line that sets limits of the kernel."""
    most = {"cpu": math.ceil(timeout_s) + 1, "as": memory_mb << 20, "fsize": MAX_OUTPUT, "nofile": 256, "core": 0}
    if is_isolated:  # else they would be counted with all processes of the caller's user
        most["nproc"] = MAX_PROCESSES
    return [_tool("prlimit"), *(f"--{name}={value}" for name, value in most.items()), "--"]


# -- processes and files -----------------------------------------------------------------------------------------------


def _ends_within(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    descriptor = os.pidfd_open(process.pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def memory_file(text: str = "") -> Iterator[BinaryIO]:
    """A file in memory with this text, at its start. Writes append, so that those of two processes overwrite nothing."""
    with os.fdopen(os.memfd_create("sandbox"), "w+b", buffering=0) as file:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # the kernel locks the shared position of files on disk only
        file.write(text.encode(errors="surrogatepass"))
        file.seek(0)
        yield file


def text_of(file: BinaryIO) -> str:
    """At most `MAX_OUTPUT` bytes of a file, from its start. Its position, which a killed program may still share, stays."""
    return os.pread(file.fileno(), MAX_OUTPUT, 0).decode(errors="replace")


def last_line(text: str) -> str:
    """The last line of a text, cut after 200 characters."""
    return (text.strip().splitlines() or [""])[-1][:200]
