"""SGLang's processes compile nothing: routing on the CPU would take each engine up to half a minute, for tiny models."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    import torch._dynamo  # noqa: F401  # this process has read the switch by then

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield
