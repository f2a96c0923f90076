"""Every extra of the package can be installed, as `packaging/check_extras.py` finds out where an index is reachable."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOLVED = "echo torch==2.14.1; echo numpy==2.3.5"


def check(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "packaging" / "check_extras.py")]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.fixture
def with_uv(tmp_path):
    """Runs the script with a program `uv` of these lines of shell."""

    def run(lines: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "uv").write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "uv").chmod(0o755)
        return check(PATH=f"{tmp_path}:{os.environ['PATH']}")

    return run


def test_one_torch_is_well_several_are_an_error_and_so_is_an_extra_without_a_solution(with_uv):
    result = with_uv(SOLVED)
    assert (result.returncode, result.stderr) == (0, "")
    result = with_uv(f'case "$*" in *"3.12"*"--extra wandb"*) echo torch==2.15.0;; *) {SOLVED};; esac')
    assert result.returncode == 1
    assert "there are several: 2.14.1 on Python 3.11 with [sglang]" in result.stderr
    result = with_uv(f'case "$*" in *"--extra lora"*) echo "error: no solution" >&2; exit 1;; *) {SOLVED};; esac')
    assert result.returncode == 1
    assert "error: Python 3.12, [lora]: error: no solution" in result.stderr and "[docs]" not in result.stderr
    result = with_uv('echo "error: Failed to fetch" >&2; exit 2')
    assert (result.returncode, result.stdout) == (3, "no package index is reachable: error: Failed to fetch\n")


@pytest.mark.slow
def test_every_extra_resolves():
    result = check()
    if result.returncode == 3:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stderr
    print(result.stdout)
