"""Every setting of asyncgrpo, as frozen structs.

`config/load.py` makes them once from YAML files and `key=value`; nothing changes them after that. Lengths are in tokens,
times in seconds, lag in optimizer steps. `asyncgrpo config explain KEY` prints the description of a key.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from asyncgrpo.cores import cores

CRITIC = "gae"
"""The value of `algorithm.advantage` that trains a critic."""
PAIRWISE = "pairwise"
"""The value of `algorithm.loss` that learns from pairs of completions."""


def _surrogates() -> list[str]:
    """Names of the functions under `@surrogate` in algorithms/surrogates.py, read from its text: to import it takes torch."""
    text = (Path(__file__).parents[1] / "algorithms" / "surrogates.py").read_text(encoding="utf-8")
    return re.findall(r"^@surrogate\(.*\)\ndef (\w+)", text, re.MULTILINE)


AtLeastOne = Annotated[int, Meta(ge=1)]
AtLeastTwo = Annotated[int, Meta(ge=2)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: frozen (each says so again, for type checkers), by keyword, without unknown keys."""


class RunConfig(Section, frozen=True):
    """How long the run is, what it writes and when."""

    out: Annotated[str, Meta(description="run folder; every output goes below it")] = "runs/run"
    seed: Annotated[int, Meta(ge=0, description="seeds the prompt order, the sampling and what is initialised")] = 0
    steps: Annotated[AtLeastOne | None, Meta(description="optimizer steps to run; none: until `epochs` are done")] = (
        None
    )
    epochs: Annotated[AtLeastOne | None, Meta(description="passes over the training file; none: without an end")] = 1
    checkpoint_every: Annotated[int, Meta(ge=1, description="steps between two checkpoints")] = 20
    keep_checkpoints: Annotated[int, Meta(ge=1, description="newest checkpoints kept")] = 2
    eval_every: Annotated[int, Meta(ge=1, description="steps between two evaluations of data.eval")] = 5
    loggers: Annotated[
        tuple[Literal["wandb", "tensorboard", "trackio", "mlflow"], ...],
        Meta(description="loggers beside metrics.jsonl and the console"),
    ] = ()
    samples_every: Annotated[int, Meta(ge=1, description="steps between two Parquet files of samples")] = 1
    keep_samples: Annotated[AtLeastOne | None, Meta(description="newest files of samples kept; none: all")] = 10_000
    keep_samples_gb: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="GiB of samples kept, the newest; none: all")
    ] = 20.0
    keep_samples_days: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="days for which samples are kept; none: for ever")
    ] = None


class LoraConfig(Section, frozen=True):
    """Low-rank adapters. Rank 0: all weights are trained."""

    rank: Annotated[int, Meta(ge=0, description="rank of the adapters; 0 turns LoRA off")] = 0
    alpha: Annotated[float, Meta(gt=0, description="scale of the adapters, divided by the rank")] = 16.0
    targets: Annotated[tuple[str, ...], Meta(description="names of the linear layers; none: every linear layer")] = ()


class ModelConfig(Section, frozen=True):
    """Which model is trained."""

    path: Annotated[str, Meta(description="folder of a Hugging Face model, or its hub id")]
    dtype: Annotated[
        Literal["bfloat16", "float32"], Meta(description="of the forward pass, the published weights and the engines")
    ] = "bfloat16"
    lora: LoraConfig = LoraConfig()


def is_file(source: str) -> bool:
    """Whether an entry of `data.train` or `data.eval` names a file, and not what a library makes or loads."""
    return not source.startswith(("reasoning-gym:", "hf:"))


def _stem(source: str) -> str:
    """A short name: that of the file without its ending, or of what `hf:` or `reasoning-gym:` names."""
    return Path(source).stem if is_file(source) else Path(source.partition("?")[0].partition(":")[2]).name


