"""What a plan says of loaders that fuse, split, transpose and join, and what a proof says of live parameters later.

Small models are in the place of SGLang's. The real engine is in `test_sglang_engine.py` and `test_sglang_scheduler.py`.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncgrpo.engines.sglang import copies as copies_module
from asyncgrpo.engines.sglang import proof as proof_module
from asyncgrpo.engines.sglang.copies import Copies
from asyncgrpo.engines.sglang.proof import PLAN, Box, Held, Proof, left_by, question, rest, state, trace
from asyncgrpo.weights.digest import tensor_digest
from tests.engines.shared import shared

Weights = dict[str, Tensor]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def weights(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Weights:
    noise = torch.Generator().manual_seed(seed)
    shapes = {"q": (8, 12), "k": (4, 12), "norm": (12,), "out": (12, 8), "head": (10, 12)}
    return {name: torch.randn(shape, generator=noise).to(dtype) for name, shape in shapes.items()}


class Rank(nn.Module):
    """One of two processes: rows split and fused, columns split, a norm in each, rows of zeros in the last."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank = rank
        for name, shape in {"qk": (6, 12), "norm": (12,), "out": (12, 4), "head": (6, 12), "scale": (3,)}.items():
            fill = torch.ones if name == "scale" else torch.zeros
            self.register_parameter(name, nn.Parameter(fill(shape, dtype=dtype)))

    def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in given:
                if name == "q":
                    self.qk[:4].copy_(tensor.chunk(2)[self.rank])
                elif name == "k":
                    self.qk[4:].copy_(tensor.narrow(0, 2 * self.rank, 2))
                elif name == "norm":
                    self.norm.copy_(tensor)
                elif name == "out":
                    self.out.copy_(tensor[:, 4 * self.rank : 4 * self.rank + 4])
                elif name == "head":
                    own = tensor[6 * self.rank : 6 * self.rank + 6]
                    self.head[: len(own)].copy_(own)


