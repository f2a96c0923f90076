"""The audit finds no difference in a run that kept its promises, and names each one that was broken."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from asyncgrpo.cli import app
from asyncgrpo.data.prompts import PromptState
from asyncgrpo.errors import JournalError
from asyncgrpo.journal.history import BatchIssued, BoundChanged, Committed, Dropped, Interrupted
from asyncgrpo.learner.checkpoints import Checkpoints, RunState
from asyncgrpo.recording.events import EventLog
from asyncgrpo.tools.audit import audit
from asyncgrpo.types import PolicyVersion, VersionSpan
from tests.journal.journals import delivered, group, journal, prompts_at


class FakeRun:
    def __init__(self, folder: Path, policy: str = "wait", *, is_auto: bool = False) -> None:
        self.folder = folder
        self.events = EventLog(folder / "metrics.jsonl")
        of_start = {"policy": policy, "max_lag_is_auto": is_auto}
        self.journal = journal(folder / "journal", durability="written", of_start=of_start)

    def restart(self, lineage: int, parent: PolicyVersion) -> None:
        self.journal.close()
        self.journal = journal(self.folder / "journal", lineage, durability="written", of_start={"parent": parent})

    def deliver(self, *prompt_indices: int, lineage=1, version=0, attempt=0, max_lag: int = 4) -> None:
        for prompt_index in prompt_indices:
            message, payload = group(prompt_index, lineage=lineage, version=version, attempt=attempt)
            self.journal.append(*delivered(message, payload, max_lag))

    def issue(self, step: int, *lease_ids: str, lineage: int = 2) -> None:
        self.journal.append(BatchIssued(step=step, version=PolicyVersion(lineage, step - 1), lease_ids=lease_ids))

    def train(self, step: int, *lease_ids: str, lag: int = 0) -> None:
        self.issue(step, *lease_ids, lineage=1)
        fields = {"reward_mean": 0.0, "loss": 0.0, "tokens_trained": 1, "seconds": {}}
        self.events.write("step", step=step, version=f"1.{step}", lags={str(lag): len(lease_ids)}, **fields)

    def drop(self, lease_id: str, reason: str, *, is_final: bool) -> None:
        prompt_index = int(lease_id.split(".")[1])
        self.journal.append(Dropped(lease_id=lease_id, prompt_index=prompt_index, reason=reason, is_final=is_final))

    def checkpoint(self, step: int, prompts: PromptState, lineage: int = 1) -> None:
        saved = RunState(step=step, lineage=lineage, prompts=msgspec.to_builtins(prompts))
        Checkpoints(self.folder, keep=3).begin(saved, lambda folder: lambda: None)()
        self.journal.append(Committed(step=step, prompts=prompts))


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """Two steps and a checkpoint; a third step that a crash undid; groups that were dropped and issued again."""
    run = FakeRun(tmp_path / "run")
    run.deliver(0, 1, 2)
    run.drop("1.3.0", "failed", is_final=True)  # of prompt 3 no group came
    run.train(1, "1.0.0", "1.1.0")
    run.deliver(4, 5, version=1)
    run.drop("1.2.0", "stale", is_final=False)
    run.deliver(2, version=1, attempt=1)
    run.train(2, "1.2.1", "1.4.0")
    run.checkpoint(2, prompts_at(5))
    run.deliver(6, version=2)
    run.train(3, "1.5.0", "1.6.0", lag=1)
    run.events.resume_at(2)
    run.restart(2, PolicyVersion(1, 2))
    return run


def test_a_run_that_kept_its_promises_has_no_difference(run: FakeRun):
    found = audit(run.folder)
    assert found.differences == []
    assert found.groups == {"trained": 4, "stale": 1, "in flight": 2}
    assert found.tokens == {"trained": 8, "stale": 2, "in flight": 4}
    assert found.lags == {0: 4} and found.step == 2 and found.starts == 2 and found.prompts_done == 5
    run.drop("1.6.0", "ahead", is_final=False)
    run.deliver(6, lineage=2, version=2)
    run.issue(3, "1.5.0", "2.6.0")
    assert audit(run.folder).differences == []


def test_prompts_in_quarantine_and_ends_of_generators_are_no_difference(run: FakeRun):
    run.journal.append(Interrupted(generator_id="generator-0", prompt_indices=(7, 8)))
    run.drop("2.7.0", "poison", is_final=False)
    run.drop("2.7.1", "poison", is_final=True)
    run.drop("2.8.0", "quarantined", is_final=True)
    run.checkpoint(2, prompts_at(5, 7, 8))
    assert audit(run.folder).differences == []


def test_with_auto_each_group_has_the_bound_of_its_lease_and_that_was_in_force(tmp_path):
    run = FakeRun(tmp_path / "run", is_auto=True)
    run.deliver(0, max_lag=4)
    run.journal.append(BoundChanged(version=PolicyVersion(1, 2), max_lag=1))
    run.deliver(1, version=2, max_lag=1)
    run.train(4, "1.0.0", "1.1.0")
    late = "lag 3 in step 4, max_lag"
    assert not any(late in difference for difference in audit(run.folder).differences)
    run.deliver(2, version=2, max_lag=1)
    run.deliver(3, version=1, max_lag=1)
    run.train(5, "1.2.0", "1.3.0")
    found = audit(run.folder).differences
    assert "group 1.2.0: lag 2 in step 5, max_lag 1" in found
    assert "group 1.3.0: max_lag 1 was not in force before version 1.1" in found


@pytest.mark.parametrize(
    ("policy", "oldest", "newest", "sentence"),
    [
        ("drop", 5, 9, None),
        ("drop", 4, 9, "lag 5 in step 10, max_lag 4"),
        ("train", 0, 0, None),
    ],
)
def test_the_audit_asks_of_each_policy_what_it_promises(tmp_path: Path, policy, oldest, newest, sentence):
    run = FakeRun(tmp_path, policy)
    message, payload = group(0)
    spans = VersionSpan(PolicyVersion(1, oldest), 0, 1), VersionSpan(PolicyVersion(1, newest), 1, 2)
    rollouts = tuple(msgspec.structs.replace(r, num_tokens=2, spans=spans) for r in message.rollouts)
    run.journal.append(*delivered(msgspec.structs.replace(message, rollouts=rollouts), 2 * payload))
    run.issue(10, "1.0.0", lineage=1)
    too_old = [difference for difference in audit(tmp_path).differences if "max_lag" in difference]
    assert [sentence in difference for difference in too_old] == ([True] if sentence else [])


def damage(run: FakeRun) -> None:
    path = run.folder / "journal" / "00000001.journal"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def other_lags(run: FakeRun) -> None:
    run.events.resume_at(1)
    fields = {"version": "1.2", "reward_mean": 0.0, "loss": 0.0, "tokens_trained": 1, "seconds": {}}
    run.events.write("step", step=2, lags={"1": 2}, **fields)


def too_new(run: FakeRun) -> None:
    run.deliver(7, lineage=2, version=5)
    run.issue(3, "2.7.0")


def trained_again(run: FakeRun, prompt_index: int, *lease_ids: str) -> None:
    """A third step of the second start, of a group of this prompt and of those named, and a checkpoint of it."""
    run.deliver(prompt_index, lineage=2, version=2)
    run.issue(3, f"2.{prompt_index}.0", *lease_ids)
    run.checkpoint(3, prompts_at(5, *{prompt_index} - {4}), lineage=2)


BREAKAGES: dict[str, Callable[[FakeRun], object]] = {
    "group 1.0.0 was trained in step 1 and in 3": lambda run: trained_again(run, 7, "1.0.0"),
    "prompt 4 was trained twice, by the groups 1.4.0 and 2.4.0": lambda run: trained_again(run, 4),
    "prompt 5 is done in the newest checkpoint, but was neither": lambda run: run.checkpoint(2, prompts_at(6)),
    "prompt 4 was trained, but is not done in the newest": lambda run: run.checkpoint(2, prompts_at(4)),
    "step 3 was given group 2.9.0, which was never delivered": lambda run: run.issue(3, "2.9.0"),
    "group 1.5.0: lag 7 in step 9, max_lag 4": lambda run: run.issue(9, "1.5.0"),
    "group 2.7.0 is of weights 5, newer than step 3": lambda run: too_new(run),
    "step 3, which the newest checkpoint holds, has 0 ": lambda run: run.checkpoint(3, prompts_at(5), lineage=2),
    "group 1.6.0 was delivered twice": lambda run: run.deliver(6, version=2),
    "group 1.0.0 was trained, and dropped as stale": lambda run: run.drop("1.0.0", "stale", is_final=False),
    "group 2.4.0 was neither trained nor dropped, and": lambda run: run.deliver(4, lineage=2, version=2),
    "step 2: lags {'1': 2} in metrics.jsonl, {'0': 2} in the journal": other_lags,
    "step 2 is 0 times in metrics.jsonl": lambda run: run.events.resume_at(1),
    "damaged journal: ": damage,
}
"""What the audit must say, and what goes wrong after the run of the fixture."""


@pytest.mark.parametrize("sentence", BREAKAGES)
def test_each_broken_promise_is_named_and_ends_with_1(run: FakeRun, sentence: str):
    BREAKAGES[sentence](run)
    found = audit(run.folder)
    assert any(sentence in difference for difference in found.differences), found.differences
    result = CliRunner().invoke(app, ["audit", str(run.folder), "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout)["differences"] == found.differences


def test_people_get_a_table(run: FakeRun, tmp_path: Path):
    result = CliRunner().invoke(app, ["audit", str(run.folder)])
    assert result.exit_code == 0
    assert "trained" in result.stdout and result.stdout.endswith("no difference\n")
    with pytest.raises(JournalError, match="has no journal"):
        audit(tmp_path)