class DataConfig(Section, frozen=True):
    """Which prompts are used, and how they are read."""

    train: Annotated[
        str | tuple[str, ...],
        Meta(
            description="training prompts: a Parquet, JSONL or JSON file, reasoning-gym:NAME or hf:ID; or a list of them"
        ),
    ]
    weights: Annotated[
        tuple[Annotated[float, Meta(gt=0, le=1e6)], ...] | None,
        Meta(description="share of each entry of `train` in the prompts; none: as many as it has"),
    ] = None
    eval: Annotated[
        str | tuple[str, ...] | dict[str, str] | None,
        Meta(
            description="held-out prompts, as one entry of `train`; a list of them, or a mapping of names to them; none: no "
            "evaluation"
        ),
    ] = None
    columns: Annotated[
        dict[str, str],
        Meta(description="our field to the file's column, where no known schema fits: prompt, answer, source"),
    ] = {}
    max_prompt_tokens: Annotated[int, Meta(ge=1, description="longer prompts are dropped, with a count")] = 512
    curriculum: Annotated[
        Literal["none", "success"],
        Meta(
            description="success: after the first epoch prompts that were all right come every second time, and those that "
            "were right in part up to twice"
        ),
    ] = "none"
    shuffle: Annotated[bool, Meta(description="a new seeded order every epoch; false: the file's order")] = True
    system_prompt: Annotated[str | None, Meta(description="put before every prompt that has no system turn")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Meta(description="further arguments of the model's chat template, such as enable_thinking: false"),
    ] = {}
    eval_rows: Annotated[AtLeastOne | None, Meta(description="rows of each held-out file to use; none: all")] = None
    cache: Annotated[
        str | None,
        Meta(description="folder that keeps tokenised prompts for other runs too; none: `prompts/` of the run"),
    ] = None

    @property
    def sources(self) -> tuple[str, ...]:
        """The entries of `train`."""
        return (self.train,) if isinstance(self.train, str) else self.train

    @property
    def suites(self) -> dict[str, str]:
        """The held-out sources by the names of their suites. One alone is `eval`; several have the names of their files.

        Where several files have one name, as in `gsm8k/test.parquet` and `math/test.parquet`, that of the folder is put
        before it.
        """
        if self.eval is None or isinstance(self.eval, str):
            return {} if self.eval is None else {"eval": self.eval}
        if isinstance(self.eval, dict):
            return self.eval
        stems = Counter(map(_stem, self.eval))
        names = [
            stem if stems[stem := _stem(file)] == 1 else f"{Path(file).absolute().parent.name}.{stem}"
            for file in self.eval
        ]
        return dict(zip(names, self.eval, strict=True))


class CodeRewardConfig(Section, frozen=True):
    """How the built-in reward for code runs and scores it."""

    url: Annotated[
        str | None,
        Meta(description="Sandbox Fusion service that runs it; none: bubblewrap, in the reward processes, Python only"),
    ] = None
    max_concurrent: Annotated[
        int, Meta(ge=1, description="completions that each generator has in Sandbox Fusion at once")
    ] = 64
    timeout_s: Annotated[float, Meta(gt=0, description="deadline of one test, seconds; a late test has failed")] = 5.0
    memory_mb: Annotated[int, Meta(ge=64, description="memory of a process of the code, MiB")] = 1024
    score: Annotated[
        Literal["share", "all"], Meta(description="the share of tests that pass, or 1 only if all pass")
    ] = "share"
    unsafe: Annotated[
        bool, Meta(description="where bubblewrap cannot run, run code as your user, with your files and network")
    ] = False


