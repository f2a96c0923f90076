"""Outside loggers get the numbers, need no network, and cannot stop a run."""

import math
import sys
import threading
from unittest.mock import MagicMock, call

import pytest

from asyncgrpo.errors import ConfigError
from asyncgrpo.recording.loggers import Loggers

STEP = {"event": "step", "time": 1.0, "step": 17, "loss": 0.5, "kl_reference": None, "entropy": math.nan}
STEP |= {"seconds": {"publish": 2, "all": [1]}, "lags": {"0": 3}, "version": "1.17"}
SCALARS = {"loss": 0.5, "seconds/publish": 2.0, "lags/0": 3.0}


@pytest.fixture
def fake(monkeypatch):
    def install(name: str) -> MagicMock:
        module = MagicMock()
        module.init.return_value = module
        monkeypatch.setitem(sys.modules, name, module)
        return module

    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", "unused")
    return install


def test_tensorboard_files_can_be_read_back(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = Loggers(["tensorboard"], tmp_path, "demo", {"model": {"path": "tiny"}})
    loggers.log(17, STEP)
    loggers.log(18, {**STEP, "loss": 0.25})
    loggers.close()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in read.Scalars("loss")] == [(17, 0.5), (18, 0.25)]
    assert read.Scalars("seconds/publish")[0].value == 2.0


def test_each_logger_gets_the_run_its_configuration_and_the_numbers_of_each_step(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb, trackio, mlflow = (fake(name) for name in ("wandb", "trackio", "mlflow"))
    loggers = Loggers(["wandb", "trackio", "mlflow"], tmp_path, "demo", {"model": {"path": "x" * 900}})
    loggers.log(17, STEP)
    loggers.close()
    init = wandb.init.call_args.kwargs
    assert (init["mode"], init["name"], init["dir"]) == ("offline", "demo", str(tmp_path)), "there is no key"
    assert init["config"] == {"model": {"path": "x" * 900}}
    assert trackio.init.call_args == call(project="asyncgrpo", name="demo", config={"model.path": "x" * 900})
    assert mlflow.set_tracking_uri.call_args == call(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    assert len(mlflow.log_params.call_args.args[0]["model.path"]) == 500
    for log in (wandb.log, trackio.log, mlflow.log_metrics):
        assert log.call_args_list == [call(SCALARS, step=17)]
    assert wandb.finish.called and trackio.finish.called and mlflow.end_run.called
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.setenv(variable, "disabled")
        Loggers(["wandb"], tmp_path, "demo", {})
    modes = [init.kwargs["mode"] for init in wandb.init.call_args_list]
    assert modes == ["offline", "online", "disabled"], "as the environment says"


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"run\.loggers names 'trackio'.*pip install 'asyncgrpo\[trackio\]'"):
        Loggers(["trackio"], tmp_path, "demo", {})


def test_a_logger_that_fails_is_switched_off_and_the_others_go_on(fake, tmp_path, caplog):
    wandb, trackio = fake("wandb"), fake("trackio")
    loggers = Loggers(["wandb", "trackio"], tmp_path, "demo", {})
    wandb.log.side_effect = ZeroDivisionError
    loggers.log(1, STEP)
    loggers.log(2, STEP)
    loggers.close()
    assert trackio.log.call_count == 2
    assert caplog.text.count("logger wandb failed") == 1


def test_a_server_that_is_down_keeps_nothing_waiting_but_the_end(fake, tmp_path):
    mlflow, answers = fake("mlflow"), threading.Event()
    loggers = Loggers(["mlflow"], tmp_path, "demo", {})
    mlflow.log_metrics.side_effect = lambda *_, **fields: answers.wait(60)
    for step in range(3):
        loggers.log(step, STEP)
    answers.set()
    loggers.close()
    assert [one.kwargs["step"] for one in mlflow.log_metrics.call_args_list] == [0, 1, 2]
    assert mlflow.end_run.called
