"""Tells Prometheus where the processes of a run export their metrics, as a `file_sd` file.

The file is `<parent of the run folder>/prometheus/<run>.json`, for example `runs/prometheus/demo.json`: Prometheus
allows a wildcard in the last part of a path only, so one watched folder has to serve every run. An entry lives as long
as the run does; `write_targets(run_dir, {})` removes it, or TargetDown would fire for every run that ended well. That of a
run whose driver was killed is removed by the next run beside it.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path


def targets_path(run_dir: Path) -> Path:
    """Where the targets of this run are written."""
    run_dir = Path(run_dir).absolute()
    return run_dir.parent / "prometheus" / f"{run_dir.name}.json"


def write_targets(run_dir: Path, targets: Mapping[str, tuple[str, int]]) -> Path:
    """Replace the run's targets in one move.

    Args:
        run_dir: run folder; its name becomes the label `run`.
        targets: `role` or `role-rank` to (host, port); role and rank become labels. Empty: the run has ended.
    Returns:
        The file, which does not exist if there are no targets.
    """
    path = targets_path(run_dir)
    if not targets:
        path.unlink(missing_ok=True)
        return path
    entries = []
    for who, (host, port) in sorted(targets.items()):
        role, _, rank = who.partition("-")
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        entries.append({"targets": [address], "labels": {"run": path.stem, "role": role, "rank": rank or "0"}})
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def remove_targets_beside(run_dir: Path, is_over: Callable[[Path], bool]) -> None:
    """Remove the targets of other runs in the same parent folder.

    Args:
        is_over: of a run folder, whether that is certain.
    """
    own = targets_path(run_dir)
    for path in own.parent.glob("*.json"):
        if path != own and is_over(own.parent.parent / path.stem):
            path.unlink(missing_ok=True)