class JudgeConfig(Section, frozen=True):
    """The model behind an OpenAI-compatible URL that the reward `judge` asks."""

    url: Annotated[
        str | None, Meta(description="its address, such as http://host:30000/v1; the reward judge needs it")
    ] = None
    template: Annotated[
        str | None,
        Meta(
            description="file, or text, with {completion} and, if wanted, {prompt} and {answer}; none: the built-in one"
        ),
    ] = None
    pattern: Annotated[
        str | None,
        Meta(
            description="regular expression for the number in the reply, the last match counts; none: `Score: 7` or a bare 7"
        ),
    ] = None
    scale: Annotated[
        float, Meta(gt=0, description="the best number that it gives: the score is the number over this")
    ] = 10.0
    max_concurrent: Annotated[int, Meta(ge=1, description="requests that each generator has there at once")] = 64
    timeout_s: Annotated[float, Meta(gt=0, description="deadline of one judgement, all tries together, seconds")] = 60.0
    api_key_env: Annotated[
        str | None, Meta(description="environment variable that holds the key it asks for; none: it asks for none")
    ] = None
    extra: Annotated[
        dict[str, Any],
        Meta(
            description="fields of each request, such as model (default), max_tokens (1024, thoughts included) and temperature "
            "(0); null leaves one out"
        ),
    ] = {}

    @property
    def file(self) -> str | None:
        """The file of the template; None: it is a text, or the built-in one."""
        return None if self.template is None or "{completion}" in self.template else self.template


class RewardModelConfig(Section, frozen=True):
    """The transformers model with one output for a sequence that the reward `model` asks."""

    path: Annotated[str | None, Meta(description="its folder or hub id; the reward model needs it")] = None
    url: Annotated[
        str | None,
        Meta(
            description="of the SGLang server that has it, such as http://host:30000, for all generators; none: each generator "
            "loads it"
        ),
    ] = None
    device: Annotated[
        str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N, of the GPUs that a generator sees")
    ] = "cpu"
    timeout_s: Annotated[float, Meta(gt=0, description="deadline of a group, seconds")] = 60.0


class RewardConfig(Section, frozen=True):
    """How completions are scored."""

    function: Annotated[
        str | tuple[str, ...] | None,
        Meta(
            description="file with compute_score, FILE:NAME, or the name of a built-in reward; or a list of them; none: rules by "
            "data_source"
        ),
    ] = None
    weights: Annotated[
        tuple[Annotated[float, Meta(ge=-1e6, le=1e6)], ...] | None,
        Meta(description="of the rewards that function lists, in its order; none: 1 each"),
    ] = None
    combine: Annotated[
        Literal["sum", "first", "gate"],
        Meta(
            description="of several rewards the weighted sum; the first that applies; or the sum if the first is above "
            "0, else the first alone"
        ),
    ] = "sum"
    kwargs: Annotated[
        dict[str, Any], Meta(description="further arguments of your functions, by name; each gets those that it takes")
    ] = {}
    format_score: Annotated[
        float, Meta(ge=-1e6, le=1e6, description="gsm8k: score of a wrong answer in the right format")
    ] = 0.1
    qa_score: Annotated[
        Literal["match", "f1"], Meta(description="qa, trivia: 1 for a match, or the F1 of the words")
    ] = "match"
    timeout_s: Annotated[float, Meta(gt=0, description="deadline of one call, seconds")] = 10.0
    workers: Annotated[
        Literal["auto"] | AtLeastOne,
        Meta(
            description="reward processes beside each generator, for each function of your own, for maths and for code; "
            "auto: as many as the load needs and no more than there are cores",
        ),
    ] = 1
    success: Annotated[
        float,
        Meta(
            description="reward from which a completion is right, for pass@k, maj@k, data.curriculum and the groups that "
            "count as solved (learner.full_lr_signal, algorithm.entropy_coef)"
        ),
    ] = 1.0
    code: CodeRewardConfig = CodeRewardConfig()
    judge: JudgeConfig = JudgeConfig()
    model: RewardModelConfig = RewardModelConfig()

    @property
    def at_once(self) -> int:
        """The most calls that a generator makes at the same time."""
        return self._at_once[0]

    @property
    def at_once_key(self) -> str:
        """The key that sets `at_once`."""
        return self._at_once[1]

    @property
    def _at_once(self) -> tuple[int, str]:
        there = [(cores() if self.workers == "auto" else self.workers, "reward.workers")]
        if self.code.url is not None:
            there.append((self.code.max_concurrent, "reward.code.max_concurrent"))
        if "judge" in self.functions:
            there.append((self.judge.max_concurrent, "reward.judge.max_concurrent"))
        return max(there, key=lambda one: one[0])

    @property
    def functions(self) -> tuple[str, ...]:
        """What scores, as a list of names of built-in rewards and files of functions."""
        if self.function is None:
            return ("data_source",)
        return (self.function,) if isinstance(self.function, str) else self.function

    @property
    def files(self) -> tuple[str, ...]:
        """Those of `functions` that are a `FILE` or `FILE:NAME`; a plain word is the name of a built-in reward."""
        return tuple(spec for spec in self.functions if not spec.isidentifier())


