"""The timeline of a journal: the steps that can be trained again, in order, or one sentence that says why not."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncgrpo.cli import main
from asyncgrpo.config.schema import Config, DataConfig, LearnerConfig, ModelConfig
from asyncgrpo.errors import ConfigError, JournalError
from asyncgrpo.journal.history import BatchIssued, Committed
from asyncgrpo.learner.checkpoints import Checkpoints, RunState
from asyncgrpo.tools.replay import read_timeline
from asyncgrpo.types import PolicyVersion
from tests.journal.journals import began, delivered, group, journal


def config(lr: float = 1e-6) -> Config:
    return Config(model=ModelConfig(path="m"), data=DataConfig(train="t"), learner=LearnerConfig(lr=lr))


class FakeRun:
    """The journal and the checkpoints of a run, start by start and step by step; two groups a step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lineage = self.step = self.prompt_indices = 0

    def start(self, parent: PolicyVersion | None = None, values: dict[str, Any] | None = None, **arguments) -> None:
        self.lineage += 1
        self.step = parent.number if parent is not None else 0
        plain = msgspec.to_builtins(config(lr=self.lineage * 1e-6)) if values is None else values
        of_start = {"parent": parent, "config": plain}
        place = self.folder / "journal"
        self.journal = journal(place, self.lineage, "written", of_start, segment_bytes=400, **arguments)

    def train(self, count: int = 1) -> None:
        for _ in range(count):
            lease_ids = []
            # They come in another order than that of the batch.
            for prompt_index in (self.prompt_indices + 1, self.prompt_indices):
                message, payload = group(prompt_index, lineage=self.lineage, version=self.step, tokens=3)
                self.journal.append(*delivered(message, payload))
                lease_ids.insert(0, message.lease_id)
            self.prompt_indices += 2
            self.hand(*lease_ids)

    def hand(self, *lease_ids: str) -> None:
        version = PolicyVersion(self.lineage, self.step)
        self.step += 1
        self.journal.append(BatchIssued(step=self.step, version=version, lease_ids=lease_ids))

    def checkpoint(self) -> PolicyVersion:
        saved = RunState(step=self.step, lineage=self.lineage, prompts={})
        Checkpoints(self.folder, keep=9).begin(saved, lambda folder: lambda: None)()
        self.journal.append(Committed(step=self.step, prompts=began().prompts))
        while self.journal._settled:
            self.journal.tick()
        return PolicyVersion(self.lineage, self.step)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path)


def steps_of(run: FakeRun, **arguments) -> dict[int, list[int]]:
    return {leg.lineage: [s.number for s in leg.steps] for leg in read_timeline(run.folder, **arguments).legs}


def test_steps_that_a_crash_undid_are_left_out_and_each_start_keeps_its_configuration(run: FakeRun):
    run.start(keep=True)
    run.train(2)
    parent = run.checkpoint()
    run.train(2)
    assert steps_of(run) == {1: [1, 2, 3, 4]}, "a start that is not over counts up to its last manifest"
    run.start(parent, keep=True)  # ended before it trained anything
    run.start(parent, keep=True)
    run.train(2)
    assert steps_of(run) == {1: [1, 2], 3: [3, 4]}
    timeline = read_timeline(run.folder)
    assert [leg.config for leg in timeline.legs] == [config(1e-6), config(3e-6)]
    assert [str(step.version) for step in timeline.steps] == ["1.0", "1.1", "3.2", "3.3"]
    assert timeline.checkpoint is None
    run.start(keep=True)  # without a checkpoint it begins anew
    run.train()
    assert steps_of(run) == {4: [1]}


def test_a_batch_is_what_the_manifest_says_in_its_order(run: FakeRun):
    run.start(keep=True)
    run.train(2)
    timeline = read_timeline(run.folder)
    message, payload = timeline.batch(list(timeline.steps)[1])
    assert [deliver.prompt_index for deliver in message.groups] == [2, 3]
    assert message.groups[1] == group(3, version=1, tokens=3)[0]
    assert payload == b"".join(group(prompt_index, version=1, tokens=3)[1] for prompt_index in (2, 3))
    assert sum(message.payload_sizes) == len(payload)


