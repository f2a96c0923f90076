"""Measures TRL's asynchronous learner on our cells, for `benchmarks.learner_step`. It needs a Python with trl, torch and numpy.

python -m benchmarks.trl_learner --model FOLDER --batch tail --steps 4 --out SCRATCH

`AsyncGRPOTrainer` gets a rollout worker that always has the batch ready, and a weight transfer that does nothing, through the
two protocols that it offers for that. Its attention is a FlashAttention-3 kernel from the hub which
needs a GPU; here one `scaled_dot_product_attention` a segment stands for that function. bf16 autocast over float32
weights and micro-batches of 8 completions are its own ways; gradient checkpointing, its default, is off.
"""

import argparse
import os
import queue
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.cells import GROUP_SIZE, Batch, make_batch
from benchmarks.measuring import PeakMemory, show

MICROBATCH = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", required=True, help="scratch folder of the trainer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch, timer = make_batch(arguments.batch), Timer()
    trainer = make_trainer(arguments, batch, timer)
    memory = PeakMemory()
    trainer.train()
    seconds = [later - earlier for earlier, later in zip(timer.marks, timer.marks[1:], strict=False)]
    show({"cpu_s": seconds[1:], "peak_mb": memory.mb()})


class Timer(TrainerCallback):
    """Notes the CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.marks:
            self.marks.append(time.process_time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.marks.append(time.process_time())


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def make_trainer(arguments: argparse.Namespace, batch: Batch, timer: Timer) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    packing._flash_attn = lambda: SdpaSegments
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks for the name of a CUDA device
    samples = [
        RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.concatenate([prompt, completion]).astype(np.int64),
            completion_mask=np.concatenate([np.zeros(len(prompt), np.int64), np.ones(len(completion), np.int64)]),
            old_log_probs=np.concatenate([np.zeros(len(prompt), np.float32), logprobs]),
            advantage=float(advantage),
            model_version=0,
            group_id=i // GROUP_SIZE,
            metrics={"reward": float(reward)},
        )
        for i, (prompt, completion, logprobs, advantage, reward) in enumerate(
            zip(batch.prompts, batch.completions, batch.logprobs, batch.advantages, batch.rewards, strict=True)
        )
    ]
    settings = AsyncGRPOConfig(
        output_dir=arguments.out,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=1000,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        max_steps=arguments.steps + 1,
        learning_rate=1e-6,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=MICROBATCH,
        gradient_accumulation_steps=len(batch.completions) // MICROBATCH,
        token_budget=-1,
        max_completion_length=max(map(len, batch.completions)),
        seed=1234,
    )
    return AsyncGRPOTrainer(
        model=arguments.model,
        reward_funcs=no_reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * len(samples)}),
        callbacks=[timer],
        rollout_worker=Worker(samples),
        weight_transfer=NoTransfer(),
    )


class SdpaSegments:
    """Replaces the variable-length flash attention. It is causal: the last query sees the last key."""

    @staticmethod
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        *_: Any,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> torch.Tensor:
        out, queries, keys = torch.empty_like(q), cu_q.tolist(), cu_k.tolist()
        for i in range(len(queries) - 1):
            rows, columns = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
            num_rows, num_columns = rows.stop - rows.start, columns.stop - columns.start
            is_square = num_rows == num_columns
            seen = torch.ones(num_rows, num_columns, dtype=torch.bool).tril(num_columns - num_rows)
            attended = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q[rows], k[columns], v[columns])),
                attn_mask=None if is_square else seen,
                is_causal=is_square,
                scale=softmax_scale,
                enable_gqa=True,
            )
            out[rows] = attended[0].transpose(0, 1)
        return out


class Worker:
    """A rollout worker with its buffer, which returns the same batch again and again."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples, self._version, self._next = samples, 0, 0
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.rollout_buffer = self

    def get(self, timeout: float | None = None) -> Any:
        sample = self._samples[self._next % len(self._samples)]
        self._next += 1
        sample.model_version = self._version
        return sample

    def qsize(self) -> int:
        return len(self._samples)

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...
    def update_model_version(self, version: int) -> None:
        self._version = version


class NoTransfer:
    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, tensors: Any) -> None:
        for _ in tensors:
            pass

    def resume(self) -> None: ...
    def destroy(self) -> None: ...


if __name__ == "__main__":
    main()
