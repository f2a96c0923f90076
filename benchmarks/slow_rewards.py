"""Whether slow or hostile rewards lower the rate of generation: paired runs of `asyncgrpo demo`.

    python -m benchmarks.slow_rewards --runs 3 --seconds 2      a judge that takes 2 s, and one that takes none
    python -m benchmarks.slow_rewards --runs 3 --hostile 0.1    a function that hangs or crashes on a tenth, and one that never

The runs have all processes. The `fake` engine samples tokens that take their time without a CPU, and the learner is quick: so
generation sets the pace, and a group that held its place while it is judged would show. The judge is a small HTTP server of this
process. The rate is that of the tokens that reach the buffer, from one step's end to another's.
"""

import argparse
import json
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from asyncgrpo.recording.events import Event
from benchmarks.bottlenecks import GROUP_SIZE, PER_STEP, SHARED, made
from benchmarks.measuring import line, show
from benchmarks.trials import Fence, events

SETTLE = 5
"""Steps that are left out: the first groups begin all at once."""
TOKEN_S, MEDIAN_TOKENS, SIGMA = 0.02, 100, 0.3


HOSTILE = """
import ctypes, os, time, zlib

def memory():
    kept = []
    while True:
        kept.append(bytearray(1 << 24))
        if len(kept) > 32:
            raise MemoryError

def loop():
    while True:
        pass

BAD = [
    loop, memory, lambda: time.sleep(1e6), lambda: os._exit(3), lambda: ctypes.string_at(0), lambda: float("nan"),
    lambda: "x" * 10**8, lambda: 1 / 0, lambda: open("/nowhere/at/all"), lambda: [os.fork() for _ in range(3)] and os.abort(),
]

def compute_score(solution_str):
    drawn = zlib.crc32(solution_str.encode())
    if drawn % 1000 < 1000 * SHARE:
        return BAD[drawn // 1000 % len(BAD)]()
    return drawn % 2
"""


class Judge(ThreadingHTTPServer):
    """Takes `seconds` for each reply, however many it is asked at once, and gives 0 or 10 by chance."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, seconds: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seconds = seconds

    def __enter__(self) -> "Judge":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Judge
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """A request is no event."""

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.seconds)
        reply = json.dumps({"choices": [{"message": {"content": f"Score: {10 * (zlib.crc32(asked) % 2)}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="that the slow judge takes")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--in-flight", type=int, default=8, help="groups that the generator works on at once")
    parser.add_argument("--max-lag", type=int, default=8)
    parser.add_argument(
        "--hostile", type=float, help="share of the calls of a function that are hostile, instead of a judge"
    )
    arguments = parser.parse_args(argv)
    how: Callable[[float, argparse.Namespace], list[Event]] = judged if arguments.hostile is None else hostile
    of = "judge_s" if arguments.hostile is None else "hostile"
    rates: dict[float, list[float]] = {
        0.0: [],
        arguments.seconds if arguments.hostile is None else arguments.hostile: [],
    }
    for number in range(arguments.runs):
        for much in (list(rates), list(reversed(rates)))[number % 2]:
            rates[much].append(tokens_per_s(how(much, arguments)))
    without, with_it = rates.values()
    shown = {"steps": arguments.steps, "in_flight": arguments.in_flight, "max_lag": arguments.max_lag}
    shown |= {
        "prompts_per_step": PER_STEP,
        "group_size": GROUP_SIZE,
        "token_s": TOKEN_S,
        "median_tokens": MEDIAN_TOKENS,
    }
    for much, found in rates.items():
        show(line("rewards: generated tokens", found, "1/s", seed=0, **{of: much}, **shown))
    ratios = [b / a for a, b in zip(without, with_it, strict=True)]
    show(line(f"rewards: rate with {of} over that without", ratios, "", seed=0, **shown))


def judged(seconds: float, arguments: argparse.Namespace) -> list[Event]:
    """The events of a run whose judge takes so long."""
    with Fence() as fence, Judge(seconds) as judge:
        url = f"http://127.0.0.1:{judge.server_port}"
        return _run(
            fence, arguments, "reward.function=judge", f"reward.judge.url={url}", "reward.judge.max_concurrent=256"
        )


def hostile(share: float, arguments: argparse.Namespace) -> list[Event]:
    """The events of a run with a function that is hostile to this share of its calls."""
    with Fence() as fence:
        (fence.root / "reward.py").write_text(HOSTILE.replace("SHARE", str(share)))
        return _run(
            fence, arguments, f"reward.function={fence.root}/reward.py", "reward.timeout_s=1", "reward.workers=2"
        )


def _run(fence: Fence, arguments: argparse.Namespace, *rewards: str) -> list[Event]:
    engine = f"{{vocab_size: 261, seconds_per_token: {TOKEN_S}, median_tokens: {MEDIAN_TOKENS}, sigma: {SIGMA}}}"
    places = [f"generators.groups_in_flight={arguments.in_flight}", f"buffer.max_lag={arguments.max_lag}"]
    settings = [*SHARED, *rewards, "generators.count=1", "data.eval_rows=4", *places, f"generators.extra={engine}"]
    shutil.copytree(made(), fence.work / "run")
    steps = str(arguments.steps)
    ended = fence.run("demo", "--engine", "fake", "--out", "run", "--steps", steps, *settings, limit_s=600.0)
    assert ended.exit == 0, ended.text[-2000:]
    return events(fence.work / "run")


def tokens_per_s(happened: list[Event]) -> float:
    """Tokens a second that reach the buffer, after the first steps."""
    steps = [event for event in happened if event["event"] == "step"][SETTLE:]
    tokens = steps[-1]["tokens_generated"] - steps[0]["tokens_generated"]
    return float(tokens / (steps[-1]["time"] - steps[0]["time"]))


if __name__ == "__main__":
    main()
