"""What SGLang cannot do here is said before an engine starts, with the way out, and without importing SGLang."""

import importlib.util
import subprocess
import sys

import pytest

from asyncgrpo.config.schema import GeneratorConfig
from asyncgrpo.engines import build
from asyncgrpo.engines.build import check_extra, why_sglang_cannot_run
from asyncgrpo.errors import ConfigError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretend that these packages are missing, on a machine with or without a GPU."""

    def pretend(*, missing: tuple[str, ...] = (), has_gpu: bool = False) -> None:
        present = importlib.util.find_spec("math")
        monkeypatch.setattr(build, "find_spec", lambda name: None if name in missing else present)
        monkeypatch.setattr(build, "has_gpu", lambda: has_gpu)

    return pretend


@pytest.mark.parametrize("has_gpu", [True, False])
def test_nothing_is_said_where_everything_is_there(machine, has_gpu: bool) -> None:
    machine(has_gpu=has_gpu)
    assert why_sglang_cannot_run() is None


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_missing_sglang_is_named_with_the_command(machine, has_gpu: bool) -> None:
    machine(missing=("sglang",), has_gpu=has_gpu)
    why = why_sglang_cannot_run()
    assert why and "sglang" in why and ("pip install" in why or "./setup.sh" in why) and "\n" not in why


def test_the_stand_in_for_the_kernels_is_needed_without_a_gpu_only(machine) -> None:
    machine(missing=("sgl_kernel",), has_gpu=False)
    why = why_sglang_cannot_run()
    assert why and "packaging/cpu-shims" in why
    machine(missing=("sgl_kernel",), has_gpu=True)
    assert why_sglang_cannot_run() is None


def test_an_old_python_is_named(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setattr(build, "OLDEST_PYTHON", (99, 0))
    why = why_sglang_cannot_run()
    assert why and "Python" in why


@pytest.mark.parametrize(
    ("key", "hint"),
    [("chunked_prefil_size", "did you mean `chunked_prefill_size`?"), ("xyzzy", "all arguments: ")],
)
def test_an_argument_that_sglang_does_not_have_is_refused(key: str, hint: str) -> None:
    pytest.importorskip("sglang")
    check_extra(GeneratorConfig(extra={"chunked_prefill_size": 512, "cuda_graph_max_bs_decode": 16}))
    with pytest.raises(ConfigError, match=f"generators.extra.{key}: ") as caught:
        check_extra(GeneratorConfig(extra={key: 1}))
    assert hint in str(caught.value) and "\n" not in str(caught.value)


def test_another_engine_has_arguments_of_its_own() -> None:
    check_extra(GeneratorConfig(engine="fake", extra={"seconds_per_token": 0.1}))


def test_asking_does_not_import_sglang() -> None:
    ask = (
        "import sys; from asyncgrpo.engines.build import *; from asyncgrpo.config.schema import GeneratorConfig; "
        "why_sglang_cannot_run() or check_extra(GeneratorConfig(extra={'page_size': 1})); print('sglang' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout == "False\n"