OPENENV = "openenv:"
"""How the name of an environment begins that a server of OpenEnv holds; its URL follows."""


class EnvironmentConfig(Section, frozen=True):
    """What replies to the turns of a completion: a tool, a game, a simulated user."""

    name: Annotated[
        str | None,
        Meta(
            description="calculator, guess, a file with a class Environment (FILE, FILE:CLASS) that has reset and step, or "
            "openenv:http://HOST:PORT; none: a completion is one turn"
        ),
    ] = None
    tools: Annotated[
        tuple[str, ...],
        Meta(description="functions that the model may call in its turns: calculator, FILE:FUNCTION; instead of name"),
    ] = ()
    max_turns: Annotated[int, Meta(ge=1, description="turns of the model in a completion, at most")] = 8
    timeout_s: Annotated[
        float,
        Meta(gt=0, description="deadline of one reset or step, seconds; a whole call of an agent has 20 times as long"),
    ] = 30.0
    processes: Annotated[
        int, Meta(ge=1, description="processes beside each generator in which an environment of your own runs")
    ] = 1
    agent: Annotated[
        str | None,
        Meta(
            description="a function that calls the model through an OpenAI-compatible URL and returns a reward: FILE, "
            "FILE:FUNCTION (run); instead of name and tools"
        ),
    ] = None

    @property
    def files(self) -> tuple[str, ...]:
        """What is a `FILE`, `FILE:CLASS` or `FILE:FUNCTION`; a plain word is the name of a built-in."""
        specs = (self.name or "", *self.tools, self.agent or "")
        return tuple(spec for spec in specs if spec and not spec.isidentifier() and spec != f"{OPENENV}{self.url}")

    @property
    def url(self) -> str | None:
        """Where an OpenEnv server listens, if `name` says that."""
        is_url = self.name is not None and self.name.startswith(OPENENV)
        return str(self.name).removeprefix(OPENENV) if is_url else None


class SamplingConfig(Section, frozen=True):
    """How completions are sampled while training; evaluation samples with `eval_temperature`."""

    temperature: Annotated[float, Meta(gt=0, description="softmax temperature")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="nucleus; 1 is off")] = 1.0
    top_k: Annotated[int, Meta(ge=-1, description="tokens kept; -1 is off")] = -1
    max_tokens: Annotated[int, Meta(ge=1, description="longest completion, tokens")] = 1024
    stop: Annotated[
        tuple[str, ...], Meta(description="single-token strings that end a completion, beside the model's own")
    ] = ()
    eval_temperature: Annotated[float, Meta(ge=0, description="temperature of evaluation; 0 is greedy")] = 0.0
    eval_completions: Annotated[
        int, Meta(ge=1, le=128, description="completions to each held-out prompt; above 1 for pass@k and maj@k")
    ] = 1


class CorrectionConfig(Section, frozen=True):
    """One off-policy correction. Weights of several multiply, and a token is trained only if all of them keep it."""

    kind: Annotated[
        Literal["importance", "veto", "opsm", "m2po", "divergence"],
        Meta(description="importance: weight tokens by proximal / behaviour policy; the others only reject"),
    ] = "importance"
    level: Annotated[
        Literal["token", "sequence", "geometric"],
        Meta(description="whose ratio: the token's, the completion's product, or its geometric mean"),
    ] = "token"
    action: Annotated[
        Literal["truncate", "clip", "mask", "reject"],
        Meta(description="what happens outside the ratios: mask gives weight 0, reject keeps weight 1 inside"),
    ] = "truncate"
    low_ratio: Annotated[float | None, Meta(description="importance, veto: lower bound of the ratio")] = None
    high_ratio: Annotated[float | None, Meta(description="importance, veto: upper bound of the ratio")] = None
    max_nats: Annotated[
        float | None, Meta(description="divergence: largest estimate that is kept; opsm: largest mean log-ratio")
    ] = None
    max_mean_square: Annotated[
        float | None, Meta(description="m2po: largest mean square of the log-ratios, nats²; none: 0.04")
    ] = None
    estimator: Annotated[Literal["k2", "k3"], Meta(description="divergence: which estimator is bounded")] = "k3"


