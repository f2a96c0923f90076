"""Requirements of a process on another node: the driver's environment, a network interface and the files of the run.

Ray starts the process with that node's environment and working directory. So paths are made absolute, the environment
variables that libraries read travel with the run, and each process reports which of its files its node lacks.
"""

import os
from pathlib import Path

import msgspec
import psutil
import ray

from asyncgrpo.config.rules import file_of
from asyncgrpo.config.schema import Config, DataConfig, EnvironmentConfig, RewardConfig, is_file
from asyncgrpo.errors import ConfigError
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
    """Return the driver's variables for its processes on other nodes: the settings of the libraries that they use.

    Args:
        also: further variables.
    """
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

_READ_BY: dict[Role, tuple[str, ...]] = {
    "buffer": ("model.path", "data.train", "data.eval"),
    "learner": ("model.path",),
    "generator": (
        *("model.path", "reward.function", "reward.judge.template", "reward.model.path"),
        "environment.name, environment.tools or environment.agent",
    ),
}
"""The keys whose files a role reads."""
MARK = "lineage"
"""A file that the driver writes to the run folder before it starts any process."""


def with_absolute_paths(config: Config) -> Config:
    """Return `config` with absolute paths, because processes have other working directories. Hub ids are unchanged."""
    model, data, reward = config.model, config.data, config.reward
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(model, path=_absolute_folder(model.path)),
        data=msgspec.structs.replace(data, train=_absolute_sources(data.train), eval=_absolute_suites(data.eval)),
        reward=_with_absolute_paths(reward),
        environment=_absolute_environment(config.environment),
        run=msgspec.structs.replace(config.run, out=_absolute(config.run.out)),
    )


def _absolute(path: str | None) -> str | None:
    """Return the absolute form of a path or of `FILE:NAME`."""
    return None if path is None else str(Path(path).expanduser().absolute())


def _absolute_folder(path: str) -> str:
    """Return the absolute form of a folder. A `path` without a folder is a hub id and is unchanged."""
    folder = Path(path).expanduser()
    return str(folder.absolute()) if folder.is_dir() else path


def _with_absolute_paths(reward: RewardConfig) -> RewardConfig:
    judge, model = reward.judge, reward.model
    return msgspec.structs.replace(
        reward,
        function=_absolute_functions(reward),
        judge=msgspec.structs.replace(judge, template=_absolute(judge.file) or judge.template),
        model=msgspec.structs.replace(model, path=model.path and _absolute_folder(model.path)),
    )


def _absolute_source(source: str | None) -> str | None:
    """Return the absolute form of a file or of a folder that `datasets` loads. Other sources are unchanged."""
    if source is None or is_file(source):
        return _absolute(source)
    scheme, _, rest = source.partition(":")
    name, question, parameters = rest.partition("?")
    here = Path(name).expanduser()
    return f"{scheme}:{here.absolute()}{question}{parameters}" if scheme == "hf" and here.is_dir() else source


def _absolute_sources(sources: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(sources, str):
        return str(_absolute_source(sources))
    return tuple(str(_absolute_source(source)) for source in sources)


def _absolute_suites(held_out: str | tuple[str, ...] | dict[str, str] | None) -> str | dict[str, str] | None:
    """Return held-out sources with absolute paths; several become a mapping, because a list derives names from its paths."""
    if held_out is None or isinstance(held_out, str):
        return _absolute_source(held_out)
    suites = DataConfig(train="", eval=held_out).suites
    return {name: str(_absolute_source(source)) for name, source in suites.items()}


def _absolute_functions(reward: RewardConfig) -> str | tuple[str, ...] | None:
    specs = [str(_absolute(spec)) if spec in reward.files else spec for spec in reward.functions]
    return tuple(specs) if isinstance(reward.function, tuple) else reward.function and specs[0]


def _absolute_environment(environment: EnvironmentConfig) -> EnvironmentConfig:
    def absolute(spec: str | None) -> str | None:
        return _absolute(spec) if spec in environment.files else spec

    tools = tuple(str(absolute(spec)) for spec in environment.tools)
    name, agent = absolute(environment.name), absolute(environment.agent)
    return msgspec.structs.replace(environment, name=name, tools=tools, agent=agent)


def check_files(config: Config, role: Role, run_dir: Path, address: str) -> None:
    """Raise ConfigError if a file or folder that this role reads is not on this node.

    Args:
        config: with absolute paths.
        address: of this node.
    """
    paths = {
        "model.path": (config.model.path,),
        "data.train": config.data.sources,
        "data.eval": tuple(config.data.suites.values()),
        "reward.function": config.reward.files,
        "environment.name, environment.tools or environment.agent": config.environment.files,
        "reward.judge.template": (config.reward.judge.file,),
        "reward.model.path": (config.reward.model.path,),
    }
    needed = [(key, path) for key in _READ_BY[role] for path in paths[key]]
    for key, path in [*needed, ("run.out", str(run_dir / MARK))]:
        if path is not None and os.path.isabs(path) and not file_of(path).exists():
            place = run_dir if key == "run.out" else path
            raise ConfigError(
                f"{key}: {place} does not exist on the node {address}, where a {role} runs; it must be on storage that "
                "every node shares"
            )
