"""Use models and data without a run: `eval` and `data check`."""

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncgrpo.cli import options
from asyncgrpo.config.schema import Config, DataConfig, RewardConfig, changed
from asyncgrpo.errors import AsyncGRPOError, CheckpointError
from asyncgrpo.learner.checkpoints import Checkpoints

if TYPE_CHECKING:  # each imports numpy, torch or transformers
    from transformers import PreTrainedTokenizerBase

    from asyncgrpo.data.images import Images
    from asyncgrpo.data.loading import Record
    from asyncgrpo.rewards.base import Reward
    from asyncgrpo.types import Prompt, Rollout, Score


log = logging.getLogger(__name__)
app = typer.Typer()
data_app = typer.Typer(no_args_is_help=True)
app.add_typer(data_app, name="data", help="Check data files.", epilog=options.example("data check train.parquet"))


# -- eval --------------------------------------------------------------------------------------------------------------


def find_model(source: Path) -> Path:
    """Return the Hugging Face folder of a run (final model, else newest checkpoint), a checkpoint, or `source` itself.

    Raises:
        CheckpointError: no folder holds a `config.json` with weights.
    """
    if not source.is_dir():
        raise CheckpointError(f"folder {source} does not exist; name a run, such as runs/demo, or a checkpoint in it")
    newest_first = (checkpoint / "hf" for checkpoint in reversed(Checkpoints(source, keep=1).all()))
    for folder in (source, source / "hf", source / "final", *newest_first):
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    where = "(config.json and *.safetensors) in final/ or checkpoints/step_*/hf"
    raise CheckpointError(f"{source} holds no model {where}; a run writes one with its first checkpoint")


