from pathlib import Path

import pytest

from tests.models import make_tiny_qwen3


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3. No test writes into its folder."""
    return make_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))
