"""docs/algorithms.md and docs/formulas.md agree with the code and the presets."""

import inspect
import math
import re
import typing
from pathlib import Path

import pytest

from asyncgrpo.algorithms import diagnostics
from asyncgrpo.config.load import algorithm_file, algorithm_names, load_config
from asyncgrpo.config.rules import loss_arguments
from asyncgrpo.config.schema import AlgorithmConfig, CorrectionConfig

DOCS = Path(__file__).parent.parent / "docs"
PAGE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("algorithms.md", "formulas.md"))


def rows(heading: str) -> dict[str, list[str]]:
    section = PAGE.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def choices(struct: type, field: str) -> tuple[str, ...]:
    return typing.get_args(typing.get_type_hints(struct)[field])


def test_every_choice_of_a_key_and_every_kind_of_correction_is_on_the_page():
    for field in ("advantage", "loss", "anchor", "aggregation", "kl_kind", "truncated"):
        for choice in choices(AlgorithmConfig, field):
            assert f"`{choice}`" in PAGE or f"={choice}`" in PAGE, f"{field}: {choice}"
    table = "\n".join(rows("## Corrections"))
    for field in ("kind", "level", "action"):
        for choice in choices(CorrectionConfig, field):
            assert choice in (*table.split(), "importance") or f"{field}: {choice}" in table, f"{field}: {choice}"
    assert set(rows("## The presets")) == {*algorithm_names(), "--algorithm"}, "each preset, and the head of the table"


@pytest.mark.parametrize("loss", choices(AlgorithmConfig, "loss"))
def test_the_arguments_of_a_loss_are_its_own_with_its_defaults(loss):
    cell = rows("## Surrogates")[loss][1]
    assert set(re.findall(r"`(\w+)`", cell)) == set(loss_arguments(loss))
    numbers = {float(x) for x in re.findall(r"\[([\d.e-]+)\]", cell)}
    defaults = {p.default for p in loss_arguments(loss).values() if isinstance(p.default, float)}
    assert numbers == defaults


def test_every_diagnostic_is_on_the_page():
    reports = (diagnostics.ratio_report, diagnostics.lag_report, diagnostics.update_report)
    reported = [
        name for report in reports for name in re.findall(r'^        "(\w+)":', inspect.getsource(report), re.M)
    ]
    assert len(reported) == 15
    page = (DOCS / "metrics-file.md").read_text(encoding="utf-8").partition("## Diagnostics\n")[2]
    assert [name for name in reported if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", algorithm_names())
def test_the_row_of_a_preset_is_its_file(name):
    papers, advantage, loss, anchor, corrections, rest, _ = rows("## The presets")[name]
    algorithm = load_config("quickstart", algorithm=name).algorithm
    file = algorithm_file(name).read_text()
    assert all(paper in file for paper in re.findall(r"\d{4}\.\d{5}", papers))
    assert loss.split()[0].strip(",") == algorithm.loss
    numbers = {float(x) for x in re.findall(r"[\d.]+(?:e-\d)?", loss.partition(" ")[2])}
    assert numbers <= set(algorithm.loss_args.values())
    assert advantage in ("", algorithm.advantage)
    assert anchor in ("", algorithm.anchor)
    bounds = [(c.low_ratio, c.high_ratio, c.max_nats, c.max_mean_square) for c in algorithm.corrections]
    bounds = [bound for each in bounds for bound in each if bound is not None]
    assert [float(x) for x in re.findall(r"(?<!m)[\d.]+", corrections.replace("m2po", ""))] == bounds
    assert name == "pairwise" or rest.split(",")[0] == algorithm.aggregation


def test_the_notebook_runs_as_printed(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict = {}
    exec(code, found)
    ratio = math.exp(0.1)
    assert found["policy"].grad.tolist() == pytest.approx([x * ratio for x in [-0.1414] * 3 + [0.1414] * 2], abs=1e-3)
    assert "'ratio_mean': 1.105" in capsys.readouterr().out
