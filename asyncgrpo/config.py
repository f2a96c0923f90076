"""Every knob of asyncgrpo, on one page.

A YAML file is read and merged with `key=value` overrides by OmegaConf, then converted once to the frozen structs below
(`config_loading.load_config`). After that nothing parses, defaults or edits. Lengths are in tokens, times in seconds,
lag in optimizer steps. A field's unit and meaning are in its description; `asyncgrpo config explain KEY` prints it.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

AtLeastOne = Annotated[int, Meta(ge=1)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: frozen (said again in each, for type checkers), by keyword, unknown keys refused."""


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


class DataConfig(Section, frozen=True):
    """Which prompts, and how they are read."""

    train: Annotated[str, Meta(description="Parquet, JSONL or JSON file of training prompts")]
    eval: Annotated[str | None, Meta(description="held-out file; none: no evaluation")] = None
    columns: Annotated[
        dict[str, str],
        Meta(description="our field to the file's column, where no known schema fits: prompt, answer, source"),
    ] = {}
    max_prompt_tokens: Annotated[int, Meta(ge=1, description="longer prompts are dropped, with a count")] = 512
    shuffle: Annotated[bool, Meta(description="a new seeded order every epoch; false: the file's order")] = True
    system_prompt: Annotated[str | None, Meta(description="put before every prompt that has no system turn")] = None
    eval_rows: Annotated[AtLeastOne | None, Meta(description="rows of the held-out file to use; none: all")] = None


class RewardConfig(Section, frozen=True):
    """How answers are scored."""

    function: Annotated[
        str | None, Meta(description="file with compute_score, or FILE:NAME; none: rules by data_source")
    ] = None
    timeout_s: Annotated[float, Meta(gt=0, description="deadline of one call, seconds")] = 10.0
    workers: Annotated[int, Meta(ge=1, description="reward processes beside each generator")] = 1


class SamplingConfig(Section, frozen=True):
    """How answers are sampled while training; evaluation samples with `eval_temperature`."""

    temperature: Annotated[float, Meta(gt=0, description="softmax temperature")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="nucleus; 1 is off")] = 1.0
    top_k: Annotated[int, Meta(ge=-1, description="tokens kept; -1 is off")] = -1
    max_tokens: Annotated[int, Meta(ge=1, description="longest answer, tokens")] = 1024
    stop: Annotated[
        tuple[str, ...], Meta(description="single-token strings that end an answer, beside the model's own")
    ] = ()
    eval_temperature: Annotated[float, Meta(ge=0, description="temperature of evaluation; 0 is greedy")] = 0.0


class AlgorithmConfig(Section, frozen=True):
    """The objective."""

    group_size: Annotated[int, Meta(ge=2, description="answers to each prompt; GRPO compares them, so at least 2")] = 8
    advantage: Annotated[
        Literal["grpo", "dr_grpo"],
        Meta(description="grpo: (reward - mean) / std of the group; dr_grpo: without the std"),
    ] = "grpo"
    anchor: Annotated[
        Literal["proximal", "behaviour"],
        Meta(description="centre of the clip: the weights at the start of the step, or those that sampled the token"),
    ] = "proximal"
    clip_low: Annotated[float, Meta(gt=0, lt=1, description="PPO clip below 1")] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="PPO clip above 1")] = 0.28
    importance_cap: Annotated[
        float, Meta(gt=0, description="cap of the per-token weight proximal / behaviour policy (truncated importance)")
    ] = 2.0
    aggregation: Annotated[
        Literal["token-mean", "seq-mean-token-sum-norm"],
        Meta(description="how token losses are averaged over the step; the second is Dr. GRPO's"),
    ] = "token-mean"
    kl_coef: Annotated[
        float, Meta(ge=0, description="weight of the KL to the initial model in the loss; 0: no reference model")
    ] = 0.0
    kl_kind: Annotated[Literal["k1", "k2", "low_var_kl"], Meta(description="estimator of that KL")] = "low_var_kl"
    entropy_coef: Annotated[float, Meta(ge=0, description="weight of an entropy bonus")] = 0.0


