"""The GPU day without a card: every part at tiny shapes, and what becomes of parts that fail, hang or are cut off."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from threading import Timer

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from asyncgrpo.config.load import load_config
from asyncgrpo.config.memory import Card, engine_gpu, learner_rank, learner_share
from asyncgrpo.config.model_size import size_of
from asyncgrpo.config.placement import refuse
from benchmarks import gpu_day, gpu_demo, gpu_tables, gpu_wheels
from benchmarks.gpu_day import PARTS, Part, State
from benchmarks.shapes import SHAPES, qwen3
from tests.runs import wait_until
from tests.test_project import DEPENDENCIES, EXTRAS


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Parts that run these sources. One that `hangs` is given half a second, the others as long as a start may take."""

    def script(**sources: str) -> None:
        parts = []
        for name, source in sources.items():
            (tmp_path / f"scripted_{name}.py").write_text(source)
            parts.append(Part(name, f"scripted_{name}", (), (), 0.0, 0.5 if name == "hangs" else 30.0))
        monkeypatch.setattr(gpu_day, "PARTS", parts)

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return script


def run(out: Path, *arguments: str) -> dict[str, dict]:
    """What the last record of each part says after a run."""
    gpu_day.main(["run", "--device", "cpu", "--tiny", "--out", str(out), *arguments])
    return {part: records[-1] for part, records in State(out).read().items()}


def begun(out: Path, part: str) -> int:
    """How often a part was begun."""
    records = map(json.loads, State(out).path.read_text().splitlines())
    return sum(record["kind"] == "begin" and record["part"] == part for record in records)


GOOD = "import json; print(json.dumps({'what': 'x', 'value': 1})); print('well')"
BAD = "print('{\"what\": \"y\"}'); raise ValueError('no good')"


def test_parts_that_fail_or_hang_hold_up_no_other_and_what_is_over_is_not_run_again_unless_it_is_asked_for(
    tmp_path, scripted
):
    sleeper = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(100)'])"
    scripted(bad=BAD, hangs=sleeper, good=GOOD, skipping="raise SystemExit('skipped: nothing here')")
    last = run(tmp_path)
    outcomes = {part: record["outcome"] for part, record in last.items()}
    assert outcomes == {"bad": "failed", "hangs": "stopped", "good": "done", "skipping": "skipped"}
    assert (last["bad"]["said"], last["good"]["said"]) == ("ValueError: no good", "well")
    assert [r["line"] for r in State(tmp_path).read()["bad"] if r["kind"] == "line"] == [{"what": "y"}]
    text = gpu_tables.tables(State(tmp_path).read())
    assert re.search(r"^\| bad \| failed \| [\d.]+ \| ValueError: no good \|$", text, re.MULTILINE)
    run(tmp_path)
    assert [begun(tmp_path, part) for part in outcomes] == [1, 1, 1, 2], "what was skipped may be possible now"
    run(tmp_path, "--again", "good")
    assert [begun(tmp_path, part) for part in outcomes] == [1, 1, 2, 2]
    assert len(State(tmp_path).read()["good"]) == 3, "the lines of the last run alone"


def test_a_part_that_the_call_cuts_off_begins_again(tmp_path, scripted, monkeypatch):
    class AfterItsLine(Timer):
        """The time of the call is over once the part has said its line."""

        def run(self) -> None:
            wait_until(lambda: State(tmp_path).read()["slow"][-1]["kind"] == "line", "a line", 60.0)
            self.function()

    scripted(slow="import time; print('{\"what\": 1}', flush=True); time.sleep(100)")
    with monkeypatch.context() as patch:
        patch.setattr(gpu_day, "Timer", AfterItsLine)
        cut_off = run(tmp_path, "--seconds", "3")
    assert cut_off["slow"]["kind"] == "line"
    scripted(slow=GOOD)
    assert run(tmp_path)["slow"]["outcome"] == "done"
    assert begun(tmp_path, "slow") == 2


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    state = State(tmp_path)
    state.write("facts", "begin", date="2026-01-01", commit=None)
    with state.path.open("a") as file:
        file.write('{"part": "facts", "kin')
    assert [record["kind"] for record in state.read()["facts"]] == ["begin"]
    assert not state.is_over("facts")


def test_tables_replace_those_of_the_page(tmp_path):
    page, before = tmp_path / "page.md", (gpu_day.ROOT / "docs" / "gpu.md").read_text()
    page.write_text(before)
    for text in ("first", "second"):
        gpu_tables.replace_tables(page, text)
    above, below = before.split(gpu_tables.BEGIN)[0], before.split(gpu_tables.END)[1]
    assert page.read_text() == f"{above}{gpu_tables.BEGIN}\n\nsecond\n{gpu_tables.END}{below}"
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="lacks the lines"):
        gpu_tables.replace_tables(page, "third")


