"""The sum of a tensor: 64 bits that stay the same wherever its words lie, so that those of its parts are those of the whole.

    sum = sum over words of  f + 2 f^2   modulo 2^64,   f = w ^ (w >>> 31),   a word w has 8 bytes

An engine cuts, stacks and copies published tensors into parameters of its own. The sums of its parameters are then whole
multiples of the sums of those tensors, whatever went where, as long as whole words move.

What it finds:

- for certain: any change within one word. The fold can be undone, and so can f + 2 f^2 modulo 2^64 (as in RC6: Rivest,
  Robshaw, Sidney and Yin 1998);
- unrelated words in the place of others: all but about one in 2^64;
- steps up in some words and down in others, such as one unit in the last place: a step d of f moves the sum by d (1 + 4 f + 2 d),
  by another amount in each word. Even where all words are the same, a step up and one down leave 4 d^2, which is not zero for a
  step that the fold has copied to a low place;
- not: the same words at other places, which is what it is for. Zeros add nothing.
"""

import threading
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncgrpo.weights.digest import WORD

_SHIFT = 31
_MASK = 2**64 - 1
TILE_BYTES = 2**19
"""What is read at once: on a CPU it and as much scratch stay in a core's cache."""
TILE_BYTES_ON_DEVICE = 2**25


class _Scratch(threading.local):
    """Memory of a thread, made once: threads that allocate for each tile wait for each other."""

    def __init__(self) -> None:
        self.words = np.empty(TILE_BYTES // WORD, np.uint64)


_scratch = _Scratch()


Words = NDArray[np.uint64] | Tensor
"""[n] words: an array on a CPU (each operation of torch would wait for the interpreter), an int64 tensor on a GPU."""


def word_sum(tensor: Tensor) -> int:
    """The sum of a tensor of any shape and dtype, on a CPU or a GPU; the last word is filled up with zeros."""
    return sum(tile_sum(tile) for _, tile in tiles(tensor)) & _MASK


def tiles(tensor: Tensor) -> Iterator[tuple[int, Words]]:
    """The words of a tensor in order, a tile at a time, and at which byte each begins; the last word is filled up with zeros."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    whole = len(flat) // WORD * WORD
    words = _words(flat[:whole])
    step = (TILE_BYTES if flat.device.type == "cpu" else TILE_BYTES_ON_DEVICE) // WORD
    for start in range(0, len(words), step):
        yield start * WORD, words[start : start + step]
    if rest := len(flat) - whole:
        yield whole, _words(torch.nn.functional.pad(flat[whole:], (0, WORD - rest)))


def _words(flat: Tensor) -> Words:
    words = flat.view(torch.int64)
    return words.numpy().view(np.uint64) if flat.device.type == "cpu" else words


def tile_sum(words: Words) -> int:
    """The sum of at most a tile; not reduced modulo 2^64."""
    if isinstance(words, Tensor):
        return _on_device(words)
    folded = _scratch.words[: len(words)]
    np.right_shift(words, np.uint64(_SHIFT), out=folded)
    np.bitwise_xor(folded, words, out=folded)
    return int(np.add.reduce(folded)) + 2 * int(np.dot(folded, folded))


def _on_device(words: Tensor) -> int:
    folded = (words >> _SHIFT).bitwise_and_(2 ** (64 - _SHIFT) - 1).bitwise_xor_(words)  # >> repeats the sign
    total = folded.sum()
    return int((total + 2 * folded.mul_(folded).sum()).item())
