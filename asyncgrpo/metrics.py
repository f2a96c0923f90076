"""Every Prometheus metric of asyncgrpo: its name, unit and help text. Only this module imports prometheus_client.

A metric is a module attribute with its exported name without the prefix: `metrics.groups_total` is exported as
`asyncgrpo_groups_total`. The gauges of a step are in tables by its fields. Each metric belongs to the roles that set it:
`serve("buffer")` exports the metrics of that role only, so that a process exports no zeros for the measurements of another
one. All label values are listed here and start at 0, so that a board can distinguish "none so far" from "not measured". Only
users' own names, such as parts of rewards, are not listed.

The end of the file has `waiting` (the current waits of a process), `LoopProgress` (the age of a loop's last iteration) and
`write_targets` (the scrape targets of a run).

Import this module before an SGLang engine with metrics is started: SGLang sets PROMETHEUS_MULTIPROC_DIR, and
prometheus_client reads it once, when it is imported.
"""

import contextlib
import hmac
import itertools
import json
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from wsgiref.simple_server import WSGIRequestHandler, make_server

import prometheus_client as prometheus
import psutil
from prometheus_client import Counter, Gauge, Histogram, Info
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from asyncgrpo import __version__
from asyncgrpo.host import descendants, replace_file

log = logging.getLogger(__name__)

# -- the metrics -------------------------------------------------------------------------------------------------------

Role = Literal["buffer", "generator", "learner", "rank", "teacher", "driver"]
"""`learner` is rank 0, which sets the learner's metrics. The other ranks are `rank`: they would export zeros."""
ROLES: tuple[Role, ...] = get_args(Role)

PREFIX = "asyncgrpo_"

_metrics_by_role: dict[Role, list[Any]] = {role: [] for role in ROLES}

SECONDS = (
    0.001,
    0.0015,
    *(float(f"{n}e{e}") for e in (-3, -2, -1, 0, 1) for n in (2, 3, 5, 7, 10)),
    *(150, 200, 300, 500, 1000, 2000, 3600),
)
"""Bucket bounds, seconds: from 1 ms to 100 s the middle of a bucket is within a quarter of the observed value."""
LAGS = (*range(33), 48, 64, 128)
"""Bucket bounds, optimizer steps: one bucket per lag up to 32, so that quantiles are exact for any bound on the lag."""
TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


Metric = TypeVar("Metric", bound=MetricWrapperBase)


def _declare(
    kind: Callable[..., Metric], roles: Sequence[Role], name: str, text: str, /, **labels: Sequence[str]
) -> Metric:
    """Declare a metric of some roles, and start each combination of its label values at 0.

    Args:
        labels: values by label; () if they are not known here. Then the code that sets them bounds their number.
    """
    metric = kind(PREFIX + name, text, tuple(labels), registry=None)
    for role in roles:
        _metrics_by_role[role].append(metric)
    if labels:
        for values in itertools.product(*labels.values()):
            metric.labels(*values)
    return metric


def _of(*roles: Role) -> tuple["partial[Counter]", "partial[Gauge]", "partial[Histogram]"]:
    """Return the functions that declare a counter, a gauge and a histogram of seconds for some roles."""
    seconds = partial(Histogram, buckets=SECONDS)
    return partial(_declare, Counter, roles), partial(_declare, Gauge, roles), partial(_declare, seconds, roles)


# fmt: off
# ---------------------------------------------------------------------------------------------------------- every role

_counter, _gauge, _histogram = _of(*ROLES)
build_info = _declare(Info, ROLES, "build", "Version of asyncgrpo that runs in this process.")

WAITS = ("generators", "batch", "checkpoint", "engine", "reward")
waiting_seconds = _gauge(
    "waiting_seconds", "Duration of this process's current wait for the thing named, seconds; 0 without one.", what=WAITS)

devices = _declare(
    Gauge, ("generator", "learner", "rank", "teacher"), "devices", "GPUs of this process; 1 for one that works on the CPU.")

# -------------------------------------------------------------------------------------------------------------- buffer

_counter, _gauge, _histogram = _of("buffer")
GROUP_OUTCOMES = (
    "leased", "accepted", "duplicate", "refused", "trained", "dropped_stale", "dropped_cancelled",
    "dropped_always_stale", "dropped_failed", "dropped_incomplete", "dropped_unscored", "dropped_lineage",
    "dropped_lease_timeout", "filtered_zero_signal", "requeued", "recovered", "dropped_superseded",
    "dropped_incompatible", "dropped_ahead", "dropped_damaged", "accepted_short", "dropped_poison",
    "dropped_quarantined", "dropped_too_long")
