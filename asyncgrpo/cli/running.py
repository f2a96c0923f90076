"""What `demo`, `train` and `serve` share: they check a run, preview it, run it with the screen, and sum it up.

The checks read the same files as the run and call the same functions, so that a mistake shows within seconds and not after
the engines of many GPUs have started.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from asyncgrpo import scratch, warm
from asyncgrpo.cli.output import size_in_words
from asyncgrpo.config.explain import sizes_in_words
from asyncgrpo.config.schema import Config, is_file
from asyncgrpo.cores import cores
from asyncgrpo.errors import ConfigError
from asyncgrpo.host import Host
from asyncgrpo.importing import has_gpu, importing

if TYPE_CHECKING:  # importing the cluster imports ray
    from asyncgrpo.cluster.folder import RunFolder
    from asyncgrpo.cluster.run import Outcome
    from asyncgrpo.config.memory import Card
    from asyncgrpo.data.table import About
    from asyncgrpo.rewards.base import ConfiguredReward
    from asyncgrpo.tools.chaos import Plan

log = logging.getLogger(__name__)

# -- the checks before a run is started --------------------------------------------------------------------------------

REWARD_IMPORT_S = 10.0
"""How long the import of a user's reward file may take, while nothing else runs here."""
_PROCESSES_PER_CORE = 4
"""More on the CPU are a warning."""
_OTHER_FILES_BYTES = 2**26
"""Space in a run folder for everything but checkpoints."""


def check_run(config: Config) -> str:
    """Check everything about a run that can be known before it is started.

    Returns:
        What scores the completions, in words.
    Raises:
        ConfigError, DataError, RewardError: one sentence each.
    """
    from asyncgrpo.config.reach import find_model

    find_model(config.model.path)  # before the imports of seconds
    from asyncgrpo.cluster.wiring import uses_cuda

    check_settings(config)
    _check_gpus(config, learner_on_gpu=uses_cuda(config))
    _check_cpus(config, learner_on_gpu=uses_cuda(config))
    reward = check_inputs(config)
    check_fit(config)
    _check_training(config, learner_on_gpu=uses_cuda(config))
    return reward


def check_settings(config: Config) -> None:
    """Check what can be known of a configuration alone, without its files and this machine's GPUs.

    Raises:
        ConfigError: one sentence.
    """
    from asyncgrpo.config.rules import check_algorithm
    from asyncgrpo.recording.loggers import check_loggers
    from asyncgrpo.wire.sockets import check_bind

    check_algorithm(config)
    check_bind(config.cluster.bind)
    check_loggers(config.run.loggers)


def check_inputs(config: Config) -> str:
    """Check what an evaluation needs too: engine, model, tokenizer, reward and prompts.

    Returns:
        What scores the completions, in words.
    Raises:
        ConfigError, DataError, RewardError: one sentence each.
    """
    from asyncgrpo.config.reach import find_model
    from asyncgrpo.config.rules import check_model
    from asyncgrpo.engines.installed import check_extra, why_sglang_cannot_run
    from asyncgrpo.environments.build import build_agent, build_environment, environment_scores
    from asyncgrpo.rewards.build import build_reward
    from asyncgrpo.weights.files import check_weight_files

    folder = find_model(config.model.path)
    check_model(config)
    if folder is not None:
        check_weight_files(folder, is_complete=Path(config.model.path).expanduser().is_dir())
    if config.generators.engine == "sglang" and (why := why_sglang_cannot_run()) is not None:
        raise ConfigError(f"generators.engine is sglang, which cannot run here: {why} (or use generators.engine=torch)")
    check_extra(config.generators)
    reward = build_reward(config.reward, import_timeout_s=REWARD_IMPORT_S)
    if (agent := build_agent(config.environment)) is not None:
        _check_prompts(config, None if config.reward.function is None else reward)
        return f"{agent.about}; where it returns nothing, {reward.about}"
    environment = build_environment(config.environment)
    if environment is not None and environment_scores(config, environment):
        _check_prompts(config, None)
        return environment.about
    _check_prompts(config, reward)
    return reward.about if environment is None else f"{reward.about}, in {environment.about}"


def _check_prompts(config: Config, reward: "ConfiguredReward | None") -> None:
    from asyncgrpo.data.kept import check

    found = check(config, Path(config.run.out), lambda line: typer.echo(line, err=True))
    for about in found.values():
        if reward is not None:
            reward.check_sources(set(about.sources))
    _check_step(config, found["train"].num_rows)


