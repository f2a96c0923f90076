"""Check, preview and execute a run, for `demo`, `train` and `serve`.

The checks read the files of the run and call its functions, so that an error shows within seconds, before engines start.
"""

import logging
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import typer

from asyncgrpo import scratch, warm
from asyncgrpo.cli.options import size_in_words
from asyncgrpo.config import placement
from asyncgrpo.config.explain import counted, sizes_in_words
from asyncgrpo.config.memory import Card, runs_on_gpu
from asyncgrpo.config.model_size import size_at
from asyncgrpo.config.reach import find_model
from asyncgrpo.config.rules import check_model, local_model
from asyncgrpo.config.schema import Config, is_file
from asyncgrpo.data.loading import Checked, check, open_source, prompt_of
from asyncgrpo.data.sources import read_rows
from asyncgrpo.errors import ConfigError, RewardError
from asyncgrpo.host import Host, has_gpu, importing
from asyncgrpo.recording.loggers import check_loggers

if TYPE_CHECKING:  # importing the cluster imports ray
    from rich.console import Console

    from asyncgrpo.cluster.chaos import Plan
    from asyncgrpo.rewards.base import Reward
    from asyncgrpo.types import Prompt

log = logging.getLogger(__name__)

# -- the checks before a run is started --------------------------------------------------------------------------------

REWARD_IMPORT_S = 10.0
"""Deadline for importing a user's reward file before the run starts."""
_READ_EARLY_BYTES = 2**22
"""Size up to which a data file is read in the driver. Parquet is left to the warm process, which has pyarrow."""
_FEWEST_OPEN_FILES = 128
"""The limit with which a small run works. With 64 its first processes end without a message."""
_OTHER_FILES_BYTES = 2**26
"""Space in a run folder for all files but checkpoints."""


def check_run(config: Config) -> tuple[str, dict[str, Checked]]:
    """Check everything about a run that is known before it starts.

    Returns:
        As `check_inputs`.
    Raises:
        ConfigError, DataError, RewardError: the run would fail.
    """
    find_model(config.model.path)  # before imports that take seconds
    if config.algorithm.teacher is not None:
        find_model(config.algorithm.teacher, "algorithm.teacher")
    import torch

    from asyncgrpo.cluster.ray_session import check_gpus
    from asyncgrpo.cluster.wiring import uses_cuda

    check_settings(config)
    if config.cluster.ray_address is None:  # a Ray cluster is checked when the run has connected to it
        check_gpus(config, torch.cuda.device_count(), learner_on_gpu=uses_cuda(config))
    found = check_inputs(config)
    check_fit(config)
    _check_training(config)
    return found


