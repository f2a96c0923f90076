"""What a process on another node needs: the driver's environment, a network interface, and the files of the run.

Ray starts it with that node's environment and working directory. So paths are made absolute, settings that libraries
read from the environment travel with the run, and each process says which of its files are missing where it runs.
"""

import os
from pathlib import Path

import msgspec
import psutil
import ray

from asyncgrpo.config.schema import Config
from asyncgrpo.errors import ConfigError
from asyncgrpo.metrics import Role
from asyncgrpo.wire.sockets import is_loopback

# -- addresses ---------------------------------------------------------------------------------------------------------


def host_of(config: Config) -> str:
    """The address at which the other processes reach this one."""
    return "127.0.0.1" if is_loopback(config.cluster.bind) else ray.util.get_node_ip_address()


def check_bind_reaches(config: Config, addresses: set[str]) -> None:
    """Raise ConfigError where sockets would be bound to loopback, and processes run on several nodes.

    Args:
        addresses: of the driver's node, and of those on which Ray has reserved places.
    """
    bind = config.cluster.bind
    if len(addresses) > 1 and is_loopback(bind):
        raise ConfigError(
            f"cluster.bind is {bind}, which no other node reaches, but Ray places the run on {len(addresses)} nodes "
            f"({', '.join(sorted(addresses))}); set cluster.bind=0.0.0.0"
        )


# -- the environment ---------------------------------------------------------------------------------------------------

_PREFIXES = (
    *("CUDA_", "FLASHINFER_", "GLOO_", "HF_", "MLFLOW_", "NCCL_", "OMP_", "PYTORCH_", "SGLANG_", "SGL_", "TOKENIZERS_"),
    *("TORCH", "TRANSFORMERS_", "TRITON_", "WANDB_"),
)
_OF_ONE_PROCESS = {"CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID"}


def environment_to_share() -> dict[str, str]:
    """What processes on other nodes take over from the driver: the settings of the libraries that they use."""
    return {
        name: text for name, text in os.environ.items() if name.startswith(_PREFIXES) and name not in _OF_ONE_PROCESS
    }


def set_environment(variables: dict[str, str]) -> None:
    """Set what is not set yet. What the node itself has set stays."""
    for name, text in variables.items():
        os.environ.setdefault(name, text)


def network_environment(address: str) -> dict[str, str]:
    """The settings by which gloo and NCCL use the interface that has `address`; none if no interface has it.

    Left to itself, gloo takes the address of the host's name, which on many machines is loopback.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # `=`: this name exactly
    return {}


# -- files -------------------------------------------------------------------------------------------------------------

_READ_BY: dict[Role, tuple[str, ...]] = {
    "buffer": ("model.path", "data.train", "data.eval"),
    "learner": ("model.path",),
    "generator": ("model.path", "reward.function"),
}
"""The keys whose files a role reads."""
MARK = "lineage"
"""A file that the driver writes to the run folder before it starts anything."""


def with_absolute_paths(config: Config) -> Config:
    """`config` with every path absolute, because processes have other working directories. A hub id stays as it is."""
    model, data, reward = config.model, config.data, config.reward
    folder = Path(model.path).expanduser()
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(model, path=str(folder.absolute()) if folder.is_dir() else model.path),
        data=msgspec.structs.replace(data, train=_absolute(data.train), eval=_absolute(data.eval)),
        reward=msgspec.structs.replace(reward, function=_absolute(reward.function)),
        run=msgspec.structs.replace(config.run, out=_absolute(config.run.out)),
    )


def _absolute(path: str | None) -> str | None:
    """Also of `FILE:NAME`."""
    return None if path is None else str(Path(path).expanduser().absolute())


def check_files(config: Config, role: Role, run_dir: Path, address: str) -> None:
    """Raise ConfigError if a file or folder that this role reads is not on this node.

    Args:
        config: with absolute paths.
        address: of this node.
    """
    paths = {
        "model.path": config.model.path,
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "reward.function": config.reward.function,
    }
    needed = {key: paths[key] for key in _READ_BY[role]} | {"run.out": str(run_dir / MARK)}
    for key, path in needed.items():
        if path is not None and os.path.isabs(path) and not _is_there(path):
            place = run_dir if key == "run.out" else path
            raise ConfigError(
                f"{key}: {place} is not there on the node {address}, where a {role} runs; it must be on storage that "
                "every node sees"
            )


def _is_there(path: str) -> bool:
    return os.path.exists(path) or os.path.exists(path.rpartition(":")[0])  # FILE, or FILE:NAME
