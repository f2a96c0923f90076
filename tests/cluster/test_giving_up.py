"""A run that is given up waits for the last checkpoint of a living learner, and for nothing else."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncgrpo.cluster.run import Run
from asyncgrpo.config.schema import ClusterConfig, Config, DataConfig, ModelConfig
from asyncgrpo.errors import AsyncGRPOError, ProcessLost


class Core:
    """`says` is the status at each look: None, how it ended, or what went wrong; the last one stays."""

    def __init__(self, *says: str | AsyncGRPOError | None, can_save: bool = True) -> None:
        self.says, self.can_save = list(says), can_save
        self.asked: list[tuple[str, bool]] = []

    def drain(self, reason: str, *, is_failure: bool) -> None:
        self.asked.append((reason, is_failure))

    def status(self) -> str | None:
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, AsyncGRPOError):
            raise said
        return said


def give_up(core: Core, folder: Path) -> list[bool]:
    """Returns for each look at the generators whether one might be started again."""
    config = Config(model=ModelConfig(path="m"), data=DataConfig(train="t"), cluster=ClusterConfig(stall_timeout_s=0.7))
    looks: list[bool] = []
    fleet = SimpleNamespace(reconcile=lambda *, may_restart: looks.append(may_restart))
    watch = SimpleNamespace(listen=lambda: None)
    run = Run(config, SimpleNamespace(path=folder), "")  # type: ignore[arg-type]
    run._save_before_giving_up(core, fleet, watch, "generator-1 ended too often")  # type: ignore[arg-type]
    return looks


def test_the_learner_is_asked_and_waited_for_and_no_generator_starts_meanwhile(tmp_path: Path, caplog):
    core = Core(None, None, "failed")
    assert give_up(core, tmp_path) == [False, False]
    assert core.asked == [("generator-1 ended too often", True)]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("says", "why"),
    [((None, ProcessLost("learner-0: its process died")), "its process died"), ((None,), "did not end within 1 s")],
)
def test_neither_its_end_nor_its_silence_holds_up_the_end_of_the_run(tmp_path: Path, caplog, says: tuple, why: str):
    give_up(Core(*says), tmp_path)
    assert f"no last checkpoint: {says[-1] or 'the learner'}" in caplog.text and why in caplog.text


def test_where_no_learner_lives_nobody_is_asked(tmp_path: Path):
    core = Core(None, can_save=False)
    assert give_up(core, tmp_path) == [] and core.asked == []