class Engine:
    """Two processes, as a generator sees them."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, make: type[Rank] = Rank) -> None:
        self.ranks = [make(rank, dtype) for rank in range(2)]
        self.held = [Held(), Held()]

    def asked(self, given: Weights) -> Proof:
        text = question(list(given.items())).removeprefix(PLAN)
        pairs = zip(self.held, self.ranks, strict=True)
        return Proof(list(given.items()), [held.plan(rank, text) for held, rank in pairs])

    def load(self, given: Weights) -> None:
        for rank in self.ranks:
            rank.load_weights(given.items())

    @property
    def checksums(self) -> list[dict[str, str]]:
        return [held.checksum(rank, ()) for held, rank in zip(self.held, self.ranks, strict=True)]

    def first(self, given: Weights) -> Proof:
        """What the engine does with its first weights."""
        proof, before = self.asked(given), self.checksums
        self.load(given)
        proof.published(given.items())
        proof.rely_on_what_follows(before, self.checksums)
        return proof


@dtypes
def test_a_plan_reads_and_writes_nothing_and_names_every_box(dtype):
    rank = Rank(1, dtype)
    parts, untraced, _ = trace(rank, [(name, str(dtype)[6:], tuple(t.shape)) for name, t in weights(dtype).items()])
    assert not untraced and not any(p.any() for name, p in rank.named_parameters() if name != "scale")
    assert [(part.box, part.parameter) for part in parts] == [
        (Box("q", (4, 0), (4, 12)), "qk"),
        (Box("k", (2, 0), (2, 12)), "qk"),
        (Box("norm", (0,), (12,)), "norm"),
        (Box("out", (0, 4), (12, 4)), "out"),
        (Box("head", (6, 0), (4, 12)), "head"),
    ]
    assert {name: left.tolist() for name, left in rest(rank, left_by(rank, parts)).items()} == {
        "head": [0.0] * 24,
        "scale": [1.0] * 3,
    }


def found(proof: Proof, checksums: list[dict[str, str]], given: Weights) -> set[str]:
    """Parameters that the generator finds to be other than sent, and tensors that the learner does."""
    held = np.frombuffer(proof.held(checksums), np.uint64).reshape(-1, 2).tolist()
    sent = [(name, tensor_digest(t, name)) for name, t in given.items()]
    return set(proof.differing(checksums)) | {sent[index][0] for index, digest in held if digest != sent[index][1]}


@dtypes
def test_later_weights_are_proved_and_one_element_that_is_not_theirs_is_named(dtype):
    engine = Engine(dtype)
    proof = engine.first(weights(dtype))
    assert (proof.do_not_follow, proof.left_out, proof.nowhere, proof.untraced) == ([], [], set(), {})
    assert proof.summary() == "each version is proved in 4 parameters of the model"
    for seed in range(1, 4):
        new = weights(dtype, seed)
        engine.load(new)
        proof.published(new.items())
        assert found(proof, engine.checksums, new) == set() and len(proof.held(engine.checksums)) == 5 * 16
        with torch.no_grad():
            engine.ranks[1].qk.view(torch.int32 if dtype == torch.float32 else torch.int16)[0, 3] += 1
        assert found(proof, engine.checksums, new) == {"q"}
    engine.load(new)
    good = engine.ranks[0].qk.detach().clone()
    for changed in (good[[1, 0, 2, 3, 4, 5]], good.roll(1, 1), engine.ranks[1].qk.detach()):
        engine.ranks[0].qk.data.copy_(changed)
        assert "q" in found(proof, engine.checksums, new), "rows changed places, or are those of another process"
    engine.load(new)
    engine.ranks[1].norm.data[0] += 1
    assert proof.differing(engine.checksums) == ["norm"], "each process has all of it"
    engine, given = Engine(torch.bfloat16), weights(torch.float32)
    proof = engine.first(given)
    assert proof.differing(engine.checksums) == [] == proof.left_out, "compared with what is rounded to its dtype"
    engine.ranks[1].qk.data[0, 3] += 1
    assert proof.held(engine.checksums) == b"" and proof.differing(engine.checksums) == ["qk"]


def test_boxes_are_whole_if_they_are_the_cells_of_a_grid():
    halves = [Box("w", (0, 0), (2, 6)), Box("w", (2, 0), (1, 6))]
    assert Box.are_whole(halves, (3, 6)) and Box.are_whole(halves * 2, (3, 6)) and Box.are_whole([Box("w", (), ())], ())
    quarters = [Box("w", (row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
    assert Box.are_whole(quarters, (4, 6)) and not Box.are_whole(quarters[:3], (4, 6))
    for boxes in ([halves[0]], [halves[0], Box("w", (1, 0), (1, 6))], [*halves, Box("w", (0, 0), (3, 6))]):
        assert not Box.are_whole(boxes, (3, 6))


def test_tensors_that_a_loader_ignores_and_parameters_that_are_not_written_are_named():
    given = weights()
    given["unknown"] = given.pop("k")
    engine = Engine()
    for rank in engine.ranks:
        rank.qk.data.copy_(torch.randn(6, 12))
    proof = engine.first(given)
    assert proof.nowhere == {"unknown"} and proof.do_not_follow == ["qk"], "a scale of ones is nobody's"


def test_engines_whose_buffers_differ_have_other_checksums_unless_they_are_left_out():
    one, other = Rank(0), Rank(0)
    for rank, number in ((one, 1.0), (other, 2.0)):
        rank.register_buffer("derived", torch.full((4,), number))
    assert Held().checksum(one, ()) != Held().checksum(other, ())
    assert Held().checksum(one, ["derived"]) == Held().checksum(other, ["derived"])
    held = Held()
    told = held.plan(one, question(list(weights().items())).removeprefix(PLAN))
    assert told["others"] == "[]" and "derived" in held.checksum(one, ())


class Skips(Rank):
    """Its loader takes the tensor of queries only without elements."""

    def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, t) for name, t in given if name != "q" or type(t) is not Tensor)


class Computes(Rank):
    """Its loader changes the norm after it has written it."""

    def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(given)
        if self.norm.any():
            self.norm.data += 1


class Keeps(Rank):
    """Its loader keeps a copy of the norm in memory that is no parameter."""

    def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(given)
        self.kept = [torch.empty(12).copy_(given["norm"])]
        super().load_weights(given.items())


class Derives(Rank):
    """Its loader computes a tensor from a parameter, which is no parameter."""

    twice = torch.zeros(())

    def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(given)
        self.twice = 2 * self.norm.detach()


class DerivesAgain(Derives):
    """SGLang calls its method after writes without the loader."""

    def post_load_weights(self) -> None: ...


class Reads(Rank):
    """Its loader looks at what it loads."""

    def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(given)
        if "norm" in given and given["norm"].sum() == 0:
            raise AssertionError
        super().load_weights(given.items())


def test_what_a_loader_skips_changes_or_reads_is_named_and_the_rest_is_proved():
    assert Engine(make=Skips).first(weights()).do_not_follow == ["qk"]
    engine = Engine(make=Computes)
    proof = engine.first(weights())
    assert (proof.left_out, proof.do_not_follow, proof.differing(engine.checksums)) == (["norm"], [], [])
    assert "not in norm, which the loader changes" in proof.summary()
    proof = Engine(make=Reads).first(weights())
    assert list(proof.untraced) == ["norm"] and "is read by aten.sum" in proof.untraced["norm"]
    assert proof.summary() == "each version is proved in 3 parameters of the model, not of norm"


ODD = {"a": (8, 6), "e": (2, 8, 6), "h": (12, 5), "f": (4, 10), "x": (3, 6), "y": (4, 6), "n": ()}


class Odd(nn.Module):
    """Its loader works in threads, transposes, splits and merges dimensions, and joins tensors."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"a": (8, 6), "e": (2, 6, 8), "h": (4, 3, 5), "f": (20,), "j": (5, 6), "n": ()}.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
        joined = {}
        with ThreadPoolExecutor() as pool, torch.no_grad():
            for name, tensor in given:
                if name == "a":
                    pool.submit(self.a.data.narrow(0, 0, 4).copy_, tensor[4:]).result()
                    self.a.data[4:].copy_(tensor[:4])
                elif name == "e":
                    self.e.data.copy_(tensor.transpose(1, 2))
                elif name == "h":
                    self.h.data.copy_(tensor.view(4, 3, 5))
                elif name == "f":
                    self.f.data.copy_(tensor[1:3].reshape(-1))
                elif name == "n":
                    self.n.data.copy_(tensor)
                else:
                    joined[name] = tensor
            self.j.data.copy_(torch.cat([joined["x"], joined["y"]], 0)[1:6])


