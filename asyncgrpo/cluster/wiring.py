"""The roles as Ray actors. Each actor builds its service from the configuration and runs it.

An actor has two methods that the driver calls: `start` prepares the process and returns its addresses, `run` blocks until
the run is over. An error ends `run` with its exception, which the driver sees. `environment` has the variables that all
processes share with the driver.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import xxhash

from asyncgrpo import host as local
from asyncgrpo import liveness, logs, metrics
from asyncgrpo.buffer.buffer import Buffer, group_seed
from asyncgrpo.buffer.evaluation import EvalSamples, Evaluations
from asyncgrpo.buffer.group_health import BIAS_THRESHOLD, QUARANTINE_FILE, Quarantine
from asyncgrpo.buffer.recovery import bring_back, reopen
from asyncgrpo.buffer.service import BufferService
from asyncgrpo.cluster.folder import hold
from asyncgrpo.cluster.heartbeat import Heart
from asyncgrpo.cluster.nodes import check_files, host_of, network_environment, set_environment
from asyncgrpo.cluster.ray_session import stderr_file
from asyncgrpo.config.memory import Card, learner_share
from asyncgrpo.config.placement import TEACHER_MEMORY
from asyncgrpo.config.schema import Config
from asyncgrpo.data.images import Images
from asyncgrpo.data.loading import Prompts, prepare
from asyncgrpo.data.order import Curriculum
from asyncgrpo.data.prompts import PromptSource, PromptState
from asyncgrpo.data.tokenizer import decoder, load_tokenizer, vocabulary_size
from asyncgrpo.guests import split_spec
from asyncgrpo.host import CoreClock, has_gpu, importing, reserved_port
from asyncgrpo.journal.history import RunStarted
from asyncgrpo.learner.checkpoints import RunState, read_state
from asyncgrpo.metrics import LoopProgress
from asyncgrpo.recording.events import EventLog
from asyncgrpo.rewards.breaker import Breaker
from asyncgrpo.rewards.build import build_reward
from asyncgrpo.rewards.teacher import TaughtReward, build_teachers
from asyncgrpo.types import PolicyVersion, Sampling
from asyncgrpo.weights.publication import GapLimit, SyncCheck
from asyncgrpo.wire.sockets import Client, Keys, Server
from asyncgrpo.wire.supervision import EndpointsChanged, GeneratorLost, Steer

if TYPE_CHECKING:  # these import torch, so the actors import them where they use them
    from torch.distributed import Store

    from asyncgrpo.generators.service import GeneratorService
    from asyncgrpo.learner.learner import Learner
    from asyncgrpo.learner.ranks import Team
    from asyncgrpo.learner.service import LearnerService
    from asyncgrpo.weights.group import Backend
    from asyncgrpo.weights.publisher import Publisher

LOCK_TIMEOUT_S = 60.0
"""Timeout for the lock of the buffer of an earlier start, which has been killed or is about to be."""
RANKS_START_TIMEOUT_S = 300.0
"""Timeout for the learner ranks to meet."""


# -- messages between the driver and the actors ------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """Arguments of every process of a run."""

    config: Config
    run_dir: Path
    lineage: int
    checkpoint: Path | None
    """The checkpoint to resume from. None: training starts from the model's folder."""
    keys: Keys
    watch_endpoint: str
    start_with: int
    """Generators that the learner waits for before its first publication."""
    metrics_token: str | None = field(default=None, repr=False)
    """Bearer token that a scrape must send. None: metrics are exported on loopback only, without authentication. A secret,
    never logged."""
    teacher_urls: Mapping[str, str] = field(default_factory=dict)
    """Servers of the teachers that the run has started, by data_source."""
    teacher_key: str = field(default="", repr=False)
    """Bearer token of these servers. A secret, never logged."""
    reward_has_worked: bool = False
    """True if an earlier core under the same driver trained a step, which proves that its reward calls worked."""


@dataclass(frozen=True)
class BufferReady:
    """Address of the buffer, and the result of its start."""

    endpoint: str
    metrics_address: tuple[str, int]
    about: dict[str, Any]
    """Its fields of the `start` event: `prompts`, `data_schema`, `steps` and `recovered`."""


@dataclass(frozen=True)
class LearnerReady:
    """Addresses of a learner rank. Only rank 0 has the last two."""

    host: str
    metrics_address: tuple[str, int]
    group_port: int = 0
    """Port at which the ranks form their process group."""
    weights_endpoint: str = ""
    """Address of the publisher."""


