"""A start goes on with the run in its folder: it refuses or applies each changed setting, and names it."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from asyncgrpo.cluster.folder import (
    NOT_COMPARED,
    REFUSED,
    RunFolder,
    Settings,
    Source,
    changes,
    keep_changed,
    look,
    record,
    values_of,
)
from asyncgrpo.config.explain import knobs
from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import CheckpointError, ConfigError
from asyncgrpo.learner.checkpoints import Checkpoints, RunState
from asyncgrpo.recording.events import EventLog, read_events
from tests.models import make_tiny_qwen3

NEEDED = ["model.path=/models/a", "data.train=/data/train.jsonl"]
APPLIED = 139
"""How many keys a resume may change, so that each new key needs a decision."""


def settings(*overrides: str, **digests: str) -> Settings:
    config = load_config(None, [*NEEDED, *overrides])
    paths = {"model.path": config.model.path, "data.train": config.data.train}
    names = {"model.path": "model", "data.train": "data"}
    sources = {key: Source(path=path, digest=digests.get(names[key], "same")) for key, path in paths.items()}
    return Settings(values=values_of(config), sources=sources)


def effects(before: Settings, now: Settings) -> dict[str, str]:
    return {change.key: "refused" if change.refusal else "applied" for change in changes(before, now)}


def test_every_knob_has_exactly_one_rule():
    others = {*REFUSED, *NOT_COMPARED}
    assert len(others) == len(REFUSED) + len(NOT_COMPARED) and others <= set(knobs())
    applied = len(knobs()) - len(others)
    assert applied == APPLIED, "may a resume change the new key? Then APPLIED counts it, else it goes into REFUSED"
    now = settings("algorithm.loss=gspo", "learner.lr=2e-6", "run.out=elsewhere")
    assert effects(settings(), now) == {"algorithm.loss": "refused", "learner.lr": "applied"}


def test_a_model_is_known_by_what_it_holds():
    assert effects(settings(), settings(model="other")) == {"model.path": "refused"}
    assert effects(settings(), settings("model.path=/models/b", model="other")) == {"model.path": "refused"}
    assert effects(settings(), settings("model.path=/models/b")) == {"model.path": "applied"}, "it has only moved"
    assert effects(settings(model=""), settings("model.path=/models/b")) == {"model.path": "refused"}
    assert effects(settings(model="", data=""), settings()) == {}, "an older release did not look"


def test_a_knob_that_an_older_release_did_not_know_had_its_default():
    before, now = settings(), settings("buffer.keep_journal=true")
    del before.values["buffer.keep_journal"]
    assert effects(before, now) == {"buffer.keep_journal": "applied"}
    assert effects(before, settings()) == {}


ROW = '{"prompt": "1", "answer": "1"}\n'


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for number in (1, 2):
        make_tiny_qwen3(tmp_path / f"model{number}", seed=number)
    (tmp_path / "train.jsonl").write_text(ROW)
    (tmp_path / "reward.py").write_text("def compute_score(*arguments): return 0.0\n")
    return tmp_path


def configured(files: Path, *overrides: str) -> Config:
    settings = [f"run.out={files / 'run'}", f"model.path={files / 'model1'}", f"data.train={files / 'train.jsonl'}"]
    return load_config(None, [*settings, f"reward.function={files / 'reward.py'}:compute_score", *overrides])


def begin(config: Config, *, step: int | None = 4) -> None:
    """Make a start that came as far as a checkpoint of `step`. None: as far as its first event."""
    folder = RunFolder(Path(config.run.out))
    folder.claim()
    record(config, folder, look(config, folder))
    lineage = folder.next_lineage()
    EventLog(folder.path / "metrics.jsonl").write("start", run="run", lineage=1, version="1.0", step=0, sizes="")
    if step is not None:
        Checkpoints(folder.path, 2).begin(
            RunState(step=step, lineage=lineage, prompts={}), lambda place: lambda: None
        )()
    folder.release()


def found(config: Config) -> list[str]:
    return look(config, RunFolder(Path(config.run.out))).lines(config.run.out)[1:]


def test_the_same_again_goes_on_and_says_no_more(files: Path, monkeypatch: pytest.MonkeyPatch):
    standing = look(configured(files), RunFolder(files / "run"))
    assert standing.is_new and standing.lines("run") == [] and not (files / "run").exists()
    begin(configured(files))
    assert found(configured(files)) == []
    monkeypatch.chdir(files)
    settings = ["model.path=./model1", "data.train=train.jsonl", "reward.function=reward.py:compute_score"]
    relative = configured(files, *settings)
    assert found(relative) == [], "a relative path is no change"
    assert look(relative, RunFolder(files / "run")).step == 4


def test_a_run_that_ended_after_its_last_step_but_not_in_order_goes_on_to_its_end(files: Path):
    """It lacks the last evaluation and `final`."""
    config = configured(files, "run.steps=4")
    begin(config)
    log = EventLog(files / "run" / "metrics.jsonl")
    for status in ("failed", "drained"):
        log.write("end", status=status, step=4)
        assert look(config, RunFolder(files / "run")).step == 4
    with pytest.raises(ConfigError, match=r"4 steps done and run\.steps is 3; raise"):
        look(configured(files, "run.steps=3"), RunFolder(files / "run"))
    log.write("end", status="done", step=4)
    with pytest.raises(ConfigError, match=r"4 steps done and run\.steps is 4; raise"):
        look(config, RunFolder(files / "run"))
    assert look(configured(files, "run.steps=5"), RunFolder(files / "run")).step == 4


def test_a_run_that_has_trained_all_its_prompts_is_finished_until_something_changes(files: Path):
    begin(configured(files))
    EventLog(files / "run" / "metrics.jsonl").write("end", status="done", step=4)
    with pytest.raises(ConfigError, match=r"every prompt run\.epochs times \(4 steps\); raise run\.epochs"):
        look(configured(files), RunFolder(files / "run"))
    for change in ("run.epochs=2", "learner.lr=0.1"):
        assert look(configured(files, change), RunFolder(files / "run")).step == 4
    (files / "train.jsonl").write_text(ROW * 2)
    with pytest.raises(ConfigError, match=r"resume cannot change data\.train"):
        look(configured(files), RunFolder(files / "run"))


def test_other_contents_in_the_same_place_are_refused(files: Path):
    begin(configured(files))
    (files / "train.jsonl").write_text('{"prompt": "2", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"cannot change data.train .*other contents"):
        look(configured(files), RunFolder(files / "run"))
    (files / "train.jsonl").write_text(ROW)
    os.replace(files / "model2" / "model.safetensors", files / "model1" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"run of 4 steps, and a resume cannot change model.path .*other contents"):
        look(configured(files), RunFolder(files / "run"))


@pytest.mark.parametrize("key", ["data.train", "data.eval", "reward.function"])
def test_a_file_that_is_gone_is_named(files: Path, key: str):
    begin(configured(files))
    with pytest.raises(ConfigError, match=r"gone\.jsonl cannot be read: No such file or directory"):
        look(configured(files, f"{key}={files / 'gone.jsonl'}"), RunFolder(files / "run"))


def test_files_that_moved_are_the_same_files_and_a_reward_may_be_edited(files: Path):
    begin(configured(files))
    (files / "model1").rename(files / "moved")
    (files / "reward.py").write_text("def compute_score(*arguments): return 1.0\n")
    moved, edited = found(configured(files, f"model.path={files / 'moved'}"))
    assert moved.startswith("changed: model.path ") and moved.endswith("moved")
    assert edited.startswith("changed: reward.function ") and "other contents" in edited


def test_what_changed_is_said_written_and_kept_for_each_start(files: Path):
    begin(configured(files, "learner.lr=1e-6"))
    again = configured(files, "learner.lr=2e-6", "algorithm.group_size=4")
    assert found(again) == ["changed: algorithm.group_size 8 -> 4", "changed: learner.lr 1e-06 -> 2e-06"]
    begin(again, step=8)
    changed = [event for event in read_events(files / "run" / "metrics.jsonl") if event["event"] == "changed"]
    told = [(e["before"], e["now"], e["effect"]) for e in changed]
    assert told == [("8", "4", "applied"), ("1e-06", "2e-06", "applied")]
    sources = msgspec.json.decode((files / "run" / "starts" / "0001" / "files.json").read_bytes())
    assert sources.keys() == {"model.path", "data.train", "reward.function"}
    assert sources["model.path"]["path"] == str(files / "model1") and all(one["digest"] for one in sources.values())
    kept = [load_config(files / "run" / "starts" / number / "config.yaml") for number in ("0001", "0002")]
    assert [config.learner.lr for config in kept] == [1e-6, 2e-6]
    assert load_config(files / "run" / "config.yaml") == kept[1] == again
    assert found(again) == []


def test_the_ten_thousandth_start_is_the_last_one(files: Path):
    begin(configured(files))
    (files / "run" / "lineage").write_text("9998")
    begin(configured(files, "learner.lr=1e-6"))
    begin(again := configured(files, "learner.lr=2e-6"))
    assert found(again) == []
    keep_changed(changed := configured(files, "learner.lr=3e-6"), RunFolder(files / "run"))
    assert found(changed) == []


def test_before_the_first_checkpoint_everything_may_change_and_a_run_without_records_of_its_starts_goes_on(files: Path):
    begin(configured(files), step=None)
    lines = look(configured(files, f"model.path={files / 'model2'}"), RunFolder(files / "run")).lines("run")
    assert lines[0] == "run has no checkpoint yet: starting again from step 0"
    assert lines[1].startswith("changed: model.path ")
    begin(configured(files))
    shutil.rmtree(files / "run" / "starts")
    (unknown,) = found(configured(files, f"model.path={files / 'model2'}"))
    assert "no configuration of an earlier start" in unknown


def test_a_record_that_cannot_be_written_or_read_is_named(files: Path):
    begin(configured(files))
    for name in ("checkpoints", "starts"):  # as of another user, in which `Path.glob` finds nothing
        (files / "run" / name).rename(files / "aside")
        (files / "run" / name).touch()
        with pytest.raises((CheckpointError, NotADirectoryError), match=name):
            look(configured(files), RunFolder(files / "run"))
        (files / "run" / name).unlink()
        (files / "aside").rename(files / "run" / name)
    (files / "run" / "starts" / "0001" / "files.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"starts/0001/files\.json"):
        look(configured(files), RunFolder(files / "run"))
    (files / "other").mkdir()
    (files / "other" / "starts").write_text("in the way")
    config, folder = configured(files, f"run.out={files / 'other'}"), RunFolder(files / "other")
    with pytest.raises(CheckpointError, match="other/starts/0001"):
        record(config, folder, look(config, folder))
