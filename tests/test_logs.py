"""Where log records go, and what a line looks like."""

import errno
import io
import logging
import re

import pytest

from asyncgrpo import logs


def ours() -> list[logging.Handler]:
    return [handler for handler in logging.getLogger().handlers if handler.name == logs._OURS]


@pytest.fixture(autouse=True)
def leave_no_handlers():
    before = {name: logging.getLogger(name).level for name in ("root", "asyncgrpo")}
    yield
    for handler in ours():
        logging.getLogger().removeHandler(handler)
        handler.close()
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def test_a_line_has_time_level_role_and_rank_and_only_events_start_a_line(tmp_path):
    path = logs.setup("learner", 0, tmp_path)
    logging.getLogger("asyncgrpo.learner").info("step %d done", 17)
    assert path == tmp_path / "logs" / "learner-0.log"
    line = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO learner-0 asyncgrpo\.learner: step 17 done\n"
    assert re.fullmatch(line, path.read_text())
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("asyncgrpo.buffer").exception("it broke")
    _, first, *rest = path.read_text().splitlines()
    assert first.endswith("it broke") and rest and all(line.startswith("    ") for line in rest)


def test_warnings_reach_stderr_and_news_does_not(tmp_path, capsys):
    path = logs.setup("generator", 3, tmp_path)
    for name in ("asyncgrpo.x", "elsewhere"):
        logging.getLogger(name).info("news")
        logging.getLogger(name).warning("trouble")
    said = capsys.readouterr().err
    assert "trouble" in said and "generator-3" in said and "news" not in said
    assert path.read_text().count("trouble") == 2
    assert path.read_text().count("news") == 1, "other packages are heard from warning up"


def test_a_second_setup_replaces_the_first_and_a_restarted_process_adds_to_its_log(tmp_path):
    first = logs.setup("learner", 0, tmp_path)
    second = logs.setup("learner", 1, tmp_path)
    logging.getLogger("asyncgrpo").info("before")
    assert first.read_text() == ""
    logs.setup("learner", 1, tmp_path)
    logging.getLogger("asyncgrpo").info("after")
    assert [line.rsplit(" ", 1)[1] for line in second.read_text().splitlines()] == ["before", "after"]


def test_a_log_does_not_grow_without_end_and_its_newest_lines_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LARGEST_BYTES", 2_000)
    for start in range(2):  # a restarted process counts what is there
        path = logs.setup("learner", 0, tmp_path)
        for number in range(500):
            logging.getLogger("asyncgrpo.x").info("line %d of start %d", number, start)
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["learner-0.log", "learner-0.log.1", "learner-0.log.2"]
    assert all(0 < file.stat().st_size <= 2_000 for file in files)
    newest = files[1].read_text() + files[0].read_text()
    assert newest.endswith("line 499 of start 1\n") and newest.count("\n") > 20


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.EFBIG, "File too large")


def test_a_full_disk_is_said_once_without_a_traceback_and_ends_no_process(tmp_path, capsys, monkeypatch):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "driver.log").symlink_to("/dev/full")
    logs.setup("driver", None, tmp_path)
    for number in range(3):
        logging.getLogger("asyncgrpo.x").warning("trouble %d", number)
    said = capsys.readouterr().err.splitlines()
    (complaint,) = [line for line in said if "trouble" not in line]
    assert complaint == f"{tmp_path}/logs/driver.log cannot be written: No space left on device"
    assert len(said) == 4, "and stderr still has every warning"
    monkeypatch.setattr("sys.stderr", Full())  # Ray's is a file on the same disk
    logs.setup("driver", None, tmp_path)
    logging.getLogger("asyncgrpo.x").warning("trouble")


def test_a_mistake_in_a_call_of_ours_keeps_its_traceback(tmp_path, capsys):
    logs.setup("learner", 0, tmp_path)
    record = logging.LogRecord("asyncgrpo.x", logging.INFO, "x.py", 1, "step %d", ("one",), None)
    for handler in ours():
        handler.handle(record)
    assert "TypeError" in capsys.readouterr().err


def test_what_came_from_outside_stays_text(tmp_path):
    path = logs.setup("buffer", None, tmp_path)
    identity = b"\x00\x1b[2J\xff\x7f".decode(errors="replace")
    logging.getLogger("asyncgrpo.x").info("refused %s of %s\rgone", identity, "file-\udcff\u202e")
    line = path.read_text(encoding="utf-8")
    assert "refused \\x00\\x1b[2J\ufffd\\x7f of file-\\udcff\\u202e\\x0dgone" in line
    assert logs.visible("plain\ttext 漢字 é\n") == "plain\ttext 漢字 é\n"
