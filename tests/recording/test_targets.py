"""The file that tells Prometheus where a run's processes are."""

import json

from asyncgrpo.metrics import targets_path, write_targets


def test_a_target_carries_run_role_and_rank_and_a_name_that_no_port_is_in(tmp_path):
    targets = {"generator-1": ("127.0.0.1", 9001), "buffer": ("::1", 9002)}
    path = write_targets(tmp_path / "demo", targets)
    assert path == tmp_path / "prometheus" / "demo.json"
    assert json.loads(path.read_text()) == [
        {"targets": ["[::1]:9002"], "labels": {"run": "demo", "role": "buffer", "rank": "0", "instance": "buffer-0"}},
        {
            "targets": ["127.0.0.1:9001"],
            "labels": {"run": "demo", "role": "generator", "rank": "1", "instance": "generator-1"},
        },
    ]


def test_writing_again_replaces_and_leaves_nothing_else(tmp_path):
    write_targets(tmp_path / "demo", {"learner-0": ("127.0.0.1", 1)})
    path = write_targets(tmp_path / "demo", {"learner-0": ("127.0.0.1", 2)})
    assert json.loads(path.read_text())[0]["targets"] == ["127.0.0.1:2"]
    assert list(path.parent.iterdir()) == [path]


def test_a_run_that_ended_has_no_targets(tmp_path):
    write_targets(tmp_path / "demo", {"learner-0": ("127.0.0.1", 1)})
    write_targets(tmp_path / "demo", {})
    write_targets(tmp_path / "demo", {})
    assert not targets_path(tmp_path / "demo").exists()


def test_runs_do_not_touch_each_others_targets(tmp_path):
    first = write_targets(tmp_path / "a", {"buffer": ("127.0.0.1", 1)})
    write_targets(tmp_path / "b", {"buffer": ("127.0.0.1", 2)})
    write_targets(tmp_path / "b", {})
    assert first.exists()
