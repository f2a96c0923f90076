"""One rank of the learner: groups in, the next weights out.

`step` is the algorithm. All ranks call every collective method in the same order with the same arguments; each trains
its share, and shares add up to what one process would have done, whatever the number of ranks and micro-batches.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from asyncgrpo.algorithms.advantages import Scale
from asyncgrpo.algorithms.aggregation import token_weights, weighted_sum
from asyncgrpo.algorithms.corrections import truncated_importance
from asyncgrpo.algorithms.diagnostics import Sums, gap_sums, importance_sums, mean_sums, merge
from asyncgrpo.algorithms.penalties import kl_penalty
from asyncgrpo.algorithms.surrogates import ppo_clip
from asyncgrpo.config import Config, LearnerConfig
from asyncgrpo.learner import checkpoint, exporting
from asyncgrpo.learner.batching import PackedBatch, StepBatch, pack
from asyncgrpo.learner.model import build_model, reshard, without_adapters
from asyncgrpo.learner.publishing import PublishedWeights
from asyncgrpo.learner.report import PhaseClock, StepReport, build_report
from asyncgrpo.types import Group, WeightVersion

ADVANTAGE_SCALES: dict[str, Scale] = {"grpo": "group_std", "dr_grpo": "none"}


class Learner:
    """The model, its optimizer and the reference, sharded over the ranks."""

    def __init__(self, config: Config, *, rank: int, world: int, device: torch.device | str) -> None:
        """Load the model. Collective.

        Args:
            config: of the whole run.
            rank, world: of the default process group. With world 1 one is made here if there is none.
            device: of this rank, `cpu` or `cuda:N`.
        Raises:
            ConfigError: the model cannot be loaded or trained here.
        """
        self.config, self.rank, self.world, self.device = config, rank, world, torch.device(device)
        self.steps = 0
        """Optimizer steps made."""
        mesh = _mesh(self.device, rank, world)
        dtype = getattr(torch, config.model.dtype)
        self.model = build_model(config.model.path, dtype, self.device, mesh, config)
        self.has_reference = config.algorithm.kl_coef > 0
        self._reference = None
        if self.has_reference and not config.model.lora.rank:  # with adapters the reference is the model without them
            self._reference = build_model(config.model.path, dtype, self.device, mesh, config, trainable=False)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=config.learner.lr,
            betas=config.learner.betas,
            weight_decay=config.learner.weight_decay,
            fused=True,
        )
        self._published = PublishedWeights(self.model, dtype)
        self.layout, self.weights = self._published.layout, self._published.weights

    def step(self, groups: list[Group], version: WeightVersion) -> StepReport:
        """Train once on `groups`; `version` names the weights before it. Collective.

        A gradient that is not finite changes nothing and is reported in `skipped`.
        """
        clock, lr = PhaseClock(self.device), learning_rate(self.steps, self.config.learner)
        with clock("pack"):
            batch = self._pack(groups, version)
        with clock("forward_backward"):
            sums = [self._score(microbatch, batch) for microbatch in batch.silent]
            sums += [self._accumulate(microbatch, batch) for microbatch in batch.trained]
        with clock("optimizer"):
            grad_norm, skipped = self._update(lr)
        with clock("report"):
            totals = self._reduce(merge(sums))
        return build_report(totals, batch, skipped=skipped, grad_norm=grad_norm, lr=lr, seconds=clock.seconds)

    def save(self, folder: str) -> None:
        """Write what `load` needs to go on exactly here. Collective. Raises CheckpointError."""
        checkpoint.save(folder, self.model, self.optimizer, self.steps)

    def load(self, folder: str) -> None:
        """Read what `save` wrote, on any number of ranks. Collective. Raises CheckpointError."""
        self.steps = checkpoint.load(folder, self.model, self.optimizer)

    def export(self, folder: str, tokenizer_path: str | None = None) -> None:
        """Write a Hugging Face model folder, with the tokenizer of `tokenizer_path` (a folder or hub id). Collective.

        Raises CheckpointError.
        """
        exporting.export(folder, self.model, self._published, tokenizer_path)

    def _pack(self, groups: list[Group], version: WeightVersion) -> StepBatch:
        algorithm = self.config.algorithm
        return pack(
            groups,
            version,
            rank=self.rank,
            world=self.world,
            tokens_per_microbatch=self.config.learner.tokens_per_microbatch,
            scale=ADVANTAGE_SCALES[algorithm.advantage],
            padded=not self.model.has_varlen_kernel,
            skip_silent=algorithm.kl_coef == 0 and algorithm.entropy_coef == 0,
        )

    def _accumulate(self, microbatch: PackedBatch, step: StepBatch) -> Sums:
        """Forward and backward of one micro-batch; its share of the gradient is added to the parameters'."""
        loss, sums = self._loss(microbatch.to(self.device), step)
        loss.backward()
        return sums

    @torch.no_grad()
    def _score(self, microbatch: PackedBatch, step: StepBatch) -> Sums:
        """Forward only, for a micro-batch without gradient."""
        _, sums = self._loss(microbatch.to(self.device), step)
        reshard(self.model)
        return sums

    def _loss(self, batch: PackedBatch, step: StepBatch) -> tuple[Tensor, Sums]:
        """This micro-batch's share of the step's loss, to be differentiated, and what it reports."""
        algorithm = self.config.algorithm
        mask, advantages, behaviour = batch.mask, batch.advantages, batch.behaviour_logprobs
        reference = self._reference_logprobs(batch) if self.has_reference else None
        policy, entropy = self.model.score(batch, entropy_gradient=algorithm.entropy_coef > 0)
        # A batch is trained once, by one optimizer step, so the weights at its start are the policy's own.
        proximal = policy.detach()

        log_rho = proximal - behaviour
        if algorithm.anchor == "proximal":
            anchor, importance = proximal, truncated_importance(log_rho, cap=algorithm.importance_cap)
        else:  # the clip itself bounds the distance to the behaviour policy
            anchor, importance = behaviour, torch.ones_like(log_rho)
        surrogate = ppo_clip(policy.detach() - anchor, advantages, low=algorithm.clip_low, high=algorithm.clip_high)
        weights = token_weights(
            mask,
            batch.cu_seqlens,
            mode=algorithm.aggregation,
            num_tokens=step.num_tokens,
            num_sequences=step.num_answers,
            max_length=self.config.sampling.max_tokens,
        )

        slope = -importance * surrogate.coefficient * advantages  # derivative of the token's loss by its log-prob
        value = -importance * surrogate.value - algorithm.entropy_coef * entropy.detach()
        sums = mean_sums(mask, entropy=entropy.detach(), clipped=surrogate.clipped)
        if reference is not None:
            kl = kl_penalty(proximal, reference, kind=algorithm.kl_kind)
            slope = slope + algorithm.kl_coef * kl.coefficient
            value = value + algorithm.kl_coef * kl.value
            sums |= mean_sums(mask, kl=kl.value)
        sums |= importance_sums(log_rho, mask, cap=algorithm.importance_cap)
        sums |= gap_sums(proximal, behaviour, batch.is_current)
        sums["loss"] = weighted_sum(value, weights).double()
        loss = weighted_sum(slope * policy, weights)
        return loss - algorithm.entropy_coef * weighted_sum(entropy, weights), sums

    @torch.no_grad()
    def _reference_logprobs(self, batch: PackedBatch) -> Tensor:
        """[T] log-probs under the initial model."""
        if self._reference is not None:
            return self._reference.score(batch).logprobs
        with without_adapters(self.model):
            logprobs = self.model.score(batch).logprobs
        reshard(self.model)
        return logprobs

    def _update(self, lr: float) -> tuple[float, str | None]:
        """Clip the gradient and step; or, if it is not finite, drop it. Gives its norm, and why it was dropped."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        grad_norm = norm.item()
        skipped = None if norm.isfinite() else f"the gradient norm is {grad_norm}"
        if skipped is None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.learner.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm, skipped

    def _reduce(self, sums: Sums) -> dict[str, float]:
        """Sums of all ranks, in one exchange."""
        mine = torch.stack(list(sums.values()))
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        merged = merge(dict(zip(sums, theirs, strict=True)) for theirs in everyone)
        return dict(zip(merged, torch.stack(list(merged.values())).tolist(), strict=True))


def learning_rate(steps: int, config: LearnerConfig) -> float:
    """Of the step after `steps` steps: a linear warm-up that ends at `lr`, then constant."""
    return config.lr * min(1.0, (steps + 1) / (config.warmup_steps + 1))


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