_OF_A_RUN = (
    *("data.columns", "data.image_column", "data.image_root", "data.max_pixels", "data.max_prompt_tokens"),
    *("data.system_prompt", "data.chat_template_kwargs", "sampling", "reward", "environment"),
)
"""Settings of a run with which its models are evaluated."""


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings with which a run evaluates the models in its folder, by key; empty if no run made this one.

    Raises:
        ConfigError: the file of the run cannot be read.
    """
    from asyncgrpo.config.load import read_plain, recorded

    above = folder.absolute().parent
    run = above if folder.name == "final" else above.parent.parent
    if folder.name not in ("final", "hf") or not (run / "metrics.jsonl").is_file():
        return {}
    config = recorded(read_plain(run / "config.yaml"), str(run / "config.yaml"))
    config = changed(config, {"reward.code.unsafe": False})  # which is asked for each time
    return {key: attrgetter(key)(config) for key in _OF_A_RUN}


@app.command("eval", epilog=options.example("eval runs/demo --data runs/demo/data/eval.jsonl --max-tokens 4"))
def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Run folder, checkpoint, or folder of a Hugging Face model.")
    ],
    data: Annotated[list[str], typer.Option(help=f"Prompts: {options.PROMPTS}; repeatable.")],
    reward_func: options.RewardFuncOption = None,
    unsafe_rewards: options.UnsafeRewardsOption = False,
    engine: Annotated[str, typer.Option(help="Inference engine: sglang or torch.")] = "torch",
    rollout_n: Annotated[int | None, typer.Option("--rollout-n", help="Completions per prompt. Default: 1.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0, the default, is greedy.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Maximum tokens per completion. Default: 1024.")
    ] = None,
    success: Annotated[
        float | None, typer.Option(help="Minimum reward of a correct completion, for pass@k and maj@n. Default: 1.")
    ] = None,
    as_json: options.JsonOption = False,
    overrides: options.SettingsArgument = None,
) -> None:
    """Evaluate a model on held-out prompts.

    Each file is a suite with its own metrics, each with a 95 % confidence interval. With --rollout-n above 1 and
    --temperature above 0, the metrics include pass@k and maj@n. For a run or its checkpoint, the defaults are the settings of
    the run: sampling, prompts, reward and environment.
    """
    import torch

    from asyncgrpo.cli.running import check_inputs
    from asyncgrpo.config.load import load_config, with_overrides
    from asyncgrpo.config.rules import read_model
    from asyncgrpo.environments.build import with_tools

    folder = find_model(checkpoint)
    base = load_config(None, [f"model.path={folder}", f"data.train={data[0]}"])
    base = changed(base, settings_of(folder))
    explicit = overrides or []
    if reward_func or "reward.function" in options.keys_of(explicit):
        plain = RewardConfig()
        base = changed(base, {f"reward.{key}": getattr(plain, key) for key in ("weights", "combine", "kwargs")})
    flags = {
        "sampling.max_tokens": max_tokens,
        "sampling.eval_temperature": temperature,
        "sampling.eval_completions": rollout_n,
        "reward.success": success,
    }
    settings = [
        f"data.eval={options.one_or_all(data)}",
        "buffer.prompts_per_step=1",  # an evaluation takes no step, for which rows could be too few
        *(f"{key}={value}" for key, value in flags.items() if value is not None),
    ]
    if not torch.cuda.is_available():
        settings += ["generators.gpus_each=0", "model.dtype=float32"]
    _, context, _ = read_model(folder)
    max_tokens = base.sampling.max_tokens if max_tokens is None else max_tokens
    if isinstance(context, int) and max_tokens < context < base.data.max_prompt_tokens + max_tokens:
        settings.append(f"data.max_prompt_tokens={context - max_tokens}")
    settings += options.train_overrides(
        engine=engine, reward_func=reward_func, unsafe_rewards=unsafe_rewards, explicit=explicit
    )
    config = with_tools(with_overrides(base, settings))
    check_inputs(config)
    report = asyncio.run(_evaluate(config))
    if as_json:
        options.print_json(report)
    else:
        _print_evaluation(report)


def _print_evaluation(report: dict[str, Any]) -> None:
    suites = report["suites"]
    metrics = list(dict.fromkeys(name for suite in suites.values() for name in suite["numbers"]))
    rows = [
        {"suite": name, "prompts": str(suite["prompts"])}
        | {metric: _estimate(suite["numbers"].get(metric)) for metric in metrics}
        for name, suite in suites.items()
    ]
    typer.echo(options.columns(rows))
    mean = "none" if report["reward_mean"] is None else f"{report['reward_mean']:.4f}"
    typer.echo(f"{report['completions']} completions to {report['prompts']} prompts, mean reward {mean}")
    for name, suite in suites.items():
        if suite["parts"]:
            parts = ", ".join(f"{part} {value:.4f}" for part, value in suite["parts"].items())
            typer.echo(f"  parts of {name}: {parts}")
    for failure, count in report["failures"].items():
        typer.echo(f"  without a score ({failure}): {count}")


def _estimate(estimate: Sequence[float | None] | None) -> str:
    if estimate is None:
        return "-"
    value, low, high = estimate
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


async def _evaluate(config: Config) -> dict[str, Any]:
    """Sample and score all suites. Return the metrics of each and those of all completions."""
    from asyncgrpo.buffer.evaluation import Scored, Suite
    from asyncgrpo.data.images import Images
    from asyncgrpo.data.loading import held_out
    from asyncgrpo.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
    with TemporaryDirectory() as folder:
        images = Images.of(config, Path(folder))
        prompts_of = held_out(config, tokenizer, images)
        every = [one for prompts in prompts_of.values() for one in prompts]
        rollouts = iter(await _rollouts(config, tokenizer, every, images))
    suites, warned = {name: Suite(config.reward.success) for name in prompts_of}, set[str]()
    for name, prompts in prompts_of.items():
        for prompt in prompts:
            group = next(rollouts)
            _warn_of_failures(prompt, group, warned)
            suites[name].add([Scored(one, len(one.completion.token_ids), prompt.source) for one in group])
    values = [value for suite in suites.values() for value in suite.rewards]
    results = {name: suite.result() for name, suite in suites.items()}
    return {
        "prompts": sum(map(len, prompts_of.values())),
        "completions": sum(suite.completions for suite in results.values()),
        "reward_mean": statistics.fmean(values) if values else None,
        "failures": dict(sum((Counter(suite.failures) for suite in results.values()), Counter())),
        "suites": {name: suite.fields() for name, suite in results.items()},
    }


def _warn_of_failures(prompt: "Prompt", rollouts: "Sequence[Rollout]", warned: set[str]) -> None:
    """Warn of the first failure of each kind, but those of an environment, which are logged where they happen."""
    from asyncgrpo.rewards.base import IN_ENVIRONMENT, kind_of

    for score in (one.score for one in rollouts):
        if score.failure not in (None, IN_ENVIRONMENT) and (kind := kind_of(score)) not in warned:
            warned.add(kind)
            log.warning("reward failed (%s), prompt %s: %s", kind, prompt.prompt_id, score.detail)


async def _rollouts(
    config: Config, tokenizer: "PreTrainedTokenizerBase", prompts: "Sequence[Prompt]", images: "Images | None"
) -> "list[tuple[Rollout, ...]]":
    """Return the rollouts of each prompt. At most `generators.groups_in_flight` prompts are in flight."""
    from asyncgrpo.data.tokenizer import decoder, stop_token_ids
    from asyncgrpo.engines.build import build_engine
    from asyncgrpo.generators.rollout import GroupInFlight
    from asyncgrpo.generators.service import UNPUBLISHED
    from asyncgrpo.generators.turns import build_sampler
    from asyncgrpo.rewards.build import build_reward
    from asyncgrpo.types import Lease, Sampling

    decode = decoder(tokenizer, keep_special=False)
    sampling = Sampling(
        temperature=config.sampling.eval_temperature,
        max_tokens=config.sampling.max_tokens,
        stop_token_ids=stop_token_ids(tokenizer, config.model.path, config.sampling.stop),
    )
    completions = config.sampling.eval_completions
    engine = build_engine(config, seed=config.run.seed, images=images)
    reward = build_reward(config.reward)
    turns = build_sampler(config, engine, tokenizer)
    await engine.start(UNPUBLISHED)
    slots = asyncio.Semaphore(config.generators.groups_in_flight)

    async def rollouts(index: int) -> "tuple[Rollout, ...]":
        lease = Lease(
            lease_id=f"eval.{index}",
            group_id=f"eval.{index}",
            attempt=0,
            prompt_index=index,
            purpose="eval",
            prompt=prompts[index],
            num_completions=completions,
            sampling=sampling,
            seed=config.run.seed + index * completions,
        )
        async with slots:
            sampler = engine if turns is None else turns.of(lease.prompt)
            return (await GroupInFlight(lease, sampler, reward, decode).generate("eval")).rollouts

    try:
        return await asyncio.gather(*map(rollouts, range(len(prompts))))
    finally:
        await reward.close()
        if turns is not None:
            await turns.close()
        await engine.close()


# -- data check --------------------------------------------------------------------------------------------------------

_SHOWN_ROWS = 10


@data_app.command("check", epilog=options.example("data check train.parquet --model Qwen/Qwen3-8B"))
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help=f"Prompts: {options.PROMPTS}.")],
    overrides: options.SettingsArgument = None,
    model: options.ModelOption = None,
    reward_func: options.RewardFuncOption = None,
) -> None:
    """Check that a data file can be read and scored.

    Print its schema, a prompt as the model sees it, the prompt lengths, and the reward of the ground truth as a completion
    (for code, of the row's solution). Without --model, lengths are in characters. Exits with 1 if a run would refuse the
    file or the reward fails. Map columns with settings, such as data.columns.prompt=question.
    """
    from asyncgrpo.cli.running import REWARD_IMPORT_S
    from asyncgrpo.config.explain import counted
    from asyncgrpo.config.load import load_config
    from asyncgrpo.data.loading import all_too_long, prompt_of
    from asyncgrpo.rewards.build import build_reward
    from asyncgrpo.rewards.rules import reference_of

    functions = {"function": options.one_or_all(reward_func)}
    base = {"model": {"path": model or ""}, "data": {"train": file}, "reward": functions}
    config = load_config(None, overrides or (), base=base)
    model = config.model.path or None
    reward = build_reward(config.reward, import_timeout_s=REWARD_IMPORT_S)
    schema, records = _records(file, model, config.data)
    first, lengths, sources, missing, pictures = None, list[int](), Counter[str](), list[int](), Counter[int]()
    for record, text, token_ids in records:
        first = first or (prompt_of("check/0", record, token_ids), text)
        pictures[len(record.images)] += 1
        if record.answer in (None, ""):
            missing.append(len(lengths))
        lengths.append(len(text if model is None else token_ids))
        sources[record.source] += 1
    assert first is not None, "a source has a row"
    (prompt, prompt_text), last, limit = first, len(lengths) - 1, config.data.max_prompt_tokens
    lengths.sort()
    quantiles = [f"p{p} {lengths[-(-p * last // 100)]:,}" for p in (50, 90, 99)] + [f"max {lengths[-1]:,}"]
    over_long = sum(length > limit for length in lengths)
    dropped = "" if model is None else f"; a run drops {over_long:,} above {limit:,}"
    rows = f": {', '.join(map(str, missing[:_SHOWN_ROWS]))}{', ...' * (len(missing) > _SHOWN_ROWS)}" if missing else ""
    of_images = ", ".join(f"{counted(count, 'row')} with {number}" for number, count in sorted(pictures.items()))
    facts = {
        "file": file,
        "rows": f"{len(lengths):,}",
        "schema": schema,
        "data_source": ", ".join(f"{source or '(none)'} {count:,}" for source, count in sources.most_common()),
        "prompt lengths": f"{'characters' if model is None else 'tokens'}: {', '.join(quantiles)}{dropped}",
        "without answer": counted(len(missing), "row") + rows,
        **({"images": of_images} if pictures.keys() - {0} else {}),
        "reward": reward.about,
        "row 0, prompt": options.shorten(prompt_text, 2000),
        "row 0, answer": options.shorten("" if prompt.answer is None else str(prompt.answer), 600),
    }
    reference, scored_as = reference_of(prompt)
    problem = ""
    try:
        score = asyncio.run(_score(reward, prompt, reference, set(sources), file))
    except AsyncGRPOError as error:
        problem = str(error)
    else:
        failure = f"({score.failure}{f': {score.detail}' if score.detail else ''})"
        value = f"no score {failure}" if score.value is None else f"{score.value:g}"
        note = f"; {score.detail}" if score.value is not None and score.detail else ""
        origin = f": {scored_as}" if scored_as else ""
        facts["row 0, reward"] = f"{value} for `{options.shorten(reference, 60)}` as the completion{origin}{note}"
        if score.failure is not None:
            problem = f"{file}: the ground truth of row 0, as a completion, could not be scored {failure}"
    if model is not None and over_long == len(lengths):
        problem = str(all_too_long(file, len(lengths), lengths[-1], config.data))
    for name, fact in facts.items():
        options.print_fact(name, fact)
    if problem:
        raise AsyncGRPOError(problem)


async def _score(reward: "Reward", prompt: "Prompt", text: str, sources: set[str], file: str) -> "Score":
    """Score a completion, if the reward has a rule for each source of the file."""
    from asyncgrpo.cli.running import check_sources
    from asyncgrpo.rewards.base import score_one

    try:
        check_sources(reward, sources, file)
        return await score_one(reward, prompt, text)
    finally:
        await reward.close()


def _records(
    path: str, model_path: str | None, config: DataConfig
) -> "tuple[str, Iterator[tuple[Record, str, tuple[int, ...]]]]":
    """Return the schema of a file and its records, each with its prompt as text and, with a model, as token ids."""
    from asyncgrpo.data.images import Images, has_vision
    from asyncgrpo.data.loading import open_source, rendered
    from asyncgrpo.data.tokenizer import load_tokenizer, with_system

    schema, rows = open_source(path, config)
    records = (schema.to_record(row, index) for index, row in enumerate(rows))
    if model_path is not None:
        tokenizer = load_tokenizer(model_path, config.chat_template_kwargs)
        images = Images(model_path, folder=None, max_pixels=config.max_pixels) if has_vision(model_path) else None
        return schema.name, (
            (record, *rendered(path, index, record, tokenizer, config, images)) for index, record in enumerate(records)
        )
    turns = ((record, with_system(record.messages, config.system_prompt)) for record in records)
    return schema.name, ((record, "\n".join(one["content"] for one in of_it), ()) for record, of_it in turns)
