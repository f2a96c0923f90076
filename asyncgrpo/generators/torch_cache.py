"""Keys and values of all running answers of the `torch` engine, in one block per layer.

Slot r belongs to row r of the running batch. Rows are kept dense (0 .. R-1), so that one decode step reads a view of
the block and copies nothing; the price is one copy of a slot when an answer in the middle ends.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from asyncgrpo.errors import EngineError


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
            prefilled: what a forward over B sequences, padded on the right to T tokens, left behind. Keys of padding
                are copied too; they are overwritten before a mask lets anyone see them.
            sources: [S] int64, which of the B sequences goes to each slot.
            slots: [S] int64.
        """
        for index, layer in enumerate(prefilled.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None:
                raise EngineError(f"layer {index} of the model keeps no keys and values: {type(layer).__name__}")
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
        """Zero everything, NaNs of a failed forward included."""
        for block in (*self._keys, *self._values):
            block.zero_()

    def begin_step(self, positions: Tensor, length: int) -> None:
        """The next forward has one token per row, row r at `positions[r]` ([R] int64), and attends to [0, length)."""
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions = positions
        self._length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Each attention layer stores the new token's [R, kv_heads, 1, head_dim] and gets all up to `length`."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        num_rows = len(self._rows)
        return keys[:num_rows, :, : self._length], values[:num_rows, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length - 1

    def _shape(self, states: Tensor) -> tuple[int, int, int, int]:
        return self.num_slots, states.shape[1], self.max_length, states.shape[3]
