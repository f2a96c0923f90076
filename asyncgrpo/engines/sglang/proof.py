"""Whether an SGLang model holds the weights that were sent last: every element of it, in every later version.

Each scheduler says once which boxes of the published tensors its parameters are made of (`plan.py`). From then on its checksum
has a digest of each box, of the live parameter, and the generator compares it with that of the tensor that it sent, rounded to
the parameter's dtype. What no box says anything of is compared between engines only: padding, scales, what a loader computes.
A parameter that holds other numbers there does not follow the weights, and neither does a box that the first weights leave
as it was.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncgrpo.engines.sglang.plan import Box, Left, Part, Published, left_by, rest, state, trace
from asyncgrpo.weights.boxes import box_digest
from asyncgrpo.weights.threads import spread

Given = Sequence[tuple[str, Tensor]]
"""Published tensors by their names on disk."""

PLAN = "plan "
"""In front of the published tensors as JSON: asks a scheduler of what its parameters are made."""
MAX_NAMES = 20


# -- in a scheduler ----------------------------------------------------------------------------------------------------


class Held:
    """What one scheduler holds. Its replies are texts by name, as those of SGLang's checksums."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._left: Left | None = None
        """What is in no part; None: nobody has looked yet."""
        self._shapes: dict[str, tuple[int, ...]] = {}

    def plan(self, model: nn.Module, asked: str) -> dict[str, str]:
        """Find out of what the parameters are made."""
        published: list[Published] = [(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(asked)]
        self._shapes = {name: shape for name, _, shape in published}
        self._parts, untraced = trace(model, published)
        self._left = left_by(model, self._parts)
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state(model).items()}
        made = [[*_plain(part.box), part.parameter, dtypes[part.parameter]] for part in self._parts]
        parameters = {name for name, _ in model.named_parameters()}  # what no tensor is written to may be a buffer
        looked_at = {name: places for name, places in self._left.items() if name in parameters}
        others = [name for name, values in rest(model, looked_at).items() if not _is_constant(values)]
        return {"parts": json.dumps(made), "untraced": json.dumps(untraced), "others": json.dumps(others)}

    def checksum(self, model: nn.Module, skipped: Iterable[str]) -> dict[str, str]:
        """A digest of each part, and of the elements of each parameter and buffer that are in none."""
        tensors, leave_out = state(model), set(skipped)
        said = {}
        for number, part in enumerate(self._parts):
            box = part.box
            values = part.of(tensors[part.parameter])
            said[str(number)] = f"{box_digest(values, box.tensor, self._shapes[box.tensor], box.start):016x}"
        if self._left is None:
            self._left = left_by(model, [])
        for name, values in rest(model, {n: at for n, at in self._left.items() if n not in leave_out}).items():
            said[name] = f"{box_digest(values, name, (len(values),), (0,)):016x}"
        return said


def _plain(box: Box) -> tuple[Any, ...]:
    return box.tensor, box.start, box.size


def _is_constant(values: Tensor) -> bool:
    """True of padding and of scales that no checkpoint has."""
    return bool((values == values[0]).all())


# -- in the generator --------------------------------------------------------------------------------------------------


def question(given: Given) -> str:
    """What asks a scheduler for its plan."""
    return PLAN + json.dumps([[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in given])


class _Kind(NamedTuple):
    """A box in the dtype of a parameter: what is digested once, wherever it lies."""

    box: Box
    dtype: torch.dtype


class Proof:
    """The boxes of which the parameters of one engine are made, and the digests of what it was sent last."""

    def __init__(self, given: Given, ranks: Sequence[Mapping[str, str]]) -> None:
        """
        Args:
            given: the first weights, which are not sent yet.
            ranks: what each scheduler said to `question`.
        """
        self._made: list[dict[str, tuple[str, _Kind]]] = []
        """By scheduler and number: a parameter, and what a part of it is."""
        self.untraced: dict[str, str] = {}
        """Tensors that could not be followed, with the reason."""
        self.do_not_follow: list[str] = []
        """Parameters with elements that no tensor is written to."""
        for rank in ranks:
            parts = json.loads(rank["parts"])
            self.untraced |= json.loads(rank["untraced"])
            self.do_not_follow += [name for name in json.loads(rank["others"]) if name not in self.do_not_follow]
            self._made.append(
                {
                    str(number): (parameter, _Kind(Box(tensor, tuple(start), tuple(size)), getattr(torch, dtype)))
                    for number, (tensor, start, size, parameter, dtype) in enumerate(parts)
                }
            )
        if self.untraced:  # what they are written to is not known
            self.do_not_follow = []
        used = {kind.box.tensor for made in self._made for _, kind in made.values()}
        self.nowhere = {name for name, _ in given} - used - self.untraced.keys()
        """Tensors of which no parameter has anything."""
        self.left_out: list[str] = []
        """Parameters that a loader changes after it has written them."""
        self._digests: dict[_Kind, int] = {}

    def published(self, given: Iterable[tuple[str, Tensor]]) -> None:
        """Note the digests of the tensors that were written. Reads all of them."""
        boxes: dict[str, set[_Kind]] = {}
        for made in self._made:
            for _, kind in made.values():
                boxes.setdefault(kind.box.tensor, set()).add(kind)
        wanted = ((tensor, kind) for name, tensor in given for kind in boxes.get(name, ()))

        def work(each: tuple[Tensor, _Kind]) -> tuple[_Kind, int]:
            tensor, kind = each
            values = kind.box.of(tensor).to(kind.dtype)
            return kind, box_digest(values, kind.box.tensor, tuple(tensor.shape), kind.box.start)

        self._digests = dict(spread(work, wanted))

    def differing(self, ranks: Sequence[Mapping[str, str]]) -> list[str]:
        """The parameters that are not made of the tensors that were sent last.

        Args:
            ranks: the checksum of each scheduler.
        """
        found = [name for name, _, _ in self._wrong(ranks)]
        return list(dict.fromkeys(found))

    def rely_on_what_follows(self, before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> None:
        """Compare the first weights. What has changed into something else is computed by the loader, and left out from now on.

        Args:
            before, after: the checksums of each scheduler around the first weights.
        """
        for name, rank, number in list(self._wrong(after)):
            if before[rank].get(number) == after[rank].get(number):
                self.do_not_follow += [name] if name not in self.do_not_follow else []
            else:
                self.left_out += [name] if name not in self.left_out else []
                del self._made[rank][number]

    def _wrong(self, ranks: Sequence[Mapping[str, str]]) -> Iterable[tuple[str, int, str]]:
        for rank, made in enumerate(self._made):
            for number, (name, kind) in made.items():
                if int(ranks[rank].get(number, "0"), 16) != self._digests.get(kind, -1):
                    yield name, rank, number

    def summary(self) -> str:
        """A line for the log: what is proved from now on."""
        proved = {name for made in self._made for name, _ in made.values()}
        line = f"each version is proved in {len(proved)} parameters of the model"
        line += f", not in {listed(self.left_out)}, which the loader changes" if self.left_out else ""
        return line + (f", not of {listed(list(self.untraced))}" if self.untraced else "")


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"
