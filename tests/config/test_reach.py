"""What a run needs over the network is asked once, briefly, before anything starts; a cached model needs no network."""

import os
import socket

import pytest
from huggingface_hub import constants

from asyncgrpo.config import reach
from asyncgrpo.config.reach import check_service, find_model
from asyncgrpo.errors import ConfigError
from asyncgrpo.host import reserved_port
from tests.rewards.servers import Server


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A function that names the hub of this test. The cache is empty."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    reach._ask_hub.cache_clear()
    yield lambda url: monkeypatch.setattr(constants, "ENDPOINT", url)
    reach._ask_hub.cache_clear()


@pytest.fixture
def silent(monkeypatch):
    """The URL of a server that accepts connections and never replies."""
    monkeypatch.setattr(reach, "WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed():
    """A URL at which nothing listens."""
    with reserved_port() as reserved:
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_a_hub_that_is_not_there_or_never_replies_is_one_sentence(hub, request, kind):
    hub(url := request.getfixturevalue(kind))
    with pytest.raises(ConfigError, match=rf"^reward\.model\.path: org/model is neither .* {url} cannot be reached"):
        find_model("org/model", "reward.model.path")


def test_a_cached_model_is_used_without_a_hub_and_libraries_ask_no_more(hub, closed, tmp_path, caplog):
    hub(closed)
    snapshot = tmp_path / "cache" / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert find_model("org/model") == snapshot
    assert constants.is_offline_mode() and os.environ["HF_HUB_OFFLINE"] == "1"
    assert "so org/model is used as the local cache has it" in caplog.text


@pytest.mark.parametrize(("status", "is_there"), [(200, True), (404, True), (503, False)])
def test_a_hub_that_replies_is_asked_once_and_stays_on(hub, status, is_there):
    with Server(lambda _: (status, "")) as server:
        hub(server.url)
        if is_there:
            assert find_model("org/model") is None and find_model("org/other") is None
            assert not constants.is_offline_mode()
        else:
            with pytest.raises(ConfigError, match="HTTP 503"):
                find_model("org/model")
    assert len(server.paths) == 1


def test_a_service_is_there_if_something_listens(silent, closed):
    check_service(silent, "reward.judge.url")
    with pytest.raises(ConfigError, match=rf"reward\.judge\.url: {closed} cannot be reached \(Connection refused\)"):
        check_service(closed, "reward.judge.url")
    with pytest.raises(ConfigError, match=r"reward\.judge\.url: http://nobody\.invalid cannot be reached \(.+\)"):
        check_service("http://nobody.invalid", "reward.judge.url")
    with pytest.raises(ConfigError, match="cannot be reached"):
        check_service("http://127.0.0.1:99999", "reward.judge.url")