def _check_step(config: Config, rows: int) -> None:
    """Warn about steps that take more prompts than there are."""
    wanted, epochs = config.buffer.prompts_per_step, config.run.epochs
    if wanted > rows:
        is_one = epochs is not None and epochs * rows <= wanted
        then = "the run is one smaller step" if is_one else "a step takes a prompt more than once"
        log.warning("buffer.prompts_per_step (%d) is more than the rows of data.train (%d): %s", wanted, rows, then)


def _check_gpus(config: Config, *, learner_on_gpu: bool) -> None:
    """Check the GPUs of this machine. Those of a Ray cluster are counted once the run has connected to it."""
    if config.cluster.ray_address is not None:
        return
    import torch

    from asyncgrpo.cluster.ray_session import check_gpus

    check_gpus(config, torch.cuda.device_count(), learner_on_gpu=learner_on_gpu)


def _check_cpus(config: Config, *, learner_on_gpu: bool) -> None:
    """Warn about far more processes on the CPU than this machine has cores."""
    if config.cluster.ray_address is not None:
        return
    generators = 0 if config.generators.gpus_each else config.generators.count
    ranks = 0 if learner_on_gpu else config.learner.ranks
    if generators + ranks > _PROCESSES_PER_CORE * cores():
        what = f"{generators} generators and {ranks} learner ranks on the CPU"
        log.warning("%s share %d cores; lower generators.count or learner.ranks", what, cores())


def card_of(config: Config) -> "Card":
    """The GPU that a run has: the smallest one here, unless the configuration names its memory."""
    import torch

    from asyncgrpo.config.memory import Card

    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return Card.of(config, min(sizes, default=None))


def check_fit(config: Config) -> None:
    """Raise ConfigError for what cannot fit its GPU, or the memory of this machine where all of the run is on it."""
    from asyncgrpo.config.fit import refuse
    from asyncgrpo.config.memory import runs_on_gpu
    from asyncgrpo.config.shapes import shape_at

    on_gpu = runs_on_gpu(config) or config.generators.gpus_each > 0
    if on_gpu and (shape := shape_at(config.model.path, may_download=True)) is not None:
        refuse(shape, config, card_of(config))
    check_host(config)


def check_host(config: Config) -> None:
    """Raise ConfigError for what cannot fit the memory of this machine. The nodes of a Ray cluster are not looked at."""
    from asyncgrpo.config.fit import refuse_host
    from asyncgrpo.config.shapes import shape_at

    if config.cluster.ray_address is None and (shape := shape_at(config.model.path)) is not None:
        refuse_host(shape, config, Host.here(scratch.SHARED_MEMORY))


def memory_table(config: Config) -> str:
    """What a run on GPUs holds, as a table; empty for one on the CPU, or a model that is not known yet."""
    from asyncgrpo.config.fit import estimate, report
    from asyncgrpo.config.shapes import shape_at

    shape = shape_at(config.model.path)
    if shape is None:
        return ""
    fit = estimate(shape, config, card_of(config))
    is_here = fit.card.known == "found" and config.cluster.ray_address is None
    return report(fit, Host.here(scratch.SHARED_MEMORY) if is_here else None) if fit.learner or fit.engine else ""


def _check_training(config: Config, *, learner_on_gpu: bool) -> None:
    """Check the model as the learner loads it, and the disk for a checkpoint. A model to be downloaded passes."""
    import torch

    from asyncgrpo.config.rules import local_model
    from asyncgrpo.learner.model import check_language_model

    if (folder := local_model(config.model.path)) is None:
        return
    model = check_language_model(str(folder), config, torch.device("cuda" if learner_on_gpu else "cpu"))
    exported = sum(p.numel() for p in model.parameters()) * getattr(torch, config.model.dtype).itemsize
    resumed = 3 * sum(4 * p.numel() for p in model.parameters() if p.requires_grad)  # weights and AdamW's two moments
    _check_disk(config.run.out, exported + resumed)


