"""Follow the advice of real runs: predicted against measured, and whether all that show it agree.

python -m benchmarks.advice                      eight settings, one JSON line for each piece of advice
python -m benchmarks.advice --only torch sglang  some of them

`torch`, `sglang`, `trivial` and `environment` are bound by the cores of this machine. In the others the `fake` engine, the
learner, the reward function or the judge sleep, so that cores are free, as on larger nodes. The learning rate is next to
nothing, so that the task stays as it is. `scaled` and `paused` give commands at the tenth step.

Each piece that names a setting is followed in a run of its own. Where it says that no core is free for another process, that
process is added all the same: a gain of 0 is predicted. Compared are mean seconds of a step in the same window
(`recording/pace.py`); for `algorithm.filter_zero_signal`, the time for a group with signal. `agree`: the last `advice` event,
`plan --from`, the summary, and `status` in the last seconds of the run.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from asyncgrpo.config.load import load_config
from asyncgrpo.recording.advice import Advice
from asyncgrpo.recording.pace import Pace, pace_of
from benchmarks.measuring import rounded, show, where
from benchmarks.trials import Fence, events
from tests.recording.bottlenecks import followed

STILL = ("learner.lr=1e-12", "run.eval_every=100000", "run.checkpoint_every=100000", "run.epochs=null")
SLEEPS = (
    "buffer.prompts_per_step=8", "algorithm.group_size=4", "sampling.max_tokens=400",
    "generators.extra={vocab_size: 261, seconds_per_token: 0.04, median_tokens: 25, sigma: 0.3}",
)  # fmt: skip
ONE = ("reward.function={root}/reward.py", "generators.count=1")
FEW = (*ONE, "generators.groups_in_flight=4")
JUDGED = ("reward.function=judge", "reward.judge.url={url}", "reward.judge.max_concurrent=2", "generators.count=1")
TRIVIAL = """def compute_score(solution_str):
    return float(len(solution_str) % 2)
"""
GAME = '''class Environment:
    """Asks for a letter three times."""

    def reset(self, ground_truth):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return "ok", float(len(text) % 2), self.turns == 3
'''
REWARD = """import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    has_signal = zlib.crc32(ground_truth.encode()) % 10
    return float(bool(has_signal) and zlib.crc32(solution_str.encode()) % 2)
"""
SITE = '''"""A `sitecustomize.py` that slows `Learner.step` down when its module is imported."""

import importlib.abc
import importlib.machinery
import sys
import time


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "asyncgrpo.learner.learner":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            step = module.Learner.step

            def slow(self, *arguments):
                time.sleep(SECONDS / self.world)
                return step(self, *arguments)

            module.Learner.step = slow

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
'''
JUDGE_S = 0.2


@dataclass(frozen=True)
class Setting:
    """One run."""

    engine: str
    settings: tuple[str, ...] = ()
    train_s: float = 0.0
    """The learner sleeps for so long before a step."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Given at the tenth step."""
    steps: int = 40


