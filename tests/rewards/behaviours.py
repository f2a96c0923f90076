"""A reward file whose behaviour the completion names: what users' functions do, on good days and bad."""

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np

VALUES = {
    "one": 1.0,
    "too_large_whole_number": 10**400,
    "numpy_scalar": np.float32(0.5),
    "numpy_array": np.array([0.5, 0.5]),
    "parts": {"score": 0.5, "format": 1, "length": np.float64(0.25), "pred": "41", "ratio": math.nan, "price": 1e7},
    "nothing": None,
    "dict_without_score": {"reward": 1.0},
    "dict_with_text_score": {"score": "high"},
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    name, _, argument = solution_str.partition(" ")
    if name in VALUES:
        return VALUES[name]
    return globals()[name](*([argument] if argument else []))


def number(text):
    return float(text)


def raises():
    raise KeyError("no such column")


def leaves():
    sys.exit(3)


def raises_half_a_pair():
    raise FileNotFoundError("\udcff")


def unprintable():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    raise Unprintable


def raises_a_long_text():
    raise ValueError("x" * 10_000)


def hang():
    while True:
        pass


def hang_in_c():
    time.sleep(10_000)


def hang_with_child(pid_file):
    with subprocess.Popen(["sleep", "10000"]) as child:
        with open(pid_file, "w") as file:
            file.write(str(child.pid))
        child.wait()


def hang_deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(10_000)


def exits():
    os._exit(7)


def segfaults():
    ctypes.string_at(0)


def forks():
    os.fork()
    return 1.0


async def slow_but_sure():
    await asyncio.sleep(0.01)
    return 0.75


def until(path):
    with open(path, "w") as file:
        file.write("begun")
    while os.path.exists(path):
        time.sleep(0.01)
    return 0.25


async def slow():
    await asyncio.sleep(10_000)


async def raises_later():
    await asyncio.sleep(0)
    raise ValueError("later")


async def raises_in_a_task():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(raises_later())
        tasks.create_task(slow())


def noisy():
    print("\x00\x00\x00\x05hello")
    sys.stdout.write("no newline")
    os.write(1, b"\xff" * 100)
    subprocess.run(["echo", "from a child"], check=True)
    return 1.0


def reads_stdin():
    return {"score": 1.0, "length": len(sys.stdin.read())}


def modules():
    heavy = ("torch", "transformers", "ray", "sglang", "math_verify", "omegaconf")
    return {"score": 1.0, **{name: name in sys.modules for name in heavy}}


def threads():
    return {"score": 1.0, "omp": int(os.environ["OMP_NUM_THREADS"])}


def pid():
    return os.getpid()