def test_a_part_can_be_chosen_and_begins_with_its_checkpoint(run: FakeRun):
    run.start(keep=True)
    run.train(2)
    parent = run.checkpoint()
    run.train(2)
    run.checkpoint()  # of step 4, whose weights the next start does not have
    run.start(parent, keep=True)
    run.train(3)
    run.checkpoint()
    assert steps_of(run, from_step=2) == {2: [3, 4, 5]}
    assert read_timeline(run.folder, from_step=2).checkpoint == run.folder / "checkpoints" / "step_000002"
    begin = {step: [leg.is_from_start for leg in read_timeline(run.folder, from_step=step).legs] for step in (0, 2)}
    assert begin == {0: [True, True], 2: [True]}, "where the processes of their start began"
    assert steps_of(run, to_step=3) == {1: [1, 2], 2: [3]}
    with pytest.raises(JournalError, match=r"no checkpoint of step 4 .* there are: 2, 5"):
        read_timeline(run.folder, from_step=4)
    with pytest.raises(JournalError, match="up to 5; --from-step and --to-step leave none"):
        read_timeline(run.folder, from_step=5)


def test_groups_that_were_taken_out_are_named(run: FakeRun):
    run.start()
    run.train(4)
    parent = run.checkpoint()
    run.start(parent)
    run.train(2)
    run.checkpoint()
    with pytest.raises(JournalError, match=r"step 1 .* group 1\.0\.0 .*keep_journal is true"):
        read_timeline(run.folder)
    run.train(2)
    assert steps_of(run, from_step=6) == {2: [7, 8]}


def without_manifest(run: FakeRun) -> None:
    run.train()
    run.step += 1
    run.train()


def handed_twice(run: FakeRun) -> None:
    run.train(2)
    run.step -= 1
    run.hand("1.2.0", "1.3.0")


ANOTHER = msgspec.to_builtins(config()) | {"gears": {"count": 3}}


@pytest.mark.parametrize(
    ("values", "prepare", "sentence"),
    [
        (None, lambda run: None, "no step to train again"),
        (None, without_manifest, "has no manifest of step 2"),
        (None, handed_twice, "or two of step 2"),
        (None, lambda run: run.hand("1.7.0"), r"step 1 cannot be trained again: its group 1\.7\.0"),
        (ANOTHER, FakeRun.train, "^the journal of .*: unknown configuration key `gears.count`"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_a_sentence(run: FakeRun, values, prepare, sentence: str):
    with pytest.raises(JournalError, match=r"run folder .* does not exist"):
        read_timeline(run.folder / "nowhere")
    with pytest.raises(JournalError, match="has no journal"):
        read_timeline(run.folder)
    run.start(values=values, keep=True)
    prepare(run)
    with pytest.raises((JournalError, ConfigError), match=sentence):
        read_timeline(run.folder)


def test_a_body_that_is_damaged_is_said_at_its_step(run: FakeRun):
    run.start(keep=True)
    run.train(1)
    timeline = read_timeline(run.folder)
    first = next(timeline.steps)
    path = run.folder / "journal" / f"{first.groups[0].segment:08d}.journal"
    data = bytearray(path.read_bytes())
    at = first.groups[0].body_at
    data[at : at + 8] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"step 1 .* cannot be read"):
        timeline.batch(first)
    with pytest.raises(JournalError, match=r"step 1 cannot be trained again: its group"):
        read_timeline(run.folder)


def test_the_command_ends_with_one_sentence_and_1_before_anything_is_trained(run: FakeRun, monkeypatch, capsys):
    run.start(keep=True)
    run.train(2)
    for typed in ("--with sampling.temperature=0.5", "--from-step 1"):
        monkeypatch.setattr(sys, "argv", ["asyncgrpo", "replay", str(run.folder), *typed.split()])
        with pytest.raises(SystemExit, match="1"):
            main()
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert not (run.folder / "replays").exists()
