"""Large training files: rows are checked once, tokenised when they are due, and are the same prompts at every start."""

import os
import shutil
from pathlib import Path

import pytest

from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config
from asyncgrpo.data import kept
from asyncgrpo.data.kept import check, prepare, prepare_if_small
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.errors import CheckpointError, DataError
from asyncgrpo.types import Prompt
from tests.data.conftest import write_rows

ROWS = [{"prompt": "1" * (1 + i % 7), "ground_truth": i, "data_source": "ab"[i % 2], "n": i} for i in range(200)]
FITS = [i for i in range(200) if i % 7 <= 2]  # with two tokens of the chat template, at most five


@pytest.fixture(autouse=True)
def every_file_is_large(monkeypatch):
    monkeypatch.setattr(kept, "SMALL_BYTES", 10)
    monkeypatch.setattr(kept, "checked", {})


@pytest.fixture
def config(tmp_path, demo_model) -> Config:
    shutil.copytree(demo_model, tmp_path / "model")
    return configured(tmp_path)


def configured(folder: Path, *overrides: str, rows=ROWS) -> Config:
    write_rows(folder / "train.jsonl", rows)
    files = [f"model.path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}"]
    return load_config(None, [*files, "data.max_prompt_tokens=5", *overrides])


def source_of(config: Config, folder: Path, **settings) -> PromptSource:
    train = prepare(config, folder).train
    return PromptSource(train, seed=0, shuffle=True, epochs=2, sizes=train.about.sizes, **settings)


def test_every_row_has_its_place_and_one_that_is_too_long_has_no_tokens(config, tmp_path):
    train = prepare(config, tmp_path).train
    assert len(train) == train.about.num_rows == 200 and train.about.sources == ("a", "b")
    assert (train.about.schema_name, train.about.stop_token_ids) == ("plain", (257,))
    assert [i for i, prompt in enumerate(train) if prompt.token_ids] == FITS
    assert train[8] == Prompt(
        prompt_id="train/8", token_ids=(259, 49, 49, 260), text="11", answer=8, source="a", info={"n": 8}
    )
    assert train[-1] == train[199:][0] and train[3].prompt_id == "train/3"
    with pytest.raises(IndexError):
        train[200]


def test_the_prompts_that_fit_are_those_of_a_small_file(config, tmp_path, monkeypatch):
    lazily = [prompt for prompt in prepare(config, tmp_path).train if prompt.token_ids]
    monkeypatch.setattr(kept, "SMALL_BYTES", 10**6)
    shutil.rmtree(tmp_path / "prompts")
    assert lazily == list(prepare(config, tmp_path).train)


def test_nothing_of_the_rows_is_kept_and_a_later_start_checks_nothing(config, tmp_path, monkeypatch):
    check(config, tmp_path, print)
    assert not (tmp_path / "prompts").exists(), "a dry run writes nothing"
    prepare_if_small(config, tmp_path)
    (file,) = (tmp_path / "prompts").iterdir()
    assert file.stat().st_size < 500
    monkeypatch.setattr(kept, "checked", {})  # as in another process
    monkeypatch.setattr(kept, "check_prompts", lambda *given, **named: pytest.fail("rows were checked again"))
    assert check(config, tmp_path, print)["train"].num_rows == 200
    assert len(prepare(config, tmp_path).train) == 200


def test_only_rows_that_are_due_are_tokenised(config, tmp_path, monkeypatch):
    prepare(config, tmp_path)
    tokenised = []
    token_ids_of = kept.token_ids_of

    def noting(source, index, *rest):
        tokenised.append(index)
        return token_ids_of(source, index, *rest)

    monkeypatch.setattr(kept, "token_ids_of", noting)
    source = source_of(config, tmp_path)
    assert len(set(tokenised)) == len(tokenised) == kept.PROBES
    issued = [source.next()[1].prompt_id for _ in range(5)]
    assert [f"train/{index}" for index in tokenised[kept.PROBES :]] == issued


