"""The driver of a run: start every process, watch and restart them, and end them.

    within one Ray session:  core: buffer and learner ranks │ fleet: generators │ teachers │ watch: the heartbeats of all

Until the learner is done, the driver restarts generators that exit or hang. It restarts a lost core from the last checkpoint
and the buffer's journal; the generators live on and connect to the new core.

The driver holds no data. On SIGTERM, Ctrl-C or SIGHUP it drains the run: leases stop, the learner finishes its step and writes a
checkpoint, engines close.

`in_generator` runs work in one process, placed as the first generator of a run would be, so that the work can be measured.
"""

import logging
import math
import os
import secrets
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import ray

from asyncgrpo import liveness, logs, metrics
from asyncgrpo.cluster.chaos import Chaos, Plan
from asyncgrpo.cluster.folder import RunFolder, is_abandoned
from asyncgrpo.cluster.heartbeat import Watch
from asyncgrpo.cluster.nodes import (
    check_bind_reaches,
    environment_to_share,
    host_of,
    set_environment,
    with_absolute_paths,
)
from asyncgrpo.cluster.processes import Budget, Core, Fleet, Teachers
from asyncgrpo.cluster.ray_session import POLL_S, Placement, cluster_gpus, decide_device, ray_session, result
from asyncgrpo.cluster.steering import Steering
from asyncgrpo.cluster.wiring import Setup, prepare_environment, uses_cuda
from asyncgrpo.config.schema import Config
from asyncgrpo.control.api import serving
from asyncgrpo.errors import AsyncGRPOError, CheckpointError, ProcessLost, StalledError
from asyncgrpo.learner.checkpoints import step_of
from asyncgrpo.metrics import MISSED, retire_targets_beside, token_beside, write_targets
from asyncgrpo.recording.events import EventLog
from asyncgrpo.wire.sockets import Keys, is_loopback

log = logging.getLogger(__name__)

SHUTDOWN_S = 20.0
"""Time for engines to close after the learner has ended."""
LAST_CHECKPOINT_S = 600.0
"""Time for the last step and checkpoint of a run that fails."""
TOGETHER_S = 0.1
"""Time within which signals are one: `timeout` signals its command, and then the group of the command."""
STACKS_S = 1.5
"""Time for processes to write their stacks before they are killed."""
FULL_BYTES, SPACE_BYTES = 2**20, 2**26
"""Free bytes of a disk that counts as full, and of one that no longer does."""


