"""Loading prompts, and their order over epochs, failures and restarts."""

import json

import pytest

from asyncgrpo.config.schema import DataConfig
from asyncgrpo.data.prompts import PromptSource, load_prompts
from asyncgrpo.errors import CheckpointError, DataError
from asyncgrpo.types import Prompt


def some_prompts(count: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(prompt_id=f"train/{i}", token_ids=(i, i + 1)) for i in range(count))


def write(path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": p, "ground_truth": p, "data_source": "s"}) + "\n" for p in prompts))
    return str(path)


def test_rows_become_prompts_and_the_over_long_are_counted(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", ["1", "22222", "333"])
    loaded = load_prompts(path, "train", tokenizer, DataConfig(train=path, max_prompt_tokens=5))
    assert tuple(loaded) == (
        Prompt(prompt_id="train/0", token_ids=(259, 49, 260), text="1", answer="1", source="s"),
        Prompt(prompt_id="train/2", token_ids=(259, 51, 51, 51, 260), text="333", answer="333", source="s"),
    )
    assert (loaded.about.schema_name, loaded.dropped_too_long, loaded.about.longest) == ("plain", 1, 7)


def test_a_prompt_knows_the_turns_of_its_row_where_that_has_turns(tmp_path, tokenizer):
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    rows = [{"prompt": turns, "ground_truth": "2"}, {"prompt": "1+1", "ground_truth": "2"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    chat, text = load_prompts(tmp_path / "rows.json", "train", tokenizer, DataConfig(train=""))
    assert (chat.turns, chat.text) == (tuple(turns), "")
    assert (text.turns, text.text) == ((), "1+1")


def test_a_limit_takes_the_first_rows(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", ["1", "2", "3"])
    loaded = load_prompts(path, "eval", tokenizer, DataConfig(train=path), limit=2)
    assert [prompt.prompt_id for prompt in loaded] == ["eval/0", "eval/1"]


def test_a_file_of_over_long_prompts_is_an_error(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", ["11111", "2222"])
    with pytest.raises(DataError, match=r"all 2 prompts are longer than data.max_prompt_tokens \(3\).*has at least 7"):
        load_prompts(path, "train", tokenizer, DataConfig(train=path, max_prompt_tokens=3))


def take(source: PromptSource, count: int) -> list[str]:
    return [item[1].prompt_id for item in (source.next() for _ in range(count)) if item is not None]


def test_the_order_of_a_seed_never_changes():
    source = PromptSource(some_prompts(10), seed=0, shuffle=True, epochs=None)
    assert [int(name.removeprefix("train/")) for name in take(source, 20)] == GOLDEN_ORDER


GOLDEN_ORDER = [0, 8, 9, 3, 7, 5, 1, 2, 6, 4, 3, 7, 4, 2, 9, 8, 1, 6, 5, 0]


def test_an_isolated_prompt_is_issued_only_to_a_caller_that_asks_for_it():
    source = PromptSource(some_prompts(3), seed=0, shuffle=False, epochs=1)
    take_prompt_indices(source, 3)
    source.isolate(2)
    source.isolate(0)
    source.done(1)
    assert source.next() is None and source.has_next and not source.is_exhausted
    assert (source.next_isolated_index, source.next_prompt_index) == (0, 0)
    assert [source.next_isolated()[0] for _ in range(2)] == [0, 2] and source.next_isolated() is None
    source.isolate(2)
    source.restore(source.state())
    assert take_prompt_indices(source, 3) == [0, 2], "a restart knows nothing of it"


def test_a_restored_run_may_have_more_epochs():
    short = PromptSource(some_prompts(2), seed=0, shuffle=True, epochs=1)
    for prompt_index in take_prompt_indices(short, 2):
        short.done(prompt_index)
    longer = PromptSource(some_prompts(2), seed=0, shuffle=True, epochs=2)
    longer.restore(short.state())
    assert take_prompt_indices(longer, 3) == [2, 3]


def take_prompt_indices(source: PromptSource, count: int) -> list[int]:
    return [item[0] for item in (source.next() for _ in range(count)) if item is not None]


@pytest.mark.parametrize(
    ("prompts", "seed", "shuffle", "said"),
    [
        (some_prompts(5), 0, True, "prompts in data.train was 4 and is now 5"),
        (some_prompts(5)[1:], 0, True, "fingerprint of data.train"),
        (some_prompts(4), 1, True, "run.seed was 0 and is now 1"),
        (some_prompts(4), 0, False, "data.shuffle was True and is now False"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(prompts, seed, shuffle, said):
    state = PromptSource(some_prompts(4), seed=0, shuffle=True, epochs=1).state()
    with pytest.raises(CheckpointError, match=said):
        PromptSource(prompts, seed=seed, shuffle=shuffle, epochs=1).restore(state)
