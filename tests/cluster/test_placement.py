"""GPUs are dealt out as the configuration says, by a real Ray that believes in two GPUs, and devices are decided once."""

import json
import os
import subprocess
import sys

import pytest
import torch

from asyncgrpo.cluster.wiring import prepare_environment, uses_cuda
from asyncgrpo.config.load import load_config

PROGRAM = """
import json, os
import ray
from asyncgrpo.cluster.ray_session import Placement, decide_device
from asyncgrpo.config.load import load_config

class Process:
    def gpus(self):
        return ray.get_gpu_ids()

def run(*overrides):
    config = decide_device(load_config(None, ["model.path=m", "data.train=d", *overrides]))
    placement = Placement(config, learner_on_gpu=config.learner.device == "cuda")
    options = {"learner": placement.learner(0), "generator": placement.generator(0), "buffer": placement.here()}
    actors = {name: ray.remote(Process).options(**chosen).remote() for name, chosen in options.items()}
    found = {name: ray.get(actor.gpus.remote()) for name, actor in actors.items()} | {"device": config.learner.device}
    for actor in actors.values():
        ray.kill(actor)
    placement.release()
    return found

ray.init(num_gpus=2, num_cpus=4, include_dashboard=False, log_to_driver=False)
shared = ("cluster.share_gpu=true", "generators.count=1")
found = {"shared": run(*shared), "apart": run("generators.count=1", "learner.ranks=1"),
         "again": run(*shared), "learner on CPU": run(*shared, "learner.device=cpu")}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def placed() -> dict:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("run", ["shared", "again"])
def test_learner_and_generator_share_one_gpu(placed, run):
    found = placed[run]
    assert found["learner"] == found["generator"]
    assert len(found["learner"]) == 1
    assert found["buffer"] == []


@pytest.mark.slow
def test_by_default_each_of_them_has_its_own(placed):
    found = placed["apart"]
    assert len(found["learner"]) == len(found["generator"]) == 1
    assert found["learner"] != found["generator"]


@pytest.mark.slow
def test_auto_is_the_gpu_that_ray_has_though_the_driver_has_none(placed):
    assert placed["shared"]["device"] == placed["apart"]["device"] == "cuda"


@pytest.mark.slow
def test_a_learner_on_the_cpu_takes_no_part_of_the_gpu(placed):
    assert placed["learner on CPU"]["learner"] == []


def test_both_sides_of_nccl_get_the_same_settings_and_a_persons_own_stay(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_NVLS_ENABLE": "1"})
    prepare_environment(load_config(None, ["model.path=m", "data.train=d", "weights.timeout_s=33"]))
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"  # SGLang's value; two values hang
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "33"
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], False),
        (["cluster.ray_address=10.0.0.1:6379"], True),
        (["cluster.ray_address=10.0.0.1:6379", "learner.device=cpu"], False),
        (["learner.device=cuda"], True),
    ],
)
def test_a_cluster_that_is_not_connected_yet_is_taken_to_have_gpus(monkeypatch, overrides, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert uses_cuda(load_config(None, ["model.path=m", "data.train=d", *overrides])) == expected
