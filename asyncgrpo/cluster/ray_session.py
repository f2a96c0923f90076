"""Ray in one run: its session, the results of its actors, and the GPUs of each role.

A client that connects to Ray can run code in it. A Ray that is started here requires a token that only this user can read,
has no dashboard, and listens on loopback where our own sockets do. See docs/security.md for what remains open.
"""

import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncgrpo import scratch, warm
from asyncgrpo.config.reach import check_service
from asyncgrpo.config.schema import Config, changed
from asyncgrpo.errors import (
    AsyncGRPOError,
    CheckpointError,
    ConfigError,
    DataError,
    ProcessLost,
    RewardError,
    StalledError,
    WeightsError,
    WireError,
)
from asyncgrpo.host import QUIET
from asyncgrpo.wire.sockets import is_loopback

T = TypeVar("T")

# -- the session -------------------------------------------------------------------------------------------------------

_QUIET = QUIET | {
    "RAY_USAGE_STATS_ENABLED": "0",  # a run must not need the internet
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    # The workers are the run itself. At Ray's niceness of 15 other processes would starve them: they would feed the GPUs
    # late and miss liveness deadlines.
    "RAY_worker_niceness": "0",
    # Bounds the output of a worker, such as prints of a reward function.
    "RAY_ROTATION_MAX_BYTES": str(64 * 2**20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    # At a connection to one of torch's stores both sides ask DNS for the name of the other's address. By default a lost reply
    # costs 5 s and a dead server 10 s, for all members of a group. glibc reads this once, so workers must start with it.
    "RES_OPTIONS": "timeout:1",
    # Without it the titles of Ray's agents overwrite their environment, by which the janitor finds them.
    "SPT_NOENV": "1",
}
OBJECT_STORE_BYTES = 100 * 2**20
"""Size of Ray's object store. Only addresses and configurations go through it."""
LATE_S = 60.0
"""How long a Ray that is started here may take before there is a warning."""
_LONGEST_FOLDER = 41
"""Longest path of the session's folder, characters. Ray's socket paths add 66, and the kernel allows fewer than 108."""


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """Connect to the cluster of a run, or start one here. Nested sessions share the outer one.

    If `cluster.bind` is loopback, a Ray that is started here listens on loopback alone.

    Raises:
        ConfigError: no cluster replies at `cluster.ray_address`, or its token is missing.
        StalledError: Ray did not start here.
    """
    if ray.is_initialized():
        yield
        return
    address = config.cluster.ray_address
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not config.generators.gpus_each:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ray would warn at every start that it requires a token.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    # With Ray's own handler, SIGTERM would wait until Ray has started, and end with the wrong exit code.
    ray._private.utils.set_sigterm_handler = lambda handler: None
    # Ray's workers would import modules of the working directory before packages, also where this process imports none of it.
    job = ray.job_config.JobConfig(_client_job={"", os.getcwd()}.isdisjoint(sys.path))
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False, "job_config": job}
    try:
        if address is not None:
            check_ray(address)
            ray.init(address=address, namespace="asyncgrpo", **quiet)
        else:
            scratch.tidy_at_end()  # Ray's agents would outlive a killed driver by a minute
            if is_loopback(config.cluster.bind):
                _keep_on_loopback()
            _start_only_what_is_used()
            # A signal to the process group of this command, as from `timeout`, is for the driver alone.
            ray._private.services.ConsolePopen = partial(subprocess.Popen, process_group=0)
            _require_token()
            folder = str(scratch.folder())  # which a later start removes if this process is killed
            with _warned_if_late(folder), _interrupt_held_back():
                ray.init(
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=folder if len(folder) <= _LONGEST_FOLDER else None,
                    namespace="asyncgrpo",
                    **quiet,
                )
    except Exception as error:
        if address is None and not isinstance(error, AsyncGRPOError):  # a bare Exception where its node is late
            scratch.keep()
            text = " ".join(str(error).split())
            raise StalledError(f"Ray did not start: {text} Its logs are in {scratch.folder()}") from error
        if not isinstance(error, ConnectionError | ray.exceptions.AuthenticationError):
            raise
        raise ConfigError(
            f"cluster.ray_address {address}: no Ray cluster accepts the connection; if it requires a token, set "
            "RAY_AUTH_MODE=token, and give the token in ~/.ray/auth_token or in the file that RAY_AUTH_TOKEN_PATH names"
        ) from error
    # Ray's core has put a handler of its own, which aborts with a stack of C++, in the place of Python's.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    session = _session_folder() if address is None else None
    if session is not None:
        os.chmod(session, 0o700)  # Ray makes it open to all
    try:
        yield
    except Exception as error:
        if address is None and not _is_explained(error):
            scratch.keep()  # Ray's logs may have the cause
        raise
    finally:
        ray.shutdown()
    if session is not None:
        shutil.rmtree(session, ignore_errors=True)


