"""A whole run with several rewards, of rows of every built-in source, in every schema that is recognised."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from asyncgrpo.data.demo import make_demo_model
from tests.runs import assert_nothing_left, asyncgrpo, events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOURCES = {
    "math_reasoning": "42",
    "gsm8k": "42",
    "math": "42",
    "qa": "Paris",
    "trivia": "Paris",
    "classification": "yes",
    "code": '{"inputs": ["2"], "outputs": ["4"]}',
}
FUNCTIONS = """
def calls(prompts, completions, completion_ids, data_source, **kwargs):
    assert {type(p) for p in prompts} == {type(c) for c in completions} <= {str, list}
    assert all(isinstance(c, str) or c[0]["role"] == "assistant" for c in completions)
    assert len(completions) == len(completion_ids) == len(data_source) == len(kwargs["level"])
    return [{"score": len(ids), "together": len(completions)} for ids in completion_ids]

async def only_questions(completions, data_source, **kwargs):
    return [1.0 if source == "qa" else None for source in data_source]
"""


def rows_of(schema: str, text: str = "") -> list[dict]:
    """A row of every source, whose prompt begins with `text`, or with the schema's name."""
    text = text or schema
    turns = [{"role": "user", "content": text}]
    return [
        {
            "verl": {"prompt": turns, "data_source": source, "ability": "any", "extra_info": {"level": 1}}
            | {"reward_model": {"style": "rule", "ground_truth": truth}},
            "skyrl": {"prompt": turns, "data_source": source, "env_class": "any", "extra_info": {"level": 1}}
            | {"reward_spec": {"method": "rule", "ground_truth": truth}},
            "plain": {"prompt": text, "ground_truth": truth, "data_source": source, "level": 1},
            "verifiers": {"question": text, "answer": truth, "task": source, "info": json.dumps({"level": 1})},
            "trl": {"prompt": turns, "solution": truth, "data_source": source, "level": 1},
        }[schema]
        for source, truth in SOURCES.items()
    ]


def test_several_rewards_score_rows_of_every_source_in_every_schema(tmp_path: Path):
    make_demo_model(tmp_path / "model", seed=0)
    trained = {f"{schema}.json": rows_of(schema)[:5] for schema in ("verl", "skyrl", "plain", "verifiers")}
    trained["trl.json"] = rows_of("trl")[4:]
    suites = {"eval.json": rows_of("trl", "001")[:2], "others.json": rows_of("verl", "002")[:3]}
    for name, rows in (trained | suites).items():
        (tmp_path / name).write_text(json.dumps(rows))
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    result = asyncgrpo(
        *["train", "--model", "model", f"data.train=[{','.join(trained)}]", "--engine", "torch"],
        *["--eval-data", "eval.json", "--eval-data", "others.json", "sampling.eval_completions=4"],
        *["sampling.eval_temperature=1", "reward.success=0.05"],
        *["--reward-func", "mine.py:calls", "--reward-func", "mine.py:only_questions", "--reward-func", "data_source"],
        *["--rollout-n", "3", "--steps", "2", "--n-gpus", "0", "--out", "run", "reward.weights=[0.1, 2.0, 1.0]"],
        *["--lr", "0.01", "--kl-coef", "0.001"],
        *["buffer.prompts_per_step=12", "data.shuffle=false", "sampling.max_tokens=4", "data.max_prompt_tokens=32"],
        *["learner.tokens_per_microbatch=8192", "algorithm.filter_zero_signal=false", "run.eval_every=1"],
        "buffer.max_lag=0",  # trains in order, so that two steps have a row of each schema
        "reward.code.unsafe=true",  # where there is no bubblewrap
        "cluster.share_gpu=true",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " of 0.1 x " in " ".join(result.stdout.split())
    for step in events(tmp_path / "run", "step"):
        assert step["failures"] == {} and step["completions"] == 36
        assert step["lr"] <= 0.01 and (step["kl_reference"] > 0) == (step["step"] > 1), "it has moved since the start"
        parts = step["reward_parts"]
        assert parts["calls/together"] == 3.0 and parts["only_questions"] == 1.0 and parts["data_source"] < 0.5
        assert parts.keys() == step["reward_parts_std"].keys() >= {"data_source/match", "data_source/format"}
    assert all(event["engines"] == 1 and event["checksum"] == "ok" for event in events(tmp_path / "run", "sync"))
    assert_suites_were_evaluated(tmp_path / "run")
    rows = pq.read_table(tmp_path / "run" / "samples").to_pylist()
    assert {row["prompt"] for row in rows} == {f"<user>{name.removesuffix('.json')}<assistant>" for name in trained}
    assert {row["source"] for row in rows} == SOURCES.keys()
    for row in rows:
        parts = json.loads(row["parts"])
        total = 0.1 * parts["calls"] + 2.0 * parts.get("only_questions", 0.0) + parts["data_source"]
        assert row["reward"] == pytest.approx(total) and ("only_questions" in parts) == (row["source"] == "qa")
    assert_nothing_left(tmp_path)


def assert_suites_were_evaluated(run: Path) -> None:
    """Each file has numbers of its own under the versions that sampled it, and its completions are kept."""
    evaluations = events(run, "eval")
    assert [event["step"] for event in evaluations] == [0, 1, 2]
    for event in evaluations:
        sizes = {name: (suite["prompts"], suite["completions"]) for name, suite in event["suites"].items()}
        assert sizes == {"eval": (2, 8), "others": (3, 12)}
        for suite in event["suites"].values():
            assert suite["numbers"].keys() == {"reward", "pass@1", "pass@2", "pass@4", "maj@4"}
            assert suite["parts"]["calls/together"] == 4.0
            assert int(suite["version"].partition(".")[2]) >= event["step"]
    assert [event["suites"]["eval"]["numbers"]["pass@1"][0] for event in evaluations] == [1.0] * 3
    kept = {file.stem: pq.read_table(file).to_pylist() for file in (run / "evals").rglob("*.parquet")}
    assert kept.keys() == {"step_000000", "step_000001", "step_000002"}
    for rows in kept.values():
        assert [row["prompt_id"] for row in rows[::4]] == ["eval/0", "eval/1", "others/0", "others/1", "others/2"]
        assert all(row["prompt"].startswith("user: 00") for row in rows) and any(row["completion"] for row in rows)
