"""Files of the field's projects are read as they are."""

import json

import pytest

from asyncgrpo.data.loading import Record, recognise
from asyncgrpo.errors import ConfigError, DataError

TURN = [{"role": "user", "content": "2+2?"}]


def first_record(row: dict, columns: dict[str, str] | None = None) -> tuple[str, Record]:
    schema = recognise([row], columns or {}, "rows.jsonl")
    return schema.name, schema.to_record(row, 0)


EXTRA = {"index": 7, "split": "train"}
PROJECTS = [
    (
        {"data_source": "openai/gsm8k", "prompt": TURN, "extra_info": EXTRA, "ability": "math"}
        | {"reward_model": {"style": "rule", "ground_truth": "4"}},
        ("verl", Record(TURN, "4", "openai/gsm8k", EXTRA)),
    ),
    (
        {"prompt": "2+2?", "ground_truth": "4", "data_source": "maths", "level": 1, "extra_info": {"a": 2}},
        ("plain", Record("2+2?", "4", "maths", {"level": 1, "a": 2})),
    ),
    (
        {"data_source": "gsm8k", "prompt": TURN, "extra_info": EXTRA, "env_class": "gsm8k"}
        | {"reward_spec": {"method": "rule", "ground_truth": "4"}},
        ("skyrl", Record(TURN, "4", "gsm8k", {"env_class": "gsm8k"} | EXTRA)),
    ),
    (
        {"prompt": "2+2?", "solution": "4", "difficulty": 0.5},
        ("trl", Record("2+2?", "4", "", {"solution": "4", "difficulty": 0.5})),
    ),
    ({"prompt": TURN}, ("trl", Record(TURN, None, "", {}))),
    # So are many files made for TRL, whose reward functions take any column.
    ({"prompt": TURN, "answer": "4", "level": 1}, ("trl, answer", Record(TURN, "4", "", {"level": 1}))),
    ({"question": "2+2?", "info": {}}, ("verifiers", Record("2+2?", None, "", {}))),
]


@pytest.mark.parametrize(("row", "found"), PROJECTS, ids=[name for _, (name, _) in PROJECTS])
def test_a_row_of_each_project_is_known_by_its_columns(row, found):
    assert first_record(row) == found


@pytest.mark.parametrize("info", [{"unit": "m"}, json.dumps({"unit": "m"})])
@pytest.mark.parametrize("row", [{"prompt": TURN}, {"question": "2+2?"}])
def test_verifiers(row, info):
    row = {**row, "answer": "4", "info": info, "task": "sums"}
    prompt = row.get("prompt", "2+2?")
    assert first_record(row) == ("verifiers", Record(prompt, "4", "sums", {"unit": "m"}))


def test_other_files_go_through_the_columns_map():
    row = {"input": "2+2?", "label": 4, "set": "sums", "level": 1, "prompt": "not this one"}
    columns = {"prompt": "input", "answer": "label", "source": "set"}
    info = {"label": 4, "set": "sums", "level": 1}
    assert first_record(row, columns) == ("plain, with data.columns", Record("2+2?", 4, "sums", info))
    record = Record("2+2?", "4", "", {"gold": "4"})
    assert first_record({"prompt": "2+2?", "gold": "4"}, {"answer": "gold"})[1] == record


def test_chat_turns_lose_the_keys_that_parquet_filled_up():
    turns = [{"role": "user", "content": "2+2?", "name": None}]
    assert first_record({"prompt": turns, "ground_truth": "4"})[1].messages == TURN
    blank = {"role": "system", "content": ""}
    assert first_record({"prompt": [blank, *turns], "ground_truth": "4"})[1].messages == [blank, *TURN]


def test_a_prompt_under_another_name_leaves_the_rest_of_the_schema_as_it_is():
    turns = [{"role": "user", "content": "2+2?"}]
    verl = {"messages": turns, "reward_model": {"ground_truth": "4"}, "data_source": "sums", "extra_info": {"n": 1}}
    name, record = first_record(verl, {"prompt": "messages"})
    assert (name, record) == ("verl, with data.columns", Record(turns, "4", "sums", {"n": 1}))
    plain = {"prompt": "2+2?", "ground_truth": "4", "origin": "sums"}
    assert first_record(plain, {"source": "origin"})[1] == Record("2+2?", "4", "sums", {"origin": "sums"})
    assert first_record({"question": "2+2?", "answer": "4", "kind": "sums"}, {"source": "kind"})[1].answer == "4"
    schema = recognise([verl], {"prompt": "messages"}, "rows.jsonl")
    with pytest.raises(DataError, match=r"rows.jsonl, row 17: no prompt; a prompt is named"):
        schema.to_record({name: value for name, value in verl.items() if name != "messages"}, 17)


@pytest.mark.parametrize(
    ("columns", "error", "said"),
    [
        ({"promt": "input"}, ConfigError, "data.columns.promt: unknown field; expected prompt, answer, source"),
        ({"prompt": "inptu"}, DataError, "'inptu' for data.columns.prompt; the columns are input, label"),
        ({}, DataError, "row 0: no prompt or question among the columns input, label"),
    ],
)
def test_a_file_that_fits_nothing_is_told_what_would_do(columns, error, said):
    with pytest.raises(error, match=said.replace(".", r"\.")):
        recognise([{"input": "2+2?", "label": "4"}], columns, "rows.jsonl")


PLAIN = {"prompt": "a", "ground_truth": "b"}
VERL = {"prompt": TURN, "reward_model": {"ground_truth": "4"}}


@pytest.mark.parametrize(
    ("first", "later", "said"),
    [
        (VERL, {"prompt": TURN, "ground_truth": "4"}, "no reward_model; an answer is named reward_model.ground_truth"),
        (VERL, {**VERL, "reward_model": "4"}, "reward_model is a string; expected an object with ground_truth"),
        (PLAIN, {**PLAIN, "data_source": {"of": "sums"}}, "data_source is an object; expected text, which selects"),
        (VERL, {**VERL, "extra_info": "{"}, "extra_info is text but not JSON"),
        (VERL, {**VERL, "prompt": []}, "prompt is an empty list; expected text or a list of chat turns"),
        (VERL, {**VERL, "prompt": ["2+2?"]}, "turn 0 of prompt is not an object with role and content"),
        (VERL, {**VERL, "prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "image 0 is missing; expected"),
        ({"question": "a", "answer": "b"}, {"question": "a"}, "no answer; an answer is named"),
        (PLAIN, {**PLAIN, "prompt": " \n"}, "its prompt is empty"),
        (PLAIN, {**PLAIN, "prompt": "a\ud800"}, r"\ud800"),
        (PLAIN, {**PLAIN, "extra_info": '{"\\ud83d": 1}'}, r"\ud83d"),
        (PLAIN, {**PLAIN, "ground_truth": 10**30}, "it cannot be encoded"),
        (PLAIN, {**PLAIN, "sound": object()}, "it cannot be encoded"),
        (PLAIN, {**PLAIN, "tests": "x" * 2**22}, "its answer and info have 4,194,319 bytes"),
    ],
)
def test_a_later_row_that_does_not_fit_is_named(first, later, said):
    schema = recognise([first, later], {}, "rows.jsonl")
    schema.to_record(first, 0)
    with pytest.raises(DataError) as caught:
        schema.to_record(later, 1)
    assert str(caught.value).startswith("rows.jsonl, row 1: ")
    assert said in str(caught.value)
    assert f"schema {schema.name}, from row 0" in str(caught.value)
