"""The pool replies to every call, outlives its workers, and leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from asyncgrpo.rewards.base import score_one
from asyncgrpo.rewards.pool import PoolReward
from tests.rewards.conftest import behaving, prompt, workers_of
from tests.runs import wait_until


async def pid_of_worker(reward: PoolReward) -> int:
    score = await score_one(reward, prompt(), "pid")
    assert score.value is not None
    return int(score.value)


async def test_workers_start_when_calls_need_them_and_every_call_is_answered():
    reward = behaving(timeout_s=30, workers=2)
    assert workers_of() == []
    for _ in range(3):
        await score_one(reward, prompt(), "one")
    assert len(workers_of()) == 1
    scores = await asyncio.gather(*(score_one(reward, prompt(), f"number {i}") for i in range(200)))
    assert [score.value for score in scores] == list(range(200))
    assert len(workers_of()) == 2
    await reward.close()
    assert workers_of() == []


async def test_crashed_workers_leave_no_process_and_no_open_file():
    reward = behaving(timeout_s=30, workers=1)
    files = []
    for _ in range(4):
        assert (await score_one(reward, prompt(), "exits")).failure == "crash"
        assert workers_of() == []
        files.append(psutil.Process().num_fds())
    assert len(set(files)) == 1
    await reward.close()


async def test_a_worker_that_dies_between_calls_costs_no_score():
    reward = behaving(timeout_s=30, workers=1)
    first = await pid_of_worker(reward)
    (guest,) = reward._idle
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: guest.has_ended, "its end", 30.0)  # of which asyncio hears once this test awaits
    assert await pid_of_worker(reward) != first
    await reward.close()


async def held_by(reward: PoolReward, held: Path) -> asyncio.Task:
    """A call that has begun and runs until the file is gone."""
    running = asyncio.create_task(score_one(reward, prompt(), f"until {held}"))
    while not held.exists():
        await asyncio.sleep(0.01)
    return running


@pytest.mark.parametrize("has_begun", [False, True], ids=["not begun", "begun"])
async def test_a_cancelled_caller_leaves_the_pool_usable(has_begun, tmp_path):
    reward, held = behaving(timeout_s=30, workers=1), tmp_path / "held"
    worker = await pid_of_worker(reward)
    running = await held_by(reward, held)
    waiting = asyncio.create_task(score_one(reward, prompt(), "exits"))
    last = asyncio.create_task(score_one(reward, prompt(), "pid"))
    await asyncio.sleep(0)
    cancelled = [waiting, running] if has_begun else [waiting]
    for task in cancelled:
        task.cancel()
    results = await asyncio.gather(*cancelled, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * len(cancelled)
    held.unlink()  # a call that has begun runs to its end
    assert (await last).value == worker, "the cancelled calls cost a worker, or the waiting one was run"
    await reward.close()


def together(reward: PoolReward, *texts: str) -> list[asyncio.Task]:
    return [asyncio.create_task(score_one(reward, prompt(), text)) for text in texts]


async def test_close_ends_calls_that_run_and_calls_that_wait():
    reward = behaving(timeout_s=1000, workers=1)
    await score_one(reward, prompt(), "one")
    calls = together(reward, *["hang"] * 3)
    await asyncio.sleep(0.05)
    await reward.close()
    assert [score.failure for score in await asyncio.gather(*calls)] == ["aborted"] * 3
    assert (await score_one(reward, prompt(), "one")).failure == "aborted"
    assert workers_of() == []
    await reward.close()


async def test_close_while_a_worker_starts_leaves_nothing():
    reward = behaving(timeout_s=30, workers=1)
    call = asyncio.create_task(score_one(reward, prompt(), "one"))
    while not workers_of():
        await asyncio.sleep(0.001)
    await reward.close()
    assert (await call).failure == "aborted"
    assert workers_of() == []


async def test_a_start_does_not_count_against_the_deadline(reward_file):
    path = reward_file("import time; time.sleep(1)\ndef compute_score(answer): return 1.0")
    reward = behaving(path, timeout_s=0.5, workers=1)
    assert (await score_one(reward, prompt(), "")).value == 1.0
    await reward.close()


async def test_a_worker_that_cannot_start_any_more_is_a_named_failure():
    pool = PoolReward("asyncgrpo.no_such_module:load", workers=1, timeout_s=1)
    score = await score_one(pool, prompt(), "")
    assert score.failure == "crash"
    assert "no_such_module" in score.detail
    await pool.close()


def test_no_worker_survives_the_kill_of_its_parent():
    parent_code = textwrap.dedent("""
        import asyncio
        from asyncgrpo.rewards.base import score_one
        from tests.rewards.conftest import behaving, prompt

        async def main():
            reward = behaving(timeout_s=1000, workers=2)
            hang = asyncio.gather(score_one(reward, prompt(), "hang_deaf"), score_one(reward, prompt(), "slow"))
            reward_started = behaving(timeout_s=1000, workers=1)
            await score_one(reward_started, prompt(), "one")
            print("started", flush=True)
            await hang

        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "started\n"
        workers = workers_of(parent.pid)
        assert len(workers) == 3
        parent.kill()
    gone, alive = psutil.wait_procs(workers, timeout=30)
    assert (len(gone), alive) == (3, [])