@contextmanager
def _warned_if_late(folder: str) -> Iterator[None]:
    """Print a warning with the last line of Ray's errors if the block takes longer than `LATE_S`.

    Ray waits for its first workers without a deadline, also if none of them can start. It blocks this process meanwhile, so
    another one prints.
    """
    errors = 'cat "$1"/session_2*/logs/raylet.err 2>/dev/null | tail -n 1'
    script = (
        f'sleep "$0"; echo "warning: Ray has not started for $0 s; its logs are in $1, and end with: $({errors})" >&2'
    )
    process = subprocess.Popen(["sh", "-c", script, f"{LATE_S:.0f}", folder], start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Hold back a first Ctrl-C until the block ends. In the middle of Ray's start it ends in a segmentation fault."""
    handler, num_held = signal.getsignal(signal.SIGINT), 0

    def hold(*_: object) -> None:
        nonlocal num_held
        num_held += 1
        if num_held > 1:
            raise KeyboardInterrupt

    if callable(handler):  # else it is ignored
        signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if num_held:
        raise KeyboardInterrupt


def _is_explained(error: Exception) -> bool:
    """True if a process reported an error in its input, to which Ray's logs add nothing."""
    cause = error.__cause__ if isinstance(error.__cause__, AsyncGRPOError) else error
    return isinstance(cause, ConfigError | DataError | RewardError | CheckpointError)


@contextmanager
def session_beside(work: Callable[[], T], config: Config) -> Iterator[T]:
    """Start the session of a run, and yield the result of `work`, which a thread runs meanwhile if there is a warm process.

    Ray must start in the main thread, because it handles signals. Exceptions of `work` are raised here.
    """
    if not warm.is_on():
        result = work()
        with ray_session(config):
            yield result
        return
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work)
        try:
            with ray_session(config):
                error = working.exception()
                if error is None:
                    yield working.result()
                elif isinstance(error, warm.Lost):
                    yield work()  # in this process
        finally:
            warm.end()  # the thread may wait for it
        if error is not None and not isinstance(error, warm.Lost):
            raise error


def check_ray(address: str) -> None:
    """Raise ConfigError if `cluster.ray_address` does not accept a connection, for which Ray would wait for minutes."""
    if address.rpartition(":")[2].isdigit():  # unlike `auto`
        check_service(address if "://" in address else f"tcp://{address}", "cluster.ray_address")


def _keep_on_loopback() -> None:
    """Make the Ray that starts next listen on 127.0.0.1 only.

    Ray replaces 127.0.0.1 with the machine's address and listens on all interfaces, unless it cannot be a cluster, as on
    macOS.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # for Ray's processes
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False  # for this one, which read it when it imported Ray


def _start_only_what_is_used() -> None:
    """Start Ray without its autoscaler, log monitor and dashboard server, and its workers from the warm process.

    Each is a Python process that a run does not use. Ray has no public switch for them.
    """
    for unused in ("start_monitor", "start_log_monitor", "start_api_server"):
        setattr(ray._private.node.Node, unused, lambda self, **how: None)
    ray._private.ray_constants.SETUP_WORKER_FILENAME = warm.__file__


def _require_token() -> None:
    """Make the Ray that starts next require a token of its own, which only this user can read.

    By default Ray keeps one token for all, in the home folder, which may not be writable.
    """
    path = scratch.folder() / "ray-token"
    if not path.exists():  # Ray reads it once in a process
        path.touch(0o600)
        path.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    os.environ.pop("RAY_AUTH_MODE", None)  # without it, Ray requires a token and sets it again


def _session_folder() -> str | None:
    """Return the folder of sockets and logs of our Ray. Ray has no public name for it."""
    node = getattr(ray._private.worker.global_worker, "node", None)
    return node.get_session_dir_path() if node is not None else None


def stderr_file() -> Path | None:
    """Return the file to which Ray writes the stderr of this actor; None outside of one. Ray has no public name for it."""
    file = ray._private.worker.global_worker.get_err_file_path()
    return Path(file) if file else None


# -- results of actors -------------------------------------------------------------------------------------------------

Actor = Any
"""Ray's handle of an actor, which Ray does not type."""
Reference = Any
"""Ray's reference to the result of an actor's method."""

POLL_S = 0.2
"""Interval at which the driver polls its processes."""


