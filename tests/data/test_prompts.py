"""The order of prompts over epochs, failures and restarts, and the shares of several sources in it."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncgrpo.data.order import places
from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.errors import CheckpointError
from asyncgrpo.types import Prompt
from tests.data.test_curriculum import some_prompts


def take(source: PromptSource, count: int) -> list[int]:
    return [item[0] for item in (source.next() for _ in range(count)) if item is not None]


def test_the_order_of_a_seed_never_changes():
    source = PromptSource(some_prompts(10), seed=0, shuffle=True, epochs=None)
    assert [int(source.next()[1].prompt_id.removeprefix("train/")) for _ in range(20)] == GOLDEN_ORDER


GOLDEN_ORDER = [0, 8, 9, 3, 7, 5, 1, 2, 6, 4, 3, 7, 4, 2, 9, 8, 1, 6, 5, 0]


def test_an_isolated_prompt_is_issued_only_to_a_caller_that_asks_for_it():
    source = PromptSource(some_prompts(3), seed=0, shuffle=False, epochs=1)
    take(source, 3)
    source.isolate(2)
    source.isolate(0)
    source.done(1)
    assert source.next() is None and source.next_prompt_index is not None and not source.is_exhausted
    assert (source.next_isolated_index, source.next_prompt_index) == (0, 0)
    assert [source.next_isolated()[0] for _ in range(2)] == [0, 2] and source.next_isolated() is None
    source.isolate(2)
    restarted = PromptSource(some_prompts(3), seed=0, shuffle=False, epochs=1)
    restarted.restore(source.state())
    assert take(restarted, 3) == [0, 2], "a restart knows nothing of it"


def test_a_restored_run_may_have_more_epochs():
    short = PromptSource(some_prompts(2), seed=0, shuffle=True, epochs=1)
    for prompt_index in take(short, 2):
        short.done(prompt_index)
    longer = PromptSource(some_prompts(2), seed=0, shuffle=True, epochs=2)
    longer.restore(short.state())
    assert take(longer, 3) == [2, 3]


ORDER = {"prompts": some_prompts(4), "seed": 0, "shuffle": True, "weights": (1, 3), "sizes": (2, 2), "epochs": 1}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"prompts": some_prompts(5), "sizes": (2, 3)}, "prompts in data.train was 4 and is now 5"),
        ({"prompts": some_prompts(5)[1:]}, "fingerprint of data.train"),
        ({"seed": 1}, "run.seed was 0 and is now 1"),
        ({"shuffle": False}, "data.shuffle was True and is now False"),
        ({"weights": (1, 1)}, r"data.weights was \(1, 3\) and is now \(1, 1\)"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(other, said):
    with pytest.raises(CheckpointError, match=said):
        PromptSource(**ORDER | other).restore(PromptSource(**ORDER).state())


def mixed(sizes, weights, *, seed=0, shuffle=True, epochs=None) -> PromptSource:
    rows = [(source, row) for source, size in enumerate(sizes) for row in range(size)]
    prompts = [Prompt(prompt_id=f"{source}/{row}", token_ids=(row,)) for source, row in rows]
    return PromptSource(prompts, seed=seed, shuffle=shuffle, epochs=epochs, weights=weights, sizes=sizes)


def order(source: PromptSource, count: int) -> list[str]:
    return [source.prompt(index).prompt_id for index in range(count)]


SOURCES = st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.0])), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SOURCES, st.integers(0, 5), st.booleans())
def test_a_source_issues_each_of_its_prompts_once_a_round_and_has_its_share_of_every_stretch(sources, seed, shuffle):
    sizes, weights = zip(*sources, strict=True)
    total, shares = sum(sizes), places(sum(sizes), weights)
    assert sum(shares) == total and min(shares) >= 1
    issued = order(mixed(sizes, weights, seed=seed, shuffle=shuffle), 4 * total)
    for number, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        of_source = [prompt_id for prompt_id in issued if prompt_id.startswith(f"{number}/")]
        assert len(of_source) == 4 * share
        for start in range(0, len(of_source) - size + 1, size):
            assert len(set(of_source[start : start + size])) == size, "a prompt came twice in one round"
        for begin in range(0, len(issued) - 20, 7):
            stretch = sum(prompt_id.startswith(f"{number}/") for prompt_id in issued[begin : begin + 20])
            assert abs(stretch - 20 * share / total) <= max(2, len(sizes))


def test_shares_follow_the_weights_and_not_the_sizes():
    count = Counter(prompt_id[0] for prompt_id in order(mixed((900, 100), (1.0, 3.0)), 1000))
    assert count == {"0": 250, "1": 750}
    assert places(10, (1e-6, 1.0)) == (1, 9), "a source is never left out"
    assert places(7, (1.0, 1.0, 1.0)) == (3, 2, 2)


def test_the_seed_decides_the_order_of_every_round_and_of_each_source():
    assert order(mixed((8, 8), (1, 1), seed=3), 16) != order(mixed((8, 8), (1, 1), seed=4), 16)
    rounds, other = ([p[2:] for p in order(mixed((8, 8), (1, 1)), 32) if p[0] == source] for source in "01")
    assert rounds[:8] != rounds[8:] and rounds != other
    plain = order(mixed((4, 4), (1, 1), shuffle=False), 16)
    assert [p for p in plain if p[0] == "1"] == [f"1/{row}" for row in range(4)] * 2