def copied(model: nn.Module, given: Weights) -> Copies:
    """Have a model copy these tensors by the plan of its loader."""
    held, tensors = Held(), shared(given)
    held.plan(model, question(tensors).removeprefix(PLAN))
    copies = Copies(held.parts, held.published)
    parameters = state(model)
    for name in copies.write(parameters, tensors.arenas, tensors.slot):
        held.follow(name, parameters[name])
    return copies


@pytest.mark.parametrize("most", [0, 2**30])
def test_copies_by_the_plan_are_those_of_the_loader(monkeypatch, most):
    """Columns and transposed views are taken of the whole tensor, which a GPU gets, but of the largest."""
    monkeypatch.setattr(copies_module, "MOST_UPLOADED", most)
    odd = {name: torch.randn(shape) for name, shape in ODD.items()}
    experts = {f"{n // 6}.{n // 2 % 3}.{n % 2}": torch.randn(4, 6) for n in range(12)} | {"norm": torch.randn(6)}
    for make, given, scattered in (
        (Odd, odd, ["e"]),
        (lambda: Rank(0, torch.float32), weights(torch.bfloat16), ["out"]),
        (lambda: Rank(1), weights(), ["out"]),
        (Experts, experts, []),
    ):
        loaded, ours = make(), make()
        loaded.load_weights(given.items())
        assert list(copied(ours, given)._scattered) == scattered
        for (name, parameter), (_, same) in zip(loaded.named_parameters(), ours.named_parameters(), strict=True):
            assert torch.equal(same, parameter), name


def test_copies_that_follow_each_other_are_one():
    given = {f"{n // 6}.{n // 2 % 3}.{n % 2}": torch.randn(4, 8) for n in range(12)} | {"norm": torch.randn(8)}
    assert [run.parameter for run in copied(Experts(width=8), given)._runs] == ["layers.0", "layers.1", "norm"]


