"""Proof that an SGLang model holds the weights that were sent last, element by element.

Each scheduler reports once which boxes of the published tensors its parameters consist of. From then on its checksum has a
digest of each box of the live parameters. Those of the boxes of a tensor add up to the digest of the tensor, and the learner
compares that with what it sent. If the boxes are not the whole tensor, or rounded to another dtype, the generator compares them
with digests of the sent tensor. Elements outside all boxes (padding, scales, values that a loader computes) are compared between
engines only. A parameter with non-constant elements there does not follow the weights, nor does a box that the first weights
leave unchanged.

The plan is which elements of which published tensor each parameter holds. `load_weights` runs once with tensors that have no
elements (`Source`). A slice of one is a view whose strides give its place in the published tensor. A copy of a view into a
parameter is recorded as a `Part` and not executed, so no weight is read or written. They are tensor subclasses and not a
torch mode, because some loaders copy in threads of their own.
"""

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from asyncgrpo.weights.digest import box_digest, box_digests, spread
from asyncgrpo.weights.publication import listed

# -- the plan: traced in the model's own loader ------------------------------------------------------------------------

Shape = tuple[int, ...]
Published = tuple[str, str, Shape]
"""Name, dtype and shape of a published tensor."""

_SAME_ELEMENTS = frozenset({"aten.detach", "aten.alias", "aten.lift_fresh", "aten.clone", "aten._to_copy"})


@dataclass(frozen=True)
class Box:
    """A rectangle of a published tensor."""

    tensor: str
    start: Shape
    size: Shape

    def of(self, tensor: Tensor) -> Tensor:
        """Return its elements."""
        return tensor[tuple(slice(first, first + length) for first, length in zip(self.start, self.size, strict=True))]

    @staticmethod
    def are_whole(boxes: Iterable["Box"], shape: Shape) -> bool:
        """Return True if these boxes are the cells of a grid over a tensor of this shape."""
        cells, sides = set(boxes), list[set[tuple[int, int]]]()
        for dim, length in enumerate(shape):
            sides.append({(box.start[dim], box.size[dim]) for box in cells})
            end = 0
            for start, size in sorted(sides[-1]):
                if start != end:
                    return False
                end += size
            if end != length:
                return False
        return len(cells) == prod(map(len, sides))

    def first(self, shape: Shape) -> int:
        """Return the place of its first element in the contiguous tensor, of this shape."""
        place = 0
        for length, start in zip(shape, self.start, strict=True):
            place = place * length + start
        return place


@dataclass(frozen=True)
class Part:
    """Elements of a parameter that hold a box of a published tensor."""

    box: Box
    parameter: str
    offset: int
    """Offset of the first element in the parameter's memory, elements."""
    strides: Shape
    """Strides in the parameter along each dimension of the box, elements."""

    def of(self, parameter: Tensor) -> Tensor:
        """Return its elements in the shape of the box."""
        return parameter.detach().as_strided(self.box.size, self.strides, self.offset)

    def is_one_copy(self, shape: Shape) -> bool:
        """Return True if its bytes lie one after the other in the published tensor, of this shape, and in the parameter."""
        length = step = 1
        for wide, size, stride in zip(reversed(shape), reversed(self.box.size), reversed(self.strides), strict=True):
            if size > 1 and (step != length or stride != length):
                return False
            length, step = length * size, step * wide
        return True


class Untraceable(Exception):
    """The loader needs elements of a tensor, or takes a selection that is not a rectangle."""


def trace(model: nn.Module, published: Iterable[Published]) -> tuple[list[Part], dict[str, str], bool]:
    """Have a model load these tensors without elements.

    Returns:
        The parts of its parameters, the tensors that cannot be traced with the reason of each, and whether the loader wrote to
        memory that is neither of parameters nor of buffers.
    """
    infos, tracer, before = list(published), _Tracer(model), unregistered(model)
    try:
        with torch.no_grad():
            tracer.load(infos)
        return tracer.parts, {}, tracer.copied_elsewhere or unregistered(model) != before
    except Exception as error:
        if len(infos) == 1:
            return [], {infos[0][0]: f"{type(error).__name__}: {error}".splitlines()[0][:200]}, False
    parts, untraced, elsewhere = list[Part](), dict[str, str](), False
    for info in infos:  # one by one, to find those that cannot be traced
        some, problem, also = trace(model, [info])
        parts += some
        untraced |= problem
        elsewhere |= also
    return parts, untraced, elsewhere