class CriticConfig(Section, frozen=True):
    """A value head on the policy's last hidden state, for `algorithm.advantage: gae`."""

    gamma: Annotated[float, Meta(gt=0, le=1, description="discount of rewards, per token")] = 1.0
    lam: Annotated[float, Meta(ge=0, le=1, description="lambda of generalised advantage estimation")] = 0.95
    value_coef: Annotated[float, Meta(gt=0, description="weight of the value loss")] = 0.5
    value_clip: Annotated[
        float | None, Meta(description="how far a value may move before its loss is clipped; none: no clipping")
    ] = 0.5
    lr_scale: Annotated[
        float, Meta(gt=0, description="learning rate of the value head, as a multiple of learner.lr")
    ] = 10.0


class AlgorithmConfig(Section, frozen=True):
    """The objective. `configs/algorithms/` has a file for each paper; docs/algorithms.md has the formulas."""

    group_size: Annotated[
        int, Meta(ge=2, description="completions to each prompt; GRPO compares them, so at least 2")
    ] = 8
    min_completions: Annotated[
        AtLeastTwo | None,
        Meta(
            description="a group that lost completions to failures or to its deadline is trained if it has so many; "
            "none: group_size",
        ),
    ] = None
    filter_zero_signal: Annotated[
        bool,
        Meta(
            description="groups whose rewards are all equal are not trained; each is replaced by exactly one other prompt"
        ),
    ] = False
    advantage: Annotated[
        Literal[
            "grpo",
            "dr_grpo",
            "rloo",
            "lite",
            "max_rl",
            "opo",
            "gpg",
            "pass_at_k",
            "reinforce_plus_plus_baseline",
            "remax",
            "gae",
        ],
        Meta(
            description="from rewards to advantages; gae uses a learned critic, the others compare a group's completions"
        ),
    ] = "grpo"
    loss: Annotated[
        Literal[(*_surrogates(), PAIRWISE)],  # type: ignore[valid-type]  # its values are known once the file is read
        Meta(description="the surrogate that is maximised"),
    ] = "ppo_clip"
    loss_args: Annotated[
        dict[str, float | str | bool | None],
        Meta(
            description="arguments of the loss, as its function names them; a later file that sets loss starts afresh"
        ),
    ] = {}
    anchor: Annotated[
        Literal["proximal", "behaviour", "interpolated"],
        Meta(
            description="centre of the trust region: weights at the start of the step, those that sampled, or between"
        ),
    ] = "proximal"
    corrections: Annotated[
        tuple[CorrectionConfig, ...],
        Meta(description="off-policy corrections of older tokens, all applied (docs/algorithms.md)"),
    ] = (CorrectionConfig(high_ratio=2.0),)
    aggregation: Annotated[
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"],
        Meta(description="how token losses are averaged over the step"),
    ] = "token-mean"
    kl_coef: Annotated[
        float, Meta(ge=0, description="weight of the KL to the initial model; 0: no reference model")
    ] = 0.0
    kl_kind: Annotated[
        Literal["k1", "abs", "k2", "k3", "low_var_kl", "full", "k1+", "abs+", "k3+", "low_var_kl+", "k3_reweighted"],
        Meta(description="estimator of that KL; with + its value, and the gradient of k2"),
    ] = "low_var_kl"
    kl_in: Annotated[Literal["loss", "reward"], Meta(description="where the KL is charged")] = "loss"
    kl_target: Annotated[
        float | None, Meta(description="kl_coef is steered towards this mean KL, nats; none: it stays")
    ] = None
    kl_horizon: Annotated[int, Meta(ge=1, description="completions over which kl_coef is steered")] = 10_000
    behaviour_kl_coef: Annotated[
        float, Meta(ge=0, description="weight of a k2 penalty to the policy that sampled the tokens")
    ] = 0.0
    entropy_coef: Annotated[
        float,
        Meta(ge=0, description="weight of an entropy bonus; groups that are hopeless lower it (docs/stability.md)"),
    ] = 0.0
    truncated: Annotated[
        Literal["keep", "mask", "zero"],
        Meta(
            description="completions cut at sampling.max_tokens: train them, only compare with them, or reward them 0"
        ),
    ] = "keep"
    overlong_buffer: Annotated[
        int, Meta(ge=0, description="tokens before sampling.max_tokens in which a length penalty grows; 0: none")
    ] = 0
    overlong_factor: Annotated[float, Meta(ge=0, description="that penalty at sampling.max_tokens")] = 1.0
    critic: CriticConfig = CriticConfig()


