"""Temporary files of a process outside the run folder, removed even if the process is killed.

Each process holds a lock on its folder, which the kernel releases when the process ends. The next process that creates a
folder removes those with a free lock, and the shared memory whose names contain their mark. Nothing else is removed.
Locks work across containers, process ids do not. Folders created under another `/dev/shm` stay, because only a process that
sees their shared memory can remove both.

    <tmp>/asyncgrpo-<uid>/              mode 0700
        .lock                           held while folders are created and removed
        k3v9x2ab/.lock                  held by the folder's process; contains its /dev/shm and its owner
        k3v9x2ab/...                    Ray's session, SGLang's sockets
    /dev/shm/*asyncgrpo-k3v9x2ab*

A command that starts processes also starts a janitor (`tidy_at_end`), which runs only this file. The janitor waits for the
command's lock, kills the processes that the command started, and removes the folders of all of them.
"""

import atexit
import contextlib
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
OWNER = "ASYNCGRPO_OWNER"
"""Environment variable of the processes that a command starts: the name of the command's folder."""
_ROOT = "asyncgrpo-"
"""Start of the name of the folder that has those of all processes. Nothing is removed from any other."""
_LOCK = ".lock"
_KEEP = "keep"

_own: tuple[int, Path] | None = None
"""Process id and folder of this process. In a forked child it is still the parent's."""


def folder() -> Path:
    """Return the folder of this process. The first call removes the folders of dead processes and creates this one.

    Raises:
        ConfigError: its parent belongs to another user, or other users can write to it.
    """
    global _own
    if _own is None or _own[0] != os.getpid():
        root = _root()
        with _locked(root / _LOCK):
            _remove_dead(root)
            made = Path(tempfile.mkdtemp(prefix="", dir=root))
            lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the process ends
            os.write(lock, f"{same_machine()} {os.environ.get(OWNER, '')}".encode())
        _own = os.getpid(), made
        atexit.register(_remove_own, _own)
    return _own[1]


def mark() -> str:
    """Return the mark of this process. Shared memory whose name contains it is removed once the process is dead."""
    return f"asyncgrpo-{folder().name}"


def keep() -> None:
    """Keep this process's folder for inspection: it is never removed."""
    (folder() / _KEEP).touch()


def same_machine() -> str:
    """Return an identity that two processes share exactly if they share `/dev/shm`. Containers of one machine may not."""
    device = SHARED_MEMORY.stat()
    return f"{_boot_id()}-{device.st_dev}-{device.st_ino}"


def tidy_at_end() -> None:
    """Start a janitor, which cleans up after this process, however it ends.

    The janitor kills the processes that were started after this call, with `OWNER` in their environment.
    """
    made = folder()
    if os.environ.get(OWNER) == made.name:
        return
    os.environ[OWNER] = made.name
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-I", "-S", __file__, str(made)]  # 10 MB: nothing but the standard library
    # The janitor forks and its parent exits, so that it is not among the children of this process, which may count them.
    subprocess.run(command, env={}, cwd="/", stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


def is_unheld(lock: Path) -> bool:
    """Return True if no process locks this file. Raises OSError if it cannot be opened."""
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


def _root() -> Path:
    root = Path(tempfile.gettempdir()) / f"{_ROOT}{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    there = root.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or there.st_mode & 0o022:
        from asyncgrpo.errors import ConfigError  # the janitor cannot import it

        raise ConfigError(f"other users can write to {root}; remove it, or set TMPDIR to another folder")
    root.chmod(0o700)
    return root


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_dead(root: Path) -> None:
    for there in root.iterdir() if root.name.startswith(_ROOT) else ():
        if there.is_dir() and not (there / _KEEP).exists() and _is_dead(there):
            _remove(there)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _is_dead(there: Path) -> bool:
    """Return True if the folder's lock is free, and no other `/dev/shm` may have memory with its mark.

    Folders are created and locked under the root's lock, which the caller holds.
    """
    try:
        made_under = (there / _LOCK).read_text().partition(" ")[0]
        is_elsewhere = made_under != same_machine() and made_under.startswith(_boot_id())  # a boot empties each of them
        return not is_elsewhere and is_unheld(there / _LOCK)
    except FileNotFoundError:  # its process was killed before it made the lock
        return True
    except OSError:
        return False


def _remove_own(own: tuple[int, Path]) -> None:
    pid, made = own
    if pid == os.getpid() and not (made / _KEEP).exists():
        _remove(made)


def _remove(there: Path) -> None:
    if SHARED_MEMORY.is_dir():
        for name in SHARED_MEMORY.glob(f"*asyncgrpo-{there.name}*"):
            with contextlib.suppress(OSError):
                name.unlink()
    shutil.rmtree(there, ignore_errors=True)


# -- the janitor, in a process of its own ------------------------------------------------------------------------------

_KILLS_S = 20.0
"""Time after which the janitor gives up on processes that SIGKILL does not end."""


def _tidy(made: Path) -> None:
    """Wait for the end of the folder's process, then kill its processes and remove their folders and shared memory."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # a shutdown signals all processes, and the run drains
    with contextlib.suppress(FileNotFoundError), _locked(made / _LOCK):
        pass
    name, root, deadline = made.name, made.parent, time.monotonic() + _KILLS_S
    while time.monotonic() < deadline:
        for pid in (owned := _owned_by(name)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with _locked(root / _LOCK):
            _remove_dead(root)
        # A process that is being killed has lost its environment, but holds its lock for a moment.
        if not owned and not any(lock.read_text().endswith(f" {name}") for lock in root.glob(f"*/{_LOCK}")):
            break
        time.sleep(0.1)


def _owned_by(name: str) -> list[int]:
    """Return the processes with this owner in their environment. An ended process has no environment."""
    owned = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{OWNER}={name}".encode() in (process / "environ").read_bytes().split(b"\0"):
                owned.append(int(process.name))
    return owned


if __name__ == "__main__" and os.fork() == 0:
    _tidy(Path(sys.argv[1]))
