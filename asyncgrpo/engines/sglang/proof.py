"""Proof that an SGLang model holds the weights that were sent last, element by element.

Each scheduler reports once which boxes of the published tensors its parameters consist of (`plan.py`). From then on its
checksum has a digest of each box of the live parameters. The generator compares it with the digest of the sent tensor, rounded
to the parameter's dtype. Elements outside all boxes (padding, scales, values that a loader computes) are compared between
engines only. A parameter with non-constant elements there does not follow the weights, nor does a box that the first weights
leave unchanged.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asyncgrpo.engines.sglang.plan import Box, Left, Part, Published, left_by, rest, state, trace
from asyncgrpo.weights.digest import box_digest, spread

Given = Sequence[tuple[str, Tensor]]
"""Published tensors by their names on disk."""

PLAN = "plan "
"""Prefix of a request for the plan; the published tensors follow as JSON."""
MAX_NAMES = 20
"""Names in a log line."""


# -- in a scheduler ----------------------------------------------------------------------------------------------------


class Held:
    """The parameters of one scheduler. Its replies are texts by name, as those of SGLang's checksums."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._left: Left | None = None
        """Elements outside all parts; None until computed."""
        self._shapes: dict[str, tuple[int, ...]] = {}

    def plan(self, model: nn.Module, asked: str) -> dict[str, str]:
        """Trace the loader. Returns the parts, untraced tensors, and parameters with other elements, as JSON."""
        published: list[Published] = [(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(asked)]
        self._shapes = {name: shape for name, _, shape in published}
        self._parts, untraced = trace(model, published)
        self._left = left_by(model, self._parts)
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state(model).items()}
        made = [[*_plain(part.box), part.parameter, dtypes[part.parameter]] for part in self._parts]
        parameters = {name for name, _ in model.named_parameters()}  # buffers may stay unwritten
        left = {name: places for name, places in self._left.items() if name in parameters}
        others = [name for name, values in rest(model, left).items() if not _is_constant(values)]
        return {"parts": json.dumps(made), "untraced": json.dumps(untraced), "others": json.dumps(others)}

    def checksum(self, model: nn.Module, skipped: Iterable[str]) -> dict[str, str]:
        """Return a digest of each part, and of the elements of each parameter and buffer outside all parts."""
        tensors, leave_out = state(model), set(skipped)
        digests = {}
        for number, part in enumerate(self._parts):
            box = part.box
            values = part.of(tensors[part.parameter])
            digests[str(number)] = f"{box_digest(values, box.tensor, self._shapes[box.tensor], box.start):016x}"
        if self._left is None:
            self._left = left_by(model, [])
        for name, values in rest(model, {n: at for n, at in self._left.items() if n not in leave_out}).items():
            digests[name] = f"{box_digest(values, name, (len(values),), (0,)):016x}"
        return digests


def _plain(box: Box) -> tuple[Any, ...]:
    return box.tensor, box.start, box.size


def _is_constant(values: Tensor) -> bool:
    """True for padding, and for scales that no checkpoint has."""
    return bool((values == values[0]).all())


# -- in the generator --------------------------------------------------------------------------------------------------


def question(given: Given) -> str:
    """Return the request for a scheduler's plan."""
    return PLAN + json.dumps([[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in given])


class _Kind(NamedTuple):
    """A box in the dtype of a parameter. It is digested once, for all its copies."""

    box: Box
    dtype: torch.dtype


class Proof:
    """The boxes of one engine's parameters, and the digests of the weights that it was sent last."""

    def __init__(self, given: Given, ranks: Sequence[Mapping[str, str]]) -> None:
        """
        Args:
            given: the first weights, before they are sent.
            ranks: reply of each scheduler to `question`.
        """
        self._made: list[dict[str, tuple[str, _Kind]]] = []
        """By scheduler and number of the part: the parameter, and the box."""
        self.untraced: dict[str, str] = {}
        """Tensors that could not be traced, with the reason."""
        self.do_not_follow: list[str] = []
        """Parameters with elements that no published tensor writes."""
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
        if self.untraced:  # they may write these elements
            self.do_not_follow = []
        used = {kind.box.tensor for made in self._made for _, kind in made.values()}
        self.nowhere = {name for name, _ in given} - used - self.untraced.keys()
        """Published tensors that no parameter uses."""
        self.left_out: list[str] = []
        """Parameters that the loader changes after the copy."""
        self._digests: dict[_Kind, int] = {}

    def published(self, given: Iterable[tuple[str, Tensor]]) -> None:
        """Compute the digests of the tensors that were sent. Reads all of them."""
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
        """Return the parameters that differ from the tensors that were sent last.

        Args:
            ranks: checksum of each scheduler.
        """
        found = [name for name, _, _ in self._wrong(ranks)]
        return list(dict.fromkeys(found))

    def rely_on_what_follows(self, before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> None:
        """Compare the first weights. Boxes that changed to other values are computed by the loader and left out from now on.

        Args:
            before, after: checksums of each scheduler around the first weights.
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
        """Return a log line: the parameters that are proved from now on."""
        proved = {name for made in self._made for name, _ in made.values()}
        line = f"each version is proved in {len(proved)} parameters of the model"
        line += f", not in {listed(self.left_out)}, which the loader changes" if self.left_out else ""
        return line + (f", not of {listed(list(self.untraced))}" if self.untraced else "")


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(names[:MAX_NAMES])}{more}"