class AutoLagConfig(Section, frozen=True):
    """How `buffer.max_lag: auto` chooses the bound."""

    min: Annotated[int, Meta(ge=0, description="smallest bound")] = 1
    max: Annotated[int, Meta(ge=0, description="largest bound")] = 32
    sample_share: Annotated[
        float,
        Meta(gt=0, lt=1, description="effective sample share of a step below which the bound is lowered"),
    ] = 0.5


class BufferConfig(Section, frozen=True):
    """How far generators may run ahead of the learner."""

    prompts_per_step: Annotated[int, Meta(ge=1, description="groups trained by one optimizer step")] = 64
    max_lag: Annotated[
        Annotated[int, Meta(ge=0)] | Literal["auto"],
        Meta(
            description="optimizer steps from a group's oldest token to the step that trains it; 0 is synchronous; "
            "auto: as many as the importance ratios bear"
        ),
    ] = 4
    auto_lag: AutoLagConfig = AutoLagConfig()
    policy: Annotated[
        Literal["wait", "window", "drop", "mask", "train"],
        Meta(
            description="too old for max_lag: wait for it, wait in prompt order, drop the group, mask tokens, or train all"
        ),
    ] = "wait"
    admission: Annotated[
        Literal["eager", "fresh"],
        Meta(description="when a group begins: eager, as soon as there is a slot; fresh, just in time for its batch"),
    ] = "fresh"
    bias_threshold: Annotated[
        float,
        Meta(ge=0, le=1, description="distance of trained from generated groups (0 to 1) that is warned of"),
    ] = 0.1
    lease_timeout_s: Annotated[float, Meta(gt=0, description="a group not finished by then is leased again")] = 1800.0
    max_attempts: Annotated[int, Meta(ge=1, description="leases of one prompt before it is dropped, with a count")] = 3
    straggler_factor: Annotated[
        float,
        Meta(
            ge=0,
            description="a lease's deadline as a multiple of the median time of a group, at most lease_timeout_s; "
            "0: always lease_timeout_s",
        ),
    ] = 0.0
    durability: Annotated[
        Literal["memory", "written", "fsync_interval", "fsync_each"],
        Meta(description="where a group is before it is acknowledged; memory: no journal (docs/reliability.md)"),
    ] = "fsync_interval"
    after_resume: Annotated[
        Literal["keep", "drop"],
        Meta(description="groups of an earlier start that no step has trained: train those of weights still there"),
    ] = "keep"

    keep_journal: Annotated[
        bool,
        Meta(description="trained groups stay in the journal, so that `asyncgrpo replay` can train them again"),
    ] = False

    @property
    def largest_max_lag(self) -> int:
        """`max_lag`, or the largest bound that `auto` may choose."""
        return self.auto_lag.max if self.max_lag == "auto" else self.max_lag

    @property
    def num_slots(self) -> int:
        """Groups that may be in flight or ready at once, at most."""
        return (self.largest_max_lag + 1) * self.prompts_per_step


