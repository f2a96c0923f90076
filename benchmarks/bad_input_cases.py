"""The cases of `bad_inputs`: bad inputs of every command.

A case begins in a folder with a small `model`, `train.json`, `eval.json` and `reward.py`. Cases with `needs_run` also have
a finished `run` of four steps with its journal.
"""

import fcntl
import json
import os
import re
import shlex
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = [{"prompt": f"{n:03d}", "ground_truth": f"{n:03d}"[::-1], "data_source": "digits"} for n in range(40)]
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "
SURROGATE, UNANSWERED = ROWS[0] | {"prompt": "a\ud800b"}, ROWS[0] | {"ground_truth": None}
CONFIG = ("--config", "c.yaml")
FEW_ROWS = ("buffer.prompts_per_step=64", "run.steps=null", "run.epochs=1", "--dry-run")
CHECK = "data check train.json --reward-func reward.py"
EVAL = "eval run --data eval.json --reward-func reward.py"
GOOD = shlex.split("""--model ./model --data train.json --reward-func reward.py --n-gpus 0 --engine torch --steps 2 --out new
    data.max_prompt_tokens=32 sampling.max_tokens=4 buffer.prompts_per_step=8 --rollout-n 4""")
VERL = shlex.split("""algorithm.adv_estimator=grpo data.train_files=train.json data.val_files=eval.json data.train_batch_size=8
    data.max_prompt_length=32 data.max_response_length=4 data.filter_overlong_prompts=True data.truncation=error
    actor_rollout_ref.model.path=./model actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=8
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 trainer.critic_warmup=0 trainer.n_gpus_per_node=8
    trainer.save_freq=20""")

Make = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One bad input of a command."""

    name: str
    arguments: tuple[str, ...]
    make: Make = lambda folder: None
    """Prepares the folder."""
    needs_run: bool = False
    is_table: bool = False
    """Whether several things are wrong, so that the message may have several lines."""
    is_report: bool = False
    """Whether finding the mistake is the purpose of the command, so that its message is on stdout."""
    may_work: bool = False
    """Whether the command may also accept the input."""
    warns: str = ""
    """What a command that works says of it."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables."""


def train(name: str, *arguments: str, make: Make = lambda folder: None, **more: Any) -> Case:
    """A case of `train` with all that it needs and these arguments. Later flags win over earlier ones."""
    return Case(f"train: {name}", ("train", *GOOD, *arguments), make, **more)


def other(name: str, text: str, make: Make = lambda folder: None, **more: Any) -> Case:
    """A case of another command, as it is typed."""
    return Case(f"{text.split()[0] if text else 'asyncgrpo'}: {name}", tuple(text.split()), make, **more)


def write(name: str, content: str | bytes) -> Make:
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content

    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return make


def rows(*some: object, name: str = "train.json", count: int = 8) -> Make:
    """Write a data file of these rows and good ones after them."""
    return write(name, json.dumps([*some, *ROWS[:count]]))


def reward(body: str) -> Make:
    return write("reward.py", HEAD + body + "\n")