def _check_disk(out: str, checkpoint_bytes: int) -> None:
    there = Path(out).absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < checkpoint_bytes + _OTHER_FILES_BYTES:
        raise ConfigError(
            f"run.out {out}: a checkpoint takes about {size_in_words(checkpoint_bytes)}, and the disk has "
            f"{size_in_words(free)} left; free some space, or choose a folder on another disk"
        )


# -- --dry-run ---------------------------------------------------------------------------------------------------------


def preview(config: Config, algorithm: str | None = None, *, shown: Config | None = None) -> None:
    """Check and print everything that `execute` checks before it starts.

    Args:
        algorithm: name of the preset that `config` was made with.
        shown: the configuration whose file names are printed, where `config` names stand-ins for files to be made.
    Raises:
        AsyncGRPOError: one sentence that says why the run would be refused.
    """
    from asyncgrpo.cluster.folder import RunFolder, look

    with importing():
        reward = check_run(config)
    folder = RunFolder(Path(config.run.out))
    folder.check_free()
    standing = look(config, folder)
    rows = [
        *_files(config, shown or config),
        ("reward", reward),
        ("processes", _processes(config)),
        ("GPUs", _gpus(config)),
    ]
    begins = ["new: it would begin at step 0"] if standing.is_new else standing.lines(config.run.out)
    rows += [("folder" if i == 0 else "", line) for i, line in enumerate([str(folder.path), *begins])]
    typer.echo(sizes_in_words(config, algorithm))
    for name, text in rows:
        typer.echo(f"{name:<11} {text}")
    if table := memory_table(config):
        typer.echo(table)
    typer.echo("dry run: nothing was started, and nothing was written")


def _files(config: Config, shown: Config) -> Iterator[tuple[str, str]]:
    from asyncgrpo.config.rules import local_model
    from asyncgrpo.data.kept import is_lazy
    from asyncgrpo.data.prompts import load_prompts
    from asyncgrpo.data.tokenizer import load_tokenizer

    tokenizer = None
    if (model := local_model(config.model.path)) is not None:
        tokenizer = load_tokenizer(config.model.path)
        yield "model", str(model.absolute() if shown is config else Path(shown.model.path))
    else:
        yield "model", f"{shown.model.path}, to be downloaded: no prompt was counted"
    named = [("train", name) for name in shown.data.sources] + list(shown.data.suites.items())
    sources = [*config.data.sources, *config.data.suites.values()]
    for (split, name), source in zip(named, sources, strict=True):
        text = str(Path(name).absolute()) if is_file(name) else name
        if split == "train" and is_lazy(config):
            text += ": rows are tokenised when they are due"
        elif tokenizer is not None:
            limit = None if split == "train" else config.data.eval_rows
            loaded = load_prompts(source, split, tokenizer, config.data, limit=limit)
            text += f": {len(loaded):,} prompts, {loaded.dropped_too_long:,} longer than data.max_prompt_tokens"
        yield f"data.{split}" if split in ("train", "eval") else f"  {split}", text


def _processes(config: Config) -> str:
    from asyncgrpo.cluster.wiring import uses_cuda

    generators = config.generators
    learner = "one GPU each" if uses_cuda(config) else "on CPU"
    engine = f"{generators.gpus_each} GPUs each" if generators.gpus_each else "on CPU"
    return (
        f"driver 1; buffer 1; learner {config.learner.ranks} ({learner}); generator {generators.count} "
        f"({generators.engine}, {engine}), with reward worker {config.reward.workers} each"
    )


def _gpus(config: Config) -> str:
    """How many GPUs the run needs, and how many there are. `check_run` has compared them."""
    import torch

    from asyncgrpo.cluster.ray_session import gpus_wanted
    from asyncgrpo.cluster.wiring import uses_cuda

    wanted = gpus_wanted(config, learner_on_gpu=uses_cuda(config))
    if config.cluster.ray_address is not None:
        return f"{wanted} wanted, of the cluster at {config.cluster.ray_address}"
    return f"{wanted} wanted, {torch.cuda.device_count()} here"


# -- the run -----------------------------------------------------------------------------------------------------------


def choose_folder(default: str, explicit: str | None) -> Path:
    """The folder asked for, or else the first of `default`, `default-2`, ... without a finished run."""
    from asyncgrpo.cluster.folder import unused

    if explicit is not None and not explicit.strip():
        raise ConfigError("--out is empty; name a folder")
    return Path(explicit) if explicit is not None else unused(Path(default))


