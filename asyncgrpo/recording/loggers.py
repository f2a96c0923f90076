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
from pathlib import Path
from typing import Any, Protocol

from asyncgrpo.errors import ConfigError

log = logging.getLogger(__name__)

Nested = Mapping[str, Any]


class _Logger(Protocol):
    def log(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def _load(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken installation may raise anything
        raise ConfigError(
            f"run.loggers names {extra!r}, which cannot be imported ({error}); pip install 'asyncgrpo[{extra}]'"
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


class _Wandb:
    def __init__(self, run_dir: Path, run_name: str, config: Nested) -> None:
        wandb = _load("wandb", "wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        self._run = wandb.init(project="asyncgrpo", name=run_name, dir=str(run_dir), config=dict(config), mode=mode)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class _Tensorboard:
    def __init__(self, run_dir: Path, run_name: str, config: Nested) -> None:
        _load("tensorboard", "tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(run_dir / "tensorboard"))
        rows = "\n".join(f"    {key}: {value}" for key, value in flatten(config, ".").items())
        self._writer.add_text("config", f"{run_name}\n\n{rows}", 0)

    def log(self, step: int, scalars: dict[str, float]) -> None:
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, run_dir: Path, run_name: str, config: Nested) -> None:
        # Trackio reads TRACKIO_DIR when it is imported.
        os.environ.setdefault("TRACKIO_DIR", str(run_dir / "trackio"))
        self._trackio = _load("trackio", "trackio")
        self._trackio.init(project="asyncgrpo", name=run_name, config=flatten(config, "."))

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._trackio.log(scalars, step=step)

    def close(self) -> None:
        self._trackio.finish()


class _Mlflow:
    def __init__(self, run_dir: Path, run_name: str, config: Nested) -> None:
        self._mlflow = _load("mlflow", "mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            (run_dir / "mlflow").mkdir(parents=True, exist_ok=True)
            self._mlflow.set_tracking_uri(f"sqlite:///{(run_dir / 'mlflow' / 'mlflow.db').absolute()}")
        self._mlflow.set_experiment("asyncgrpo")
        self._mlflow.start_run(run_name=run_name)
        self._mlflow.log_params({key: str(value)[:500] for key, value in flatten(config, ".").items()})

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._mlflow.log_metrics(scalars, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_KINDS: dict[str, Callable[[Path, str, Nested], _Logger]] = {
    "wandb": _Wandb,
    "tensorboard": _Tensorboard,
    "trackio": _Trackio,
    "mlflow": _Mlflow,
}


def check_loggers(names: Iterable[str]) -> None:
    """Raise ConfigError if a logger's package is not installed or cannot be imported."""
    for name in names:
        _load(name, name)


class Loggers:
    """All loggers of `run.loggers` behind one interface."""

    def __init__(self, names: Iterable[str], run_dir: Path, run_name: str, config: Nested) -> None:
        """Start each logger. Raises ConfigError for an unknown name or a package that is not installed."""
        self._loggers: dict[str, _Logger] = {}
        for name in names:
            if name not in _KINDS:
                raise ConfigError(f"run.loggers names {name!r}; supported are {', '.join(_KINDS)}")
            self._loggers[name] = _KINDS[name](Path(run_dir), run_name, config)

    def log(self, step: int, values: Nested) -> None:
        """Send the finite numbers of `values` to each logger, nested keys joined with `/`.

        A logger that fails is dropped with a warning; the run continues.
        """
        scalars = scalars_of({key: value for key, value in values.items() if key not in ("step", "time")})
        for name, logger in list(self._loggers.items()):
            try:
                logger.log(step, scalars)
            except Exception:
                log.warning("logger %s failed at step %d and is disabled", name, step, exc_info=True)
                del self._loggers[name]

    def close(self) -> None:
        """Flush and close each logger. A second call does nothing."""
        while self._loggers:
            name, logger = self._loggers.popitem()
            try:
                logger.close()
            except Exception:
                log.warning("logger %s failed to close", name, exc_info=True)
