"""What SGLang cannot do here is said before an engine starts, with the way out. SGLang is not imported for it:
`test_light_processes.py`."""

import importlib.util

import pytest

from asyncgrpo.config.schema import GeneratorConfig
from asyncgrpo.engines import build
from asyncgrpo.engines.build import check_extra, why_sglang_cannot_run
from asyncgrpo.errors import ConfigError


@pytest.mark.parametrize(
    ("missing", "has_gpu", "way_out"),
    [
        ("", True, None),
        ("", False, None),
        ("sglang", True, "pip install"),
        ("sglang", False, "./setup.sh"),
        ("sgl_kernel", True, None),  # a stand-in for the kernels is needed without a GPU only
        ("sgl_kernel", False, "packaging/cpu-shims"),
    ],
)
def test_what_is_missing_is_named_with_the_way_out(monkeypatch, missing, has_gpu, way_out) -> None:
    present = importlib.util.find_spec("math")
    monkeypatch.setattr(build, "find_spec", lambda name: None if name == missing else present)
    monkeypatch.setattr(build, "has_gpu", lambda: has_gpu)
    why = why_sglang_cannot_run()
    assert (why is None) == (way_out is None)
    assert why is None or (way_out in why and missing in why and "\n" not in why)


@pytest.mark.parametrize(
    ("key", "hint"),
    [("chunked_prefil_size", "did you mean `chunked_prefill_size`?"), ("xyzzy", "all arguments: ")],
)
def test_an_argument_that_sglang_does_not_have_is_refused(key: str, hint: str) -> None:
    pytest.importorskip("sglang")
    check_extra(GeneratorConfig(extra={"chunked_prefill_size": 512, "cuda_graph_max_bs_decode": 16}))
    check_extra(GeneratorConfig(engine="fake", extra={"seconds_per_token": 0.1}))
    with pytest.raises(ConfigError, match=f"generators.extra.{key}: ") as caught:
        check_extra(GeneratorConfig(extra={key: 1}))
    assert hint in str(caught.value) and "\n" not in str(caught.value)
