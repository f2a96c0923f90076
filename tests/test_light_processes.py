"""Commands start without the libraries that take seconds to import."""

import json
import subprocess
import sys
from pathlib import Path

from asyncgrpo.data.demo import make_demo_model
from tests.runs import environment

HEAVY = ["torch", "transformers", "sglang", "pyarrow", "matplotlib"]

COMMANDS = """
import sys
from asyncgrpo.cli import app
from asyncgrpo.errors import RunNotAlive
for arguments in (["--help"], ["train", "--help"], ["status", "run"]):
    sys.argv = ["asyncgrpo", *arguments]
    try:
        app(prog_name="asyncgrpo")
    except SystemExit as end:
        assert end.code in (0, None), end.code
    except RunNotAlive:
        pass
"""

DRIVER = """
import sys
import asyncgrpo.cli.running
import asyncgrpo.cli.train
import asyncgrpo.cluster.ray_session, asyncgrpo.cluster.run, asyncgrpo.recording.screen
from asyncgrpo.cluster.wiring import uses_cuda
from asyncgrpo.config.load import load_config
from asyncgrpo.config.schema import GeneratorConfig
from asyncgrpo.engines.build import check_extra, why_sglang_cannot_run
config = load_config(None, ["model.path=model", "data.train=y", "learner.device=cpu", "generators.gpus_each=0"])
assert not uses_cuda(config)
assert asyncgrpo.cli.running.memory_table(config) == ""
why_sglang_cannot_run() or check_extra(GeneratorConfig(extra={"page_size": 1}))
"""

SAY = """
import json, os
print("HEAVY", json.dumps([name for name in {heavy} if name in sys.modules]), flush=True)
os._exit(0)
"""


def heavy_in(code: str, folder: Path) -> list[str]:
    command = [sys.executable, "-c", code + SAY.format(heavy=HEAVY)]
    ended = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.rpartition("HEAVY ")[2])


def test_commands_that_only_look_import_nothing_heavy(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert heavy_in(COMMANDS, tmp_path) == []


def test_a_driver_without_gpus_leaves_what_is_heavy_to_the_warm_process(tmp_path):
    make_demo_model(tmp_path / "model", seed=0)
    assert heavy_in(DRIVER, tmp_path) == []
