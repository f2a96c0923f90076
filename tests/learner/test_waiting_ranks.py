"""While rank 0 waits for the buffer, as it does for days where a run is paused, the other ranks wait with it."""

import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from asyncgrpo import liveness
from asyncgrpo.learner.ranks import Team
from asyncgrpo.types import PolicyVersion
from asyncgrpo.wire.rollouts import NoMore
from tests.learner.ranks import run_on_ranks
from tests.learner.test_service import NOTHING, Inbox, Taken, service

GIVES_UP_S = 4
"""A rank that hears nothing for so long."""


class Paused(Inbox):
    """Nothing comes for twice as long, and then the end."""

    def take(self, version: PolicyVersion, shares_within: dict[int, float]) -> Taken:
        end_s = time.monotonic() + 2 * GIVES_UP_S
        while time.monotonic() < end_s:
            self.while_waiting("the end of the pause", 1.0)
            time.sleep(0.05)
        return NoMore(why="draining"), NOTHING


def wait_on_a_rank(rank: int, world: int, folder: str) -> None:
    dist.barrier()  # a rank that still connects would fail
    dist.destroy_process_group()
    short = timedelta(seconds=GIVES_UP_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=short)
    liveness.RANK_HEARTBEAT_S = GIVES_UP_S / 3
    team = Team(rank, world)
    if rank == 0:
        running = service(Path(folder) / "run", Paused())
        running.team = team
        assert running.run() == "drained"
        return
    heard = []
    while not heard or heard[-1] != "end":
        heard.append(team.receive().what)
    Path(folder, "heard").write_text(" ".join(heard))


def test_a_rank_is_told_that_rank_0_waits(tmp_path: Path):
    run_on_ranks(wait_on_a_rank, str(tmp_path), 2)
    assert (tmp_path / "heard").read_text().split().count("wait") >= 3
