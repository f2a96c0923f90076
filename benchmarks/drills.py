"""Drills of the alerts: faults in real runs, a real Prometheus with our thresholds, and how long each alert took.

    python -m benchmarks.drills --only judge starved tight slow late --keep DIR

A run of the demo (fake engine) for each story, all at a time. A story causes faults and undoes them, and says which alert
each must raise and within which time: what the rule waits for, two scrapes and two evaluations. One JSON line for each alert
that was raised, and one at the end with those that no story can raise in less than an hour.
"""

import argparse
import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from asyncgrpo.buffer.service import SILENT_AFTER_S
from benchmarks.measuring import show, where
from benchmarks.prometheus import EVALUATION_S, OURS, SCRAPE_S, Prometheus, contradictions
from benchmarks.trials import Fence

SLACK_S = 2 * SCRAPE_S + 2 * EVALUATION_S
"""What an alert may take beyond the time for which its condition has to last."""
START_WITHIN_S = 420.0
BETWEEN_STARTS_S = 15.0
LATE_S = 120.0
"""How much later than it should an alert is still waited for."""
CLEARS_WITHIN_S = 240.0
TICK_S = 0.5
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

JUDGE = """import os
import random
import time

HERE = {path!r}


def mode():
    return open(HERE).read()


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    now = mode()
    if now == "raise" or (now == "some" and random.random() < 0.3):
        raise ConnectionError("the judge is down")
    while mode() == "hang":
        time.sleep(0.5)
    if now == "slow":
        time.sleep(1.0)
    return 1.0 if now == "constant" else random.random()
"""

SMALL = [
    *("buffer.prompts_per_step=4", "algorithm.group_size=4", "sampling.max_tokens=8", "buffer.keep_journal=false"),
    *("generators.count=2", "generators.extra.seconds_per_token=0.05"),
    *("reward.function=judge.py", "run.eval_every=1000000", "run.checkpoint_every=1000", "weights.timeout_s=10"),
]


