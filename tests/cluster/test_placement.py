"""GPUs are dealt out as the configuration says, by a real Ray that believes in two GPUs, and devices are decided once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncgrpo.cluster import wiring
from asyncgrpo.cluster.wiring import LearnerActor, Setup, prepare_environment, uses_cuda
from asyncgrpo.config.load import load_config
from asyncgrpo.wire.sockets import Keys

PROGRAM = """
import json, time
import psutil
import ray
from asyncgrpo.cluster import ray_session
from asyncgrpo.cluster.ray_session import Placement, decide_device
from asyncgrpo.config.load import load_config
from asyncgrpo.errors import ConfigError, StalledError

class Process:
    def gpus(self):
        return ray.get_gpu_ids()

    def taken(self):
        return ray.get_runtime_context().get_assigned_resources()

def placed(*overrides):
    config = decide_device(load_config(None, ["model.path=m", "data.train=d", *overrides]))
    return config, Placement(config, learner_on_gpu=config.learner.device == "cuda")

def start(*options):
    return [ray.remote(Process).options(**each).remote() for each in options]

def gpus(actors):
    return ray.get([actor.gpus.remote() for actor in actors])

def end(placement, actors):
    for actor in actors:
        ray.kill(actor)
    placement.close()

def run(*overrides, roles=("learner", "generator")):
    config, placement = placed(*overrides)
    options = {"learner": placement.learner(0), "generator": placement.generator(0), "buffer": placement.here()}
    actors = start(*(options[name] for name in roles))
    found = dict(zip(roles, gpus(actors))) | {"device": config.learner.device}
    end(placement, actors)
    return found

def pinned(*overrides):
    _, placement = placed("learner.device=cpu", "generators.gpus_each=0", *overrides)
    actors = start(placement.generator(0))
    taken = sorted(name for name in ray.get(actors[0].taken.remote()) if "group" not in name)
    is_here = placement.addresses == {ray.util.get_node_ip_address()}
    found = {"taken": taken, "is_here": is_here, "said": placement.waits("generator-0", 60.0)}
    end(placement, actors)
    return found

def added():
    _, placement = placed("learner.device=cpu", "generators.count=1")
    actors = start(*map(placement.generator, (0, 1, 2)))
    first, second = gpus(actors[:2])
    third = actors[2].gpus.remote()
    waits = not ray.wait([third], timeout=1.0)[0]
    ray.kill(actors[1])
    placement.release_generator(1)
    found = {"first": first, "second": second, "third waits": waits, "third": ray.get(third, timeout=30.0)}
    end(placement, actors)
    return found

def taught():
    overrides = ["generators.count=1", "teacher.path={a: s, b: t}", "teacher.gpus_each=1", "generators.gpus_each=0"]
    _, placement = placed("learner.device=cpu", "algorithm.kl_coef=1", *overrides)
    actors = start(*map(placement.teacher, (0, 1)))
    found = gpus(actors)
    end(placement, actors)
    return found

def refused():
    ray_session.RESERVE_TIMEOUT_S = 0.5
    try:
        pinned("generators.ray_resources={shelf: 1}")
    except ConfigError as error:
        return str(error)

def lost():
    _, placement = placed("learner.device=cpu", "generators.gpus_each=0")
    placement.require_this_node()
    next(child for child in psutil.Process().children() if child.name() == "raylet").kill()
    for _ in range(300):
        try:
            placement.require_this_node()
        except StalledError as error:
            return str(error)
        time.sleep(0.2)