def remove(*names: str) -> Make:
    def make(folder: Path) -> None:
        for name in names:
            for path in folder.glob(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return make


def cut(name: str, to: float) -> Make:
    """Cut a file off after this share of it."""

    def make(folder: Path) -> None:
        path = next(folder.glob(name))
        os.truncate(path, int(path.stat().st_size * to))

    return make


def edit_json(name: str, **values: object) -> Make:
    def make(folder: Path) -> None:
        path = next(folder.glob(name))
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return make


def together(*makes: Make) -> Make:
    return lambda folder: [make(folder) for make in makes]


def folder_for(name: str) -> Make:
    return lambda folder: (folder / name).mkdir(parents=True, exist_ok=True)


def copy(source: str, target: str) -> Make:
    return lambda folder: shutil.copytree(folder / source, folder / target)


SILENT_PORT = 29_471
ONLINE = (("HF_HUB_OFFLINE", "0"),)
NO_HUB = (*ONLINE, ("HF_ENDPOINT", "http://127.0.0.1:1"))
SILENT_HUB = (*ONLINE, ("HF_ENDPOINT", f"http://127.0.0.1:{SILENT_PORT}"))
"""A machine without a network, one where nothing listens, and one whose packets are lost."""
_held: list[int] = []


def live_run(folder: Path) -> None:
    """Make the folder of a run that lives, by holding its lock."""
    (folder / "new").mkdir()
    _held.append(os.open(folder / "new" / ".lock", os.O_RDWR | os.O_CREAT))
    fcntl.flock(_held[-1], fcntl.LOCK_EX)


def let_go() -> None:
    """Release the locks of all live runs, and close silent servers."""
    while _held:
        os.close(_held.pop())


def silent(folder: Path) -> None:
    """Listen at port `SILENT_PORT` and never reply."""
    server = socket.create_server(("127.0.0.1", SILENT_PORT))
    _held.append(server.detach())


def without_template(folder: Path) -> None:
    for path in (folder / "model").glob("chat_template*"):
        path.unlink()
    settings = folder / "model" / "tokenizer_config.json"
    kept = json.loads(settings.read_text())
    kept.pop("chat_template", None)
    settings.write_text(json.dumps(kept))


def without_end_token(folder: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (path := folder / "model" / name).exists():
            kept = {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith("eos_")}
            path.write_text(json.dumps(kept))


def damage_line(folder: Path) -> None:
    """Damage the line of the first step, in the middle of the events."""
    path = folder / "run" / "metrics.jsonl"
    first = re.compile(rb'^{"event":"step".*$', re.MULTILINE)
    path.write_bytes(first.sub(b'{"event": "step", "st\x00\xff', path.read_bytes(), count=1))


FOLDERS = [
    other(f"a folder that {what}", text.replace("RUN", name), make)
    for what, name, make in (
        ("is not there", "nowhere", lambda folder: None),
        ("holds no run", "empty", folder_for("empty")),
        ("is a file", "train.json", lambda folder: None),
    )
    for text in ("audit RUN", "samples RUN", "replay RUN", "eval RUN --data eval.json")
]

CONFIGURATION = [
    train("an unknown key", "learner.learning_rate=1e-6"),
    train("three misspelt keys", "learner.lrr=1", "buffer.maxlag=1", "run.step=3", is_table=True),
    Case("train: a command line of verl's, 22 keys", ("train", *VERL), is_table=True),
    train("a key of vllm's", "generators.engine=vllm"),
    train("an unknown option", "--learning-rate", "1e-6"),
    train("a word for a number", "learner.lr=fast"),
    train("a number below its bound", "--lr", "-1"),
    train("a rate of NaN", "--lr", "nan"),
    train("a temperature of zero", "sampling.temperature=0"),
    train("a group of one", "--rollout-n", "1"),
    train("no steps", "--steps", "0"),
    train("a number too large", "run.steps=99999999999999999999999"),
    train("a list for a number", "learner.lr=[1,2]"),
    train("more completions needed than sampled", "algorithm.min_completions=9"),
    train("a microbatch that holds no sequence", "learner.tokens_per_microbatch=8"),
    train("a context beyond the model's", "data.max_prompt_tokens=2000"),
    train("more minibatches than prompts", "learner.minibatches=9999"),
    train("an unknown algorithm", "--algorithm", "grpoo"),
    train("an argument that the loss has not", "algorithm.loss_args.lowe=0.1"),
    train("an unknown engine", "--engine", "tgi"),
    train("one GPU", "--n-gpus", "1"),
    train("a key without a value", "learner.lr"),
    train("a value without a key", "=5"),
    train("a broken value", "model.lora.targets=[q_proj"),
    train("an address that is not ours", "cluster.bind=203.0.113.7"),
    train("an address that is none", "cluster.bind=all the world"),
    train("a Ray that is not there", "cluster.ray_address=127.0.0.1:1"),
    train("wandb, which is not installed", "run.loggers=[wandb]"),
    train("a file where the folder should be", "--out", "train.json"),
    train("a folder that cannot be made", "--out", "/proc/new"),
    train("a folder of 300 letters", "--out", "a" * 300),
    train("a folder without a name", "--out", ""),
    train("the folder of a run that lives", make=live_run),
    train("a file of settings that is not there", "--config", "nothing.yaml"),
    train("a list of settings", *CONFIG, make=write("c.yaml", "- learner\n")),
    train("an empty file of settings", *CONFIG, make=write("c.yaml", ""), may_work=True),
    train("NUL in the settings", *CONFIG, make=write("c.yaml", b"run:\n  out: a\x00b\n")),
    train("BOM in the settings", *CONFIG, make=write("c.yaml", "\ufeffrun: {seed: 1}\n"), may_work=True),
    train("settings that extend themselves", *CONFIG, make=write("c.yaml", "extends: c.yaml\n")),
    train("settings that are a picture", *CONFIG, make=write("c.yaml", b"\x89PNG\r\n\x1a\n\xff\xfe" * 9)),
    train("a file of verl's", *CONFIG, make=write("c.yaml", "data: {train_files: a, val_files: b}\n"), is_table=True),
    train("bytes that are no text", "run.out=a\udcffb", may_work=True),
]

DATA = [
    train("no data file", "--data", "trian.json"),
    train("a folder for a data file", "--data", "model"),
    train("an empty data file", make=write("train.json", "")),
    train("truncated JSON", make=cut("train.json", 0.5)),
    train("JSON that nests without an end", make=write("train.json", "[" * 100_000)),
    train("truncated Parquet", "--data", "t.parquet", make=write("t.parquet", b"PAR1" + bytes(200))),
    train("a table of commas", "--data", "t.csv", make=write("t.csv", "prompt,ground_truth\na,b\n")),
    train("BOM in the data", make=write("train.json", "\ufeff" + json.dumps(ROWS)), may_work=True),
    train("bytes that are no UTF-8", make=write("train.json", b'[{"prompt": "\xff\xfe", "ground_truth": "1"}]')),
    train("a lone surrogate", make=rows(SURROGATE)),
    train("NUL in a prompt", make=rows(ROWS[0] | {"prompt": "a\x00b"}), may_work=True),
    train("NUL in the name of a file", "data.train=a\\0b"),
    train("rows of no schema", make=write("train.json", '[{"input": "a", "label": "b"}]')),
    train("a third row that is other", make=rows(ROWS[0], ROWS[1], {"query": "x"})),
    train("a prompt of null", make=rows(ROWS[0], ROWS[1] | {"prompt": None})),
    train("a prompt that is a number", make=rows(ROWS[0], ROWS[1] | {"prompt": 5})),
    train("an empty prompt", make=rows(ROWS[0] | {"prompt": ""})),
    train("turns without text", make=rows(ROWS[0] | {"prompt": [{"role": "user", "content": " "}]})),
    train("NaN for an answer", make=rows(ROWS[0], ROWS[1] | {"ground_truth": float("nan")})),
    train("rows without an answer", "--dry-run", make=rows(UNANSWERED), warns="have no answer: 0\n"),
    train("a turn that is a picture", make=rows({"prompt": [{"role": "user", "content": [{"image": "a"}]}]})),
    train("prompts that are all too long", "data.max_prompt_tokens=1"),
    train("a prompt of 10 MB", make=rows(ROWS[0] | {"prompt": "x" * 10_000_000}), may_work=True),
    train("the same row again and again", make=write("train.json", json.dumps(ROWS[:1] * 40)), may_work=True),
    train("fewer rows than a step takes", *FEW_ROWS, warns="buffer.prompts_per_step (64) is more than the rows of"),
    train("no held-out file", "--eval-data", "missing.json"),
    train("a broken held-out file", "--eval-data", "e.json", make=write("e.json", "[{]")),
    train("a held-out lone surrogate", "--eval-data", "e.json", make=rows(SURROGATE, name="e.json")),
    train("a column that is not there", "data.columns.prompt=question"),
    train("a source without a rule", "reward.function=null"),
]

JUDGE = "reward.judge.url=http://127.0.0.1:1"
SERVED = ("reward.function=model", "reward.model.path=./model", "reward.model.url=http://127.0.0.1:1")
REWARDS = [
    train("no reward file", "--reward-func", "rewrad.py"),
    train("a reward with a syntax error", make=write("reward.py", "def compute_score(:\n")),
    train("a reward without compute_score", make=write("reward.py", "def score(x): return 1\n")),
    train("a name that the file has not", "--reward-func", "reward.py:other"),
    train("a reward with another signature", make=write("reward.py", "def compute_score(text): return 1.0\n")),
    train("a reward that is no function", make=write("reward.py", "compute_score = 5\n")),
    train("a reward that raises when imported", make=write("reward.py", "raise RuntimeError('no judge')\n")),
    train("a reward that imports what is not there", make=write("reward.py", "import nothing_of_the_kind\n")),
    train("a reward that hangs when imported", make=write("reward.py", "import time; time.sleep(1e6)\n")),
    train("a reward that dies when imported", make=write("reward.py", "import os; os._exit(0)\n")),
    train("a reward that is no text", make=write("reward.py", b"\x7fELF\x00\xff" * 9)),
    train("a reward that always raises", make=reward("raise ValueError('no')")),
    train("a reward that always exits", make=reward("import os; os._exit(3)")),
    train("a reward that always hangs", "reward.timeout_s=1", make=reward("import time; time.sleep(1e6)")),
    train("a reward that is always text", make=reward("return 'good'")),
    train("a reward that is always NaN", make=reward("return float('nan')")),
    train("a reward of 1e308", make=reward("return 1e308")),
    train("a reward with a relative import", make=write("reward.py", "from .helper import f\n")),
    train("a judge that is not there", "reward.function=judge", JUDGE),
    train("a judge without a name", "reward.function=judge", "reward.judge.url=http://no.invalid"),
    train("a reward model that is not there", "reward.function=model", "reward.model.path=./modle"),
    train("a reward model of no hub", "reward.function=model", "reward.model.path=a/b", environment=NO_HUB),
    train("a reward server that is not there", *SERVED),
    train("a sandbox that is not there", "reward.function=code", "reward.code.url=http://127.0.0.1:1"),
    train("an environment that is not there", "environment.name=openenv:http://127.0.0.1:1"),
    train("an environment that never replies", f"environment.name=openenv:http://127.0.0.1:{SILENT_PORT}", make=silent),
    train("a reward without a score", make=reward("return {'correct': 1.0}")),
]

MODELS = [
    train("an empty model folder", "--model", "./empty", make=folder_for("empty")),
    train("a hub id without a network", "--model", "nobody/nothing-of-the-kind"),
    train("a hub id, and no name is resolved", "--model", "Qwen/Qwen3-8B", environment=ONLINE),
    train("a hub id, and no hub listens", "--model", "Qwen/Qwen3-8B", environment=NO_HUB),
    train("a hub id, and the hub never replies", "--model", "Qwen/Qwen3-8B", make=silent, environment=SILENT_HUB),
    train("a hub id for GPUs, and no hub listens", "--model", "a/b", "--n-gpus", "2", environment=NO_HUB),
    train("a data set of the hub, and no hub listens", "--data", "hf:openai/gsm8k", environment=NO_HUB),
    train("a model without an end token", make=without_end_token),
    train("a model without tokenizer", make=remove("model/tokenizer*")),
    train("a broken tokenizer", make=cut("model/tokenizer.json", 0.5)),
    train("a model without chat template", make=without_template, may_work=True),
    train("a template that is broken", make=write("model/chat_template.jinja", "{% for m in messages %}")),
    train("a model without weights", make=remove("model/*.safetensors")),
    train("truncated weights", make=cut("model/model.safetensors", 0.5)),
    train("a broken config.json", make=cut("model/config.json", 0.5)),
    train("a model of an unknown kind", make=edit_json("model/config.json", model_type="gpt9", architectures=["Gpt9"])),
    train("a config.json of another size", make=edit_json("model/config.json", hidden_size=128)),
    train("no config.json", make=remove("model/config.json")),
]

RESUMED = ["--steps", "6", "--out", "run"]
RUNS = [
    train("another model", *RESUMED, "--model", "m2", make=copy("model", "m2"), needs_run=True, warns="changed: m"),
    train("gone on with other data", *RESUMED, make=rows(ROWS[5], count=20), needs_run=True),
    train("gone on with fewer steps", "--steps", "1", "--out", "run", needs_run=True),
    train("a checkpoint without its state", *RESUMED, make=remove("run/checkpoints/*/state.json"), needs_run=True),
    train("a broken state", *RESUMED, make=cut("run/checkpoints/step_000004/state.json", 0.5), needs_run=True),
    train(
        "a broken checkpoint", *RESUMED, make=cut("run/checkpoints/step_000004/resume/*.distcp", 0.3), needs_run=True
    ),
    train("a lineage that is no number", *RESUMED, make=write("run/lineage", "two"), needs_run=True),
    other("broken events", "audit run", damage_line, needs_run=True, is_report=True),
    other("a broken state", "audit run", cut("run/checkpoints/step_000004/state.json", 0.5), needs_run=True),
    other("no events", "audit run", remove("run/metrics.jsonl"), needs_run=True, is_report=True),
    other("no journal", "audit run", remove("run/journal"), needs_run=True),
    other("no journal", "replay run", remove("run/journal"), needs_run=True),
    other("no settings", "replay run", remove("run/config.yaml"), needs_run=True, may_work=True),
    other("broken settings", "replay run", write("run/config.yaml", "learner: ["), needs_run=True, may_work=True),
    other("an unknown key", "replay run --with learner.rate=1", needs_run=True),
    other("a step that is not there", "replay run --from-step 77", needs_run=True),
    other("a step that is not there", "samples run --step 99", needs_run=True),
    other("a broken file", "samples run", cut("run/samples/*/*4.parquet", 0.5), needs_run=True),
    other("two ways to sort", "samples run --best --worst", needs_run=True),
    other("no data file", "eval run --data nothing.json --reward-func reward.py", needs_run=True),
    other("a source without a rule", "eval run --data eval.json", needs_run=True),
    other("a temperature of NaN", f"{EVAL} --temperature nan", needs_run=True),
    other("no completions", f"{EVAL} --rollout-n 0", needs_run=True),
    other("an engine that is not there", f"{EVAL} --engine sglangg", needs_run=True),
]

LONG = ("audit", "status", "replay", "samples", "demo --engine torch --out", "data check")
OTHERS = [
    other("an unknown command", "trian"),
    other("no file", "serve"),
    other("a file that is not there", "serve nothing.yaml"),
    other("a file of unknown keys", "serve c.yaml", write("c.yaml", "modle: {path: a}\n"), is_table=True),
    other("no model", "serve c.yaml", write("c.yaml", "data: {train: train.json}\n")),
    other("a file of verl's", "serve c.yaml", write("c.yaml", "trainer: {nnodes: 1, logger: x}\n"), is_table=True),
    other("an unknown engine", "demo --engine tgi --out new"),
    other("an unknown algorithm", "demo --algorithm nothing --out new"),
    other("no steps", "demo --engine torch --steps 0 --out new"),
    other("negative faults", "demo --engine torch --chaos -1 --out new"),
    other("a file for a folder", "demo --engine torch --out train.json"),
    other("no file", "data check nothing.json"),
    other("a judge that is not there", f"data check train.json reward.function=judge {JUDGE}", is_report=True),
    other("a hub id, and no hub listens", "data check train.json --model a/b", environment=NO_HUB),
    other("prompts that are all too long", f"{CHECK} --model ./model data.max_prompt_tokens=1", is_report=True),
    other("parts that are NaN", CHECK, reward("return {'score': 1.0, 'style': float('nan')}"), warns="parts left out"),
    other("a reward that prints 100 kB", CHECK, reward("print('x' * 100_000); return 1.0"), warns="printed more than"),
    other("rows without an answer", "data check train.json", rows(UNANSWERED), is_report=True),
    *(other(f"a name of 300 letters, {command}", f"{command} {'a' * 300}") for command in LONG),
    other("a lone surrogate", "data check train.json --model ./model", rows(SURROGATE)),
    other("a model that is not there", "data check train.json --model ./modle"),
    other("a prompt of 10 MB", f"{CHECK} --model ./model", rows(ROWS[0] | {"prompt": "x" * 10_000_000}), may_work=True),
    other("a reward that hangs when imported", CHECK, write("reward.py", "import time; time.sleep(1e6)\n")),
    other("a reward that raises", CHECK, reward("raise ValueError('no')")),
    other("an unknown key", "config explain learner.rate"),
    other("a file that is not there", "config show nothing"),
    other("a bad value", "config show quickstart learner.lr=fast"),
    other("a folder that cannot be made", "doctor --out /proc/new", is_report=True),
    other("a file for a folder", "doctor --out train.json", is_report=True),
]

CASES = [*CONFIGURATION, *DATA, *REWARDS, *MODELS, *RUNS, *FOLDERS, *OTHERS]
