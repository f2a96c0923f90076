"""The prompts of a run: every row has its place, is checked before the run, and is tokenised when it is due."""

import json
import shutil
from pathlib import Path

import pytest

from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config, DataConfig
from asyncgrpo.data import loading
from asyncgrpo.data.loading import Prompts, check, prepare
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.errors import CheckpointError, DataError
from asyncgrpo.types import Prompt
from tests.data.conftest import write_rows

ROWS = [{"prompt": "1" * (1 + i % 7), "ground_truth": i, "data_source": "ab"[i % 2], "n": i} for i in range(200)]
FITS = [i for i in range(200) if i % 7 <= 2]  # with two tokens of the chat template, at most five


@pytest.fixture
def config(tmp_path, demo_model) -> Config:
    shutil.copytree(demo_model, tmp_path / "model")
    return configured(tmp_path)


def configured(folder: Path, *overrides: str, rows=ROWS) -> Config:
    write_rows(folder / "train.jsonl", rows)
    files = [f"model.path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}"]
    return load_config(None, [*files, "data.max_prompt_tokens=5", *overrides])


def source_of(config: Config) -> PromptSource:
    train = prepare(config).train
    return PromptSource(train, seed=0, shuffle=True, epochs=2, sizes=train.sizes)


def test_every_row_has_its_place_and_one_that_is_too_long_has_no_tokens(config):
    prompts = prepare(config)
    assert (len(prompts.train), prompts.train.schema, prompts.stop_token_ids) == (200, "plain", (257,))
    assert [i for i, prompt in enumerate(prompts.train) if prompt.token_ids] == FITS
    assert prompts.train[8] == Prompt(
        prompt_id="train/8", token_ids=(259, 49, 49, 260), text="11", answer=8, source="a", info={"n": 8}
    )
    with pytest.raises(IndexError):
        prompts.train[200]


def test_held_out_prompts_are_the_first_rows_that_fit(config, tmp_path):
    config = configured(tmp_path, f"data.eval={{few: {tmp_path / 'train.jsonl'}}}", "data.eval_rows=9")
    assert [prompt.prompt_id for prompt in prepare(config).held_out] == [f"few/{i}" for i in FITS if i < 9]


def test_a_prompt_has_the_turns_of_its_row_where_that_has_turns(tmp_path, tokenizer):
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    rows = [{"prompt": turns, "ground_truth": "2"}, {"prompt": "1+1", "ground_truth": "2"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    chat, text = Prompts([str(tmp_path / "rows.json")], "train", tokenizer, DataConfig(train=""))
    assert (chat.turns, chat.text) == (tuple(turns), "")
    assert (text.turns, text.text) == ((), "1+1")


def test_only_rows_that_are_due_are_tokenised(config, monkeypatch):
    tokenised = []
    rendered = loading.rendered

    def noting(source, index, *rest):
        tokenised.append(index)
        return rendered(source, index, *rest)

    monkeypatch.setattr(loading, "rendered", noting)
    source = source_of(config)
    assert len(set(tokenised)) == len(tokenised) == loading.PROBES
    issued = [source.next()[1].prompt_id for _ in range(5)]
    assert [f"train/{index}" for index in tokenised[loading.PROBES :]] == issued


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
    state = source_of(config).state()
    with pytest.raises(CheckpointError, match=r"data\.train"):
        source_of(configured(tmp_path, *overrides, rows=rows)).restore(state)


def test_rows_of_several_sources_are_counted_through(config, tmp_path):
    write_rows(tmp_path / "more.jsonl", [{"prompt": "2", "ground_truth": "2", "data_source": "c"}] * 3)
    config = configured(tmp_path, f"data.train=[{tmp_path / 'train.jsonl'}, {tmp_path / 'more.jsonl'}]")
    train, checked = prepare(config).train, check(config)["train"]
    assert train.sizes == (200, 3) and checked == (203, {"a", "b", "c"})
    assert [train[i].text for i in (199, 200, 202)] == ["1111", "2", "2"] and train[200].prompt_id == "train/200"


def test_a_file_of_which_nothing_fits_and_a_bad_row_are_refused_before_the_run(config, tmp_path):
    with pytest.raises(DataError, match=r"all 2 prompts are longer than data.max_prompt_tokens \(5\).* has 9"):
        check(configured(tmp_path, rows=[ROWS[6], ROWS[5]]))
    more = [f"data.train=[{tmp_path}/good.jsonl, {tmp_path}/train.jsonl]"]
    write_rows(tmp_path / "good.jsonl", ROWS[:2])
    with pytest.raises(DataError, match=r"train\.jsonl, row 199: no ground_truth"):
        check(configured(tmp_path, *more, rows=[*ROWS[:199], {"prompt": "1"}]))


def test_turns_that_the_template_refuses_are_refused_before_the_run(config, tmp_path):
    def row(*functions: dict, content: str = "1") -> dict:
        called = {"role": "assistant", "content": content, "tool_calls": [{"function": one} for one in functions]}
        return {"prompt": [called], "ground_truth": "1"}

    def refused(condition: str, other: dict) -> None:
        template = "{% if messages[0].tool_calls" + condition + " %}{{ raise_exception('not so') }}{% endif %}"
        (tmp_path / "model" / "chat_template.jinja").write_text(template + "a")
        with pytest.raises(DataError, match=r"train\.jsonl, row 150: .* refuses the turns assistant: not so"):
            check(configured(tmp_path, rows=[*[row(plain)] * 150, other, *[row(plain)] * 49]))

    plain = {"name": "f", "arguments": {"a": 1}}
    refused("|length > 1", row(plain, plain))
    refused("[0].function.arguments is string", row(plain | {"arguments": '{"a": 1}'}))
    refused(" and '<think>' in messages[0].content", row(plain, content="<think>1"))


def test_a_long_check_reports_its_progress(config, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "PROGRESS_EVERY_S", -1.0)
    lines = []
    check(config, lines.append)
    assert lines[0] == f"{tmp_path / 'train.jsonl'}: checked 0 of 200 rows"


def test_rows_without_an_answer_are_named_unless_no_row_has_one(config, tmp_path, caplog):
    blank = ROWS[0] | {"ground_truth": None}
    check(configured(tmp_path, rows=[blank, blank]))
    assert "no answer" not in caplog.text
    check(configured(tmp_path, rows=[ROWS[1], blank]))
    assert "1 of 2 rows have no answer: 1" in caplog.text
