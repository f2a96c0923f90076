"""What the driver makes before it starts any process: keys, a token where it is needed, its own metrics."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncgrpo import metrics
from asyncgrpo.cluster import run
from asyncgrpo.cluster.folder import RunFolder
from asyncgrpo.cluster.wiring import Setup
from asyncgrpo.config.schema import ClusterConfig, Config, DataConfig, ModelConfig
from asyncgrpo.wire.sockets import Server


class NoFurther(Exception):
    pass


def setup_on(bind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    told = []

    def core(setup: Setup, *_: object) -> None:
        told.append(setup)
        raise NoFurther

    monkeypatch.setattr(run, "Core", core)
    config = Config(model=ModelConfig(path="m"), data=DataConfig(train="t"), cluster=ClusterConfig(bind=bind))
    with pytest.raises(NoFurther):
        run.Run(config, RunFolder(folder), "")._start_services(SimpleNamespace(), lambda text: None)  # type: ignore[arg-type]
    return told[0]


@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0"])
def test_every_run_has_keys_and_metrics_leave_loopback_with_a_token_only(bind, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "host_of", lambda config: "127.0.0.1")
    setup, again = (setup_on(bind, tmp_path, monkeypatch) for _ in range(2))
    assert setup.keys != again.keys, "each start makes its own"
    assert (setup.metrics_token is None) == (bind == "127.0.0.1")
    Server(bind, setup.keys).close()


def test_the_driver_says_how_much_room_the_disk_of_the_run_has(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=123_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage if path == tmp_path else None)
    setup_on("127.0.0.1", tmp_path, monkeypatch)
    assert "asyncgrpo_disk_free_bytes 1.23e+08\n" in metrics.exposition("driver")
    usage.free = 7
    assert "asyncgrpo_disk_free_bytes 7.0\n" in metrics.exposition("driver"), "as it is at each scrape"
