"""The model of leases and lag, `docs/models/lease.pml`, looked at in every order of events."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "docs" / "models" / "lease.pml"

pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None, reason="the model checker `spin` needs spin and gcc"
)


def check(folder: Path, *defines: str) -> tuple[int, int]:
    """(errors, states) of the model under these `-D` settings, all its states if there is no error."""
    flags = [f"-D{define}" for define in defines]
    subprocess.run(["spin", "-a", *flags, str(MODEL)], cwd=folder, check=True, capture_output=True)
    compiler = ["gcc", "-w", "-O1", "-DSAFETY", "-DCOLLAPSE", *flags, "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True, capture_output=True)
    said = subprocess.run(["./pan", "-m100000", "-w24"], cwd=folder, capture_output=True, text=True).stdout
    assert "max search depth too small" not in said and "out of memory" not in said, said
    errors, states = re.search(r"errors: (\d+)", said), re.search(r"(\d+) states, stored", said)
    assert errors is not None and states is not None, said
    return int(errors[1]), int(states[1])


@pytest.mark.parametrize(
    ("defines", "at_least"),
    [
        (("L=0",), 200),
        ((), 20_000),
        (("COPIES=1",), 170_000),
        (("CHANGES",), 110_000),
        pytest.param(("EXPIRIES=1",), 800_000, marks=pytest.mark.slow),
        pytest.param(("CRASHES=1",), 1_500_000, marks=pytest.mark.slow),
    ],
)
def test_in_no_order_of_events_is_a_token_too_old_a_group_trained_twice_or_the_learner_stuck(
    tmp_path: Path, defines: tuple[str, ...], at_least: int
):
    errors, states = check(tmp_path, *defines)
    assert errors == 0 and states >= at_least


@pytest.mark.parametrize(
    "defines",
    [
        ("TAKE_WITHOUT_RULE",),
        ("GRANT_BEHIND",),
        ("COPIES=1", "KEEP_TWICE"),
        ("CRASHES=1", "SAME_NAME"),
        ("CHANGES", "SLOTS_ALONE"),
        ("CHANGES", "FORGET_TAKEN"),
        ("CHANGES", "L=2", "BOUND_OF_NOW"),
        ("CHANGES", "LESS_THAN_A_BATCH"),
    ],
)
def test_a_planted_mistake_is_found(tmp_path: Path, defines: tuple[str, ...]):
    errors, _ = check(tmp_path, *defines)
    assert errors == 1