TOKEN_FATES = ("generated", "recovered", "trained", "filtered", "stale", "aborted", "failed", "duplicate", "unusable")
groups_total = _counter("groups_total", "Groups by outcome; one group has several of these.", outcome=GROUP_OUTCOMES)
buffer_groups = _gauge(
    "buffer_groups", "Groups that hold a slot: being generated (leased), waiting (ready), in the learner (taken).",
    state=("leased", "ready", "taken"))
buffer_slots = _gauge("buffer_slots", "Groups that may hold a slot: (max_lag + 1) * prompts_per_step.")
groups_wanted = _gauge("groups_wanted", "Groups that admission wants under way, leased or ready.")
generator_places = _gauge("generator_places", "Groups that the generators in touch with the buffer may work on at once.")
buffer_oldest_group_age_seconds = _gauge(
    "buffer_oldest_group_age_seconds", "Age of the group that has been in flight longest, since its present lease.")
group_lag_steps = _declare(
    partial(Histogram, buckets=LAGS), ("buffer",), "group_lag_steps",
    "Lag of a group when it is trained: optimizer steps since the weights of its oldest token.")
groups_at_bound_total = _counter("groups_at_bound_total", "Groups trained with a lag at their bound or above.")
group_ready_seconds = _histogram("group_ready_seconds", "Time that a group waits ready, until it goes to the learner.")
max_lag_steps = _gauge("max_lag_steps", "The bound on group_lag_steps that is in force.")
bias_distance = _gauge(
    "bias_distance", "Distance of trained from generated groups in one respect, 0 to 1; 0 before enough are settled.",
    of=("length", "reward"))
bias_threshold = _gauge("bias_threshold", "Distance above which the buffer warns.")
rejected_frames_total = _counter(
    "rejected_frames_total", "Messages that the buffer refused, by reason.",
    reason=("size", "decode", "schema", "not_finite", "vocabulary", "version", "lease", "checksum", "sender"))
tokens_total = _counter(
    "tokens_total", "Sampled tokens by fate: generated + recovered = the other fates + those in flight.", fate=TOKEN_FATES)
buffer_tokens = _gauge("buffer_tokens", "Sampled tokens in flight: of groups that wait for the learner or are in it.")
journal_blocked = _gauge("journal_blocked", "1 while the journal cannot be written: no group is acknowledged, no lease granted.")
paused = _gauge("paused", "1 while the run is paused by its operator: no lease is granted, no batch trained.")
journal_bytes_total = _counter("journal_bytes_total", "Bytes written to the journal of groups.")
journal_sync_seconds = _histogram("journal_sync_seconds", "Time to sync the journal to disk.")
completions_discarded_total = _counter(
    "completions_discarded_total", "Completions that are in no group, because they were cut at its deadline.", why=("censored",))
lease_deadline_seconds = _gauge(
    "lease_deadline_seconds", "Deadline of a lease granted now, unless it is the last attempt of its prompt.")
quarantined_prompts = _gauge(
    "quarantined_prompts", "Prompts excluded from leasing, because generators ended or failed with them.")
prompts_done = _gauge("prompts_done", "Prompts that are trained, filtered or dropped for good, over all epochs.")
curriculum_prompts = _gauge(
    "curriculum_prompts", "Prompts by how many completions were right in their last group, at the start of the epoch.",
    kind=("unknown", "hopeless", "mixed", "solved"))
curriculum_places = _gauge(
    "curriculum_places", "Places of these prompts in the epoch.", kind=("unknown", "hopeless", "mixed", "solved"))
epoch = _gauge("epoch", "Passes over the training file that are complete.")

# ----------------------------------------------------------------------------------------------------------- generator

_counter, _gauge, _histogram = _of("generator")
generator_info = _declare(Info, ("generator",), "generator", "Inference engine of this generator.")
generator_policy_version = _gauge(
    "generator_policy_version", "Policy version (optimizer steps) that samples the next token here.")
generator_seconds_total = _counter(
    "generator_seconds_total",
    "Wall time of this generator: changes of weights, else at least one completion sampled, else only scored, else idle.",
    activity=("generate", "reward", "weights", "idle"))
completion_seconds_total = _counter(
    "completion_seconds_total", "Time of all completions sampled or scored here; its rate is how many at once.",
    activity=("generate", "reward"))
