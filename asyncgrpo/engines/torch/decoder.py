"""The synchronous core of the `torch` engine: continuous batching of completions, which join and leave between tokens.

    admit ──▶ prefill each prompt once, copy its keys and values to the rows of its completions
    step  ──▶ one forward over one token per running row ──▶ sample ──▶ finished completions leave

A row holds one running completion: its tokens in the decoder, its keys and values in the slot of the same number. The
cache of a row of n tokens holds n - 1 of them; the last one is the input of the next step. So a prompt is prefilled
without its last token, and the first sampled token comes from an ordinary step.

Rows are kept dense (0 .. R-1), so that a step reads a view of the cache without copies. The cost is one copy of a slot when
a completion in the middle ends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel

from asyncgrpo.engines.base import PendingCompletion, Request
from asyncgrpo.errors import EngineError
from asyncgrpo.types import FinishReason, PolicyVersion

# -- sampling ----------------------------------------------------------------------------------------------------------

# Noise is stateless: the number that decides token t of a completion is a hash of the completion's seed and t, so a
# completion does not depend on the others in its batch. The token is the inverse of the cumulative distribution at that
# number, in vocabulary order.

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Knobs:
    """Sampling parameters of R rows, on the device of the logits."""

    temperature: Tensor
    """[R] float32; 1 for greedy rows, whose log-probs are those of the raw logits."""
    greedy: Tensor | None
    """[R] bool; None: no row is greedy."""
    filtered_rows: Tensor | None
    """[F] int64, rows restricted by top-k or top-p; None: no row is."""
    top_k: Tensor
    """[F] int64; the size of the vocabulary where no limit is set."""
    top_p: Tensor
    """[F] float64."""

    @classmethod
    def of(cls, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, vocab_size: int, device: torch.device):
        """Build from the `types.Sampling` fields of R rows, [R] each."""
        greedy = temperature == 0
        filtered = np.flatnonzero(((top_p < 1) | (top_k != -1)) & ~greedy)
        limits = np.where(top_k == -1, vocab_size, top_k)[filtered]

        def on_device(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

        return cls(
            temperature=on_device(np.where(greedy, 1.0, temperature), torch.float32),
            greedy=on_device(greedy, torch.bool) if greedy.any() else None,
            filtered_rows=on_device(filtered, torch.long) if len(filtered) else None,
            top_k=on_device(limits, torch.long),
            top_p=on_device(top_p[filtered], torch.float64),
        )


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each pair of seed ([R] uint64) and position in the completion ([R] int64): [R] float64.

    Each seed has a stream of SplitMix64, started at a mixed seed so that neighbouring seeds are independent. The numbers
    have 52 bits, so that u * total stays below total in float64.
    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
    """
    mixed = _mix(_mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample(logits: Tensor, knobs: Knobs, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Pick one token per row.

    Args:
        logits: [R, V] any float dtype.
        knobs: sampling parameters of the R rows.
        noise: [R] float64 in [0, 1).
    Returns:
        tokens [R] int64, and [R] float32 their log-probabilities (nats) under softmax(logits / temperature) over the whole
        vocabulary; not finite where the logits were not.
    """
    logprobs = torch.log_softmax(logits.float() / knobs.temperature[:, None], dim=-1)
    probs = logprobs.exp()
    tokens = _invert(probs, noise)
    if knobs.filtered_rows is not None:
        rows = knobs.filtered_rows
        tokens[rows] = _invert_filtered(probs[rows], knobs.top_k, knobs.top_p, noise[rows])
    if knobs.greedy is not None:
        tokens = torch.where(knobs.greedy, logits.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _invert(probs: Tensor, noise: Tensor) -> Tensor:
    """Return [R] the first tokens whose cumulative probability exceeds noise * total. `probs` [R, V] need not sum to 1."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)  # float32 would lose tokens of a large vocabulary
    tokens = torch.searchsorted(cumulative, (noise * cumulative[:, -1])[:, None], right=True)[:, 0]
    return tokens.clamp(max=probs.shape[1] - 1)  # only NaNs exceed the end


def _invert_filtered(probs: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """Do as `_invert`, among the `top_k` most probable tokens and of those the fewest whose share reaches `top_p`."""
    ordered, tokens = probs.double().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[1], device=probs.device)
    ordered = ordered.where(ranks < top_k[:, None], 0.0)
    better = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.where((better < top_p[:, None] * ordered.sum(dim=-1, keepdim=True)) | (ranks == 0), 0.0)
    # A parallel scan may round so that a token of probability 0 is picked: stay among those that are left.
    last = (ordered > 0).sum(dim=-1).clamp(min=1) - 1
    return tokens.gather(1, torch.minimum(_invert(ordered, noise), last)[:, None])[:, 0]


def _mix(state: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser, [R] uint64 to [R] uint64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


# -- decoding ----------------------------------------------------------------------------------------------------------

PREFILL_TOKENS = 16384
"""Padded tokens of one prefill forward, unless a single sequence has more. It bounds the memory."""
LENGTH_STEP = 32
"""A step attends to a multiple of this, so that there are few shapes and allocators can cache memory."""

_ROW = np.dtype(
    [
        ("prompt_length", np.int64),
        ("length", np.int64),  # tokens so far, prompt included
        ("limit", np.int64),  # the completion ends when `length` reaches it
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float64),
        ("top_k", np.int64),
    ],
    align=True,
)


class Decoder:
    """Owns the rows and the cache. After an exception of any method, call `clear`."""

    def __init__(self, model: PreTrainedModel, *, max_context: int, max_completions: int):
        self.max_context = max_context
        self.max_completions = max_completions
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self._model = model
        self._device: torch.device = model.device  # a search through all modules, so done once
        self._cache = SlotCache(max_completions, max_context)
        self._running: list[PendingCompletion] = []  # by row; rows are dense
        self._rows = np.zeros(max_completions, _ROW)
        width = max(3, max_context)  # the first request has 3 tokens
        self._tokens = np.zeros((max_completions, width), np.int32)
        self._logprobs = np.zeros((max_completions, width), np.float32)  # of the tokens, at the same places
        self._stops = np.full((max_completions, 1), -1)  # grows to the longest list of stop tokens
        self._knobs: Knobs | None = None  # None: rows changed since it was made

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def kv_use(self) -> float:
        """Share of the cache's positions that hold keys and values of running completions."""
        # The last token of each is not there.
        held = int(self._rows["length"][: self.num_running].sum()) - self.num_running
        return held / (self.max_completions * self.max_context)

    @torch.inference_mode()
    def admit(self, batches: Sequence[Sequence[PendingCompletion]], version: PolicyVersion) -> None:
        """Assign a row to each completion. The completions of one batch share their request, which is prefilled once."""
        slots: list[list[int]] = []
        for completions in batches:
            slots.append(list(range(self.num_running, self.num_running + len(completions))))
            self._add(completions[0].request, completions, slots[-1])
            for completion in completions:
                completion.sampled_by(version, 0)
        self._knobs = None
        self._prefill([np.array(completions[0].request.prompt[:-1]) for completions in batches], slots)

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one token in every row. Finished completions are delivered and leave the batch."""
        num_rows = self.num_running
        all_rows, row = np.arange(num_rows), self._rows[:num_rows]
        lengths = row["length"]
        logits = self._forward(self._tokens[all_rows, lengths - 1], lengths - 1)
        noise = uniforms(row["seed"], lengths - row["prompt_length"])
        if self._knobs is None:
            self._knobs = Knobs.of(row["temperature"], row["top_p"], row["top_k"], self.vocab_size, self._device)
        sampled, sampled_logprobs = sample(logits, self._knobs, self._on_device(noise))
        tokens, logprobs = sampled.cpu().numpy(), sampled_logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise EngineError("the model returned logits that are not finite")
        self._tokens[all_rows, lengths] = tokens
        self._logprobs[all_rows, lengths] = logprobs
        row["length"] += 1
        stopped = (tokens[:, None] == self._stops[:num_rows]).any(axis=1)
        ended = stopped | (row["length"] >= row["limit"])
        if ended.any():
            self._remove(np.flatnonzero(ended), ["stop" if stop else "length" for stop in stopped[ended]])

    def end(self, request: Request) -> None:
        """Deliver every running completion of the request with its tokens so far, and remove it from the batch."""
        rows = [row for row, completion in enumerate(self._running) if completion.request is request]
        self._remove(np.array(rows, np.int64), ["abort"] * len(rows))

    def change_version(self, version: PolicyVersion) -> None:
        """Note that `version` samples from now on."""
        for completion, row in zip(self._running, self._rows, strict=False):
            completion.sampled_by(version, int(row["length"] - row["prompt_length"]))

    @torch.inference_mode()
    def recompute(self) -> None:
        """Replace the keys and values of every row by those of the weights that the model has now."""
        lengths, rows = self._rows["length"], range(self.num_running)
        self._prefill([self._tokens[row, : lengths[row] - 1] for row in rows], [[row] for row in rows])

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]], start: int) -> list[float]:
        """Return the log-probs of the tokens from `start` on of each sequence, nats, without using rows or cache."""
        found = []
        for tokens in sequences:
            given = torch.tensor([tokens], device=self._device)
            logits = self._model(input_ids=given, use_cache=False).logits[0, start - 1 : -1].float()
            found += logits.log_softmax(-1).gather(-1, given[0, start:, None]).squeeze(-1).tolist()
        return found

    @torch.inference_mode()
    def clear(self) -> None:
        """Drop every row after a failure."""
        self._running.clear()
        self._knobs = None
        self._cache.wipe()

    def _add(self, request: Request, completions: Sequence[PendingCompletion], slots: list[int]) -> None:
        prompt, sampling = request.prompt, request.sampling
        limit = min(len(prompt) + sampling.max_tokens, self.max_context)
        knobs = sampling.temperature, sampling.top_p, sampling.top_k
        for slot, completion in zip(slots, completions, strict=True):
            self._rows[slot] = (len(prompt), len(prompt), limit, completion.seed & 0xFFFF_FFFF_FFFF_FFFF, *knobs)
        self._tokens[slots, : len(prompt)] = prompt
        missing = len(sampling.stop_token_ids) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[slots] = -1
        self._stops[slots, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self._running.extend(completions)

    def _remove(self, rows: np.ndarray, reasons: Iterable[FinishReason]) -> None:
        """Complete the completions of `rows` (ascending), and move the last rows into the freed rows."""
        for row, reason in zip(rows, reasons, strict=True):
            sampled = slice(self._rows["prompt_length"][row], self._rows["length"][row])
            self._running[row].complete(self._tokens[row, sampled], self._logprobs[row, sampled], reason)
        num_left = self.num_running - len(rows)
        holes = rows[rows < num_left]
        stays = np.ones(self.num_running, bool)
        stays[rows] = False
        movers = num_left + np.flatnonzero(stays[num_left:])
        if len(movers):
            for table in (self._rows, self._tokens, self._logprobs, self._stops):
                table[holes] = table[movers]
            for hole, mover in zip(holes, movers, strict=True):
                self._running[hole] = self._running[mover]
            longest = int(self._rows["length"][holes].max())
            with torch.inference_mode():
                self._cache.move(self._on_device(movers), self._on_device(holes), longest)
        del self._running[num_left:]
        self._knobs = None

    def _prefill(self, sequences: Sequence[np.ndarray], slots: Sequence[Sequence[int]]) -> None:
        """Fill `slots[i]` with the keys and values of `sequences[i]`, in forwards of about PREFILL_TOKENS."""
        todo = sorted((i for i, tokens in enumerate(sequences) if len(tokens)), key=lambda i: -len(sequences[i]))
        while todo:  # longest first, so that padding is short
            longest = len(sequences[todo[0]])
            count = max(1, PREFILL_TOKENS // longest)
            some, todo = todo[:count], todo[count:]
            padded = np.zeros((len(some), longest), np.int64)  # causality hides the padding from every real token
            for row, i in enumerate(some):
                padded[row, : len(sequences[i])] = sequences[i]
            prefilled = DynamicCache()
            self._model.base_model(input_ids=self._on_device(padded), past_key_values=prefilled, use_cache=True)
            sources = np.repeat(np.arange(len(some)), [len(slots[i]) for i in some])
            targets = np.array([slot for i in some for slot in slots[i]])
            self._cache.fill(prefilled, self._on_device(sources), self._on_device(targets))

    def _forward(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Run one token per row ([R] each) and return logits [R, V]."""
        longest = int(positions.max()) + 1
        length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self.max_context)
        places = self._on_device(positions)
        self._cache.begin_step(places, length)
        visible = torch.arange(length, device=places.device) <= places[:, None]
        return self._model(
            input_ids=self._on_device(tokens.astype(np.int64))[:, None],
            position_ids=places[:, None],
            attention_mask=visible[:, None, None, :],  # 4 dimensions: transformers uses it unchanged
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, 0]

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


# -- keys and values ---------------------------------------------------------------------------------------------------


class SlotCache(Cache):
    """A transformers cache for batches of one new token per row, each row at its own position.

    Memory is taken at the first `fill`: layers * num_slots * max_length * (key + value) numbers, zeroed, because a NaN
    in an unused place would survive the attention mask (0 * NaN).
    """

    def __init__(self, num_slots: int, max_length: int):
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.max_length = max_length
        self._keys: list[Tensor] = []  # one [num_slots, kv_heads, max_length, head_dim] per layer
        self._values: list[Tensor] = []
        self._rows = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(0, dtype=torch.long)
        self._length = 0

    def fill(self, prefilled: DynamicCache, sources: Tensor, slots: Tensor) -> None:
        """Copy the keys and values of whole sequences into slots, from position 0.

        Args:
            prefilled: of a forward over B sequences, padded on the right to T tokens. Keys of padding are copied too;
                they are overwritten before a mask shows them.
            sources: [S] int64, which of the B sequences goes to each slot.
            slots: [S] int64.
        """
        for index, layer in enumerate(prefilled.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None:
                raise EngineError(f"layer {index} of the model has no keys and values: {type(layer).__name__}")
            if index == len(self._keys):
                self._keys.append(keys.new_zeros(self._shape(keys)))
                self._values.append(values.new_zeros(self._shape(values)))
            self._keys[index][slots, :, : keys.shape[2]] = keys[sources]
            self._values[index][slots, :, : values.shape[2]] = values[sources]

    def move(self, sources: Tensor, slots: Tensor, length: int) -> None:
        """Copy the first `length` positions of `sources` over those of `slots` ([S] int64 each, disjoint)."""
        for block in (*self._keys, *self._values):
            block[slots, :, :length] = block[sources, :, :length]

    def wipe(self) -> None:
        """Zero all memory, including NaNs of a failed forward."""
        for block in (*self._keys, *self._values):
            block.zero_()

    def begin_step(self, positions: Tensor, length: int) -> None:
        """Prepare a forward with one token per row, row r at `positions[r]` ([R] int64), that attends to [0, length)."""
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions = positions
        self._length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new token's keys and values, [R, kv_heads, 1, head_dim], and return all up to `length`."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        num_rows = len(self._rows)
        return keys[:num_rows, :, : self._length], values[:num_rows, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - 1

    def _shape(self, states: Tensor) -> tuple[int, int, int, int]:
        return self.num_slots, states.shape[1], self.max_length, states.shape[3]


# -- attention ---------------------------------------------------------------------------------------------------------

NAME = "asyncgrpo_sdpa"
"""The `attn_implementation` of a model, after `register`."""


def register() -> None:
    """Register the implementation with transformers, in this process. It may be called again."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend with one new token a row, in the form of transformers' attention functions.

    Where several query heads share one head of keys and values, transformers repeats those before PyTorch's attention if
    there is a mask, which on a CPU is most of a decode step. Here the query heads of a group are the "query tokens" of
    one attention instead: the same sum without the copy. Everything else is left to transformers' own `sdpa`.

    Args:
        query: [R, heads, Q, head_dim].
        key, value: [R, kv_heads, L, head_dim].
        attention_mask: [R, 1, Q, L] bool, true where a query may attend.
        options: `scaling`, and others that only transformers' implementation knows.
    Returns:
        [R, Q, heads, head_dim], and no attention weights.
    """
    num_rows, num_heads, num_queries, head_dim = query.shape
    has_more = any(options.get(name) is not None for name in ("position_bias", "s_aux", "softcap"))
    if num_queries != 1 or attention_mask is None or has_more:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)
    grouped = query.reshape(num_rows, key.shape[1], num_heads // key.shape[1], head_dim)
    attended = scaled_dot_product_attention(grouped, key, value, attention_mask, scale=options.get("scaling"))
    return attended.reshape(num_rows, 1, num_heads, attended.shape[-1]), None
