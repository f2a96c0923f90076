"""One rank of the learner: groups in, the next weights out.

`step` is the algorithm. All ranks call every collective method in the same order with the same arguments; each trains
its share, and shares add up to what one process would have done, whatever the number of ranks and micro-batches.
"""

import itertools
import math
import random
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from asyncgrpo.algorithms.critic import value_loss
from asyncgrpo.algorithms.diagnostics import Sums, effective_sample_share, merge
from asyncgrpo.algorithms.shaping import adaptive_kl_coefficient
from asyncgrpo.algorithms.surrogates import TRAINS_ZERO_ADVANTAGE
from asyncgrpo.config.rules import check_algorithm
from asyncgrpo.config.schema import Config
from asyncgrpo.learner import objective, saving
from asyncgrpo.learner.head import Reference
from asyncgrpo.learner.model import Scored, build_model, keep_gathered, reshard, whole, without_adapters
from asyncgrpo.learner.objective import MicrobatchObjective, Precomputed, is_elementwise
from asyncgrpo.learner.optimizer import GradientGuard, OptimizerOffload
from asyncgrpo.learner.packing import PackedBatch, Shaping, StepBatch, pack
from asyncgrpo.learner.publishing import PublishedAdapters, PublishedWeights
from asyncgrpo.learner.report import PhaseClock, StepReport, Update, build_report
from asyncgrpo.types import Group, PolicyVersion