engine_completions = _gauge(
    "engine_completions", "Completions in the engine: sampled now (running), or without a place or room for it (waiting).",
    state=("running", "waiting"))
engine_places = _gauge("engine_places", "Completions that the engine can sample at once.")
kv_use_ratio = _gauge(
    "kv_use_ratio", "Share of the engine's memory for keys and values that completions hold; NaN: it keeps none.")
groups_in_flight = _gauge("groups_in_flight", "Groups that this generator works on now.")
tokens_generated_total = _counter("tokens_generated_total", "Tokens sampled, whatever their fate.")
completions_total = _counter(
    "completions_total", "Completions completed, by finish reason.", finish_reason=("stop", "length", "abort"))
completion_length_tokens = _declare(
    partial(Histogram, buckets=TOKENS), ("generator",), "completion_length_tokens", "Sampled tokens of a completion.")
generate_seconds = _histogram("generate_seconds", "Time from a group's lease to its last completion.")
reward_seconds = _histogram("reward_seconds", "Time to score one completion.")
reward_wait_seconds = _histogram(
    "reward_wait_seconds", "Time that a completion waits for a reward worker, or for a place at a service, before it is scored.")
reward_workers = _gauge("reward_workers", "Reward worker processes of this generator.")
rewards_paused = _gauge("rewards_paused", "1 while every reward call fails: only probes are made, and no lease is granted.")
reward_failures_total = _counter(
    "reward_failures_total", "Reward calls without a score, and aborted completions, by failure.",
    failure=("timeout", "crash", "exception", "not_finite", "too_large", "bad_type", "unknown_source",
        "not_applicable", "sandbox", "judge", "no_score", "model", "teacher", "environment", "aborted"))
teacher_seconds = _histogram("teacher_seconds", "Time of a served teacher for one completion, the queue for its places included.")
teacher_tokens_total = _counter(
    "teacher_tokens_total", "Sampled tokens sent to a served teacher, by outcome.", outcome=("scored", "failed"))

# ------------------------------------------------------------------------------------------------------------- learner

_counter, _gauge, _histogram = _of("learner")
learner_policy_version = _gauge("learner_policy_version", "Policy version (optimizer steps) that the learner published last.")
last_step_timestamp_seconds = _gauge(
    "last_step_timestamp_seconds", "Unix time of the end of the last step; before the first, of the learner's start.")
step_seconds = _histogram("step_seconds", "Wall time of one step, waiting included.")
LEARNER_ACTIVITIES = ("wait_data", "forward_backward", "optimizer", "publish", "checkpoint", "eval", "other")
learner_seconds_total = _counter(
    "learner_seconds_total", "Wall time of the learner's rank 0 by activity.", activity=LEARNER_ACTIVITIES)
tokens_trained_total = _counter("tokens_trained_total", "Sampled tokens that an optimizer step has used.")

zero_signal_groups_total = _counter(
    "zero_signal_groups_total", "Trained groups without signal: their completions all had one reward.")