# -- shared by the actors ----------------------------------------------------------------------------------------------


class _Service(Protocol):
    """The service of a buffer, generator or learner. Its loop ticks `progress` in each iteration."""

    progress: LoopProgress


def begin(
    setup: Setup,
    role: metrics.Role,
    incarnation: str,
    service: Callable[[], _Service | None],
    *,
    rank: int | None = None,
    **heart: Any,
) -> tuple[str, int]:
    """Start the logs, the heartbeats and the metrics endpoint of this process, and return the endpoint's address.

    Args:
        service: returns the service of this process once it exists. Heartbeats report the age of its loop.
        heart: further arguments of `Heart`.
    Raises:
        ConfigError: a file that this process reads is not on this node.
    """

    def loop_age_s() -> float | None:
        running = service()
        return None if running is None else running.progress.age_s

    host = host_of(setup.config)
    check_files(setup.config, role, setup.run_dir, host)
    set_environment(network_environment(host))
    prepare_environment(setup.config)
    logs.setup(role, rank, setup.run_dir)
    local.stderr_file = stderr_file()
    name = role if rank is None else f"{role}-{rank}"
    Heart(setup.watch_endpoint, name, incarnation, setup.keys, run_dir=setup.run_dir, loop_age_s=loop_age_s, **heart)
    gpus = {"generator": setup.config.generators.gpus_each, "teacher": setup.config.teacher_gpus_each}.get(role, 1)
    metrics.devices.set(max(1, gpus))
    exports = "rank" if role == "learner" and rank else role
    return host, metrics.serve(exports, host=host, token=setup.metrics_token)


def uses_cuda(config: Config) -> bool:
    """Return True if the learner runs on a GPU.

    In a run `ray_session.decide_device` has resolved `auto`. Before a run, `auto` means a GPU if this machine has one, or
    if the run is for a cluster that is not connected yet.
    """
    if config.learner.device == "auto":
        return config.cluster.ray_address is not None or has_gpu()
    return config.learner.device == "cuda"


def prepare_environment(config: Config) -> None:
    """Set the environment variables that NCCL and torch read, before either is used in this process.

    They must be equal in learner and generators, and the processes of a Ray cluster inherit nothing from the driver.
    Variables that are already set keep their values. docs/gpu.md explains each one.
    """
    set_environment(
        {
            "NCCL_CUMEM_ENABLE": "0",  # as SGLang sets it in the generators' processes
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_NCCL_NONBLOCKING_TIMEOUT": f"{config.weights.timeout_s:.0f}",
        }
    )


def prepare_allocator(config: Config) -> None:
    """Configure torch's allocator for a learner on a GPU, unless the user did. Call it before torch is imported.

    The lengths of packed rows change every step, so blocks of fixed sizes fragment on the GPU. Of pinned host memory torch
    rounds up each block to a power of two, a third more for weights and moments. Only offloaded activations need that, because
    their lengths change and torch keeps the blocks.
    """
    if not uses_cuda(config) or "PYTORCH_ALLOC_CONF" in os.environ:
        return
    settings = ["expandable_segments:True"]
    knows_threshold = tuple(map(int, version("torch").split(".")[:2])) >= (2, 13)  # others refuse what they do not know
    if knows_threshold and config.learner.activation_checkpointing != "offload":
        settings.append("pinned_max_round_threshold_mb:1")
    set_environment({"PYTORCH_CUDA_ALLOC_CONF": ",".join(settings)})


# -- the buffer --------------------------------------------------------------------------------------------------------