class Run:
    """One run in one folder. `execute` blocks until it is over."""

    def __init__(self, config: Config, folder: RunFolder, sizes: str, chaos: Plan | None = None) -> None:
        """
        Args:
            folder: claimed by this process.
            sizes: sizes of the configuration as text, for the screen.
        """
        self._plan = chaos
        self._given = config
        self._config = with_absolute_paths(config)
        self._folder = folder
        self._sizes = sizes
        self._asked_to_stop = 0
        self._stopped_s = -math.inf
        self._is_full = False
        self._report: Callable[[str], None] = lambda text: None
        self._chaos: Chaos | None = None
        self._targets: dict[str, tuple[str, int]] = {}
        self._events = EventLog(folder.path / "metrics.jsonl")

    def execute(self, report: Callable[[str], None] = lambda text: None) -> str:
        """Run to the end. Returns `done` or `drained`.

        Args:
            report: called with messages about the start, for the screen.
        Raises:
            AsyncGRPOError: the reason why the run failed, one sentence.
        """
        self._report = report
        logs.setup("driver", None, self._folder.path)
        retire_targets_beside(self._folder.path, is_abandoned)
        config, before = self._config, self._folder.checkpoint()
        with ray_session(config):
            self._config = config = decide_device(config)
            # Ours comes after the SIGTERM handler that Ray sets, and after the wait for GPUs, which a signal ends at once.
            placement = self._placement = Placement(config, learner_on_gpu=uses_cuda(config))
            with closing(placement), _on_signals(self._stop, self._ask_to_stop):
                return self._supervise(before)

    def _supervise(self, before: Path | None) -> str:
        """Run to the end, and write the `end` event and the targets for Prometheus. Returns `done` or `drained`.

        Args:
            before: the newest checkpoint of earlier starts.
        """
        targets = MISSED  # unless the run ends in order
        try:
            check_bind_reaches(self._config, self._placement.addresses)
            status = self._start_services()
            targets = {}
        except KeyboardInterrupt:
            targets = {}
            if self._asked_to_stop > 1:
                raise
            status = "drained"  # during the start of a core: nothing was trained since the last checkpoint
            self._events.write("end", status=status, step=step_of(self._folder.checkpoint()))
        except AsyncGRPOError as error:
            reason, step = str(error), step_of(self._folder.checkpoint())
            if self._folder.checkpoint() not in (before, None):
                reason += f"; checkpoint of step {step} written; the same command goes on from there"
            # The command prints the sentence; the log has the traceback.
            log.info("run failed: %s", reason, exc_info=error.__cause__)
            self._events.write("end", status="failed", step=step, reason=reason)
            raise AsyncGRPOError(reason) from error
        finally:
            write_targets(self._folder.path, targets)
        return status

    def _start_services(self) -> str:
        """Start watch, fleet, steering and admin API, and run cores until training has ended."""
        config, placement, keys = self._config, self._placement, Keys.make()
        host = host_of(config)
        metrics_token = self._serve_metrics(host)
        with ExitStack() as ends:
            watch = self._watch = Watch(config.cluster.bind, keys, host=host)
            ends.callback(watch.close)
            setup = Setup(
                config=config,
                run_dir=self._folder.path,
                lineage=self._folder.next_lineage(),
                checkpoint=self._folder.checkpoint(),
                keys=keys,
                metrics_token=metrics_token,
                watch_endpoint=watch.endpoint,
                teacher_key=secrets.token_urlsafe(32),
                start_with=config.generators.count,
            )
            supervision, export = (placement, watch, self._events), self._export_from
            self._teachers = Teachers(setup, *supervision, count=len(config.teacher.own), on_address=export)
            ends.callback(self._teachers.end)
            self._teachers.start()
            setup = replace(setup, teacher_urls=self._teachers.urls)
            fleet = self._fleet = Fleet(setup, *supervision, count=config.generators.count, on_address=export)
            if self._plan is not None:
                self._chaos = Chaos(self._plan, watch, fleet, self._events)
                ends.callback(self._chaos.end)
            of_run, gpus = (config, self._given, self._folder, self._events), cluster_gpus()
            steering = self._steering = Steering(*of_run, fleet, watch, drain=self._ask_to_stop, gpus=gpus)
            ends.callback(steering.end)
            url = ends.enter_context(serving(steering, self._folder.path, config.control))
            if url is not None:
                metrics.page_info.info({"url": url})
                folder = shlex.quote(os.path.relpath(self._folder.path))
                self._report(f"watch it with `asyncgrpo top {folder}`, or in a browser: `asyncgrpo page {folder}`")
            self._report("the buffer, the learner and the engines are starting")
            return self._run_cores(setup)

    def _run_cores(self, setup: Setup) -> str:
        """Train with one core until it is lost, then with the next. Generators live on. Returns how training ended."""
        fleet, losses_in_a_row = self._fleet, 0
        budget = Budget("buffer and learner", setup.config.generators.restarts)
        metrics.restarts_spent_ratio.labels(of="core").set_function(lambda: budget.spent)
        while True:
            core = Core(setup, self._placement, self._watch, self._export_from)
            try:
                try:
                    return self._train(core)
                except ProcessLost as loss:
                    has_trained = (core.steps_done or 0) > core.first_step
                    losses_in_a_row = 0 if has_trained else losses_in_a_row + 1
                    # The process reported an error, and no core has ever worked: the next one would meet it, too.
                    is_fatal = loss.is_error and not has_trained and budget.count == 0
                    if self._asked_to_stop or is_fatal or losses_in_a_row >= liveness.FAILED_STARTS:
                        raise
                    self._record_loss(loss, budget.spend(str(loss)))
                except AsyncGRPOError as error:
                    self._save_last_steps(core, str(error))
                    raise
            except AsyncGRPOError as error:
                self._watch.dump_stacks(str(error))  # before the processes are killed
                time.sleep(STACKS_S)
                raise
            finally:
                fleet.leave()
                core.end()
            setup = replace(
                setup,
                config=self._steering.config,
                lineage=self._folder.next_lineage(),
                checkpoint=self._folder.checkpoint(),
                start_with=1 if fleet.is_up else fleet.wanted,
                reward_has_worked=setup.reward_has_worked or (core.steps_done or 0) > core.first_step,
            )

    def _serve_metrics(self, host: str) -> str | None:
        """Export the driver's metrics. Returns the token that every scrape must send; None on loopback, which needs none."""
        metrics.disk_free_bytes.set_function(lambda: shutil.disk_usage(self._folder.path).free)
        token = None if is_loopback(self._config.cluster.bind) else token_beside(self._folder.path)
        self._export_from("driver", (host, metrics.serve("driver", host=host, token=token)))
        return token

    def _train(self, core: Core) -> str:
        """Train with one core. Raises ProcessLost if another core may continue, another AsyncGRPOError if none can."""
        fleet, watch, chaos = self._fleet, self._watch, self._chaos

        def poll_processes() -> None:
            if not self._folder.is_held:
                raise CheckpointError(f"run.out {self._folder.path} was removed or moved while the run was active")
            self._report_full_disk()
            watch.listen()
            fleet.reconcile(may_restart=not self._asked_to_stop)
            self._teachers.reconcile(may_restart=not self._asked_to_stop)
            self._steering.reconcile(core if core.is_training else None, self._teachers.processes())

        def while_starting() -> None:
            poll_processes()
            if self._asked_to_stop:
                raise KeyboardInterrupt

        ready = core.start(while_starting)
        while not self._teachers.all_serve:
            while_starting()
            time.sleep(POLL_S)
        if recovered := ready.about["recovered"]:
            counts = ", ".join(f"{count} {what}" for what, count in sorted(recovered.items()))
            self._report(f"untrained groups of earlier starts: {counts}")
        self._steering.steps = ready.about["steps"]
        about = {"run": self._folder.path.name, "sizes": self._sizes, "gpus": cluster_gpus()}
        core.run(about | ready.about)
        fleet.work_for(core, core.endpoints if chaos is None else chaos.route(core.endpoints))
        is_draining = False
        while (status := core.status()) is None:
            poll_processes()
            if chaos is not None:
                chaos.reconcile(core, may_strike=not self._asked_to_stop)
            if self._asked_to_stop and not is_draining:
                is_draining = True
                self._steering.draining()
                core.drain("asked to stop")
                self._events.write("drain", reason="asked to stop")
            time.sleep(POLL_S)
        self._steering.has_trained()
        fleet.shut_down(SHUTDOWN_S)
        core.shut_down(SHUTDOWN_S)
        if status == "failed":
            raise ProcessLost("buffer: the process exited without reporting an error")
        return status

    def _report_full_disk(self) -> None:
        """Report that the disk of the run folder is full, once until space is free again. No event can be written then."""
        with suppress(OSError):
            free = shutil.disk_usage(self._folder.path).free
            was_full, self._is_full = self._is_full, free < (SPACE_BYTES if self._is_full else FULL_BYTES)
            if self._is_full and not was_full:
                self._report(f"the disk of {self._folder.path} is full: events, groups and checkpoints wait for space")

    def _save_last_steps(self, core: Core, reason: str) -> None:
        """Save the steps since the last checkpoint before the run fails, within `LAST_CHECKPOINT_S`. Failures are logged."""
        if not (core.can_save and self._folder.is_held):
            return
        log.warning("run failed (%s): the learner finishes its step and writes a checkpoint", reason)
        core.drain(reason, is_failure=True)
        within_s = min(LAST_CHECKPOINT_S, self._config.cluster.stall_timeout_s)
        deadline = time.monotonic() + within_s
        try:
            while core.status() is None:
                if time.monotonic() > deadline:
                    raise StalledError(f"the learner did not end within {within_s:.0f} s")
                self._watch.listen()
                self._fleet.reconcile(may_restart=False)
                time.sleep(POLL_S)
        except AsyncGRPOError as trouble:
            log.error("no last checkpoint: %s", trouble)

    def _record_loss(self, loss: ProcessLost, count: int) -> None:
        actor, _, reason = str(loss).partition(": ")
        text = "%s is lost (%s); buffer and learner restart from the last checkpoint"
        log.warning(text, actor, reason, exc_info=loss.__cause__ if loss.is_error else None)
        self._events.write("restart", actor=actor, reason=reason, count=count)
        metrics.actor_restarts_total.labels(actor=actor.partition("-")[0]).inc()

    def _export_from(self, name: str, address: tuple[str, int] | None) -> None:
        """Update the Prometheus target of a process; None removes it."""
        if address is None:
            self._targets.pop(name, None)
        else:
            self._targets[name] = address
        write_targets(self._folder.path, self._targets)

    def _ask_to_stop(self) -> None:
        """Drain the run by a command, or as its terminal closes. Repeated ones change nothing: shell and kernel send SIGHUP."""
        self._asked_to_stop = max(1, self._asked_to_stop)

    def _stop(self) -> None:
        """Handle a signal: the first drains the run, the second ends it at once."""
        if (now_s := time.monotonic()) - self._stopped_s < TOGETHER_S:
            return
        self._stopped_s = now_s
        self._asked_to_stop += 1
        if self._asked_to_stop > 1:
            raise KeyboardInterrupt