class GeneratorConfig(Section, frozen=True):
    """The inference side."""

    engine: Annotated[Literal["sglang", "torch", "fake"], Meta(description="inference engine")] = "sglang"
    count: Annotated[int, Meta(ge=1, description="generators; each owns one engine")] = 1
    min: Annotated[int, Meta(ge=1, description="fewest generators that scaling and the autopilot leave")] = 1
    max: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="most generators that they may have; null: 64"),
    ] = None
    autopilot: Annotated[bool, Meta(description="scale generators within min and max as the advice says")] = False
    gpus_each: Annotated[int, Meta(ge=0, description="GPUs of one engine (tensor parallel); 0: CPU")] = 1
    groups_in_flight: Annotated[int, Meta(ge=1, description="groups that one generator works on at once")] = 32
    memory_fraction: Annotated[float, Meta(gt=0, lt=1, description="share of GPU memory for weights and KV cache")] = (
        0.85
    )
    keep_kv: Annotated[
        bool,
        Meta(description="a weight change keeps the keys and values of completions in flight; false recomputes them"),
    ] = True
    prefix_cache: Annotated[
        bool, Meta(description="share prompt prefixes between completions (never across policy versions)")
    ] = True
    extra_completions: Annotated[
        int, Meta(ge=0, description="completions launched beyond group_size, in reserve for some that fail or are late")
    ] = 0
    completion_retries: Annotated[
        int, Meta(ge=0, description="times that one completion is sampled again after its request or its reward failed")
    ] = 0
    extra: Annotated[dict[str, Any], Meta(description="further arguments of sglang.Engine, as they are")] = {}
    ray_resources: Annotated[
        dict[str, float], Meta(description="custom resources of Ray that one generator takes, to choose its nodes")
    ] = {}
    restarts: Annotated[
        int, Meta(ge=0, description="restarts of one generator within an hour before the run gives up")
    ] = 10