def test_a_parameter_on_a_gpu_is_digested_beside_the_copies_of_others(monkeypatch):
    """With a fake of CUDA's streams: an event has what is written so far, and a digest is of the next checksum only."""
    model, held, given = Rank(0), Held(), weights()
    parameters, waited, calls, made = state(model), list[Weights](), list[str](), list[object]()

    class Stream:
        def __init__(self) -> None:
            made.append(self)

        def record_event(self) -> Weights:
            assert calls == ["enter"], "copies have a stream of their own"
            return {name: tensor.clone() for name, tensor in parameters.items()}

    @contextmanager
    def stream(of: Stream) -> Iterator[None]:
        calls.append("enter")
        yield
        calls.append("exit")

    current = SimpleNamespace(wait_event=waited.append)
    streams = SimpleNamespace(Stream=Stream, stream=stream, current_stream=lambda: current)
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    monkeypatch.setattr(proof_module, "ON_GPU", ("cpu",))
    held.plan(model, question(list(given.items())).removeprefix(PLAN))
    tensors = shared(given)
    names, copies = [], Copies(held.parts, held.published)
    for name in copies.write(parameters, tensors.arenas, tensors.slot):
        assert calls == ["enter", "exit"] and torch.equal(waited[-1][name], parameters[name])
        held.follow(name, parameters[name])
        names.append(name)
    assert names == ["qk", "norm", "head", "out"]
    calls.clear()
    assert list(copies.write(parameters, tensors.arenas, tensors.slot)) == names
    assert len(made) == 1, "memory is kept for each stream"
    expected = Held()
    expected.plan(model, question(list(given.items())).removeprefix(PLAN))
    before = expected.checksum(model, ())
    parameters["norm"].data[0] += 1
    assert held.checksum(model, ()) == before != held.checksum(model, ()) == expected.checksum(model, ())


def test_weights_are_copied_without_the_loader_only_if_it_does_nothing_else():
    given = list(weights().items())
    proofs = [Engine(make=make).first(weights()) for make in (Rank, DerivesAgain)]
    assert all(proof.may_copy(given) and not proof.may_copy(given[::-1]) for proof in proofs), (
        "in the order of the plan"
    )
    for make in (Skips, Computes, Reads, Keeps, Derives):
        assert not Engine(make=make).first(weights()).may_copy(given)


class Experts(nn.Module):
    """Two layers of three experts, whose halves are fused, and a norm."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(3, 8, width) for _ in range(2))
        self.norm = nn.Parameter(torch.zeros(width))

    def load_weights(self, given: Iterable[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in given:
                if name == "norm":
                    self.norm.copy_(tensor)
                else:
                    layer, expert, half = map(int, name.split("."))
                    self.layers[layer][expert, 4 * half : 4 * half + 4].copy_(tensor)


def test_experts_are_digested_together_and_alike(monkeypatch):
    """One by one, a GPU would start ten kernels for each of 18,432 in Qwen3-30B-A3B, while its engine is paused."""
    noise, alone = torch.Generator().manual_seed(0), list[str]()
    given = {f"{n // 6}.{n // 2 % 3}.{n % 2}": torch.randn(4, 6, generator=noise) for n in range(12)}
    given["norm"] = torch.randn(6, generator=noise)
    model, text = Experts(), question(list(given.items())).removeprefix(PLAN)
    with monkeypatch.context() as patch:
        patch.setattr(proof_module, "MOST_STACKED", {})
        (held := Held()).plan(model, text)
    model.load_weights(given.items())
    one_by_one = held.checksum(model, ())
    held = Held()
    proof = Proof(list(given.items()), [held.plan(model, text)])
    proof.published(given.items())
    of_box = proof_module.box_digest
    monkeypatch.setattr(
        proof_module, "box_digest", lambda values, name, *where: alone.append(name) or of_box(values, name, *where)
    )
    assert held.checksum(model, ()) == one_by_one and proof.differing([one_by_one]) == []
    assert alone == ["norm"]
    with torch.no_grad():
        model.layers[1][2, 5, 0] += 1
    assert proof.differing([held.checksum(model, ())]) == ["layers.1"]
