"""Rows that a library makes or loads: reasoning-gym and Hugging Face data sets, and where a source is treated as a file."""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncgrpo.cluster.nodes import with_absolute_paths
from asyncgrpo.config.load import load_config
from asyncgrpo.data import sources
from asyncgrpo.data.loading import prepare, recognise
from asyncgrpo.data.sources import digest_of, read_source
from asyncgrpo.errors import ConfigError, DataError

needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed (extra gym)")
SUMS = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&max_digits=1&size=20"


@needs_gym
def test_a_generator_gives_rows_that_say_which_task_they_are():
    rows, columns = read_source(SUMS, {"prompt": "not for these rows"})
    assert (len(rows), columns) == (20, {})
    record = recognise(rows, columns, SUMS).to_record(rows[7], 7)
    assert record.source == "reasoning-gym:chain_sum" and "=" in record.messages[0]["content"]
    assert record.info["reasoning_gym"]["index"] == 7
    sources.make_tasks.cache_clear()
    assert read_source(SUMS, {})[0] == rows, "two reads differ"
    assert read_source(f"{SUMS}&seed=1", {})[0] != rows
    assert len(read_source("reasoning-gym:chain_sum", {})[0]) == 1000


@needs_gym
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("reasoning-gym:chain_summ", "has no generator 'chain_summ'"),
        ("reasoning-gym:composite", "has no generator 'composite'"),
        ("reasoning-gym:chain_sum?min_term=2", "refuses these parameters: .*min_term"),
        ("reasoning-gym:chain_sum?min_terms=9&max_terms=2", "chain_sum of reasoning-gym refuses these parameters"),
    ],
)
def test_what_reasoning_gym_cannot_make_is_refused_in_one_sentence(source, sentence):
    with pytest.raises(DataError, match=sentence):
        read_source(source, {})


@pytest.mark.parametrize(
    ("module", "source", "extra"), [("reasoning_gym", SUMS, "gym"), ("datasets", "hf:nobody/such-data", "hf")]
)
def test_a_library_that_is_missing_is_named_with_its_extra(module, source, extra, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{source.split('?')[0]}.*pip install 'asyncgrpo\[{extra}\]'"):
        read_source(source, {})


@pytest.fixture
def datasets(monkeypatch, tmp_path):
    """The library, which is optional, with an empty cache and no hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    library = pytest.importorskip("datasets", reason="datasets is not installed (extra hf)")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return library


def test_a_folder_that_datasets_wrote_is_read(datasets, tmp_path):
    rows = [{"question": "1+1", "answer": "#### 2"}, {"question": "1+2", "answer": "#### 3"}]
    halves = {"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
    datasets.DatasetDict(halves).save_to_disk(tmp_path / "sums")
    assert read_source(f"hf:{tmp_path}/sums", {})[0] == rows
    assert read_source(f"hf:{tmp_path}/sums?split=test", {})[0] == rows[:1]
    halves["train"].save_to_disk(tmp_path / "one")
    assert read_source(f"hf:{tmp_path}/one", {"prompt": "question"}) == (rows, {"prompt": "question"})
    assert digest_of(f"hf:{tmp_path}/sums") != digest_of(f"hf:{tmp_path}/sums?split=test")


def test_rows_of_the_hub_have_its_id_as_data_source_where_they_have_none(monkeypatch):
    asked = {}

    class Library:
        @staticmethod
        def load_dataset(path, **given):
            asked[path] = given
            return [{"question": "1+1", "answer": "#### 2"}, {"question": "2", "answer": "2", "data_source": "own"}]

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setitem(sys.modules, "datasets", Library)
    rows, _ = read_source("hf:openai/gsm8k?name=main&revision=r1", {})
    assert [row["data_source"] for row in rows] == ["openai/gsm8k", "own"]
    assert asked == {"openai/gsm8k": {"split": "train", "name": "main", "revision": "r1"}}
    read_source("hf:openai/gsm8k?split=test", {})
    assert asked == {"openai/gsm8k": {"split": "test"}}


def test_a_data_set_that_cannot_be_reached_is_one_sentence(datasets):
    with pytest.raises(DataError, match=r"^hf:nobody/such-data: .*datasets cannot load it: .*nobody/such-data[^\n]*$"):
        read_source("hf:nobody/such-data", {})


@pytest.fixture
def config(tmp_path, demo_model):
    shutil.copytree(demo_model, tmp_path / "model")
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "1", "ground_truth": "1"}) + "\n")
    train = f"data.train=[{tmp_path}/one.jsonl, '{SUMS}']"
    return load_config(None, [f"model.path={tmp_path}/model", train, f"data.eval={SUMS}&seed=1"])


@needs_gym
def test_prompts_of_several_sources_are_loaded(config):
    prompts = prepare(config)
    assert prompts.train.sizes == (1, 20) and len(prompts.held_out) == 20


def test_only_files_and_folders_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    train = "data.train=[a.jsonl, hf:saved?split=test, hf:openai/gsm8k, reasoning-gym:aiw]"
    config = with_absolute_paths(load_config(None, ["model.path=m", train, "data.eval=reasoning-gym:aiw?seed=1"]))
    here = Path.cwd()
    assert config.data.train == (
        f"{here}/a.jsonl", f"hf:{here}/saved?split=test", "hf:openai/gsm8k", "reasoning-gym:aiw"
    )  # fmt: skip
    assert config.data.eval == "reasoning-gym:aiw?seed=1"
