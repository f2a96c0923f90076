"""SGLang with a mixture of experts split over two processes, here two processes on CPU cores in the place of two GPUs."""

import asyncio
import os
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from asyncgrpo.types import Completion
from asyncgrpo.weights.digest import tensor_digest
from asyncgrpo.weights.publication import Checksum
from tests.engines.engines import LAST_NORM, VOCAB, Rig, sglang_rig
from tests.engines.shared import shared
from tests.models import make_tiny_qwen3_moe
from tests.runs import shared_memory

pytest.importorskip("sglang")
pytestmark = pytest.mark.slow

PROMPT = (5, 77, 130, 9, 201)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = make_tiny_qwen3_moe(tmp_path_factory.mktemp("model"), vocab=VOCAB, layers=1, experts=4)
    rig = sglang_rig(folder, tensor_parallel=2, max_completions=4)
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")  # else SGLang wants a NUMA node for each
        rig.start()
    yield rig
    rig.stop()


def test_shared_memory_of_schedulers_bears_the_mark_by_which_it_is_removed(rig: Rig) -> None:
    """Of some 25 MB for each engine, which SGLang leaves when its processes are killed."""
    pids = rig.engine._engine.get_all_child_pids()
    held = shared_memory([psutil.Process(pid) for pid in pids])
    assert any("mq" in path.name for path in held)
    assert all("asyncgrpo-" in path.name for path in held), held


def test_both_halves_of_a_model_follow_every_change_of_weights(rig: Rig) -> None:
    async def change(changes: tuple[int, ...]) -> list[Checksum]:
        sums = []
        for number in changes:
            await rig.load(number)
            sums.append(await rig.engine.checksum())
        return sums

    one, two, zero, again = rig.run(change((1, 2, 0, 1)))
    assert again == one and len({one, two, zero}) == 3
    for completion in rig.run(rig.sample(PROMPT, 4, max_tokens=12)):
        rig.assert_logprobs(PROMPT, completion)
    sent = [tensor_digest(t, name) for name, t in shared(rig.weights(1))]
    assert np.frombuffer(one.tensors, np.uint64).reshape(-1, 2).tolist() == [
        [n, digest] for n, digest in enumerate(sent)
    ]
    proof = rig.engine._proof
    assert proof._copies_suffice, "all but the first by the plan"
    assert (proof.left_out, proof.untraced, proof.do_not_follow, proof.nowhere) == ([], {}, [], set())


def test_an_update_that_one_half_skips_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncgrpo.engines.sglang import weights

    payloads, before = weights.payloads, shared(rig.weights(-1))

    def for_the_first(tensors, num_schedulers, *, by_plan):
        return [payloads(each, num_schedulers, by_plan=by_plan)[0] for each in (tensors, before)]

    async def skip() -> list[str]:
        found = []
        for change in (0, -1, -2):  # from the second on only the last norm moves
            if change == -2:
                monkeypatch.setattr(weights, "payloads", for_the_first)
            await rig.load(change)
            await rig.engine.checksum()
            found.append(rig.engine.does_not_follow)
        monkeypatch.undo()
        await rig.load(0)
        await rig.engine.checksum()
        return [*found, rig.engine.does_not_follow]

    whole, moved, skipped, repaired = rig.run(skip())
    assert skipped.endswith(f": {LAST_NORM}") and (whole, moved, repaired) == ("", "", "")


def test_both_halves_change_between_the_same_two_tokens(rig: Rig) -> None:
    async def change_midway() -> list[Completion]:
        long = asyncio.create_task(rig.sample(PROMPT, 2, max_tokens=60))
        await rig.sample(PROMPT[:2], max_tokens=6)  # when this is back, the long ones are on their way
        await rig.load(-1)
        return await long

    for completion in rig.run(change_midway()):
        assert len(completion.spans) == 2
        rig.assert_logprobs(PROMPT, completion)