def state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def unregistered(model: nn.Module) -> set[tuple[str, str, int, int]]:
    """Return the tensors of a model that are neither parameters nor buffers; equal sets: none was replaced or written."""
    if hasattr(model, "post_load_weights"):  # which derives them
        return set()
    return {
        (name, key, id(value), 0 if value.is_inference() else value._version)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }


ON_GPU = ("cuda",)
"""Devices that digest a parameter beside the copies of others."""
MOST_STACKED = {"cpu": 2**14, "cuda": 2**24}
"""Elements of the largest box that is digested together with those of its size, by device."""


def stacks(parts: Sequence[Part], most: int) -> dict[str, list[list[int]]]:
    """Return the numbers of the parts of each parameter, those together that are one view: evenly spaced matrices, as the experts
    of a layer, if they have at most so many elements."""
    alike: dict[Any, list[int]] = {}
    for number, part in enumerate(parts):
        alone = number if len(part.box.size) != 2 or prod(part.box.size) > most else None
        alike.setdefault((part.parameter, part.box.start, part.box.size, part.strides, alone), []).append(number)
    found: dict[str, list[list[int]]] = {}
    for (parameter, *_), numbers in alike.items():
        numbers.sort(key=lambda number: parts[number].offset)
        steps = {parts[after].offset - parts[number].offset for number, after in pairwise(numbers)}
        found.setdefault(parameter, []).extend([numbers] if len(steps) <= 1 else [[number] for number in numbers])
    return found


Left = dict[str, Tensor | None]
"""Elements outside all parts, by parameter: flat indices [n]; None: all elements."""


def left_by(model: nn.Module, parts: Iterable[Part]) -> Left:
    """Return the elements outside all parts, of parameters and buffers that have any."""
    by_parameter: dict[str, list[Part]] = {}
    for part in parts:
        by_parameter.setdefault(part.parameter, []).append(part)
    left: Left = {}
    for name, parameter in state(model).items():
        own = by_parameter.get(name)
        if own is None:
            left[name] = None
        elif sum(prod(part.box.size) for part in own) != parameter.numel():
            is_left = torch.ones_like(parameter, dtype=torch.bool)
            for part in own:
                part.of(is_left).fill_(False)
            left[name] = is_left.reshape(-1).nonzero()[:, 0]
    return left


def rest(model: nn.Module, left: Left) -> dict[str, Tensor]:
    """Return the elements of `left`, [n] per parameter."""
    flat = {name: p.detach().reshape(-1) for name, p in state(model).items() if name in left}
    return {name: flat[name] if places is None else flat[name][places] for name, places in left.items()}


# -- tensors without elements ------------------------------------------------------------------------------------------


class Source(Tensor):
    """A published tensor or a view of it, as a loader sees it."""

    at: Tensor
    """The same view, on torch's meta device."""
    published: str
    tracer: "_Tracer"

    @staticmethod
    def __new__(cls, at: Tensor, name: str, tracer: "_Tracer") -> "Source":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            at.shape,
            strides=at.stride(),
            storage_offset=at.storage_offset(),
            dtype=at.dtype,
            device=tracer.device,
        )
        made.at, made.published, made.tracer = at, name, tracer
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Source)]
        first, operation = sources[0], str(func).rpartition(".")[0]

        def like(at: Tensor) -> Source:
            return Source(at, first.published, first.tracer)

        if operation == "aten.copy_" and not isinstance(args[0], Source):
            first.tracer.note(args[0], first)
            return args[0]
        if operation in _SAME_ELEMENTS:
            return like(first.at)
        if func.is_view and len(sources) == 1:
            viewed = func(*(a.at if isinstance(a, Source) else a for a in args), **(kwargs or {}))
            return [like(one) for one in viewed] if isinstance(viewed, list | tuple) else like(viewed)
        if operation == "aten.cat" and len(sources) == len(args[0]):
            return first.tracer.joined(sources, args[1] if len(args) > 1 else 0)
        raise Untraceable(f"{first.published} is read by {operation}")


