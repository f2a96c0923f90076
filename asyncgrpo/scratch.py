"""Temporary files of a process outside the run folder, which are removed even if the process is killed.

Each process holds a lock on its folder, which the kernel releases when the process ends. The next process that needs a
folder removes those whose lock is free, and the shared memory whose names contain their mark. Nothing else is removed.
Locks work between containers, where process ids do not.

    <tmp>/asyncgrpo-<uid>/              only ours to read
        .lock                           held while folders are made and removed
        k3v9x2ab/.lock                  held by the process whose folder it is
        k3v9x2ab/...                    Ray's session, SGLang's sockets
    /dev/shm/*asyncgrpo-k3v9x2ab*
"""

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from asyncgrpo.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
_LOCK = ".lock"
_KEEP = "keep"

_own: tuple[int, Path] | None = None
"""Process id and folder of this process. In a forked child it is still the parent's."""


def folder() -> Path:
    """The folder of this process. The first call removes those of dead processes and makes this one.

    Raises:
        ConfigError: its parent belongs to somebody else, or others can write to it.
    """
    global _own
    if _own is None or _own[0] != os.getpid():
        root = _root()
        with _locked(root / _LOCK):
            _remove_dead(root)
            made = Path(tempfile.mkdtemp(prefix="", dir=root))
            fcntl.flock(os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)  # until the process ends
        _own = os.getpid(), made
        atexit.register(_remove_own, _own)
    return _own[1]


def mark() -> str:
    """The mark of this process. Shared memory whose name contains it is removed once the process is dead."""
    return f"asyncgrpo-{folder().name}"


def keep() -> None:
    """Keep this process's folder for a person to look into: nothing removes it."""
    (folder() / _KEEP).touch()


def is_unheld(lock: Path) -> bool:
    """Whether no process locks this file. Raises OSError where it cannot be opened."""
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
    root = Path(tempfile.gettempdir()) / f"asyncgrpo-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    there = root.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or there.st_mode & 0o022:
        raise ConfigError(f"{root} is no folder that only you can write to; remove it, or set TMPDIR to another place")
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
    for there in root.iterdir():
        if there.is_dir() and not (there / _KEEP).exists() and _is_dead(there):
            _remove(there)


def _is_dead(there: Path) -> bool:
    """Whether no process holds this folder's lock. Folders are made and locked under the root's lock: the caller's."""
    try:
        return is_unheld(there / _LOCK)
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
