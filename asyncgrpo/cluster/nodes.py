"""Requirements of a process on another node: the driver's environment, a network interface and the files of the run.

Ray starts the process with that node's environment and working directory. So paths are made absolute, the environment
variables that libraries read travel with the run, and each process reports which of its files its node lacks.
"""

import os
from pathlib import Path

import psutil
import ray

from asyncgrpo.config.load import each
from asyncgrpo.config.schema import Config, changed, is_file
from asyncgrpo.errors import ConfigError
from asyncgrpo.guests import split_spec
from asyncgrpo.metrics import Role
from asyncgrpo.wire.sockets import is_loopback

# -- addresses ---------------------------------------------------------------------------------------------------------


def host_of(config: Config) -> str:
    """Return the address at which the other processes reach this one."""
    return "127.0.0.1" if is_loopback(config.cluster.bind) else ray.util.get_node_ip_address()


def check_bind_reaches(config: Config, addresses: set[str]) -> None:
    """Raise ConfigError if sockets are bound to loopback while processes run on several nodes.

    Args:
        addresses: of the driver's node and of the nodes on which Ray reserved resources.
    """
    bind = config.cluster.bind
    if len(addresses) > 1 and is_loopback(bind):
        raise ConfigError(
            f"cluster.bind is {bind}, which other nodes cannot reach, but Ray places the run on {len(addresses)} nodes "
            f"({', '.join(sorted(addresses))}); set cluster.bind=0.0.0.0"
        )


# -- the environment ---------------------------------------------------------------------------------------------------

_PREFIXES = (
    *("CUDA_", "FLASHINFER_", "GLOO_", "HF_", "MLFLOW_", "NCCL_", "OMP_", "PYTORCH_", "SGLANG_", "SGL_", "TOKENIZERS_"),
    *("TORCH", "TRANSFORMERS_", "TRITON_", "WANDB_"),
)
_OF_ONE_PROCESS = {"CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID"}


def environment_to_share(*also: str | None) -> dict[str, str]:
    """Return the driver's variables for its processes on other nodes: `also`, and settings of the libraries that they use."""
    return {
        name: text
        for name, text in os.environ.items()
        if name in also or (name.startswith(_PREFIXES) and name not in _OF_ONE_PROCESS)
    }


def set_environment(variables: dict[str, str]) -> None:
    """Set the variables that are not set yet. Those that the node has set keep their values."""
    for name, text in variables.items():
        os.environ.setdefault(name, text)


def network_environment(address: str) -> dict[str, str]:
    """Return the variables that bind gloo and NCCL to the interface with `address`; none if no interface has it.

    By default gloo uses the address of the host's name, which on many machines is loopback.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # `=`: this name exactly
    return {}


# -- files -------------------------------------------------------------------------------------------------------------

MARK = "lineage"
"""A file that the driver writes to the run folder before it starts any process."""


def with_absolute_paths(config: Config) -> Config:
    """Return `config` with absolute paths, because processes have other working directories. Hub ids are unchanged.

    Several held-out sources become a mapping, because a list derives names from its paths.
    """
    reward, environment, held_out = config.reward, config.environment, config.data.eval
    files = {*reward.files, *environment.files}

    def absolute(path: str) -> str:
        full = Path(path).expanduser().absolute()
        return str(full.resolve() if ".." in full.parts else full)  # a resume may be typed in another folder

    def folder(path: str) -> str:
        return absolute(path) if Path(path).expanduser().is_dir() else path

    def source(text: str) -> str:
        scheme, _, rest = text.partition(":")
        name, question, parameters = rest.partition("?")
        return absolute(text) if is_file(text) else f"{scheme}:{folder(name)}{question}{parameters}"

    def spec(text: str) -> str:
        return absolute(text) if text in files else text

    several = {name: source(one) for name, one in config.data.suites.items()}
    return changed(
        config,
        {
            "run.out": absolute(config.run.out),
            "model.path": folder(config.model.path),
            "data.train": each(source, config.data.train),
            "data.eval": each(source, held_out) if isinstance(held_out, str | None) else several,
            "reward.function": each(spec, reward.function),
            "reward.judge.template": each(absolute, reward.judge.file) or reward.judge.template,
            "reward.model.path": each(folder, reward.model.path),
            "teacher.path": each(folder, config.teacher.path),
            "environment.name": each(spec, environment.name),
            "environment.tools": each(spec, environment.tools),
            "environment.agent": each(spec, environment.agent),
        },
    )


def check_files(config: Config, role: Role, run_dir: Path, address: str) -> None:
    """Raise ConfigError if a file or folder that this role reads is not on this node. `config` has absolute paths."""
    data, reward = config.data, config.reward
    needed: dict[str, tuple[str | None, ...]] = {"run.out": (str(run_dir / MARK),), "model.path": (config.model.path,)}
    if role == "buffer":
        needed |= {"data.train": data.sources, "data.eval": tuple(data.suites.values())}
    elif role == "teacher":
        needed |= {"teacher.path": tuple(config.teacher.own.values())}
    elif role == "generator":
        needed |= {
            "reward.function": reward.files,
            "environment.name, environment.tools or environment.agent": config.environment.files,
            "reward.judge.template": (reward.judge.file,),
            "reward.model.path": (reward.model.path,),
        }
    for key, path in ((key, path) for key, paths in needed.items() for path in paths):
        if path is not None and os.path.isabs(path) and not split_spec(path)[0].exists():
            place = run_dir if key == "run.out" else path
            raise ConfigError(
                f"{key}: {place} does not exist on the node {address}, where a {role} runs; it must be on storage that "
                "every node shares"
            )
