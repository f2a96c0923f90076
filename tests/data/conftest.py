"""The demo's model and tokenizer, made once for all tests of this folder."""

import json
from pathlib import Path

import pytest

from asyncgrpo.data.demo import make_demo_model
from asyncgrpo.data.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo-model")
    make_demo_model(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def tokenizer(demo_model):
    return load_tokenizer(str(demo_model))


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
