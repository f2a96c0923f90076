"""Which published tensors each parameter of an SGLang model is made of, and whether it is made of those of this version.

SGLang fuses tensors, splits them over processes and keeps several copies of some; and it ignores those whose names it does not
know. So before the first weights of an engine others are written into it. In the first every tensor is filled with a number
of its own, its tag: how many elements of a parameter hold which tag says of what it is made. The second are negative numbers
of all sizes. An element that is not positive first and negative then does not follow what is written. And both they and the
first real weights must have

    sum of a parameter over all processes = sum over tensors of  times(tensor) * sum of the tensor      (`weights.sums`)

Where that is true, it is checked under every later version: exact in every dtype, and of every element. It is not true of what
is computed on the way, and where a piece of a tensor is no whole number of words.

All numbers that are written are of bfloat16 (of float16, if such tensors are sent), so that float32 keeps them, too. Not looked
at are numbers that are not of two or four bytes (quantized weights). Positive elements that are all the same and do not follow
may be scales that no checkpoint has. Zeros, as in padded rows, are nobody's.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asyncgrpo.weights.sums import tile_sum, tiles, word_sum
from asyncgrpo.weights.threads import spread

Given = Sequence[tuple[str, Tensor]]
"""Published tensors by their names on disk."""

TAGS = "tags of "
"""In front of the name of a dtype: asks a scheduler for what `describe` says of each parameter."""
_NORMAL = {torch.bfloat16: (0x0080, 0x7F80), torch.float16: (0x0400, 0x7C00)}
"""The bits of the smallest normal number, which stands for the tensors of other passes, and of infinity, which is no tag."""
_SIGN = 0x8000
_OTHER = 0x7FFF
"""The bits that stand for all numbers that are none of the kind of the tags."""
_NEGATIVE = 0xFFFF
"""The bits that stand for all negative numbers."""
_PERIOD = 2**16 + 1
"""After so many elements the negative numbers repeat: a prime, so that no row of a matrix is like another."""
_MASK = 2**64 - 1
_AT_ONCE = 2**23
"""Elements that are looked at together: what is copied of a parameter."""
MAX_NAMES = 20


# -- what is written ---------------------------------------------------------------------------------------------------


class Tags:
    """The numbers that are written in the place of all tensors but those that are not looked at."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.kind = torch.float16 if any(tensor.dtype == torch.float16 for _, tensor in given) else torch.bfloat16
        self._none, self._infinity = _NORMAL[self.kind]
        self._most = self._infinity - self._none - 1
        self.passes = range(max(1, -(-len(given) // self._most)))
        """A pass tells 32,511 tensors apart (float16: 30,719)."""

    def constants(self, number: int) -> Iterator[tuple[str, Tensor]]:
        """Pass `number`: each tensor filled with its tag."""
        for index, (name, tensor) in enumerate(self.given):
            if is_looked_at(tensor):
                block, place = divmod(index, self._most)
                tag = self._numbers(torch.tensor(self._none + (1 + place if block == number else 0)))
                tensor = tag.to(tensor.dtype).expand(tensor.shape)
            yield name, tensor

    def negatives(self) -> Iterator[tuple[str, Tensor]]:
        """Negative numbers of all sizes, others in each tensor."""
        noise = torch.Generator().manual_seed(0)
        numbers = self._numbers(torch.randint(self._none, self._infinity, (_PERIOD,), generator=noise) - _SIGN)
        for index, (name, tensor) in enumerate(self.given):
            if is_looked_at(tensor):
                repeated = numbers.roll(index).repeat(-(-tensor.numel() // _PERIOD))
                tensor = repeated[: tensor.numel()].view(tensor.shape).to(tensor.dtype)
            yield name, tensor

    def named(self, number: int) -> dict[int, str]:
        """The tensors that pass `number` tells apart, by the bits of their tags."""
        mine = self.given[number * self._most : (number + 1) * self._most]
        return {self._none + 1 + place: name for place, (name, _) in enumerate(mine)}

    def _numbers(self, bits: Tensor) -> Tensor:
        return bits.to(torch.int16).view(self.kind)


def is_looked_at(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() in (2, 4)


def held(tensor: Tensor, kind: torch.dtype) -> dict[int, int]:
    """How many elements hold which number of `kind`, by its bits: zeros left out, all negative ones and all others together."""
    counts = torch.zeros(2**16, dtype=torch.int64)
    for piece in tensor.detach().reshape(-1).split(_AT_ONCE):
        numbers = piece.to(kind)
        bits = torch.where(numbers == piece, numbers.view(torch.int16).int(), _OTHER)
        bits = torch.where(piece < 0, _NEGATIVE, bits & 0xFFFF)
        values, times = torch.unique_consecutive(bits, return_counts=True)  # quick where few lie side by side
        counts.index_add_(0, values.cpu(), times.cpu())
    counts[[0, _SIGN]] = 0
    return {bits: int(counts[bits]) for bits in counts.nonzero()[:, 0].tolist()}


def describe(parameter: Tensor, kind: torch.dtype) -> str:
    """What a scheduler replies about a parameter that holds tags."""
    return json.dumps({"dtype": str(parameter.dtype).removeprefix("torch."), "held": held(parameter, kind)})


def proof(tensor: Tensor) -> str:
    """What engines compare of a parameter, which depends on where its tiles lie, and its sum: 16 hex digits each."""
    placed, total = 0, 0
    for start, tile in tiles(tensor):
        part = tile_sum(tile)
        placed += part * (2 * start + 1)  # an odd number for each place, so that no bit of a part is lost
        total += part
    return f"{placed & _MASK:016x}{total & _MASK:016x}"


# -- what they say -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A parameter, over all processes."""

    dtype: torch.dtype
    times: dict[str, int]
    """How many times each tensor is in it, as a whole."""


class Seen(NamedTuple):
    """What a parameter holds after a pass of tags, over all processes."""

    dtype: torch.dtype
    held: Counter[int]
    """How many elements hold which number, by its 16 bits."""


def seen(ranks: Iterable[Mapping[str, str]]) -> dict[str, Seen]:
    """Add up over all processes what `describe` said of each parameter."""
    total: dict[str, Seen] = {}
    for rank in ranks:
        for name, reply in rank.items():
            told = json.loads(reply)
            so_far = total.setdefault(name, Seen(getattr(torch, told["dtype"]), Counter()))
            so_far.held.update({int(bits): count for bits, count in told["held"].items()})
    return total


class Parts:
    """What tensors the parameters of one engine are made of, and the sums of those that it was sent last."""

    def __init__(self, tags: Tags, passes: Sequence[Mapping[str, Seen]], negative: Mapping[str, Seen]) -> None:
        """
        Args:
            passes: what was seen after each pass of tags, by parameter.
            negative: what was seen after the negative numbers.
        """
        given, last, named = dict(tags.given), passes[-1], [tags.named(number) for number in tags.passes]
        self.names = list(last)
        self.do_not_follow = [name for name in last if not _follows(last[name].held, negative[name].held)]
        self.made: dict[str, Made] = {}
        self.nowhere = {name for name, tensor in given.items() if is_looked_at(tensor)}
        """Tensors of which no parameter has anything."""
        for parameter in last:
            counted = {
                tags_of[bits]: count
                for tags_of, at in zip(named, passes, strict=True)
                for bits, count in at[parameter].held.items()
                if bits in tags_of
            }
            self.nowhere -= counted.keys()
            times = {name: count // given[name].numel() for name, count in counted.items()}
            if times and last[parameter].held.total() == sum(n * given[name].numel() for name, n in times.items()):
                self.made[parameter] = Made(last[parameter].dtype, times)
        self._sums: dict[tuple[str, torch.dtype], int] = {}

    def published(self, given: Iterable[tuple[str, Tensor]], *, partial: bool) -> None:
        """Note the sums of tensors that were written; with `partial` the others stay as they were. Reads all of them."""
        needed: dict[str, set[torch.dtype]] = {}
        for made in self.made.values():
            for tensor in made.times:
                needed.setdefault(tensor, set()).add(made.dtype)
        wanted = ((name, tensor, dtype) for name, tensor in given for dtype in needed.get(name, ()))
        found = spread(lambda each: ((each[0], each[2]), word_sum(each[1].to(each[2]))), wanted)
        self._sums = (self._sums if partial else {}) | dict(found)

    def differing(self, ranks: Iterable[Mapping[str, str]]) -> list[str]:
        """The parameters that are not made of the tensors that were sent last; `ranks`: the proofs of each process."""
        found: Counter[str] = Counter()
        for rank in ranks:
            found.update({name: int(proof[16:], 16) for name, proof in rank.items()})
        return [name for name, made in self.made.items() if (found[name] - self._expected(made)) & _MASK]

    def rely_on_what_is_true(self, ranks: Iterable[Mapping[str, str]]) -> None:
        """Leave out the parameters whose sums are not what their tags say, under tensors that no engine ignores."""
        for name in self.differing(ranks):
            del self.made[name]

    def _expected(self, made: Made) -> int:
        return sum(times * self._sums.get((tensor, made.dtype), 0) for tensor, times in made.times.items())

    def summary(self) -> str:
        """A line for the log: what is proved from now on."""
        left_out = [name for name in self.names if name not in self.made]
        line = f"each version is proved in {len(self.made)} of the {len(self.names)} parameters of the model"
        return line + (f", not in {listed(left_out)}" if left_out else "")


def _follows(positive: Counter[int], negative: Counter[int]) -> bool:
    """Whether no element kept its sign, unless all are one positive number, now as before."""
    is_constant = len(positive) == 1 and positive == negative and _NEGATIVE not in positive
    return is_constant or (_NEGATIVE not in positive and negative.keys() <= {_NEGATIVE})


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"