class _Tracer:
    """Notes the copies that a loader asks for. Any thread may."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        held = reversed(state(model).items())  # a parameter comes before a buffer that shares its memory
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in held}
        self.device = next(model.parameters()).device
        self._shapes: dict[str, Shape] = {}
        self._joined: dict[str, list[tuple[Box, Box]]] = {}
        """Of each tensor that a loader joined: boxes of it, and those of published tensors that they are."""
        self._noted: list[Part] = []
        self.copied_elsewhere = False
        self._lock = threading.Lock()

    def load(self, infos: Iterable[Published]) -> None:
        self._model.load_weights([(name, self._source(name, dtype, shape)) for name, dtype, shape in infos])  # type: ignore[operator]

    def _source(self, name: str, dtype: str, shape: Shape) -> Source:
        self._shapes[name] = tuple(shape)
        return Source(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), name, self)

    def note(self, target: Tensor, source: Source) -> None:
        """Note a copy of `source` into `target`, a view of a parameter or a buffer."""
        parameter = self._names.get(target.untyped_storage().data_ptr())
        if parameter is None:
            self.copied_elsewhere = True
            return
        view = source.at.expand(target.shape)
        box, strides = _box(source.published, self._shapes[source.published], view, target.stride())
        with self._lock:
            self._noted.append(Part(box, parameter, int(target.storage_offset()), strides))

    def joined(self, sources: Sequence[Source], dim: int) -> Source:
        """Return the result of `cat`: an unpublished tensor, made of boxes of published ones."""
        at = torch.cat([torch.empty(source.shape, device="meta") for source in sources], dim).to(sources[0].dtype)
        name, first = "+".join(source.published for source in sources), 0
        boxes = []
        for source in sources:
            length = source.shape[dim]
            box, _ = _box(
                source.published, self._shapes[source.published], source.at, at.narrow(dim, first, length).stride()
            )
            if box.size != tuple(source.shape):
                raise Untraceable(f"{name}: what is joined are no rectangles")
            start = tuple(first if d == dim else 0 for d in range(at.ndim))
            boxes.append((Box(name, start, box.size), box))
            first += length
        with self._lock:
            self._shapes[name], self._joined[name] = tuple(at.shape), boxes
        return Source(at, name, self)

    @property
    def parts(self) -> list[Part]:
        """What was noted, in boxes of published tensors."""
        return [part for noted in self._noted for part in self._resolved(noted)]

    def _resolved(self, part: Part) -> Iterator[Part]:
        if part.box.tensor not in self._joined:
            yield part
            return
        for joined, box in self._joined[part.box.tensor]:
            start = tuple(map(max, part.box.start, joined.start))
            ends = (map(sum, zip(each.start, each.size, strict=True)) for each in (part.box, joined))
            size = tuple(min(both) - first for first, *both in zip(start, *ends, strict=True))
            if min(size, default=0) <= 0:
                continue
            moved = [first - before for first, before in zip(start, part.box.start, strict=True)]
            place = [at + first - j for at, first, j in zip(box.start, start, joined.start, strict=True)]
            offset = part.offset + sum(step * by for step, by in zip(part.strides, moved, strict=True))
            yield from self._resolved(Part(Box(box.tensor, tuple(place), size), part.parameter, offset, part.strides))


def _box(name: str, shape: Shape, view: Tensor, target: Shape) -> tuple[Box, Shape]:
    """The rectangle that a view of a contiguous tensor is, and the target's stride along each of its dimensions.

    Args:
        shape: of the tensor.
        target: strides of what the view is copied to, along the dimensions of the view.
    """
    runs = _runs(view, target)
    start, size, strides, offset = [], [], [], int(view.storage_offset())
    for step in torch.empty(shape, device="meta").stride():
        first, offset = divmod(offset, step)
        run = next((r for r in runs if r[0] > 1 and r[1] == step), None)
        if run is None:  # one over this dimension and those within it
            over = (r for r in runs if r[0] > 1 and r[1] and step % r[1] == 0 and r[0] * r[1] % step == 0)
            run = next(over, None)
        inner = step // run[1] if run else 1
        start.append(first)
        size.append(run[0] // inner if run else 1)
        strides.append(run[2] * inner if run else 0)
        if run:
            run[0] = inner
    is_inside = all(first + length <= whole for first, length, whole in zip(start, size, shape, strict=True))
    if not is_inside or any(length > 1 for length, _, _ in runs):
        raise Untraceable(f"{name}: a view with strides {view.stride()} is not a rectangle of {shape}")
    return Box(name, tuple(start), tuple(size)), tuple(strides)


def _runs(view: Tensor, target: Shape) -> list[list[int]]:
    """The dimensions of a view as [length, stride, stride in the target]; those that a loader only split are one again."""
    runs: list[list[int]] = []
    for length, step, to in zip(view.shape, view.stride(), target, strict=True):
        if length == 1:
            continue
        if runs and runs[-1][1:] == [length * step, length * to]:
            runs[-1] = [runs[-1][0] * length, step, to]
        else:
            runs.append([length, step, to])
    return runs


Given = Sequence[tuple[str, Tensor]]
"""Published tensors by their names on disk."""

PLAN = "plan "
"""Prefix of a request for the plan; the published tensors follow as JSON."""


# -- in a scheduler ----------------------------------------------------------------------------------------------------


class Held:
    """The parameters of one scheduler. Its replies are texts by name, as those of SGLang's checksums."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.published: list[Published] = []
        self._stacks: dict[str, list[list[int]]] = {}
        self._written: dict[str, dict[str, str]] = {}
        """Digests of the parameters that were digested as they were written, for the next checksum."""
        self._left: Left | None = None
        """Elements outside all parts; None until computed."""
        self._shapes: dict[str, Shape] = {}

    def plan(self, model: nn.Module, asked: str) -> dict[str, str]:
        """Trace the loader. Returns the parts, untraced tensors, and parameters with other elements, as JSON."""
        self.published = [(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(asked)]
        self._shapes = {name: shape for name, _, shape in self.published}
        self.parts, untraced, elsewhere = trace(model, self.published)
        most = MOST_STACKED.get(next(model.parameters()).device.type, 0)
        self._left, self._stacks = left_by(model, self.parts), stacks(self.parts, most)
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state(model).items()}
        made = [
            (part.box.tensor, part.box.start, part.box.size, part.parameter, dtypes[part.parameter])
            for part in self.parts
        ]
        parameters = {name for name, _ in model.named_parameters()}  # buffers may stay unwritten
        left = {name: places for name, places in self._left.items() if name in parameters}
        # Padding is constant, and so are scales that no checkpoint has.
        others = [name for name, values in rest(model, left).items() if not (values == values[0]).all()]
        found = {"parts": made, "untraced": untraced, "others": others, "elsewhere": elsewhere}
        return {name: json.dumps(value) for name, value in found.items()}

    def checksum(self, model: nn.Module, skipped: Iterable[str]) -> dict[str, str]:
        """Return a digest of each part, and of the elements of each parameter and buffer outside all parts."""
        tensors, leave_out = state(model), set(skipped)
        written, digests = self.forget(), dict[str, str]()
        for name in self._stacks:
            digests |= written.get(name) or self._digests(name, tensors[name])
        if self._left is None:
            self._left = left_by(model, [])
        for name, values in rest(model, {n: at for n, at in self._left.items() if n not in leave_out}).items():
            digests[name] = f"{box_digest(values, name, (len(values),), (0,)):016x}"
        return digests

    def follow(self, name: str, parameter: Tensor) -> None:
        """Digest a parameter that was just written, if it is on a GPU: beside the copies of others, which take longer."""
        if parameter.device.type in ON_GPU:
            self._written[name] = self._digests(name, parameter)

    def forget(self) -> dict[str, dict[str, str]]:
        """Forget the digests of `follow`, and return them."""
        written, self._written = self._written, {}
        return written

    def _digests(self, name: str, parameter: Tensor) -> dict[str, str]:
        digests: dict[str, str] = {}
        for numbers in self._stacks[name]:
            some, parameter = [self.parts[number] for number in numbers], parameter.detach()
            box = some[0].box
            if len(some) > 1:
                strides = (some[1].offset - some[0].offset, *some[0].strides)
                values = parameter.as_strided((len(some), *box.size), strides, some[0].offset)
                found = box_digests(values, [part.box.tensor for part in some], (box.start[0], box.start[1]))
            else:
                boxes = [(part.of(parameter), part.box) for part in some]
                found = [box_digest(v, b.tensor, self._shapes[b.tensor], b.start) for v, b in boxes]
            digests |= {str(number): f"{digest:016x}" for number, digest in zip(numbers, found, strict=True)}
        return digests


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
        self._published = {name: (index, tuple(t.shape), t.dtype) for index, (name, t) in enumerate(given)}
        self._made: list[dict[str, tuple[str, _Kind]]] = []
        """By scheduler and number of the part: the parameter, and the box."""
        self.untraced: dict[str, str] = {}
        """Tensors that could not be traced, with the reason."""
        self.do_not_follow: list[str] = []
        """Parameters with elements that no published tensor writes."""
        self._copies_suffice = False
        """True if the copies of the plan are all that the loader does, as the first weights have shown."""
        self._elsewhere = any(json.loads(rank["elsewhere"]) for rank in ranks)
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
        self._whole = set[str]()
        """Tensors whose digests the learner compares. Empty before the first weights, which say which boxes follow."""
        self._digests: dict[_Kind, int] = {}
        """Of the boxes of all other tensors, as sent."""

    def may_copy(self, given: Given) -> bool:
        """True if the copies of the plan do for these tensors what the loader would. Their places follow from their order."""
        return self._copies_suffice and [name for name, _ in given] == list(self._published)

    def published(self, given: Iterable[tuple[str, Tensor]]) -> None:
        """Compute the digests of the sent tensors that the learner does not compare."""
        boxes = self._kinds()
        wanted = ((tensor, kind) for name, tensor in given if name not in self._whole for kind in boxes.get(name, ()))

        def work(each: tuple[Tensor, _Kind]) -> tuple[_Kind, int]:
            tensor, kind = each
            values = kind.box.of(tensor).to(kind.dtype)
            return kind, box_digest(values, kind.box.tensor, tuple(tensor.shape), kind.box.start)

        self._digests = dict(spread(work, wanted))

    def _kinds(self) -> dict[str, set[_Kind]]:
        """Return the boxes of each tensor."""
        kinds: dict[str, set[_Kind]] = {}
        for made in self._made:
            for _, kind in made.values():
                kinds.setdefault(kind.box.tensor, set()).add(kind)
        return kinds

    def held(self, ranks: Sequence[Mapping[str, str]]) -> bytes:
        """Return the digests of the tensors that the learner compares, [n, 2] uint64: index of the tensor, digest.

        Args:
            ranks: checksum of each scheduler.
        """
        digests = {kind: digest for *_, kind, digest in self._found(ranks)}
        sums = Counter[str]()
        for kind, digest in digests.items():
            sums[kind.box.tensor] += digest
        held = [(self._published[name][0], sums[name] % 2**64) for name in self._published if name in self._whole]
        return np.array(held, np.uint64).tobytes()

    def differing(self, ranks: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the parameters that differ from the tensors that were sent last, or between schedulers."""
        return list(dict.fromkeys(name for name, _, _ in self._wrong(ranks)))

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
        self._copies_suffice = not (self.untraced or self.do_not_follow or self.left_out or self._elsewhere)
        for name, kinds in self._kinds().items():
            _, shape, dtype = self._published[name]
            if {kind.dtype for kind in kinds} == {dtype} and Box.are_whole((kind.box for kind in kinds), shape):
                self._whole.add(name)

    def _wrong(self, ranks: Sequence[Mapping[str, str]]) -> Iterable[tuple[str, int, str]]:
        known = dict(self._digests)
        for name, rank, number, kind, digest in self._found(ranks):
            if digest != known.setdefault(kind, digest):
                yield name, rank, number

    def _found(self, ranks: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, int, str, _Kind, int]]:
        """Yield parameter, scheduler, number, box and digest of each part."""
        for rank, made in enumerate(self._made):
            for number, (name, kind) in made.items():
                yield name, rank, number, kind, int(ranks[rank].get(number, "0"), 16)

    def summary(self) -> str:
        """Return a log line: the parameters that are proved from now on."""
        proved = {name for made in self._made for name, _ in made.values()}
        line = f"each version is proved in {len(proved)} parameters of the model"
        line += f", not in {listed(self.left_out)}, which the loader changes" if self.left_out else ""
        return line + (f", not of {listed(list(self.untraced))}" if self.untraced else "")