SETTINGS = {
    "torch": Setting("torch"),
    "sglang": Setting("sglang"),
    "trivial": Setting("torch", ("reward.function={root}/trivial.py",)),
    "environment": Setting("torch", ("environment.name={root}/game.py", "sampling.max_tokens=8")),
    "judge": Setting("fake", (*SLEEPS, *JUDGED), train_s=0.5),
    "few": Setting("fake", (*SLEEPS, *FEW), train_s=0.5),
    "scaled": Setting("fake", (*SLEEPS, *FEW), train_s=0.5, commands=(("scale", "generators", "2", "run"),)),
    "paused": Setting("fake", (*SLEEPS, *ONE), train_s=2.5, commands=(("pause", "run"), ("resume", "run"))),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    arguments = parser.parse_args(argv)
    for name in arguments.only:
        setting = SETTINGS[name]
        before = run(setting)
        show({"setting": name, "step_s": rounded(before.pace.step_s, 3), "agree": before.agree} | where())
        for piece in before.advice:
            if change := change_of(piece, before.pace):
                show({"setting": name} | follow(setting, before, piece, change))
            else:
                show({"setting": name, "advice": piece.sentence})


@dataclass(frozen=True)
class Ran:
    """What a run showed."""

    pace: Pace
    advice: tuple[Advice, ...]
    agree: dict[str, bool]


def change_of(piece: Advice, pace: Pace) -> str:
    """The setting that the advice names, or that it says gains nothing for lack of a core; empty: there is none."""
    if piece.bottleneck == "cores" and "learner rank" in piece.sentence:
        return f"learner.ranks={pace.ranks + 1}"
    if piece.bottleneck == "cores" and "generator" in piece.sentence:
        return f"generators.count={pace.generators + 1}"
    return followed(piece) if piece.command or "=" in piece.sentence else ""


def follow(setting: Setting, before: Ran, piece: Advice, change: str) -> dict[str, Any]:
    """Run again with a change, and compare."""
    after = run(setting, change)
    share = 1.0
    if piece.bottleneck == "signal":
        share = (1 - before.pace.no_signal) / (1 - after.pace.no_signal)
    return {
        "advice": piece.sentence,
        "followed": change,
        "step_s": [rounded(one.pace.step_s, 3) for one in (before, after)],
        "shorter": rounded(1 - share * after.pace.step_s / before.pace.step_s, 2),
        "predicted": rounded(piece.gain, 2),
        "then": after.advice[0].sentence if after.advice else "",
    }


def run(setting: Setting, *more: str) -> Ran:
    """Make a run in a fence of its own."""
    with Fence() as fence, slept(fence.root, setting.train_s), judging() as url:
        for file, text in (("trivial.py", TRIVIAL), ("game.py", GAME), ("reward.py", REWARD)):
            (fence.root / file).write_text(text)
        settings = [
            text.replace("{root}", str(fence.root)).replace("{url}", url) for text in (*setting.settings, *more)
        ]
        count = [text for text in more if text.startswith("generators.count=")]
        commands = setting.commands if not count else tuple(c for c in setting.commands if c[0] != "scale")
        command = ["demo", "--engine", setting.engine, "--out", "run", "--steps", str(setting.steps), *STILL, *settings]
        process, status = fence.start(*command), ()
        folder, config = fence.work / "run", None
        while process.poll() is None:
            time.sleep(1.0)
            if commands and _steps(folder) >= 10:
                for words in commands:
                    assert fence.run(*words).exit == 0
                commands = ()
            elif _steps(folder) >= setting.steps - 8:
                told = fence.run("status", "run", "--json")
                status = _advice_in(told.out) or status
        said = fence.output()
        assert process.returncode == 0, said[-3000:]
        config, happened = load_config(str(folder / "config.yaml"), []), events(folder)
        plan = json.loads(fence.run("plan", "--from", "run", "--json").out)
        pace = pace_of(happened, config)
        assert pace is not None, "too few steps"
        advice = tuple(Advice(**one) for one in plan["advice"])
        last = [event for event in happened if event["event"] == "advice"][-1]
        agree = {
            "event": [last["sentence"], *last["also"]] == [one.sentence for one in advice],
            "summary": f"advice        {advice[0].sentence}" in said,
            "status": [piece["bottleneck"] for piece in status] == [one.bottleneck for one in advice],
            "limit": plan["limit"] == pace.limit,
        }
        return Ran(pace, advice, agree)


def _steps(folder: Path) -> int:
    return sum(event["event"] == "step" for event in events(folder))


def _advice_in(text: str) -> tuple[dict[str, Any], ...]:
    try:
        told = json.loads(text)
    except json.JSONDecodeError:
        return ()
    return tuple((told[0] if isinstance(told, list) else told)["status"]["advice"])


@contextmanager
def slept(folder: Path, train_s: float) -> Iterator[None]:
    """In processes that start in the block, the learner sleeps for so long before each step. Its ranks share the sleep."""
    (folder / "sitecustomize.py").write_text(SITE.replace("SECONDS", repr(train_s)))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        yield


@contextmanager
def judging() -> Iterator[str]:
    """Serve a judge that takes `JUDGE_S`, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(JUDGE_S)
            self.reply({"choices": [{"message": {"content": f"Score: {sum(text) % 2}"}}]})

        def do_GET(self) -> None:
            self.reply({})

        def reply(self, message: dict[str, Any]) -> None:
            text = json.dumps(message).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    main()
