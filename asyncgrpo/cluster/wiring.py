"""The three roles as Ray actors: each builds its service from the configuration and runs it. Here everything is wired.

An actor has two kinds of method: `start` prepares and returns addresses, `run` blocks until the run is over. Whatever
goes wrong inside ends `run` with the exception, for the supervisor to see.
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import ray
import xxhash

from asyncgrpo import logs, metrics
from asyncgrpo.cluster.folder import hold
from asyncgrpo.cluster.heartbeat import Heart
from asyncgrpo.config.schema import Config
from asyncgrpo.types import PolicyVersion, Sampling
from asyncgrpo.wire.sockets import Client, Keys, Server, is_loopback
from asyncgrpo.wire.supervision import EndpointsChanged, GeneratorLost

if TYPE_CHECKING:  # torch and the tokenizer are imported where they are used
    from asyncgrpo.buffer.service import BufferService
    from asyncgrpo.generators.service import GeneratorService
    from asyncgrpo.learner.service import LearnerService
    from asyncgrpo.weights.publisher import Publisher

HOLD_WITHIN_S = 60.0
"""For the buffer of an earlier start to be gone, which is about to be killed or has been."""
RANKS_START_WITHIN_S = 300.0
"""For the ranks of the learner to meet."""


@dataclass(frozen=True)
class Setup:
    """What every process of a run is told."""

    config: Config
    run_dir: Path
    lineage: int
    checkpoint: Path | None
    """Where to go on from; None: from the model's folder."""
    keys: Keys | None
    watch_endpoint: str
    """Of the driver's `Watch`."""
    start_with: int
    """Generators that the learner waits for before its first publication."""
    reward_has_worked: bool = False
    """Under an earlier core of the same command, which trained a step."""


@dataclass(frozen=True)
class BufferReady:
    """What the buffer found."""

    endpoint: str
    metrics_address: tuple[str, int]
    prompts: int
    dropped_too_long: int
    schema: str
    steps: int | None
    """Optimizer steps until every epoch is done, at most: none is made of what is filtered. None without an end."""
    recovered: dict[str, int]
    """Groups of earlier starts that were not trained: those that are `ready`, and the others by reason."""


@dataclass(frozen=True)
class LearnerReady:
    """Where to find a rank of the learner."""

    host: str
    metrics_address: tuple[str, int]
    group_port: int = 0
    """Of the ranks' own process group (rank 0)."""
    weights_endpoint: str = ""
    """Of the publisher (rank 0)."""


def host_of(config: Config) -> str:
    """The address at which the other processes reach this one."""
    return "127.0.0.1" if is_loopback(config.cluster.bind) else ray.util.get_node_ip_address()


def _begin(setup: Setup, role: metrics.Role, rank: int | None, incarnation: str, **heart: Any) -> tuple[str, int]:
    """Logging, signs of life, and the metrics endpoint, whose address is returned."""
    logs.setup(role, rank, setup.run_dir)
    name = role if rank is None else f"{role}-{rank}"
    Heart(setup.watch_endpoint, name, incarnation, setup.keys, run_dir=setup.run_dir, **heart)
    return "127.0.0.1", metrics.serve(role)


def sampling_of(config: Config, stop_token_ids: tuple[int, ...], *, evaluation: bool) -> Sampling:
    """How this run samples, or evaluates."""
    sampling = config.sampling
    return Sampling(
        temperature=sampling.eval_temperature if evaluation else sampling.temperature,
        top_p=1.0 if evaluation else sampling.top_p,
        top_k=-1 if evaluation else sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=stop_token_ids,
    )


def compatibility_key_of(config: Config, sampling: Sampling, prompts: str) -> dict[str, str]:
    """What must not have changed for a group of an earlier start to be trained by this one.

    Args:
        prompts: the fingerprint of `PromptSource`.
    """
    reward = config.reward.function or ""
    file = Path(reward if Path(reward).is_file() else reward.rpartition(":")[0])
    algorithm = config.algorithm
    return {
        "prompts": prompts,
        "model": config.model.path,
        "sampling": repr(sampling),
        "completions": f"{algorithm.group_size}, {algorithm.advantage == 'remax'}"
        + ("" if algorithm.min_completions is None else f", {algorithm.min_completions} or more"),
        "reward": f"{reward} {xxhash.xxh3_64_hexdigest(file.read_bytes()) if file.is_file() else ''}",
    }