class BufferActor:
    """Owns the prompts, the leases and the ready groups."""

    def __init__(self, environment: dict[str, str]) -> None:
        set_environment(environment)
        self._service: BufferService | None = None

    def start(self, setup: Setup) -> BufferReady:
        """Load the prompts, recover the groups of earlier starts, and listen."""
        config = setup.config
        metrics_address = begin(
            setup,
            "buffer",
            str(setup.lineage),
            lambda: self._service,
            on_message={Steer: lambda asked: self._service.steer(asked) if self._service else None},
            missing=lambda: self._service.missing if self._service else (),
            steered=lambda: self._service.steered if self._service else 0,
        )
        self._lock = hold(setup.run_dir / "buffer.lock", LOCK_TIMEOUT_S)
        self._eval_samples = EvalSamples(setup.run_dir / "evals", config.run.keep_samples)
        prompts = prepare(config, setup.run_dir)
        train, stops = prompts.train, prompts.stop_token_ids
        sampling = sampling_of(config, stops, evaluation=False)
        state = read_state(setup.checkpoint) if setup.checkpoint is not None else None
        buffer, recovered = _recovered_buffer(setup, state, train, sampling, prompts.images)
        evaluations = Evaluations(
            prompts.held_out,
            sampling_of(config, stops, evaluation=True),
            config.run.seed,
            config.buffer.lease_timeout_s,
            lineage=setup.lineage,
            completions=config.sampling.eval_completions,
            success=config.reward.success,
            keep=self._eval_samples.keep,
        )
        server = Server(config.cluster.bind, setup.keys, advertise=host_of(config))
        self._service = BufferService(
            server,
            buffer,
            evaluations,
            vocabulary_size(config.model.path),
            reward_name=_reward_name(config),
            reward_has_worked=setup.reward_has_worked,
            emit=EventLog(setup.run_dir / "metrics.jsonl").write,
        )
        steps = steps_at_most(config, buffer.prompts, 0 if state is None else state.step)
        about = {"prompts": len(train), "data_schema": train.schema, "steps": steps, "recovered": recovered}
        return BufferReady(server.endpoint, metrics_address, about)

    def run(self) -> None:
        assert self._service is not None, "start comes first"
        with closing(self._eval_samples):
            self._service.run()


def _recovered_buffer(
    setup: Setup, state: RunState | None, prompts: Prompts, sampling: Sampling, images: Images | None
) -> tuple[Buffer, dict[str, int]]:
    """Restore the buffer from checkpoint and journal.

    Returns the buffer, and the untrained groups of earlier starts: the number that is `ready`, and the others by reason.
    """
    config = setup.config
    source = PromptSource(
        prompts,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        epochs=config.run.epochs,
        weights=config.data.weights or (),
        sizes=prompts.sizes,
        curriculum=Curriculum(
            setup.run_dir / "curriculum",
            is_on=config.data.curriculum == "success",
            success=config.reward.success,
            names=config.data.sources if config.data.weights else ("",),
        ),
    )
    if state is not None:
        source.restore(msgspec.convert(state.prompts, PromptState))
    run_started = RunStarted(
        lineage=setup.lineage,
        parent=PolicyVersion(state.lineage, state.step) if state is not None else None,
        compatibility_key=compatibility_key_of(config, sampling, source.state().fingerprint),
        max_lag=config.buffer.largest_max_lag,
        max_lag_is_auto=config.buffer.max_lag == "auto",
        prompts=source.state().without_shares,
        config=msgspec.to_builtins(config),
        policy=config.buffer.policy,
    )
    reopened = reopen(setup.run_dir / "journal", run_started, source, config.buffer)
    buffer = Buffer(
        config.buffer,
        config.algorithm,
        source,
        sampling,
        seed=config.run.seed,
        lineage=setup.lineage,
        journal=reopened.journal,
        quarantine=Quarantine(setup.run_dir / QUARANTINE_FILE),
        last_max_lag=reopened.max_lag,
    )
    metrics.bias_threshold.set(BIAS_THRESHOLD)
    return buffer, bring_back(buffer, reopened, images)