def test_a_restart_goes_on_in_the_same_order_also_where_the_cache_is_lost(config, tmp_path):
    source = source_of(config, tmp_path)
    order = [source.next() for _ in range(400)]
    assert sorted(prompt.prompt_id for _, prompt in order) == sorted(2 * [f"train/{i}" for i in range(200)])
    for stop in (0, 57, 399):
        source = source_of(config, tmp_path)
        for index, _ in [source.next() for _ in range(stop)]:
            source.done(index)
        shutil.rmtree(tmp_path / "prompts")
        again = source_of(config, tmp_path)
        again.restore(source.state())
        assert [again.next() for _ in range(400 - stop)] == order[stop:]


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (["data.system_prompt=1"], ROWS),
        (["data.columns={prompt: ground_truth, answer: n}"], [row | {"ground_truth": "7"} for row in ROWS]),
        ([], [*ROWS[:-1], ROWS[-1] | {"ground_truth": 0}]),
        ([], ROWS[::-1]),
        ([], ROWS[:-1]),
    ],
)
def test_other_prompts_cannot_go_on(config, tmp_path, overrides, rows):
    state = source_of(config, tmp_path).state()
    with pytest.raises(CheckpointError, match=r"data\.train"):
        source_of(configured(tmp_path, *overrides, rows=rows), tmp_path).restore(state)


def test_rows_of_several_sources_are_counted_through(config, tmp_path):
    write_rows(tmp_path / "more.jsonl", [{"prompt": "2", "ground_truth": "2", "data_source": "c"}] * 3)
    config = configured(tmp_path, f"data.train=[{tmp_path / 'train.jsonl'}, {tmp_path / 'more.jsonl'}]")
    train = prepare(config, tmp_path).train
    assert train.about.sizes == (200, 3) and train.about.sources == ("a", "b", "c")
    assert [train[i].text for i in (199, 200, 202)] == ["1111", "2", "2"] and train[200].prompt_id == "train/200"


def test_a_file_of_which_nothing_fits_and_a_bad_row_are_refused_before_the_run(config, tmp_path):
    with pytest.raises(DataError, match=r"all 2 prompts are longer than data.max_prompt_tokens"):
        check(configured(tmp_path, rows=[ROWS[6]] * 2), tmp_path, print)
    with pytest.raises(DataError, match=r"train\.jsonl, row 199: no ground_truth"):
        check(configured(tmp_path, rows=[*ROWS[:199], {"prompt": "1"}]), tmp_path, print)


def test_a_file_that_changes_while_the_run_starts_or_goes_on_is_not_taken_for_the_one_that_was_checked(
    config, tmp_path, monkeypatch
):
    train = prepare(config, tmp_path).train
    write_rows(tmp_path / "train.jsonl", ROWS[::-1])
    assert train[100].prompt_id == "train/100" and train[100].info == {"n": 100}, "the rows that were read"
    check_prompts = kept.check_prompts

    def changing(source, *arguments, **named):
        found = check_prompts(source, *arguments, **named)
        write_rows(tmp_path / "train.jsonl", ROWS[:50])
        return found

    monkeypatch.setattr(kept, "check_prompts", changing)
    shutil.rmtree(tmp_path / "prompts")
    with pytest.raises(DataError, match=r"data\.train changed while the run started"):
        prepare(config, tmp_path)
    assert not (tmp_path / "prompts").exists() or not os.listdir(tmp_path / "prompts")


def test_a_long_check_reports_its_progress(config, tmp_path, monkeypatch):
    monkeypatch.setattr("asyncgrpo.data.prompts.PROGRESS_EVERY_S", -1.0)
    told = []
    check(config, tmp_path, told.append)
    assert told == [f"{tmp_path / 'train.jsonl'}: checked 0 of 200 rows"]


def test_without_a_key_as_of_a_model_to_be_downloaded_each_split_is_still_known_for_itself(
    config, tmp_path, monkeypatch
):
    write_rows(tmp_path / "eval.jsonl", ROWS[:3])
    config = configured(tmp_path, f"data.eval={tmp_path / 'eval.jsonl'}")
    monkeypatch.setattr(kept, "_key", lambda config, split: None)
    assert {name: about.num_rows for name, about in check(config, tmp_path).items()} == {"train": 200, "eval": 3}
    assert len(prepare(config, tmp_path).train) == 200 and not (tmp_path / "prompts").exists()
