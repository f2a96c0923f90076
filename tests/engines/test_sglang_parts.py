"""What tags say of parameters, and which parameters differ later, with models of a few parameters in the place of SGLang's. The
real engine is in `test_sglang_engine.py`."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from asyncgrpo.engines.sglang import parts
from asyncgrpo.engines.sglang.parts import Parts, Tags, describe, listed, proof, seen
from asyncgrpo.weights.sums import TILE_BYTES

Weights = dict[str, Tensor]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def weights(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Weights:
    noise = torch.Generator().manual_seed(seed)
    shapes = {"q": (8, 12), "k": (4, 12), "norm": (12,), "out": (12, 8), "head": (10, 12)}
    return {name: torch.randn(shape, generator=noise).to(dtype) for name, shape in shapes.items()}


def ranks_of(given: Weights) -> list[Weights]:
    """Two processes: rows split and fused, columns split, a norm in each, rows of zeros in the last."""
    return [
        {
            "qk": torch.cat([given["q"].chunk(2)[rank], given["k"].chunk(2)[rank]]),
            "norm": given["norm"].clone(),
            "out": given["out"].chunk(2, dim=1)[rank].clone(),
            "head": torch.nn.functional.pad(given["head"], (0, 0, 0, 2)).chunk(2)[rank].clone(),
        }
        for rank in range(2)
    ]


def proofs(ranks: Iterable[Weights]) -> list[dict[str, str]]:
    return [{name: proof(tensor) for name, tensor in rank.items()} for rank in ranks]


def found_by(load: Callable[[Weights], list[Weights]], given: Weights) -> Parts:
    """What an engine does with its first weights."""
    tags = Tags(list(given.items()))

    def said(written: Iterable[tuple[str, Tensor]]) -> list[dict[str, str]]:
        return [{name: describe(t, tags.kind) for name, t in rank.items()} for rank in load(dict(written))]

    passes = [seen(said(tags.constants(number))) for number in tags.passes]
    found = Parts(tags, passes, seen(said(tags.negatives())))
    for written in (dict(tags.negatives()), given):
        found.published(written.items(), partial=False)
        found.rely_on_what_is_true(proofs(load(written)))
    return found


@dtypes
def test_parameters_over_two_processes_are_made_of_whole_tensors(dtype):
    found = found_by(ranks_of, weights(dtype))
    assert {name: made.times for name, made in found.made.items()} == {
        "qk": {"q": 1, "k": 1},
        "norm": {"norm": 2},
        "out": {"out": 1},
        "head": {"head": 1},
    }
    assert (found.do_not_follow, found.nowhere) == ([], set())
    assert found.summary() == "each version is proved in 4 of the 4 parameters of the model"


@dtypes
def test_later_weights_are_proved_and_one_element_that_is_not_theirs_is_named(dtype):
    found = found_by(ranks_of, weights(dtype))
    for seed in range(1, 4):
        new = weights(dtype, seed)
        found.published(new.items(), partial=False)
        there = ranks_of(new)
        assert found.differing(proofs(there)) == []
        there[1]["qk"][0, 3] += 0.5
        assert found.differing(proofs(there)) == ["qk"]
    found.published([("q", weights(dtype)["q"])], partial=True)
    assert found.differing(proofs(ranks_of(new | {"q": weights(dtype)["q"]}))) == []
    assert found.differing(proofs(ranks_of(new))) == ["qk"]
    found.published([(name, tensor) for name, tensor in new.items() if name != "out"], partial=False)
    assert found.differing(proofs(ranks_of(new))) == ["out"], "nothing was said of it"


def test_a_parameter_of_another_dtype_is_compared_with_what_is_rounded_to_it():
    def load(given: Weights) -> list[Weights]:
        return [{"q": given["q"].to(torch.bfloat16), "norm": given["norm"].double().float()}]

    found = found_by(load, weights(torch.float32))
    assert found.made.keys() == {"q", "norm"} and found.made["q"].dtype == torch.bfloat16
    assert found.nowhere == {"k", "out", "head"}
    found = found_by(lambda given: [{"q": given["q"].float()}], weights(torch.bfloat16))
    assert found.made.keys() == {"q"}


def test_what_is_not_made_of_whole_words_is_left_out_even_if_the_first_weights_hide_it():
    """Biases that are zero, or norms of ones: any cut of them has the same sum."""
    first = {name: torch.ones(6, dtype=torch.bfloat16) for name in ("one", "other")}

    def load(given: Weights) -> list[Weights]:
        return [{"fused": torch.cat([given["one"], given["other"]]), "plain": given["one"] * 1}]

    found = found_by(load, first)
    assert found.made.keys() == {"plain"} and found.do_not_follow == []
    assert found.summary() == "each version is proved in 1 of the 2 parameters of the model, not in fused"


def test_what_is_computed_on_the_way_is_left_out_and_follows():
    def load(given: Weights) -> list[Weights]:
        return [{"scaled": given["q"] * 0.37, "half": given["k"][:3].clone(), "added": given["q"] + given["q"]}]

    found = found_by(load, weights())
    assert not found.made and found.do_not_follow == []
    assert found.nowhere >= {"norm", "out", "head"}


@dtypes
def test_elements_that_are_not_written_name_their_parameter(dtype):
    old = weights(dtype, seed=9)

    def load(given: Weights) -> list[Weights]:
        first, second = ranks_of(given)
        second["qk"][-1] = old["k"][-1]
        return [first | {"old": -old["q"].abs(), "ones": torch.ones(8)}, second]

    found = found_by(load, weights(dtype))
    assert found.do_not_follow == ["qk", "old"], "ones may be a scale that no checkpoint has"
    assert found.made.keys() == {"norm", "out", "head"}


def test_more_tensors_than_one_pass_tells_apart(monkeypatch):
    monkeypatch.setitem(parts._NORMAL, torch.bfloat16, (0x0080, 0x0083))
    tags = Tags(list(weights().items()))
    assert len(tags.passes) == 3
    test_parameters_over_two_processes_are_made_of_whole_tensors(torch.bfloat16)


def test_integers_and_numbers_of_one_byte_are_written_as_they_are():
    given = [("count", torch.arange(3)), ("small", torch.ones(3).to(torch.float8_e4m3fn)), ("q", torch.ones(3))]
    tags = Tags(given)
    for written in (dict(tags.constants(0)), dict(tags.negatives())):
        assert written["count"] is given[0][1] and written["small"] is given[1][1]
        assert not torch.equal(written["q"], given[2][1])


def test_a_long_list_of_names_is_cut():
    assert listed(["a", "b"]) == "a, b"
    assert listed([f"w{i}" for i in range(23)]).endswith("w19 and 3 more")


def test_engines_whose_parameter_has_its_tiles_in_another_order_differ():
    tiles = torch.randn(4, TILE_BYTES // 4)
    one, other = proof(tiles), proof(tiles[[0, 2, 1, 3]])
    assert one[16:] == other[16:] and one[:16] != other[:16]
