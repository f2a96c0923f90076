"""Ray for the length of one run: started if none is given, and gone afterwards, whatever ended the run.

Whoever may speak to Ray may run code in it. A Ray that is started here asks for a token, has no dashboard, and its token
is for nobody else to read. What stays open all the same is in docs/security.md.
"""

import logging
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from asyncgrpo import scratch
from asyncgrpo.errors import ConfigError

log = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # a run must not need the internet
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # nobody sees them, and Ray keeps stderr in files that may not take them
    "TOKENIZERS_PARALLELISM": "false",
}
_MODE = "RAY_AUTH_MODE"
OBJECT_STORE_BYTES = 100 * 2**20
"""Nothing of ours travels through Ray's object store but addresses."""
RAY_ANSWERS_S = 5.0
"""For a connection to the address of a cluster."""
_LONGEST_FOLDER = 41
"""Characters: the sockets of a session, 66 more below its folder, must stay below the 108 that the kernel takes."""


@contextmanager
def ray_session(address: str | None, cpu_only: bool) -> Iterator[None]:
    """Connect to the cluster at `address`, or start one here.

    Raises:
        ConfigError: there is no cluster at `address`.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if cpu_only:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ray would say in a warning at every start that it asks for a token.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    common = {
        "namespace": "asyncgrpo",
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    try:
        if address is not None:
            check_ray(address)
            ray.init(address=address, **common)
        else:
            os.environ.pop(_MODE, None)  # whatever it says: left to choose, Ray asks for a token and says so here
            ray.init(
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=_temporary(),
                **common,
            )
            _hold_back_token()
    except ConnectionError as error:
        raise ConfigError(f"cluster.ray_address {address}: no Ray cluster answers there") from error
    session = _session_folder() if address is None else None
    try:
        yield
    except Exception:
        if address is None:
            scratch.keep()  # Ray's logs may say why
        raise
    finally:
        ray.shutdown()
    if session is not None:
        shutil.rmtree(session, ignore_errors=True)


def check_ray(address: str) -> None:
    """Raise ConfigError where nobody listens at a `cluster.ray_address`, for which Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # `auto`, or an address of Ray's own client, `ray://...`
        return
    try:
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), timeout=RAY_ANSWERS_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cluster.ray_address {address}: no Ray cluster answers there ({error})") from error


def _temporary() -> str | None:
    """Where Ray keeps its session, which a later start removes if this process is killed. None: Ray's usual place."""
    folder = str(scratch.folder())
    return folder if len(folder) <= _LONGEST_FOLDER else None


def _hold_back_token() -> None:
    """Make sure that Ray asks for its token, and that nobody else on this machine reads it.

    Raises:
        ConfigError: this Ray asks for none.
    """
    if os.environ.get(_MODE, "").lower() != "token":
        ray.shutdown()
        raise ConfigError(f"Ray {ray.__version__} started without asking for a token; asyncgrpo needs one that does")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if path.is_file() and path.stat().st_uid == os.getuid() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o600)  # Ray makes it as the umask says


def _session_folder() -> str | None:
    """Where the Ray that we started keeps sockets and logs. Ray has no public name for it."""
    node = getattr(ray._private.worker.global_worker, "node", None)
    return node.get_session_dir_path() if node is not None else None
