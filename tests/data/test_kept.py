"""Prompts that are kept in a file: found only for the same data, tokenizer and settings, and equal to those that were made."""

import shutil
import threading
from pathlib import Path

import pytest

from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config
from asyncgrpo.data import kept
from asyncgrpo.data.kept import load_cached, prepare, prepare_if_small
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.data.table import PromptTable
from asyncgrpo.types import Prompt
from tests.data.conftest import write_rows

ROWS = [
    {"prompt": "1", "ground_truth": "é", "data_source": "a", "n": 2.5},
    {"prompt": "22222", "ground_truth": None, "data_source": "b"},
    {"prompt": "333", "ground_truth": {"of": [1, None]}, "data_source": "a", "flag": True},
    {"prompt": "1", "ground_truth": 7},
]


@pytest.fixture
def model(tmp_path, demo_model) -> Path:
    return shutil.copytree(demo_model, tmp_path / "model")


def configured(folder: Path, *overrides: str) -> Config:
    write_rows(folder / "train.jsonl", ROWS)
    write_rows(folder / "eval.jsonl", ROWS[:3])
    return load_config(
        None,
        [
            f"model.path={folder / 'model'}",
            f"data.train={folder / 'train.jsonl'}",
            f"data.eval={folder / 'eval.jsonl'}",
            "data.max_prompt_tokens=5",
            *overrides,
        ],
    )


def files(folder: Path) -> list[Path]:
    return sorted((folder / "prompts").glob("*"))


def refuse_to_tokenise(monkeypatch) -> None:
    def load_tokenizer(path: str) -> None:
        raise AssertionError("a tokenizer was loaded")

    monkeypatch.setattr(kept, "load_tokenizer", load_tokenizer)


def test_kept_prompts_are_those_that_were_made_and_need_no_tokenizer(tmp_path, model, monkeypatch):
    config = configured(tmp_path)
    made = prepare(config, tmp_path)
    refuse_to_tokenise(monkeypatch)
    loaded = prepare(config, tmp_path)
    assert tuple(loaded.train) == tuple(made.train) and tuple(loaded.held_out) == tuple(made.held_out)
    assert [prompt.prompt_id for prompt in loaded.train] == ["train/0", "train/2", "train/3"]
    assert loaded.train[0] == Prompt(
        prompt_id="train/0", token_ids=(259, 49, 260), text="1", answer="é", source="a", info={"n": 2.5}
    )
    assert loaded.train[1].answer == {"of": [1, None]} and loaded.train[-1].token_ids == (259, 49, 260)
    assert loaded.train.about == made.train.about and loaded.stop_token_ids == made.stop_token_ids == (257,)
    assert (loaded.train.dropped_too_long, loaded.train.about.longest) == (1, 7)


def test_a_source_of_kept_prompts_is_that_of_a_tuple_of_them(tmp_path, model):
    config = configured(tmp_path)
    prepare(config, tmp_path)
    table = load_cached(config, tmp_path)["train"]
    sources = [PromptSource(prompts, seed=0, shuffle=True, epochs=2) for prompts in (table, tuple(table))]
    assert sources[0].state() == sources[1].state()
    assert [sources[0].next() for _ in range(7)] == [sources[1].next() for _ in range(7)]


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("data.max_prompt_tokens=4", None),
        ("data.system_prompt=be short", None),
        ("data.columns={prompt: ground_truth}", None),
        ("sampling.stop=[a]", None),
        ("data.eval_rows=1", None),
        (None, "train.jsonl"),
        (None, "eval.jsonl"),
        (None, "model/tokenizer.json"),
        (None, "model/tokenizer_config.json"),
        (None, "model/chat_template.jinja"),
        (None, "model/generation_config.json"),
    ],
)
def test_what_prompts_depend_on_is_in_the_name_of_their_file(tmp_path, model, override, change):
    config = configured(tmp_path)
    prepare(config, tmp_path)
    assert set(load_cached(config, tmp_path)) == {"train", "eval"}
    if change:
        with open(tmp_path / change, "a") as file:  # as long and as old as it was: only its bytes differ
            file.write(" ")
    else:
        config = configured(tmp_path, override)
    assert set(load_cached(config, tmp_path)) < {"train", "eval"}


def test_what_prompts_do_not_depend_on_leaves_them(tmp_path, model):
    prepare(configured(tmp_path), tmp_path)
    config = configured(tmp_path, "run.seed=9", "data.shuffle=false", "algorithm.group_size=4", "learner.lr=1e-4")
    with open(tmp_path / "model" / "model.safetensors", "ab") as weights:
        weights.write(b" ")
    assert set(load_cached(config, tmp_path)) == {"train", "eval"}


def test_any_flipped_byte_and_any_lost_end_is_found_and_made_good(tmp_path, model):
    config = configured(tmp_path)
    made = tuple(prepare(config, tmp_path).train)
    (file,) = (tmp_path / "prompts").glob("train-*")
    whole = file.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x20
        file.write_bytes(damaged)
        assert "train" not in load_cached(config, tmp_path)
    for size in {0, 1, 20, 30, len(whole) // 2, len(whole) - 1}:
        file.write_bytes(whole[:size])
        assert "train" not in load_cached(config, tmp_path)
    file.write_bytes(whole + b"\0")
    assert "train" not in load_cached(config, tmp_path)
    assert tuple(prepare(config, tmp_path).train) == made
    assert file.read_bytes() == whole


def test_a_file_that_others_can_write_or_that_has_another_key_is_not_used(tmp_path, model):
    config = configured(tmp_path)
    prepare(config, tmp_path)
    file, other = sorted((tmp_path / "prompts").glob("*"), reverse=True)
    assert PromptTable.load(file, file.stem.partition("-")[2]) is not None
    assert PromptTable.load(other, file.stem.partition("-")[2]) is None
    file.chmod(0o666)
    assert "train" not in load_cached(config, tmp_path)


def test_several_starts_at_once_keep_one_whole_file(tmp_path, model):
    config = configured(tmp_path)
    tables = []
    starts = [threading.Thread(target=lambda: tables.append(prepare(config, tmp_path).train)) for _ in range(8)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(files(tmp_path)) == 2 and set(load_cached(config, tmp_path)) == {"train", "eval"}
    assert all(tuple(table) == tuple(tables[0]) for table in tables) and len(tables) == 8


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, model, caplog):
    (tmp_path / "prompts").write_text("no folder")
    assert len(prepare(configured(tmp_path), tmp_path).train) == 3
    assert "the prompt cache was not written" in caplog.text


def test_a_large_file_is_left_to_the_buffer(tmp_path, model, monkeypatch):
    config = configured(tmp_path)
    monkeypatch.setattr(kept, "SMALL_BYTES", 10)
    prepare_if_small(config, tmp_path)
    assert not files(tmp_path)
    monkeypatch.undo()
    prepare_if_small(config, tmp_path)
    assert len(files(tmp_path)) == 2


def test_data_that_changes_while_it_is_read_is_not_kept(tmp_path, model, monkeypatch):
    config = configured(tmp_path)
    load_prompts = kept.load_prompts

    def changing(sources, *arguments, **named):
        table = load_prompts(sources, *arguments, **named)
        with open(sources[0], "a") as file:
            file.write("\n")
        return table

    monkeypatch.setattr(kept, "load_prompts", changing)
    prepare(config, tmp_path)
    assert not files(tmp_path)