class BufferActor:
    """Owns the prompts, the leases and the ready groups."""

    def __init__(self) -> None:
        self._service: BufferService | None = None

    def warm_up(self) -> None:
        """Import what takes long."""
        from transformers import AutoTokenizer  # noqa: F401

    def start(self, setup: Setup) -> BufferReady:
        from asyncgrpo.buffer.buffer import Buffer
        from asyncgrpo.buffer.evaluation import Evaluations
        from asyncgrpo.buffer.group_health import QUARANTINE_FILE, Quarantine
        from asyncgrpo.buffer.recovery import bring_back, reopen
        from asyncgrpo.buffer.service import BufferService
        from asyncgrpo.data.prompts import PromptSource, PromptState, load_prompts
        from asyncgrpo.data.tokenizer import load_tokenizer, stop_token_ids, vocabulary_size
        from asyncgrpo.journal.format import FORMAT, RunStarted
        from asyncgrpo.learner.checkpoints import read_state
        from asyncgrpo.recording.events import EventLog

        self._setup, config = setup, setup.config
        address = _begin(
            self._setup,
            "buffer",
            None,
            str(self._setup.lineage),
            loop_age_s=lambda: self._service and self._service.progress.age_s,
            missing=lambda: self._service.missing if self._service else (),
        )
        self._held = hold(self._setup.run_dir / "buffer.lock", HOLD_WITHIN_S)
        tokenizer = load_tokenizer(config.model.path)
        stops = tuple(stop_token_ids(tokenizer, config.model.path, config.sampling.stop))
        loaded = load_prompts(config.data.train, "train", tokenizer, config.data)
        held_out = (
            load_prompts(config.data.eval, "eval", tokenizer, config.data, limit=config.data.eval_rows).prompts
            if config.data.eval
            else ()
        )
        source = PromptSource(
            loaded.prompts, seed=config.run.seed, shuffle=config.data.shuffle, epochs=config.run.epochs
        )
        state = read_state(self._setup.checkpoint) if self._setup.checkpoint is not None else None
        if state is not None:
            source.restore(msgspec.convert(state.prompts, PromptState))
        sampling = sampling_of(config, stops, evaluation=False)
        run_started = RunStarted(
            format=FORMAT,
            lineage=self._setup.lineage,
            parent=PolicyVersion(state.lineage, state.step) if state is not None else None,
            compatibility_key=compatibility_key_of(config, sampling, source.state().fingerprint),
            max_lag=config.buffer.max_lag,
            prompts=source.state(),
            config=msgspec.to_builtins(config),
            policy=config.buffer.policy,
        )
        reopened = reopen(self._setup.run_dir / "journal", run_started, source, config.buffer)
        buffer = Buffer(
            config.buffer,
            config.algorithm,
            source,
            sampling,
            seed=config.run.seed,
            lineage=self._setup.lineage,
            journal=reopened.journal,
            quarantine=Quarantine(self._setup.run_dir / QUARANTINE_FILE),
        )
        recovered = bring_back(buffer, reopened)
        evaluations = Evaluations(
            held_out,
            sampling_of(config, stops, evaluation=True),
            config.run.seed,
            config.buffer.lease_timeout_s,
            lineage=self._setup.lineage,
        )
        metrics.buffer_slots.set(config.buffer.num_slots)
        metrics.max_lag_steps.set(config.buffer.max_lag)
        metrics.bias_threshold.set(config.buffer.bias_threshold)
        server = Server(config.cluster.bind, self._setup.keys, advertise=host_of(config))
        self._service = BufferService(
            server,
            buffer,
            evaluations,
            vocabulary_size(config.model.path),
            reward_name=f"reward function {config.reward.function}"
            if config.reward.function
            else "the rules of rewards",
            reward_has_worked=self._setup.reward_has_worked,
            tell=EventLog(self._setup.run_dir / "metrics.jsonl").write,
        )
        per_step = config.buffer.prompts_per_step
        total = None if config.run.epochs is None else -(-len(loaded.prompts) * config.run.epochs // per_step)
        return BufferReady(
            endpoint=server.endpoint,
            metrics_address=address,
            prompts=len(loaded.prompts),
            dropped_too_long=loaded.dropped_too_long,
            schema=loaded.schema_name,
            steps=min((s for s in (total, config.run.steps) if s is not None), default=None),
            recovered=recovered,
        )

    def run(self) -> None:
        assert self._service is not None, "start comes first"
        self._service.run()


def incarnation_of(setup: Setup, start: int) -> str:
    """Of a generator. No lineage is used twice, so this is not either."""
    return f"{setup.lineage}.{start}"


class GeneratorActor:
    """Owns one engine and its reward workers."""

    def __init__(self, setup: Setup, index: int, start: int) -> None:
        """
        Args:
            start: how often this generator was started before.
        """
        self._setup = setup
        self._index = index
        self._start = start
        self._incarnation = incarnation_of(setup, start)
        self._service: GeneratorService | None = None

    def start(self, home: EndpointsChanged) -> tuple[str, int]:
        """Returns the address of its metrics."""
        if not self._setup.config.generators.gpus_each:
            os.environ["OMP_NUM_THREADS"] = "1"
        metrics.generator_info.info({"engine": self._setup.config.generators.engine})
        self._endpoints = home
        return _begin(
            self._setup,
            "generator",
            self._index,
            self._incarnation,
            on_endpoints_changed=self._change_endpoints,
            buffer_endpoint=lambda: self._service.buffer_endpoint if self._service else "",
            loop_age_s=lambda: self._service and self._service.progress.age_s,
        )

    def _change_endpoints(self, home: EndpointsChanged) -> None:
        self._endpoints = home
        if self._service is not None:
            self._service.move(home.buffer_endpoint, home.weights_endpoint)

    def run(self) -> None:
        from asyncgrpo.buffer.groups import group_seed
        from asyncgrpo.data.demo import demo_rules
        from asyncgrpo.data.tokenizer import decoder, load_tokenizer
        from asyncgrpo.engines.build import build_engine
        from asyncgrpo.generators.rollout import Redundancy
        from asyncgrpo.generators.service import GeneratorService
        from asyncgrpo.rewards import build_reward
        from asyncgrpo.rewards.breaker import Breaker

        config = self._setup.config
        tokenizer = load_tokenizer(config.model.path)
        service = self._service = GeneratorService(
            f"generator-{self._index}",
            self._incarnation,
            build_engine(
                config, seed=group_seed(config.run.seed + self._start, self._index, self._setup.lineage) % 2**31
            ),
            Breaker(build_reward(config.reward, extra_rules=demo_rules()), at_once=config.reward.workers),
            decoder(tokenizer, keep_special=False),
            window=config.generators.groups_in_flight,
            keep_kv=config.generators.keep_kv,
            merger=_adapter_merger(config),
            load_timeout_s=config.weights.timeout_s,
            stuck_after_s=config.cluster.silent_timeout_s,
            buffer_endpoint=self._endpoints.buffer_endpoint,
            weights_endpoint=self._endpoints.weights_endpoint,
            host=host_of(config),
            keys=self._setup.keys,
            redundancy=Redundancy(config.generators.completion_retries, config.generators.extra_completions),
        )
        asyncio.run(service.run())


class LearnerActor:
    """One rank of the learner."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._service: LearnerService | None = None
        self._publisher: Publisher | None = None

    def warm_up(self) -> None:
        """Import what takes long."""
        import asyncgrpo.learner.service  # noqa: F401

    def start(self, setup: Setup) -> LearnerReady:
        """Bind what others connect to, before the model is loaded, so that everyone can start at once."""
        import torch

        self._setup, config = setup, setup.config
        address = _begin(
            self._setup,
            "learner",
            self._rank,
            str(self._setup.lineage),
            loop_age_s=lambda: self._service and self._service.progress.age_s,
            step=lambda: self._service and self._service.step,
            on_lost=self._give_up,
            missing=lambda: self._publisher.missing if self._publisher else (),
        )
        self._device = torch.device("cuda" if uses_cuda(config) else "cpu")
        if self._device.type == "cpu":
            torch.set_num_threads(1)
        host = host_of(config)
        if self._rank > 0:
            return LearnerReady(host, address)

        from asyncgrpo.weights.broadcast import serve_store
        from asyncgrpo.weights.publisher import Publisher

        self._store = serve_store(host, RANKS_START_WITHIN_S)
        self._publisher = Publisher(
            config.weights,
            backend=_weights_backend(config),
            bind=config.cluster.bind,
            host=host,
            keys=self._setup.keys,
        )
        return LearnerReady(host, address, self._store.port, self._publisher.endpoint)

    def _give_up(self, lost: GeneratorLost) -> None:
        if self._publisher is not None:
            self._publisher.give_up(lost.generator_id, lost.incarnation)

    def run(self, leader: LearnerReady, buffer_endpoint: str, about: dict[str, Any]) -> str:
        """Train. Returns how it ended: `done` or `drained`."""
        import torch.distributed as dist

        from asyncgrpo.learner.inbox import Team
        from asyncgrpo.learner.learner import Learner
        from asyncgrpo.learner.service import follow

        config, rank, world = self._setup.config, self._rank, self._setup.config.learner.ranks
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        store = self._store if rank == 0 else dist.TCPStore(leader.host, leader.group_port)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        try:
            learner = Learner(config, rank=rank, world=world, device=self._device)
            if self._setup.checkpoint is not None:
                learner.load(str(self._setup.checkpoint / "resume"))
            team = Team(rank, world)
            if not team.leads:
                follow(learner, team)
                return "done"
            return self._lead(learner, team, buffer_endpoint, about)
        finally:
            dist.destroy_process_group()

    def _lead(self, learner: Any, team: Any, buffer_endpoint: str, about: dict[str, Any]) -> str:
        from asyncgrpo.data.tokenizer import decoder, load_tokenizer
        from asyncgrpo.learner.inbox import Inbox
        from asyncgrpo.learner.record import Recorder
        from asyncgrpo.learner.service import LearnerService

        config = self._setup.config
        tokenizer = load_tokenizer(config.model.path)
        assert self._publisher is not None, "start comes first"
        self._publisher.describe(learner.sent.layout(), learner.sent.base)
        recorder = Recorder(
            config, self._setup.run_dir, decoder(tokenizer, keep_special=True), msgspec.to_builtins(config)
        )
        service = self._service = LearnerService(
            config,
            learner,
            team,
            Inbox(Client(buffer_endpoint, "learner", self._setup.keys), config.cluster.stall_timeout_s),
            self._publisher,
            recorder,
            lineage=self._setup.lineage,
            run_dir=self._setup.run_dir,
            start_with=self._setup.start_with,
            last_step=config.run.steps,
        )
        if self._setup.checkpoint is not None:
            service.resume(self._setup.checkpoint)
        else:
            recorder.resume(0, {})  # what an earlier start wrote before its first checkpoint never happened
        start = {"lineage": self._setup.lineage, "version": str(service.version), "step": service.step}
        recorder.events.write("start", **start, **recorder.undone, **about)
        return service.run()


def _adapter_merger(config: Config) -> Any:
    """What makes whole weights of what is published; None where whole weights are published."""
    if not (config.model.lora.rank and config.weights.adapters_only):
        return None
    import torch

    from asyncgrpo.weights.adapters import AdapterMerger

    return AdapterMerger(config.model.path, getattr(torch, config.model.dtype))


def uses_cuda(config: Config) -> bool:
    import torch

    if config.learner.device == "auto":
        return torch.cuda.is_available()
    return config.learner.device == "cuda"


def _weights_backend(config: Config) -> str:
    if config.weights.backend != "auto":
        return config.weights.backend
    return "nccl" if uses_cuda(config) and config.generators.gpus_each > 0 else "gloo"