def execute(
    config: Config,
    console: Console,
    *,
    algorithm: str | None = None,
    make: Callable[[], None] | None = None,
    chaos: "Plan | None" = None,
    observe: bool = False,
) -> "Outcome":
    """Run `config` in its folder until it is done or asked to stop, with the screen on `console`.

    An unfinished run in the folder goes on from its newest checkpoint. The run is checked while Ray starts.

    Args:
        algorithm: name of the preset that `config` was made with, to be printed with the sizes.
        make: makes the files that `config` names. It can be pickled.
        chaos: faults to inject into the run.
        observe: start Prometheus beside the run, and Grafana if it is installed.
    Raises:
        AsyncGRPOError: one sentence that says what ended the run.
    """
    from asyncgrpo.cluster.folder import RunFolder, Standing, look, record
    from asyncgrpo.config.reach import find_model

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    check_settings(config)
    if make is None:
        find_model(config.model.path)
        scratch.folder()  # what a run that was killed has left in shared memory is not in the way
        check_host(config)
    folder = RunFolder(Path(config.run.out))
    folder.check_free()
    with ExitStack() as claim:

        def claimed() -> Standing:
            folder.claim()
            claim.callback(folder.release)
            return look(config, folder)

        standing = claimed() if folder.path.is_dir() else None  # what is wrong with a resume is said at once
        say("checking the run and starting Ray")
        with session_of_checked(config, make) as (reward, table, checked):
            from asyncgrpo.cli.observe import observed
            from asyncgrpo.cluster.run import Run
            from asyncgrpo.data.kept import prepare_if_small
            from asyncgrpo.wire.sockets import is_loopback

            sizes = sizes_in_words(config, algorithm)
            standing = standing or claimed()
            for line in (sizes, f"reward: {reward}", *filter(None, [table]), *standing.lines(config.run.out)):
                say(line)
            record(config, folder, standing)
            warm.call(prepare_if_small, config, folder.path, checked)
            with_token = not is_loopback(config.cluster.bind)
            watched = observed(folder.path, say, with_token=with_token) if observe else nullcontext()
            with watched, _screen(folder, console):
                outcome = Run(config, folder, sizes, chaos).execute(tell=say)
    say(_summary(folder))
    return outcome


@contextmanager
def session_of_checked(
    config: Config, make: Callable[[], None] | None = None
) -> Iterator[tuple[str, str, "dict[str, About]"]]:
    """Start the warm process and Ray, and check the run meanwhile. Yields what `_check` returns."""
    _warm_up(config)
    from asyncgrpo.cluster.ray_session import session_beside  # imports ray, while the warm process imports torch

    with session_beside(lambda: warm.call(_check, config, make), config) as found:
        yield found


def _warm_up(config: Config) -> None:
    """Start the warm process of a run on the CPU of this machine, which imports while this one goes on."""
    if config.cluster.ray_address is None and not config.generators.gpus_each and not has_gpu():
        scratch.tidy_at_end()
        warm.begin(config.generators.engine, scratch.folder())


def _check(config: Config, make: Callable[[], None] | None) -> tuple[str, str, "dict[str, About]"]:
    """Make the files of a run and check it.

    Returns:
        What scores the completions, the table of its memory, and what was found in data files.
    """
    from asyncgrpo.data.kept import checked

    with importing():
        if make is not None:
            make()
        return check_run(config), memory_table(config), checked


@contextmanager
def _screen(folder: "RunFolder", console: Console) -> Iterator[None]:
    """Show the events of the run while it goes on."""
    from asyncgrpo.recording.screen import watch

    stop = threading.Event()
    arguments = {"console": console, "stop": stop, "since": time.time()}
    screen = threading.Thread(target=watch, args=(folder.path / "metrics.jsonl",), kwargs=arguments, daemon=True)
    screen.start()
    try:
        yield
    finally:
        stop.set()
        screen.join(timeout=10.0)


def _summary(folder: "RunFolder") -> str:
    """Draw the curves of the run, and return its summary."""
    from asyncgrpo.recording.curves import plot
    from asyncgrpo.recording.progress import progress_of
    from asyncgrpo.recording.text import summary

    progress = progress_of(folder.path / "metrics.jsonl")
    if progress.steps:
        plot(progress, folder.path / "curves.png")
    return summary(progress, folder.path)