def test_what_is_carried_and_what_is_there_is_all_that_the_package_needs():
    carried = {canonicalize_name(name) for name in gpu_wheels.NAMES}
    needed = {canonicalize_name(need.name) for need in [*DEPENDENCIES, *EXTRAS["lora"]]}
    assert needed - carried - gpu_wheels.THERE == set()
    assert carried & gpu_wheels.THERE == set()
    pinned = [Requirement(pin) for pin in gpu_wheels.pins(gpu_wheels.NAMES)]
    assert [canonicalize_name(pin.name) for pin in pinned] == [canonicalize_name(name) for name in gpu_wheels.NAMES]


def test_a_wheel_without_a_folder_installs(tmp_path):
    wheel = tmp_path / "thing-1-py3-none-any.whl"
    files = {
        "thing/__init__.py": "kept = True\n",
        "thing/jars/large.jar": "x" * 1000,
        "thing-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: thing\nVersion: 1\n",
        "thing-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "thing-1.dist-info/RECORD": "thing/__init__.py,,\nthing/jars/large.jar,,\nthing-1.dist-info/RECORD,,\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    gpu_wheels.leave_out(wheel, "thing/jars/")
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == files.keys() - {"thing/jars/large.jar"}
    site = tmp_path / "site"
    gpu_wheels.install(tmp_path, site)
    gpu_wheels.install(tmp_path, site)  # a second call finds it there
    found = subprocess.run([sys.executable, "-c", "import thing; print(thing.kept)"], cwd=site, capture_output=True)
    assert found.stdout == b"True\n"
    assert not (site / "thing" / "jars").exists()
    with pytest.raises(SystemExit, match="has no wheels"):
        gpu_wheels.install(site, tmp_path / "elsewhere")


def test_a_demo_is_summed_up(tmp_path):
    step = {"event": "step", "step": 1, "version": "1.1", "loss": 0.0, "lags": {}, "tokens_trained": 1}
    step |= {"seconds": {"publish": 0.5}, "logprob_gap_mean": None}
    sync = {"event": "sync", "version": "1.1", "engines": 1, "bytes": 10}
    events = [
        sync | {"checksum": "ok", "ms": 900.0},
        step | {"time": 1.0, "reward_mean": 0.1},
        sync | {"checksum": "ok", "ms": 20.0},
        step | {"time": 3.0, "reward_mean": 0.7, "logprob_gap_mean": 0.25},
        sync | {"checksum": "generator-0 holds other weights", "ms": 30.0},
        {"event": "end", "status": "done", "step": 2},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = gpu_demo.figures(tmp_path / "metrics.jsonl")
    assert (found["reward_first"], found["reward_last"], found["step_s"]) == (0.1, 0.7, 2.0)
    assert (found["publications"], found["proved"], found["publication_ms"]) == (3, 2, 25.0)
    assert (found["logprob_gap_mean"], found["phases"], found["ended"]) == (0.25, {"publish": 0.5}, "done")


def test_a_large_model_takes_the_place_of_the_demos(tmp_path):
    reward = gpu_demo._prepare(tmp_path / "run", "tiny", "cpu")
    settings = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (settings["vocab_size"], settings["head_dim"], settings["dtype"]) == (512, 16, "bfloat16")
    assert settings["eos_token_id"] is not None and (tmp_path / "run" / "model" / "tokenizer.json").exists()
    assert reward.exists() and (tmp_path / "run" / "data" / "train.jsonl").exists()


def test_the_demos_fit_a_card_of_80_gb(tmp_path):
    """By the arithmetic that a run is refused by, and with the engine's part of the card for the engine."""
    for name, more in (("tiny", []), ("0.6b", gpu_demo.LARGE)):
        size = size_of(qwen3(SHAPES[name]).to_json_string(use_diff=False))
        settings = [*gpu_demo.SHARED, *more, "generators.engine=torch", "cluster.gpu_memory_gb=80"]
        config = load_config("quickstart", settings)
        refuse(size, config, Card.of(config))
        engine = engine_gpu(size, config, Card.of(config)).gpu.total()
        assert engine < config.generators.memory_fraction * Card.of(config).num_bytes
        left = learner_share(config, Card.of(config))
        assert learner_rank(size, config).total() < left * Card.of(config).num_bytes


ELSEWHERE = {"demo", "learner-0.6b"}
"""Parts whose code runs in tests/test_whole_runs.py and tests/test_benchmarks.py."""


@pytest.mark.slow
def test_every_part_at_tiny_shapes(tmp_path):
    parts = [part.name for part in PARTS if part.tiny and part.name not in ELSEWHERE]
    last = run(tmp_path, *parts)
    log = (tmp_path / "log.txt").read_text()
    assert {part: record["outcome"] for part, record in last.items()} == dict.fromkeys(parts, "done") | {
        "nccl": "skipped"
    }, log[-3000:]
    assert re.search(r"\d+ passed, \d+ skipped", last["tests"]["said"]), "tests/gpu ran on the CPU"
    lines = [record["line"] for records in State(tmp_path).read().values() for record in records if "line" in record]
    assert [one for one in lines if "error" in one or one.get("same") is False] == []
    text = gpu_tables.tables(State(tmp_path).read())
    for part in parts:
        assert f"\n| {part} | " in text
        assert f"**{part}**" in text or part in ("tests", "nccl")