_OF_STEPS = {
    "step": ("learner_step", "Optimizer steps taken in this run, those before a resume included."),
    "reward_mean": ("reward_mean", "Mean reward of the completions in the last step."),
    "reward_std": ("reward_std", "Standard deviation of the reward over the completions of the last step."),
    "completion_length_mean": ("completion_length_mean", "Mean sampled tokens of a completion in the last step."),
    "turns_mean": ("turns_mean", "Mean turns of a completion in the last step, where an environment replies."),
    "loss": ("loss", "Loss of the last step."),
    "grad_norm": ("grad_norm", "Norm of the gradient in the last step, before clipping."),
    "lr": ("learning_rate", "Learning rate of the last step."),
    "signal_share": ("signal_ratio", "Share with signal of the groups that are solved or have one; it scales the learning rate."),
    "entropy": ("entropy", "Mean entropy of the policy on trained tokens, nats."),
    "clip_ratio": ("clip_ratio", "Share of trained tokens whose ratio was clipped, 0 to 1."),
    "kl_reference": ("kl_reference", "Mean KL to the reference or the teacher on trained tokens, nats; 0 without one."),
    "importance_mean": ("importance_weight_mean", "Mean ratio proximal / behaviour policy on trained tokens, before the cap."),
    "importance_capped": ("importance_capped_ratio", "Share of trained tokens whose importance weight was capped, 0 to 1."),
    "logprob_gap_mean": ("logprob_gap_mean", "Mean |learner - engine| log-prob, nats, on tokens of the current weights."),
    "logprob_gap_max": ("logprob_gap_max", "Largest |learner - engine| log-prob, nats, on tokens of the current weights."),
    "ratio_max": ("importance_ratio_max", "Largest ratio proximal / behaviour policy of a trained token."),
    "ess_sequence": ("effective_sample_share", "Effective share of the step's completions, by their whole ratios, 0 to 1."),
    "kl_k3": ("behaviour_kl", "Mean KL of the behaviour to the proximal policy (k3), nats."),
    "rejected_dropped": ("rejected_ratio", "Share of trained tokens that corrections rejected, 0 to 1."),
}
STEP_GAUGES = {field: _gauge(name, text) for field, (name, text) in _OF_STEPS.items()}
"""Gauges by the field of a step, or of its diagnostics."""
MAX_REWARD_PARTS = 32
_OF_PARTS = {
    "reward_parts": ("reward_part_mean", "Mean of each named part of the rewards in the last step that had it; at most 32."),
    "reward_parts_std": ("reward_part_std", "Standard deviation of each named part of the rewards in the last step that had it."),
}
PART_GAUGES = {field: _gauge(name, text, part=()) for field, (name, text) in _OF_PARTS.items()}
"""Gauges of the named parts of rewards by the field of a step."""
MAX_SOURCES = 16
_OF_SOURCES = {
    "reward_mean": ("source_reward_mean", "Mean reward of each data_source in the last step that had it; at most 16."),
    "success_share": ("source_success_ratio", "Share of the completions of each data_source with at least reward.success."),
    "zero_signal_share": ("source_zero_signal_ratio", "Share of the trained groups of each data_source without signal."),
    "completion_length_mean": ("source_completion_length_mean", "Mean sampled tokens of a completion of each data_source."),
}
SOURCE_GAUGES = {field: _gauge(name, text, source=()) for field, (name, text) in _OF_SOURCES.items()}
"""Gauges of a data_source by the field of its numbers in a step."""

eval_reward_mean = _gauge("eval_reward_mean", "Mean reward of the last evaluation; NaN before the first.")
eval_suite = _gauge("eval_suite", "Number of the last evaluation of a suite: reward, pass@k or maj@n.", suite=(), number=())

weight_sync_total = _counter(
    "weight_sync_total",
    "Publications of weights: ok, after an attempt that failed (repeated), or without some generators (degraded).",
    outcome=("ok", "repeated", "degraded"))
weight_sync_seconds = _histogram("weight_sync_seconds", "Time of one publication, until every generator has replied.")
weight_sync_bytes_total = _counter(
    "weight_sync_bytes_total", "Weights or deltas sent to machines, or read beside the learner, bytes.")
generators_in_sync = _gauge("generators_in_sync", "Generators that proved, by checksum, to hold one of the last two versions.")
sync_gap_mean = _gauge(
    "sync_gap_mean",
    "Mean |learner - engine| log-prob of the check sequences under the last version checked, nats; the worst engine.")
sync_gap_max = _gauge("sync_gap_max", "The largest of these differences of one token, nats.")
sync_gap_limit = _gauge("sync_gap_limit", "The mean gap above which an engine computes with other weights, nats.")

checkpoint_seconds = _histogram("checkpoint_seconds", "Time to write one checkpoint.")
checkpoint_last_success_timestamp_seconds = _gauge(
    "checkpoint_last_success_timestamp_seconds",
    "Unix time of the last complete checkpoint; before the first, of the learner's start.")

# -------------------------------------------------------------------------------------------------------------- driver

_counter, _gauge, _histogram = _of("driver")
generators_expected = _gauge("generators_expected", "Number of generators that the run should have: generators.count.")
page_info = _declare(Info, ("driver",), "page", "Address of the run's web page, without its token.")
actor_restarts_total = _counter(
    "actor_restarts_total", "Restarts of processes that ended or were killed, by role.",
    actor=("buffer", "generator", "learner", "teacher"))
restarts_spent_ratio = _gauge(
    "restarts_spent_ratio",
    "Share of the restarts of an hour that are spent; at 1 the next one ends the run. Of generators and teachers: the worst.",
    of=("core", "generator", "teacher"))
advice_gain_ratio = _gauge(
    "advice_gain_ratio", "Share by which a step would be shorter if the advice on this bottleneck were followed, 0 to 1.",
    bottleneck=("health", "signal", "generators", "learner", "reward", "bound", "lengths", "weights", "cores", "none"))
