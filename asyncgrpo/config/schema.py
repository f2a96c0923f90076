"""Every setting of asyncgrpo, as frozen structs.

`config/load.py` makes them once from YAML files and `key=value`; nothing changes them after that. Lengths are in tokens,
times in seconds, lag in optimizer steps. `asyncgrpo config explain KEY` prints the docstring of a key.
"""

import re
from collections import Counter
from collections.abc import Mapping
from math import lcm
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from asyncgrpo.host import cores

CRITIC = "gae"
"""Value of `algorithm.advantage` that trains a critic."""
PAIRWISE = "pairwise"
"""Value of `algorithm.loss` that learns from pairs of completions."""


def _functions(file: str, decorator: str) -> list[str]:
    """Return the names of the functions under a decorator in a file of `algorithms/`. Importing it would import torch."""
    text = (Path(__file__).parents[1] / "algorithms" / file).read_text(encoding="utf-8")
    return re.findall(rf"^@{decorator}\b.*\ndef (\w+)", text, re.MULTILINE)


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
AtLeastTwo = Annotated[int, Meta(ge=2)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Beta = Annotated[float, Meta(ge=0, lt=1)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: frozen (repeated in each, for type checkers), keyword-only, without unknown keys."""


class RunConfig(Section, frozen=True):
    """Length, seed and outputs of the run."""

    out: str = "runs/run"
    """Run folder, which holds every output of the run."""
    seed: NonNegativeInt = 0
    """Seed of the prompt order, of sampling and of initialization."""
    steps: PositiveInt | None = None
    """Optimizer steps to run; null: until run.epochs are done."""
    epochs: PositiveInt | None = 1
    """Passes over the training prompts; null: no limit."""
    checkpoint_every: PositiveInt = 20
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    eval_every: PositiveInt = 5
    """Steps between evaluations of data.eval."""
    loggers: tuple[Literal["wandb", "tensorboard", "trackio", "mlflow"], ...] = ()
    """Loggers in addition to metrics.jsonl and the console."""
    samples_every: PositiveInt = 1
    """Steps between Parquet files of samples."""
    keep_samples: PositiveInt | None = 2_000
    """Number of newest sample files to keep; null: all."""


class LoraConfig(Section, frozen=True):
    """Low-rank adapters (LoRA)."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: PositiveFloat = 16.0
    """Scale of the adapters before division by the rank."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers to adapt; empty: all linear layers."""


class ModelConfig(Section, frozen=True):
    """Model to train."""

    path: str
    """Folder or hub id of a Hugging Face model."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the forward pass, of published weights and of the engines."""
    lora: LoraConfig = LoraConfig()
    routing_replay: Literal["off", "rollout"] = "off"
    """Experts of a mixture that the learner takes for each token; rollout: those that the engine took when it sampled."""


def is_file(source: str) -> bool:
    """True if an entry of `data.train` or `data.eval` names a file, not a source of a library."""
    return not source.startswith(("reasoning-gym:", "hf:"))


def _stem(source: str) -> str:
    """Return a short name: of the file without its suffix, or of the data set after `hf:` or `reasoning-gym:`."""
    return Path(source).stem if is_file(source) else Path(source.partition("?")[0].partition(":")[2]).name


class DataConfig(Section, frozen=True):
    """Prompts and their preparation."""

    train: str | tuple[str, ...]
    """Training prompts: a Parquet, JSONL or JSON file, reasoning-gym:NAME, hf:ID, or a list of these."""
    weights: tuple[Annotated[float, Meta(gt=0, le=1e6)], ...] | None = None
    """Share of each entry of data.train in the prompts; null: proportional to its rows."""
    eval: str | tuple[str, ...] | dict[str, str] | None = None
    """Held-out prompts: a source as in data.train, a list, or a mapping from names to sources; null: no evaluation."""
    columns: dict[str, str] = {}
    """Mapping from our fields (prompt, answer, source) to columns of the file; for files of no known schema."""
    image_column: str | None = "images"
    """Column with the images of a prompt; null: the column is like any other."""
    image_root: str | None = None
    """Folder of relative paths of images; null: the folder of the data file."""
    max_pixels: PositiveInt | None = None
    """Most pixels of an image, which is made smaller if it has more; null: the limit of the model's processor."""
    max_prompt_tokens: PositiveInt = 512
    """Longest prompt, tokens; longer prompts are dropped and counted."""
    curriculum: Literal["none", "success"] = "none"
    """`success`: from the second epoch on, repeat solved prompts every second epoch and partly solved ones up to twice
    per epoch."""
    shuffle: bool = True
    """Shuffle prompts anew in every epoch; false: keep the order of the file."""
    system_prompt: str | None = None
    """System turn for prompts that have none."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments of the model's chat template, such as enable_thinking: false."""
    eval_rows: PositiveInt | None = None
    """Rows to use of each held-out source; null: all."""

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.train,) if isinstance(self.train, str) else self.train

    @property
    def suites(self) -> dict[str, str]:
        """Held-out sources by the name of their suite: `eval` for a single one, else the name of the file.

        Equal names, as of `gsm8k/test.parquet` and `math/test.parquet`, are prefixed with the name of the folder.
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
    """Built-in reward for code."""

    url: str | None = None
    """URL of a Sandbox Fusion service; null: run Python code in bubblewrap, in the reward processes."""
    max_concurrent: PositiveInt = 64
    """Completions in Sandbox Fusion at once, per generator."""
    timeout_s: PositiveFloat = 5.0
    """Deadline of one test, seconds; a test that misses it fails."""
    memory_mb: Annotated[int, Meta(ge=64)] = 1024
    """Memory limit of a process that runs the code, MiB."""
    score: Literal["share", "all"] = "share"
    """`share`: fraction of tests passed; `all`: 1 only if every test passes."""
    unsafe: bool = False
    """Without bubblewrap, run code as your user, with access to your files and network."""


class JudgeConfig(Section, frozen=True):
    """Judge model behind an OpenAI-compatible URL, for the reward `judge`."""

    url: str | None = None
    """Base URL of the judge, such as http://host:30000/v1; required by the reward `judge`."""
    template: str | None = None
    """Prompt template, or a file of it, with {completion} and optionally {prompt} and {answer}; null: built-in."""
    pattern: str | None = None
    """Regular expression of the number in the reply, of which the last match counts; null: `Score: 7` or a bare 7."""
    scale: PositiveFloat = 10.0
    """Highest number that the judge gives; the reward is the number divided by it."""
    max_concurrent: PositiveInt = 64
    """Requests to the judge at once, per generator."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one judgement with all of its retries, seconds."""
    api_key_env: str | None = None
    """Environment variable with the API key; null: no key."""
    extra: dict[str, Any] = {}
    """Fields of each request, such as model (default), max_tokens (1024) and temperature (0); null removes a field."""

    @property
    def file(self) -> str | None:
        """File of the template; None: `template` is text or the built-in one."""
        return None if self.template is None or "{completion}" in self.template else self.template


class RewardModelConfig(Section, frozen=True):
    """Sequence classifier of transformers with one output, for the reward `model`."""

    path: str | None = None
    """Folder or hub id of the reward model; required by the reward `model`."""
    url: str | None = None
    """URL of an SGLang server with the reward model, such as http://host:30000; null: each generator loads the
    model."""
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """Device of the reward model: cpu, cuda or cuda:N, of the GPUs visible to a generator."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one group, seconds."""


class RewardConfig(Section, frozen=True):
    """Scoring of completions."""

    function: str | tuple[str, ...] | None = None
    """A file with compute_score, FILE:NAME, a built-in reward, or a list of these; null: a rule by data_source."""
    weights: tuple[Annotated[float, Meta(ge=-1e6, le=1e6)], ...] | None = None
    """Weights of the rewards in reward.function, in order; null: 1 each."""
    combine: Literal["sum", "first", "gate"] = "sum"
    """Combination of several rewards: weighted sum, the first that applies, or the sum if the first is above 0
    and else the first."""
    kwargs: dict[str, Any] = {}
    """Extra arguments of reward functions by name; each function gets those that it accepts."""
    format_score: Annotated[float, Meta(ge=-1e6, le=1e6)] = 0.1
    """gsm8k: reward of a wrong answer in the right format."""
    qa_score: Literal["match", "f1"] = "match"
    """Score of qa and trivia. `match`: 1 for a match; `f1`: F1 of the words."""
    timeout_s: PositiveFloat = 10.0
    """Deadline of one reward call, seconds."""
    workers: Literal["auto"] | PositiveInt = 1
    """Most reward processes per generator for each custom function, for maths and for code; auto: half the number of
    cores, at most 8."""
    success: float = 1.0
    """Reward from which a completion counts as solved, in pass@k, maj@n, data.curriculum and solved groups."""
    code: CodeRewardConfig = CodeRewardConfig()
    judge: JudgeConfig = JudgeConfig()
    model: RewardModelConfig = RewardModelConfig()

    @property
    def num_workers(self) -> int:
        """`workers` as a number. Each generator of a machine starts as many in a burst, so `auto` is small."""
        return max(1, min(cores() // 2, 8)) if self.workers == "auto" else self.workers

    @property
    def at_once(self) -> int:
        """Maximum concurrent calls of a generator."""
        return self.at_once_and_key[0]

    @property
    def at_once_and_key(self) -> tuple[int, str]:
        """`at_once`, and the key that sets it."""
        there = [(self.num_workers, "reward.workers")]
        if self.code.url is not None:
            there.append((self.code.max_concurrent, "reward.code.max_concurrent"))
        if "judge" in self.functions:
            there.append((self.judge.max_concurrent, "reward.judge.max_concurrent"))
        return max(there, key=lambda one: one[0])

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of built-in rewards and files of functions, as a list."""
        if self.function is None:
            return ("data_source",)
        return (self.function,) if isinstance(self.function, str) else self.function

    @property
    def files(self) -> tuple[str, ...]:
        """Entries of `functions` that are a `FILE` or `FILE:NAME`; a plain word is a built-in reward."""
        return tuple(spec for spec in self.functions if not spec.isidentifier())


MOST_GENERATORS = 64
"""Largest number of generators without `generators.max`, if there are not more."""
OPENENV = "openenv:"
"""Prefix of `environment.name` for an OpenEnv server; its URL follows."""


class EnvironmentConfig(Section, frozen=True):
    """Replies to the turns of a completion: tools, a game, a simulated user."""

    name: str | None = None
    """Environment: calculator, guess, a file with a class Environment (FILE or FILE:CLASS), or openenv:http://HOST:PORT;
    null: single-turn completions."""
    tools: tuple[str, ...] = ()
    """Functions that the model may call: calculator or FILE:FUNCTION; excludes environment.name."""
    max_turns: PositiveInt = 8
    """Maximum turns of the model per completion."""
    timeout_s: PositiveFloat = 30.0
    """Deadline of one reset or step, seconds."""
    processes: PositiveInt = 1
    """Processes per generator that run a custom environment."""
    agent: str | None = None
    """Function that calls the model at an OpenAI-compatible URL and returns a reward: FILE or FILE:FUNCTION
    (run); excludes environment.name and tools."""

    @property
    def is_on(self) -> bool:
        """True if completions have an environment or an agent."""
        return bool(self.name or self.tools or self.agent)

    @property
    def files(self) -> tuple[str, ...]:
        """Entries that are a `FILE`, `FILE:CLASS` or `FILE:FUNCTION`; a plain word is a built-in."""
        specs = (self.name or "", *self.tools, self.agent or "")
        return tuple(spec for spec in specs if spec and not spec.isidentifier() and spec != f"{OPENENV}{self.url}")

    @property
    def url(self) -> str | None:
        """URL of the OpenEnv server in `name`, if any."""
        is_url = self.name is not None and self.name.startswith(OPENENV)
        return str(self.name).removeprefix(OPENENV) if is_url else None


class SamplingConfig(Section, frozen=True):
    """Sampling of completions."""

    temperature: PositiveFloat = 1.0
    """Softmax temperature."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus sampling threshold; 1 is off."""
    top_k: Annotated[int, Meta(ge=-1)] = -1
    """Number of most likely tokens to sample from; -1 is off."""
    max_tokens: PositiveInt = 1024
    """Longest completion, tokens."""
    stop: tuple[str, ...] = ()
    """Single-token stop strings, in addition to the model's own."""
    eval_temperature: NonNegativeFloat = 0.0
    """Temperature of evaluation; 0 is greedy."""
    eval_completions: Annotated[int, Meta(ge=1, le=128)] = 1
    """Completions per held-out prompt; above 1 for pass@k and maj@n."""


class CorrectionConfig(Section, frozen=True):
    """One off-policy correction. Weights of several multiply; a token is trained only if all of them keep it."""

    kind: Literal["importance", "veto", "opsm", "m2po", "divergence"] = "importance"
    """`importance` weights tokens by proximal / behaviour policy; the other kinds only reject."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio of the token, product of the completion (sequence), or its geometric mean."""
    action: Literal["truncate", "clip", "mask", "reject"] = "truncate"
    """Treatment of a ratio out of bounds: truncate, clip, weight 0 (mask), or weight 0 and otherwise 1 (reject)."""
    low_ratio: PositiveFloat | None = None
    """Lower bound of the ratio, for importance and veto."""
    high_ratio: PositiveFloat | None = None
    """Upper bound of the ratio, for importance and veto."""
    max_nats: PositiveFloat | None = None
    """Largest estimate (divergence) or mean log-ratio (opsm) to keep, nats."""
    max_mean_square: PositiveFloat | None = None
    """Largest mean square of the log-ratios, nats², for m2po; null: 0.04."""
    estimator: Literal["k2", "k3"] = "k3"
    """KL estimator, for divergence."""


class CriticConfig(Section, frozen=True):
    """Value head on the last hidden state of the policy, for `algorithm.advantage: gae`."""

    gamma: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Discount per token."""
    lam: Annotated[float, Meta(ge=0, le=1)] = 0.95
    """Lambda of generalized advantage estimation."""
    value_coef: PositiveFloat = 0.5
    """Weight of the value loss."""
    value_clip: PositiveFloat | None = 0.5
    """Largest change of a value before its loss is clipped; null: no clipping."""
    lr_scale: PositiveFloat = 10.0
    """Learning rate of the value head, as a multiple of learner.lr."""


class AlgorithmConfig(Section, frozen=True):
    """Objective. `configs/algorithms/` has a file per paper; docs/formulas.md has the equations."""

    group_size: AtLeastTwo = 8
    """Completions per prompt."""
    min_completions: AtLeastTwo | None = None
    """Fewest completions of a group that is trained after failures or its deadline; null: algorithm.group_size."""
    filter_zero_signal: bool = False
    """Replace each group whose rewards are all equal by another prompt."""
    advantage: Literal[*_functions("advantages.py", "estimator"), "remax", CRITIC] = "grpo"  # type: ignore[valid-type]
    """Advantage estimator; gae trains a critic, the others compare the completions of a group."""
    loss: Literal[*_functions("surrogates.py", "surrogate"), PAIRWISE] = "ppo_clip"  # type: ignore[valid-type]
    """Surrogate objective."""
    loss_args: dict[str, float | str | bool | None] = {}
    """Arguments of the loss by name; a later layer that sets algorithm.loss replaces all of them."""
    anchor: Literal["proximal", "behaviour", "interpolated"] = "proximal"
    """Center of the trust region: policy at the start of the step, policy that sampled the tokens, or interpolated."""
    corrections: tuple[CorrectionConfig, ...] = (CorrectionConfig(high_ratio=2.0),)
    """Off-policy corrections, all of which apply (docs/formulas.md)."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
    ] = "token-mean"
    """Averaging of token losses over the step."""
    teacher: str | None = None
    """Folder or hub id of a model with the same tokens; the KL is to it, not to the initial model."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the initial model, or to a teacher; 0: no reference model."""
    kl_kind: Literal[
        "k1", "abs", "k2", "k3", "low_var_kl", "full", "k1+", "abs+", "k3+", "low_var_kl+", "k3_reweighted"
    ] = "low_var_kl"
    """Estimator of the KL; +: its value with the gradient of k2."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss or subtract it from the reward."""
    behaviour_kl_coef: NonNegativeFloat = 0.0
    """Weight of a k2 penalty to the policy that sampled the tokens."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus; unsolved groups lower it (docs/stability.md)."""
    router_aux_coef: NonNegativeFloat | None = None
    """Weight of the load-balancing loss of a mixture of experts; null: router_aux_loss_coef of the model if its
    config sets output_router_logits."""
    router_bias_rate: NonNegativeFloat = 0.0
    """Change per update of the biases that balance the experts of DeepSeek-V3 (0.001 there)."""
    truncated: Literal["keep", "mask", "zero"] = "keep"
    """Completions cut at sampling.max_tokens: keep trains them, mask uses them only as a baseline, zero sets
    their reward to 0."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens before sampling.max_tokens over which the length penalty grows; 0: no penalty."""
    overlong_factor: NonNegativeFloat = 1.0
    """Length penalty at sampling.max_tokens."""
    critic: CriticConfig = CriticConfig()


class TeacherConfig(Section, frozen=True):
    """Teacher behind a server (docs/distillation.md); algorithm.teacher is one inside the learner."""

    url: str | dict[str, str] | None = None
    """URL of an SGLang or vLLM server, or a mapping from data_source to such URLs; null: the run starts a server for
    each teacher.path."""
    path: str | dict[str, str] | None = None
    """Folder or hub id of the teacher, or a mapping from data_source; null: none, or the model that the server of
    teacher.url names."""
    gpus_each: NonNegativeInt | None = None
    """GPUs of each server that the run starts; null: 1, or 0 (the CPU) if generators.gpus_each is 0."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one completion with all of its retries, seconds."""
    max_concurrent: PositiveInt = 16
    """Requests to each teacher at once, per generator."""
    top_k: NonNegativeInt = 0
    """Most likely tokens of the teacher to compare at each sampled token, for algorithm.kl_kind: full; 0: the
    sampled token only."""

    @property
    def urls(self) -> dict[str, str]:
        """URLs by data_source; a single one for all sources is under ""."""
        return _by_source(self.url)

    @property
    def own(self) -> dict[str, str]:
        """Models by data_source of the servers that the run starts."""
        return _by_source(self.path) if self.url is None else {}

    @property
    def is_on(self) -> bool:
        """True if a server teaches."""
        return self.url is not None or self.path is not None


def _by_source(given: str | dict[str, str] | None) -> dict[str, str]:
    return given if isinstance(given, dict) else {} if given is None else {"": given}


class AutoLagConfig(Section, frozen=True):
    """Bound of `buffer.max_lag: auto`."""

    max: PositiveInt = 32
    """Largest bound, optimizer steps."""


class BufferConfig(Section, frozen=True):
    """Groups between generators and learner, and their staleness."""

    prompts_per_step: PositiveInt = 64
    """Groups per optimizer step."""
    max_lag: NonNegativeInt | Literal["auto"] = 4
    """Maximum lag of a group's oldest token when it is trained, optimizer steps; 0: synchronous; auto: adapt to
    the importance ratios."""
    policy: Literal["wait", "drop", "train"] = "wait"
    """Enforcement of buffer.max_lag: wait for groups, drop groups, or train all."""
    lease_timeout_s: PositiveFloat = 1800.0
    """Deadline of a lease, seconds; an expired lease is granted again."""
    straggler_factor: NonNegativeFloat = 0.0
    """Deadline of a lease as a multiple of the median group time, at most buffer.lease_timeout_s; 0: always
    buffer.lease_timeout_s."""
    durability: Literal["memory", "written", "fsync_interval", "fsync_each"] = "fsync_interval"
    """Write-ahead journal before a group is acknowledged: none (memory), written, or fsynced (docs/reliability.md)."""
    keep_journal: bool = False
    """Keep trained groups in the journal, for `asyncgrpo replay`."""
    auto_lag: AutoLagConfig = AutoLagConfig()

    @property
    def largest_max_lag(self) -> int:
        """`max_lag`, or the largest bound of `auto`."""
        return self.auto_lag.max if self.max_lag == "auto" else self.max_lag

    @property
    def num_slots(self) -> int:
        """Maximum groups in flight or ready at once."""
        return (self.largest_max_lag + 1) * self.prompts_per_step


class GeneratorConfig(Section, frozen=True):
    """Inference."""

    engine: Literal["sglang", "torch", "fake"] = "sglang"
    """Inference engine."""
    count: PositiveInt = 1
    """Number of generators, each with one engine."""
    min: PositiveInt = 1
    """Fewest generators for scaling and the autopilot."""
    max: PositiveInt | None = None
    """Most generators for scaling and the autopilot; null: 64."""
    autopilot: bool = False
    """Scale generators between generators.min and generators.max automatically, as the advice recommends."""
    gpus_each: NonNegativeInt = 1
    """GPUs per engine (tensor parallel); 0: CPU."""
    groups_in_flight: PositiveInt = 32
    """Concurrent groups per generator."""
    memory_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.85
    """Share of GPU memory for weights and KV cache."""
    keep_kv: bool = True
    """Keep the KV cache of completions in flight across weight updates; false: recompute it."""
    prefix_cache: bool = True
    """Share prompt prefixes between completions of one policy version."""
    extra: dict[str, Any] = {}
    """Extra arguments of sglang.Engine."""
    ray_resources: dict[str, float] = {}
    """Custom Ray resources of one generator, for placement on nodes."""
    restarts: NonNegativeInt = 10
    """Restarts per hour of one generator, or of buffer and learner, before the run fails."""

    @property
    def most(self) -> int:
        """`max` as a number."""
        return self.max or max(MOST_GENERATORS, self.count)


class ParallelConfig(Section, frozen=True):
    """How learner ranks divide a step; the rest is FSDP."""

    context: PositiveInt = 1
    """Learner ranks that run one packed row of tokens together."""
    expert: PositiveInt = 1
    """Learner ranks that hold the experts of a mixture together, each some of them whole."""

    @property
    def multiple(self) -> int:
        """The number of ranks is a multiple of this."""
        return lcm(self.context, self.expert)


class LearnerConfig(Section, frozen=True):
    """Training."""

    ranks: PositiveInt = 1
    """Number of learner processes; FSDP2 shards the model over them."""
    parallel: ParallelConfig = ParallelConfig()
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the learner; auto: cuda if a GPU is found."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer updates of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate after warm-up, until run.steps."""
    lr_min_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Final learning rate of linear and cosine, as a multiple of learner.lr."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW betas."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Maximum gradient norm."""
    minibatches: PositiveInt = 1
    """Optimizer updates per pass over a step's groups."""
    ppo_epochs: PositiveInt = 1
    """Passes over a step's groups, each of learner.minibatches updates."""
    spike_factor: PositiveFloat | None = 1000.0
    """Skip updates with a gradient norm above this multiple of both the recent median and learner.grad_clip;
    null: skip only non-finite ones."""
    full_lr_signal: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Fraction of informative groups among informative and solved ones at which the full learning rate applies;
    below it, lr scales with the square root; 0: always the full rate (docs/stability.md)."""
    ess_lr: bool = False
    """Scale the learning rate with the square root of the effective sample share (VCPO)."""
    tokens_per_microbatch: PositiveInt = 16384
    """Packed tokens per forward and backward pass of a rank."""
    share_prompts: bool = True
    """Compute a prompt once for all of its completions in a micro-batch."""
    compile: bool | None = None
    """Compile decoder layers and head loss with torch.compile, from the second step on; null: on a CPU, if run
    and model are large enough."""
    activation_checkpointing: bool | Literal["offload"] | None = None
    """Recompute activations in the backward pass; offload: from layer inputs in host memory; null: on a GPU that
    cannot hold them (docs/memory.md)."""
    offload_reference: bool = True
    """Keep the reference model on the CPU between uses."""
    offload_optimizer: bool = False
    """Keep optimizer moments on the CPU; an update moves 1 GiB of them to the GPU at a time."""
    ray_resources: dict[str, float] = {}
    """Custom Ray resources of one rank, for placement on nodes."""

    @property
    def updates_per_step(self) -> int:
        return self.minibatches * self.ppo_epochs


class WeightsConfig(Section, frozen=True):
    """Transfer of new weights to the generators."""

    backend: Literal["auto", "nccl", "gloo", "shared_memory"] = "auto"
    """Transport between machines; auto: nccl between GPUs, else gloo, and shared memory on the learner's machine;
    nccl, gloo: also on the learner's machine."""
    deltas: bool = True
    """Send only changed weights between machines if they are few; costs one copy of the weights in the learner's
    host memory; false: always send all."""
    bucket_mb: PositiveInt = 64
    """Size of a transfer bucket, MiB."""
    timeout_s: PositiveFloat = 120.0
    """Deadline of each wait in a publication, seconds."""


class ClusterConfig(Section, frozen=True):
    """Placement, network and failure detection."""

    bind: str = "127.0.0.1"
    """Bind address of our sockets; several nodes need one that all of them reach, such as 0.0.0.0."""
    ray_address: str | None = None
    """Address of a running Ray cluster, or `auto`; null: start Ray here."""
    share_gpu: bool = False
    """Run learner and generator on one GPU."""
    gpu_memory_gb: PositiveFloat | None = None
    """Memory of one GPU, GiB; null: as detected, else 80."""
    stall_timeout_s: PositiveFloat = 3600.0
    """Seconds without a trained step before the run fails."""
    silent_timeout_s: PositiveFloat = 120.0
    """Liveness timeout of processes and engines, seconds; a silent one is replaced."""


class ControlConfig(Section, frozen=True):
    """Admin API of a run."""

    port: Annotated[int, Meta(ge=0, le=65535)] | None = 0
    """Port of the admin API and its page; 0: any free port; null: neither."""
    bind: str = "127.0.0.1"
    """Bind address of the admin API; traffic, tokens included, is not encrypted."""


class Config(Section, frozen=True):
    """Configuration of a run."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig = RunConfig()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    teacher: TeacherConfig = TeacherConfig()
    buffer: BufferConfig = BufferConfig()
    generators: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()
    control: ControlConfig = ControlConfig()

    @property
    def has_teacher(self) -> bool:
        """True if the KL is to a teacher, in the learner or served."""
        return self.algorithm.teacher is not None or self.teacher.is_on

    @property
    def teacher_gpus_each(self) -> int:
        """GPUs of each teacher that the run starts."""
        each = self.teacher.gpus_each
        return min(1, self.generators.gpus_each) if each is None else each

    @property
    def teacher_gpus(self) -> int:
        """GPUs of all teachers that the run starts."""
        return self.teacher_gpus_each * len(self.teacher.own)

    @property
    def has_reference(self) -> bool:
        """True if the loss needs log-probs of a reference or a teacher."""
        return self.algorithm.kl_coef > 0 or bool(self.algorithm.loss_args.get("reference"))

    @property
    def has_reference_copy(self) -> bool:
        """True if the learner holds a reference beside the model.

        With adapters the reference is the model without them; a served teacher is no model in the learner.
        """
        has_own = not self.teacher.is_on and not self.model.lora.rank
        return self.has_reference and (self.algorithm.teacher is not None or has_own)


def changed(config: Config, values: Mapping[str, Any]) -> Config:
    """Return `config` with other values at some dotted keys."""

    def put(struct: Any, names: list[str], value: Any) -> Any:
        name, *below = names
        return replace(struct, **{name: put(getattr(struct, name), below, value) if below else value})

    for key, value in values.items():
        config = put(config, key.split("."), value)
    return config
