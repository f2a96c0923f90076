"""A run's folder: its lock, its lineage, the configuration of each start, and what a resume does with changed settings.

    <run>/config.yaml                the configuration of the last start
    <run>/starts/0003/config.yaml    the configuration of each start, by its lineage
    <run>/starts/0003/files.json     path and digest of each file that it names

A setting that changed since the previous start is

    refused   the checkpoint, the prompt order or the objective depend on the old value
    applied   the new value counts from the next step on
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from asyncgrpo.config.explain import knobs, value_in_words
from asyncgrpo.config.load import by_key, read_plain, to_yaml
from asyncgrpo.config.rules import local_model
from asyncgrpo.config.schema import Config, is_file
from asyncgrpo.errors import CheckpointError, ConfigError
from asyncgrpo.guests import split_spec
from asyncgrpo.host import entries, refused_as, replace_file
from asyncgrpo.learner.checkpoints import Checkpoints, step_of
from asyncgrpo.recording.events import EventLog, read_events
from asyncgrpo.scratch import is_unheld

log = logging.getLogger(__name__)

# -- the folder and its owner ------------------------------------------------------------------------------------------


class RunFolder:
    """A run's folder, locked by one driver at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._descriptor: int | None = None

    def claim(self) -> None:
        """Create the folder with mode 0700 and lock it until this process ends. An existing folder keeps its mode.

        Raises:
            CheckpointError: another process holds the lock, or the folder cannot be written.
        """
        with refused_as(CheckpointError, f"run.out {self.path} cannot be written"):
            self.path.mkdir(0o700, parents=True, exist_ok=True)
            self._descriptor = hold(self.path / ".lock", 0.0, self._held)

    @property
    def _held(self) -> str:
        return f"run.out {self.path} belongs to a run that is still active; stop it or choose another folder"

    @property
    def is_held(self) -> bool:
        """False if the folder was removed or moved since `claim`."""
        lock, own = self.path / ".lock", self._descriptor
        try:
            return own is None or os.path.samestat(os.stat(lock), os.fstat(own))
        except (FileNotFoundError, NotADirectoryError):
            # Its processes make other files again, but not its configuration.
            return (self.path / "config.yaml").is_file()
        except OSError:  # a file system that does not reply for a while
            return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def lineage(self) -> int:
        """Number of the newest start; 0 before the first. Raises CheckpointError."""
        path = self.path / "lineage"
        written = path.read_bytes().strip() if path.exists() else b"0"
        if not written.isdigit():
            raise CheckpointError(
                f"{path} does not hold the number of the newest start; write one into it that is larger than any, such as 1000"
            )
        return int(written)

    def check_free(self) -> None:
        """Raise CheckpointError if `claim` would, without writing or locking anything."""
        place = self.path
        while not place.exists():
            place = place.parent
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise CheckpointError(f"run.out {self.path} cannot be written: {place} is not a writable folder")
        with contextlib.suppress(OSError):
            if not is_unheld(self.path / ".lock"):
                raise CheckpointError(self._held)

    def next_lineage(self) -> int:
        """Allocate the number of this start, from 1. It is synced to disk before use, so that no number is used twice.

        Raises CheckpointError.
        """
        lineage, path = self.lineage + 1, self.path / "lineage"
        with refused_as(CheckpointError, f"{path} cannot be written"):
            replace_file(path, str(lineage).encode(), is_durable=True)
        return lineage

    def checkpoint(self) -> Path | None:
        return Checkpoints(self.path, keep=1).latest()

    def status(self) -> str:
        """Return `new`, `unfinished` or `done`."""
        status = "new"
        if (file := self.path / "metrics.jsonl").exists():
            for event in read_events(file):
                if event["event"] in ("start", "step", "end"):
                    status = "done" if event.get("status") == "done" else "unfinished"
        return status


def is_abandoned(path: Path) -> bool:
    """Return True if `path` is a run folder whose lock no driver holds."""
    try:
        return is_unheld(path / ".lock")
    except OSError:
        return False


