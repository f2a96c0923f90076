"""Ray for the length of one run: started if none is given, and gone afterwards, whatever ended the run."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from asyncgrpo.errors import ConfigError

log = logging.getLogger(__name__)

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # a run must not need the internet
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
OBJECT_STORE_BYTES = 100 * 2**20
"""Nothing of ours travels through Ray's object store but addresses."""


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
    # A cluster of our own has token authentication on; Ray would say so in a warning at every start.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    common = {
        "namespace": "asyncgrpo",
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    try:
        if address is not None:
            ray.init(address=address, **common)
        else:
            ray.init(
                include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _node_ip_address="127.0.0.1", **common
            )
    except ConnectionError as error:
        raise ConfigError(f"cluster.ray_address {address}: no Ray cluster answers there") from error
    session = _session_folder() if address is None else None
    try:
        yield
    finally:
        ray.shutdown()
    if session is not None:  # after a failure Ray's logs stay: they may say why
        shutil.rmtree(session, ignore_errors=True)


def _session_folder() -> str | None:
    """Where the Ray that we started keeps sockets and logs. Ray has no public name for it."""
    node = getattr(ray._private.worker.global_worker, "node", None)
    return node.get_session_dir_path() if node is not None else None
