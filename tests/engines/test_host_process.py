"""What a guest does to the whole process is undone, also when it fails."""

import asyncio
import logging
import multiprocessing
import os
import warnings

import pytest

from asyncgrpo.engines.sglang import engine


class OtherPolicy(asyncio.DefaultEventLoopPolicy):
    pass


def state() -> list[object]:
    root = logging.getLogger()
    return [
        asyncio.get_event_loop_policy(),
        multiprocessing.get_start_method(allow_none=True),
        os.environ.get("PYTHONWARNINGS"),
        root.level,
        *root.handlers,
    ]


@pytest.mark.parametrize("python_warnings", [None, "error"])
def test_what_a_guest_changes_is_put_back_even_if_it_fails(
    monkeypatch: pytest.MonkeyPatch, python_warnings: str | None
) -> None:
    if python_warnings:
        monkeypatch.setenv("PYTHONWARNINGS", python_warnings)
    else:
        monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    handler, closed = logging.NullHandler(), list[bool]()
    monkeypatch.setattr(handler, "close", lambda: closed.append(True))
    monkeypatch.setattr(logging.getLogger(), "handlers", [*logging.getLogger().handlers, handler])
    before = state()
    with pytest.raises(OSError, match="broke"), engine.kept():
        asyncio.set_event_loop_policy(OtherPolicy())
        multiprocessing.set_start_method("forkserver", force=True)
        logging.basicConfig(level="CRITICAL", force=True)
        warnings.warn("nobody sees this", stacklevel=1)
        raise OSError("the guest broke")
    assert state() == before and not closed
