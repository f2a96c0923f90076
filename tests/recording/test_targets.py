"""The file that tells Prometheus where a run's processes are."""

import json

from asyncgrpo.metrics import targets_path, write_targets


def test_the_targets_of_a_run(tmp_path):
    other = write_targets(tmp_path / "other", {"learner-0": ("127.0.0.1", 1)})
    write_targets(tmp_path / "demo", {"learner-0": ("127.0.0.1", 1)})
    path = write_targets(tmp_path / "demo", {"generator-1": ("127.0.0.1", 9001), "buffer": ("::1", 9002)})
    assert (
        sorted(path.parent.iterdir())
        == [path, other]
        == [tmp_path / "prometheus" / f"{n}.json" for n in ("demo", "other")]
    )
    run, generator = {"run": "demo"}, {"role": "generator", "rank": "1", "instance": "generator-1"}
    assert json.loads(path.read_text()) == [
        {"targets": ["[::1]:9002"], "labels": run | {"role": "buffer", "rank": "0", "instance": "buffer-0"}},
        {"targets": ["127.0.0.1:9001"], "labels": run | generator},
    ]
    for _ in range(2):  # a run that ended has none
        write_targets(tmp_path / "demo", {})
        assert not targets_path(tmp_path / "demo").exists() and other.exists()