class LearnerConfig(Section, frozen=True):
    """The training side."""

    ranks: Annotated[int, Meta(ge=1, description="learner processes (FSDP2 shards the model over them)")] = 1
    device: Annotated[Literal["auto", "cuda", "cpu"], Meta(description="auto: cuda where there is a GPU")] = "auto"
    lr: Annotated[float, Meta(gt=0, description="peak learning rate of AdamW")] = 1e-6
    warmup_steps: Annotated[int, Meta(ge=0, description="optimizer updates of linear warm-up from 0")] = 0
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Meta(description="how the learning rate falls after its warm-up, over what is left of run.steps"),
    ] = "constant"
    lr_min_ratio: Annotated[
        float, Meta(ge=0, le=1, description="where linear and cosine end, as a multiple of learner.lr")
    ] = 0.0
    betas: Annotated[tuple[float, float], Meta(description="AdamW moments")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW weight decay")] = 0.01
    grad_clip: Annotated[float, Meta(gt=0, description="largest gradient norm")] = 1.0
    minibatches: Annotated[
        int, Meta(ge=1, description="optimizer updates of one pass over a step's groups, each group in one of them")
    ] = 1
    ppo_epochs: Annotated[
        int, Meta(ge=1, description="passes over the groups of one step, each of learner.minibatches updates")
    ] = 1
    spike_factor: Annotated[
        float | None,
        Meta(
            description="a gradient norm above this multiple of both the recent median and grad_clip skips the update; "
            "none: only one that is not finite does"
        ),
    ] = 1000.0
    max_skips: Annotated[int, Meta(ge=1, description="skipped updates in a row that end the run with an error")] = 20
    full_lr_signal: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="where so many of the groups that are solved or have a signal have one, the learning rate is whole; "
            "below, it falls with the root of the share; 0: always whole (docs/stability.md)",
        ),
    ] = 1.0
    ess_lr: Annotated[
        bool, Meta(description="scale the learning rate by the root of the effective sample share (VCPO)")
    ] = False
    tokens_per_microbatch: Annotated[
        int, Meta(ge=1, description="packed tokens of one forward and backward on one rank")
    ] = 16384
    share_prompts: Annotated[
        bool, Meta(description="compute a prompt once for the completions to it that share a microbatch")
    ] = True
    compile: Annotated[
        bool | None,
        Meta(
            description="torch.compile of the decoder layers and the head's loss, from the second step of a start on; none: on "
            "a CPU, where the run is long and the model large enough to gain by it"
        ),
    ] = None
    activation_checkpointing: Annotated[
        bool | None,
        Meta(
            description="recompute activations in the backward pass; none: on a GPU that cannot hold them (docs/memory.md)"
        ),
    ] = None
    offload_reference: Annotated[bool, Meta(description="keep the reference model on the CPU between uses")] = True
    offload_optimizer: Annotated[
        bool,
        Meta(description="keep the optimizer's moments on the CPU; an update has 1 GiB of them on the GPU at a time"),
    ] = False
    ray_resources: Annotated[
        dict[str, float], Meta(description="custom resources of Ray that one rank takes, to choose its nodes")
    ] = {}
    attention: Annotated[
        Literal["auto", "sdpa", "varlen", "flash_attention_2"],
        Meta(
            description="kernel for packed sequences; auto: flash_attn where installed, else torch's own for the device"
        ),
    ] = "auto"

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates of one step."""
        return self.minibatches * self.ppo_epochs


class WeightsConfig(Section, frozen=True):
    """How new weights reach the generators."""

    backend: Annotated[
        Literal["auto", "nccl", "gloo", "shared_memory"],
        Meta(
            description="auto: generators copy from shared memory on the learner's machine; elsewhere nccl between GPUs, "
            "else gloo. nccl, gloo: as if all were elsewhere"
        ),
    ] = "auto"
    deltas: Annotated[
        bool,
        Meta(
            description="elsewhere: send what changed, where it is little, for one more copy of the weights in the learner's "
            "host memory; false: always send all"
        ),
    ] = True
    bucket_mb: Annotated[int, Meta(ge=1, description="MiB sent at once")] = 64
    check_every: Annotated[
        int,
        Meta(ge=0, description="every so many publications learner and engines score the same tokens; 0: never"),
    ] = 1
    check_limit: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="largest mean difference of these log-probs that is rounding, nats; none: by the first publication"
        ),
    ] = None
    timeout_s: Annotated[float, Meta(gt=0, description="deadline of each wait in one publication, seconds")] = 120.0


class ClusterConfig(Section, frozen=True):
    """Where things run and how they talk."""

    bind: Annotated[
        str,
        Meta(description="address our sockets bind to; several nodes need one that all of them reach, such as 0.0.0.0"),
    ] = "127.0.0.1"
    ray_address: Annotated[
        str | None, Meta(description="of a running Ray cluster, or `auto`; none: start one here")
    ] = None
    share_gpu: Annotated[bool, Meta(description="learner and generator share one GPU")] = False
    gpu_memory_gb: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="memory of one GPU, GiB; none: as found here, and 80 where none is found"),
    ] = None
    stall_timeout_s: Annotated[
        float, Meta(gt=0, description="nothing trained for so long: stop with an error, seconds")
    ] = 3600.0
    silent_timeout_s: Annotated[
        float, Meta(gt=0, description="a process or engine that gives no sign of life for so long is replaced, seconds")
    ] = 120.0
    restarts: Annotated[
        int, Meta(ge=0, description="restarts of buffer and learner within an hour before the run gives up")
    ] = 10


class ControlConfig(Section, frozen=True):
    """How a run is looked at and steered while it goes on."""

    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="of the admin API and its page; 0: any that is free, null: neither"),
    ] = 0
    bind: Annotated[
        str, Meta(description="address that they listen at; their token and pages go over it unencrypted")
    ] = "127.0.0.1"


class Config(Section, frozen=True):
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig = RunConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    buffer: BufferConfig = BufferConfig()
    generators: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()
    control: ControlConfig = ControlConfig()