disk_free_bytes = _gauge("disk_free_bytes", "Bytes that this user may still write to the disk of the run folder.")
# fmt: on


# -- the export of a process -------------------------------------------------------------------------------------------


def serve(*roles: Role, host: str = "127.0.0.1", token: str | None = None) -> int:
    """Export the metrics of `roles` at http://host:port/metrics from a daemon thread. Call it once per process.

    Args:
        roles: the roles of this process, usually one.
        host: loopback, unless the run spans several nodes.
        token: required as `Authorization: Bearer <token>`; None: no authentication.
    Returns:
        The port, a free one.
    """
    if "learner" in roles:
        last_step_timestamp_seconds.set_to_current_time()
        checkpoint_last_success_timestamp_seconds.set_to_current_time()
        eval_reward_mean.set(float("nan"))
    app = prometheus.make_wsgi_app(registry(*roles))
    server = make_server(host, 0, app if token is None else _only_with(token, app), ThreadingWSGIServer, _Silent)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.server_port


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes are frequent."""


def _only_with(token: str, app: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `app` so that requests without the token get 401."""
    expected = f"Bearer {token}".encode()

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), expected):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
        return [b""]

    return guarded


def registry(*roles: Role) -> prometheus.CollectorRegistry:
    """Return a registry of the metrics of `roles`, without the `_created` series of counters."""
    prometheus.disable_created_metrics()
    build_info.info({"version": __version__})
    collected = prometheus.CollectorRegistry()
    for metric in dict.fromkeys(metric for role in roles for metric in _metrics_by_role[role]):
        collected.register(metric)
    collected.register(_Processes())
    return collected


class _Processes(Collector):
    """Memory and open files of this process and of its descendants: engines, reward workers, Ray.

    They are read at each scrape. The descendants of the driver are the whole run on its node.
    """

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ("of",)
        resident = GaugeMetricFamily(PREFIX + "resident_bytes", "Memory that processes hold, bytes.", labels=labels)
        files = GaugeMetricFamily(PREFIX + "open_files", "Open file descriptors of processes.", labels=labels)
        count = GaugeMetricFamily(PREFIX + "processes", "Number of processes.", labels=labels)
        this = os.getpid()
        for of, processes in (("self", [this]), ("below", descendants(this))):
            found = [sizes for pid in processes if (sizes := _sizes(pid)) is not None]
            resident.add_metric([of], sum(memory for memory, _ in found))
            files.add_metric([of], sum(opened for _, opened in found))
            count.add_metric([of], len(found))
        yield from (resident, files, count)


def _sizes(pid: int) -> tuple[int, int] | None:
    """Return memory and open files of a process; None if it has ended or belongs to another user."""
    try:
        process = psutil.Process(pid)
        return process.memory_info().rss, process.num_fds()
    except psutil.Error:
        return None


# -- the learner's metrics of a step -----------------------------------------------------------------------------------

_reward_parts: set[str] = set()
"""Reward parts with series, limited in number because a reward may return new names in every step."""
_sources: set[str] = set()
"""Sources with series."""


def observe_step(step: Mapping[str, Any]) -> None:
    """Set the learner's metrics from a `step` event (its fields are in `recording/events.py`), so that both agree.

    A field that is absent or None leaves its gauge unchanged. `seconds` feeds `learner_seconds_total` and `step_seconds`.
    """
    values = {**(step.get("diagnostics") or {}), **step}
    for field, gauge in STEP_GAUGES.items():
        if values.get(field) is not None:
            gauge.set(float(values[field]))
    for field, gauge in PART_GAUGES.items():
        for name, value in (step.get(field) or {}).items():
            if name in _reward_parts or len(_reward_parts) < MAX_REWARD_PARTS:
                _reward_parts.add(name)
                gauge.labels(part=name).set(value)
    for source, numbers in (step.get("sources") or {}).items():
        if source in _sources or len(_sources) < MAX_SOURCES:
            _sources.add(source)
            for field, gauge in SOURCE_GAUGES.items():
                if numbers.get(field) is not None:
                    gauge.labels(source=source).set(numbers[field])
    seconds: Mapping[str, float] = step.get("seconds") or {}
    for activity, spent in seconds.items():
        learner_seconds_total.labels(activity=activity).inc(max(0.0, spent))
    step_seconds.observe(sum(seconds.values()))
    tokens_trained_total.inc(step.get("tokens_trained") or 0)
    zero_signal_groups_total.inc(step.get("zero_signal_groups") or 0)
    last_step_timestamp_seconds.set_to_current_time()


