"""The order of prompts over epochs, failures and restarts."""

import pytest

from asyncgrpo.data.prompts import PromptSource
from asyncgrpo.errors import CheckpointError
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
    source.restore(source.state())
    assert take(source, 3) == [0, 2], "a restart knows nothing of it"


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