def result(reference: Reference, name: str) -> Any:
    """Return the result of an actor's method. Blocks until the method has ended.

    Args:
        name: of the process; the message of a loss begins with it.
    Raises:
        ProcessLost: the process died, or lost a process that did; a replacement may succeed.
        AsyncGRPOError: the process reported an error that a replacement would meet, too.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        while isinstance(cause, BaseExceptionGroup):  # tasks of a generator: the first one has the cause
            cause = cause.exceptions[0]
        if isinstance(cause, AsyncGRPOError) and not isinstance(cause, (WireError, WeightsError)):
            raise cause from None
        lines = (str(cause).strip() or repr(cause)).splitlines()
        reason = lines[0] if lines[0].startswith("CUDA error") else lines[-1]  # torch's advice on debugging follows
        loss = ProcessLost(f"{name}: {reason[:300]}")
        loss.is_error = True
        raise loss from error
    except ray.exceptions.RayActorError as error:
        loss = ProcessLost(f"{name}: {_failed_start(error) or 'its process died'}")
        loss.is_error = error.actor_init_failed
        raise loss from error
    except ray.exceptions.RayError as error:  # as when Ray kills processes because the memory of their machine is short
        text = str(error).strip() or repr(error)
        reason = re.sub(r", ID: \w+", "", text.splitlines()[0][:300])
        raise ProcessLost(f"{name}: {reason}") from error


def _failed_start(error: ray.exceptions.RayActorError) -> str:
    """Return why and where an actor could not be created, as when asyncgrpo is not installed there; else empty."""
    if not error.actor_init_failed:
        return ""
    address = re.search(r"\bip=([^,)]+)", str(error))
    return f"it cannot start on {address[1] if address else 'its node'}: {str(error).strip().splitlines()[-1][:300]}"


def results(references: dict[str, Reference], while_waiting: Callable[[], None]) -> list[Any]:
    """Return the results of several methods in order. Raises as `result` does, as soon as one fails.

    Args:
        while_waiting: called a few times a second.
    """
    waiting = dict(references)
    while waiting:
        ended, _ = ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=POLL_S)
        for name in [name for name, reference in waiting.items() if reference in ended]:
            result(waiting.pop(name), name)
        while_waiting()
    return [result(reference, name) for name, reference in references.items()]


def ended_of(references: Iterable[Reference]) -> list[Reference]:
    """Return those whose method has returned or failed. Ray takes about as long for one as for hundreds."""
    asked = list(references)
    return ray.wait(asked, num_returns=len(asked), timeout=0)[0] if asked else []


# -- GPUs for each role ------------------------------------------------------------------------------------------------

RESERVE_TIMEOUT_S = 60.0
"""Time for Ray to reserve the GPUs of a run."""
NO_PLACE_S = 60.0
"""Time after which a process that Ray has not started is reported as waiting for resources. A start takes seconds."""


def decide_device(config: Config) -> Config:
    """Return `config` with `learner.device: auto` decided by Ray's GPUs, once for all processes.

    The driver's node may have no GPU where the learner's has one.
    """
    if config.learner.device != "auto":
        return config
    return changed(config, {"learner.device": "cuda" if cluster_gpus() else "cpu"})


def cluster_gpus() -> int:
    """Return the GPUs of the cluster, those of other jobs included. 0 without a session."""
    return int(ray.cluster_resources().get("GPU", 0)) if ray.is_initialized() else 0


def gpus_wanted(config: Config, *, learner_on_gpu: bool) -> int:
    generators = config.generators
    on_gpus = (config.learner.ranks * learner_on_gpu, generators.gpus_each * generators.count)
    return (max(on_gpus) if config.cluster.share_gpu else sum(on_gpus)) + config.teacher_gpus


def check_gpus(config: Config, there: int, *, learner_on_gpu: bool) -> None:
    """Raise ConfigError if a run needs more GPUs than there are."""
    wanted = gpus_wanted(config, learner_on_gpu=learner_on_gpu)
    if there >= wanted:
        return
    hint = "lower one of them" if there else "without a GPU use --n-gpus 0 (generators.gpus_each=0)"
    generators, on_cpu = config.generators, "" if learner_on_gpu else " on the CPU"
    parts = f"learner.ranks {config.learner.ranks}{on_cpu}, generators.count {generators.count} x generators.gpus_each"
    parts += f" {generators.gpus_each}{', shared' if config.cluster.share_gpu else ''}"
    if config.teacher_gpus:
        parts += f", {len(config.teacher.own)} x teacher.gpus_each {config.teacher_gpus_each}"
    raise ConfigError(f"this run needs {wanted} GPU{'s' * (wanted > 1)} ({parts}), the cluster has {there}; {hint}")


class Placement:
    """The placement group of a run: one bundle per learner rank, then one per generator, then one per teacher.

    A shared GPU is one bundle, of which learner and generator take half each. Ray does not divide its memory.
    """

    def __init__(self, config: Config, *, learner_on_gpu: bool) -> None:
        """Reserve all GPUs and custom resources at once. Raises ConfigError if the cluster has too few."""
        count, ranks, half = config.generators.count, config.learner.ranks, 0.5 if config.cluster.share_gpu else 1.0
        self._learner = _needs(half * learner_on_gpu, config.learner.ray_resources)
        self._generator = _needs(half * config.generators.gpus_each, config.generators.ray_resources)
        self._teacher = _needs(config.teacher_gpus_each, {})
        self._first_generator = 0 if config.cluster.share_gpu else ranks
        self._first_teacher = self._first_generator + count
        self._stays_here = is_loopback(config.cluster.bind)
        self._count = count
        self._group: PlacementGroup | None = None
        self._added: dict[int, PlacementGroup] = {}  # bundles of generators beyond `generators.count`
        wanted = gpus_wanted(config, learner_on_gpu=learner_on_gpu)
        if not (wanted or config.learner.ray_resources or config.generators.ray_resources):
            return
        check_gpus(config, cluster_gpus(), learner_on_gpu=learner_on_gpu)
        bundles = [self._learner] * ranks + [self._generator] * count
        if config.cluster.share_gpu:
            bundles = [dict(Counter(self._learner) + Counter(self._generator)) | {"GPU": 1.0}]
        bundles += [self._teacher] * len(config.teacher.own)
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(RESERVE_TIMEOUT_S):
            teachers = len(config.teacher.own)
            taught = f", {teachers} teachers (each {_in_words(self._teacher)})" if teachers else ""
            raise ConfigError(
                f"Ray found no resources within {RESERVE_TIMEOUT_S:.0f} s for learner.ranks {ranks} "
                f"(each {_in_words(self._learner)}){taught} and generators.count {count} "
                f"(each {_in_words(self._generator)}); no node has them, or other jobs hold them"
            )

    @property
    def addresses(self) -> set[str]:
        """Addresses of the driver's node and of the nodes with bundles of this run."""
        nodes = {ray.get_runtime_context().get_node_id()}
        if self._group is not None:
            nodes |= set(placement_group_table(self._group)["bundles_to_node_id"].values())
        return {node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] in nodes}

    def learner(self, rank: int) -> dict[str, Any]:
        return self._options(self._group, rank, self._learner)

    def generator(self, index: int) -> dict[str, Any]:
        """Return the Ray options of a generator. One beyond `generators.count` gets its own bundle when Ray has resources."""
        if self._group is None or index < self._count:
            return self._options(self._group, self._first_generator + index, self._generator)
        if index not in self._added:
            self._added[index] = placement_group([self._generator])
        return self._options(self._added[index], 0, self._generator)

    def teacher(self, index: int) -> dict[str, Any]:
        return self._options(self._group, self._first_teacher + index, self._teacher)

    def release_generator(self, index: int) -> None:
        """Release the bundle of a generator beyond `generators.count`; the others keep theirs for the whole run."""
        if (group := self._added.pop(index, None)) is not None:
            remove_placement_group(group)

    def here(self) -> dict[str, Any]:
        """Return the Ray options of the buffer, which runs on the driver's node and so does not depend on another one."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        return {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}

    def waits(self, name: str, seconds: float) -> str:
        """Return a sentence: this process has not started for `seconds`, and the resources that it waits for."""
        of_role = {"learner": self._learner, "teacher": self._teacher}
        needs = _in_words(of_role.get(name.partition("-")[0], self._generator))
        place = f"a node with {needs} free" if self._group is not None and name != "buffer" else "a node"
        return f"{name} has not started for {seconds:.0f} s: it waits for {place}"

    def require_this_node(self) -> None:
        """Raise StalledError if Ray has lost the driver's node, without which the buffer cannot start."""
        here = ray.get_runtime_context().get_node_id()
        if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == here):
            raise StalledError("Ray's raylet on this machine has ended")

    def _options(self, group: PlacementGroup | None, bundle: int, needs: dict[str, float]) -> dict[str, Any]:
        if group is None:
            return self.here() if self._stays_here else {"num_cpus": 0, "max_restarts": 0}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        others = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
        counts = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0.0), "resources": others}
        return counts | {"max_restarts": 0, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Release all bundles."""
        for index in list(self._added):
            self.release_generator(index)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _needs(gpus: float, others: dict[str, float]) -> dict[str, float]:
    """Return the resources of one process, by Ray's names."""
    return {"CPU": 1.0} | ({"GPU": gpus} if gpus else {}) | others


def _in_words(needs: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in needs.items())