ray.init(num_gpus=2, num_cpus=4, resources={"rack": 2}, include_dashboard=False, log_to_driver=False)
shared = ("cluster.share_gpu=true", "generators.count=1")
found = {"shared": run(*shared, roles=("learner", "generator", "buffer")),
         "apart": run("generators.count=1", "learner.ranks=1"),  # takes both GPUs
         "learner on CPU": run(*shared, "learner.device=cpu", roles=["learner"]),
         "pinned": pinned("generators.ray_resources={rack: 1}"), "free": pinned(), "added": added(),
         "taught": taught(), "refused": refused(), "lost": lost()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def placed() -> dict:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1", "RAY_worker_niceness": "0"}
    environment |= {"RAY_health_check_period_ms": "1500"}  # a lost node is found in half the time
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.slow
def test_learner_and_generators_have_gpus_of_their_own_unless_they_share_one(placed):
    shared, apart, added = placed["shared"], placed["apart"], placed["added"]
    assert shared["learner"] == shared["generator"] and len(shared["learner"]) == 1 and shared["buffer"] == []
    assert len(apart["learner"]) == len(apart["generator"]) == 1 and apart["learner"] != apart["generator"]
    assert shared["device"] == apart["device"] == "cuda", "auto is the GPU of Ray, though the driver has none"
    assert placed["learner on CPU"]["learner"] == []
    assert len(added["first"]) == len(added["second"]) == 1 and added["first"] != added["second"]
    assert sorted(map(len, placed["taught"])) == [1, 1] and placed["taught"][0] != placed["taught"][1]
    assert added["third waits"] and added["third"] == added["second"], "there are two GPUs, and one was given back"


@pytest.mark.slow
def test_a_role_takes_the_resources_by_which_its_nodes_are_chosen(placed):
    waits = "generator-0 has not started for 60 s: it waits for a node"
    pinned = {"taken": ["CPU", "rack"], "is_here": True, "said": f"{waits} with 1 CPU and 1 rack free"}
    assert placed["pinned"] == pinned and placed["free"] == pinned | {"taken": [], "said": waits}
    assert "generators.count 1 (each 1 CPU and 1 shelf); no node has them" in placed["refused"]


@pytest.mark.slow
def test_a_driver_without_its_raylet_is_refused(placed):
    assert placed["lost"] == "Ray's raylet on this machine has ended"


def test_both_sides_of_nccl_get_the_same_settings_and_a_persons_own_stay(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_NVLS_ENABLE": "1"})
    prepare_environment(load_config(None, ["model.path=m", "data.train=d", "weights.timeout_s=33"]))
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"  # SGLang's value; two values hang
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "33"
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"


OWN, OWN_FOR_CUDA = ({name: "max_split_size_mb:64"} for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
EXACT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1"}


@pytest.mark.parametrize(
    ("installed", "settings", "given", "expected"),
    [
        ("2.14.1+cu130", ["learner.device=cuda"], {}, EXACT),
        ("2.12.1", ["learner.device=cuda"], {}, EXPANDABLE),  # refuses a setting that it does not know
        ("2.13.0", ["learner.device=cuda", "learner.activation_checkpointing=offload"], {}, EXPANDABLE),
        ("2.13.0", ["learner.device=cpu"], {}, {}),
        ("2.13.0", ["learner.device=cuda"], OWN_FOR_CUDA, OWN_FOR_CUDA),
        ("2.13.0", ["learner.device=cuda"], OWN, OWN),
    ],
)
def test_the_allocator_of_a_learner_on_a_gpu_is_configured_unless_the_user_did(
    monkeypatch, installed, settings, given, expected
):
    given = dict(given)
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(wiring, "version", lambda package: installed)
    monkeypatch.setattr(wiring, "begin", lambda *of, **more: ("127.0.0.1", 0))
    config = load_config(None, ["model.path=m", "data.train=d", "learner.ranks=2", *settings])
    LearnerActor({}, rank=1).start(Setup(config, Path(), 1, None, Keys.make(), "", 1))
    assert {name: text for name, text in given.items() if "ALLOC" in name} == expected


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"), reason="torch is older than the setting"
)
def test_torch_accepts_the_settings_of_its_allocator():
    torch._C._accelerator_setAllocatorSettings(EXACT["PYTORCH_CUDA_ALLOC_CONF"])


def test_a_cluster_that_is_not_connected_yet_is_taken_to_have_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cluster = "cluster.ray_address=10.0.0.1:6379"
    for overrides, expected in (([], False), ([cluster], True), ([cluster, "learner.device=cpu"], False)):
        assert uses_cuda(load_config(None, ["model.path=m", "data.train=d", *overrides])) == expected
