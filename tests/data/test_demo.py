"""The demo's model, tasks and reward."""

import json

from asyncgrpo.config.schema import DataConfig
from asyncgrpo.data.demo import incremented, make_demo_model, write_demo_task
from asyncgrpo.data.loading import Prompts
from asyncgrpo.rewards.rules import demo_score


def test_a_seed_gives_the_same_model_and_leaves_torch_alone(demo_model, tmp_path):
    import torch

    state = torch.random.get_rng_state()
    make_demo_model(tmp_path / "again", seed=0)
    make_demo_model(tmp_path / "other", seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    weights = [(f / "model.safetensors").read_bytes() for f in (demo_model, tmp_path / "again", tmp_path / "other")]
    assert weights[0] == weights[1] != weights[2]


def test_held_out_prompts_are_never_trained_and_the_files_load(tmp_path, tokenizer):
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    write_demo_task(train, held_out, seed=1, rows=80, eval_rows=20)
    loaded = [Prompts([str(path)], "train", tokenizer, DataConfig(train="")) for path in (train, held_out)]
    assert [len(prompts) for prompts in loaded] == [80, 20]
    assert len({prompt.token_ids for prompts in loaded for prompt in prompts}) == 100
    assert {prompt.source for prompts in loaded for prompt in prompts} == {"demo_increment"}
    row = json.loads(train.read_text().splitlines()[0])
    assert row["ground_truth"] == incremented(row["prompt"]) and incremented("907") == "018"


def test_each_step_towards_the_answer_scores_more():
    ladder = ["abcd", "ab1", "111", "551", "573", "537", "735"]
    scores = [demo_score(text, "735") for text in ladder]
    assert (scores[0], scores[-1]) == (0.0, 1.0)
    assert max(demo_score(text, "735") for text in ("7350", " 735", "")) < 1.0
    assert scores == sorted(scores) and len(set(scores)) == len(scores)
