"""What a process needs outside the run folder: a folder below the temporary one, and a mark for names elsewhere.

A process that is killed removes nothing. So each holds a lock on its folder for as long as it lives, which the kernel
ends with it, whatever its process id is called in another container; and the next process of ours that needs a folder
removes those whose lock is free, with the shared memory whose name bears their mark. Nothing else is ever removed.

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
"""Process id and folder: a child that was forked has none yet."""


def folder() -> Path:
    """This process's folder. The first call makes it, after it removed what dead processes left.

    Raises:
        ConfigError: somebody else has put something in its place.
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
    """Names in shared memory that contain it are removed when this process is dead."""
    return f"asyncgrpo-{folder().name}"


def keep() -> None:
    """Leave this process's folder for a person to look into: nobody removes it."""
    (folder() / _KEEP).touch()


def is_unheld(lock: Path) -> bool:
    """Whether no process holds the lock of this file. Raises OSError where it cannot be opened."""
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
    """Whether nobody holds its lock. Folders are made and locked under the root's lock, which the caller has."""
    try:
        return is_unheld(there / _LOCK)
    except FileNotFoundError:  # killed between the two
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
