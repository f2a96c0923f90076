"""What a process on another node needs, without another node."""

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncgrpo.cluster import wiring
from asyncgrpo.cluster.folder import RunFolder
from asyncgrpo.cluster.nodes import (
    check_bind_reaches,
    check_files,
    environment_to_share,
    network_environment,
    set_environment,
    with_absolute_paths,
)
from asyncgrpo.cluster.run import Run
from asyncgrpo.cluster.wiring import TeacherActor, joined_ranks, ranks_timeout_s
from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import Config
from asyncgrpo.errors import ConfigError


def configured(*overrides: str) -> Config:
    return load_config(None, ["model.path=model", "data.train=train.jsonl", *overrides])


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "run").mkdir()
    for name in ("train.jsonl", "eval.jsonl", "reward.py", "run/lineage"):
        (tmp_path / name).write_text("")
    return tmp_path


def test_processes_are_told_absolute_paths(files: Path):
    config = configured("data.eval=[eval.jsonl, other/eval.jsonl]", "reward.function=reward.py:judge", "run.out=run")
    told = Run(config, RunFolder(files / "run"), "")._config
    assert told == with_absolute_paths(config)
    assert told.model.path == str(files / "model")
    assert told.data.train == str(files / "train.jsonl")
    named = {f"{files.name}.eval": "eval.jsonl", "other.eval": "other/eval.jsonl"}
    assert told.data.eval == {name: str(files / path) for name, path in named.items()}
    assert told.reward.function == str(files / "reward.py:judge")
    assert told.run.out == str(files / "run")
    assert with_absolute_paths(configured(f"model.path=../{files.name}/model")).model.path == str(files / "model")
    told = with_absolute_paths(configured("model.path=Qwen/Qwen3-8B"))
    assert told.model.path == "Qwen/Qwen3-8B" and told.data.eval is None and told.reward.function is None
    check_files(told, "learner", files / "run", "10.0.0.7")


@pytest.mark.parametrize(
    ("role", "key", "lost"),
    [
        ("buffer", "data.train", "train.jsonl"),
        ("learner", "model.path", "model"),
        ("generator", "reward.function", "reward.py"),
        ("generator", "run.out", "run/lineage"),
    ],
)
def test_a_file_that_a_node_does_not_see_is_named_with_the_node(files: Path, role, key, lost):
    config = with_absolute_paths(configured("data.eval=eval.jsonl", "reward.function=reward.py:judge", "run.out=run"))
    check_files(config, role, files / "run", "10.0.0.7")
    (files / lost).rename(files / "elsewhere")
    if key == "data.train":
        check_files(config, "generator", files / "run", "10.0.0.7")
    named = files / "run" if key == "run.out" else files / lost
    with pytest.raises(ConfigError, match=rf"^{key}: {named}.* does not exist on the node 10\.0\.0\.7.* {role} "):
        check_files(config, role, files / "run", "10.0.0.7")


def test_loopback_is_refused_where_ray_places_the_run_on_several_nodes():
    check_bind_reaches(configured(), {"10.0.0.1"})
    check_bind_reaches(configured("cluster.bind=0.0.0.0"), {"10.0.0.1", "10.0.0.2"})
    with pytest.raises(ConfigError, match=r"cluster\.bind is 127\.0\.0\.1, .*2 nodes \(10\.0\.0\.1, 10\.0\.0\.2\)"):
        check_bind_reaches(configured(), {"10.0.0.2", "10.0.0.1"})


def test_gloo_and_nccl_are_told_the_interface_of_an_address():
    assert network_environment("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert network_environment("192.0.2.1") == {}, "no interface has it"


def test_settings_of_libraries_travel_and_a_nodes_own_stay(monkeypatch: pytest.MonkeyPatch):
    theirs = {"NCCL_DEBUG": "INFO", "HF_HOME": "/hub"}
    monkeypatch.setattr(os, "environ", theirs | {"CUDA_VISIBLE_DEVICES": "3", "PATH": "/b"})
    shared = environment_to_share()
    assert shared == theirs
    monkeypatch.setattr(os, "environ", {"HF_HOME": "/local"})
    set_environment(shared)
    assert os.environ == {"NCCL_DEBUG": "INFO", "HF_HOME": "/local"}


def test_a_rank_waits_longer_for_the_others_than_rank_0_for_a_batch(monkeypatch: pytest.MonkeyPatch):
    import torch.distributed as dist

    assert ranks_timeout_s(configured("cluster.stall_timeout_s=1")) >= 300.0
    timeout_s = ranks_timeout_s(configured("cluster.stall_timeout_s=3600"))
    assert timeout_s > 3600.0
    told: dict[str, Any] = {}  # a process has one default group, and other tests of this one may have made it
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: told.update(settings))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with joined_ranks(dist.HashStore(), 0, 1, "cpu", timeout_s):
        assert told["timeout"].total_seconds() == timeout_s


def test_a_rank_that_fails_does_not_wait_for_the_others_in_the_end_of_its_group(monkeypatch: pytest.MonkeyPatch):
    """NCCL ends a group when all of its ranks do. The others wait in a collective, for more than `cluster.stall_timeout_s`."""
    import torch.distributed as dist

    ended: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **settings: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append("all ranks"))
    with joined_ranks(dist.HashStore(), 0, 2, "cuda", 300.0):
        pass
    assert ended == ["all ranks"]
    with pytest.raises(MemoryError), joined_ranks(dist.HashStore(), 0, 2, "cuda", 300.0):
        raise MemoryError("CUDA out of memory")
    assert ended == ["all ranks"]


def test_the_port_of_a_teacher_is_given_to_no_other_process_while_its_model_loads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wiring, "begin", lambda *_, **__: ("127.0.0.1", 4711))
    monkeypatch.setattr(wiring, "set_environment", lambda environment: None)
    teacher = TeacherActor({}, SimpleNamespace(lineage=1), "law", 0, 0)  # type: ignore[arg-type]
    address, _ = teacher.start(0)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    asyncio.run(listen_at(address))


async def listen_at(address: tuple[str, int]) -> None:
    """As a server does."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), *address)
    server.close()