def steps_at_most(config: Config, prompts: PromptSource, step: int) -> int | None:
    """Return the most optimizer steps until every epoch or `run.steps` is done; None: unlimited.

    Filtered groups make no step.

    Args:
        prompts: of a start that goes on after `step`. Earlier steps may have had more or fewer groups.
    """
    if config.run.epochs is None:
        return config.run.steps
    left = max(0, len(prompts.prompts) * config.run.epochs - prompts.num_done)
    steps = step + -(-left // config.buffer.prompts_per_step)
    return steps if config.run.steps is None else min(steps, config.run.steps)


def sampling_of(config: Config, stop_token_ids: tuple[int, ...], *, evaluation: bool) -> Sampling:
    sampling = config.sampling
    return Sampling(
        temperature=sampling.eval_temperature if evaluation else sampling.temperature,
        top_p=1.0 if evaluation else sampling.top_p,
        top_k=-1 if evaluation else sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=stop_token_ids,
    )


def compatibility_key_of(config: Config, sampling: Sampling, prompts: str) -> dict[str, str]:
    """Return the settings that must be equal for this start to train a group of an earlier one.

    Args:
        prompts: fingerprint of `PromptSource`.
    """
    reward, algorithm, environment, teacher = config.reward, config.algorithm, config.environment, config.teacher
    specs = [*reward.files, *environment.files, *([reward.judge.file] if reward.judge.file else [])]
    files = [file for spec in specs if (file := split_spec(spec)[0]).is_file()]
    digests = [xxhash.xxh3_64_hexdigest(file.read_bytes()) for file in files]
    scores = (reward.functions, reward.weights, reward.combine, reward.kwargs, reward.code.score, digests)
    return {
        "prompts": f"{prompts} {config.data.curriculum}",
        "model": config.model.path,
        "sampling": repr(sampling),
        "completions": f"{algorithm.group_size} {algorithm.advantage == 'remax'} {algorithm.min_completions}",
        "environment": f"{environment.name or environment.tools or environment.agent} {environment.max_turns}",
        "reward": f"{scores} {reward.format_score} {reward.qa_score}",
        "judge": str(reward.judge) if "judge" in reward.functions else "",
        "reward model": str(reward.model.path) if "model" in reward.functions else "",
        "teacher": f"{teacher.path or teacher.url} {teacher.top_k}" if teacher.is_on else "",
    }


def _reward_name(config: Config) -> str:
    """Return the name of the reward in messages about its failures."""
    names = [os.path.basename(spec) for spec in config.reward.functions]
    taught = " or the teacher" if config.teacher.is_on else ""
    has_environment = config.environment.name or config.environment.tools
    played = "the agent or " if config.environment.agent else "the environment or " if has_environment else ""
    if config.reward.files:
        return f"{played}reward function {', '.join(names)}{taught}"
    return played + ("the judge" if "judge" in names else "the rules of rewards") + taught


# -- a generator -------------------------------------------------------------------------------------------------------


def incarnation_of(setup: Setup, start: int) -> str:
    """Return the incarnation of a process that was started `start` times before. It is unique: no lineage is used twice."""
    return f"{setup.lineage}.{start}"


class GeneratorActor:
    """Owns one engine and its reward workers."""

    def __init__(self, environment: dict[str, str], setup: Setup, index: int, start: int) -> None:
        set_environment(environment)
        self._setup = setup
        self._index = index
        self._start = start
        self._incarnation = incarnation_of(setup, start)
        self._service: GeneratorService | None = None

    def start(self, endpoints: EndpointsChanged) -> tuple[str, int]:
        """Start logs, heartbeats and metrics; return the address of the metrics.

        Args:
            endpoints: of the core; empty while the core is starting too.
        """
        if not self._setup.config.generators.gpus_each:
            os.environ["OMP_NUM_THREADS"] = "1"
        metrics.generator_info.info({"engine": self._setup.config.generators.engine})
        self._endpoints = endpoints
        return begin(
            self._setup,
            "generator",
            self._incarnation,
            lambda: self._service,
            rank=self._index,
            on_message={EndpointsChanged: self._change_endpoints},
            buffer_endpoint=lambda: self._service.buffer_endpoint if self._service else self._endpoints.buffer_endpoint,
        )

    def _change_endpoints(self, endpoints: EndpointsChanged) -> None:
        self._endpoints = endpoints
        if self._service is not None:
            self._service.move(endpoints.buffer_endpoint, endpoints.weights_endpoint)

    def run(self) -> None:
        config = self._setup.config
        seed = group_seed(config.run.seed + self._start, self._index, self._setup.lineage) % 2**31
        with importing():
            from asyncgrpo.engines.build import build_engine
            from asyncgrpo.generators.service import GeneratorService
            from asyncgrpo.generators.turns import build_sampler

            images = Images.of(config, self._setup.run_dir)
            engine = build_engine(config, seed=seed, images=images)  # imports the engine
        tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
        decode = decoder(tokenizer, keep_special=False)
        _limit_gpu_memory(config, is_learner=False)
        reward, at_once = build_reward(config.reward), config.reward.at_once
        if teachers := build_teachers(config, self._setup.teacher_urls, self._setup.teacher_key):
            reward = TaughtReward(reward, teachers, config.algorithm.group_size)
            at_once = max(at_once, config.teacher.max_concurrent)
        service = self._service = GeneratorService(
            f"generator-{self._index}",
            self._incarnation,
            engine,
            Breaker(reward, at_once=at_once),
            decode,
            turns=build_sampler(config, engine, tokenizer),
            window=config.generators.groups_in_flight,
            keep_kv=config.generators.keep_kv,
            load_timeout_s=config.weights.timeout_s,
            stuck_after_s=config.cluster.silent_timeout_s,
            buffer_endpoint=self._endpoints.buffer_endpoint,
            weights_endpoint=self._endpoints.weights_endpoint,
            host=host_of(config),
            keys=self._setup.keys,
            cores=CoreClock(),
        )
        asyncio.run(service.run())


def _limit_gpu_memory(config: Config, *, is_learner: bool) -> None:
    """Limit torch to this process's share of a GPU that learner and generator share.

    SGLang allocates in processes of its own, which its arguments limit (`engines/build.py`).
    """
    import torch

    if not (config.cluster.share_gpu and torch.cuda.is_available()):
        return
    if is_learner:
        card = Card.of(config, torch.cuda.get_device_properties(0).total_memory)
        torch.cuda.set_per_process_memory_fraction(max(learner_share(config, card), 0.05))
    elif config.generators.engine == "torch":
        torch.cuda.set_per_process_memory_fraction(config.generators.memory_fraction)


# -- the learner -------------------------------------------------------------------------------------------------------


class LearnerActor:
    """One rank of the learner."""

    def __init__(self, environment: dict[str, str], rank: int) -> None:
        set_environment(environment)
        self._rank = rank
        self._service: LearnerService | None = None
        self._publisher: Publisher | None = None

    def start(self, setup: Setup) -> LearnerReady:
        """Open the endpoints before the model is loaded, so that all processes can start in parallel."""
        prepare_allocator(setup.config)
        with importing():
            import torch

            from asyncgrpo.weights.group import serve_store
            from asyncgrpo.weights.publisher import Publisher

        self._setup, config = setup, setup.config
        metrics_address = begin(
            setup,
            "learner",
            str(setup.lineage),
            lambda: self._service,
            rank=self._rank,
            on_message={
                GeneratorLost: lambda lost: (
                    self._publisher.give_up(lost.generator_id, lost.incarnation) if self._publisher else None
                ),
                Steer: lambda asked: self._service.steer(asked) if self._service else None,
            },
            step=lambda: self._service and self._service.step,
            missing=lambda: self._publisher.missing if self._publisher else (),
            steered=lambda: self._service.steered if self._service else 0,
        )
        self._device = torch.device("cuda", 0) if uses_cuda(config) else torch.device("cpu")  # Ray shows one card
        if self._device.type == "cpu":
            torch.set_num_threads(1)
        host = host_of(config)
        if self._rank > 0:
            return LearnerReady(host, metrics_address)

        self._store = serve_store(host, RANKS_START_TIMEOUT_S)
        self._publisher = Publisher(
            config.weights,
            maps=config.weights.backend in ("auto", "shared_memory"),
            backend=_weights_backend(config),
            bind=config.cluster.bind,
            host=host,
            keys=self._setup.keys,
        )
        return LearnerReady(host, metrics_address, self._store.port, self._publisher.endpoint)

    def run(self, leader: LearnerReady, buffer_endpoint: str, about: dict[str, Any]) -> str:
        """Train, and return the final status: `done` or `drained`. `about` has further fields of the `start` event."""
        with importing():
            from asyncgrpo.learner.learner import Learner
            from asyncgrpo.learner.ranks import Team
            from asyncgrpo.learner.service import follow
            from asyncgrpo.weights.group import visit_store

        config, rank, world = self._setup.config, self._rank, self._setup.config.learner.ranks
        store = self._store if rank == 0 else visit_store(leader.host, leader.group_port, RANKS_START_TIMEOUT_S)
        if self._device.type == "cuda":
            _limit_gpu_memory(config, is_learner=True)
        with joined_ranks(store, rank, world, self._device.type, ranks_timeout_s(config)):
            images = Images.of(config, self._setup.run_dir)
            learner = Learner(config, rank=rank, world=world, device=self._device, images=images)
            if self._setup.checkpoint is not None:
                learner.load(str(self._setup.checkpoint / "resume"))
            team = Team(rank, world)
            if team.rank > 0:
                learner.snapshot.connect(leader.weights_endpoint, host_of(config), self._setup.keys)
                follow(learner, team)
                return "done"
            return self._lead(learner, team, buffer_endpoint, about)

    def _lead(self, learner: "Learner", team: "Team", buffer_endpoint: str, about: dict[str, Any]) -> str:
        from asyncgrpo.learner.ranks import Inbox
        from asyncgrpo.learner.record import Recorder
        from asyncgrpo.learner.service import LearnerService

        config, setup = self._setup.config, self._setup
        assert self._publisher is not None, "start comes first"
        check = SyncCheck(learner.check.sequences, GapLimit(config.model.dtype))
        snapshot = learner.snapshot
        self._publisher.start(learner.layout(), check, snapshot.streams, is_whole=snapshot.is_whole)
        decode = decoder(load_tokenizer(config.model.path), keep_special=True)
        recorder = Recorder(config, setup.run_dir, decode, msgspec.to_builtins(config))
        service = self._service = LearnerService(
            config,
            learner,
            team,
            Inbox(Client(buffer_endpoint, "learner", setup.keys), config.cluster.stall_timeout_s),
            self._publisher,
            recorder,
            lineage=setup.lineage,
            run_dir=setup.run_dir,
            start_with=setup.start_with,
            last_step=config.run.steps,
        )
        if setup.checkpoint is not None:
            service.resume(setup.checkpoint)
        else:
            recorder.resume(0, {})  # without a checkpoint, the steps of an earlier start are undone
        recorder.start(lineage=setup.lineage, version=str(service.version), step=service.step, **about)
        return service.run()


def ranks_timeout_s(config: Config) -> float:
    """Return the timeout of one collective of the learner's ranks, seconds.

    While rank 0 waits for a batch the others wait for rank 0, so the run's stall timeout must expire first.
    """
    return max(RANKS_START_TIMEOUT_S, config.cluster.stall_timeout_s + liveness.STALL_MARGIN_S)


@contextmanager
def joined_ranks(store: "Store", rank: int, world: int, device: str, timeout_s: float) -> Iterator[None]:
    """Initialize the default process group of the learner's ranks for the duration of the block.

    A block that raises leaves the group to the end of the process: NCCL would wait in its end for the other ranks, which wait
    in a collective, and the error would not reach the driver before their timeout.

    Args:
        device: `cuda` adds NCCL. Control messages between ranks always use gloo.
    """
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
    yield
    dist.destroy_process_group()


def _weights_backend(config: Config) -> "Backend":
    """Return the backend that broadcasts weights to generators that cannot map the learner's memory."""
    if config.weights.backend in ("nccl", "gloo"):
        return config.weights.backend
    between_gpus = uses_cuda(config) and config.generators.gpus_each > 0 and not config.cluster.share_gpu
    return "nccl" if between_gpus else "gloo"


# -- a teacher that the run starts -------------------------------------------------------------------------------------


class TeacherActor:
    """Runs the server of one teacher."""

    def __init__(self, environment: dict[str, str], setup: Setup, source: str, index: int, start: int) -> None:
        set_environment(environment)
        self._setup, self._source, self._index, self._start = setup, source, index, start
        self.progress = LoopProgress()
        """Ticks with each proof of the server's health."""

    def start(self, port: int) -> tuple[tuple[str, int], tuple[str, int]]:
        """Start logs and heartbeats. Returns the address of the server, at a free port for 0, and that of the metrics."""
        exported = begin(
            self._setup, "teacher", incarnation_of(self._setup, self._start), lambda: self, rank=self._index
        )
        host = exported[0]
        if not port:
            self._reserved = reserved_port(host)  # while the model loads
            port = int(self._reserved.getsockname()[1])
        self._address = host, port
        return self._address, exported

    def run(self) -> None:
        """Serve until a process of the server ends."""
        with importing():
            import torch

            from asyncgrpo.engines.sglang.engine import SGLangOptions

        config = self._setup.config
        options = SGLangOptions(
            model_path=config.teacher.own[self._source],
            dtype=getattr(torch, config.model.dtype),
            max_context=config.data.max_prompt_tokens + config.sampling.max_tokens + 1,
            device="cuda" if config.teacher_gpus_each else "cpu",
            tensor_parallel=max(1, config.teacher_gpus_each),
            max_completions=config.teacher.max_concurrent,
            memory_fraction=TEACHER_MEMORY,
        )
        options.prepare()
        with importing():
            from asyncgrpo.engines.sglang.processes import serve

        serve(options, self._address, self._setup.teacher_key, self.progress.tick)
