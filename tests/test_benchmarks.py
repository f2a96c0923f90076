"""The benchmarks run: the smallest cell of each says what it measured. No figure is judged here."""

import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import benchmarks
from asyncgrpo.learner.packing import pack
from benchmarks import gpu_learner
from benchmarks.gpu_tables import learner_table
from benchmarks.rollouts import VERSION, Lengths, make_groups
from benchmarks.shapes import SHAPES, Work, qwen3, train_flops

SMALLEST = {
    "device": "cpu", "runs": 1, "seed": 1, "peak": None, "shape": "tiny", "layers": 2, "tokens": 256,
    "budget": 256, "lora": 0, "recompute": False, "offload": False, "share": True, "compile": False, "kernel": "auto",
}  # fmt: skip


def test_the_learner_on_a_card_needs_no_ray_no_engine_and_no_configuration_files(tmp_path, monkeypatch):
    hidden = ("ray", "sglang", "peft", "omegaconf")  # from processes that are started from now on
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({hidden}))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = gpu_learner.attempt(SMALLEST, time.monotonic() + 200, retry=True)
    assert [one["what"] for one in found] == ["rl step", "supervised step", "rl speed of supervised"], found
    for one in found:
        assert 0 <= one["spread"][0] <= one["value"] <= one["spread"][1]
        assert {"what", "unit", "runs", "seed", "machine", "commit", "versions"} <= set(one)
    assert found[0]["computed"] < found[0]["tokens"]
    table = learner_table([*found, gpu_learner.failed(SMALLEST, "no time")])
    assert table.count("\n| tiny |") == 1 and table.endswith("no time")


def test_operations_are_those_of_the_matrices():
    """Weights are counted of the model that transformers builds, pairs of a query and a key one by one."""
    shape = SHAPES["1.7b"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen3(shape))
    matrices = {name: p.numel() for name, p in model.named_parameters() if name.endswith("proj.weight")}
    assert shape.body == sum(matrices.values())
    assert shape.head == model.get_output_embeddings().weight.numel()

    lengths = Lengths([3, 2], [[4, 1], [2, 5]])
    groups = make_groups(lengths, vocabulary=50, seed=0)
    apart = pack(groups, VERSION, rank=0, world=1, tokens_per_microbatch=99, share_prompts=False)
    shared = pack(groups, VERSION, rank=0, world=1, tokens_per_microbatch=99, share_prompts=True)
    whole = Work.of_sequences(lengths.prompts, lengths.completions)
    assert whole == Work.of_rows(apart.trained) == Work(6 + 3 + 3 + 6, 12, 21 + 6 + 6 + 21)
    assert Work.of_rows(shared.trained) == Work(18 - 3 - 2, 12, 54 - 6 - 3)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * 2 * whole.pairs
    forward = 2 * shape.body * 18 + 2 * shape.head * 12 + attention
    assert train_flops(shape, whole) == pytest.approx(3 * forward)


def test_every_benchmark_can_be_imported():
    for path in Path(benchmarks.__file__).parent.glob("*.py"):
        import_module(f"benchmarks.{path.stem}")
