"""The flags of `train`, and what a run holds of its GPUs: what cannot fit is refused, and a split is chosen that does."""

import json
from types import SimpleNamespace

import pytest
import torch

from asyncgrpo.cli import options, running
from asyncgrpo.cli.options import train_overrides
from asyncgrpo.config import model_size, reach
from asyncgrpo.config.foreign_rules import split_gpus
from asyncgrpo.config.load import complete, load_config
from asyncgrpo.config.memory import GIB
from asyncgrpo.config.schema import Config, changed
from asyncgrpo.errors import ConfigError
from asyncgrpo.host import Host
from benchmarks.memory_table import PUBLISHED


def test_every_flag_reaches_its_knob():
    config = load_config(
        None,
        train_overrides(
            model="m", data="d.parquet", eval_data=["e.json"], reward_func=["r.py:score", "format"], rollout_n=4, epochs=3,
            lr=2e-6, kl_coef=0.01, steps=7, engine="torch", out="o", max_lag=1,
        ),
    )  # fmt: skip
    assert (config.model.path, config.data.train, config.data.eval) == ("m", "d.parquet", "e.json")
    assert config.reward.function == ("r.py:score", "format")
    assert (config.algorithm.group_size, config.algorithm.kl_coef) == (4, 0.01)
    assert (config.learner.lr, config.generators.engine, config.run.out) == (2e-6, "torch", "o")
    assert (config.run.steps, config.run.epochs, config.buffer.max_lag) == (7, 3, 1)


def test_a_flag_wins_over_the_file_and_a_key_wins_over_a_flag():
    assert train_overrides() == [] and train_overrides(kl_coef=0.0) == ["algorithm.kl_coef=0.0"]
    overrides = train_overrides(rollout_n=4, lr=2e-6, explicit=["learner.lr=3e-6"])
    config = load_config("one_node_8gpu", overrides)
    assert (config.algorithm.group_size, config.learner.lr, config.run.epochs) == (4, 3e-6, 15)


def test_of_steps_and_epochs_the_one_given_alone_is_the_end():
    assert load_config("one_node_8gpu", train_overrides(steps=5)).run.epochs is None
    assert load_config("cluster_64gpu", train_overrides(epochs=2)).run.steps is None


def test_gpus_are_split_by_the_rule_and_one_that_leaves_a_side_without_is_refused():
    splits = {(2, 1): (1, 1), (3, 1): (2, 1), (8, 2): (2, 4), (5, 4): (1, 1), (12, 4): (1, 8)}
    assert {given: split_gpus(*given) for given in splits} == splits
    for given, why in (((1, 1), "is too few to split"), ((4, 4), "cannot hold")):
        with pytest.raises(ConfigError, match=why):
            split_gpus(*given)


def placed(path: str | None, n_gpus: int, *explicit: str) -> Config:
    given = load_config(path, explicit, is_complete=False)
    return complete(given, "here", options.placed(given, n_gpus, explicit))


def test_what_was_decided_by_hand_is_kept_and_the_rest_split(monkeypatch):
    monkeypatch.setattr(model_size, "find_model", lambda path: None)
    monkeypatch.setattr(model_size, "_downloaded", lambda hub_id: None)
    model = ("model.path=m", "data.train=d")
    config = placed(None, 8, *model, "learner.ranks=2", "generators.gpus_each=2")
    assert (config.generators.count, config.generators.gpus_each, config.learner.ranks) == (3, 2, 2)
    assert split_gpus(8, 1, count=6) == (6, 2)
    config = placed(None, 6, *model, "learner.parallel.context=2")
    assert (config.generators.count, config.learner.ranks) == (3, 2), "ranks are a multiple of the layout"


def test_no_gpu_is_a_float32_run_on_the_cpu():
    config = placed("one_node_8gpu", 0)
    assert (config.generators.gpus_each, config.generators.count, config.learner.ranks) == (0, 1, 1)
    assert (config.learner.device, config.model.dtype) == ("cpu", "float32")