# -- current waits -----------------------------------------------------------------------------------------------------


_lock = threading.Lock()
_started: dict[str, list[float]] = {}
"""Start times of the current waits. The scrape thread reads them, so a hang is visible at once."""


def waits() -> dict[str, float]:
    """Return the duration of the longest current wait of this process by the names of `WAITS`, seconds."""
    with _lock:
        now = time.monotonic()
        return {what: now - min(started) for what, started in _started.items() if started}


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Count the block as a wait in `waiting_seconds{what=...}`. `what` is one of WAITS. Waits may nest and overlap."""
    with _lock:
        if what not in _started:
            _started[what] = []
            waiting_seconds.labels(what=what).set_function(lambda: waits().get(what, 0.0))
        _started[what].append(started := time.monotonic())
    try:
        yield
    finally:
        with _lock:
            _started[what].remove(started)


# -- liveness of loops -------------------------------------------------------------------------------------------------


class LoopProgress:
    """Time of the last iteration of a service's loop. Any thread may read it."""

    def __init__(self) -> None:
        self._ticked_s: float | None = None

    def tick(self) -> None:
        self._ticked_s = time.monotonic()

    @property
    def age_s(self) -> float | None:
        """Seconds since the last tick; None before the first."""
        return None if self._ticked_s is None else time.monotonic() - self._ticked_s


# -- scrape targets ----------------------------------------------------------------------------------------------------


MISSED: Mapping[str, tuple[str, int]] = {"driver": ("127.0.0.1", 0)}
"""Targets of a failed or killed run: its driver at a port without a listener. Without them Prometheus could not distinguish
it from a run that ended in order, and no alert would fire."""
MISSED_FOR_S = 86400.0
"""Time for which the targets of a failed run are kept, unless it is started again."""


def targets_path(run_dir: Path) -> Path:
    """Return the path of the file with the targets of this run."""
    run_dir = Path(run_dir).absolute()
    return run_dir.parent / "prometheus" / f"{run_dir.name}.json"


def write_targets(run_dir: Path, targets: Mapping[str, tuple[str, int]]) -> None:
    """Replace the file of the run's targets atomically, or remove it if there are none. A failure is logged.

    Args:
        run_dir: run folder; its name becomes the label `run`.
        targets: `role` or `role-rank` to (host, port); role and rank become labels. Empty: the run ended in order. The label
            `instance` is made of role and rank without the port, so that a restarted process continues its series.
    """
    path = targets_path(run_dir)
    try:
        if targets:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, _as_text(path.stem, targets).encode())
        else:
            path.unlink(missing_ok=True)
    except OSError as error:  # on a full disk a run goes on, and its processes restart
        log.warning("%s cannot be written (%s): Prometheus does not follow its processes", path, error.strerror)


def _as_text(run: str, targets: Mapping[str, tuple[str, int]]) -> str:
    entries = []
    for who, (host, port) in sorted(targets.items()):
        role, _, rank = who.partition("-")
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        labels = {"run": run, "role": role, "rank": rank or "0", "instance": f"{role}-{rank or 0}"}
        entries.append({"targets": [address], "labels": labels})
    return json.dumps(entries, indent=1) + "\n"


def token_beside(run_dir: Path) -> str:
    """Return the scrape token of all runs in the same parent folder; create it if missing, readable by this user only."""
    path = targets_path(run_dir).with_name("token")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as made:  # its mode is 0600
        made.write(secrets.token_urlsafe(32))
        made.flush()
        with contextlib.suppress(FileExistsError):
            os.link(made.name, path)
    return path.read_text(encoding="utf-8").strip()


def retire_targets_beside(run_dir: Path, is_over: Callable[[Path], bool]) -> None:
    """Replace the targets of killed runs in the same parent folder by `MISSED`, and remove them after `MISSED_FOR_S`.

    Their ports may belong to processes of other runs by now.

    Args:
        is_over: returns True for a run folder whose run is certainly over.
    """
    own = targets_path(run_dir)
    for path in own.parent.glob("*.json"):
        other = own.parent.parent / path.stem
        if path == own or not is_over(other):
            continue
        with contextlib.suppress(FileNotFoundError):  # another run that starts has removed it
            if path.read_text(encoding="utf-8") != _as_text(path.stem, MISSED):
                write_targets(other, MISSED)
            elif time.time() - path.stat().st_mtime > MISSED_FOR_S:
                path.unlink()