@contextmanager
def _on_signals(stop: Callable[[], None], hang_up: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGINT and SIGTERM inside the block, and `hang_up` on SIGHUP unless it is ignored, as under nohup."""
    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handlers[signal.SIGHUP] = hang_up
    before = {number: signal.signal(number, lambda *_, call=call: call()) for number, call in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- work without a run ------------------------------------------------------------------------------------------------

Found = TypeVar("Found")


class _Alone:
    """Actor that does one piece of work."""

    def __init__(self, environment: dict[str, str]) -> None:
        set_environment(environment)

    def work(self, work: Callable[[Config], Iterator[Found]], config: Config) -> Iterator[Found]:
        if not config.generators.gpus_each:
            os.environ["OMP_NUM_THREADS"] = "1"
        prepare_environment(config)
        yield from work(config)


def in_generator(config: Config, work: Callable[[Config], Iterator[Found]]) -> Iterator[Found]:
    """Yield the results of `work`, run in a process with the placement and GPUs of a run's first generator.

    Raises:
        AsyncGRPOError: the process could not be placed, or `work` raised it.
    """
    config = with_absolute_paths(config)
    with ray_session(config):
        config = decide_device(config)
        with closing(Placement(config, learner_on_gpu=uses_cuda(config))) as placement:
            actor = ray.remote(_Alone).options(**placement.generator(0)).remote(environment_to_share())
            try:
                for reference in actor.work.options(num_returns="streaming").remote(work, config):
                    yield result(reference, "generator-0")
            finally:
                ray.kill(actor)  # the session may outlive it
