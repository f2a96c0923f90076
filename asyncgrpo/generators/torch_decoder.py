"""One batch that answers join and leave between any two tokens: the synchronous heart of the `torch` engine.

    admit ──▶ prefill each prompt once, copy its keys and values to the rows of its answers
    step  ──▶ one forward over one token per running row ──▶ sample ──▶ answers that ended leave

A row holds one running answer: its tokens here, its keys and values in the slot of the same number. The cache of a row
of n tokens holds n - 1 of them; the last one is what the next step feeds. So a prompt is prefilled without its last
token, and the first sampled token comes out of an ordinary step.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from asyncgrpo.errors import EngineError
from asyncgrpo.generators.requests import Answer, Request
from asyncgrpo.generators.torch_cache import SlotCache
from asyncgrpo.generators.torch_sampling import Knobs, sample, uniforms
from asyncgrpo.types import FinishReason, WeightVersion

PREFILL_TOKENS = 16384
"""Padded tokens of one prefill forward, unless one sequence alone has more: bounds its memory."""
LENGTH_STEP = 32
"""A step attends to a multiple of this, so that shapes, and what allocators cache by shape, stay few."""

_ROW = np.dtype(
    [
        ("prompt_length", np.int64),
        ("length", np.int64),  # tokens so far, prompt included
        ("limit", np.int64),  # the answer ends when `length` reaches it
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float64),
        ("top_k", np.int64),
    ],
    align=True,
)


class Decoder:
    """Owns the rows and the cache. Every method leaves a batch that can go on, unless it raises: then `clear`."""

    def __init__(self, model: PreTrainedModel, *, max_context: int, max_answers: int):
        self.max_context = max_context
        self.max_answers = max_answers
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._model = model
        self._device: torch.device = model.device  # a search through all modules, so done once
        self._cache = SlotCache(max_answers, max_context)
        self._answers: list[Answer] = []  # by row; rows are dense
        self._rows = np.zeros(max_answers, _ROW)
        self._tokens = np.zeros((max_answers, max_context), np.int32)
        self._logprobs = np.zeros((max_answers, max_context), np.float32)  # of the tokens, at the same places
        self._stops = np.full((max_answers, 1), -1)  # grows to the longest list of stop tokens
        self._knobs: Knobs | None = None  # None: rows changed since it was made

    @property
    def num_running(self) -> int:
        return len(self._answers)

    @property
    def num_free(self) -> int:
        return self.max_answers - len(self._answers)

    @torch.inference_mode()
    def admit(self, batches: Sequence[Sequence[Answer]], version: WeightVersion) -> None:
        """Give each answer a row. The answers of one batch share their request, which is prefilled once."""
        slots: list[list[int]] = []
        for answers in batches:
            slots.append(list(range(self.num_running, self.num_running + len(answers))))
            self._add(answers[0].request, answers, slots[-1])
            for answer in answers:
                answer.sampled_by(version, 0)
        self._knobs = None
        self._prefill([np.array(answers[0].request.prompt[:-1]) for answers in batches], slots)

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one token in every row; the answers that ended are handed over and leave."""
        num_rows = self.num_running
        all_rows, row = np.arange(num_rows), self._rows[:num_rows]
        lengths = row["length"]
        logits = self._forward(self._tokens[all_rows, lengths - 1], lengths - 1)
        noise = uniforms(row["seed"], lengths - row["prompt_length"])
        sampled, sampled_logprobs = sample(logits, self._current_knobs(), self._on_device(noise))
        tokens, logprobs = sampled.cpu().numpy(), sampled_logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise EngineError("the model gives logits that are not finite")
        self._tokens[all_rows, lengths] = tokens
        self._logprobs[all_rows, lengths] = logprobs
        row["length"] += 1
        stopped = (tokens[:, None] == self._stops[:num_rows]).any(axis=1)
        ended = stopped | (row["length"] >= row["limit"])
        if ended.any():
            self._remove(np.flatnonzero(ended), ["stop" if stop else "length" for stop in stopped[ended]])

    def end(self, request: Request) -> None:
        """Every running answer of the request leaves with what it has."""
        rows = [row for row, answer in enumerate(self._answers) if answer.request is request]
        self._remove(np.array(rows, np.int64), ["abort"] * len(rows))

    def change_version(self, version: WeightVersion) -> None:
        """From now on tokens are sampled by `version`."""
        for answer, row in zip(self._answers, self._rows, strict=False):
            answer.sampled_by(version, int(row["length"] - row["prompt_length"]))

    @torch.inference_mode()
    def recompute(self) -> None:
        """Replace the keys and values of every row by those of the weights that the model has now."""
        lengths = self._rows["length"]
        self._prefill(
            [self._tokens[row, : lengths[row] - 1] for row in range(self.num_running)],
            [[row] for row in range(self.num_running)],
        )

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget every row, after a failure."""
        self._answers.clear()
        self._knobs = None
        self._cache.wipe()

    def _add(self, request: Request, answers: Sequence[Answer], slots: list[int]) -> None:
        prompt, sampling = request.prompt, request.sampling
        limit = min(len(prompt) + sampling.max_tokens, self.max_context)
        for slot, answer in zip(slots, answers, strict=True):
            self._rows[slot] = (
                len(prompt),
                len(prompt),
                limit,
                answer.seed & 0xFFFF_FFFF_FFFF_FFFF,
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
            )
        self._tokens[slots, : len(prompt)] = prompt
        missing = len(sampling.stop_token_ids) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[slots] = -1
        self._stops[slots, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self._answers.extend(answers)

    def _remove(self, rows: np.ndarray, reasons: Iterable[FinishReason]) -> None:
        """Complete the answers of `rows` (ascending) and move the last rows into the holes they leave."""
        for row, reason in zip(rows, reasons, strict=True):
            sampled = slice(self._rows["prompt_length"][row], self._rows["length"][row])
            self._answers[row].complete(self._tokens[row, sampled], self._logprobs[row, sampled], reason)
        num_left = self.num_running - len(rows)
        holes = rows[rows < num_left]
        stays = np.ones(self.num_running, bool)
        stays[rows] = False
        movers = num_left + np.flatnonzero(stays[num_left:])
        if len(movers):
            for table in (self._rows, self._tokens, self._logprobs, self._stops):
                table[holes] = table[movers]
            for hole, mover in zip(holes, movers, strict=True):
                self._answers[hole] = self._answers[mover]
            longest = int(self._rows["length"][holes].max())
            with torch.inference_mode():
                self._cache.move(self._on_device(movers), self._on_device(holes), longest)
        del self._answers[num_left:]
        self._knobs = None

    def _prefill(self, sequences: Sequence[np.ndarray], slots: Sequence[Sequence[int]]) -> None:
        """Fill `slots[i]` with the keys and values of `sequences[i]`, in forwards of about PREFILL_TOKENS."""
        todo = sorted((i for i, tokens in enumerate(sequences) if len(tokens)), key=lambda i: -len(sequences[i]))
        while todo:  # longest first, so that padding is short
            count = max(1, PREFILL_TOKENS // len(sequences[todo[0]]))
            self._prefill_together([sequences[i] for i in todo[:count]], [slots[i] for i in todo[:count]])
            todo = todo[count:]

    def _prefill_together(self, sequences: Sequence[np.ndarray], slots: Sequence[Sequence[int]]) -> None:
        """One forward over sequences padded on the right: causality hides the padding from every real token."""
        padded = np.zeros((len(sequences), max(map(len, sequences))), np.int64)
        for row, tokens in enumerate(sequences):
            padded[row, : len(tokens)] = tokens
        prefilled = DynamicCache()
        self._model.base_model(input_ids=self._on_device(padded), past_key_values=prefilled, use_cache=True)
        sources = np.repeat(np.arange(len(slots)), [len(targets) for targets in slots])
        targets = np.array([slot for targets in slots for slot in targets])
        self._cache.fill(prefilled, self._on_device(sources), self._on_device(targets))

    def _forward(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Feed one token per row ([R] each): logits [R, V]."""
        longest = int(positions.max()) + 1
        length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self.max_context)
        places = self._on_device(positions)
        self._cache.begin_step(places, length)
        visible = torch.arange(length, device=places.device) <= places[:, None]
        return self._model(
            input_ids=self._on_device(tokens.astype(np.int64))[:, None],
            position_ids=places[:, None],
            attention_mask=visible[:, None, None, :],  # of 4 dimensions: transformers takes it as it is
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, 0]

    def _current_knobs(self) -> Knobs:
        if self._knobs is None:
            row = self._rows[: self.num_running]
            self._knobs = Knobs.of(row["temperature"], row["top_p"], row["top_k"], self.vocab_size, self._device)
        return self._knobs

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)
