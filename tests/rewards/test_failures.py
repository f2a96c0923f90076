"""Whatever a reward function does, its caller gets a score or the name of what went wrong."""

import asyncio
import contextlib
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from asyncgrpo.rewards.base import score_one
from asyncgrpo.rewards.pool import PoolReward
from asyncgrpo.types import Score
from tests.rewards.conftest import BEHAVIOURS, behaving, prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")
LINE_THAT_RAISES = Path(BEHAVIOURS).read_text().splitlines().index('    raise KeyError("no such column")') + 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reward():
    reward = behaving(timeout_s=30, workers=1)
    yield reward
    await reward.close()


async def late(reward: PoolReward, behaviour: str, timeout_s: float = 0.5) -> Score:
    """The score of a call that has so much time, unlike those before and after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward, "_timeout_s", timeout_s)
        async with asyncio.timeout(30):
            return await score_one(reward, prompt(), behaviour)


@pytest.mark.parametrize(
    ("behaviour", "value"),
    [
        ("number 0.25", 0.25),
        ("numpy_scalar", 0.5),
        ("slow_but_sure", 0.75),
        ("noisy", 1.0),
        ("forks", 1.0),
    ],
)
async def test_a_number_is_the_score(reward, behaviour, value):
    score = await score_one(reward, prompt(), behaviour)
    assert (score.value, score.failure) == (value, None)
    assert score.seconds > 0


async def test_named_numbers_beside_the_score_become_parts(reward):
    score = await score_one(reward, prompt(), "parts")
    assert score.value == 0.5
    assert score.parts == {"format": 1.0, "length": 0.25}
    assert score.detail.startswith("parts left out") and score.detail.endswith(": pred, ratio, price")


@pytest.mark.parametrize(
    ("behaviour", "failure", "detail"),
    [
        ("number nan", "not_finite", "nan"),
        ("too_large_whole_number", "not_finite", "inf"),
        ("number 1e308", "too_large", "1e+308, and rewards reach from -1e+06 to 1e+06"),
        ("nothing", "bad_type", "NoneType"),
        ("numpy_array", "bad_type", "ndarray"),
        ("dict_without_score", "bad_type", "['reward']"),
        ("dict_with_text_score", "bad_type", "'high'"),
        ("raises", "exception", f"behaviours.py:{LINE_THAT_RAISES}: KeyError: 'no such column'"),
        ("raises_later", "exception", "ValueError: later"),
        ("raises_in_a_task", "exception", "ValueError: later"),
        ("leaves", "exception", "SystemExit: 3"),
        ("unprintable", "exception", "Unprintable"),
        ("raises_half_a_pair", "exception", "FileNotFoundError: \\udcff"),
        ("exits", "crash", "exited with code 7"),
        ("segfaults", "crash", "SIGSEGV"),
    ],
)
async def test_what_is_no_number_has_a_name_and_the_next_call_works(reward, behaviour, failure, detail):
    score = await score_one(reward, prompt(), behaviour)
    assert (score.value, score.failure) == (None, failure)
    assert detail in score.detail
    assert (await score_one(reward, prompt(), "one")).value == 1.0


@pytest.mark.parametrize("behaviour", ["hang", "hang_in_c", "hang_deaf", "slow"])
async def test_a_hang_is_killed_and_named(reward, behaviour):
    worker = int((await score_one(reward, prompt(), "pid")).value)
    score = await late(reward, behaviour)
    assert (score.value, score.failure) == (None, "timeout")
    assert "0.5 s" in score.detail
    assert not psutil.pid_exists(worker)
    assert (await score_one(reward, prompt(), "one")).value == 1.0


async def test_a_late_call_leaves_its_stack_in_the_log(capfd):
    reward = behaving(timeout_s=0.5, workers=1)
    assert (await score_one(reward, prompt(), "hang_in_c")).failure == "timeout"
    stack = capfd.readouterr().err
    assert "behaviours.py" in stack and "Fatal" not in stack
    await reward.close()


async def test_a_hang_takes_the_processes_it_started_with_it(reward, tmp_path):
    score = await late(reward, f"hang_with_child {tmp_path / 'pid'}", timeout_s=2.0)
    assert score.failure == "timeout"
    child = int((tmp_path / "pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):  # killed, it ends when the machine lets it
        for _ in range(100):
            if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the child lives")


async def test_a_detail_stays_short_and_keeps_the_line(reward):
    score = await score_one(reward, prompt(), "raises_a_long_text")
    assert len(score.detail) == 500
    assert "behaviours.py:" in score.detail


async def test_a_worker_has_an_empty_stdin_imports_nothing_heavy_and_uses_one_thread(reward):
    assert (await score_one(reward, prompt(), "reads_stdin")).parts == {"length": 0.0}
    modules = await score_one(reward, prompt(), "modules")
    assert len(modules.parts) == 6
    assert set(modules.parts.values()) == {0.0}
    assert (await score_one(reward, prompt(), "threads")).parts == {"omp": 1.0}


async def test_a_row_that_cannot_be_sent_is_named(reward):
    score = await score_one(reward, prompt(answer=object()), "one")
    assert score.failure == "exception"
    assert "cannot be sent" in score.detail