ROOM = {"RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 4, "room": 2})}
"""What Ray takes the machine to have: room for two generators, where a story says that each needs one."""

log = logging.getLogger(__name__)


class Gone(Exception):
    """The run, or what a story needs of it, is not there."""


@dataclass
class Run:
    """A run of the demo, and what its story has found."""

    name: str
    prometheus: Prometheus
    runs: Path
    settings: tuple[str, ...]
    deadline: float
    """Monotonic time at which its story breaks off."""
    fence: Fence = field(default_factory=lambda: Fence(ROOM))
    found: list[dict[str, Any]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again, and wait for its second step."""
        (self.fence.work / "judge.py").write_text(JUDGE.format(path=str(self.fence.work / "mode")))
        command = ["demo", "--engine", "fake", "--steps", "1000000", "--out", str(self.runs / self.name)]
        self.process = self.fence.start(*command, *SMALL, *self.settings)
        self.until(lambda: (self.value("asyncgrpo_learner_step") or 0) >= 2, START_WITHIN_S, "two steps")

    def judge(self, mode: str) -> None:
        """What the reward function does from now on."""
        path = self.fence.work / "mode"
        path.with_suffix(".new").write_text(mode)
        os.replace(path.with_suffix(".new"), path)

    def pid(self, name: str) -> int:
        """The process of the run that exports its metrics as `name`, `generator-1`."""
        targets = json.loads((self.runs / "prometheus" / f"{self.name}.json").read_text())
        (port,) = [
            int(entry["targets"][0].rpartition(":")[2])
            for entry in targets
            if f"{entry['labels']['role']}-{entry['labels']['rank']}" == name
        ]
        for process in self.fence.processes():
            with contextlib.suppress(psutil.Error):
                if any(c.laddr.port == port and c.status == "LISTEN" for c in process.net_connections()):
                    return process.pid
        raise Gone(f"no process of {self.name} listens where {name} should")

    def value(self, metric: str, **labels: str) -> float | None:
        """A metric of this run; the largest, if several processes have it. None: none has."""
        chosen = ", ".join(f'{label}="{value}"' for label, value in {"run": self.name, **labels}.items())
        return self.prometheus.value(f"max({metric}{{{chosen}}})")

    def until(self, is_so: Callable[[], bool], within_s: float, what: str) -> float:
        """Wait, and return how long it took. Raises Gone when it takes too long."""
        began = time.monotonic()
        while not is_so():
            if time.monotonic() > min(began + within_s, self.deadline):
                raise Gone(f"{self.name}: {what}: not within {within_s:.0f} s")
            time.sleep(TICK_S)
        return time.monotonic() - began

    def scale(self, generators: int) -> None:
        """What its operator would do. Raises Gone if it is refused."""
        told = self.fence.run("scale", "generators", str(generators), str(self.runs / self.name))
        if told.exit != 0:
            raise Gone(f"{self.name}: {told.text.strip()}")

    def fires(self, alert: str) -> bool:
        return self.value("ALERTS", alertname=alert, alertstate="firing") is not None

    def raises(self, fault: str, began: float, holds_s: float, *alerts: str) -> None:
        """Wait until the alerts of a fault fire.

        Args:
            began: monotonic time at which the fault began.
            holds_s: time until the conditions of the rules hold.
        """
        for alert in alerts:
            stated = holds_s + for_s(alert) + SLACK_S
            line = {"benchmark": "drill", "run": self.name, "fault": fault, "alert": alert, "stated_s": round(stated)}
            with contextlib.suppress(Gone):
                self.until(lambda alert=alert: self.fires(alert), began + stated + LATE_S - time.monotonic(), alert)
                line["fired_s"] = round(time.monotonic() - began, 1)
                line["in_time"] = line["fired_s"] <= stated
            log.info("%s", line)
            self.found.append(line)

    def clears(self, *alerts: str, within_s: float = CLEARS_WITHIN_S) -> None:
        """The faults are over: wait until the alerts are."""
        healed = time.monotonic()
        for alert in alerts:
            with contextlib.suppress(Gone):
                self.until(lambda alert=alert: not self.fires(alert), healed + within_s - time.monotonic(), alert)
                line = next(line for line in reversed(self.found) if line["alert"] == alert)
                line["cleared_s"] = round(time.monotonic() - healed, 1)
                log.info("%s", line)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=60.0)


def for_s(alert: str) -> float:
    """How long the condition of an alert has to last, by `alerts.yml`."""
    groups = yaml.safe_load((OURS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    (text,) = [rule.get("for", "0s") for group in groups for rule in group["rules"] if rule.get("alert") == alert]
    return sum(float(number) * UNITS[unit] for number, unit in re.findall(r"(\d+)([smh])", text))


# -- the stories -------------------------------------------------------------------------------------------------------


def judge(run: Run) -> None:
    """The reward: the same for all, an outage, failures."""
    run.judge("constant")
    run.start()
    began = time.monotonic()
    run.raises("every reward is 1", began, 0.0, "NoSignal")
    run.judge("")
    run.clears("NoSignal")
    for mode, fault, holds_s, alert in (
        ("raise", "every reward call fails", 10.0, "RewardsPaused"),
        ("some", "30 % of the reward calls fail", 60.0, "RewardFailures"),
    ):
        run.judge(mode)
        run.raises(fault, time.monotonic(), holds_s, alert)
        run.judge("")
        run.clears(alert)


def hang(run: Run) -> None:
    """A reward function that hangs."""
    run.judge("")
    run.start()
    run.judge("hang")
    began = time.monotonic()
    run.raises("the reward function hangs", began, 600.0, "NoProgress")
    run.raises("the reward function hangs", began, 900.0, "Waiting")
    run.judge("")
    run.clears("NoProgress", "Waiting")


def starved(run: Run) -> None:
    """Generators that are slow, and one that is killed again and again."""
    run.judge("")
    run.start()
    began = time.monotonic()
    for number in range(1, 5):
        os.kill(run.pid("generator-1"), signal.SIGKILL)
        killed = time.monotonic()
        run.until(lambda number=number: is_back(run, number), 180.0, "a restart")
    run.raises("a generator is killed 4 times, of 6 allowed", killed, 10.0, "RestartsRunningOut", "ActorsRestarting")
    run.raises("each token takes a second", began, 30.0, "LearnerStarved")


def frozen(run: Run) -> None:
    """The learner is frozen, the driver is killed and started again, a generator is frozen."""
    run.judge("")
    run.start()
    learner = run.pid("learner-0")
    os.kill(learner, signal.SIGSTOP)
    run.raises("the learner is frozen", time.monotonic(), 10.0, "TargetDown")
    os.kill(learner, signal.SIGCONT)
    run.clears("TargetDown")
    assert run.process is not None
    run.process.kill()
    run.raises("the driver is killed", time.monotonic(), 5.0, "RunGaveUp")
    run.start()
    run.clears("RunGaveUp")
    os.kill(run.pid("generator-1"), signal.SIGSTOP)
    run.raises("a generator is frozen", time.monotonic(), SILENT_AFTER_S + 20.0, "WeightSyncFailing")


def unplaced(run: Run) -> None:
    """A generator more than there is room for."""
    run.judge("")
    run.start()
    run.until(lambda: run.value("asyncgrpo_generators_in_sync") == 2.0, 60.0, "both generators")
    run.scale(3)
    fault = "three generators are asked for, and Ray has room for two"
    run.raises(fault, time.monotonic(), 0.0, "GeneratorsOutOfSync")
    run.scale(2)
    run.clears("GeneratorsOutOfSync")


def is_back(run: Run, restarts: int) -> bool:
    """Whether a generator has been started again so often, and all hold the weights."""
    counted = run.value("asyncgrpo_actor_restarts_total", actor="generator") or 0.0
    return counted >= restarts and run.value("asyncgrpo_generators_in_sync") == 2.0


def tight(run: Run) -> None:
    """A bound that holds generators back; a disk that is small, and then full."""
    disk = run.runs / run.name
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g,mode=700", "drill", str(disk)], check=True)
    try:
        run.judge("")
        run.start()
        began = time.monotonic()
        run.raises("a disk of 1 GB", began, 0.0, "DiskAlmostFull")
        subprocess.run(["mount", "-o", "remount,size=20g", str(disk)], check=True)
        run.clears("DiskAlmostFull")
        run.raises("buffer.max_lag=0, and places for 64 groups", began, 30.0, "BoundTooTight")
        subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
        with open(disk / "filler", "wb") as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(1 << 20))
        run.raises("the disk is full", time.monotonic(), 10.0, "JournalBlocked")
        (disk / "filler").unlink()
        run.clears("JournalBlocked")
    finally:
        run.end()
        run.fence.kill_all()
        subprocess.run(["umount", "-l", str(disk)], check=False)


def slow(run: Run) -> None:
    """A reward that takes a second for each completion."""
    run.judge("slow")
    run.start()
    run.raises("the reward takes a second", time.monotonic(), 60.0, "RewardsSlow")
    run.judge("")
    run.clears("RewardsSlow", within_s=600.0)


def late(run: Run) -> None:
    """Long completions come too late for the bound and are dropped; the engine samples otherwise than the learner thinks."""
    run.judge("")
    run.start()
    began = time.monotonic()
    run.raises("the engine samples from another policy", began, 60.0, "LogprobGap")
    run.raises("a fifth of the groups is too old", began, 60.0, "GroupsDropped")
    with contextlib.suppress(Gone):
        run.until(
            lambda: (run.value("asyncgrpo_bias_distance", of="length") or 0.0) > 0.1, 600.0, "1024 groups, biased"
        )
        run.raises("long completions are dropped", time.monotonic(), 0.0, "GroupsBiased")


STORIES: dict[Callable[[Run], None], tuple[str, ...]] = {
    judge: (),
    hang: ("reward.timeout_s=3600", "cluster.stall_timeout_s=7200"),
    starved: (
        *("generators.extra.seconds_per_token=1", "generators.restarts=6", "generators.groups_in_flight=2"),
        *("buffer.max_lag=4", "buffer.admission=eager"),
    ),
    frozen: ("cluster.silent_timeout_s=900",),
    unplaced: ("generators.ray_resources={room: 1}",),
    tight: ("buffer.max_lag=0", "generators.groups_in_flight=32", "generators.extra.seconds_per_token=0.3"),
    slow: ("reward.timeout_s=3600", "buffer.max_lag=4", "generators.groups_in_flight=8"),
    late: (
        *("buffer.policy=drop", "buffer.admission=eager", "buffer.max_lag=1", "sampling.max_tokens=64"),
        *("generators.extra.median_tokens=8", "generators.extra.sigma=1.5", "generators.extra.seconds_per_token=0.05"),
    ),
}
NOT_DRILLED = {
    "CheckpointTooOld": "two hours without a checkpoint",
    "DiskFilling": "five hours of a disk that fills",
    "LittleSignal": "an hour of solved prompts",
    "RunPaused": "an hour of a pause",
    "WeightsDiffer": "an engine that computes with other weights than it was sent",
    "RejectedFrames": "buffer and generators share a key of the run, so that no stranger's message gets in",
}
"""Alerts that no story raises, and what it would take. `promtool test rules` shows that they fire and are silent."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[story.__name__ for story in STORIES], help="stories")
    parser.add_argument("--minutes", type=float, default=45.0, help="after which stories break off")
    parser.add_argument("--keep", type=Path, help="folder for the data of Prometheus")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    folder = Path(tempfile.mkdtemp(prefix="drills-"))
    began, deadline = time.time(), time.monotonic() + 60.0 * options.minutes
    with Prometheus(folder / "runs", (options.keep or folder).absolute() / "tsdb") as prometheus:
        found: list[dict[str, Any]] = []
        threads = []
        for story in [story for story in STORIES if story.__name__ in options.only]:
            run = Run(story.__name__, prometheus, folder / "runs", STORIES[story], deadline)
            threads.append(threading.Thread(target=lambda story=story, run=run: found.extend(tell(story, run))))
            threads[-1].start()
            time.sleep(BETWEEN_STARTS_S)
        for thread in threads:
            thread.join()
        fired = {name: prometheus.fired(name, began) for name in options.only}
    at_once = {name: pairs for name, firing in fired.items() if (pairs := contradictions(firing))}
    alerts = {
        "fired": sorted({*itertools.chain(*fired.values())}),
        "contradictions": at_once,
        "not_drilled": NOT_DRILLED,
    }
    show(
        {"benchmark": "drills", "drills": len(found), "in_time": sum(line.get("in_time", False) for line in found)}
        | alerts
        | where()
    )
    shutil.rmtree(folder, ignore_errors=True)


def tell(story: Callable[[Run], None], run: Run) -> list[dict[str, Any]]:
    """Go through a story, and show what it found."""
    with run.fence:
        try:
            story(run)
        except (Gone, OSError) as error:
            show({"benchmark": "drill", "run": run.name, "broke_off": str(error), "said": run.fence.said()[-2000:]})
        run.end()
    for line in run.found:
        show(line)
    return run.found


if __name__ == "__main__":
    main()