@pytest.fixture
def model(tmp_path):
    def make(name: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(PUBLISHED[name]))
        return str(tmp_path / name)

    return make


@pytest.fixture
def cards(monkeypatch):
    """Makes torch see so many GPUs of so many GiB, in a machine with room for all else."""

    def see(count: int, gib: float) -> None:
        roomy = Host(memory=2048 * GIB, shared=1024 * GIB, shared_free=1024 * GIB)
        monkeypatch.setattr(running.Host, "here", lambda shared_memory: roomy)
        properties = SimpleNamespace(name="Card", total_memory=int(gib * GIB))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    return see


def test_config_show_says_what_a_run_holds_but_not_of_a_model_that_is_not_here_or_of_a_cpu(asyncgrpo, model, tmp_path):
    typed = ("config", "show", "one_node_8gpu", f"model.path={model('Qwen3-8B')}")
    said = asyncgrpo(*typed).out
    assert "# learner rank" in said and "# engine GPU" in said and "KV cache:" in said
    assert "for cards of 80 GB" in said
    assert "for cards of" not in asyncgrpo(*typed, "cluster.gpu_memory_gb=141").out
    (tmp_path / "copy.yaml").write_text(said)
    assert load_config(tmp_path / "copy.yaml").learner.ranks == 4
    for arguments in (["quickstart"], ["one_node_8gpu", "model.path=/no/model"]):
        ended = asyncgrpo("config", "show", *arguments)
        assert ended.code == 0 and "learner rank  " not in ended.out


def test_gpus_are_split_by_the_size_of_the_model(model, cards):
    def of(name: str) -> tuple[str, str]:
        return f"model.path={model(name)}", "data.train=d"

    cards(8, 79)
    for name, count, each, ranks in (("Qwen3-8B", 4, 1, 4), ("Qwen3-32B", 1, 2, 6)):
        config = placed(None, 8, *of(name))
        assert (config.generators.count, config.generators.gpus_each, config.learner.ranks) == (count, each, ranks)
        running.check_fit(config)
    assert placed(None, 8, *of("Qwen3-32B"), "learner.ranks=5").learner.ranks == 5
    taught = ["algorithm.kl_coef=1", "algorithm.kl_kind=k2", "teacher.gpus_each=2"]
    taught.append(f"teacher.path={model('Qwen3-32B')}")
    config = placed(None, 8, *of("Qwen3-8B"), *taught)
    assert (config.generators.count, config.learner.ranks, config.teacher_gpus) == (3, 3, 2)
    running.check_fit(config)
    cards(8, 70)
    with pytest.raises(ConfigError, match=r"teacher.path .*: an engine's? .*raise teacher.gpus_each \(1\)"):
        running.check_fit(changed(config, {"teacher.gpus_each": 1}))
    with pytest.raises(ConfigError, match="--n-gpus 3 leaves 1 beside 2 of teachers"):
        placed(None, 3, *of("Qwen3-8B"), *taught)
    cards(1, 23.5)
    config = placed(None, 1, *of("Qwen3-0.6B"))
    assert config.cluster.share_gpu and config.generators.groups_in_flight < 32
    running.check_fit(config)
    kept = placed(None, 1, *of("Qwen3-0.6B"), "generators.memory_fraction=0.2")
    assert kept.generators.memory_fraction == 0.2


def test_a_model_that_is_not_here_is_looked_up_and_else_split_in_halves(monkeypatch, model, cards):
    cards(8, 79)
    monkeypatch.setattr(reach, "why_no_hub", lambda: None)
    settings = ("model.path=Qwen/Qwen3-32B", "data.train=d")
    monkeypatch.setattr(model_size, "_downloaded", lambda hub_id: None)
    assert placed(None, 8, *settings).learner.ranks == 4
    monkeypatch.setattr(model_size, "_downloaded", lambda hub_id: model_size.Path(model("Qwen3-32B")))
    assert placed(None, 8, *settings).learner.ranks == 6
