"""Copies of a run's metrics for Weights & Biases, TensorBoard, Trackio and MLflow.

The authoritative record is `metrics.jsonl`, which every run writes. A logger's package is imported only if `run.loggers`
names it. No logger needs a network: wandb is offline unless a key or a mode is set, and MLflow writes below the run folder
unless MLFLOW_TRACKING_URI is set.
"""

import importlib
import logging
import math
import netrc
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asyncgrpo.errors import ConfigError

log = logging.getLogger(__name__)

Nested = Mapping[str, Any]


Logger = tuple[Callable[[int, dict[str, float]], object], Callable[[], object]]
"""Logs the scalars of a step; closes."""


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken installation may raise anything
        raise ConfigError(
            f"run.loggers names {name!r}, which cannot be imported ({error}); pip install 'asyncgrpo[{name}]'"
        ) from error


def flatten(values: Nested, separator: str = "/") -> dict[str, Any]:
    """Flatten nested mappings by joining keys: {"seconds": {"publish": 1}} becomes {"seconds/publish": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}{separator}{inner}": leaf for inner, leaf in flatten(value, separator).items()})
        else:
            flat[key] = value
    return flat


def scalars_of(values: Nested) -> dict[str, float]:
    """Return the finite numbers in `values`, flattened. Texts, lists and nulls are left out."""
    numbers = {key: value for key, value in flatten(values).items() if isinstance(value, (int, float))}
    return {key: float(value) for key, value in numbers.items() if math.isfinite(value)}


def _wandb(run_dir: Path, run_name: str, config: Nested) -> Logger:
    wandb = _load("wandb")
    mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
    run = wandb.init(project="asyncgrpo", name=run_name, dir=str(run_dir), config=dict(config), mode=mode)
    return lambda step, scalars: run.log(scalars, step=step), run.finish


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _tensorboard(run_dir: Path, run_name: str, config: Nested) -> Logger:
    _load("tensorboard")
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir=str(run_dir / "tensorboard"))
    rows = "\n".join(f"    {key}: {value}" for key, value in flatten(config, ".").items())
    writer.add_text("config", f"{run_name}\n\n{rows}", 0)

    def log_step(step: int, scalars: dict[str, float]) -> None:
        for key, value in scalars.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return log_step, writer.close


def _trackio(run_dir: Path, run_name: str, config: Nested) -> Logger:
    # Trackio reads TRACKIO_DIR when it is imported.
    os.environ.setdefault("TRACKIO_DIR", str(run_dir / "trackio"))
    trackio = _load("trackio")
    trackio.init(project="asyncgrpo", name=run_name, config=flatten(config, "."))
    return lambda step, scalars: trackio.log(scalars, step=step), trackio.finish


def _mlflow(run_dir: Path, run_name: str, config: Nested) -> Logger:
    mlflow = _load("mlflow")
    if "MLFLOW_TRACKING_URI" not in os.environ:
        (run_dir / "mlflow").mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(f"sqlite:///{(run_dir / 'mlflow' / 'mlflow.db').absolute()}")
    mlflow.set_experiment("asyncgrpo")
    mlflow.start_run(run_name=run_name)
    mlflow.log_params({key: str(value)[:500] for key, value in flatten(config, ".").items()})
    return lambda step, scalars: mlflow.log_metrics(scalars, step=step), mlflow.end_run


_KINDS = {"wandb": _wandb, "tensorboard": _tensorboard, "trackio": _trackio, "mlflow": _mlflow}


def check_loggers(names: Iterable[str]) -> None:
    """Raise ConfigError if a logger's package is not installed or cannot be imported."""
    for name in names:
        _load(name)


class Loggers:
    """All loggers of `run.loggers` behind one interface.

    One thread calls them, because a server that is down keeps MLflow for four minutes.
    """

    def __init__(self, names: Iterable[str], run_dir: Path, run_name: str, config: Nested) -> None:
        """Start each logger. Raises ConfigError for a package that is not installed."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loggers")
        start = self._thread.submit(lambda: {name: _KINDS[name](run_dir, run_name, config) for name in names})
        self._loggers = start.result()

    def log(self, step: int, values: Nested) -> None:
        """Send the finite numbers of `values` to each logger, nested keys joined with `/`.

        A logger that fails is dropped with a warning; the run continues.
        """
        scalars = scalars_of({key: value for key, value in values.items() if key not in ("step", "time")})
        self._thread.submit(self._log, step, scalars)

    def close(self) -> None:
        """Flush and close each logger, once what was logged is sent."""
        self._thread.submit(self._close)
        self._thread.shutdown()

    def _log(self, step: int, scalars: dict[str, float]) -> None:
        for name, (log_step, _) in list(self._loggers.items()):
            try:
                log_step(step, scalars)
            except Exception:
                log.warning("logger %s failed at step %d and is disabled", name, step, exc_info=True)
                del self._loggers[name]

    def _close(self) -> None:
        while self._loggers:
            name, (_, close) = self._loggers.popitem()
            try:
                close()
            except Exception:
                log.warning("logger %s failed to close", name, exc_info=True)
