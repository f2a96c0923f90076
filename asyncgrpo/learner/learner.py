"""One rank of the learner: groups in, the next weights out.

`Learner.step` is the algorithm. All ranks call every collective method in the same order with the same arguments. Each rank
trains its share. The shares add up to the step of a single process, for any number of ranks and micro-batches.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor
from torch.optim import AdamW

from asyncgrpo.algorithms.critic import value_loss
from asyncgrpo.algorithms.diagnostics import Sums, effective_sample_share, gap_sums, merge
from asyncgrpo.algorithms.surrogates import TRAINS_ZERO_ADVANTAGE
from asyncgrpo.config.schema import Config
from asyncgrpo.data.images import Images
from asyncgrpo.errors import TrainingError
from asyncgrpo.learner import objective, saving
from asyncgrpo.learner.head import Reference, Teacher
from asyncgrpo.learner.model import (
    Scored,
    TokenScorer,
    build_model,
    can_compile,
    compile_layers,
    compiling_pays,
    keep_gathered,
    refuse_other_tokens,
    reshard,
    without_adapters,
)
from asyncgrpo.learner.objective import MicrobatchObjective, Precomputed, is_elementwise, report_not_run
from asyncgrpo.learner.optimizer import GradientGuard, OptimizerOffload, learning_rate, make_optimizer
from asyncgrpo.learner.packing import PackedBatch, Shaping, StepBatch, pack
from asyncgrpo.learner.parallel import Ranks, by_mesh, gather, total_norm
from asyncgrpo.learner.publishing import PublishedWeights
from asyncgrpo.learner.report import PhaseClock, StepReport, Update, build_report, of_start
from asyncgrpo.learner.snapshot import Snapshot
from asyncgrpo.types import Completion, Group, PolicyVersion, Prompt, Rollout, Score, VersionSpan
from asyncgrpo.weights.publication import CheckSequences

LIVE_GAP_EVERY = 10
"""Steps between two measurements of what routing replay closes."""


class Learner:
    """The model, its optimizer and the reference, sharded over the ranks."""

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        world: int,
        device: torch.device | str,
        has_stepped: bool = False,
        images: Images | None = None,
    ) -> None:
        """Load the model. Collective.

        Args:
            config: of the whole run.
            rank, world: of the default process group, which is created here for world 1 if it does not exist.
            device: of this rank, `cpu` or `cuda:N`.
            images: of the run, if the model reads any.
            has_stepped: True to compile in the first step already, as a process does that has made a step (replay).
        Raises:
            ConfigError: the model cannot be loaded or trained here.
        """
        self.config, self.rank, self.world, self.device = config, rank, world, torch.device(device)
        self.steps = 0
        """Updates that warm-up and schedule count: updates made, and updates left out because their gradient was 0."""
        self._keeps_gathered = world == 1 and not config.model.lora.rank and not config.cluster.share_gpu
        """True to keep gathered weights between micro-batches. That second copy gains little for a frozen base, and an engine
        on the same GPU needs the memory."""
        self._precomputes = objective.needs_precompute(config.algorithm, config.learner.updates_per_step)
        self._ranks = ranks = _ranks(self.device, rank, world, config)
        dtype = getattr(torch, config.model.dtype)
        self.model = build_model(config.model.path, dtype, self.device, ranks, config, images=images)
        self._reference = None
        teacher = config.algorithm.teacher
        if teacher is not None:
            refuse_other_tokens(config.model.path, teacher)
        if config.has_reference_copy:
            path = teacher or config.model.path
            self._reference = build_model(path, dtype, self.device, ranks, config, trainable=False, images=images)
        pays = compiling_pays(config, self.model.layers, self.model.head.out_features, self.device)
        self._compiles = pays if config.learner.compile is None else config.learner.compile
        self._has_stepped = has_stepped
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.model, config)
        self._stepped: OptimizerOffload | AdamW = self.optimizer
        if config.learner.offload_optimizer:
            self._stepped = OptimizerOffload(self.optimizer)
        self.saver = saving.Saver()
        self._guard = GradientGuard(config.learner.spike_factor, config.learner.grad_clip)
        self._published = PublishedWeights(self.model, dtype)
        self.layout, self.weights = self._published.layout, self._published.weights
        self.snapshot = Snapshot(self._published, config.weights, rank, world, self.device)
        self.check = LearnerCheck(self.model, config.data.max_prompt_tokens + config.sampling.max_tokens, self.device)

    def step(self, groups: list[Group], version: PolicyVersion) -> StepReport:
        """Train on `groups` for `learner.ppo_epochs` passes. `version` is that of the weights before the step. Collective.

        An update with a gradient that is not finite, or that spikes, is skipped and reported in `skipped`. An update with a
        gradient of exactly 0 is left out and counted in `zero_gradients`.

        Raises:
            TrainingError: too many updates in a row were skipped.
        """
        if self._has_stepped and self._compiles:
            self.compile()
        self._has_stepped = True
        clock = PhaseClock(self.device)
        updates: list[Update] = []
        totals: list[Sums] = []
        loads: list[Tensor] = []
        with clock("pack"):
            count = min(self.config.learner.minibatches, max(len(groups), 1))
            bounds = itertools.pairwise(len(groups) * i // count for i in range(count + 1))
            packed = [self._pack(groups[start:end], version) for start, end in bounds]
        with clock("forward_backward"):
            live = self._live_gap(packed[0].trained[0], version)
            ahead = [self._precompute(batch) for batch in packed]
        batches = [batch for batch, _ in ahead]
        total, steps = None, self.config.run.steps
        if steps is not None:  # earlier starts may have made more updates a step, or fewer
            total = self.steps + (steps - version.number) * self.config.learner.updates_per_step
        for number in self._order(len(ahead), version):
            batch, precomputed = ahead[number]
            with clock("forward_backward"):
                sums = self._accumulate(batch, precomputed, version)
            with clock("report"):
                sums = self._reduce(sums)
            with clock("optimizer"):
                lr = learning_rate(self.steps, self.config, total=total, signal_share=batch.signal_share)
                updates.append(self._update(lr, sums))
                load = self.model.routers.end_update(is_made=updates[-1].skipped is None)
                loads += [] if load is None else [load]
            totals.append(sums if self._precomputes else of_start(sums, len(updates), len(ahead)))
        if loads:  # the largest number of tokens of an expert, as a multiple of its layer's mean
            load = torch.stack(loads).sum(0)
            live["expert_load"] = float((load.amax(1) / load.double().mean(1).clamp(min=1e-9)).max())
        size = self.config.algorithm.group_size
        return build_report(totals, batches, updates, group_size=size, seconds=clock.seconds, more_diagnostics=live)

    def compile(self) -> None:
        """Compile the layers and the head's loss if every rank can. Collective. Called by `step` if configured."""
        self._compiles = False
        works = torch.tensor(float(can_compile(self.device)), device=self.device)
        dist.all_reduce(works, dist.ReduceOp.MIN)
        if works.item():
            for model in (self.model, self._reference):
                compile_layers(model.layers if model else [])
            self.model.is_compiled = True

    def set_lr(self, lr: float) -> None:
        """Set the peak learning rate, the same on every rank. Warm-up and schedule keep their position."""
        self.config = replace(self.config, learner=replace(self.config.learner, lr=lr))

    def save(self, folder: str) -> None:
        """Write the state that `load` restores bitwise. Collective. Raises CheckpointError."""
        self.begin_save(folder)()

    def begin_save(self, folder: str) -> Callable[[], None]:
        """Copy the state that `load` restores, and write it beside the next steps. Collective.

        Returns:
            A function that waits for the write and raises CheckpointError. The next copy waits for this write.
        """
        return self.saver.begin(folder, self.model, self.optimizer, self.steps, self._guard.memory())

    def load(self, folder: str) -> None:
        """Restore a folder that `save` wrote, on any number of ranks. Collective. Raises CheckpointError."""
        self.steps, memory = saving.load(folder, self.model, self.optimizer, self._guard.memory())
        self._guard.recall(memory)

    def export(self, folder: str, tokenizer_path: str | None = None) -> None:
        """Write a Hugging Face model folder with the tokenizer of `tokenizer_path` (folder or hub id). Collective.

        Raises CheckpointError on rank 0.
        """
        self.begin_export(folder, tokenizer_path)()

    def begin_export(self, folder: str, tokenizer_path: str | None = None) -> Callable[[], None]:
        """Gather a Hugging Face model folder on rank 0. Collective. Returns a function that writes it, from any thread."""
        return saving.begin_export(folder, self.model, self._published, tokenizer_path)

    def _order(self, count: int, version: PolicyVersion) -> list[int]:
        """Return the minibatch of each update: in order in the first pass, shuffled in every further pass.

        The order depends on seed and version alone, so all ranks and a repeated step after a resume agree.
        """
        drawn = random.Random(f"{self.config.run.seed} {version.number}")
        further = [drawn.sample(range(count), count) for _ in range(self.config.learner.ppo_epochs - 1)]
        return [number for one_pass in (range(count), *further) for number in one_pass]

    def _pack(self, groups: list[Group], version: PolicyVersion) -> StepBatch:
        algorithm, learner = self.config.algorithm, self.config.learner
        return pack(
            groups,
            version,
            rank=self.rank // self._ranks.row.size,
            world=self.world // self._ranks.row.size,
            tokens_per_microbatch=learner.tokens_per_microbatch * self._ranks.row.size,
            advantage=algorithm.advantage,
            group_size=algorithm.group_size,
            shaping=Shaping.of(self.config),
            success=self.config.reward.success,
            has_teacher=self.config.has_teacher,
            share_prompts=learner.share_prompts,
            pair_cost=1 / (6 * self.model.head.in_features),
            skip_zero_advantage=has_only_policy_gradient(self.config),
            multiple=self._ranks.row.size,
        )

    def _precompute(self, batch: StepBatch) -> tuple[StepBatch, list[Precomputed]]:
        """Return the minibatch, and the values that its micro-batches need before their gradient."""
        if not self._precomputes:
            return batch, [Precomputed()] * len(batch.trained)
        is_counted = self._ranks.row.rank == 0
        return objective.precompute(batch, self._score_proximal, self.config.algorithm, is_counted=is_counted)

    @torch.no_grad()
    def _live_gap(self, batch: PackedBatch, version: PolicyVersion) -> dict[str, float]:
        """Return the largest log-prob gap of the first micro-batches where routers choose by themselves. Collective.

        A forward pass more, so only every `LIVE_GAP_EVERY` steps, and only with routing replay.
        """
        if self.config.model.routing_replay == "off" or version.number % LIVE_GAP_EVERY:
            return {}
        batch = dataclasses.replace(batch, routes=None).to(self.device)
        with torch.compiler.set_stance("force_eager"):
            logprobs = self.model(batch).scores.logprobs
        reshard(self.model)
        largest = gap_sums(logprobs, batch.behaviour_logprobs, batch.is_current)["gap_max"]
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return {"live_gap_max": largest.item()}

    @torch.no_grad()
    def _score_proximal(self, batch: PackedBatch) -> Precomputed:
        """Score a micro-batch under the weights at the start of the step."""
        batch = batch.to(self.device)
        scored: Scored = self.model(batch)
        reshard(self.model)
        reference = None
        if self.config.has_reference:
            teacher = self._teacher_of(batch)
            reference = teacher.sampled if teacher else self._score_reference(batch).scores.logprobs
        return Precomputed(scored.scores.logprobs, reference, values=scored.values)

    def _teacher_of(self, batch: PackedBatch) -> Teacher | None:
        """Return the log-probs of the served teacher, which take the place of the reference; None: no teacher is served."""
        if not self.config.teacher.is_on:
            return None
        if batch.teacher is None:
            raise TrainingError("a teacher is set, but completions of this step have no log-probs of a teacher")
        return batch.teacher

    def _accumulate(self, batch: StepBatch, precomputed: Sequence[Precomputed], version: PolicyVersion) -> Sums:
        """Run forward and backward of a minibatch. The gradients of this rank's share stay in the parameters."""
        sums = []
        self.model.routers.begin_update(batch.num_tokens - int(batch.not_run.mask.sum()))
        keep_gathered(self.model, self._keeps_gathered)
        for number, microbatch in enumerate(batch.trained):
            if number == len(batch.trained) - 1:
                keep_gathered(self.model, False)
            loss, reported = self._loss(microbatch.to(self.device), batch, precomputed[number], version)
            loss.backward()
            sums.append(reported)
        if self.rank == 0:  # all ranks have these tokens; one rank counts them
            not_run = batch.not_run.to(self.device)
            sums.append(report_not_run(not_run, version=version.number))
        return merge(sums)

    def _loss(
        self, batch: PackedBatch, step: StepBatch, precomputed: Precomputed, version: PolicyVersion
    ) -> tuple[Tensor, Sums]:
        """Return the root of this micro-batch's share of the step's loss, and its sums for the report."""
        settings = self.config.algorithm
        reference: Reference | Teacher | None = None
        if (teacher := self._teacher_of(batch)) is not None:
            precomputed = precomputed._replace(reference=teacher.sampled)
            reference = teacher if settings.kl_kind == "full" else None
        elif self.config.has_reference and (precomputed.reference is None or settings.kl_kind == "full"):
            scored = self._score_reference(batch)
            precomputed = precomputed._replace(reference=scored.scores.logprobs)
            if settings.kl_kind == "full":
                model = self.model if self._reference is None else self._reference
                reference = Reference(scored.hidden, gather(model.head.weight.detach()).to(scored.hidden))
        longest = self.config.sampling.max_tokens
        objective = MicrobatchObjective(settings, batch, step, precomputed, version=version.number, max_length=longest)
        scored = self.model(batch, objective, reference=reference, is_elementwise=is_elementwise(settings))
        sums = objective.report(scored.scores)
        if scored.values is None:
            return scored.loss, sums
        assert precomputed.returns is not None and precomputed.values is not None
        critic = value_loss(
            scored.values.detach(), precomputed.returns, precomputed.values, clip=settings.critic.value_clip
        )
        weights = settings.critic.value_coef * objective.weights
        sums["value_loss"] = (critic.value * objective.weights).sum().double()
        return scored.loss + (weights * critic.loss_gradient.float() * scored.values).sum(), sums

    @torch.no_grad()
    def _score_reference(self, batch: PackedBatch) -> Scored:
        """Score a micro-batch under the initial model, or under a teacher, whose experts are not those that were recorded."""
        if self.config.algorithm.teacher is not None:
            batch = dataclasses.replace(batch, routes=None)
        if self._reference is not None:
            return self._reference(batch)
        with without_adapters(self.model), self.model.routers.with_initial_biases():
            scored: Scored = self.model(batch)
        if not self._keeps_gathered:
            reshard(self.model)
        return scored

    def _update(self, lr: float, totals: Sums) -> Update:
        """Clip the gradient and step. If the gradient is rejected or exactly 0, leave the weights unchanged."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = total_norm(gradients)
        if self.config.learner.ess_lr:
            of_sequences = ("rho_sequence_sum", "rho_sequence_squares", "rho_sequences")
            lr *= effective_sample_share(*(totals[name].item() for name in of_sequences)) ** 0.5
        try:
            skipped = self._guard.judge(norm.item())
            if skipped is None and norm.item() > 0:  # with a gradient of 0 AdamW still applies momentum and decay
                for some in by_mesh(self.parameters):
                    torch.nn.utils.clip_grads_with_norm_(some, self.config.learner.grad_clip, norm)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]
                self._stepped.step()
            self.steps += skipped is None
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return Update(grad_norm=norm.item(), lr=lr, skipped=skipped)

    def _reduce(self, sums: Sums) -> Sums:
        """Merge the sums of all rows in one all-gather; on the CPU. Ranks that run a row together have equal sums."""
        mine = torch.stack(list(sums.values()))
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        return merge(dict(zip(sums, theirs.cpu(), strict=True)) for theirs in everyone[:: self._ranks.row.size])


def has_only_policy_gradient(config: Config) -> bool:
    """True if completions with advantage 0 change nothing: no gradient of their own, no influence on others."""
    algorithm = config.algorithm
    return (
        algorithm.kl_coef == 0
        and algorithm.entropy_coef == 0
        and algorithm.behaviour_kl_coef == 0
        and algorithm.loss not in TRAINS_ZERO_ADVANTAGE
        and not config.learner.ess_lr  # the learning rate depends on the ratios of all completions
        and not objective.needs_precompute(algorithm, config.learner.updates_per_step)
    )


def _ranks(device: torch.device, rank: int, world: int, config: Config) -> Ranks:
    """Arrange all ranks. Creates a process group of one if none exists."""
    if not dist.is_initialized():
        assert world == 1, "with several ranks the caller must initialise torch.distributed"
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=world)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return Ranks.of(device.type, world, config.learner.parallel)


# -- the sync gap ------------------------------------------------------------------------------------------------------


class LearnerCheck:
    """Scores the check sequences of a run under the weights that were just published.

    Engines score the same sequences. The difference is the sync gap.
    """

    def __init__(self, model: TokenScorer, max_context: int, device: torch.device) -> None:
        """
        Args:
            max_context: longest prompt plus completion, tokens.
        """
        self._model = model
        config = model.language_model.config.get_text_config()
        self.sequences = CheckSequences.draw(config.vocab_size, max_context)
        groups = [_group(number, tokens, self.sequences.start) for number, tokens in enumerate(self.sequences.tokens)]
        (self._batch,) = pack(
            groups, None, rank=0, world=1, tokens_per_microbatch=2**31, multiple=model.row.size
        ).trained
        self._order = torch.argsort(self._batch.rollouts)
        self._device = device

    @torch.no_grad()
    def score(self) -> list[float]:
        """Return the log-probs of all scored tokens, in the order of the sequences, nats, at temperature 1.

        Collective: every rank runs all sequences. Layers run eagerly, because a forward pass without gradient would trigger a
        recompilation.
        """
        with torch.compiler.set_stance("force_eager"):
            logprobs = self._model(self._batch.to(self._device), temperature=1.0).scores.logprobs
        reshard(self._model)
        parts = logprobs.cpu().split(self._batch.cu_seqlens.diff().tolist())
        return torch.cat([parts[place] for place in self._order.tolist()]).tolist()


def _group(number: int, tokens: tuple[int, ...], start: int) -> Group:
    """Return a sequence as a group with one completion."""
    sampled = np.array(tokens[start:], np.int32)
    spans = (VersionSpan(PolicyVersion(0, 0), 0, len(sampled)),)
    completion = Completion(0, sampled, np.zeros(len(sampled), np.float32), spans, "length")
    name = f"check-{number}"
    return Group(
        group_id=name,
        lease_id=name,
        attempt=0,
        prompt_index=number,
        purpose="eval",
        prompt=Prompt(prompt_id=name, token_ids=tokens[:start]),
        rollouts=(Rollout(completion, Score(value=0.0)),),
    )