def hold(path: Path, within_s: float, held: str = "") -> int:
    """Lock the file `path` until this process ends; return its descriptor.

    Args:
        held: message for a lock that another process holds.
    Raises:
        CheckpointError: another process still holds it after `within_s`.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise CheckpointError(held or f"{path} is still held by a process of an earlier start") from error
            time.sleep(0.1)


def unused(path: Path) -> Path:
    """Return the first of `path`, `path-2`, `path-3`, ... that does not hold a finished run."""
    candidate, number = path, 2
    while RunFolder(candidate).status() == "done":
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


# -- what a resume does with each changed setting ----------------------------------------------------------------------

REFUSED: dict[str, str] = {
    "model.path": "the checkpoint holds the weights of that model",
    "model.lora.rank": "the checkpoint holds adapters of that rank",
    "model.lora.alpha": "the adapters in the checkpoint were trained at that scale",
    "model.lora.targets": "the checkpoint holds adapters of those layers",
    "data.train": "the checkpoint counts its prompts by their place in that file",
    "data.weights": "the checkpoint counts prompts in the order of those shares",
    "data.columns": "the checkpoint counts prompts that were read so",
    "data.image_column": "it decides which images the prompts have that the checkpoint counts",
    "data.max_pixels": "it decides how many tokens an image has in the prompts that the checkpoint counts",
    "data.max_prompt_tokens": "it decides which prompts there are, and the checkpoint counts them",
    "data.shuffle": "the checkpoint counts prompts in that order",
    "data.system_prompt": "it is part of every prompt that the checkpoint counts",
    "data.chat_template_kwargs": "it decides how every prompt reads that the checkpoint counts",
    "run.seed": "the checkpoint counts prompts in the order of that seed",
    "algorithm.advantage": "one run has one algorithm",
    "algorithm.loss": "one run has one algorithm",
}
"""Reasons for the keys that a resume cannot change. It may change every other key."""

NOT_COMPARED = frozenset({"run.out"})
"""The folder identifies the run, whatever its path was before."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder that a setting names."""

    path: str
    """Absolute path, or a hub id."""
    digest: str = ""
    """Digest of its contents; empty if unknown."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a start."""

    values: dict[str, Any]
    """Plain values by key. Keys that an older release did not have are missing, and those it had alone are ignored."""
    sources: dict[str, Source]
    """Files and folders that keys name."""


@dataclass(frozen=True)
class Change:
    """One setting that changed."""

    key: str
    before: str
    now: str
    refusal: str = ""
    """Reason why a resume cannot make it; empty: it can."""

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def values_of(config: Config) -> dict[str, Any]:
    return by_key(_plain(config))


def changes(before: Settings, now: Settings) -> list[Change]:
    """Return all changes, in the order of the keys.

    Files are compared by contents if both digests are known: a file that moved is accepted, one with other contents is not.
    """
    found = (_change(key, before, now) for key in knobs() if key not in NOT_COMPARED)
    return [change for change in found if change is not None]


def _change(key: str, before: Settings, now: Settings) -> Change | None:
    then, here, refusal = before.sources.get(key), now.sources.get(key), REFUSED.get(key, "")
    if then is None or here is None:
        then_value = before.values.get(key, _plain(knobs()[key].default))
        if then_value == now.values[key]:
            return None
        return Change(key, value_in_words(then_value), value_in_words(now.values[key]), refusal)
    are_known = bool(then.digest and here.digest)
    has_same_contents = are_known and then.digest == here.digest
    if then.path != here.path:
        return Change(key, then.path, here.path, "" if has_same_contents else refusal)
    if are_known and not has_same_contents:
        other = f"with other contents (digest {here.digest})"
        return Change(key, f"{then.path} (digest {then.digest})", other, refusal)
    return None


def _plain(value: Any) -> Any:
    """Return the value as read back from a file: a tuple becomes a list."""
    return msgspec.json.decode(msgspec.json.encode(value))


# -- the configuration of each start -----------------------------------------------------------------------------------

_SAMPLED_ABOVE = 2**24
"""Bytes above which only samples of a model file are digested: two trained models differ nearly everywhere."""
_SAMPLES, _SAMPLE_BYTES = 64, 2**12
_MODEL_FILES = ("config.json", "tokenizer.json", "*.safetensors", "*.bin")


@dataclass(frozen=True)
class Standing:
    """State from which a run would start in its folder, and the changes since the previous start."""

    checkpoint: Path | None
    step: int
    """The step of the checkpoint; 0 without one."""
    is_new: bool
    """True if no start of the run has written an event yet."""
    changes: tuple[Change, ...]
    settings: Settings
    unknown: str = ""
    """A sentence about missing records of the previous start; empty: none are missing."""

    def lines(self, out: str) -> list[str]:
        if self.is_new:
            return []
        if self.checkpoint is not None:
            lines = [f"resuming from step {self.step} ({self.checkpoint})"]
        else:
            lines = [f"{out} has no checkpoint yet: starting again from step 0"]
        lines += [self.unknown] if self.unknown else []
        return lines + [f"changed: {change}" for change in self.changes]


def look(config: Config, folder: RunFolder) -> Standing:
    """Compare `config` with the run in `folder`, without writing anything.

    Raises:
        ConfigError: the run is finished, a changed setting cannot be changed by a resume, or a file cannot be read.
        CheckpointError: the files of the previous start cannot be read.
    """
    try:
        settings = settings_of(config)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    checkpoint, status = folder.checkpoint(), folder.status()
    if checkpoint is None and status == "new":
        return Standing(None, 0, True, (), settings)
    step, steps = step_of(checkpoint), config.run.steps
    # A run that was stopped after its last step still has to evaluate and to export.
    if steps is not None and (step > steps or (step == steps and status == "done")):
        raise ConfigError(
            f"run.out {config.run.out} holds a run with {step} steps done and run.steps is {steps}; "
            "raise run.steps to resume, or choose another folder"
        )
    before, unknown = _read_last(folder.path)
    found = changes(before, settings) if before is not None else []
    if status == "done" and before is not None and not found:
        raise ConfigError(
            f"run.out {config.run.out} holds a run that has trained every prompt run.epochs times ({step} steps); "
            "raise run.epochs to resume, or choose another folder"
        )
    refused = [f"{change} ({change.refusal})" for change in found if change.refusal]
    if refused and checkpoint is not None:  # else no trained step of the previous start is left
        raise ConfigError(
            f"run.out {config.run.out} holds a run of {step} steps, and a resume cannot change {'; nor '.join(refused)}; "
            "restore the old value to resume, or give another folder (--out, or run.out=...) for a new run"
        )
    return Standing(checkpoint, step, False, tuple(found), settings, unknown)