def check_settings(config: Config) -> None:
    """Check a configuration without its files and the GPUs of this machine. Raises ConfigError."""
    from asyncgrpo.wire.sockets import check_bind

    if 0 <= (most := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < _FEWEST_OPEN_FILES:  # -1: unlimited
        raise ConfigError(f"a process may open {most} files, too few for Ray and the sockets of a run: ulimit -n 8192")
    check_bind(config.cluster.bind)
    check_loggers(config.run.loggers)


def check_files(config: Config) -> None:
    """Read small data files and the model's `config.json`, so that an error in them is reported before torch is imported.

    Raises:
        ConfigError, DataError: one sentence.
    """
    check_model(config)
    for source in filter(is_file, (*config.data.sources, *config.data.suites.values())):
        file = Path(source)
        if not file.is_file() or (file.suffix != ".parquet" and file.stat().st_size <= _READ_EARLY_BYTES):
            for _ in read_rows(source):
                pass


def check_inputs(config: Config) -> tuple[str, dict[str, Checked]]:
    """Check the inputs of a run or an evaluation: engine, model, tokenizer, reward and prompts.

    Returns:
        Description of the reward, and the rows of `train` and of each suite.
    Raises:
        ConfigError, DataError, RewardError: an input cannot be used.
    """
    from asyncgrpo.engines.build import check_extra, why_sglang_cannot_run
    from asyncgrpo.environments.build import build_agent, build_environment, environment_scores
    from asyncgrpo.rewards.build import build_reward
    from asyncgrpo.weights.files import check_weight_files

    folder = find_model(config.model.path)
    check_model(config)
    if folder is not None:
        check_weight_files(folder, is_complete=Path(config.model.path).expanduser().is_dir())
    if config.generators.engine == "sglang" and (why := why_sglang_cannot_run()) is not None:
        raise ConfigError(f"generators.engine is sglang, which cannot run here: {why} (or use generators.engine=torch)")
    if config.teacher.own and (why := why_sglang_cannot_run()) is not None:
        raise ConfigError(f"teacher.path is set without teacher.url, but SGLang cannot run here: {why}")
    check_extra(config.generators)
    reward = build_reward(config.reward, import_timeout_s=REWARD_IMPORT_S, trial=_trial(config))
    if (agent := build_agent(config.environment)) is not None:
        prompts = _check_prompts(config, None if config.reward.function is None else reward)
        return f"{agent.about}; where it returns nothing, {reward.about}", prompts
    environment = build_environment(config.environment)
    if environment is not None and environment_scores(config, environment):
        return environment.about, _check_prompts(config, None)
    about = reward.about if environment is None else f"{reward.about}, in {environment.about}"
    return about, _check_prompts(config, reward)


def _trial(config: Config) -> "Prompt | None":
    """Return the first training prompt if functions of the user score completions."""
    if not config.reward.files:
        return None
    schema, rows = open_source(config.data.sources[0], config.data)
    return prompt_of("train/0", schema.to_record(rows[0], 0))


def _check_prompts(config: Config, reward: "Reward | None") -> dict[str, Checked]:
    from asyncgrpo.rewards.teacher import check_teachers

    found = check(config, lambda line: typer.echo(line, err=True))
    named = sources_of(config)
    for split, checked in found.items():
        if reward is not None:
            check_sources(reward, checked.sources, f"data.{split} ({named[split]})")
    check_teachers(config, found["train"].sources)
    wanted, rows, epochs = config.buffer.prompts_per_step, found["train"].rows, config.run.epochs
    if wanted > rows:
        is_one = epochs is not None and epochs * rows <= wanted
        then = "the run is one smaller step" if is_one else "a step takes a prompt more than once"
        log.warning("buffer.prompts_per_step (%d) is more than the rows of data.train (%d): %s", wanted, rows, then)
    return found


def check_sources(reward: "Reward", sources: set[str], where: str) -> None:
    """Raise RewardError, which names the file `where`, or ConfigError if the reward cannot score rows of these `data_source`."""
    try:
        reward.check_sources(sources)
    except RewardError as error:
        raise RewardError(f"{where}: {error}") from None


def sources_of(config: Config) -> dict[str, str]:
    """Return the sources of the prompts, by `train` or the name of a held-out suite."""
    return {"train": ", ".join(config.data.sources), **config.data.suites}


def card_of(config: Config) -> Card:
    """Return the GPU of a run: the smallest one here, unless the configuration gives its memory."""
    import torch

    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return Card.of(config, min(sizes, default=None))


def check_fit(config: Config) -> None:
    """Raise ConfigError for what cannot fit its GPU, or the memory of this machine. Nodes of a Ray cluster are not compared."""
    if (size := size_at(config.model.path, may_download=True)) is None:
        return
    if _is_on_gpu(config):
        placement.refuse(size, config, card_of(config))
    for path in config.teacher.own.values() if config.teacher_gpus else ():
        if (teacher := size_at(path, may_download=True)) is not None:
            placement.refuse_teacher(path, teacher, config, card_of(config))
    if config.cluster.ray_address is None:
        placement.refuse_host(size, config, Host.here(scratch.SHARED_MEMORY))


def memory_table(config: Config) -> str:
    """The memory of a run on GPUs as a table; empty for one on the CPU, or a model that is not known yet."""
    if not _is_on_gpu(config) or (size := size_at(config.model.path)) is None:
        return ""
    card = card_of(config)
    is_here = card.known == "found" and config.cluster.ray_address is None
    return placement.report(size, config, card, Host.here(scratch.SHARED_MEMORY) if is_here else None)


def _is_on_gpu(config: Config) -> bool:
    return runs_on_gpu(config) or config.generators.gpus_each > 0


def _check_training(config: Config) -> None:
    """Check the model as the learner loads it, and the disk space for a checkpoint. Skip a model to be downloaded."""
    import torch

    from asyncgrpo.learner.model import check_language_model, refuse_other_tokens

    if (folder := local_model(config.model.path)) is None:
        return
    teacher = config.algorithm.teacher
    if teacher is not None and (there := local_model(teacher)) is not None:
        refuse_other_tokens(str(folder), str(there))
        check_language_model(str(there), config, "algorithm.teacher")
    model = check_language_model(str(folder), config)
    exported = sum(p.numel() for p in model.parameters()) * getattr(torch, config.model.dtype).itemsize
    resumed = 3 * sum(4 * p.numel() for p in model.parameters() if p.requires_grad)  # weights and AdamW's two moments
    out = Path(config.run.out).absolute()
    disk = next(place for place in (out, *out.parents) if place.exists())
    free, needed = shutil.disk_usage(disk).free, exported + resumed
    if free < needed + _OTHER_FILES_BYTES:
        others = size_in_words(_OTHER_FILES_BYTES)
        takes = f"a checkpoint takes about {size_in_words(needed)} and the other files {others}"
        instead = "free some space or choose a folder on another disk"
        raise ConfigError(f"run.out {config.run.out}: {takes}, and the disk has {size_in_words(free)} left; {instead}")


# -- --dry-run ---------------------------------------------------------------------------------------------------------


def preview(config: Config, algorithm: str | None = None) -> None:
    """Check a run as `execute` does and print its sizes and where it would begin.

    Args:
        algorithm: name of the preset that `config` was made with.
    Raises:
        AsyncGRPOError: the run would be refused.
    """
    from asyncgrpo.cluster.folder import RunFolder, look

    with importing():
        reward, prompts = check_run(config)
    folder = RunFolder(Path(config.run.out))
    folder.check_free()
    standing = look(config, folder)
    start = ["new, starts at step 0"] if standing.is_new else standing.lines(config.run.out)
    named = sources_of(config)
    lines = [sizes_in_words(config, algorithm), f"model: {config.model.path}"]
    lines += [f"data.{split}: {named[split]}, {counted(about.rows, 'row')}" for split, about in prompts.items()]
    lines += [f"reward: {reward}", f"folder: {folder.path}", *start, *filter(None, [memory_table(config)])]
    typer.echo("\n".join([*lines, "dry run: nothing was started or written"]))


# -- the run -----------------------------------------------------------------------------------------------------------


class Output:
    """stdout of a run, which continues where it cannot be written: its disk is full, or nobody reads the pipe any more."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stdout.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stdout.flush()


def execute(
    config: Config,
    *,
    algorithm: str | None = None,
    make: Callable[[], None] | None = None,
    chaos: "Plan | None" = None,
) -> str:
    """Run `config` in its folder until it is done or asked to stop, and show its progress. Returns `done` or `drained`.

    An unfinished run in the folder resumes from its newest checkpoint. The checks run while Ray starts.

    Args:
        algorithm: name of the preset that `config` was made with.
        make: creates the files that `config` names. Must be picklable.
        chaos: faults to inject into the run.
    Raises:
        AsyncGRPOError: the run was refused or failed.
    """
    from rich.console import Console

    from asyncgrpo.cluster.folder import RunFolder, Standing, look, record

    console = Console(file=cast(IO[str], Output()))

    def report(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    check_settings(config)
    if make is None:
        find_model(config.model.path)
        scratch.folder()  # removes what a killed run left in shared memory
    folder = RunFolder(Path(config.run.out))
    folder.check_free()
    with ExitStack() as claim:

        def claimed() -> Standing:
            folder.claim()
            claim.callback(folder.release)
            return look(config, folder)

        standing = claimed() if folder.path.is_dir() else None  # before Ray starts, for an error in a resume
        report("checking the run and starting Ray")
        with session_of_checked(config, make) as (reward, table):
            from asyncgrpo.cluster.run import Run

            sizes = sizes_in_words(config, algorithm)
            standing = standing or claimed()
            for line in (sizes, f"reward: {reward}", *filter(None, [table]), *standing.lines(config.run.out)):
                report(line)
            record(config, folder, standing)
            events = folder.path / "metrics.jsonl"
            with _screen(events, console):
                status = Run(config, folder, sizes, chaos).execute(report=report)
    from asyncgrpo.recording.curves import plot
    from asyncgrpo.recording.events import read_events
    from asyncgrpo.recording.progress import Progress
    from asyncgrpo.recording.screen import summary

    progress = Progress.of(read_events(events))
    if progress.steps:
        plot(read_events(events), folder.path / "curves.png")
    report(summary(progress))
    return status


@contextmanager
def session_of_checked(config: Config, make: Callable[[], None] | None = None) -> Iterator[tuple[str, str]]:
    """Start the warm process and Ray, and check the run meanwhile. Yields the result of `_check`."""
    _warm_up(config)
    try:
        if make is None:
            check_files(config)
        from asyncgrpo.cluster.ray_session import session_beside  # imports ray, while the warm process imports torch
    except BaseException:
        warm.end()
        raise
    with session_beside(lambda: warm.call(_check, config, make), config) as found:
        yield found


def _warm_up(config: Config) -> None:
    """Start the warm process of a run on the CPU of this machine. It imports while this process continues."""
    if config.cluster.ray_address is None and not config.generators.gpus_each and not has_gpu():
        scratch.tidy_at_end()
        warm.begin(config.generators.engine, scratch.folder())


def _check(config: Config, make: Callable[[], None] | None) -> tuple[str, str]:
    """Create the files of a run and check it. Returns the description of the reward, and the memory table."""
    with importing():
        if make is not None:
            make()
        return check_run(config)[0], memory_table(config)


@contextmanager
def _screen(events: Path, console: "Console") -> Iterator[None]:
    from asyncgrpo.recording.events import Follower
    from asyncgrpo.recording.screen import watch

    stop = threading.Event()
    newest = max((event.get("time", 0.0) for event in Follower(events, 2**16).poll()), default=0.0)
    since = max(time.time(), newest + 1.0)  # the clock may have been set back since the previous start
    arguments = {"console": console, "stop": stop, "since": since}
    screen = threading.Thread(target=watch, args=(events,), kwargs=arguments, daemon=True)
    screen.start()
    try:
        yield
    finally:
        stop.set()
        screen.join(timeout=10.0)