class BufferConfig(Section, frozen=True):
    """How far generators may run ahead of the learner."""

    prompts_per_step: Annotated[int, Meta(ge=1, description="groups trained by one optimizer step")] = 64
    max_lag: Annotated[
        int,
        Meta(
            ge=0, description="optimizer steps from a group's oldest token to the step that trains it; 0 is synchronous"
        ),
    ] = 4
    lease_timeout_s: Annotated[float, Meta(gt=0, description="a group not finished by then is leased again")] = 1800.0
    max_attempts: Annotated[int, Meta(ge=1, description="leases of one prompt before it is dropped, with a count")] = 3

    @property
    def num_slots(self) -> int:
        """Groups that may be under way or ready at once."""
        return (self.max_lag + 1) * self.prompts_per_step


class GeneratorConfig(Section, frozen=True):
    """The inference side."""

    engine: Annotated[Literal["sglang", "torch", "fake"], Meta(description="inference engine")] = "sglang"
    count: Annotated[int, Meta(ge=1, description="generators; each owns one engine")] = 1
    gpus_each: Annotated[int, Meta(ge=0, description="GPUs of one engine (tensor parallel); 0: CPU")] = 1
    groups_in_flight: Annotated[int, Meta(ge=1, description="groups that one generator works on at once")] = 32
    memory_fraction: Annotated[float, Meta(gt=0, lt=1, description="share of GPU memory for weights and KV cache")] = (
        0.85
    )
    keep_kv: Annotated[
        bool, Meta(description="a weight change keeps the keys and values of answers in flight; false recomputes them")
    ] = True
    prefix_cache: Annotated[
        bool, Meta(description="share prompt prefixes between answers (never across weight versions)")
    ] = True
    extra: Annotated[dict[str, Any], Meta(description="further arguments of sglang.Engine, as they are")] = {}
    restarts: Annotated[int, Meta(ge=0, description="restarts of one generator before the run gives up")] = 10


class LearnerConfig(Section, frozen=True):
    """The training side."""

    ranks: Annotated[int, Meta(ge=1, description="learner processes (FSDP2 shards the model over them)")] = 1
    device: Annotated[Literal["auto", "cuda", "cpu"], Meta(description="auto: cuda where there is a GPU")] = "auto"
    lr: Annotated[float, Meta(gt=0, description="peak learning rate of AdamW")] = 1e-6
    warmup_steps: Annotated[int, Meta(ge=0, description="steps of linear warm-up from 0")] = 0
    betas: Annotated[tuple[float, float], Meta(description="AdamW moments")] = (0.9, 0.95)
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW weight decay")] = 0.01
    grad_clip: Annotated[float, Meta(gt=0, description="largest gradient norm")] = 1.0
    tokens_per_microbatch: Annotated[
        int, Meta(ge=1, description="packed tokens of one forward and backward on one rank")
    ] = 16384
    activation_checkpointing: Annotated[bool, Meta(description="recompute activations in the backward pass")] = False
    offload_reference: Annotated[bool, Meta(description="keep the reference model on the CPU between uses")] = True
    attention: Annotated[
        Literal["auto", "sdpa", "flash_attention_2"],
        Meta(description="kernel for packed sequences; auto: flash where installed"),
    ] = "auto"


class WeightsConfig(Section, frozen=True):
    """How new weights reach the generators."""

    backend: Annotated[Literal["auto", "nccl", "gloo"], Meta(description="auto: nccl between GPUs, else gloo")] = "auto"
    bucket_mb: Annotated[int, Meta(ge=1, description="MiB sent at once")] = 64
    timeout_s: Annotated[float, Meta(gt=0, description="deadline of each wait in one publication, seconds")] = 120.0


class ClusterConfig(Section, frozen=True):
    """Where things run and how they talk."""

    bind: Annotated[
        str, Meta(description="address our sockets bind to; anything but loopback turns encryption (CURVE) on")
    ] = "127.0.0.1"
    ray_address: Annotated[
        str | None, Meta(description="of a running Ray cluster, or `auto`; none: start one here")
    ] = None
    stall_timeout_s: Annotated[
        float, Meta(gt=0, description="nothing trained for so long: stop with an error, seconds")
    ] = 3600.0


class Config(Section, frozen=True):
    """A whole run."""

    model: ModelConfig
    data: DataConfig
    run: RunConfig = RunConfig()
    reward: RewardConfig = RewardConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    buffer: BufferConfig = BufferConfig()
    generators: GeneratorConfig = GeneratorConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()