def record(config: Config, folder: RunFolder, standing: Standing) -> None:
    """Write the configuration of this start and an event for each change. Raises CheckpointError."""
    text, place = to_yaml(config), folder.path / "starts" / f"{folder.lineage + 1:04d}"
    with refused_as(CheckpointError, f"the configuration of this start cannot be written to {place}"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.yaml").write_text(text, encoding="utf-8")
        sources = msgspec.json.format(msgspec.json.encode(standing.settings.sources))
        replace_file(place / "files.json", sources)  # last: a start without it does not count
        (folder.path / "config.yaml").write_text(text, encoding="utf-8")
    events = EventLog(folder.path / "metrics.jsonl")
    for change in standing.changes:
        events.write("changed", key=change.key, before=change.before, now=change.now, effect="applied")


def keep_changed(config: Config, folder: RunFolder) -> None:
    """Write settings that were changed during the run. The next start is compared with them.

    A failed write is logged and does not end the run.
    """
    text, of_starts = to_yaml(config), sorted((folder.path / "starts").glob("[0-9]*/config.yaml"), key=_start_order)
    try:
        for path in (folder.path / "config.yaml", *of_starts[-1:]):
            replace_file(path, text.encode())
    except OSError as error:
        log.warning("the changed settings cannot be written to %s: %s", folder.path, error.strerror)


def _start_order(file: Path) -> tuple[int, str]:
    """Return the key that sorts files of starts. From the 10,000th start on, names are longer."""
    return len(file.parent.name), file.parent.name


def _read_last(run: Path) -> tuple[Settings | None, str]:
    """Return the settings of the previous start, and a sentence about missing records of it.

    Raises:
        CheckpointError: its `files.json` cannot be read.
        ConfigError: its `config.yaml` cannot be read.
    """
    found = [file for place in entries(run / "starts") if (file := place / "files.json").is_file()]
    files = max(found, key=_start_order, default=None)
    if files is not None:
        try:
            sources = msgspec.json.decode(files.read_bytes(), type=dict[str, Source])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{files} cannot be read: {error}") from error
        return Settings(values=read_plain(files.with_name("config.yaml")), sources=sources), ""
    return None, f"{run} has no configuration of an earlier start: changes since then cannot be detected"


def settings_of(config: Config) -> Settings:
    """Return the settings of a start, with digests of the present files that it names.

    Relative paths start from the working directory. Raises OSError for a file that cannot be read.
    """
    model, specs, files = Path(config.model.path).expanduser(), config.reward.functions, config.reward.files
    path = os.path.realpath(model) if model.is_dir() else config.model.path
    found = {"model.path": Source(path=path, digest=_digest(_files_of_model(path), is_model=True))}
    if files:
        places = [os.path.realpath(spec) if spec in files else spec for spec in specs]
        found["reward.function"] = Source(path=", ".join(places), digest=_digest(split_spec(spec)[0] for spec in files))
    for key, sources in ("data.train", config.data.sources), ("data.eval", tuple(config.data.suites.values())):
        if sources:
            places = [os.path.realpath(source) if is_file(source) else source for source in sources]
            others = [source for source in sources if not is_file(source)]
            digest = _digest((Path(source) for source in sources if is_file(source)), others=others)
            found[key] = Source(path=", ".join(places), digest=digest)
    return Settings(values=values_of(config), sources=found)


def _digest(files: Iterable[Path], *, is_model: bool = False, others: Sequence[str] = ()) -> str:
    """Return the digest of the contents of files, and of the names of other sources; empty without any.

    Of a large model file it takes only the head and evenly spaced samples.
    """
    digest, files = xxhash.xxh3_64(), list(files)
    for other in others:
        digest.update(f"{other}\0".encode())
    for file in files:
        if is_model:
            digest.update(f"{file.name}\0".encode())
        size = file.stat().st_size
        digest.update(f"{size}\0".encode())
        with open(file, "rb") as content:
            if not is_model or size <= _SAMPLED_ABOVE:
                while block := content.read(2**20):
                    digest.update(block)
                continue
            digest.update(content.read(2**20))
            for sample in range(_SAMPLES):
                content.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files or others else ""


def _files_of_model(path: str) -> list[Path]:
    """Return the model files that are digested; none for a hub id that is not downloaded yet."""
    folder = local_model(path)
    return sorted(file for name in _MODEL_FILES for file in folder.glob(name)) if folder is not None else []