class Learner:
    """The model, its optimizer and the reference, sharded over the ranks."""

    def __init__(self, config: Config, *, rank: int, world: int, device: torch.device | str) -> None:
        """Load the model. Collective.

        Args:
            config: of the whole run.
            rank, world: of the default process group. With world 1 one is made here if there is none.
            device: of this rank, `cpu` or `cuda:N`.
        Raises:
            ConfigError: the model cannot be loaded or trained here, or the algorithm's settings do not fit together.
        """
        check_algorithm(config)
        self.config, self.rank, self.world, self.device = config, rank, world, torch.device(device)
        self.steps = 0
        """Optimizer updates made."""
        self.kl_coef = config.algorithm.kl_coef
        """The present one: it moves where `algorithm.kl_target` is set."""
        self._keeps_gathered = world == 1 and not config.model.lora.rank and not config.cluster.share_gpu
        """Between micro-batches: a second copy, which a frozen base hardly profits from, and an engine beside it needs."""
        self._precomputes = objective.needs_precompute(config.algorithm, config.learner.updates_per_step)
        mesh = _mesh(self.device, rank, world)
        dtype = getattr(torch, config.model.dtype)
        self.model = build_model(config.model.path, dtype, self.device, mesh, config)
        self.has_reference = config.algorithm.kl_coef > 0 or bool(config.algorithm.loss_args.get("reference"))
        self._reference = None
        if self.has_reference and not config.model.lora.rank:  # with adapters the reference is the model without them
            self._reference = build_model(config.model.path, dtype, self.device, mesh, config, trainable=False)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = _optimizer(self.model, config)
        self._offload = OptimizerOffload(self.optimizer, is_on=config.learner.offload_optimizer)
        self._guard = GradientGuard(config.learner.spike_factor, config.learner.max_skips, config.learner.grad_clip)
        self._published = PublishedWeights(self.model, dtype)
        self.layout, self.weights = self._published.layout, self._published.weights
        only_adapters = config.model.lora.rank and config.weights.adapters_only
        self.sent = PublishedAdapters(self.model, config.model.path) if only_adapters else self._published
        """What a publication carries."""

    def step(self, groups: list[Group], version: PolicyVersion) -> StepReport:
        """Train on `groups`, `learner.ppo_epochs` times; `version` names the weights before it. Collective.

        An update whose gradient is not finite, or a spike, is not made, and is reported in `skipped`.

        Raises:
            TrainingError: too many updates in a row were not made.
        """
        clock = PhaseClock(self.device)
        updates: list[Update] = []
        totals: list[Sums] = []
        with clock("pack"):
            packed = [self._pack(part, version) for part in self._minibatches(groups)]
        with clock("forward_backward"):
            ahead = [self._precompute(batch) for batch in packed]
        batches = [batch for batch, _ in ahead]
        for number in self._order(len(ahead), version):
            batch, precomputed = ahead[number]
            with clock("forward_backward"):
                sums = self._accumulate(batch, precomputed, version)
            if updates and not self._precomputes:  # these weights sampled nothing, and those that did are gone
                sums |= {name: torch.zeros_like(sums[name]) for name in ("gap", "gap_tokens", "gap_max")}
            with clock("report"):
                totals.append(self._reduce(sums))
            with clock("optimizer"):
                lr = learning_rate(self.steps, self.config, signal_share=batch.signal_share)
                updates.append(self._update(lr, totals[-1]))
        self._steer_kl(totals, sum(batch.num_completions for batch in batches))
        return build_report(
            totals,
            batches,
            updates,
            kl_coef=self.kl_coef,
            group_size=self.config.algorithm.group_size,
            seconds=clock.seconds,
        )

    def save(self, folder: str) -> None:
        """Write what `load` needs to go on exactly here. Collective. Raises CheckpointError."""
        saving.save(folder, self.model, self.optimizer, self.steps, self.kl_coef, self._guard.memory())

    def load(self, folder: str) -> None:
        """Read what `save` wrote, on any number of ranks. Collective. Raises CheckpointError."""
        self.steps, steered, memory = saving.load(folder, self.model, self.optimizer, self._guard.memory())
        if self.config.algorithm.kl_target is not None:
            self.kl_coef = steered
        self._guard.recall(memory)

    def export(self, folder: str, tokenizer_path: str | None = None) -> None:
        """Write a Hugging Face model folder, with the tokenizer of `tokenizer_path` (a folder or hub id). Collective.

        Raises CheckpointError.
        """
        saving.export(folder, self.model, self._published, tokenizer_path)

    def _minibatches(self, groups: list[Group]) -> list[list[Group]]:
        """The groups of each update, in order."""
        count = min(self.config.learner.minibatches, max(len(groups), 1))
        bounds = [len(groups) * i // count for i in range(count + 1)]
        return [groups[start:end] for start, end in itertools.pairwise(bounds)]

    def _order(self, count: int, version: PolicyVersion) -> list[int]:
        """Which minibatch each update is made from: in the order of their prompts, and shuffled in every further pass.

        All ranks, and a step that is made again after a resume, find the same order.
        """
        drawn = random.Random(f"{self.config.run.seed} {version.number}")
        further = [drawn.sample(range(count), count) for _ in range(self.config.learner.ppo_epochs - 1)]
        return [number for one_pass in (range(count), *further) for number in one_pass]

    def _pack(self, groups: list[Group], version: PolicyVersion) -> StepBatch:
        algorithm, learner = self.config.algorithm, self.config.learner
        return pack(
            groups,
            version,
            rank=self.rank,
            world=self.world,
            tokens_per_microbatch=learner.tokens_per_microbatch,
            advantage=algorithm.advantage,
            group_size=algorithm.group_size,
            shaping=Shaping(
                algorithm.truncated,
                self.config.sampling.max_tokens,
                algorithm.overlong_buffer,
                algorithm.overlong_factor,
            ),
            share_prompts=learner.share_prompts,
            pair_cost=1 / (6 * self.model.head.in_features),
            skip_forward_only=has_only_policy_gradient(self.config),
        )

    def _precompute(self, batch: StepBatch) -> tuple[StepBatch, list[Precomputed]]:
        """The minibatch, and what each of its micro-batches must know of the step before its gradient."""
        if not self._precomputes:
            return batch, [Precomputed()] * len(batch.trained)
        return objective.precompute(batch, self._before, self.config.algorithm, kl_coef=self.kl_coef)

    @torch.no_grad()
    def _before(self, batch: PackedBatch) -> objective.Scored:
        """A micro-batch under the weights at the start of the step."""
        batch = batch.to(self.device)
        scored: Scored = self.model(batch)
        reshard(self.model)
        reference = self._score_reference(batch).scores.logprobs if self.has_reference else None
        return objective.Scored(scored.scores.logprobs, reference, scored.values)

    def _accumulate(self, batch: StepBatch, precomputed: Sequence[Precomputed], version: PolicyVersion) -> Sums:
        """Forward and backward of a minibatch; gradients of its share are left in the parameters."""
        sums = []
        keep_gathered(self.model, self._keeps_gathered)
        for microbatch in batch.forward_only:
            with torch.no_grad():
                sums.append(self._loss(microbatch.to(self.device), batch, Precomputed(), version)[1])
        for number, microbatch in enumerate(batch.trained):
            if number == len(batch.trained) - 1:
                keep_gathered(self.model, False)
            loss, reported = self._loss(microbatch.to(self.device), batch, precomputed[number], version)
            loss.backward()
            sums.append(reported)
        return merge(sums)

    def _loss(
        self, batch: PackedBatch, step: StepBatch, precomputed: Precomputed, version: PolicyVersion
    ) -> tuple[Tensor, Sums]:
        """The root of this micro-batch's share of the step's loss, and what it reports."""
        settings = self.config.algorithm
        reference = None
        if self.has_reference and (precomputed.reference is None or settings.kl_kind == "full"):
            scored = self._score_reference(batch)
            precomputed = precomputed._replace(reference=scored.scores.logprobs)
            if settings.kl_kind == "full":
                model = self.model if self._reference is None else self._reference
                reference = Reference(scored.hidden, whole(model.head.weight, scored.hidden))
        objective = MicrobatchObjective(
            settings,
            batch,
            step,
            precomputed,
            version=version.number,
            max_length=self.config.sampling.max_tokens,
            kl_coef=self.kl_coef,
            oldest_trained=version.number - self.config.buffer.largest_max_lag
            if self.config.buffer.policy == "mask"
            else None,
        )
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
        """Under the initial model."""
        if self._reference is not None:
            return self._reference(batch)
        with without_adapters(self.model):
            scored: Scored = self.model(batch)
        if not self._keeps_gathered:
            reshard(self.model)
        return scored

    def _update(self, lr: float, totals: Sums) -> Update:
        """Clip the gradient and step; or, if the gradient is no good, drop it."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.config.learner.ess_lr:
            of_sequences = ("rho_sequence_sum", "rho_sequence_squares", "rho_sequences")
            lr *= effective_sample_share(*(totals[name].item() for name in of_sequences)) ** 0.5
        try:
            skipped = self._guard.judge(norm.item())
            if skipped is None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.learner.grad_clip, norm)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]
                self._offload.step()
                self.steps += 1
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return Update(grad_norm=norm.item(), lr=lr, skipped=skipped)

    def _steer_kl(self, totals: Sequence[Sums], num_completions: int) -> None:
        """Move the coefficient of the KL towards its target."""
        algorithm = self.config.algorithm
        sums = merge(totals)
        if algorithm.kl_target is not None and sums["tokens"] > 0:
            kl = (sums["kl"] / sums["tokens"]).item()
            self.kl_coef = adaptive_kl_coefficient(
                self.kl_coef, kl, target=algorithm.kl_target, horizon=algorithm.kl_horizon, count=num_completions
            )

    def _reduce(self, sums: Sums) -> Sums:
        """Sums of all ranks, in one exchange; on the CPU."""
        mine = torch.stack(list(sums.values()))
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        return merge(dict(zip(sums, theirs.cpu(), strict=True)) for theirs in everyone)


def learning_rate(updates: int, config: Config, *, signal_share: float = 1.0) -> float:
    """The rate of the update after `updates` updates: a warm-up, a schedule, and what the step's groups can teach.

        lr        = learner.lr  warm-up  schedule  min(1, sqrt(signal_share / full_lr_signal))
        warm-up   = min(1, (updates + 1) / (warmup_steps + 1))
        schedule  constant   1
                  linear     lr_min_ratio + (1 - lr_min_ratio) (1 - p)
                  cosine     lr_min_ratio + (1 - lr_min_ratio) (1 + cos(pi p)) / 2
        p         = (updates - warmup_steps) / (updates of the whole run - warmup_steps), at least 0 and at most 1

    A resume with another `run.steps` goes on along the curve of the new length, at the update where it was.

    AdamW divides a gradient by its own recent size. Where nearly all prompts are solved, the one odd group that is left,
    or an entropy bonus alone, would be scaled up to a step as long as any: a run that has learnt unlearns. So the rate
    falls with the root of the number of groups that still teach.

    Args:
        signal_share: of the groups that are solved or have a signal, those that have a signal.
    Source:
        The root is the scaling rule of adaptive methods by batch size: Malladi et al. 2022, arXiv:2205.10287. What
        happens without it, and the alternatives: docs/stability.md.
    """
    learner = config.learner
    lr = learner.lr * min(1.0, (updates + 1) / (learner.warmup_steps + 1))
    if learner.lr_schedule != "constant":
        assert config.run.steps is not None, "checked with the configuration"
        total = config.run.steps * learner.updates_per_step
        progress = min(max((updates - learner.warmup_steps) / (total - learner.warmup_steps), 0.0), 1.0)
        left = 1 - progress if learner.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        lr *= learner.lr_min_ratio + (1 - learner.lr_min_ratio) * left
    if learner.full_lr_signal:
        lr *= min(1.0, math.sqrt(signal_share / learner.full_lr_signal))
    return lr


def has_only_policy_gradient(config: Config) -> bool:
    """Whether a completion with advantage 0 has no gradient at all."""
    algorithm = config.algorithm
    return (
        algorithm.kl_coef == 0
        and algorithm.entropy_coef == 0
        and algorithm.behaviour_kl_coef == 0
        and algorithm.loss not in TRAINS_ZERO_ADVANTAGE
        and not objective.needs_precompute(algorithm, config.learner.updates_per_step)
    )


def _optimizer(model: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW, with a larger rate for a critic's value head."""
    learner = config.learner
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for name, p in named if not name.startswith("value_head")], "lr_scale": 1.0}]
    critic = [p for name, p in named if name.startswith("value_head")]
    if critic:
        groups.append({"params": critic, "lr_scale": config.algorithm.critic.lr_scale})
    return torch.optim.AdamW(groups, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, fused=True)


def _mesh(device: torch.device, rank: int, world: int) -> dist.device_mesh.DeviceMesh:
    """All ranks in a row. Makes a process group of one where there is none."""
    if not dist.is_initialized():
        assert world == 1, "with several ranks the caller initialises torch.distributed"
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=world)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return init_device_mesh(device.type, (world,))
