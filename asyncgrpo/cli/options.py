"""The flags of `train` as settings, and the completions that the shell offers after Tab.

A flag wins over the file, and an explicit `key=value` wins over a flag. A flag that is not given sets nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from asyncgrpo.config.foreign_rules import split_gpus
from asyncgrpo.config.schema import Config

# -- completions after Tab ---------------------------------------------------------------------------------------------

Offer = tuple[str, str]
"""A text to insert, and its meaning for shells that show it."""


def algorithms(incomplete: str) -> list[Offer]:
    """The presets of `--algorithm`."""
    from asyncgrpo.config.files import algorithm_file, algorithm_names, headline

    return _fitting(((name, headline(algorithm_file(name))) for name in algorithm_names()), incomplete)


def configurations(incomplete: str) -> list[Offer]:
    """The files that come with the package. The shell adds those of the working directory."""
    from asyncgrpo.config.files import headline, shipped, shipped_names

    return _fitting(((name, headline(shipped(name))) for name in shipped_names()), incomplete)


def engines(incomplete: str) -> list[Offer]:
    """The values of `--engine`."""
    return _fitting(_values("generators.engine"), incomplete)


def keys(incomplete: str) -> list[Offer]:
    """The keys of the configuration."""
    from asyncgrpo.config.explain import knobs

    return _fitting(((knob.key, knob.description) for knob in knobs().values()), incomplete)


def settings(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """The completions of `key=value`: first the key with its `=`, then the values of a key that has few.

    Bash makes `=` a word of its own, so that the key is then among the words before. click leaves out a last `=`.
    """
    from asyncgrpo.config.explain import knobs

    match [*(ctx.params.get("overrides") or ()), incomplete]:
        case [*_, key, ""] if key in knobs():
            return _values(key)
        case [*_, key, "=", start]:
            return _fitting(_values(key), start)
    key, equals, _ = incomplete.partition("=")
    if equals:
        return _fitting(((f"{key}={value}", what) for value, what in _values(key)), incomplete)
    return _fitting(((f"{knob.key}=", knob.description) for knob in knobs().values()), incomplete)


def _values(key: str) -> list[Offer]:
    """The values of a key that has few."""
    from asyncgrpo.config.explain import choices

    return [(value, "") for value in choices(key)]


def _fitting(offers: Iterable[Offer], incomplete: str) -> list[Offer]:
    return [(name, what) for name, what in offers if name.startswith(incomplete)]


# -- flags as settings -------------------------------------------------------------------------------------------------
ModelOption = Annotated[str | None, typer.Option("--model", help="Folder of a Hugging Face model, or its hub id.")]
DataOption = Annotated[str | None, typer.Option("--data", help="Training prompts: Parquet, JSONL or JSON.")]
EvalDataOption = Annotated[
    list[str] | None,
    typer.Option("--eval-data", help="Held-out prompts, evaluated while training; may be repeated."),
]
RewardFuncOption = Annotated[
    list[str] | None,
    typer.Option(
        "--reward-func", help="Python file with compute_score, FILE:NAME, or a built-in reward; may be repeated."
    ),
]
UnsafeRewardsOption = Annotated[
    bool,
    typer.Option(
        "--unsafe-rewards", help="Run the model's code as your user where bubblewrap cannot run: reward.code.unsafe."
    ),
]
RolloutNOption = Annotated[int | None, typer.Option("--rollout-n", help="Completions to each prompt, at least 2.")]
EpochsOption = Annotated[int | None, typer.Option("--epochs", help="Passes over the training data.")]
StepsOption = Annotated[
    int | None, typer.Option("--steps", help="Optimizer steps; alone it lifts the limit on epochs.")
]
NGpusOption = Annotated[
    int | None,
    typer.Option("--n-gpus", help="GPUs, half for generators, half for the learner; 1 is shared by both, 0 is CPU."),
]
LrOption = Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")]
KlCoefOption = Annotated[
    float | None, typer.Option("--kl-coef", help="Weight of the KL to the initial model; 0 is off.")
]
EngineOption = Annotated[
    str | None,
    typer.Option("--engine", help="Inference engine: sglang, torch or fake.", autocompletion=engines),
]
OutOption = Annotated[str | None, typer.Option("--out", help="Run folder.")]
MaxLagOption = Annotated[
    str | None,
    typer.Option("--max-lag", help="Optimizer steps that generators may run ahead; 0 is synchronous; or auto."),
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what the run would do and need, or why it would be refused; start nothing."),
]
ObserveOption = Annotated[
    bool,
    typer.Option("--observe", help="Start Prometheus beside the run until it ends, and Grafana if it is installed."),
]
AlgorithmOption = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        help="A preset: the whole objective, whatever the file says. `asyncgrpo config algorithms` lists them.",
        autocompletion=algorithms,
    ),
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="YAML file, or the name of one that comes with the package.",
        autocompletion=configurations,
    ),
]
ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="YAML file, or the name of one that comes with the package.",
        autocompletion=configurations,
    ),
]
SettingsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Any setting; wins over files and flags.",
        show_default=False,
        autocompletion=settings,
    ),
]


def train_overrides(
    *,
    model: str | None = None,
    data: str | None = None,
    eval_data: Sequence[str] | None = None,
    reward_func: Sequence[str] | None = None,
    unsafe_rewards: bool = False,
    rollout_n: int | None = None,
    epochs: int | None = None,
    n_gpus: int | None = None,
    lr: float | None = None,
    kl_coef: float | None = None,
    steps: int | None = None,
    engine: str | None = None,
    out: str | None = None,
    max_lag: str | None = None,
    explicit: Sequence[str] = (),
) -> list[str]:
    """The overrides for `load_config`: those of the flags, then the explicit ones.

    If only one of `steps` and `epochs` is given, it is the only end of the run, whatever the file says.

    Args:
        n_gpus: GPUs to split (`split_gpus`). 0 puts one generator and one learner on the CPU, in float32.
        explicit: `key=value` as the person wrote them. The split respects those about GPUs.
    Raises:
        ConfigError: the GPUs cannot be split.
    """
    values: dict[str, object] = {
        "model.path": model,
        "data.train": data,
        "data.eval": one_or_all(eval_data),
        "reward.function": one_or_all(reward_func),
        "reward.code.unsafe": True if unsafe_rewards else None,
        "algorithm.group_size": rollout_n,
        "algorithm.kl_coef": kl_coef,
        "learner.lr": lr,
        "generators.engine": engine,
        "run.out": out,
        "buffer.max_lag": max_lag,
        "run.steps": "null" if steps is None and epochs is not None else steps,
        "run.epochs": "null" if epochs is None and steps is not None else epochs,
    }
    if n_gpus is not None:
        values |= _placement(n_gpus, explicit)
    return [f"{key}={value}" for key, value in values.items() if value is not None] + list(explicit)


def one_or_all(specs: Sequence[str] | None) -> str | list[str] | None:
    """The value of `reward.function` for what `--reward-func` was given."""
    if not specs:
        return None
    return specs[0] if len(specs) == 1 else list(specs)


def _placement(n_gpus: int, explicit: Sequence[str]) -> dict[str, object]:
    if n_gpus == 0:
        return {
            "generators.count": 1,
            "generators.gpus_each": 0,
            "learner.ranks": 1,
            "learner.device": "cpu",
            "model.dtype": "float32",  # many CPUs only emulate bfloat16
        }
    if n_gpus == 1:
        return {
            "generators.count": 1,
            "generators.gpus_each": 1,
            "learner.ranks": 1,
            "learner.device": "cuda",
            "cluster.share_gpu": True,
            "generators.memory_fraction": 0.35,  # until `fitted` knows the model
        }
    gpus_each = _explicit_int("generators.gpus_each", explicit) or 1
    count, ranks = split_gpus(
        n_gpus,
        gpus_each,
        count=_explicit_int("generators.count", explicit),
        ranks=_explicit_int("learner.ranks", explicit),
    )
    return {
        "generators.count": count,
        "generators.gpus_each": gpus_each,
        "learner.ranks": ranks,
        "learner.device": "cuda",
    }


_FITTED = (
    "generators.count",
    "generators.gpus_each",
    "generators.groups_in_flight",
    "generators.memory_fraction",
    "learner.ranks",
    "learner.offload_optimizer",
    "learner.tokens_per_microbatch",
)
"""What `fitted` may choose."""


def fitted(config: Config, n_gpus: int, explicit: Sequence[str]) -> list[str]:
    """The overrides that make a run of these GPUs fit them, by the size of the model; none where it is not known.

    Args:
        config: with the split that `train_overrides` made without knowing the model.
        explicit: `key=value` as the person wrote them; what they set is not chosen.
    Raises:
        ConfigError: learner and generator do not fit one GPU.
    """
    from asyncgrpo.cli.running import card_of
    from asyncgrpo.config.fit import choose, share_one_gpu
    from asyncgrpo.config.shapes import shape_at

    shape = shape_at(config.model.path, may_download=True) if n_gpus > 0 else None
    if shape is None:
        return []
    written = {override.partition("=")[0].strip() for override in explicit}
    kept = {key: _value_at(config, key) for key in _FITTED if key in written}
    card = card_of(config)
    chosen = share_one_gpu(shape, config, card, kept) if n_gpus == 1 else choose(shape, config, card, n_gpus, kept)
    return [f"{key}={value}" for key, value in chosen.items() if key not in kept]


def _value_at(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _explicit_int(key: str, explicit: Sequence[str]) -> int | None:
    """The last value given for `key`, if it is a whole number. `load_config` refuses any other."""
    texts = [override.partition("=")[2].strip() for override in explicit if override.partition("=")[0].strip() == key]
    return int(texts[-1]) if texts and texts[-1].isdigit() else None
