"""Rules between two knobs, and between a knob and the model: what the structs alone cannot say.

Each sentence names the values and what to change. `check` looks at the configuration only, so `load_config` always
calls it; `check_model` also looks at the model's folder, so it belongs to the start of a run.
"""

import difflib
import json
import os
import re
from pathlib import Path
from typing import Any

from asyncgrpo.config.schema import Config
from asyncgrpo.errors import ConfigError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check(config: Config) -> None:
    """Raise ConfigError for the first two fields that do not fit each other."""
    problem = next(filter(None, (rule(config) for rule in _RULES)), None)
    if problem is not None:
        raise ConfigError(problem)


def _microbatch_holds_one(config: Config) -> str | None:
    room, prompt, answer = (
        config.learner.tokens_per_microbatch,
        config.data.max_prompt_tokens,
        config.sampling.max_tokens,
    )
    if room >= prompt + answer:
        return None
    return (
        f"learner.tokens_per_microbatch ({room}) is smaller than the longest sequence, data.max_prompt_tokens "
        f"({prompt}) + sampling.max_tokens ({answer}) = {prompt + answer}; raise it or "
        "lower one of the two"
    )


def _min_answers(config: Config) -> str | None:
    least, size = config.algorithm.min_answers, config.algorithm.group_size
    if least is None or least <= size:
        return None
    return (
        f"algorithm.min_answers ({least}) is more than algorithm.group_size ({size}), the answers of a group; lower it"
    )


def _straggler_factor(config: Config) -> str | None:
    factor = config.buffer.straggler_factor
    if factor == 0 or factor >= 1.5:
        return None
    return (
        f"buffer.straggler_factor ({factor:g}) would end nearly half of the groups, or more; write 0 for no deadline of "
        "its own, or at least 1.5"
    )


def _betas(config: Config) -> str | None:
    for beta in config.learner.betas:
        if not 0 <= beta < 1:
            return f"learner.betas must each be at least 0 and below 1; {beta:g} is not"
    return None


def _top_k(config: Config) -> str | None:
    return "sampling.top_k is 0, which keeps no token; write -1 for no limit" if config.sampling.top_k == 0 else None


def _adapters_are_on(config: Config) -> str | None:
    lora = config.model.lora
    if lora.rank or not lora.targets:
        return None
    names = ", ".join(lora.targets)
    return f"model.lora.targets names {names}, but model.lora.rank is 0, so all weights would be trained; set a rank"


def _eval_has_a_file(config: Config) -> str | None:
    rows = config.data.eval_rows
    if config.data.eval is not None or rows is None:
        return None
    return f"data.eval_rows is {rows}, but data.eval names no file, so nothing would be evaluated; set data.eval"


def _gpus_for_nccl(config: Config) -> str | None:
    if config.weights.backend != "nccl":
        return None
    on_cpu = "generators.gpus_each is 0" if config.generators.gpus_each == 0 else ""
    on_cpu = "learner.device is cpu" if config.learner.device == "cpu" else on_cpu
    return f"weights.backend=nccl needs GPUs on both sides, but {on_cpu}; use weights.backend=auto" if on_cpu else None


def _gpu_for_flash(config: Config) -> str | None:
    if config.learner.attention != "flash_attention_2" or config.learner.device != "cpu":
        return None
    return "learner.attention=flash_attention_2 needs a GPU, but learner.device is cpu; use learner.attention=sdpa"


_RULES = (
    _microbatch_holds_one,
    _min_answers,
    _straggler_factor,
    _betas,
    _top_k,
    _adapters_are_on,
    _eval_has_a_file,
    _gpus_for_nccl,
    _gpu_for_flash,
)


def check_model(config: Config) -> None:
    """Raise ConfigError if `model.path` is no usable folder, its context is too short for prompt plus answer, or
    adapters cannot be merged into its files.

    Reads `config.json` and nothing else. A hub id is looked up in the local cache only; one that is not there yet
    passes, unless the hub is switched off.
    """
    folder = local_model(config.model.path)
    if folder is None:
        return
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"model.path: the folder {config.model.path} has no config.json, so it is not a Hugging Face model; "
            f"{_what_it_holds(folder)}"
        )
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {file} cannot be read as JSON ({error})") from error
    if config.model.lora.rank and config.weights.adapters_only and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"weights.adapters_only is true, so generators merge adapters into the tensors of {config.model.path}, but "
            "it holds no *.safetensors; set weights.adapters_only=false, or save the model as safetensors"
        )
    text = settings.get("text_config") or settings
    context = text.get("max_position_embeddings") or text.get("n_positions")
    heads, gpus = text.get("num_attention_heads"), config.generators.gpus_each
    if config.generators.engine == "sglang" and gpus > 1 and isinstance(heads, int) and heads % gpus:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ConfigError(
            f"generators.gpus_each is {gpus}, but the {heads} attention heads of {config.model.path} cannot be shared by "
            f"so many GPUs; use one of {fitting}"
        )
    prompt, answer = config.data.max_prompt_tokens, config.sampling.max_tokens
    if isinstance(context, int) and prompt + answer > context:
        raise ConfigError(
            f"the context of {config.model.path} is {context} tokens, but data.max_prompt_tokens ({prompt}) + "
            f"sampling.max_tokens ({answer}) = {prompt + answer}; "
            + (
                f"lower sampling.max_tokens to {context - prompt}"
                if prompt < context
                else f"lower data.max_prompt_tokens below {context}"
            )
        )


def local_model(path: str) -> Path | None:
    """The model's folder; none for a hub id that is still to be downloaded. Raises ConfigError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(f"model.path: {path} is a file; give the folder that holds the model's config.json")
    if not _looks_like_hub_id(path):
        near = _close_folders(folder)
        raise ConfigError(f"model.path: the folder {path} does not exist" + (f"; did you mean {near}?" if near else ""))
    cached = _cached(path)
    if cached is None and _is_offline():
        raise ConfigError(
            f"model.path: {path} is neither a folder nor in the local Hugging Face cache, and HF_HUB_OFFLINE is set; "
            "give a folder, or download the model once without HF_HUB_OFFLINE"
        )
    return cached


def _looks_like_hub_id(path: str) -> bool:
    """`Qwen/Qwen3-8B` or `gpt2`; not `./runs/model`, not `runs/model` where there is a folder `runs`."""
    return (
        _HUB_ID.fullmatch(path) is not None
        and not path.startswith(".")
        and not ("/" in path and Path(path).parent.is_dir())
    )


def _close_folders(folder: Path) -> str:
    """Existing folders with a name near the missing one's, at the deepest level that exists; at most three."""
    missing = folder
    while not missing.parent.is_dir():
        missing = missing.parent
    beside = {entry.name: entry for entry in sorted(missing.parent.iterdir()) if entry.is_dir()}
    return " or ".join(str(beside[name]) for name in difflib.get_close_matches(missing.name, beside, n=3, cutoff=0.5))


def _what_it_holds(folder: Path) -> str:
    below = sorted(file.parent for file in folder.glob("*/config.json"))
    if below:
        return f"did you mean {below[0]}?"
    return f"it holds {', '.join(sorted(entry.name for entry in folder.iterdir())[:5]) or 'nothing'}"


def _cached(hub_id: str) -> Path | None:
    """Newest snapshot of a hub id in the local cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = (hub / f"models--{hub_id.replace('/', '--')}" / "snapshots").glob("*/config.json")
    return max((file.parent for file in snapshots), key=lambda folder: folder.stat().st_mtime, default=None)


def _is_offline() -> bool:
    return any(
        os.environ.get(name, "").lower() in {"1", "on", "true", "yes"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
